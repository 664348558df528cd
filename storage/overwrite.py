"""The snapshot that replaces days: pyiceberg's, with a list of manifests that does not grow for ever."""

from collections.abc import Callable

from pyiceberg.manifest import ManifestFile
from pyiceberg.table.update.snapshot import _ManifestMergeManager, _OverwriteFiles

MOST_MANIFESTS = 100
"""So many manifests become one: each is a file to open whenever a read is planned."""
MANIFEST_BYTES = 8 * 1024 * 1024
"""A manifest does not grow beyond this by merging."""


class ReplacedDays(_OverwriteFiles):
    """An overwrite that leaves out manifests without files, and puts many small ones together.

    pyiceberg carries on, in each later snapshot, every manifest that says what was once deleted, and merges none.
    """

    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[ManifestFile], bool]:
        """Makes one for each manifest: it remembers what it looks at, and pyiceberg asks one from several threads.

        A file to replace could be missed so, and the commit was refused as if another writer had been there.
        """
        build = super()._build_manifest_evaluator
        return lambda manifest: build(spec_id)(manifest)

    def _existing_manifests(self) -> list[ManifestFile]:
        return [one for one in super()._existing_manifests() if one.has_added_files() or one.has_existing_files()]

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        return _ManifestMergeManager(MANIFEST_BYTES, MOST_MANIFESTS, True, self).merge_manifests(manifests)

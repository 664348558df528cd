"""The snapshot that replaces days: pyiceberg's, with a bounded list of manifests."""

from collections.abc import Callable

from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.table.update.snapshot import _ManifestMergeManager, _OverwriteFiles

MOST_MANIFESTS = 100
"""This many manifests are merged into one: planning a read opens each of them."""
MANIFEST_BYTES = 8 * 1024 * 1024
"""Merging does not make a manifest larger than this."""


class ReplacedDays(_OverwriteFiles):
    """An overwrite that drops manifests without files and merges small ones.

    pyiceberg carries every manifest of deleted files into all later snapshots and merges none.
    """

    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[ManifestFile], bool]:
        """Makes an evaluator per manifest: evaluators are stateful, and pyiceberg shares one between threads.

        A shared one could miss a file to replace. The commit then failed as if another writer had changed the table.
        """
        build = super()._build_manifest_evaluator
        return lambda manifest: build(spec_id)(manifest)

    def _existing_manifests(self) -> list[ManifestFile]:
        return [one for one in super()._existing_manifests() if one.has_added_files() or one.has_existing_files()]

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        merge = _ManifestMergeManager(MANIFEST_BYTES, MOST_MANIFESTS, True, self).merge_manifests
        rows = [one for one in manifests if one.content == ManifestContent.DATA]
        return merge(rows) + [one for one in manifests if one.content != ManifestContent.DATA]

"""Commits that replace days of a table, the transactions that they are part of, and the files of those that fail."""

import datetime
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import MappingProxyType
from typing import Any

from pyiceberg.exceptions import CommitFailedException, ValidationException
from pyiceberg.expressions.visitors import manifest_evaluator
from pyiceberg.io import FileIO, InputFile, OutputFile
from pyiceberg.manifest import ManifestContent, ManifestFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import SetPropertiesUpdate, TableUpdate

from storage.errors import ConflictError, UnknownCommitError
from storage.snapshot.days import CONTENTS, add_to_properties, to_summary
from storage.snapshot.pyiceberg_private import ManifestMergeManager, OverwriteFiles, keep_updates, table_of

MOST_MANIFESTS = 100
"""This many manifests are merged into one: planning a read opens each of them."""
MANIFEST_BYTES = 8 * 1024 * 1024
"""Merging does not make a manifest larger than this."""


class CachedTransaction(Transaction):
    """A transaction that makes its metadata once for each state of it.

    pyiceberg's own copies all snapshots whenever its metadata is asked for, 16 times a commit. Nothing writes to these
    copies: an update makes new metadata, and a retry loads it.
    """

    def __init__(self, table: Table) -> None:
        super().__init__(table)
        self._made: tuple[TableMetadata, tuple[TableUpdate, ...], TableMetadata] | None = None

    @property
    def table_metadata(self) -> TableMetadata:
        """The table's metadata with the updates so far. To read, not to change."""
        base, updates = self._table.metadata, self._updates
        if not updates:
            return base
        made = self._made
        if made is None or made[0] is not base or made[1] is not updates:
            self._made = made = (base, updates, super().table_metadata)
        return made[2]


class ReplacedDays(OverwriteFiles):
    """An overwrite that drops manifests without files and merges small ones.

    pyiceberg carries every manifest of deleted files into all later snapshots and merges none.
    """

    def _build_manifest_evaluator(self, spec_id: int) -> Callable[[ManifestFile], bool]:
        """Makes an evaluator per manifest: evaluators are stateful, and pyiceberg shares one between threads.

        A shared one could miss a file to replace. The commit then failed as if another writer had changed the table.
        """
        spec, schema, projected = self.spec(spec_id), self.schema(), self.partition_filters[spec_id]
        return lambda manifest: manifest_evaluator(spec, schema, projected, self._case_sensitive)(manifest)

    records: Mapping[str, Mapping[datetime.date, Any]] = MappingProxyType({})
    """What the commit records about days, in the snapshot's summary and in the table's properties."""

    def _commit(self) -> Any:
        """Adds the records. pyiceberg calls it again, on the table's newest state, if another writer came first."""
        transaction = self._transaction
        keep_updates(transaction, lambda one: not isinstance(one, SetPropertiesUpdate) or CONTENTS not in one.updates)
        self.snapshot_properties = to_summary(self.records)
        number = transaction.table_metadata.next_sequence_number()
        updates, requirements = super()._commit()
        properties = add_to_properties(table_of(transaction), self.records, number)
        return (*updates, SetPropertiesUpdate(updates=properties)), requirements

    def _existing_manifests(self) -> list[ManifestFile]:
        return [one for one in super()._existing_manifests() if one.has_added_files() or one.has_existing_files()]

    def _process_manifests(self, manifests: list[ManifestFile]) -> list[ManifestFile]:
        merge = ManifestMergeManager(MANIFEST_BYTES, MOST_MANIFESTS, True, self).merge_manifests
        rows = [one for one in manifests if one.content == ManifestContent.DATA]
        return merge(rows) + [one for one in manifests if one.content != ManifestContent.DATA]


class RecordingIO(FileIO):
    """Records what is written through it, including partial files, so it can be deleted again."""

    def __init__(self, io: FileIO) -> None:
        super().__init__(io.properties)
        self.io = io
        self.written: list[str] = []

    def new_input(self, location: str) -> InputFile:
        return self.io.new_input(location)

    def new_output(self, location: str) -> OutputFile:
        self.written.append(location)
        return self.io.new_output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        self.io.delete(location)

    def discard(self) -> None:
        """Deletes everything written."""
        for location in self.written:
            with suppress(FileNotFoundError):  # announced but never created
                self.io.delete(location)


@contextmanager
def committing(
    table: Table, transaction: Transaction, io: RecordingIO, snapshot_id: int, expected: str
) -> Iterator[None]:
    """Writes files in the block and commits them after it. A change that did not take effect leaves no file.

    If the catalog does not say whether it committed, the files stay, because a snapshot may name them.
    If none does, `vacuum` deletes them.

    Args:
        table: The table that the transaction changes.
        expected: What the error says was expected of other writers.
    Raises:
        ConflictError: If another writer committed first.
        UnknownCommitError: If the commit may or may not have taken effect.
    """
    name = table.name()[-1]
    try:
        yield
    except BaseException:
        io.discard()
        raise
    try:
        transaction.commit_transaction()
    except Exception as error:
        if _has_snapshot(table, snapshot_id):
            return
        if isinstance(error, CommitFailedException | ValidationException):
            io.discard()
            raise ConflictError(
                f"table '{name}'", expected, "a commit of another writer", "Run the command again."
            ) from error
        raise UnknownCommitError(
            f"commit to table '{name}'", "an answer of the catalog", f"{error}".split("\n")[0].rstrip("."),
            "It may still take effect. Run the command again: it skips what was written.",
        ) from error  # fmt: skip


def _has_snapshot(table: Table, snapshot_id: int) -> bool:
    """Tells whether a table is known to have a snapshot. False if the catalog does not answer."""
    try:
        return table.catalog.load_table(table.name()).snapshot_by_id(snapshot_id) is not None
    except Exception:
        return False

"""An SQL catalog that parses each metadata file of a table once, and whose tables share their snapshots."""

from collections import OrderedDict
from typing import Any, NamedTuple, Self

from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io import FileIO
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.snapshots import Snapshot, SnapshotLogEntry

KEPT_STATES = 32
"""States of tables that are remembered. One takes about 5 KB for each of its snapshots."""


class SharedSnapshot(Snapshot):
    """A snapshot that copies of a table's metadata share. Nothing changes a snapshot."""

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __eq__(self, other: object) -> bool:
        """Compares the values. pyiceberg's own equality is that of one class."""
        return isinstance(other, Snapshot) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # as pyiceberg's


class SharedLogEntry(SnapshotLogEntry):
    """An entry of the log of snapshots that copies of a table's metadata share."""

    def __deepcopy__(self, memo: dict[int, Any] | None = None) -> Self:
        return self

    def __eq__(self, other: object) -> bool:
        """As of `SharedSnapshot`."""
        return isinstance(other, SnapshotLogEntry) and self.__dict__ == other.__dict__

    __hash__ = None  # type: ignore[assignment]  # as pyiceberg's


class _State(NamedTuple):
    metadata: TableMetadata
    io: FileIO


class ParsedOnceCatalog(SqlCatalog):
    """pyiceberg's SQL catalog. It asks the database at each call, but parses each metadata file once.

    Such a file never changes, because each commit writes a new one. It lists all snapshots, and pyiceberg copies them
    for each commit. It changes no metadata in place, so tables share it, and copies of it share the snapshots.
    """

    def __init__(self, name: str, **properties: str) -> None:
        super().__init__(name, **properties)
        self._states: OrderedDict[str, _State] = OrderedDict()

    def _convert_orm_to_iceberg(self, orm_table: Any) -> Table:
        """Makes a table of its row in the database."""
        location = orm_table.metadata_location
        if (known := self._states.get(location)) is None:
            table = super()._convert_orm_to_iceberg(orm_table)
            known = self._states[location] = _State(_share_snapshots(table.metadata), table.io)
            while len(self._states) > KEPT_STATES:
                self._states.popitem(last=False)
        identifier = (*self.identifier_to_tuple(orm_table.table_namespace), orm_table.table_name)
        return Table(identifier, known.metadata, location, known.io, self)


def _share_snapshots(metadata: TableMetadata) -> TableMetadata:
    """Lets copies of metadata that was just parsed share its snapshots."""
    for kind, parts in ((SharedSnapshot, metadata.snapshots), (SharedLogEntry, metadata.snapshot_log)):
        for one in parts:
            object.__setattr__(one, "__class__", kind)  # a tenth of the time of making new ones
    return metadata

"""What keeps a table small: snapshots that nobody needs expire, files that no snapshot names are deleted."""

import datetime
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal

import pyarrow.fs as fs
from pydantic import BaseModel
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.update import (
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    ValidatableTableRequirement,
)

from storage.days import remembered
from storage.errors import ConflictError, StorageError
from storage.warehouse import Warehouse

MAIN = "main"


class AssertSameRefs(ValidatableTableRequirement):
    """Nobody has set a tag or a branch meanwhile: with their snapshots they would go unnoticed.

    Catalogs that check commits here look at it; a REST server is not told, for its protocol has no such requirement.
    """

    type: Literal["assert-same-refs"] = "assert-same-refs"
    known: frozenset[tuple[str, int]]

    def validate(self, base_metadata: TableMetadata | None) -> None:  # type: ignore[override]  # pydantic has another
        """See the class."""
        if base_metadata is None or _refs(base_metadata) != self.known:
            raise CommitFailedException("Requirement failed: tags or branches have changed")


class Expired(BaseModel, frozen=True):
    """What an expiry removed."""

    snapshots: int
    kept: int
    """Snapshots that are left."""
    tagged: int
    """Of those, how many are old enough and stay for a tag or a branch alone."""


class Vacuumed(BaseModel, frozen=True):
    """Files that no snapshot names."""

    files: int
    bytes: int
    young_files: int
    """Those that stay, for a writer may be at work with them."""
    dry_run: bool
    """Whether they were counted and not deleted."""


def expire(warehouse: Warehouse, name: str, older_than: datetime.timedelta, dry_run: bool = False) -> Expired:
    """Removes old snapshots from a table's history, and no file; `vacuum` does that later.

    The newest snapshot and those that a tag or a branch names stay. What was written to which day stays known.

    Raises:
        ConflictError: If other writers were faster each time.
    """
    for _ in range(5):
        table = warehouse.table(name)
        limit = (datetime.datetime.now(datetime.UTC) - older_than).timestamp() * 1_000
        old = {snapshot.snapshot_id for snapshot in table.snapshots() if snapshot.timestamp_ms <= limit}
        needed = {reference.snapshot_id for reference in table.refs().values()}
        gone = old - needed
        current = table.current_snapshot()
        result = Expired(
            snapshots=len(gone),
            kept=len(table.snapshots()) - len(gone),
            tagged=len(old & needed - {current.snapshot_id if current else None}),
        )
        if dry_run or not gone:
            return result
        remote = isinstance(table.catalog, RestCatalog)
        local: list[Any] = [] if remote else [AssertSameRefs(known=_refs(table.metadata))]
        try:
            table.catalog.commit_table(
                table,
                (
                    AssertTableUUID(uuid=table.metadata.table_uuid),
                    AssertRefSnapshotId(ref=MAIN, snapshot_id=current.snapshot_id if current else None),
                    *local,
                ),
                (
                    SetPropertiesUpdate(updates=remembered(table)),
                    RemoveSnapshotsUpdate(snapshot_ids=sorted(gone)),
                ),
            )
        except CommitFailedException as error:
            conflict = error
            continue
        return result
    raise ConflictError(
        f"table '{name}'", "a moment without writers", "a faster one each time", "Run the command again."
    ) from conflict


def _refs(metadata: TableMetadata) -> frozenset[tuple[str, int]]:
    return frozenset((name, reference.snapshot_id) for name, reference in metadata.refs.items())


def vacuum(warehouse: Warehouse, name: str, older_than: datetime.timedelta, dry_run: bool = True) -> Vacuumed:
    """Deletes files below the table's location that no snapshot names and that have not changed for some time.

    Files of killed writers, of replaced days whose snapshots expired, and old metadata. A writer's files belong to no
    snapshot until its commit, so `older_than` has to be longer than any write takes.

    Raises:
        StorageError: If the files cannot be listed, one of them lies outside the table's location, or another table of
            the catalog has its files there, too.
    """
    table = warehouse.table(name)
    _refuse_shared_location(warehouse, table)
    limit = datetime.datetime.now(datetime.UTC) - older_than
    found = list(_listed(table))  # before the table is looked at: what is committed meanwhile is named there
    named = _named(warehouse.table(name))
    orphans = [file for file in found if file.path not in named]
    old = [file for file in orphans if file.mtime <= limit]
    result = Vacuumed(
        files=len(old), bytes=sum(file.size for file in old), young_files=len(orphans) - len(old), dry_run=dry_run
    )
    if not dry_run:
        for file in old:
            _delete(table, file.path)
    return result


def _refuse_shared_location(warehouse: Warehouse, table: Table) -> None:
    """A table that was renamed keeps its place; the next of the old name is put there, too."""
    place = f"{table.location().rstrip('/')}/"
    for namespace in warehouse.catalog.list_namespaces():
        for identifier in warehouse.catalog.list_tables(namespace):
            other = warehouse.catalog.load_table(identifier)
            there = f"{other.location().rstrip('/')}/"
            if other.name() != table.name() and (there.startswith(place) or place.startswith(there)):
                raise StorageError(
                    f"location of table '{table.name()[-1]}'", "no files of other tables",
                    f"those of '{'.'.join(other.name())}'", "Copy one of the two to a place of its own.",
                )  # fmt: skip


def _named(table: Table) -> Collection[str]:
    """Paths of all files that the table's metadata and snapshots name."""
    io, metadata = table.io, table.metadata
    paths = {table.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)}
    paths |= {entry.statistics_path for entry in (*metadata.statistics, *metadata.partition_statistics)}
    seen: set[str] = set()
    for snapshot in table.snapshots():
        paths.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                paths |= {
                    entry.data_file.file_path for entry in manifest.fetch_manifest_entry(io, discard_deleted=True)
                }
    return {PyArrowFileIO.parse_location(path)[2] for path in paths | seen}


def _filesystem(table: Table) -> tuple[fs.FileSystem, str]:
    """Where the table's files lie, and the path of its location there."""
    if not isinstance(table.io, PyArrowFileIO):
        raise StorageError(
            f"files of table '{table.name()[-1]}'", "pyiceberg's PyArrowFileIO", type(table.io).__name__,
            "Set the catalog's `py-io-impl` to pyiceberg.io.pyarrow.PyArrowFileIO.",
        )  # fmt: skip
    scheme, host, path = PyArrowFileIO.parse_location(table.location(), table.io.properties)
    return table.io.fs_by_scheme(scheme, host), path.rstrip("/")


def _listed(table: Table) -> Iterator[fs.FileInfo]:
    """Data and metadata files below the table's location."""
    system, root = _filesystem(table)
    real = Path(root).resolve() if isinstance(system, fs.LocalFileSystem) else None
    for folder in ("data", "metadata"):
        for file in system.get_file_info(fs.FileSelector(f"{root}/{folder}", allow_not_found=True, recursive=True)):
            if file.type != fs.FileType.File:
                continue
            if real is not None and not Path(file.path).resolve().is_relative_to(real):
                raise StorageError(
                    f"file '{file.path}'", f"a place below {root}", "a link out of it", "Take the link away."
                )
            yield file


def _delete(table: Table, path: str) -> None:
    system, root = _filesystem(table)
    assert path.startswith(f"{root}/")
    system.delete_file(path)

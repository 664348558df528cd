"""Keeps tables small: expires old snapshots and deletes files that no snapshot references."""

import datetime
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import pyarrow.fs as fs
from pydantic import BaseModel
from pyiceberg.catalog.rest import RestCatalog
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchIcebergTableError,
    NoSuchTableError,
    ValidationError,
)
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table import Table
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.table.refs import SnapshotRefType
from pyiceberg.table.update import (
    AssertRefSnapshotId,
    AssertTableUUID,
    RemoveSnapshotsUpdate,
    SetPropertiesUpdate,
    ValidatableTableRequirement,
)

from storage.errors import ConflictError, StorageError
from storage.snapshot.days import to_properties
from storage.snapshot.files import DATA, SnapshotRef, filesystem_of
from storage.warehouse import Warehouse

MAIN = "main"


class AssertSameRefs(ValidatableTableRequirement):
    """Fails the commit if tags or branches have changed: otherwise their snapshots could expire.

    It also fails if another writer has expired some of the snapshots already. Only catalogs that check commits in this
    process support it. The REST protocol has no such requirement.
    """

    type: Literal["assert-same-refs"] = "assert-same-refs"
    known: frozenset[tuple[str, int]]
    expiring: frozenset[int]

    def validate(self, base_metadata: TableMetadata | None) -> None:  # type: ignore[override]  # pydantic has another
        """Implements the requirement."""
        if base_metadata is None or _refs(base_metadata) != self.known:
            raise CommitFailedException("Requirement failed: tags or branches have changed")
        if not self.expiring <= {snapshot.snapshot_id for snapshot in base_metadata.snapshots}:
            raise CommitFailedException("Requirement failed: another writer has expired snapshots")


class ExpireResult(BaseModel, frozen=True):
    """What `expire` removed."""

    snapshots: int
    kept: int
    """Snapshots that remain."""
    tagged: int
    """Of those, old ones that only a tag or a branch keeps."""


class VacuumResult(BaseModel, frozen=True):
    """Files that no snapshot references."""

    files: int
    bytes: int
    young_files: int
    """Files too young to delete, because a writer may still need them."""
    dry_run: bool
    """Whether files were only counted."""


def find_expired(
    warehouse: Warehouse, name: str, older_than: datetime.timedelta, without: Collection[str] = ()
) -> set[int]:
    """Returns the ids of the snapshots that `expire` would remove.

    Args:
        without: Tags that count as dropped.
    """
    table = warehouse.own(name)
    return _old_snapshots(table, older_than) - _needed_snapshots(table, without)


def _old_snapshots(table: Table, older_than: datetime.timedelta) -> set[int]:
    limit = (datetime.datetime.now(datetime.UTC) - older_than).timestamp() * 1_000
    return {snapshot.snapshot_id for snapshot in table.snapshots() if snapshot.timestamp_ms <= limit}


def _needed_snapshots(table: Table, without: Collection[str] = ()) -> set[int]:
    return {reference.snapshot_id for tag, reference in table.refs().items() if tag not in without}


def expire(warehouse: Warehouse, name: str, older_than: datetime.timedelta, dry_run: bool = False) -> ExpireResult:
    """Removes old snapshots from a table's history. Their files stay until `vacuum`.

    The newest snapshot and those with a tag or a branch stay. What was written to which day stays known.

    Raises:
        ConflictError: If other writers committed first five times.
    """
    for _ in range(5):
        table = warehouse.own(name)
        old, needed = _old_snapshots(table, older_than), _needed_snapshots(table)
        gone = old - needed
        current = table.current_snapshot()
        result = ExpireResult(
            snapshots=len(gone),
            kept=len(table.snapshots()) - len(gone),
            tagged=len(old & needed - {current.snapshot_id if current else None}),
        )
        if dry_run or not gone:
            return result
        names = warehouse.day_names(warehouse.current(name)) if current else {}
        kept = [one.snapshot_id for one in table.snapshots() if one.snapshot_id not in gone]
        properties = to_properties(table, names, gone, partial(_read_names, warehouse, name, kept))
        is_remote = isinstance(table.catalog, RestCatalog)
        local: list[Any] = [] if is_remote else [AssertSameRefs(known=_refs(table.metadata), expiring=frozenset(gone))]
        try:
            table.catalog.commit_table(
                table,
                (
                    AssertTableUUID(uuid=table.metadata.table_uuid),
                    AssertRefSnapshotId(ref=MAIN, snapshot_id=current.snapshot_id if current else None),
                    *local,
                ),
                (
                    SetPropertiesUpdate(updates=properties),
                    RemoveSnapshotsUpdate(snapshot_ids=sorted(gone)),
                ),
            )
        except CommitFailedException as error:
            conflict = error
            continue
        return result
    raise ConflictError(
        f"table '{name}'", "no concurrent commit", "another writer's commit five times", "Run the command again."
    ) from conflict


def _read_names(warehouse: Warehouse, name: str, snapshots: Iterable[int]) -> set[str]:
    """Returns the hashes of the files' names of all days in some snapshots."""
    found: set[str] = set()
    for snapshot in snapshots:
        with suppress(StorageError):  # nobody can read it
            found |= {*warehouse.day_names(SnapshotRef(table=name, snapshot_id=snapshot)).values()}
    return found


def list_tags(warehouse: Warehouse, name: str) -> dict[str, datetime.datetime]:
    """Returns tag -> time of its snapshot, for the tags of a table."""
    table = warehouse.table(name)
    times = {snapshot.snapshot_id: snapshot.timestamp_ms for snapshot in table.snapshots()}
    return {
        tag: datetime.datetime.fromtimestamp(times[reference.snapshot_id] / 1_000, datetime.UTC)
        for tag, reference in table.refs().items()
        if reference.snapshot_ref_type == SnapshotRefType.TAG
    }


def drop_tags(warehouse: Warehouse, name: str, tags: Iterable[str]) -> None:
    """Removes tags from a table, in one commit. Their snapshots stay until they expire."""
    table = warehouse.own(name)
    found = sorted(set(tags) & table.refs().keys())
    if found:
        changes = table.manage_snapshots()
        for tag in found:
            changes = changes.remove_tag(tag)
        changes.commit()


def _refs(metadata: TableMetadata) -> frozenset[tuple[str, int]]:
    return frozenset((name, reference.snapshot_id) for name, reference in metadata.refs.items())


def vacuum(
    warehouse: Warehouse,
    name: str,
    older_than: datetime.timedelta,
    dry_run: bool = True,
    without: Collection[int] = (),
    places: Mapping[str, str] | None = None,
) -> VacuumResult:
    """Deletes old files below the table's location that no snapshot references.

    These are files of killed writers, of replaced days after their snapshots expired, and old metadata. A writer's
    files belong to no snapshot until its commit, so `older_than` must be longer than any write takes.

    Args:
        without: Snapshots that count as expired in a dry run.
        places: Of `table_locations`, if several tables are cleaned. None: they are looked up.
    Raises:
        StorageError: If the files cannot be listed, one of them is outside the table's location, or another table of
            the catalog shares that location.
    """
    table = warehouse.own(name)
    _refuse_shared_location(table, table_locations(warehouse) if places is None else places)
    limit = datetime.datetime.now(datetime.UTC) - older_than
    found = list(_list_files(table))  # before the table is loaded, which then references what was committed meanwhile
    referenced = _referenced_paths(warehouse.table(name), without if dry_run else ())
    orphans = [file for file in found if file.path not in referenced]
    old = [file for file in orphans if file.mtime <= limit]
    result = VacuumResult(
        files=len(old), bytes=sum(file.size for file in old), young_files=len(orphans) - len(old), dry_run=dry_run
    )
    if not dry_run:
        for file in old:
            _delete(table, file.path)
    return result


def table_locations(warehouse: Warehouse) -> dict[str, str]:
    """Returns name -> location of all tables of the catalog. It loads each, which takes a request to most catalogs.

    Raises:
        StorageError: If the metadata of one is damaged, gone or of another format.
    """
    catalog = warehouse.catalog
    names = (name for namespace in catalog.list_namespaces() for name in catalog.list_tables(namespace))
    tables = (_load(warehouse, name) for name in names)
    return {".".join(one.name()): f"{one.location().rstrip('/')}/" for one in tables if one is not None}


def _refuse_shared_location(table: Table, places: Mapping[str, str]) -> None:
    """Refuses a shared location: a renamed table keeps its own, and a new table of the old name gets the same one."""
    place = f"{table.location().rstrip('/')}/"
    for other, there in places.items():
        if other != ".".join(table.name()) and (there.startswith(place) or place.startswith(there)):
            raise StorageError(
                f"location of table '{table.name()[-1]}'", "no files of other tables",
                f"those of '{other}'", "Copy one of the two tables to a location of its own.",
            )  # fmt: skip


def _load(warehouse: Warehouse, identifier: tuple[str, ...]) -> Table | None:
    """Loads a table of the catalog. Returns None if it was dropped meanwhile.

    Raises:
        StorageError: If its metadata is damaged, gone or of another format. Other errors of the catalog and its store
            are raised as they are.
    """
    try:
        return warehouse.catalog.load_table(identifier)
    except (FileNotFoundError, ValueError, ValidationError, NoSuchIcebergTableError) as error:
        raise StorageError(
            f"table '{'.'.join(identifier)}'", "to be readable, since its files may be below the location to clean",
            f"{type(error).__name__}: {error}".split("\n")[0].rstrip("."),
            "Move it to another catalog, or repair it with the engine that made it.",
        ) from error  # fmt: skip
    except NoSuchTableError:
        return None


def _referenced_paths(table: Table, without: Collection[int]) -> Collection[str]:
    """Returns the paths of all files that the table's metadata and its snapshots, except for some, reference."""
    io, metadata = table.io, table.metadata
    paths = {table.metadata_location, *(entry.metadata_file for entry in metadata.metadata_log)}
    paths |= {entry.statistics_path for entry in (*metadata.statistics, *metadata.partition_statistics)}
    seen: set[str] = set()
    for snapshot in (one for one in table.snapshots() if one.snapshot_id not in without):
        paths.add(snapshot.manifest_list)
        for manifest in snapshot.manifests(io):
            if manifest.manifest_path not in seen:
                seen.add(manifest.manifest_path)
                paths |= {
                    entry.data_file.file_path for entry in manifest.fetch_manifest_entry(io, discard_deleted=True)
                }
    return {PyArrowFileIO.parse_location(path)[2] for path in paths | seen}


def _list_files(table: Table) -> Iterator[fs.FileInfo]:
    """Lists data and metadata files below the table's location."""
    system, root = filesystem_of(table)
    real = Path(root).resolve() if isinstance(system, fs.LocalFileSystem) else None
    for folder in (DATA, "metadata"):
        for file in system.get_file_info(fs.FileSelector(f"{root}/{folder}", allow_not_found=True, recursive=True)):
            if file.type != fs.FileType.File:
                continue
            if real is not None and not Path(file.path).resolve().is_relative_to(real):
                raise StorageError(
                    f"file '{file.path}'", f"a path below {root}", "a link that leads outside", "Remove the link."
                )
            yield file


def _delete(table: Table, path: str) -> None:
    system, root = filesystem_of(table)
    assert path.startswith(f"{root}/")
    system.delete_file(path)

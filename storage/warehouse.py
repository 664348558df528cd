"""The Iceberg warehouse: tables partitioned by day, replaced a day at a time."""

import datetime
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.fs as fs
from pyiceberg.catalog import Catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import NoSuchTableError
from pyiceberg.expressions import BooleanExpression
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from storage.config import NAME, WarehouseConfig
from storage.errors import StorageError, reading_metadata
from storage.keys import expand_keys, map_names
from storage.layout.spec import Layout
from storage.reader import SnapshotReader, SnapshotRef
from storage.snapshot.catalog import open_catalog
from storage.snapshot.days import hash_paths, identities, last_identities, notes, row_hashes_by_files
from storage.snapshot.files import (
    DATA,
    DayFile,
    data_files,
    filesystem_of,
    refuse_format,
    rule_of,
    schema_at,
    snapshot_at,
)
from storage.snapshot.foreign import ForeignTable, ForeignTables, alias_of, newest_snapshot, remedy_of
from storage.snapshot.maps import add_keys
from storage.snapshot.row_exclusions import ReadCache, RowExclusions
from storage.writer import TIMES

Days = Collection[datetime.date] | None
"""Some days of a table. None: all."""
FILES_AT_A_TIME = 16
"""File sizes requested concurrently. On an object store each takes a round trip."""
MOST_ASKED = 1_000
"""Sizes of more files come from a list of their folder, where a store gives a thousand an answer."""
FILE_BYTES = 250
"""Bytes in memory of a file's name and size, about."""


class DayStates(NamedTuple):
    """What a table has of its days."""

    written: Mapping[datetime.date, str]
    """Day -> identity of the write that left its files, for days that have all of them. Without `changed` days."""
    changed: Mapping[datetime.date, str]
    """Day -> identity of our last write, for days that another engine has changed since."""
    whole: Collection[datetime.date]
    """Days of the newest snapshot that have all their files in full, from any writer."""


class DaySummary(NamedTuple):
    """What is asked of a day's files again and again."""

    rows: int
    name: str
    """Hash of all that decides its rows: equal hashes mean equal rows at equal positions."""
    paths: str
    """Hash of the names of its files alone."""
    sizes: Mapping[str, int]
    """Name of a file -> its bytes."""

    @property
    def nbytes(self) -> int:
        """Estimated bytes in memory."""
        return FILE_BYTES * len(self.sizes)


class Warehouse:
    """Tables of one catalog.

    Args:
        config: Catalog and layout.
        home: Folder of the embedded catalog, used unless the config names another catalog.
    """

    def __init__(self, config: WarehouseConfig, home: Path) -> None:
        self.config = config
        self.home = home
        self.cache = ReadCache()
        self._foreign = ForeignTables(config.tables)

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog, opened on first use. Its namespace is created if missing."""
        return open_catalog(self.config, self.home)

    @property
    def default_layout(self) -> Layout:
        """The layout of new tables."""
        config = self.config
        return Layout(codec=config.codec, row_group_rows=config.row_group_rows, file_rows=config.file_rows)

    def table(self, name: str) -> Table:
        """Loads the table in its current state.

        Raises:
            StorageError: If there is no such table.
        """
        if name in self._foreign:
            return self._foreign.load(self.catalog, name)
        identifier = (self.config.namespace, check_name(name))
        try:
            with reading_metadata(name):
                return self.catalog.load_table(identifier)
        except NoSuchTableError:
            known = ", ".join(sorted(row[-1] for row in self.catalog.list_tables(self.config.namespace))) or "none"
            raise StorageError(
                f"table '{name}'", "a table of the warehouse", f"tables: {known}", "Run `python -m flows.ingest` first."
            ) from None

    def own(self, name: str) -> Table:
        """Loads a table to change or clean it.

        Raises:
            StorageError: If there is no such table, or it is another engine's.
        """
        table = self.table(name)
        if isinstance(table, ForeignTable):
            table.refuse_change()
        return table

    def writable(self, name: str) -> Table:
        """Loads a table to write to it. pyiceberg can read format version 3, but not write it. Raises as `own`."""
        table = self.own(name)
        if table.format_version > 2:
            raise StorageError(
                f"format of table '{name}'", "version 1 or 2 to change it", f"{table.format_version}",
                "Copy it into a table of version 2 with the engine that made it.",
            )  # fmt: skip
        return table

    def has_table(self, name: str) -> bool:
        """Tells whether the table exists."""
        with reading_metadata(name):
            return name in self._foreign or self.catalog.table_exists((self.config.namespace, check_name(name)))

    def is_foreign(self, name: str) -> bool:
        """Tells whether a table is another engine's, which is only read."""
        return name in self._foreign

    def current(self, name: str) -> SnapshotRef:
        """Returns the newest snapshot of a table.

        Raises:
            StorageError: If the table does not exist or was never written.
        """
        return reference_of(self.table(name))

    def state_of_days(self, name: str) -> DayStates:
        """Returns what a table has of its days. A table that does not exist has none."""
        there = self._whole_names(name)
        if not there:
            return DayStates({}, {}, set())
        found, last = identities(self.table(name), there), last_identities(self.table(name))
        written = {day: identity for day, identity in found.items() if day in there}
        changed = {day: identity for day, identity in last.items() if day in there and day not in written}
        return DayStates(written, changed, set(there))

    def written_days(self, name: str) -> Mapping[datetime.date, str]:
        """Returns `written` of `state_of_days`."""
        return self.state_of_days(name).written

    def changed_days(self, name: str) -> Mapping[datetime.date, str]:
        """Returns `changed` of `state_of_days`."""
        return self.state_of_days(name).changed

    def day_identities(self, name: str) -> dict[datetime.date, str]:
        """Returns day -> identity of the write that left its files, or that left it without files."""
        table = self.table(name)
        return identities(table, {} if table.current_snapshot() is None else self.day_names(reference_of(table)))

    def day_notes(self, name: str) -> dict[datetime.date, Any]:
        """Returns day -> the note of the write that left its files.

        Days without a note and days that another engine has written since are left out. A day keeps its note if rows
        of it are only marked as deleted.
        """
        table = self.table(name)
        if table.current_snapshot() is None:
            return {}
        days = self._days(reference_of(table))  # deleted rows do not change what a day was made of
        return notes(table, {day: one.paths for day, one in days.items()})

    def set_properties(self, name: str, values: Mapping[str, str]) -> None:
        """Sets properties of a table in one commit."""
        with self.writable(name).transaction() as transaction:
            transaction.set_properties(dict(values))

    def _whole_names(self, name: str) -> dict[datetime.date, str]:
        """Returns the whole days of the newest snapshot with the hash of their files' names."""
        table = self.table(name) if self.has_table(name) else None
        if table is None or table.current_snapshot() is None:
            return {}
        days = self._days(reference_of(table))
        many = sum(len(one.sizes) for one in days.values()) > MOST_ASKED
        if many and isinstance(table.io, PyArrowFileIO):
            sizes = _list_sizes(table)
            return {day: one.name for day, one in days.items() if _are_whole(table.io, sizes, one)}
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            whole = zip(days.items(), pool.map(partial(_are_whole, table.io, {}), days.values()), strict=True)
            return {day: one.name for (day, one), found in whole if found}

    def tag(self, reference: SnapshotRef, tag: str) -> None:
        """Tags a snapshot, which keeps it from expiring. Tagging it again changes nothing.

        A table of another engine is not tagged. Its owner decides how long a snapshot stays.

        Raises:
            StorageError: If there is no such snapshot, or another snapshot has the tag.
        """
        table = self.table(reference.table)
        snapshot_at(table, reference)
        if isinstance(table, ForeignTable):
            return
        holder = table.refs().get(tag)
        if holder is not None and holder.snapshot_id != reference.snapshot_id:
            raise StorageError(
                f"tag '{tag}' of table '{reference.table}'", f"snapshot {reference.snapshot_id}",
                f"{holder.snapshot_id}", "A tag cannot move to another snapshot. Choose another name.",
            )  # fmt: skip
        if holder is None:
            self.writable(reference.table).manage_snapshots().create_tag(reference.snapshot_id, tag).commit()

    def schema(self, reference: SnapshotRef, wanted: Iterable[str] = ()) -> pa.Schema:
        """Returns the Arrow schema of the table at the snapshot.

        Args:
            wanted: Columns that are keys of maps, such as `dense_17` or `ids[42..80]`. Other names change nothing.
        """
        schema = schema_at(self.table(reference.table), reference)
        maps = map_names(arrow := schema.as_arrow())
        names = [name for pattern in wanted for name in expand_keys(pattern, arrow.names, maps)] if maps else []
        return add_keys(schema, names).as_arrow() if names else arrow

    def filter_schema(self, reference: SnapshotRef, wanted: Iterable[str] = ()) -> Schema:
        """Returns the columns that a filter can name, and those of `wanted` that are keys of maps."""
        return add_keys(schema_at(self.table(reference.table), reference), wanted)

    def day_rows(self, reference: SnapshotRef) -> dict[datetime.date, int]:
        """Counts the rows of each day at the snapshot, in order of the days.

        It reads metadata, and the lists of deleted rows where another engine has deleted some. A damaged list deletes
        nothing here, so that it blocks no other day. Reading its day raises.
        """
        return {day: one.rows for day, one in self._days(reference).items()}

    def count_rows(self, reference: SnapshotRef, days: Iterable[datetime.date]) -> int:
        """Counts the rows of some days, as `day_rows`.

        Raises:
            StorageError: If they cannot be read, because a file has another format.
        """
        left_out = self.left_out(reference)
        found = list(data_files(left_out.table, reference, frozenset(days), cache=self.cache))
        for one in found:
            refuse_format(left_out.table, one.file)
        return sum(left_out.count_left(one.rows, one.file.record_count) for one in found)

    def left_out(self, reference: SnapshotRef) -> RowExclusions:
        """Returns what finds the rows that reads of the snapshot leave out."""
        table = self.table(reference.table)
        return RowExclusions(table, rule_of(table, reference), self.cache)

    def day_contents(self, reference: SnapshotRef, days: Days = None) -> dict[datetime.date, str]:
        """Returns day -> a hash that identifies its rows, whatever files and order they are in.

        It works for days from any writer. It stays the same while only other days or the day's layout change.
        """
        known = row_hashes_by_files(self.table(reference.table))
        return {day: known.get(name, name) for day, name in self.day_names(reference, days).items()}

    def day_bounds(self, reference: SnapshotRef, column: str) -> dict[datetime.date, tuple[int, int] | None]:
        """Returns day -> bounds of a column of dates or timestamps: days or microseconds since 1970, in UTC.

        They come from the metadata. Another engine may count rows that it has deleted. None: a file tells no bounds.
        """
        fields = schema_at(self.table(reference.table), reference).fields
        field = next((one for one in fields if one.name == column), None)
        files = self._files(reference)
        if field is None or not isinstance(field.field_type, TIMES):
            return dict.fromkeys(files)
        kind, number = field.field_type, field.field_id

        def bounds(found: Iterable[DayFile]) -> tuple[int, int] | None:
            sides = [(one.file.lower_bounds or {}, one.file.upper_bounds or {}) for one in found]
            if any(number not in of for side in sides for of in side):
                return None
            ends: Any = [[from_bytes(kind, of[number]) for of in side] for side in sides]
            return min(first for first, _ in ends), max(last for _, last in ends)

        return {day: bounds(files[day]) for day in files}

    def day_names(self, reference: SnapshotRef, days: Days = None) -> dict[datetime.date, str]:
        """Returns day -> a hash of the names of its files. Equal hashes mean equal rows at equal positions."""
        if days is None:
            return {day: one.name for day, one in self._days(reference).items()}
        return {day: _name_of(files) for day, files in self._files(reference, days).items()}

    def day_files(self, reference: SnapshotRef, days: Days = None) -> dict[datetime.date, list[DataFile]]:
        """Returns the data files of each day at the snapshot, in order of the days.

        Raises:
            StorageError: If rows of several days may share a file.
        """
        found = self._files(reference, days)
        for one in (one for files in found.values() for one in files):
            refuse_mixed(one)
        return {day: [one.file for one in files] for day, files in found.items()}

    def _days(self, reference: SnapshotRef) -> Mapping[datetime.date, DaySummary]:
        """Returns the days of a snapshot that have a row left, in order.

        They are remembered also where the list of all files would take too much memory, so that a command lists them
        once. If another engine has marked rows as deleted, they are counted each time.
        """
        table = self.table(reference.table)
        key = ("days", table.metadata.table_uuid, reference.snapshot_id, rule_of(table, reference).signature)
        found: dict[datetime.date, DaySummary] | None = self.cache.find(key)
        if found is not None:
            return found
        left_out, files = self.left_out(reference), self._files(reference)
        found = {
            day: DaySummary(
                rows=sum(left_out.estimate_left(one.rows, one.file.record_count) for one in several),
                name=_name_of(several),
                paths=hash_paths([one.file.file_path for one in several]),
                sizes={one.file.file_path: one.file.file_size_in_bytes for one in several},
            )
            for day, several in files.items()
        }
        if not any(one.rows.deletes or one.rows.values for several in files.values() for one in several):
            self.cache.get(key, lambda: found)
        return found

    def _files(self, reference: SnapshotRef, days: Days = None) -> dict[datetime.date, list[DayFile]]:
        """Returns the data files of each day that has a row left."""
        left_out, files = self.left_out(reference), dict[datetime.date, list[DayFile]]()
        wanted = None if days is None else frozenset(days)
        for found in data_files(left_out.table, reference, wanted, cache=self.cache):
            files.setdefault(found.rows.day, []).append(found)
        return {
            day: found
            for day, found in sorted(files.items())
            if any(
                not (one.rows.deletes or one.rows.values) or left_out.estimate_left(one.rows, one.file.record_count)
                for one in found
            )
        }

    def reader(
        self, reference: SnapshotRef, columns: Sequence[str], row_filter: BooleanExpression | None = None
    ) -> SnapshotReader:
        """Opens a reader of some columns of a pinned snapshot, for the rows that pass the filter.

        Raises:
            StorageError: If the table does not have a column or the filter does not match its columns.
        """
        return SnapshotReader(self.table(reference.table), reference, columns, row_filter, cache=self.cache)


def reference_of(table: Table) -> SnapshotRef:
    """Returns the newest snapshot of a table as it was loaded. Raises as `Warehouse.current`."""
    snapshot = newest_snapshot(table)
    if snapshot is None:
        raise StorageError(
            f"table '{alias_of(table)}'",
            "at least one day",
            "an empty table",
            remedy_of(table, "Run the ingest flow first.", "Write rows to '{}' with its engine, or set source.branch."),
        )
    return SnapshotRef(table=alias_of(table), snapshot_id=snapshot.snapshot_id)


def check_name(name: str) -> str:
    """Returns the name of a table or a column. Refuses what is none."""
    if not NAME.fullmatch(name):
        raise StorageError(f"name {name!r}", f"a name that matches {NAME.pattern}", "another form", "Rename it.")
    return name


def _name_of(files: Iterable[DayFile]) -> str:
    return hash_paths([path for found in files for path in _paths_of(found)])


def _paths_of(found: DayFile) -> list[str]:
    """Returns what decides the rows of a data file: its name, those of the files that delete its rows, and the rule
    of their day."""
    rule = [found.rows.rule] if found.rows.rule else []
    return [found.rows.path, *found.rows.deletes, *(one.path for one in found.rows.values), *rule]


def refuse_mixed(found: DayFile) -> None:
    """Refuses a file that may have rows of several days."""
    if found.rows.rule:
        raise StorageError(
            f"file '{found.rows.path}'", "one day's rows, in a partition of that `day`", "rows of several days",
            "Days of this table are read, but not replaced. Write to a table of another name.",
        )  # fmt: skip


def _are_whole(io: FileIO, sizes: Mapping[str, int], day: DaySummary) -> bool:
    """Tells whether files have the sizes they were written with, without reading them.

    Args:
        sizes: Name -> bytes of files that were listed. Others are asked for.
    """
    try:
        return all((sizes.get(path) or len(io.new_input(path))) == size for path, size in day.sizes.items())
    except FileNotFoundError:
        return False


def _list_sizes(table: Table) -> dict[str, int]:
    """Returns name -> bytes of the files in the table's folder of data, as its manifests name them."""
    location = f"{table.location().rstrip('/')}/{DATA}"
    system, root = filesystem_of(table)
    selector = fs.FileSelector(f"{root}/{DATA}", allow_not_found=True, recursive=True)
    files = (one for one in system.get_file_info(selector) if one.type == fs.FileType.File)
    return {f"{location}{one.path.removeprefix(f'{root}/{DATA}')}": one.size for one in files}

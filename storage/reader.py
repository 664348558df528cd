"""Reads a pinned snapshot one row group at a time."""

import copy
import datetime
import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.expressions import BooleanExpression
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from storage.config import DAY as DAY
from storage.errors import CorruptFileError, StorageError, closest_names
from storage.layout.spec import Layout
from storage.pages.columns import read_columns
from storage.pages.footer import SUFFIX
from storage.pages.ranges import Range, RangeFile, find_chunks, merge_ranges
from storage.snapshot.deletes import rewrite_call
from storage.snapshot.files import (
    FILES_AT_A_TIME,
    DayFile,
    data_files,
    refuse_format,
    rule_of,
    schema_at,
    snapshot_at,
)
from storage.snapshot.files import SnapshotRef as SnapshotRef
from storage.snapshot.foreign import remedy_of
from storage.snapshot.maps import add_keys
from storage.snapshot.parquet import (
    READ_OPTIONS,
    StoredColumns,
    corrupt,
    local_path,
    open_parquet,
    read_metadata,
    reading,
)
from storage.snapshot.projection import REWRITE, Projection
from storage.snapshot.row_exclusions import FileRows, ReadCache, RowExclusions
from storage.snapshot.row_filter import RowChoice, choose_rows, compared_columns, find_rows, make_mask, settle
from storage.snapshot.row_groups import GroupFilter

READ_ROWS = 8_192
"""Rows decoded at a time."""


class Fragment(FileRows, frozen=True):
    """A row group of a data file, the unit of one read."""

    row_group: int
    rows: int
    """Rows of the day that are not deleted."""

    @property
    def of_file(self) -> FileRows:
        """The rows of the day in all row groups of the file."""
        return FileRows.model_validate(self, from_attributes=True)


class _Source(NamedTuple):
    """A data file that is open.

    Attributes:
        data: Its bytes.
        ranges: Fetches them, if the file is in an object store.
    """

    file: pq.ParquetFile
    data: pa.NativeFile
    ranges: RangeFile | None = None


class SnapshotReader:
    """Reads row groups of a pinned snapshot, projected by Iceberg field id and filtered by row.

    Field ids, not names, decide which column of a file is read: a feature that was dropped and added again under its
    old name reads as null in old files, never as the old values. Rows that another engine has deleted are left out, and
    those of other days where it put several days into one file.

    Attributes:
        projection: The columns read, and those that the filter compares.
        bytes_read: Bytes of the columns read so far, compressed.
        bytes_stored: Bytes of all columns of the row groups so far, skipped ones too, compressed.
        row_groups_skipped: Row groups of which no row passed, so that at most the columns that decide were decoded.
        reads: Contiguous reads so far. Adjacent columns are one; on an object store, so are columns with a small gap.
        read_sizes: Power of two -> reads of fewer bytes than that, and of at least half as many.
    """

    def __init__(
        self,
        table: Table,
        reference: SnapshotRef,
        columns: Sequence[str],
        row_filter: BooleanExpression | None,
        schema: Schema | None = None,
        cache: ReadCache | None = None,
    ) -> None:
        row_filter = None if row_filter is None else settle(row_filter)
        self.table, self.reference, self.row_filter = table, reference, row_filter
        self.schema = add_keys(schema or schema_at(table, reference), [*columns, *compared_columns(row_filter)])
        self.columns = list(columns)
        self._keep: pc.Expression | None = None
        self._compared: list[str] = []
        needed = dict.fromkeys(columns)
        if row_filter is not None:
            try:
                self._keep, self._compared = make_mask(row_filter, self.schema)
            except (ValueError, TypeError) as error:
                raise StorageError(
                    f"row filter of table '{reference.table}'",
                    "a filter that matches its columns",
                    str(error).rstrip("."),
                    "Correct it.",
                ) from error
            needed |= dict.fromkeys(self._compared)
        arrow = self.schema.as_arrow()
        known = set(arrow.names)
        for name in needed:
            if name not in known:
                raise StorageError(
                    f"column '{name}'", f"a column of table '{reference.table}'", "none of that name",
                    f"Closest: {closest_names(name, arrow.names)}. Correct the name.",
                )  # fmt: skip
        self.bytes_read, self.bytes_stored, self.reads, self.row_groups_skipped = 0, 0, 0, 0
        self.read_sizes: Counter[str] = Counter()
        self._gap_bytes = Layout.gap_of(table.properties)
        self._cache = cache or ReadCache()
        self._exclusions = RowExclusions(table, rule_of(table, reference), self._cache)
        self._stored = StoredColumns(table, reference.table)
        rewrite = remedy_of(table, REWRITE, "Rewrite the file with the engine of table '{}'.")
        self.projection = Projection(self.schema, needed, rewrite)
        compared = {name: self.projection.types[name] for name in self._compared}
        self._groups = None if row_filter is None else GroupFilter(self.schema, row_filter, compared)

    def fragments(self, days: Iterable[datetime.date] | None = None) -> list[Fragment]:
        """Lists the row groups of the snapshot by day, file and position. Their `rows` count before the row filter.

        Raises:
            CorruptFileError: If a file is unreadable. Names the file and the snapshot.
            StorageError: If a file has another format, or lacks what is needed to read its columns.
        """
        wanted = None if days is None else frozenset(days)
        in_maps = self.projection.keys.keys()  # a column's nulls are in its map
        by_key = not in_maps.isdisjoint(compared_columns(self.row_filter))
        found: list[Fragment] = []
        planned = data_files(self.table, self.reference, wanted, None if by_key else self.row_filter, self._cache)
        files = sorted(planned, key=_file_order)
        for one in files:
            refuse_format(self.table, one.file)
        footers = self._read_footers([one.file.file_path for one in files])
        for one, footer in zip(files, footers, strict=True):
            path, rows = one.file.file_path, one.file.record_count
            if footer.num_rows != rows:
                raise self._corrupt(path, f"{footer.num_rows} of {rows} rows")
            if one.constants or not path.endswith(SUFFIX):
                stored = self.stored_columns(footer.schema.to_arrow_schema(), path)
                self._refuse_constants(path, one.constants - stored.keys())
            starts = _row_group_starts(footer)
            gone = self._exclusions.positions(one.rows)
            if len(gone) and not 0 <= gone[0] <= gone[-1] < rows:
                raise self._corrupt(path, f"{rows} rows and deletes of rows {gone[0]} to {gone[-1]}")
            left = np.diff(starts) - np.diff(np.searchsorted(gone, starts))
            of_day = dict(one.rows)
            found += [Fragment(**of_day, row_group=i, rows=kept) for i, kept in enumerate(left.tolist()) if kept]
        return found

    def _refuse_constants(self, path: str, missing: Set[int]) -> None:
        """Refuses a file if only its partition has the value of a column."""
        names = [f"'{name}'" for name, number in self.projection.ids.items() if number in missing]
        if names:
            raise StorageError(
                f"file '{path}'", f"column {', '.join(names)} in it", "only a partition of that value",
                "Rewrite the table with the engine that wrote it: in Spark "
                f"{rewrite_call(self.table, 'rewrite-all', 'true')}.",
            )  # fmt: skip

    def stored_columns(self, schema: pa.Schema, path: str) -> dict[int, str]:
        """Returns field id -> name of each column in a data file. Raises as `StoredColumns.of`."""
        with self._reading(path):
            return self._stored.of(schema, path)

    def narrow(self, columns: Sequence[str]) -> "SnapshotReader":
        """Returns a reader of some of the columns, for the same fragments. It counts its own reads."""
        made = copy.copy(self)
        made.columns = list(columns)
        made.projection = self.projection.only({*columns, *self._compared})
        made.bytes_read, made.bytes_stored, made.reads, made.row_groups_skipped = 0, 0, 0, 0
        made.read_sizes = Counter()
        return made

    def identify(self, column: str) -> str:
        """Returns all that decides the values of a column in a data file, beside the file and its day.

        Args:
            column: One to read, or one that the filter compares.
        """
        of, number = self.projection, self.projection.ids[column]
        key = of.keys.get(column)
        mapped = self._stored.names_of(number), () if key is None else self._stored.names_of(key.field)
        return repr((number, column == DAY, f"{of.types[column]}", of.defaults[column], key, mapped))

    def empty(self) -> pa.Table:
        """Returns an empty table of the columns."""
        return pa.table({name: pa.array([], self.projection.types[name]) for name in self.columns})

    def read(self, fragment: Fragment, choice: RowChoice | None = None) -> pa.Table:
        """Reads the rows of one row group that pass the filter and the choice, columns in the requested order.

        Raises:
            CorruptFileError: If the file is unreadable. Names the file and the snapshot.
        """
        return pa.Table.from_batches(list(self.batches(fragment, choice)), self.empty().schema)

    def batches(self, fragment: Fragment, choice: RowChoice | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the rows of `read` in batches that fit into the processor's cache.

        A row group is not read if its statistics exclude all rows. Otherwise the columns that filter and choice look at
        are decoded first, and the others up to the last part that has a row.

        Raises:
            CorruptFileError: If the file is unreadable. Names the file and the snapshot.
        """
        with self.open(fragment.path) as file:
            schema = file.schema_arrow  # converted at every access
            stored = self.stored_columns(schema, fragment.path)
            group = file.metadata.row_group(fragment.row_group)
            with self._reading(fragment.path):
                self.bytes_stored += sum(group.column(i).total_compressed_size for i in range(group.num_columns))
                found = self._groups is None or self._groups.may_match(
                    group, self.projection.known_columns(self._compared, schema, stored)
                )
            if not found:
                self.row_groups_skipped += 1
            elif (local := local_path(fragment.path)) is not None:
                with self._finding(fragment.path):
                    data = pa.memory_map(local)
                with data:
                    yield from self._decode(_Source(file, data), stored, fragment, choice)
            else:
                ranges = RangeFile(self.table.io.new_input(fragment.path).open(), [])
                data = pa.PythonFile(ranges, "r")
                options = READ_OPTIONS | {"metadata": file.metadata, "pre_buffer": False}
                with data, pq.ParquetFile(data, **options) as ranged:
                    yield from self._decode(_Source(ranged, data, ranges), stored, fragment, choice)

    def _decode(
        self, source: "_Source", stored: Mapping[int, str], fragment: Fragment, choice: RowChoice | None
    ) -> Iterator[pa.RecordBatch]:
        """Yields the rows of `batches`.

        Args:
            stored: Field id of each column in the file -> its name there.
        """
        deciding = {*self._compared, *(choice.columns if choice is not None else ())} or set(self.projection.types)
        early = [name for name in self.projection.types if name in deciding]
        late = [name for name in self.projection.types if name not in deciding]
        needed = self.projection.stored_names(early, stored)
        missing = [name for name in self.projection.stored_names(late, stored) if name not in needed]
        # keys alone are spread over row groups: a read of their own would hardly ever save another
        fetched = (needed, missing) if self._compared else ([*needed, *missing], [])
        others = self._parts(source, fragment, missing, fetched[1]) if missing else None
        gone = self._exclusions.positions(fragment.of_file)
        first, end = _row_group_starts(source.file.metadata)[fragment.row_group : fragment.row_group + 2].tolist()
        rows, passed, behind, empty = 0, 0, 0, True
        for part in self._parts(source, fragment, needed, fetched[0]):
            begin, last = np.searchsorted(gone, [first, first + len(part)])
            places = gone[begin:last] - first
            live = _without(part, places)
            first += len(part)
            rows += len(live)
            found = self.projection.project(live, early, stored, fragment)
            mask = find_rows(found, self._keep)
            if choice is not None:
                mask, passed = choose_rows(found, mask, choice, passed)
            if len(live) == 0 or (mask is not None and not mask.true_count):
                behind += 1
                continue
            if others is not None:
                other = next(itertools.islice(others, behind, None), None)
                if other is None or len(other) != len(part):
                    raise self._corrupt(fragment.path, f"columns of different length in row group {fragment.row_group}")
                live = _beside(live, _without(other, places))
            behind, empty = 0, False
            if late:
                found = _beside(found, self.projection.project(live, late, stored, fragment))
            chosen = found.select(self.columns)
            yield chosen if mask is None else chosen.filter(mask)
        if first != end or rows != fragment.rows:
            raise self._corrupt(fragment.path, f"{rows} of {fragment.rows} rows in row group {fragment.row_group}")
        self.row_groups_skipped += empty

    def _parts(
        self, source: "_Source", fragment: Fragment, columns: list[str], fetched: list[str]
    ) -> Iterator[pa.RecordBatch]:
        """Yields columns of a row group as they are stored.

        Args:
            fetched: Columns that count as read, and are fetched together, once the first part is taken.
        """
        with self._reading(fragment.path):
            group = source.file.metadata.row_group(fragment.row_group)
            wanted = self._count_read(group, set(fetched), source.ranges is None)
        if source.ranges is not None:
            source.ranges.ranges += wanted
        parts = read_columns(source.file, source.data, fragment.row_group, columns, READ_ROWS)
        while True:
            with self._reading(fragment.path):
                part = next(parts, None)
                if part is not None and not fragment.path.endswith(SUFFIX):  # no checksum of ours, and Arrow checks no
                    part.validate(full=True)  # text
            if part is None:
                return
            yield part

    def _count_read(self, group: pq.RowGroupMetaData, names: set[str], local: bool) -> list[Range]:
        """Returns the ranges to read for some columns of a row group and counts them as read."""
        ranges = merge_ranges(list(find_chunks(group, names)), 0 if local else self._gap_bytes)
        sizes = [part.end - part.begin for part in ranges]
        self.bytes_read += sum(sizes)
        self.reads += len(ranges)
        self.read_sizes.update(f"{1 << size.bit_length()}" for size in sizes)
        return ranges

    def open(self, path: str) -> pq.ParquetFile:
        """Opens a data file and reads its footer.

        Raises:
            CorruptFileError: If the file is unreadable. Names the file and the snapshot.
        """
        with self._finding(path):
            return open_parquet(self.table.io, path)

    def _read_footers(self, paths: Sequence[str]) -> list[pq.FileMetaData]:
        """Reads the footers of data files, those of an object store concurrently: each takes some round trips."""
        if all(local_path(path) is not None for path in paths):
            return list(map(self._read_footer, paths))  # threads would only wait for the interpreter's lock
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            return list(pool.map(self._read_footer, paths))

    def _read_footer(self, path: str) -> pq.FileMetaData:
        """Reads the footer of a data file alone. Raises as `open`."""
        with self._finding(path):
            return read_metadata(self.table.io, path)

    @contextmanager
    def _finding(self, path: str) -> Iterator[None]:
        with self._reading(path):
            try:
                yield
            except FileNotFoundError:
                snapshot_at(self.table.refresh(), self.reference)
                raise

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        with reading(self._name_file(path), self.table):
            yield

    def _corrupt(self, path: str, error: str) -> CorruptFileError:
        return corrupt(self._name_file(path), self.table, error)

    def _name_file(self, path: str) -> str:
        return f"file '{path}' of snapshot {self.reference.snapshot_id} of table '{self.reference.table}'"


def _row_group_starts(metadata: pq.FileMetaData) -> npt.NDArray[np.int64]:
    """Returns the position of each row group's first row in the file, and the number of rows as the last entry."""
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return np.cumsum([0, *sizes], dtype=np.int64)


def _without(part: pa.RecordBatch, positions: npt.NDArray[np.int64]) -> pa.RecordBatch:
    if not len(positions):
        return part
    keep = np.ones(len(part), bool)
    keep[positions] = False
    return part.filter(pa.array(keep))


def _beside(left: pa.RecordBatch, right: pa.RecordBatch) -> pa.RecordBatch:
    """Returns the columns of two batches of the same rows."""
    columns = [*left.columns, *right.columns]
    return pa.RecordBatch.from_arrays(columns, [*left.schema.names, *right.schema.names])


def _file_order(found: DayFile) -> tuple[datetime.date, list[str | int]]:
    """Sorts by day, then by order of writing: numbers in file names compare as numbers."""
    parts = re.split(r"(\d+)", found.file.file_path.rsplit("/", 1)[-1])
    return found.rows.day, [int(part) if part.isdigit() else part for part in parts]

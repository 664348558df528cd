"""Reads a pinned snapshot one row group at a time."""

import copy
import datetime
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.expressions import And, BooleanExpression, NotIn, NotNull, Or
from pyiceberg.expressions.visitors import bind, extract_field_ids, rewrite_not
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table

from storage.config import DAY as DAY
from storage.errors import CorruptFileError, StorageError, closest_names
from storage.footer import SUFFIX
from storage.layout.spec import Layout
from storage.ranges import Range, RangeFile, find_chunks, merge_ranges
from storage.snapshot.files import (
    FILES_AT_A_TIME,
    DayFile,
    data_files,
    refuse_format,
    rewrite_call,
    rule_of,
    schema_at,
    snapshot_at,
)
from storage.snapshot.files import SnapshotRef as SnapshotRef
from storage.snapshot.left_out import FileRows, LeftOut, ReadCache
from storage.snapshot.maps import MapEntries, add_keys, find_keys
from storage.snapshot.parquet import (
    READ_OPTIONS,
    StoredColumns,
    corrupt,
    local_path,
    open_parquet,
    read_metadata,
    reading,
)

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


class SnapshotReader:
    """Reads row groups of a pinned snapshot, projected by Iceberg field id and filtered by row.

    Field ids, not names, decide which column of a file is read: a feature that was dropped and added again under its
    old name reads as null in old files, never as the old values. Rows that another engine has deleted are left out, and
    those of other days where it put several days into one file.

    Attributes:
        bytes_read: Bytes of the columns read so far, compressed.
        bytes_stored: Bytes of all columns of the row groups read so far, compressed.
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
        self.bytes_read, self.bytes_stored, self.reads = 0, 0, 0
        self.read_sizes: Counter[str] = Counter()
        self._gap_bytes = Layout.gap_of(table.properties)
        self._cache = cache or ReadCache()
        self._left_out = LeftOut(table, rule_of(table, reference), self._cache)
        self._stored = StoredColumns(table, reference.table)
        self._ids = {name: self.schema.find_field(name).field_id for name in needed}
        self._types = {name: arrow.field(name).type for name in needed}
        self._defaults = {name: self.schema.find_field(name).initial_default for name in needed}
        self._keys = find_keys(self.schema, needed)

    def fragments(self, days: Iterable[datetime.date] | None = None) -> list[Fragment]:
        """Lists the row groups of the snapshot by day, file and position. Their `rows` count before the row filter.

        Raises:
            CorruptFileError: If a file is unreadable. Names the file and the snapshot.
            StorageError: If a file has another format, or lacks what is needed to read its columns.
        """
        wanted = None if days is None else frozenset(days)
        by_key = not self._keys.keys().isdisjoint(compared_columns(self.row_filter))  # a column's nulls are in its map
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
            gone = self._left_out.positions(one.rows)
            if len(gone) and not 0 <= gone[0] <= gone[-1] < rows:
                raise self._corrupt(path, f"{rows} rows and deletes of rows {gone[0]} to {gone[-1]}")
            left = np.diff(starts) - np.diff(np.searchsorted(gone, starts))
            of_day = dict(one.rows)
            found += [Fragment(**of_day, row_group=i, rows=kept) for i, kept in enumerate(left.tolist()) if kept]
        return found

    def _refuse_constants(self, path: str, missing: Set[int]) -> None:
        """Refuses a file if only its partition has the value of a column."""
        names = [f"'{name}'" for name, number in self._ids.items() if number in missing]
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
        needed = {*columns, *self._compared}
        for part in ("_ids", "_types", "_defaults", "_keys"):
            whole = getattr(self, part)
            setattr(made, part, {name: value for name, value in whole.items() if name in needed})
        made.bytes_read, made.bytes_stored, made.reads, made.read_sizes = 0, 0, 0, Counter()
        return made

    def identify(self, column: str) -> str:
        """Returns all that decides the values of a column in a data file, beside the file and its day.

        Args:
            column: One to read, or one that the filter compares.
        """
        key, number = self._keys.get(column), self._ids[column]
        mapped = self._stored.names_of(number), () if key is None else self._stored.names_of(key.field)
        return repr((number, column == DAY, f"{self._types[column]}", self._defaults[column], key, mapped))

    def empty(self) -> pa.Table:
        """Returns an empty table of the columns."""
        return pa.table({name: pa.array([], self._types[name]) for name in self.columns})

    def read(self, fragment: Fragment) -> pa.Table:
        """Reads the rows of one row group that pass the filter, columns in the requested order.

        Raises:
            CorruptFileError: If the file is unreadable. Names the file and the snapshot.
        """
        return pa.Table.from_batches(list(self.batches(fragment)), self.empty().schema)

    def batches(self, fragment: Fragment) -> Iterator[pa.RecordBatch]:
        """Yields the rows of `read` in batches that fit into the processor's cache.

        Raises:
            CorruptFileError: If the file is unreadable. Names the file and the snapshot.
        """
        file = self.open(fragment.path)
        stored = self.stored_columns(file.schema_arrow, fragment.path)
        rows = 0
        first, end = _row_group_starts(file.metadata)[fragment.row_group : fragment.row_group + 2].tolist()
        gone = self._left_out.positions(fragment.of_file)
        names = {name: stored[i] for name, i in self._ids.items() if i in stored}
        maps = {key.field: stored[key.field] for key in self._keys.values() if key.field in stored}
        wanted_columns = list(dict.fromkeys([*names.values(), *maps.values()]))
        group, is_local = file.metadata.row_group(fragment.row_group), local_path(fragment.path) is not None
        with self._reading(fragment.path):
            wanted = self._count_read(group, set(wanted_columns), is_local)
        if not is_local:
            source = RangeFile(self.table.io.new_input(fragment.path).open(), wanted)
            file = pq.ParquetFile(pa.PythonFile(source, "r"), metadata=file.metadata, pre_buffer=False, **READ_OPTIONS)
        parts = file.iter_batches(READ_ROWS, [fragment.row_group], wanted_columns, use_threads=False)
        try:
            while (part := self._next(parts, fragment)) is not None:
                begin, last = np.searchsorted(gone, [first, first + len(part)])
                live = part if begin == last else _without(part, gone[begin:last] - first)
                first += len(part)
                rows += len(live)
                yield self._project(live, names, maps, fragment)
        finally:
            file.close()
        if first != end or rows != fragment.rows:
            raise self._corrupt(fragment.path, f"{rows} of {fragment.rows} rows in row group {fragment.row_group}")

    def _next(self, parts: Iterator[pa.RecordBatch], fragment: Fragment) -> pa.RecordBatch | None:
        with self._reading(fragment.path):
            part = next(parts, None)
            if part is not None and not fragment.path.endswith(SUFFIX):  # no checksum of ours, and Arrow checks no text
                part.validate(full=True)
            return part

    def _project(
        self, part: pa.RecordBatch, names: Mapping[str, str], maps: Mapping[int, str], fragment: Fragment
    ) -> pa.RecordBatch:
        """Filters a part and gives it the table's names and types.

        A value missing from the file is read from its map, if the file has that: another engine that rewrites a file
        stores nulls beside the map. A column missing from both gets its default value, which is mostly null. `day` gets
        the day of the rows.

        Args:
            names: Column -> its name in the file.
            maps: Field id of a map -> its name in the file.
        """
        indexes = {number: MapEntries(part.column(name)) for number, name in maps.items()}

        def column(name: str, kind: pa.DataType) -> pa.Array:
            own = _cast(part.column(names[name]), kind, name, fragment) if name in names else None
            key = self._keys.get(name)
            if key is not None and key.field in indexes and (own is None or own.null_count):
                entries = _cast(indexes[key.field].column(key.key, key.scores), kind, name, fragment)
                own = entries if own is None else _coalesce(own, entries)
            return _fill(fragment.day if name == DAY else self._defaults[name], kind, len(part)) if own is None else own

        arrays = [column(name, kind) for name, kind in self._types.items()]
        return keep_rows(pa.RecordBatch.from_arrays(arrays, list(self._types)), self._keep, self.columns)

    def _count_read(self, group: pq.RowGroupMetaData, names: set[str], local: bool) -> list[Range]:
        """Returns the ranges to read for some columns of a row group and counts them as read."""
        wanted = list(find_chunks(group, names))
        ranges = merge_ranges(wanted, 0 if local else self._gap_bytes)
        self.bytes_stored += sum(group.column(i).total_compressed_size for i in range(group.num_columns))
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
        with reading(self._name_file(path)):
            yield

    def _corrupt(self, path: str, error: str) -> CorruptFileError:
        return corrupt(self._name_file(path), error)

    def _name_file(self, path: str) -> str:
        return f"file '{path}' of snapshot {self.reference.snapshot_id} of table '{self.reference.table}'"


def _row_group_starts(metadata: pq.FileMetaData) -> npt.NDArray[np.int64]:
    """Returns the position of each row group's first row in the file, and the number of rows as the last entry."""
    sizes = [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)]
    return np.cumsum([0, *sizes], dtype=np.int64)


def _without(part: pa.RecordBatch, positions: npt.NDArray[np.int64]) -> pa.RecordBatch:
    keep = np.ones(len(part), bool)
    keep[positions] = False
    return part.filter(pa.array(keep))


def make_mask(row_filter: BooleanExpression, schema: Schema) -> tuple[pc.Expression, list[str]]:
    """Returns the mask of a filter and the columns that it compares.

    Nulls follow SQL: a comparison with null is not true, and neither is its opposite.

    Raises:
        ValueError: If the filter does not match the columns. TypeError: The same.
    """
    bound = bind(schema, _drop_nulls(rewrite_not(row_filter)), case_sensitive=True)
    used = [str(schema.find_column_name(number)) for number in sorted(extract_field_ids(bound))]
    return expression_to_pyarrow(bound, schema), used


def compared_columns(expression: BooleanExpression | None) -> list[str]:
    """Returns the names of the columns that an unbound expression compares."""
    inner = [getattr(expression, side) for side in ("left", "right", "child") if hasattr(expression, side)]
    if inner:
        return [name for part in inner for name in compared_columns(part)]
    term: Any = getattr(expression, "term", None)
    return [] if term is None else [term.name]


def _drop_nulls(expression: BooleanExpression) -> BooleanExpression:
    """Lets `not in` fail for nulls. Arrow's `is_in` is false for null, so its opposite would be true."""
    if isinstance(expression, And | Or):
        return type(expression)(_drop_nulls(expression.left), _drop_nulls(expression.right))
    if not isinstance(expression, NotIn):
        return expression
    return And(NotNull(expression.term), expression)  # type: ignore[call-arg]  # pydantic hides its signature


def keep_rows(rows: pa.RecordBatch, keep: pc.Expression | None, columns: list[str]) -> pa.RecordBatch:
    """Selects columns of the rows that a filter keeps. None keeps all rows."""
    if keep is None:
        return rows.select(columns)
    table = pa.Table.from_batches([rows]).filter(keep).select(columns).combine_chunks()
    return table.to_batches()[0] if len(table) else rows.slice(0, 0).select(columns)


def _file_order(found: DayFile) -> tuple[datetime.date, list[str | int]]:
    """Sorts by day, then by order of writing: numbers in file names compare as numbers."""
    parts = re.split(r"(\d+)", found.file.file_path.rsplit("/", 1)[-1])
    return found.rows.day, [int(part) if part.isdigit() else part for part in parts]


def _cast(array: pa.Array, kind: pa.DataType, name: str, fragment: Fragment) -> pa.Array:
    if array.type == kind:
        return array
    try:
        return array.cast(kind)
    except pa.ArrowException as error:
        raise StorageError(
            f"column '{name}' of file '{fragment.path}'", f"values that fit {kind}",
            f"{error}".split("\n")[0].rstrip("."),
            "Rewrite the file with the engine that wrote it, or ingest its day with force=true.",
        ) from error  # fmt: skip


def _coalesce(first: pa.Array, second: pa.Array) -> pa.Array:
    """Returns the first values, and the second ones where these are null. Arrow's own function knows no lists."""
    places = np.arange(len(first))
    missing = first.is_null().to_numpy(zero_copy_only=False)
    return pa.concat_arrays([first, second]).take(pa.array(np.where(missing, places + len(first), places)))


def _fill(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), rows)

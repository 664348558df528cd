"""Reads a pinned snapshot with columns of feature sources joined to its own. Nothing is written."""

import copy
import datetime
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
from pyiceberg.expressions import And, BooleanExpression
from pyiceberg.schema import Schema

from pipeline.data.formats.files import fingerprint
from pipeline.data.joined import sorting
from pipeline.data.joined.index import KeyIndex, TimedIndex, TimedRows, cut_lists
from pipeline.data.joined.sorting import MANIFEST, SortedLayout, find_start, open_sorted
from pipeline.data.joined.source import FeatureSource, PinnedSource, SourceRows, added_columns, to_filter_schema
from pipeline.data.joined.window_sums import WindowSums
from pipeline.data.stored import MICROS, to_key_form, to_micros, to_numbers
from pipeline.transforms.joins import EventWindow, FeatureJoin, History
from storage.filters import parse_filter
from storage.reader import Fragment, SnapshotReader, SnapshotRef
from storage.snapshot.row_filter import RowChoice, choose_rows, compared_columns, keep_rows, make_mask
from storage.warehouse import Warehouse

CACHE_BYTES = 256 << 20
"""Size of the days of a feature source that a process caches. The newest day is cached at any size."""
SORTED = "sorted"
"""Folder of the warehouse's home for sources that are read as of a time."""


class SourceColumns:
    """Looks up columns of a feature source for rows. Caches the days it has read, up to CACHE_BYTES.

    Attributes:
        needed: Columns of the rows that it looks up by.
        rows: Rows passed to `look_up`.
        matched: Of those, rows with a key that the source has, and with `as_of` a time from which it has values.
    """

    def __init__(self, source: FeatureSource, names: Sequence[str]) -> None:
        self.source, self.names = source, list(names)
        self.on, self.as_of = source.source.on, source.source.as_of
        self.needed = [*self.on, *([] if self.as_of is None else [self.as_of])]
        self.loaded = self.names
        if isinstance(source.source, EventWindow):
            self.made = source.source.made(list(source.added))
            self.loaded = list(dict.fromkeys(of for of, _, _ in map(self.made.__getitem__, names) if of is not None))
        self.cache: dict[datetime.date | None, KeyIndex | TimedIndex] = {}
        self.sums = WindowSums()
        self.rows = self.matched = 0

    def look_up(self, columns: Mapping[str, pa.Array], day: datetime.date) -> list[pa.Array]:
        """Returns the columns for rows of a day. Keys without a match give nulls, empty lists or a count of 0.

        Args:
            columns: Those in `needed`, for each row.
        """
        source, where = self.source.source, self.source.pinned.where
        keys = [to_key_form(f"{where}, key '{name}'", columns[name]) for name in self.on]
        index = self.load_day(day if source.day_column is not None else None)
        self.rows += len(keys[0])
        if isinstance(index, KeyIndex):
            places = index.find(keys)
            self.matched += len(places) - places.null_count
            return [values.take(places) for values in index.values]
        assert self.as_of is not None
        times = to_micros(f"{where}, as_of '{self.as_of}'", columns[self.as_of])
        rows = index.find(keys, times, MICROS * source.delay_seconds, until=isinstance(source, FeatureJoin))
        self.matched += int((rows.first < rows.end).sum())
        if isinstance(source, History):
            return cut_lists(index.values, np.maximum(rows.first, rows.end - source.last), rows.end)
        if isinstance(source, EventWindow):
            return self._take_windows(source, index, rows)
        places = pa.array(rows.end - 1, mask=rows.first == rows.end)
        return [values.take(places) for values in index.values]

    def _take_windows(self, window: EventWindow, index: TimedIndex, rows: TimedRows) -> list[pa.Array]:
        begins = {seconds: index.places(rows, MICROS * seconds, until=False) for seconds in window.seconds}
        sums = {
            (name, seconds): self.sums.find(number, index, rows.numbers, begin, rows.end)
            for number, name in enumerate(self.loaded)
            for seconds, begin in begins.items()
        }
        found = []
        for column, take, seconds in map(self.made.__getitem__, self.names):
            if column is None:
                found.append(pa.array(rows.end - begins[seconds]))
                continue
            total, numbers = sums[column, seconds]
            if take == "sum":
                found.append(pa.array(total))
            else:
                found.append(pa.array(total / np.maximum(numbers, 1), mask=numbers == 0))
        return found

    def load_day(self, day: datetime.date | None) -> KeyIndex | TimedIndex:
        """Returns the rows of a day, from the cache if possible."""
        if day not in self.cache:
            self.cache[day] = self._read_day(day) if self.as_of is None else self._open_timed()
            while len(self.cache) > 1 and sum(index.nbytes for index in self.cache.values()) > CACHE_BYTES:
                self.cache.pop(next(iter(self.cache)))
        return self.cache[day]

    def _read_day(self, day: datetime.date | None) -> KeyIndex:
        source, names = self.source, self.loaded
        parts = list(source.rows(day, names))
        keys = [_concatenate([part.keys[i] for part in parts], kind) for i, kind in enumerate(source.key_kinds)]
        fields = [source.kinds[name] for name in names]
        values = [_concatenate([part.values[i] for part in parts], kind) for i, kind in enumerate(fields)]
        return KeyIndex(keys, values, source.pinned.where if day is None else f"{source.pinned.where}, day {day}")

    def _open_timed(self) -> TimedIndex:
        source, names = self.source, self.loaded
        numbers = isinstance(source.source, EventWindow)

        def rows(parts: Collection[str]) -> Iterator[tuple[str, SourceRows]]:
            for part, read in source.rows_by_part(parts, names):
                yield part, read._replace(values=list(map(to_numbers, read.values))) if numbers else read

        return open_sorted(rows, source.parts(), self.layout, self.sorted_folder, source.pinned.where)

    @property
    def layout(self) -> SortedLayout:
        """What the sorted files of a source with times hold."""
        source = self.source
        numbers = isinstance(source.source, EventWindow)
        kinds = [pa.float64() if numbers else source.kinds[name] for name in self.loaded]
        return SortedLayout(source.key_kinds, kinds, unique=isinstance(source.source, FeatureJoin))

    @property
    def sorted_folder(self) -> Path:
        """Their folder, by the parts of the source. That around it is by all else that decides their content."""
        source = self.source.source
        where = None if isinstance(source, FeatureJoin) else source.where
        columns = [self.source.added[name] for name in self.loaded]
        raw = self.source.identify([*source.on, f"{source.time}", *columns, *self.source.compared])
        content = (sorting.CODE, source.table, source.path, source.on, source.time, where, columns, self.layout, raw)
        folder = self.source.warehouse.home / SORTED / fingerprint([f"{one}" for one in content])
        return folder / fingerprint(list(self.source.parts().items()))


class FeatureJoinReader:
    """Reads row groups like SnapshotReader, with columns of feature sources joined to those of the table.

    The table's reader applies the part of the filter that compares table columns only. The rest is applied to the
    joined rows.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        reference: SnapshotRef,
        columns: Sequence[str],
        row_filter: BooleanExpression | None,
        sources: Sequence[FeatureSource],
    ) -> None:
        table = warehouse.schema(reference, _own_names(compared_columns(row_filter), sources))
        added = added_columns(sources, table)
        early, late = _split_filter(row_filter, added.names)
        self.columns, self.late = list(columns), compared_columns(late)
        needed = [*columns, *self.late]
        wanted = {source: [name for name in source.schema.names if name in needed] for source in sources}
        self.sides = [SourceColumns(source, names) for source, names in wanted.items() if names]
        self.inner: SnapshotReader = warehouse.reader(reference, self.own_columns(), early)
        types = {field.name: field.type for field in [*self.inner.empty().schema, *added]}
        self.types = {name: types[name] for name in self.columns}
        self._keep = None
        if late is not None:
            schema = to_filter_schema([*table, *added])
            self._keep, _ = make_mask(late, schema)

    def own_columns(self) -> list[str]:
        """Returns the columns of the table to read, those to look up by included."""
        joined = {name for side in self.sides for name in side.names}
        needed = [*self.columns, *self.late, *(name for side in self.sides for name in side.needed)]
        return [name for name in dict.fromkeys(needed) if name not in joined]

    def narrow(self, columns: Sequence[str]) -> "FeatureJoinReader":
        """Returns a reader of some of the columns, for the same fragments. It shares the sources with this one."""
        made = copy.copy(self)
        made.columns, needed = list(columns), {*columns, *self.late}
        made.sides = [side for side in self.sides if not needed.isdisjoint(side.names)]
        made.inner = self.inner.narrow(made.own_columns())
        made.types = {name: self.types[name] for name in made.columns}
        return made

    def identify(self, column: str) -> str:
        """Returns all that decides the values of a column beside the data file and its day.

        Args:
            column: One to read, or one that the filter compares.
        """
        side = next((side for side in self.sides if column in side.names), None)
        if side is None:
            return self.inner.identify(column)
        kinds = [f"{kind}" for kind in [*side.source.key_kinds, *side.source.kinds.values()]]
        keys = [self.inner.identify(name) for name in side.needed]
        return repr((column, side.source.pinned.model_dump_json(), kinds, keys))

    @property
    def bytes_read(self) -> int:
        """Bytes of the columns read so far, compressed, including those of feature sources."""
        return self.inner.bytes_read + sum(side.source.bytes_read for side in self.sides)

    @property
    def bytes_stored(self) -> int:
        """Bytes of all columns of the table's row groups read so far, compressed."""
        return self.inner.bytes_stored

    @property
    def row_groups_skipped(self) -> int:
        """Row groups of the table without a row that passed the table's part of the filter."""
        return self.inner.row_groups_skipped

    @property
    def reads(self) -> int:
        """Contiguous reads of the table's files so far."""
        return self.inner.reads

    @property
    def read_sizes(self) -> Counter[str]:
        """Sizes of the reads of the table's files so far, as `SnapshotReader.read_sizes`."""
        return self.inner.read_sizes

    def fragments(self, days: Iterable[datetime.date] | None = None) -> list[Fragment]:
        """Lists the row groups of the snapshot by day, file and position."""
        return self.inner.fragments(days)

    def sort_sources(self, say: Callable[[str], object]) -> None:
        """Sorts sources with times, unless that is done, so that no worker has to wait for it.

        Args:
            say: Gets a line before a source is sorted, and one after it.
        """
        for side in self.sides:
            if side.as_of is None:
                continue
            folder, parts, where = side.sorted_folder, side.source.parts(), side.source.pinned.where
            if (folder / MANIFEST).exists():
                side.load_day(None)  # compares checksums once for all workers
                continue
            began, new = time.monotonic(), len(find_start(folder, parts).new)
            what = "days" if side.source.snapshot is not None else "files"
            whole = "once for all trainings that read it as it is now"
            say(f"sorting {new} of {len(parts)} {what} of {where} by key and time, {whole}")
            index = side.load_day(None)
            say(f"sorted {where}: {index.nbytes / 1e6:,.0f} MB in {time.monotonic() - began:.1f} s")

    def empty(self) -> pa.Table:
        """Returns an empty table of the columns."""
        return pa.table({name: pa.array([], kind) for name, kind in self.types.items()})

    def read(self, fragment: Fragment, choice: RowChoice | None = None) -> pa.Table:
        """Reads the rows of one row group that pass filter and choice, columns in the requested order."""
        return pa.Table.from_batches(list(self.batches(fragment, choice)), self.empty().schema)

    def batches(self, fragment: Fragment, choice: RowChoice | None = None) -> Iterator[pa.RecordBatch]:
        """Yields the rows of `read` in batches that fit into the processor's cache.

        Columns are looked up for the chosen rows only, unless the filter or the choice looks at joined columns.
        """
        of_table = choice is not None and self._keep is None and set(choice.columns) <= set(self.inner.columns)
        late, passed = None if of_table else choice, 0
        for batch in self.inner.batches(fragment, choice if of_table else None):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            for side in self.sides:
                added = side.look_up(columns, fragment.day)
                columns |= dict(zip(side.names, added, strict=True))
            rows = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
            rows = keep_rows(rows, self._keep, self.columns)
            if late is not None:
                mask, passed = choose_rows(rows, None, late, passed)
                rows = rows if mask is None else rows.filter(mask)
            yield rows


Reader = SnapshotReader | FeatureJoinReader


def open_reader(
    warehouse: Warehouse,
    reference: SnapshotRef,
    columns: Sequence[str],
    row_filter: BooleanExpression | None,
    joined: Sequence[PinnedSource],
) -> Reader:
    """Opens a reader of columns of a snapshot, joined with feature sources where columns or the filter need them."""
    if joined:
        known = set(warehouse.schema(reference).names)
        if not known.issuperset([*columns, *compared_columns(row_filter)]):
            sources = [FeatureSource(pinned, warehouse) for pinned in joined]
            return FeatureJoinReader(warehouse, reference, columns, row_filter, sources)
    return warehouse.reader(reference, columns, row_filter)


def joined_schema(
    warehouse: Warehouse, reference: SnapshotRef, joined: Sequence[PinnedSource], wanted: Iterable[str] = ()
) -> pa.Schema:
    """Returns all columns that a reader can read: the table's, then those of feature sources. Raises as they do.

    Args:
        wanted: As in `Warehouse.schema`.
    """
    table = warehouse.schema(reference, wanted)
    added = added_columns([FeatureSource(pinned, warehouse) for pinned in joined], table)
    return pa.schema([*table, *added])


def filter_schema(
    warehouse: Warehouse, reference: SnapshotRef, joined: Sequence[PinnedSource], row_filter: str
) -> Schema:
    """Returns the columns that a filter can name, and those keys of maps that it names."""
    named = compared_columns(parse_filter(row_filter))
    if not joined:
        return warehouse.filter_schema(reference, named)
    sources = [FeatureSource(pinned, warehouse) for pinned in joined]
    return to_filter_schema(joined_schema(warehouse, reference, joined, _own_names(named, sources)))


def _own_names(names: Iterable[str], sources: Sequence[FeatureSource]) -> list[str]:
    """Returns the names that no source has. They may be keys of the table's maps."""
    return [name for name in names if not any(name in source.schema.names for source in sources)]


def _split_filter(
    row_filter: BooleanExpression | None, added: Sequence[str]
) -> tuple[BooleanExpression | None, BooleanExpression | None]:
    """Splits a filter into the part that compares table columns only and the rest."""
    parts = _conjuncts(row_filter)
    late = [part for part in parts if set(compared_columns(part)) & set(added)]
    return _all_of([part for part in parts if part not in late]), _all_of(late)


def _conjuncts(expression: BooleanExpression | None) -> list[BooleanExpression]:
    if isinstance(expression, And):
        return [*_conjuncts(expression.left), *_conjuncts(expression.right)]
    return [] if expression is None else [expression]


def _all_of(parts: Sequence[BooleanExpression]) -> BooleanExpression | None:
    return And(*parts) if len(parts) > 1 else parts[0] if parts else None


def _concatenate(parts: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    return pa.concat_arrays(parts) if parts else pa.array([], kind)

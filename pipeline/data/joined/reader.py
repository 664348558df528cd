"""Reads a pinned snapshot with columns of feature sources joined to its own. Nothing is written."""

import datetime
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import And, BooleanExpression
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids
from pyiceberg.schema import Schema, assign_fresh_schema_ids

from pipeline.data.filters import parse_filter
from pipeline.data.joined.source import FeatureSource, PinnedSource, added_columns
from pipeline.data.joined.stored import key_type, to_key_form
from pipeline.errors import DataError
from pipeline.transforms.column import sparse_from_arrow
from pipeline.transforms.kernels.row_hashes import row_hashes
from storage.arrow import is_list
from storage.reader import Fragment, SnapshotReader, SnapshotRef, compared_columns, keep_rows, make_mask
from storage.warehouse import Warehouse

CACHE_BYTES = 256 << 20
"""Size of the days of a feature source that a process caches. The newest day is cached at any size."""


class KeyIndex:
    """Rows of a feature source, found by key.

    Args:
        where: The source as an error names it.
    Raises:
        DataError: If a key occurs twice.
    """

    def __init__(self, keys: Sequence[pa.Array], values: Sequence[pa.Array], where: str) -> None:
        present = _present(keys)  # a row without a key matches no row
        if not pc.all(present).as_py():
            keys, values = [key.filter(present) for key in keys], [value.filter(present) for value in values]
        hashes = _hashes(keys)
        self.order = np.argsort(hashes, kind="stable")
        self.hashes, self.keys, self.values = hashes[self.order], list(keys), list(values)
        starts = np.flatnonzero(np.diff(self.hashes, prepend=~self.hashes[:1]) != 0) if len(hashes) else np.zeros(0)
        self.most = int(np.diff(starts, append=len(hashes)).max(initial=0))
        if self.most > 1:
            self._refuse_repeated(where)

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        return sum(int(array.nbytes) for array in [*self.keys, *self.values, self.order, self.hashes])

    def find(self, keys: Sequence[pa.Array]) -> pa.Array:
        """Returns the position of each key's row, or null where there is none."""
        found, missing = np.zeros(len(keys[0]), np.int64), np.ones(len(keys[0]), bool)
        if len(self.hashes):
            hashes = _hashes(keys)
            first = np.searchsorted(self.hashes, hashes)
            for step in range(self.most):  # one step, unless different keys have equal hashes
                at = self.order[np.minimum(first + step, len(self.order) - 1)]
                same = np.ones(len(at), bool)
                for own, wanted in zip(self.keys, keys, strict=True):
                    equal = pc.fill_null(pc.equal(own.take(pa.array(at)), wanted), False)
                    same &= equal.to_numpy(zero_copy_only=False)
                found[same & missing] = at[same & missing]
                missing &= ~same
        return pa.array(found, mask=missing)

    def _refuse_repeated(self, where: str) -> None:
        equal = self.hashes[1:] == self.hashes[:-1]
        rows = np.flatnonzero(np.append(equal, False) | np.insert(equal, 0, False))
        seen: set[tuple[object, ...]] = set()
        for place in self.order[rows]:
            key = tuple(column[int(place)].as_py() for column in self.keys)
            if key in seen:
                shown = ", ".join(f"{value}" for value in key)
                raise DataError(where, "each key once", f"key {shown} more than once", "Remove duplicate keys.")
            seen.add(key)


class SourceColumns:
    """Looks up columns of a feature source by key. Caches the days it has read, up to CACHE_BYTES.

    Attributes:
        rows: Rows passed to `look_up`.
        matched: Of those, rows with a key that the source has.
    """

    def __init__(self, source: FeatureSource, names: Sequence[str]) -> None:
        self.source, self.names = source, list(names)
        self.on = source.source.on
        self.cache: dict[datetime.date | None, KeyIndex] = {}
        self.rows = self.matched = 0

    def look_up(self, keys: Sequence[pa.Array], day: datetime.date) -> list[pa.Array]:
        """Returns the columns for rows of a day with these keys. Unknown keys give nulls."""
        index = self.load_day(day if self.source.source.day_column is not None else None)
        where = self.source.pinned.where
        wanted = [to_key_form(f"{where}, key '{name}'", key) for name, key in zip(self.on, keys, strict=True)]
        places = index.find(wanted)
        self.rows, self.matched = self.rows + len(places), self.matched + len(places) - places.null_count
        return [values.take(places) for values in index.values]

    def load_day(self, day: datetime.date | None) -> KeyIndex:
        """Returns the rows of a day, from the cache if possible."""
        if day not in self.cache:
            source, names = self.source, self.names
            parts = list(source.rows(day, names))
            kinds = [key_type("key", source.raw.field(name).type) for name in self.on]
            keys = [_concatenate([part[0][i] for part in parts], kind) for i, kind in enumerate(kinds)]
            fields = [source.schema.field(name).type for name in names]
            values = [_concatenate([part[1][i] for part in parts], kind) for i, kind in enumerate(fields)]
            where = source.pinned.where if day is None else f"{source.pinned.where}, day {day}"
            self.cache[day] = KeyIndex(keys, values, where)
            while len(self.cache) > 1 and sum(index.nbytes for index in self.cache.values()) > CACHE_BYTES:
                self.cache.pop(next(iter(self.cache)))
        return self.cache[day]


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
        self.columns = list(columns)
        needed = [*columns, *compared_columns(late)]
        wanted = {source: [name for name in source.schema.names if name in needed] for source in sources}
        self.sides = [SourceColumns(source, names) for source, names in wanted.items() if names]
        keys = [name for side in self.sides for name in side.on]
        own = list(dict.fromkeys(name for name in [*needed, *keys] if name not in added.names))
        self.inner: SnapshotReader = warehouse.reader(reference, own, early)
        types = {field.name: field.type for field in [*self.inner.empty().schema, *added]}
        self.types = {name: types[name] for name in self.columns}
        self._keep = None
        if late is not None:
            schema = to_filter_schema([*table, *added])
            self._keep, _ = make_mask(late, schema)

    @property
    def bytes_read(self) -> int:
        """Bytes of the columns read so far, compressed, including those of feature sources."""
        return self.inner.bytes_read + sum(side.source.bytes_read for side in self.sides)

    @property
    def bytes_stored(self) -> int:
        """Bytes of all columns of the table's row groups read so far, compressed."""
        return self.inner.bytes_stored

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

    def empty(self) -> pa.Table:
        """Returns an empty table of the columns."""
        return pa.table({name: pa.array([], kind) for name, kind in self.types.items()})

    def read(self, fragment: Fragment) -> pa.Table:
        """Reads the rows of one row group that pass the filter, columns in the requested order."""
        return pa.Table.from_batches(list(self.batches(fragment)), self.empty().schema)

    def batches(self, fragment: Fragment) -> Iterator[pa.RecordBatch]:
        """Yields the rows of `read` in batches that fit into the processor's cache."""
        for batch in self.inner.batches(fragment):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            for side in self.sides:
                added = side.look_up([columns[name] for name in side.on], fragment.day)
                columns |= dict(zip(side.names, added, strict=True))
            rows = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
            yield keep_rows(rows, self._keep, self.columns)


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


def to_filter_schema(columns: Iterable[pa.Field]) -> Schema:
    """Returns columns as an Iceberg schema with fresh field ids."""
    fields = [pa.field(field.name, without_field_ids(field.type)) for field in columns]
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(pa.schema(fields)))


def without_field_ids(kind: pa.DataType) -> pa.DataType:
    """Removes field ids from a type: in another table they mean other columns."""
    return pa.list_(without_field_ids(kind.value_type)) if is_list(kind) else kind


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


def _hashes(keys: Sequence[pa.Array]) -> npt.NDArray[np.uint64]:
    return row_hashes([sparse_from_arrow("key", key) for key in keys], 0)


def _present(keys: Sequence[pa.Array]) -> pa.Array:
    there = pc.is_valid(keys[0])
    for key in keys[1:]:
        there = pc.and_(there, pc.is_valid(key))
    return there


def _concatenate(parts: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    return pa.concat_arrays(parts) if parts else pa.array([], kind)

"""Rows of a pinned snapshot with columns of side sources beside their own; nothing is written."""

import datetime
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.expressions import And, BooleanExpression
from pyiceberg.expressions.visitors import bind
from pyiceberg.io.pyarrow import _pyarrow_to_schema_without_ids, expression_to_pyarrow
from pyiceberg.schema import Schema, assign_fresh_schema_ids

from pipeline.data.joined.source import Pinned, SideSource, added_columns
from pipeline.data.joined.stored import in_key_form, key_type
from pipeline.errors import DataError
from pipeline.transforms.column import sparse_from_arrow
from pipeline.transforms.kernels.row_hashes import row_hashes
from storage.arrow import is_list
from storage.reader import Fragment, SnapshotReader, SnapshotRef, kept
from storage.warehouse import Warehouse

KEPT_BYTES = 256 << 20
"""Days of a side source that a process keeps, together; the newest is kept whatever its size."""


class Keyed:
    """Rows of a side source that are found by their key.

    Args:
        where: The source as an error names it.
    Raises:
        DataError: If a key is there twice.
    """

    def __init__(self, keys: Sequence[pa.Array], values: Sequence[pa.Array], where: str) -> None:
        there = _present(keys)  # a row without a key is nobody's
        if not pc.all(there).as_py():
            keys, values = [key.filter(there) for key in keys], [value.filter(there) for value in values]
        hashes = _hashes(keys)
        self.order = np.argsort(hashes, kind="stable")
        self.hashes, self.keys, self.values = hashes[self.order], list(keys), list(values)
        starts = np.flatnonzero(np.diff(self.hashes, prepend=~self.hashes[:1]) != 0) if len(hashes) else np.zeros(0)
        self.most = int(np.diff(starts, append=len(hashes)).max(initial=0))
        if self.most > 1:
            self._refuse_repeated(where)

    @property
    def nbytes(self) -> int:
        """Memory of it, nearly."""
        return sum(int(array.nbytes) for array in [*self.keys, *self.values, self.order, self.hashes])

    def places(self, keys: Sequence[pa.Array]) -> pa.Array:
        """Where each key's row is; null where there is none."""
        found, missing = np.zeros(len(keys[0]), np.int64), np.ones(len(keys[0]), bool)
        if len(self.hashes):
            hashes = _hashes(keys)
            first = np.searchsorted(self.hashes, hashes)
            for step in range(self.most):  # one, unless keys differ whose hashes do not
                at = self.order[np.minimum(first + step, len(self.order) - 1)]
                same = np.ones(len(at), bool)
                for own, asked in zip(self.keys, keys, strict=True):
                    equal = pc.fill_null(pc.equal(own.take(pa.array(at)), asked), False)
                    same &= equal.to_numpy(zero_copy_only=False)
                found[same & missing] = at[same & missing]
                missing &= ~same
        return pa.array(found, mask=missing)

    def _refuse_repeated(self, where: str) -> None:
        again = self.hashes[1:] == self.hashes[:-1]
        rows = np.flatnonzero(np.append(again, False) | np.insert(again, 0, False))
        seen: set[tuple[object, ...]] = set()
        for place in self.order[rows]:
            key = tuple(column[int(place)].as_py() for column in self.keys)
            if key in seen:
                shown = ", ".join(f"{value}" for value in key)
                raise DataError(where, "each key once", f"key {shown} more than once", "Remove duplicate keys.")
            seen.add(key)


class Side:
    """A side source as some columns of it are joined; keeps what it has read, up to KEPT_BYTES.

    Attributes:
        rows, matched: Rows that were given to `add`, and those whose key the source has.
    """

    def __init__(self, source: SideSource, names: Sequence[str]) -> None:
        self.source, self.names = source, list(names)
        self.on = source.source.on
        self.kept: dict[datetime.date | None, Keyed] = {}
        self.rows = self.matched = 0

    def add(self, keys: Sequence[pa.Array], day: datetime.date) -> list[pa.Array]:
        """The columns for rows of a day with these keys; null for a key that the source does not have."""
        keyed = self.of_day(day if self.source.source.day_column is not None else None)
        where = self.source.pinned.where
        asked = [in_key_form(f"{where}, key '{name}'", key) for name, key in zip(self.on, keys, strict=True)]
        places = keyed.places(asked)
        self.rows, self.matched = self.rows + len(places), self.matched + len(places) - places.null_count
        return [values.take(places) for values in keyed.values]

    def of_day(self, day: datetime.date | None) -> Keyed:
        """The rows of a day, read if they are not kept."""
        if day not in self.kept:
            source, names = self.source, self.names
            parts = list(source.rows(day, names))
            kinds = [key_type("key", source.raw.field(name).type) for name in self.on]
            keys = [_whole([part[0][i] for part in parts], kind) for i, kind in enumerate(kinds)]
            fields = [source.schema.field(name).type for name in names]
            values = [_whole([part[1][i] for part in parts], kind) for i, kind in enumerate(fields)]
            where = source.pinned.where if day is None else f"{source.pinned.where}, day {day}"
            self.kept[day] = Keyed(keys, values, where)
            while len(self.kept) > 1 and sum(keyed.nbytes for keyed in self.kept.values()) > KEPT_BYTES:
                self.kept.pop(next(iter(self.kept)))
        return self.kept[day]


class JoinedReader:
    """Reads row groups as SnapshotReader does, with columns of side sources beside those of the table.

    The part of the filter that names table columns alone is left to the table's reader, the rest is applied to the
    joined rows.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        reference: SnapshotRef,
        columns: Sequence[str],
        row_filter: BooleanExpression | None,
        sources: Sequence[SideSource],
    ) -> None:
        table = warehouse.schema(reference)
        added = added_columns(sources, table)
        early, late = _parted(row_filter, added.names)
        self.columns = list(columns)
        needed = [*columns, *_columns_of(late)]
        wanted = {source: [name for name in source.schema.names if name in needed] for source in sources}
        self.sides = [Side(source, names) for source, names in wanted.items() if names]
        keys = [name for side in self.sides for name in side.on]
        own = list(dict.fromkeys(name for name in [*needed, *keys] if name not in added.names))
        self.inner: SnapshotReader = warehouse.reader(reference, own, early)
        types = {field.name: field.type for field in [*self.inner.empty().schema, *added]}
        self.types = {name: types[name] for name in self.columns}
        self._keep = None
        if late is not None:
            schema = for_filters([*table, *added])
            self._keep = expression_to_pyarrow(bind(schema, late, case_sensitive=True), schema)

    @property
    def bytes_read(self) -> int:
        """Size in the files of the columns read so far, those of side sources too."""
        return self.inner.bytes_read + sum(side.source.bytes_read for side in self.sides)

    @property
    def bytes_stored(self) -> int:
        """Size in the table's files of all columns of the row groups read so far."""
        return self.inner.bytes_stored

    @property
    def reads(self) -> int:
        """Stretches of the table's files read so far."""
        return self.inner.reads

    def fragments(self, days: Iterable[datetime.date] | None = None) -> list[Fragment]:
        """The row groups of the snapshot, ordered by day, file and position."""
        return self.inner.fragments(days)

    def empty(self) -> pa.Table:
        """No rows of the columns asked for."""
        return pa.table({name: pa.array([], kind) for name, kind in self.types.items()})

    def read(self, fragment: Fragment) -> pa.Table:
        """Rows of one row group that the filter keeps, columns in the order asked for."""
        return pa.Table.from_batches(list(self.batches(fragment)), self.empty().schema)

    def batches(self, fragment: Fragment) -> Iterator[pa.RecordBatch]:
        """The rows of `read` in parts small enough for the processor's cache."""
        for batch in self.inner.batches(fragment):
            columns = dict(zip(batch.schema.names, batch.columns, strict=True))
            for side in self.sides:
                added = side.add([columns[name] for name in side.on], fragment.day)
                columns |= dict(zip(side.names, added, strict=True))
            rows = pa.RecordBatch.from_arrays(list(columns.values()), list(columns))
            yield kept(rows, self._keep, self.columns)


Reader = SnapshotReader | JoinedReader


def reader_of(
    warehouse: Warehouse,
    reference: SnapshotRef,
    columns: Sequence[str],
    row_filter: BooleanExpression | None,
    joined: Sequence[Pinned],
) -> Reader:
    """A reader of columns of a snapshot and of side sources; of the snapshot alone where no other is wanted."""
    if joined:
        known = set(warehouse.schema(reference).names)
        if not known.issuperset([*columns, *_columns_of(row_filter)]):
            sources = [SideSource(pinned, warehouse) for pinned in joined]
            return JoinedReader(warehouse, reference, columns, row_filter, sources)
    return warehouse.reader(reference, columns, row_filter)


def schema_of(warehouse: Warehouse, reference: SnapshotRef, joined: Sequence[Pinned]) -> pa.Schema:
    """All columns that a reader can give: those of the table, then those of the side sources. Raises as they do."""
    table = warehouse.schema(reference)
    added = added_columns([SideSource(pinned, warehouse) for pinned in joined], table)
    return pa.schema([*table, *added])


def filter_schema(warehouse: Warehouse, reference: SnapshotRef, joined: Sequence[Pinned]) -> Schema:
    """The columns that a filter can name."""
    if not joined:
        return warehouse.table(reference.table).schema()
    return for_filters(schema_of(warehouse, reference, joined))


def for_filters(columns: Iterable[pa.Field]) -> Schema:
    """Columns as an Iceberg schema whose field ids are those of no table."""
    fields = [pa.field(field.name, bare(field.type)) for field in columns]
    return assign_fresh_schema_ids(_pyarrow_to_schema_without_ids(pa.schema(fields)))


def bare(kind: pa.DataType) -> pa.DataType:
    """The type without field ids, which mean other columns in another table."""
    return pa.list_(bare(kind.value_type)) if is_list(kind) else kind


def _parted(
    row_filter: BooleanExpression | None, added: Sequence[str]
) -> tuple[BooleanExpression | None, BooleanExpression | None]:
    """What a filter says of table columns alone, and the rest of it."""
    parts = _conjuncts(row_filter)
    late = [part for part in parts if set(_columns_of(part)) & set(added)]
    return _all_of([part for part in parts if part not in late]), _all_of(late)


def _conjuncts(expression: BooleanExpression | None) -> list[BooleanExpression]:
    if isinstance(expression, And):
        return [*_conjuncts(expression.left), *_conjuncts(expression.right)]
    return [] if expression is None else [expression]


def _all_of(parts: Sequence[BooleanExpression]) -> BooleanExpression | None:
    return And(*parts) if len(parts) > 1 else parts[0] if parts else None


def _columns_of(expression: BooleanExpression | None) -> list[str]:
    """Names of the columns that an unbound expression compares."""
    inner = [getattr(expression, side) for side in ("left", "right", "child") if hasattr(expression, side)]
    if inner:
        return [name for part in inner for name in _columns_of(part)]
    term: Any = getattr(expression, "term", None)
    return [] if term is None else [term.name]


def _hashes(keys: Sequence[pa.Array]) -> npt.NDArray[np.uint64]:
    return row_hashes([sparse_from_arrow("key", key) for key in keys], 0)


def _present(keys: Sequence[pa.Array]) -> pa.Array:
    there = pc.is_valid(keys[0])
    for key in keys[1:]:
        there = pc.and_(there, pc.is_valid(key))
    return there


def _whole(parts: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    return pa.concat_arrays(parts) if parts else pa.array([], kind)

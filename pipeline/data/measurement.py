"""Statistics of columns by day, added up batch by batch while rows pass by. Memory holds sketches, not rows."""

import datetime
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.profile import SCHEMA
from pipeline.data.sketches import (
    COUNT,
    MAXIMUM,
    MEAN,
    MINIMUM,
    SQUARES,
    Sketch,
    add_hashes,
    add_ids,
    add_numbers,
    estimate_distinct,
)
from pipeline.transforms.kernels.hashing import Ids, fnv1a
from storage.arrow import is_bytes, is_list, is_text, is_uuid, split_days
from storage.keys import MOST_KEYS
from storage.reader import DAY, SnapshotRef
from storage.warehouse import Warehouse

Kind = Literal["number", "id", "text", "ids", "other"]
Row = dict[str, Any]


def kind_of(kind: pa.DataType, number: bool = False) -> Kind:
    """Returns the kind of a column.

    Args:
        number: Whether its integers are numbers, not ids.
    """
    if pa.types.is_dictionary(kind):
        return kind_of(kind.value_type, number)
    if is_list(kind):
        return "ids" if kind_of(kind.value_type) in ("id", "text") else "other"
    if pa.types.is_floating(kind) or (number and _is_whole(kind)):
        return "number"
    if is_text(kind):
        return "text"
    return "id" if _is_whole(kind) else "other"


def _is_whole(kind: pa.DataType) -> bool:
    return pa.types.is_boolean(kind) or (pa.types.is_integer(kind) and not pa.types.is_uint64(kind))


class _Column:
    """Statistics of one column on one day.

    Attributes:
        present: Rows with a value: not null, not NaN, not an empty list.
    """

    def __init__(self) -> None:
        self.present, self.lengths = 0, Counter[int]()
        self.sketch: Sketch | None = None

    def add(self, values: pa.Array, kind: Kind) -> None:
        """Adds values, none of them null. Those of maps and structs are counted, and no more."""
        if is_list(values.type):
            self._add_lists(values)
            return
        if pa.types.is_nested(values.type) or pa.types.is_interval(values.type):
            self.present += len(values)
            return
        self.sketch = sketch = self.sketch or Sketch.new()
        if kind == "number":
            numbers = _numpy(values, pa.float64())
            self.present += add_numbers(numbers, numbers.view(np.int64), *sketch)
            return
        self.present += len(values)
        if kind == "id":
            add_ids(_numpy(values, pa.int64()), *sketch)
        else:
            add_hashes(_hashes(values), sketch.registers, sketch.histogram)

    def _add_lists(self, values: pa.Array) -> None:
        """Adds lists. Those of floats have lengths only."""
        lengths, counts = np.unique(_numpy(pc.list_value_length(values), pa.int64()), return_counts=True)
        self.lengths.update(dict(zip(lengths.tolist(), counts.tolist(), strict=True)))
        self.present = sum(count for length, count in self.lengths.items() if length)
        if kind_of(values.type) == "ids":
            self.sketch = sketch = self.sketch or Sketch.new()
            items = _plain(values.flatten().drop_null())
            if is_text(items.type):
                add_hashes(_hashes(items), sketch.registers, sketch.histogram)
            else:
                add_ids(_numpy(items, pa.int64()), *sketch)

    def row(self, kind: Kind) -> Row:
        """Returns the statistics by name."""
        found: Row = {"present": self.present, **_length_statistics(self.lengths)}
        if self.sketch is None:
            return found if kind == "other" else found | {"distinct": 0}
        found["distinct"] = estimate_distinct(self.sketch.registers)
        if kind != "other" and self.sketch.histogram.any():
            found["histogram"] = self.sketch.histogram.tolist()
        moments = self.sketch.moments
        if kind in ("number", "id") and moments[COUNT]:
            found |= {
                "mean": float(moments[MEAN]),
                "deviation": float(np.sqrt(moments[SQUARES] / moments[COUNT])),
                "minimum": float(moments[MINIMUM]),
                "maximum": float(moments[MAXIMUM]),
            }
        return found


class ProfileBuilder:
    """Adds up the statistics of columns, and of keys of maps as columns such as `dense_17`.

    Args:
        schema: Of the batches. Columns with names that start with `__` are skipped, and so is `day`.
        numbers: Integer columns that are counts or the label, not ids.
        day: The day of all rows. None: the column `day` has it.
        only: Columns to measure. None: all.

    Example:
        >>> day = datetime.date(2025, 3, 1)
        >>> table = pa.table({"day": [day] * 3, "price": [1.0, 3.0, None]})
        >>> builder = ProfileBuilder(table.schema)
        >>> builder.add(table.to_batches()[0])
        >>> builder.table().select(["column", "rows", "present", "mean"]).to_pylist()
        [{'column': 'price', 'rows': 3, 'present': 2, 'mean': 2.0}]
    """

    def __init__(
        self,
        schema: pa.Schema,
        numbers: Collection[str] = (),
        day: datetime.date | None = None,
        only: Collection[str] | None = None,
    ) -> None:
        self.day = day
        names = [name for name in schema.names if name != DAY and not name.startswith("__")]
        names = [name for name in names if only is None or name in only]
        self.kinds: dict[str, Kind] = {name: kind_of(schema.field(name).type, name in numbers) for name in names}
        self.counts = Counter[datetime.date]()
        self._columns: dict[datetime.date, dict[str, _Column]] = {}
        self._maps = {name: _MapColumn(name, self.kinds) for name in self.kinds if _has_keys(schema.field(name).type)}

    def add(self, batch: pa.RecordBatch) -> None:
        """Adds rows."""
        for day, part in split_days(batch, DAY) if self.day is None else [(self.day, batch)]:
            self.counts[day] += part.num_rows
            columns = self._columns.setdefault(day, {name: _Column() for name in self.kinds})
            for name, kind in self.kinds.items():
                values, column = _plain(part.column(name).drop_null()), columns[name]
                column.add(values, kind)
                if name in self._maps:
                    self._maps[name].add(day, values)

    def watch(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """Yields batches, and adds their rows."""
        for batch in batches:
            self.add(batch)
            yield batch

    def table(self) -> pa.Table:
        """Returns the statistics as a table of SCHEMA, ordered by day and column. `drift` stays null."""
        kinds: dict[str, Kind] = dict(self.kinds)
        found = {day: dict(columns) for day, columns in self._columns.items()}
        for one in self._maps.values():
            if one.is_named:
                kinds |= dict.fromkeys(one.names, one.kind)
                for day, columns in one.columns.items():
                    found[day] |= columns
        rows = [
            {**column.row(kinds[name]), DAY: day, "column": name, "kind": kinds[name], "rows": self.counts[day]}
            for day, columns in sorted(found.items())
            for name, column in sorted(columns.items())
        ]
        return pa.Table.from_pylist(rows, SCHEMA)


def measure(
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    numbers: Collection[str] = (),
    day: datetime.date | None = None,
) -> pa.Table:
    """Measures all columns of rows by day, as `ProfileBuilder`."""
    builder = ProfileBuilder(schema, numbers, day)
    for batch in batches:
        builder.add(batch)
    return builder.table()


def measure_days(
    warehouse: Warehouse, snapshot: SnapshotRef, days: Collection[datetime.date], numbers: Collection[str] = ()
) -> pa.Table:
    """Measures days that are already written, as `measure` does."""
    reader = warehouse.reader(snapshot, warehouse.schema(snapshot).names)
    batches = (batch for fragment in reader.fragments(days) for batch in reader.batches(fragment))
    return measure(reader.empty().schema, batches, numbers)


class _MapColumn:
    """Statistics of the keys of a map from whole numbers. The items of a scored list are its ids.

    Args:
        taken: Columns of the table. A key that is also a column, while a table is flattened, is measured as a column.
    """

    def __init__(self, name: str, taken: Collection[str]) -> None:
        self.name, self.taken = name, taken
        self.kind: Kind = "other"
        self.names: dict[str, None] = {}
        self.columns: dict[datetime.date, dict[str, _Column]] = {}

    @property
    def is_named(self) -> bool:
        """Whether its keys are few enough to be named."""
        return len(self.names) <= MOST_KEYS

    def add(self, day: datetime.date, maps: pa.MapArray) -> None:
        """Adds maps, none of them null."""
        keys, values = (_inside(maps, child) for child in (maps.keys, maps.items))
        numbers = _numpy(keys, pa.int64())
        order = np.argsort(numbers, kind="stable")
        numbers, values = numbers[order], values.take(pa.array(order))
        if pa.types.is_map(values.type):
            offsets = values.offsets.cast(pa.int64())
            values = pa.LargeListArray.from_arrays(offsets, values.keys, mask=values.is_null())
        self.kind = kind_of(values.type)
        found, begins = np.unique(numbers, return_index=True)
        columns = self.columns.setdefault(day, {})
        for key, begin, end in zip(found.tolist(), begins, [*begins[1:], len(numbers)], strict=True):
            name = f"{self.name}_{key}"
            if key < 0 or name in self.taken or not self.is_named:
                continue
            self.names[name] = None
            column, part = columns.setdefault(name, _Column()), _plain(values.slice(begin, end - begin).drop_null())
            column.add(part, self.kind)


def _has_keys(kind: pa.DataType) -> bool:
    """Whether a column is a map whose keys are features."""
    if not pa.types.is_map(kind) or not _is_whole(kind.key_type):
        return False
    return not pa.types.is_map(kind.item_type) or _is_whole(kind.item_type.key_type)


def _inside(maps: pa.MapArray, child: pa.Array) -> pa.Array:
    """Returns the part of a map's keys or items that belongs to its rows, none of which is null."""
    offsets = maps.offsets
    begin, end = offsets[0].as_py(), offsets[-1].as_py()
    return child.slice(begin, end - begin)


def _plain(values: pa.Array) -> pa.Array:
    return values.dictionary_decode() if pa.types.is_dictionary(values.type) else values


def _numpy(values: pa.Array, kind: pa.DataType) -> np.ndarray[Any, Any]:
    """Returns values without nulls as numbers of a type."""
    return np.ascontiguousarray((values if values.type == kind else values.cast(kind)).to_numpy(zero_copy_only=False))


def _hashes(values: pa.Array) -> Ids:
    """Returns a number for each value, none of which is null, that tells it from others."""
    kind = values.type
    if pa.types.is_temporal(kind):
        return _numpy(values.cast(pa.int32()) if kind.bit_width == 32 else values, pa.int64())
    if is_uuid(kind):
        values = values.storage
    if is_bytes(values.type):
        values = values.cast(pa.large_binary())
    elif values.type != pa.large_string():
        values = values.cast(pa.large_string())
    _, offsets, data = values.buffers()
    starts = np.frombuffer(offsets, np.int64)[values.offset : values.offset + len(values) + 1]
    return fnv1a(np.frombuffer(data or b"", np.uint8), starts)


def _length_statistics(counts: Mapping[int, int]) -> Row:
    lengths = sorted(length for length in counts if length > 0)
    present = sum(counts[length] for length in lengths)
    if not present:
        return {}
    cumulated = np.cumsum([counts[length] for length in lengths])
    return {
        "mean_length": sum(length * counts[length] for length in lengths) / present,
        "p99_length": lengths[int(np.searchsorted(cumulated, np.ceil(0.99 * present)))],
        "max_length": lengths[-1],
    }

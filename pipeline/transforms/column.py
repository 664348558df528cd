"""Column: one feature of many rows as plain buffers, a number or a list per row."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import DataError
from pipeline.transforms.kernels import hashing
from pipeline.transforms.kinds import Kind
from storage.arrow import is_bytes, is_list, is_text, is_uuid

Ids = npt.NDArray[np.int64]
UNITS = {"s": 1.0, "ms": 1e3, "us": 1e6, "ns": 1e9}
"""Units of a timestamp in a second."""


@dataclass(frozen=True, eq=False)
class Column:
    """Values of one feature.

    A dense column has one float64 per row; null is NaN. A sparse column has int64 ids and offsets: row i owns ids
    [offsets[i], offsets[i + 1]); a null list is empty. A column of scores has a list of float64 per row, such as the
    scores of a list of ids.

    Shapes:
        dense: values float64 [N], offsets None. sparse: values int64 [V], offsets int64 [N + 1], offsets[0] == 0.
        scores: values float64 [V], offsets int64 [N + 1].
    """

    values: npt.NDArray[Any]
    offsets: Ids | None = None

    @property
    def kind(self) -> Kind:
        """The kind of the rows: a number, ids or scores."""
        if self.offsets is None:
            return "dense"
        return "sparse" if self.values.dtype == np.int64 else "scores"

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def take(self, rows: Ids) -> "Column":
        """Returns the rows at the given positions, in the given order.

        Example:
            >>> column = Column(np.array([7, 8, 9]), np.array([0, 2, 2, 3]))
            >>> column.take(np.array([2, 0])).values.tolist()
            [9, 7, 8]
        """
        if self.offsets is None:
            return Column(self.values[rows])
        return Column(*hashing.take_lists(self.values, self.offsets, rows))

    def slice(self, start: int, stop: int) -> "Column":
        """Returns rows [start, stop)."""
        if self.offsets is None:
            return Column(self.values[start:stop])
        offsets = self.offsets[start : stop + 1]
        return Column(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def concatenate(columns: list[Column]) -> Column:
    """Returns the rows of several columns, one column after the other.

    Example:
        >>> concatenate([Column(np.array([1.0])), Column(np.array([2.0]))]).values.tolist()
        [1.0, 2.0]
    """
    if len(columns) == 1:
        return columns[0]
    values = np.concatenate([column.values for column in columns])
    if columns[0].offsets is None:
        return Column(values)
    lengths = np.concatenate([np.diff(column.offsets) for column in columns if column.offsets is not None])
    return Column(values, hashing.offsets_of(lengths))


def from_arrow(name: str, array: pa.Array, kind: Kind) -> Column:
    """Reads a raw column as numbers, ids or scores. Shares buffers with Arrow if possible.

    Raises:
        DataError: If the column holds nothing of that kind.
    """
    readers = {"dense": dense_from_arrow, "sparse": sparse_from_arrow, "scores": scores_from_arrow}
    return readers[kind](name, array)


def dense_from_arrow(name: str, array: pa.Array) -> Column:
    """Reads numbers (integers, floats, decimals, booleans) as float64, times and dates as seconds since 1970.

    Null becomes NaN. A time without a zone and the midnight of a date are UTC.

    Raises:
        DataError: If the column holds neither numbers nor times.
    Example:
        >>> dense_from_arrow("day", pa.array([1, None], pa.date32())).values.tolist()
        [86400.0, nan]
    """
    kind, per_second = array.type, 1.0
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif pa.types.is_timestamp(kind):
        array, per_second = array.cast(pa.int64()), UNITS[kind.unit]
    elif pa.types.is_date(kind):
        array, per_second = array.cast(pa.timestamp("s")).cast(pa.int64()), 1.0
    elif not (
        pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind) or pa.types.is_null(kind)
    ):
        raise DataError(f"column '{name}'", "numbers", f"{kind}", "Move it to features.sparse, or convert the column.")
    if array.type != pa.float64():
        array = array.cast(pa.float64(), safe=False)
    values = (pc.fill_null(array, np.nan) if array.null_count else array).to_numpy()
    return Column(values if per_second == 1.0 else values / per_second)


def sparse_from_arrow(name: str, array: pa.Array) -> Column:
    """Reads ids: integers, strings, bytes, UUIDs, or whole floats and decimals, one per row or a list of them.

    A float is the id of its whole number: pandas stores integers as floats if one is missing. So is a decimal, exactly.
    A UUID is the id of its text, and bytes are that of the text that they encode. Strings become 64-bit FNV-1a hashes
    of their UTF-8 bytes: equal strings are equal ids in every run and on every machine. Null rows become empty lists.
    Nulls inside lists are dropped.

    Raises:
        DataError: If the column holds nothing of these, or a number with a fraction or of more than 64 bits.
    """
    if pa.types.is_floating(array.type):
        array = _whole(name, array)
    if is_list(array.type):
        offsets, items = _lists(array)
        if items.null_count:
            present = _valid(items)
            offsets = hashing.offsets_of(present)[offsets]
            items = items.drop_null()
        return Column(_ids(name, items), offsets)
    if array.null_count:
        return Column(_ids(name, array.drop_null()), hashing.offsets_of(_valid(array)))
    return Column(_ids(name, array), np.arange(len(array) + 1))


def _whole(name: str, array: pa.Array) -> pa.Array:
    """Returns floats as integers; NaN becomes null."""
    array = pc.if_else(pc.is_nan(array), pa.scalar(None, array.type), array)
    try:
        return array.cast(pa.int64())
    except pa.ArrowInvalid:
        values = array.drop_null().to_numpy(zero_copy_only=False)
        odd = values[~(np.abs(values) <= 2.0**53) | (values != np.floor(values))]
        raise DataError(
            f"column '{name}'", "ids: whole numbers", f"{odd[0]:g}" if len(odd) else f"{array.type}",
            "Add a bucketize op, or move it to features.dense.",
        ) from None  # fmt: skip


def whole_decimals(where: str, array: pa.Array) -> pa.Array:
    """Returns decimals as int64 ids. Those of 2^63 to 2^64 keep all their bits.

    Raises:
        DataError: If one has a fraction or more bits.
    """
    try:
        whole = array.cast(pa.decimal128(38, 0))
        return whole.cast(pa.int64())
    except pa.ArrowInvalid:
        values = [one.as_py() for one in array]
    odd = [one for one in values if one is not None and (one % 1 or not -(2**63) <= one < 2**64)]
    if odd:
        raise DataError(where, "ids: whole numbers of 64 bits", f"{odd[0]}", "Write it as text, or add a bucketize op.")
    numbers = [None if one is None else int(one) for one in values]
    wrapped = [one if one is None or one < 2**63 else one - 2**64 for one in numbers]
    return pa.array(wrapped, pa.int64())


def _uuid_text(array: pa.Array) -> pa.Array:
    """Returns UUIDs as text, as an ingest stores them."""
    return pa.array([None if one is None else str(one) for one in array.to_pylist()], pa.large_string())


def scores_from_arrow(name: str, array: pa.Array) -> Column:
    """Reads lists of numbers as float64. A null number becomes NaN and keeps its place; a null list is empty.

    Raises:
        DataError: If the column does not hold lists of numbers.
    """
    if not is_list(array.type):
        raise DataError(
            f"column '{name}'", "lists of numbers", f"{array.type}", "Name a column that holds lists of numbers."
        )
    offsets, items = _lists(array)
    return Column(dense_from_arrow(name, items).values, offsets)


def _lists(array: pa.Array) -> tuple[Ids, pa.Array]:
    """Returns offsets that begin at 0 and the items. The items are a view unless a null row hides some."""
    if len(array) == 0:
        return np.zeros(1, np.int64), array.values.slice(0, 0)
    stored = array.offsets.to_numpy()  # a slice has the offsets of its own rows
    offsets = stored.astype(np.int64)
    offsets -= offsets[0]
    if array.null_count:
        lengths = np.diff(offsets)
        hidden = lengths * ~_valid(array)
        if hidden.any():  # a null row may own items nevertheless
            return hashing.offsets_of(lengths - hidden), array.flatten()
    return offsets, array.values.slice(int(stored[0]), int(offsets[-1]))


def _valid(array: pa.Array) -> npt.NDArray[np.bool_]:
    """Returns whether each value is present. Much faster than Arrow's own conversion to NumPy."""
    bits = array.buffers()[0]
    if bits is None:
        return np.full(len(array), array.null_count == 0)
    stop = array.offset + len(array)
    return np.unpackbits(np.frombuffer(bits, np.uint8), count=stop, bitorder="little")[array.offset :].view(np.bool_)


def _ids(name: str, items: pa.Array) -> Ids:
    kind = items.type
    if pa.types.is_dictionary(kind):
        items = items.dictionary_decode()
        kind = items.type
    if pa.types.is_decimal(kind):
        return whole_decimals(f"column '{name}'", items).to_numpy(zero_copy_only=False)
    if is_uuid(kind):
        items, kind = _uuid_text(items), pa.large_string()
    if is_text(kind) or is_bytes(kind):
        items = items.cast(pa.large_binary())
        _, offsets, data = items.buffers()
        text = np.frombuffer(data, np.uint8) if data is not None and data.size else np.empty(0, np.uint8)
        starts = (
            np.frombuffer(offsets, np.int64)[items.offset : items.offset + len(items) + 1]
            if len(items)
            else np.zeros(1, np.int64)
        )
        return hashing.fnv1a(text, starts)
    if pa.types.is_uint64(kind):
        return items.to_numpy(zero_copy_only=False).view(np.int64)  # ids above 2^63 keep all their bits
    if pa.types.is_int64(kind):
        return items.to_numpy()
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind) or pa.types.is_null(kind):
        return items.cast(pa.int64()).to_numpy(zero_copy_only=False)
    if pa.types.is_date32(kind):
        return items.cast(pa.int32()).cast(pa.int64()).to_numpy(zero_copy_only=False)
    raise DataError(
        f"column '{name}'",
        "integers, strings or lists of them",
        f"{kind}",
        "Add a bucketize op, or convert the column.",
    )

"""Compares two versions of a column, such as served and recomputed values, and says in what way they differ."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.stored import to_micros
from pipeline.errors import ConfigError
from storage.arrow import is_list, is_text

SAME, MISSING_THEN, MISSING_NOW, ORDER, OTHER = range(5)
WAYS = ("same", "missing then", "missing now", "other order", "other value")
"""Ways in which a value differs, as reports name them. Each differing value counts for one."""
EXAMPLES = 3
"""Rows that are named for each way."""
Codes = npt.NDArray[np.int8]
Distances = npt.NDArray[np.float64]


def common_form(where: str, then: pa.DataType, now: pa.DataType) -> pa.DataType:
    """Returns the type in which values of two types are compared.

    Raises:
        ConfigError: If there is none.
    Example:
        >>> common_form("column 'age'", pa.float64(), pa.int32())
        DataType(double)
    """
    if pa.types.is_dictionary(then):
        then = then.value_type
    if pa.types.is_null(then):
        then = now
    if is_list(now) and is_list(then):
        return pa.large_list(common_form(where, then.value_type, now.value_type))
    if is_text(now) and (is_text(then) or pa.types.is_string_view(then)):
        return pa.large_string()
    if _is_time(now) and _is_time(then):
        return pa.timestamp("us")
    if pa.types.is_boolean(now) and pa.types.is_boolean(then):
        return pa.bool_()
    if _is_whole(now) and _is_whole(then):
        return pa.int64()
    if _is_number(now) and _is_number(then):
        return pa.float64()
    raise ConfigError(where, f"{now}, or a type like it", f"{then}", "Write the column in the type of the table.")


def to_form(where: str, array: pa.Array, form: pa.DataType) -> pa.Array:
    """Casts a column to the type from `common_form`. NaN becomes null, and a null list an empty one."""
    if pa.types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if pa.types.is_null(array.type):
        array = pa.nulls(len(array), form)
    if is_list(form):
        offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(_lengths(array))])
        return pa.LargeListArray.from_arrays(offsets, to_form(where, array.flatten(), form.value_type))
    if pa.types.is_timestamp(form):
        return to_micros(where, array).cast(form)
    if pa.types.is_floating(form):
        numbers = (array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array).cast(form, safe=False)
        return pc.if_else(pc.is_nan(numbers), pa.scalar(None, form), numbers)
    return array.cast(form, safe=False)


def compare(then: pa.Array, now: pa.Array, tolerance: float) -> tuple[Codes, Distances]:
    """Compares values row by row.

    Args:
        then, now: In their common form.
        tolerance: Largest difference of equal fractions, relative to the larger one.
    Returns:
        For each row the way in which it differs, or SAME, int8 [N], and the distance of its numbers, float64 [N].
    """
    distances = np.zeros(len(then))
    if is_list(then.type):
        return _compare_lists(then, now), distances
    codes = _find_missing(then.is_null(), now.is_null())
    other = pc.fill_null(pc.not_equal(then, now), False).to_numpy(zero_copy_only=False)
    if _is_number(then.type) and not pa.types.is_boolean(then.type):
        one, two = (pc.fill_null(array, 0).to_numpy().astype(np.float64) for array in (then, now))
        with np.errstate(invalid="ignore"):  # of infinities, which are no fraction of each other
            distances = np.where(other, np.abs(one - two), 0.0)
            if pa.types.is_floating(then.type):
                endless = np.isinf(one) | np.isinf(two)
                other &= endless | (distances > tolerance * np.maximum(np.abs(one), np.abs(two)))
    codes[other] = OTHER
    return codes, np.where(other, distances, 0.0)


def _compare_lists(then: pa.Array, now: pa.Array) -> Codes:
    lengths = [_lengths(array) for array in (then, now)]
    codes = _find_missing(*(pa.array(length == 0) for length in lengths))
    alike = lengths[0] == lengths[1]
    codes[~alike & (codes == SAME)] = OTHER
    rows = np.repeat(np.flatnonzero(alike), lengths[0][alike])
    found = [array.filter(pa.array(alike)).flatten() for array in (then, now)]
    one, two = np.split(pa.concat_arrays(found).dictionary_encode("encode").indices.to_numpy(), 2)
    codes[rows[one != two]] = ORDER
    codes[rows[one[np.lexsort((one, rows))] != two[np.lexsort((two, rows))]]] = OTHER
    return codes


def _find_missing(then: pa.Array, now: pa.Array) -> Codes:
    """Returns the rows that one side lacks, given which are missing on each."""
    gone = [array.to_numpy(zero_copy_only=False) for array in (then, now)]
    return np.select([gone[0] & ~gone[1], gone[1] & ~gone[0]], [MISSING_THEN, MISSING_NOW], SAME).astype(np.int8)


class ColumnDifferences:
    """Counts the ways in which the values of a column differ, and keeps a few rows of each.

    Args:
        tolerance: As in `compare`.
    """

    def __init__(self, name: str, tolerance: float) -> None:
        self.name, self.tolerance = name, tolerance
        self.largest = 0.0
        self.counts = np.zeros(len(WAYS), np.int64)
        self.examples: dict[str, list[list[str]]] = {}

    def add(self, then: pa.Array, now: pa.Array, keys: Sequence[pa.Array]) -> None:
        """Compares further rows.

        Args:
            then, now: In their common form.
            keys: Columns that tell which row it is.
        """
        codes, distances = compare(then, now, self.tolerance)
        self.counts += np.bincount(codes, minlength=len(WAYS))
        self.largest = max(self.largest, float(distances.max(initial=0.0)))
        for code in np.unique(codes[codes != SAME]).tolist():
            kept = self.examples.setdefault(WAYS[code], [])
            for row in np.flatnonzero(codes == code)[: EXAMPLES - len(kept)].tolist():
                kept.append([f"{key[row].as_py()}" for key in keys])

    def summary(self) -> dict[str, Any]:
        """Returns counts, shares and examples for a report."""
        rows = int(self.counts.sum())
        differing = rows - int(self.counts[SAME])
        return {
            "feature": self.name,
            "rows": rows,
            "differing": differing,
            "share": differing / rows if rows else 0.0,
            "largest_difference": float(np.nan_to_num(self.largest)) or None,
            "reasons": {
                way: int(count) for way, count in zip(WAYS, self.counts, strict=True) if count and way != "same"
            },
            "examples": self.examples,
        }


def _lengths(lists: pa.Array) -> npt.NDArray[np.int64]:
    return pc.fill_null(pc.list_value_length(lists), 0).to_numpy().astype(np.int64)


def _is_time(kind: pa.DataType) -> bool:
    return bool(pa.types.is_timestamp(kind) or pa.types.is_date(kind))


def _is_whole(kind: pa.DataType) -> bool:
    return bool(pa.types.is_integer(kind) or pa.types.is_boolean(kind))


def _is_number(kind: pa.DataType) -> bool:
    return bool(_is_whole(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind))

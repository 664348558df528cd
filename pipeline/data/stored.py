"""Converts columns of a feature source: into stored types, comparable keys and days."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ConfigError, DataError
from pipeline.transforms.column import whole_decimals
from storage.arrow import is_list, is_text

MICROS = 1_000_000
"""Microseconds of a second."""
DAY_MICROS = 86_400 * MICROS
ZONED = r"^.{10}.*([Zz]|[+-]\d{2}(:?\d{2})?)$"
"""A text with more than its day that ends in a time zone."""
SMALL = {pa.int8(): pa.int32(), pa.int16(): pa.int32(), pa.uint8(): pa.int32(), pa.uint16(): pa.int32()}
WIDER = {**SMALL, pa.uint32(): pa.int64(), pa.uint64(): pa.int64(), pa.float16(): pa.float32()}
UNCHANGED = {pa.bool_(), pa.int32(), pa.int64(), pa.float32(), pa.float64(), pa.date32()}


def stored_type(where: str, kind: pa.DataType) -> pa.DataType:
    """Returns the type that the warehouse stores a column in, which is also the type that its reader returns.

    Raises:
        DataError: If there is no such type.
    Example:
        >>> stored_type("column 'x'", pa.list_(pa.uint16()))
        LargeListType(large_list<item: int32>)
    """
    if is_list(kind) or pa.types.is_fixed_size_list(kind):
        return pa.large_list(_plain(where, kind.value_type))
    return _plain(where, kind)


def _plain(where: str, kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _plain(where, kind.value_type)
    if kind in UNCHANGED:
        return kind
    if kind in WIDER:
        return WIDER[kind]
    if pa.types.is_decimal(kind):
        return pa.int64() if kind.scale <= 0 else pa.float64()
    if pa.types.is_date64(kind):
        return pa.date32()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if is_text(kind) or pa.types.is_string_view(kind):
        return pa.large_string()
    raise DataError(where, "numbers, text, dates or lists of them", f"type {kind}", "Leave it out of `columns`.")


def to_stored_form(array: pa.Array, kind: pa.DataType) -> pa.Array:
    """Casts a column to the type from `stored_type`. Ids above 2^63 keep all their bits.

    Decimals of scale 0 are integers. Others are floats, as long as their whole numbers stay apart.

    Raises:
        DataError: If a decimal has more bits.
    """
    if array.type == kind:
        return array
    values = array.flatten() if is_list(array.type) or pa.types.is_fixed_size_list(array.type) else array
    if pa.types.is_timestamp(values.type):  # a cast would round nanoseconds before 1970 up
        cut = pc.floor_temporal(values, 1, "microsecond")
        return (cut if values is array else _with_values(array, cut, kind)).cast(kind, safe=False)
    if not pa.types.is_decimal(values.type):
        return array.cast(kind, safe=False)
    if values.type.scale <= 0:
        whole = whole_decimals("column of a feature source", values)
        return whole if values is array else _with_values(array, whole, kind)
    large = pc.greater(pc.abs(values), pa.scalar(2**53, pa.decimal128(16, 0)))
    if pc.any(pc.and_(large, pc.equal(pc.round(values), values))).as_py():
        raise DataError(
            "column of a feature source", f"decimals whose whole numbers are below 2^53, {2**53}", "larger ones",
            f"Write ids with scale 0 or as text, instead of {values.type}.",
        )  # fmt: skip
    return array.cast(kind, safe=False)


def _with_values(lists: pa.Array, values: pa.Array, kind: pa.DataType) -> pa.Array:
    """Returns lists with other values, as `kind`."""
    lengths = pc.fill_null(pc.list_value_length(lists), 0)
    offsets = np.concatenate([[0], np.cumsum(lengths.to_numpy(zero_copy_only=False))])
    return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), values, mask=lists.is_null()).cast(kind)


def to_key_form(where: str, array: pa.Array) -> pa.Array:
    """Casts a key column to its comparable form: integers, text or dates.

    Raises:
        ConfigError: If its values cannot be keys.
    """
    kind = array.type
    if pa.types.is_dictionary(kind):
        array, kind = array.dictionary_decode(), kind.value_type
    if pa.types.is_integer(kind) or pa.types.is_boolean(kind):
        return array.cast(pa.int64(), safe=False)
    if pa.types.is_date(kind):
        return array.cast(pa.date32())
    if is_text(kind) or pa.types.is_string_view(kind):
        return array.cast(pa.large_string())
    if pa.types.is_decimal(kind):
        return whole_decimals(where, array)
    raise ConfigError(where, "integers, text or dates", f"{kind}", "Convert it, or name another column.")


def key_type(where: str, kind: pa.DataType) -> pa.DataType:
    """Returns the comparable type of keys. Raises as `to_key_form`."""
    return to_key_form(where, pa.array([], kind)).type


def to_numbers(array: pa.Array) -> pa.Array:
    """Returns numbers or booleans as float64, with NaN for null."""
    plain = array.cast(pa.int8()) if pa.types.is_boolean(array.type) else array
    return pc.fill_null(plain.cast(pa.float64(), safe=False), float("nan"))


def to_micros(where: str, array: pa.Array, late: bool = False) -> pa.Array:
    """Returns each timestamp or date as int64 microseconds since 1970 in UTC. A part of a microsecond counts as one.

    Args:
        late: Takes a date for the last microsecond of its day, in place of the first.
    Raises:
        ConfigError: If the column holds neither.
        DataError: If a time is farther from 1970 than 64 bits of microseconds.
    Example:
        >>> to_micros("time", pa.array([1_500, 2_000], pa.timestamp("ns"))).to_pylist()
        [2, 2]
    """
    kind = array.type
    if not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        raise ConfigError(where, "timestamps or dates", f"{kind}", "Convert it, or name another column.")
    try:
        return _micros(array, late)
    except pa.ArrowInvalid as error:
        reason = f"{error}".split("\n")[0].rstrip(".")
        raise DataError(where, "times within 290,000 years of 1970", reason, "Repair the values.") from error


def _micros(array: pa.Array, late: bool) -> pa.Array:
    kind = array.type
    if pa.types.is_date(kind):
        first = array.cast(pa.date32()).cast(pa.timestamp("us")).cast(pa.int64())
        return pc.add_checked(first, DAY_MICROS - 1) if late else first
    if kind.unit == "ns":
        whole = pc.divide(array.cast(pa.int64()), 1_000)  # towards 0
        up = pc.greater(pc.subtract(array.cast(pa.int64()), pc.multiply(whole, 1_000)), 0)
        return pc.add(whole, up.cast(pa.int64()))
    return array.cast(pa.timestamp("us", kind.tz)).cast(pa.int64())


def to_days(where: str, array: pa.Array) -> pa.Array:
    """Returns the day of each date, timestamp (in UTC) or ISO text.

    Raises:
        DataError: If a value is none of these, or a text has a zone: its first ten characters may not be its UTC day.
    """
    kind = array.type
    if pa.types.is_timestamp(kind) and kind.tz:
        array = array.cast(pa.timestamp(kind.unit, "UTC")).cast(pa.timestamp(kind.unit))
    if is_text(kind):
        if pc.any(pc.match_substring_regex(array, ZONED)).as_py():
            raise DataError(where, "text without a time zone", "text with one", "Convert it to timestamps.")
        array = pc.utf8_slice_codeunits(array, 0, 10)
    elif not (pa.types.is_date(kind) or pa.types.is_timestamp(kind)):
        raise DataError(where, "dates, timestamps or ISO text", f"{kind}", "Name another column.")
    try:
        return array.cast(pa.date32(), safe=False)
    except pa.ArrowInvalid as error:
        raise DataError(
            where, "dates, timestamps or ISO text", f"{error}".split("\n")[0], "Repair the values."
        ) from error

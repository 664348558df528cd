"""Raw rows as callers send them -> the columns that the warehouse would hold."""

import datetime
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import ConfigError, InputError, closest_names
from pipeline.transforms.kinds import Kind
from pipeline.transforms.plan.plan import Plan
from pipeline.transforms.plan.schedule import single_array
from storage.arrow import is_list, is_text

Rows: TypeAlias = "pd.DataFrame | pa.Table | Mapping[str, Any] | str"
"""A data frame, an Arrow table, a dict with a list per column, or the JSON text of such a dict or of a list of rows."""
EXACT_FLOAT = 2.0**53
"""From here on a float may represent several ids."""
ISO_TIME = re.compile(
    r"\d{4}-\d\d-\d\d([T ]\d\d(:\d\d(:\d\d([.,]\d+)?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?"
    r"|\d{8}T\d\d(\d\d(\d\d([.,]\d+)?)?)?(Z|[+-]\d\d(\d\d)?)?",
    re.ASCII,
)
"""A date, or a time with or without an offset from UTC, in the extended or the basic form of ISO 8601."""
FAILURES = (TypeError, ValueError, OverflowError, LookupError, pa.ArrowException)
"""What Python and Arrow raise for values that they cannot convert."""
TYPES: Mapping[str, pa.DataType] = {
    "double": pa.float64(),
    "long": pa.int64(),
    "string": pa.string(),
    "timestamp": pa.timestamp("us"),
    "list<double>": pa.list_(pa.float64()),
    "list<long>": pa.list_(pa.int64()),
    "list<string>": pa.list_(pa.string()),
}
"""Types of raw columns, as written in the model's record."""


def table_of(rows: Rows, columns: Mapping[str, str], defaults: Mapping[str, Any]) -> pa.Table:
    """Converts rows to a table of the given columns. Other columns of the rows are dropped.

    Args:
        columns: Name -> type, a key of TYPES.
        defaults: Column -> the value to use if the rows lack the column or a value is of the wrong kind.
    Raises:
        InputError: If a column is absent or a value is of the wrong kind. It names row and column.
    Example:
        >>> table_of({"age": [25, None]}, {"age": "double", "user": "long"}, {"user": 7}).to_pylist()
        [{'age': 25.0, 'user': 7}, {'age': None, 'user': 7}]
    """
    sent = _columns(rows)
    absent = [name for name in columns if name not in sent]
    if len(absent) == len(columns):
        remedy = "Add them; a batch without rows names them, too."
    else:  # without any column the number of rows is unknown
        absent = [name for name in absent if name not in defaults]
        remedy = "Add them."
    if absent:
        raise InputError("input", f"columns {', '.join(columns)}", f"none named {', '.join(absent)}", remedy)
    lengths = {name: len(sent[name]) for name in columns if name in sent}
    count = max(lengths.values())
    short = [f"{name} of {length}" for name, length in lengths.items() if length < count]
    if short:
        raise InputError("input", f"{count} values in each column", ", ".join(short), "Send null for what is unknown.")
    return pa.table(
        {
            name: _array(name, kind, sent[name] if name in sent else [defaults[name]] * count, defaults)
            for name, kind in columns.items()
        }
    )


def columns_of(plan: Plan, schema: pa.Schema) -> dict[str, str]:
    """Returns the raw columns that a plan reads, with their types for callers of the model."""
    return {name: column_type(schema.field(name).type, plan.raw[name]) for name in plan.columns}


def column_type(kind: pa.DataType, uses: Sequence[Kind]) -> str:
    """Returns a raw column's type for callers of the model. Numbers are doubles unless they are ids."""
    if is_list(kind):
        return f"list<{column_type(kind.value_type, uses)}>"
    if is_text(kind):
        return "string"
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        return "timestamp"
    return "long" if "sparse" in uses and not pa.types.is_floating(kind) else "double"


def check_defaults(defaults: Mapping[str, Any], columns: Mapping[str, str]) -> None:
    """Refuses defaults that a model with these raw columns cannot take.

    Raises:
        ConfigError: If the model does not read a column, or its default is of the wrong kind.
    """
    for name, value in defaults.items():
        where = f"registration.defaults '{name}'"
        if name not in columns:
            remedy = f"Closest: {closest_names(name, list(columns))}. Correct the name."
            raise ConfigError(where, "a column that the features read", "none of that name", remedy)
        try:
            _plain(value, columns[name])
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(where, columns[name], repr(value)[:60], "Correct the value.") from None


def _columns(rows: Rows) -> Mapping[str, Any]:
    if isinstance(rows, str):
        try:
            rows = json.loads(rows)
        except (ValueError, RecursionError) as error:
            raise InputError("input", "JSON text", f"{error}"[:120], "Correct the text.") from None
        if isinstance(rows, list) and all(isinstance(row, dict) for row in rows):
            return {name: [row.get(name) for row in rows] for name in dict.fromkeys(key for row in rows for key in row)}
    if isinstance(rows, pd.DataFrame | pa.Table):
        names = list(rows.columns if isinstance(rows, pd.DataFrame) else rows.column_names)
        twice = [str(name) for name, count in Counter(names).items() if count > 1]
        if twice:
            raise InputError("input", "columns of different names", f"{', '.join(twice)} twice", "Rename one of them.")
        if isinstance(rows, pa.Table):
            return {name: single_array(rows.column(name)) for name in names}
        return {name: rows[name] for name in names}
    if not isinstance(rows, Mapping):
        expected = "a data frame, a dict of lists, or the JSON text of such a dict or of a list of rows"
        raise InputError("input", expected, repr(rows)[:60], "Send one of them.")
    for name, values in rows.items():
        if not isinstance(values, list | tuple | np.ndarray | pd.Series):
            raise InputError(f"column '{name}'", "a list of values, one a row", repr(values)[:60], "Put it in a list.")
    return rows


def _array(name: str, kind: str, values: Sequence[Any], defaults: Mapping[str, Any]) -> pa.Array:
    """Converts a column to Arrow. None and NaN are null.

    Most columns have one type throughout. They do not pass through Python value by value.
    """
    if isinstance(values, pa.Array) and kind == "timestamp" and pa.types.is_timestamp(values.type):
        values = values.view(pa.timestamp(values.type.unit))  # the zone only says how to show the same time
        with suppress(pa.ArrowException):  # a cast would round nanoseconds before 1970 up
            return pc.floor_temporal(values, 1, "microsecond").cast(TYPES[kind])
    elif kind != "timestamp":  # times with and without a zone may be mixed
        try:
            found = values if isinstance(values, pa.Array) else pa.array(values, from_pandas=True)
            if kind == "long":
                found = _single(found)
            if fits(found.type, kind):
                wanted = TYPES[kind]
                exact = "double" not in kind and not _has_uint64(found.type)  # those wrap, as in an ingest
                return found if found.type == wanted else found.cast(wanted, safe=exact)
        except FAILURES:
            pass
    plain = []
    for row, sent in enumerate(values):
        value = sent
        try:
            value = sent.as_py() if isinstance(sent, pa.Scalar) else sent
            plain.append(_plain(value, kind))
        except FAILURES:
            if name not in defaults:
                shown = f"a {value.type} beyond its range" if isinstance(value, pa.Scalar) else repr(value)[:60]
                raise InputError(f"row {row}, column '{name}'", kind, shown, _remedy(kind, value)) from None
            plain.append(_plain(defaults[name], kind))
    return pa.array(plain, TYPES[kind])


def _has_uint64(kind: pa.DataType) -> bool:
    return _has_uint64(kind.value_type) if is_list(kind) else pa.types.is_uint64(kind)


def _single(found: pa.Array) -> pa.Array:
    """Converts ids sent as lists of at most one, or as exact floats, to numbers. Returns others unchanged."""
    if is_list(found.type):
        lengths = pc.list_value_length(found)
        if (pc.max(lengths).as_py() or 0) <= 1:
            found = found.values.take(pc.if_else(pc.equal(lengths, 1), found.offsets[:-1], None))
    elif pa.types.is_floating(found.type) and (pc.max(pc.abs(found)).as_py() or 0.0) < EXACT_FLOAT:
        return found.cast(pa.int64())  # raises if there is a fraction
    return found


def fits(found: pa.DataType, kind: str) -> bool:
    """Whether values of an Arrow type can be cast to a kind without loss."""
    if pa.types.is_null(found):
        return True
    if kind.startswith("list"):
        return is_list(found) and fits(found.value_type, kind[5:-1])
    if kind == "string":
        return is_text(found)
    if kind == "double" and pa.types.is_floating(found):
        return True
    return kind != "timestamp" and (pa.types.is_integer(found) or pa.types.is_boolean(found))


def _remedy(kind: str, value: Any) -> str:
    if kind == "long" and isinstance(value, float) and value.is_integer():
        return "A null in the column made it a float; send ids as [id]."
    if kind == "timestamp":
        return "Send ISO 8601 such as 2025-03-04T12:00:00Z, or a type with a unit such as Arrow's timestamp, or null."
    return "Correct the value, or leave it null."


def _plain(value: Any, kind: str) -> Any:
    """Converts a value to what Arrow expects for a kind of column.

    Raises:
        TypeError, ValueError, OverflowError: If it is not of that kind.
    """
    if kind == "long" and isinstance(value, list | tuple | np.ndarray) and len(value) <= 1:
        value = value[0] if len(value) else None
    return _item(value, kind)


def _item(value: Any, kind: str) -> Any:
    if value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and np.isnan(value)):
        return None
    if kind == "timestamp":
        return _utc(value)
    if kind.startswith("list"):
        if not isinstance(value, list | tuple | np.ndarray):
            raise TypeError("not a list")
        return [_item(item, kind[5:-1]) for item in value]
    if isinstance(value, np.generic):
        return _item(value.item(), kind)
    if kind == "string" and isinstance(value, str):
        value.encode()  # raises for half a surrogate pair
        return value
    if kind == "double" and isinstance(value, int | float):
        return float(value)
    if kind == "long" and isinstance(value, int | float):
        if isinstance(value, float) and (not value.is_integer() or abs(value) >= EXACT_FLOAT):
            raise ValueError("a float that has lost digits")  # pandas converts integers to floats if there is a null
        whole = int(value)
        return int(np.uint64(whole)) - 2**64 if whole >= 2**63 else int(np.int64(whole))  # wraps, as in an ingest
    raise TypeError(f"not a {kind}")


def _utc(value: Any) -> pd.Timestamp:
    """Converts a time, a date or its ISO 8601 text to a naive UTC time, as the warehouse has it.

    pandas would guess what other text means, such as `3/4/2025`, `12:30` or `now`, and a number's unit.
    """
    if isinstance(value, str):
        if not ISO_TIME.fullmatch(value):
            raise ValueError("not ISO 8601")
        value = datetime.datetime.fromisoformat(value)
    elif not isinstance(value, datetime.date | np.datetime64):
        raise TypeError("not a time")
    time = pd.Timestamp(value)
    return (time if time.tzinfo is None else time.tz_convert(None)).floor("us")

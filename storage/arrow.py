"""Questions about Arrow types, of which some come in a small and a large variant, and rows by day."""

import datetime
import itertools
from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np
import pyarrow as pa

Rows = TypeVar("Rows", pa.Table, pa.RecordBatch)


def is_text(kind: pa.DataType) -> bool:
    """Tells whether a type is string or large_string.

    Example:
        >>> is_text(pa.large_string()), is_text(pa.binary())
        (True, False)
    """
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def is_bytes(kind: pa.DataType) -> bool:
    """Tells whether a type is bytes of any or of one length.

    Example:
        >>> is_bytes(pa.binary(4)), is_bytes(pa.uuid())
        (True, False)
    """
    return bool(pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind))


def is_uuid(kind: pa.DataType) -> bool:
    """Tells whether a type is a UUID.

    Example:
        >>> is_uuid(pa.uuid())
        True
    """
    return isinstance(kind, pa.UuidType)


def is_list(kind: pa.DataType) -> bool:
    """Tells whether a type is list or large_list, of any values.

    Example:
        >>> is_list(pa.large_list(pa.int64())), is_list(pa.list_(pa.int64(), 2))
        (True, False)
    """
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def has_zone(kind: pa.DataType) -> bool | None:
    """Tells whether times of a type have a zone. None: dates, or no times.

    Example:
        >>> [has_zone(kind) for kind in (pa.timestamp("us", "UTC"), pa.timestamp("us"), pa.date32())]
        [True, False, None]
    """
    return kind.tz is not None if pa.types.is_timestamp(kind) else None


def differing_clocks(where: str, zones: Mapping[str, bool | None]) -> str | None:
    """Says that times with a zone are compared with times without one. None: all are of one kind.

    Args:
        zones: Column, as people are told of it -> whether its times have a zone. None: dates, which fit both.
    Example:
        >>> differing_clocks("source.outcomes", {"event_time": False, "outcome_time": True})
        'source.outcomes: outcome_time has a zone, event_time has none and counts as UTC. Is it local? Write it in UTC.'
        >>> differing_clocks("source.outcomes", {"event_time": False, "outcome_time": None})
    """
    named = {zone: column for column, zone in zones.items() if zone is not None}
    if len(named) < 2:
        return None
    zoned, plain = named[True], named[False]
    return f"{where}: {zoned} has a zone, {plain} has none and counts as UTC. Is it local? Write it in UTC."


def is_same_type(old: pa.DataType, new: pa.DataType) -> bool:
    """Tells whether two types are the same to Iceberg, which does not know large lists and strings.

    Example:
        >>> is_same_type(pa.list_(pa.string()), pa.large_list(pa.large_string()))
        True
    """
    lists = [is_list(kind) for kind in (old, new)]
    if any(lists):
        return all(lists) and is_same_type(old.value_type, new.value_type)
    if pa.types.is_map(old) and pa.types.is_map(new):
        return is_same_type(old.key_type, new.key_type) and is_same_type(old.item_type, new.item_type)
    texts = [is_text(kind) for kind in (old, new)]
    return all(texts) or old == new


def family_of(kind: pa.DataType) -> str:
    """Returns the family of types that Iceberg can widen into each other (int to long, float to double).

    Example:
        >>> family_of(pa.list_(pa.int32())) == family_of(pa.large_list(pa.int64()))
        True
    """
    if is_list(kind):
        return f"list of {family_of(kind.value_type)}"
    if pa.types.is_map(kind):
        return f"map of {family_of(kind.key_type)} to {family_of(kind.item_type)}"
    if pa.types.is_timestamp(kind):
        return "timestamp with zone" if kind.tz else "timestamp"
    if is_text(kind):
        return "text"
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return "bytes"
    return "integer" if pa.types.is_integer(kind) else "float" if pa.types.is_floating(kind) else str(kind)


def split_days(rows: Rows, column: str) -> Iterator[tuple[datetime.date, Rows]]:
    """Yields the days of rows in order, each with its rows in theirs. A slice of ordered rows copies nothing.

    Args:
        column: Of dates, none of them null.

    Example:
        >>> first, second = datetime.date(2025, 1, 1), datetime.date(2025, 1, 2)
        >>> rows = pa.table({"day": [second, first, second], "id": [1, 2, 3]})
        >>> [(day.day, part["id"].to_pylist()) for day, part in split_days(rows, "day")]
        [(1, [2]), (2, [1, 3])]
    """
    days = rows.column(column).cast(pa.int32()).to_numpy()
    if not (days[1:] >= days[:-1]).all():
        order = np.argsort(days, kind="stable")
        rows, days = rows.take(pa.array(order)), days[order]
    begins: list[int] = np.unique(days, return_index=True)[1].tolist()
    for begin, end in itertools.pairwise([*begins, len(days)]):
        part = rows.slice(begin, end - begin)
        yield part.column(column)[0].as_py(), part

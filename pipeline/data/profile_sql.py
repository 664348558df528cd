"""SQL for the statistics of a profile, of many columns at once and of keys of maps.

Values of columns are stacked, as in pandas: a row for each row and column, with the column's number. Aggregates by
number are planned once. Those of fifty columns side by side are planned fifty times, which took forty times as long on
a small day.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple

from storage.keys import MOST_KEYS
from storage.query import quote
from storage.reader import DAY

_WHOLE = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT", "UTINYINT", "USMALLINT", "UINTEGER", "BOOLEAN")
_REAL = ("FLOAT", "DOUBLE")
_MAP = re.compile(r"MAP\((\w+), (.+)\)")
_LARGEST = "1e150"
"""Larger values overflow when squared. They count as present and in nothing else."""
VALUE_STATISTICS = ("present", "distinct", "mean", "deviation", "minimum", "maximum", "histogram")
"""What `value_query` returns after day and number."""
Kind = Literal["number", "id", "text", "ids", "other"]
SINGLE: Mapping[Kind, str] = {"number": "DOUBLE", "id": "BIGINT", "text": "VARCHAR"}
"""Kind of a column that is no list -> type that its values are measured as."""


class Stack(NamedTuple):
    """Values of several columns of one kind."""

    query: str
    """SQL for rows of (day, number, value)."""
    names: Mapping[int, str]
    """Number -> column."""


def kind_of(type_name: str, number: bool) -> Kind:
    """Returns the kind of a column.

    Args:
        type_name: Its type in DuckDB.
        number: Whether its integers are numbers, not ids.
    """
    if type_name in _REAL or (number and type_name in _WHOLE):
        return "number"
    if type_name in _WHOLE:
        return "id"
    if type_name.removesuffix("[]") in (*_WHOLE, "VARCHAR") and type_name.endswith("[]"):
        return "ids"
    return "text" if type_name == "VARCHAR" else "other"


class MapColumn(NamedTuple):
    """A map from whole numbers whose keys are features."""

    name: str
    value: str
    """SQL of a key's value, of an `entry`."""
    type_name: str
    """Type of that value. Of a scored list it is that of its ids."""

    @classmethod
    def of(cls, name: str, type_name: str) -> "MapColumn | None":
        """Returns None for a column that is no such map."""
        found = _MAP.fullmatch(type_name)
        if found is None or found[1] not in _WHOLE:
            return None
        scored = _MAP.fullmatch(found[2])
        if scored is not None:
            return cls(name, "map_keys(entry.value)", f"{scored[1]}[]") if scored[1] in _WHOLE else None
        return cls(name, "entry.value", found[2])

    def key_query(self, source: str) -> str:
        """Builds a query for the map's keys in order, at most one more than can be named."""
        entries = f"SELECT unnest(map_keys({quote(self.name)})) AS key FROM {source}"
        return f"SELECT DISTINCT key FROM ({entries}) WHERE key >= 0 ORDER BY key LIMIT {MOST_KEYS + 1}"

    def stack(self, source: str, keys: Sequence[int], value: str) -> Stack:
        """Stacks the values of keys, and of those between them that have no name.

        Args:
            keys: In order.
            value: SQL of a value, made of `value` of this map.
        """
        entries = f"SELECT {DAY}, unnest(map_entries({quote(self.name)})) AS entry FROM {source}"
        query = (
            f"SELECT {DAY}, entry.key AS number, {value} AS value FROM ({entries})"
            f" WHERE entry.key BETWEEN {keys[0]} AND {keys[-1]}"
        )
        return Stack(query, {key: f"{self.name}_{key}" for key in keys})


def stack(source: str, names: Sequence[str], values: Sequence[str]) -> Stack:
    """Stacks values of columns.

    Args:
        values: SQL of each column's value.
    """
    numbers = ", ".join(map(str, range(len(names))))
    query = f"SELECT {DAY}, unnest([{numbers}]) AS number, unnest([{', '.join(values)}]) AS value FROM {source}"
    return Stack(query, dict(enumerate(names)))


def value_query(below: Stack, kind: Kind) -> str:
    """Builds a query for rows of (day, number, statistics) of values that are no lists, of the type in `SINGLE`."""
    present, finite, bucket = "value", "NULL::DOUBLE", _text_bucket("value")
    if kind == "number":
        present = "CASE WHEN NOT isnan(value) THEN value END"
        finite = f"CASE WHEN abs(value) < {_LARGEST} THEN value END"
        bucket = _number_bucket(finite)
    elif kind == "id":
        finite, bucket = "value::DOUBLE", _id_bucket("value")
    return (
        f"SELECT {DAY}, number, count(present), approx_count_distinct(present), avg(finite), stddev_pop(finite),"
        " min(finite), max(finite), histogram(bucket)"
        f" FROM (SELECT {DAY}, number, {present} AS present, {finite} AS finite, {bucket} AS bucket"
        f" FROM ({below.query})) GROUP BY {DAY}, number"
    )


def length_query(below: Stack) -> str:
    """Builds a query for rows of (day, number, histogram of the values), which are lengths of lists."""
    return f"SELECT {DAY}, number, histogram(value) FROM ({below.query}) GROUP BY {DAY}, number"


def item_query(below: Stack, text: bool) -> str:
    """Builds a query for rows of (day, number, distinct items, histogram) of values that are lists."""
    bucket = _text_bucket("item") if text else _id_bucket("item")
    return (
        f"SELECT {DAY}, number, approx_count_distinct(item), histogram({bucket})"
        f" FROM (SELECT {DAY}, number, unnest(value) AS item FROM ({below.query})) GROUP BY {DAY}, number"
    )


def other_query(source: str, types: Mapping[str, str]) -> str:
    """Builds a query for rows of day, and for each column the number of values and of distinct ones, null for maps."""
    parts = [
        f"count({quote(name)}), {'NULL' if kind.startswith('MAP(') else f'approx_count_distinct({quote(name)})'}"
        for name, kind in types.items()
    ]
    return f"SELECT {DAY}, {', '.join(parts)} FROM {source} GROUP BY {DAY}"


def _number_bucket(value: str) -> str:
    """Returns SQL for the bucket of a number: zero, 11 buckets for positive numbers and 4 for negative ones.

    Positive buckets are half powers of two, negative ones powers of two, both cyclic. The bucket depends on the value
    alone, so any two days can be compared. A change of scale shows unless it is a power of 2 ** 5.5, so a change of
    unit (10, 60, 1000, 1024) does.
    """
    positive = f"1 + ((CAST(floor(2 * log2({value})) AS INTEGER) % 11) + 11) % 11"
    negative = f"12 + ((CAST(floor(log2(-({value}))) AS INTEGER) % 4) + 4) % 4"
    return f"CASE WHEN {value} = 0 THEN 0 WHEN {value} > 0 THEN {positive} WHEN {value} < 0 THEN {negative} END"


def _id_bucket(column: str) -> str:
    """Returns SQL for the bucket of an id. DuckDB's own hash may change between versions."""
    return f"((CAST({column} AS BIGINT) % 2147483647) * 1103515245) % 2147483647 & 15"


def _text_bucket(column: str) -> str:
    return f"CAST('0x' || md5({column})[1:1] AS INTEGER)"

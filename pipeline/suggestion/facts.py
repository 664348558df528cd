"""Facts that a suggestion is based on: column statistics over all days, and correlations with the label."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import duckdb

from pipeline.data.profile import Rows, measure_columns
from storage.query import quote
from storage.reader import DAY

ALL = datetime.date(1970, 1, 1)
"""The day given to all rows when they are measured together."""
AT_A_TIME = 200
"""How many columns are correlated with the label in one pass."""


@dataclass(frozen=True)
class ColumnFacts:
    """One column over all rows."""

    name: str
    type: str
    """DuckDB type."""
    kind: str
    rows: int
    present: int
    distinct: int = 0
    mean_length: float | None = None
    p99_length: int | None = None
    max_length: int | None = None
    mean: float | None = None
    deviation: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    correlation: float | None = None
    """Correlation of the values with the label. None: no numbers, or constant."""
    presence: float | None = None
    """Correlation of having a value with the label."""

    @property
    def coverage(self) -> float:
        """Share of rows with a value."""
        return self.present / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class TableFacts:
    """Facts about all columns of a table or source."""

    facts: tuple[ColumnFacts, ...]
    days: tuple[tuple[datetime.date, int], ...]
    """Days and their rows, in order."""

    @property
    def rows(self) -> int:
        """Rows of all days."""
        return sum(rows for _, rows in self.days)


def observe(
    connection: duckdb.DuckDBPyConnection,
    rows: Rows,
    types: Mapping[str, str],
    days: Mapping[datetime.date, int],
    label: str,
) -> TableFacts:
    """Measures all columns over all days at once.

    Args:
        types: Column -> its DuckDB type.
        days: Day -> its rows.
    """
    columns = {name: kind for name, kind in types.items() if name != DAY and not name.startswith("__")}
    total = {ALL: sum(days.values())}
    as_one = f"SELECT * REPLACE (DATE '{ALL}' AS {DAY}) FROM"
    measured = measure_columns(connection, lambda names: f"({as_one} {rows(names)})", columns, total, {label})
    pairs = correlate(connection, rows, columns, label)
    found = {row["column"]: row for row in measured.to_pylist()}
    return TableFacts(
        facts=tuple(_fact(found[name], kind, *pairs.get(name, (None, None))) for name, kind in columns.items()),
        days=tuple(sorted(days.items())),
    )


def _fact(row: Mapping[str, Any], kind: str, correlation: float | None, presence: float | None) -> ColumnFacts:
    shared = {key: row[key] for key in ColumnFacts.__dataclass_fields__ if row.get(key) is not None}
    return ColumnFacts(**shared, name=row["column"], type=kind, correlation=correlation, presence=presence)


def correlate(
    connection: duckdb.DuckDBPyConnection, rows: Rows, types: Mapping[str, str], label: str
) -> dict[str, tuple[float | None, float | None]]:
    """Returns column -> correlation with the label of its values, and of having a value."""
    names = [name for name in types if name not in (label, DAY)]
    found: dict[str, tuple[float | None, float | None]] = {}
    for start in range(0, len(names), AT_A_TIME):
        part = names[start : start + AT_A_TIME]
        pairs = [
            f"{{'value': {_value(name, types[name], label)}, 'presence': {_presence(name, label)}}}" for name in part
        ]
        (row,) = connection.sql(f"SELECT {', '.join(pairs)} FROM {rows([label, *part])}").fetchall()
        found |= {name: (_number(one["value"]), _number(one["presence"])) for name, one in zip(part, row, strict=True)}
    return found


def _value(name: str, kind: str, label: str) -> str:
    if kind.endswith("[]") or kind.startswith(("TIMESTAMP", "DATE")):
        return "NULL"
    value = f"TRY_CAST({quote(name)} AS DOUBLE)"
    return f"corr(CASE WHEN abs({value}) < 1e100 THEN {value} END, {quote(label)})"


def _presence(name: str, label: str) -> str:
    return f"corr(CAST({quote(name)} IS NOT NULL AS INTEGER), {quote(label)})"


def _number(value: float | None) -> float | None:
    return None if value is None or value != value else value

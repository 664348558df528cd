"""Statistics of a table's columns by day, measured with DuckDB and stored in a table of their own."""

import datetime
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pyarrow as pa

from pipeline.data.profile_sql import (
    SINGLE,
    VALUE_STATISTICS,
    MapColumn,
    Stack,
    item_query,
    kind_of,
    length_query,
    other_query,
    stack,
    value_query,
)
from storage.keys import MOST_KEYS
from storage.names import TRAILING_DAYS
from storage.query import column_types, quote
from storage.reader import DAY, SnapshotReader, SnapshotRef
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

if TYPE_CHECKING:
    import duckdb

PROFILE = "profile"
"""Suffix of a table of statistics."""
FAR = 20.0
"""Deviations from the mean from which a value is an outlier. One among n rows is at most sqrt(n) away."""
BUCKETS = 16
SKETCHES_AT_ONCE = 20_000
"""Sketches in memory, days times columns. More columns take several passes over the rows. One takes 3 kB."""
LENGTHS = 10
"""A histogram of lengths takes as much as so many sketches."""
COLUMNS_AT_ONCE = 250
"""Columns of a pass: each row becomes a list of so many values."""
SCHEMA = pa.schema(
    {
        DAY: pa.date32(),
        "column": pa.string(),
        "kind": pa.string(),
        "rows": pa.int64(),
        "present": pa.int64(),
        "mean_length": pa.float64(),
        "p99_length": pa.int64(),
        "max_length": pa.int64(),
        "distinct": pa.int64(),
        "mean": pa.float64(),
        "deviation": pa.float64(),
        "minimum": pa.float64(),
        "maximum": pa.float64(),
        "histogram": pa.list_(pa.int64()),
        "drift": pa.float64(),
    }
)
"""One row per column and day. `present` counts rows with a value: not null, not NaN, not an empty list. Lengths are of
present lists. `distinct` is approximate. Moments and bounds cover finite values, including those of integers."""

Row = dict[str, Any]
C = TypeVar("C")


def profile_name(table: str) -> str:
    """Returns the name of the table with the statistics of `table`."""
    return f"{table}_{PROFILE}"


def profiles(warehouse: Warehouse, table: str, days: Collection[datetime.date] | None = None) -> pa.Table:
    """Reads stored statistics of a table, ordered by day and column. Days without statistics are left out.

    Args:
        days: The days to read. None: all.
    """
    name = profile_name(table)
    if not warehouse.has_table(name) or warehouse.table(name).current_snapshot() is None:
        return SCHEMA.empty_table()
    reader = warehouse.reader(warehouse.current(name), SCHEMA.names)
    parts = [reader.read(fragment) for fragment in reader.fragments(days)] if days is None or days else []
    whole = pa.concat_tables([SCHEMA.empty_table(), *(part.cast(SCHEMA) for part in parts)])
    return whole.sort_by([(DAY, "ascending"), ("column", "ascending")])


def find_outlier(measured: pa.Table, columns: Collection[str]) -> tuple[str, datetime.date, float] | None:
    """Returns column, day and value of the largest outlier of some columns.

    An outlier is `FAR` deviations or more from the mean of its day. None: there is none.

    Args:
        measured: As `profiles`.
    """
    found: list[tuple[float, str, datetime.date, float]] = []
    for row in measured.select([DAY, "column", "mean", "deviation", "minimum", "maximum"]).to_pylist():
        if row["column"] in columns and row["deviation"]:
            for value in (row["minimum"], row["maximum"]):
                far = abs(value - row["mean"]) / row["deviation"]
                found += [(far, row["column"], row[DAY], value)] if far >= FAR or not math.isfinite(far) else []
    return max(found, key=lambda one: (abs(one[3]), one[0]))[1:] if found else None


def store(warehouse: Warehouse, table: str, measured: pa.Table, days: Mapping[datetime.date, str]) -> SnapshotRef:
    """Replaces the statistics of days of a table. A day without rows in `measured` loses its statistics.

    Args:
        days: Day -> identity of what was written to the table.
    """
    rows = measured.cast(SCHEMA)
    return replace_days(warehouse, profile_name(table), days, SCHEMA, rows.to_batches(), rows.num_rows)


def measure(
    connection: "duckdb.DuckDBPyConnection",
    view: str,
    numbers: Collection[str] = (),
    counts: Mapping[datetime.date, int] | None = None,
) -> pa.Table:
    """Measures all columns of a view by day. `drift` stays null.

    Memory holds sketches, not rows. Columns are measured in groups, one pass over the view per group.

    Args:
        view: Has the column `day`. Columns with names starting with `__` are skipped.
        numbers: Integer columns that are counts or the label, not ids.
        counts: Day -> its rows, if known.
    """
    types = column_types(connection, view)
    columns = {name: kind for name, kind in types.items() if name != DAY and not name.startswith("__")}
    counts = rows_of(connection, view) if counts is None else counts
    return measure_columns(connection, lambda needed: quote(view), columns, counts, numbers)


def measure_days(
    connection: "duckdb.DuckDBPyConnection",
    warehouse: Warehouse,
    snapshot: SnapshotRef,
    days: Collection[datetime.date],
    numbers: Collection[str] = (),
) -> pa.Table:
    """Measures days that are already written, as `measure` does."""
    stored = warehouse.day_rows(snapshot)
    counts = {day: stored[day] for day in days if day in stored}
    reader = warehouse.reader(snapshot, warehouse.schema(snapshot).names)
    types = types_of(connection, reader.empty().drop_columns([DAY]))
    return measure_columns(connection, stored_rows(connection, reader, counts), types, counts, numbers)


def rows_of(connection: "duckdb.DuckDBPyConnection", view: str) -> dict[datetime.date, int]:
    """Counts the rows of each day in a view."""
    return dict(connection.sql(f"SELECT {DAY}, count(*) FROM {quote(view)} GROUP BY {DAY}").fetchall())


def types_of(connection: "duckdb.DuckDBPyConnection", table: pa.Table) -> dict[str, str]:
    """Returns column -> DuckDB type of an Arrow table."""
    connection.register("types_of_a_table", table)
    return column_types(connection, "types_of_a_table")


Rows = Callable[[Collection[str]], str]
"""Columns -> an SQL relation with them and `day`, to be read once."""


def stored_rows(
    connection: "duckdb.DuckDBPyConnection", reader: SnapshotReader, days: Collection[datetime.date]
) -> Rows:
    """Returns days of a table as relations. Columns are read by field id: a name may once have meant another column.

    Args:
        reader: Of all columns that relations may have, and of `day`.
    """
    fragments = reader.fragments(days)

    def rows(needed: Collection[str]) -> str:
        part = reader.narrow([DAY, *needed])
        batches = (batch for fragment in fragments for batch in part.batches(fragment))
        connection.register("stored_rows", pa.RecordBatchReader.from_batches(part.empty().schema, batches))
        return "stored_rows"

    return rows


def add_drift(measured: pa.Table, earlier: pa.Table, trailing_days: int = TRAILING_DAYS) -> pa.Table:
    """Adds the `drift` of each day against the days before it, taken from `earlier` and the statistics themselves."""
    fresh = set(measured[DAY].to_pylist())
    before = [row for row in earlier.select([DAY, "column", "histogram"]).to_pylist() if row[DAY] not in fresh]
    histograms: dict[str, dict[datetime.date, list[int]]] = {}
    for row in [*before, *measured.select([DAY, "column", "histogram"]).to_pylist()]:
        histograms.setdefault(row["column"], {})[row[DAY]] = row["histogram"]
    drifts: list[float | None] = []
    for day, column in zip(measured[DAY].to_pylist(), measured["column"].to_pylist(), strict=True):
        past = [other for other in sorted(histograms[column]) if other < day][-trailing_days:]
        drifts.append(stability(histograms[column][day], [histograms[column][other] for other in past]))
    return measured.set_column(SCHEMA.get_field_index("drift"), "drift", pa.array(drifts, pa.float64()))


def stability(histogram: Sequence[int] | None, earlier: Sequence[Sequence[int] | None]) -> float | None:
    """Returns the population stability index of a histogram against the sum of earlier ones, or None if one is empty.

    Half a value is added to each bucket: an empty bucket would make the index infinite.

    Example:
        >>> stability([10, 10], [[50, 50]]), round(stability([90, 10], [[50, 50]]), 2)
        (0.0, 0.85)
    """
    counts = [np.asarray(one, float) for one in earlier if one and sum(one) > 0]
    if not histogram or sum(histogram) == 0 or not counts:
        return None
    new, old = np.asarray(histogram, float) + 0.5, np.sum(counts, axis=0) + 0.5
    new, old = new / new.sum(), old / old.sum()
    return float(np.sum((new - old) * np.log(new / old)))


def measure_columns(
    connection: "duckdb.DuckDBPyConnection",
    rows: Rows,
    columns: Mapping[str, str],
    counts: Mapping[datetime.date, int],
    numbers: Collection[str],
) -> pa.Table:
    """Measures columns as `measure` does, and the keys of maps as columns such as `dense_17`.

    Args:
        columns: Column -> its DuckDB type.
        counts: Day -> its rows.
    """
    kinds = {name: kind_of(kind, name in numbers) for name, kind in columns.items()}
    found: dict[tuple[datetime.date, str], Row] = {}

    def add(below: Stack, query: str, *statistics: str) -> None:
        for day, number, *values in connection.sql(query).fetchall():
            if number in below.names:
                found.setdefault((day, below.names[number]), {}).update(zip(statistics, values, strict=True))

    for kind, type_name in SINGLE.items():
        for names in _groups([name for name in columns if kinds[name] == kind], len(counts)):
            below = stack(rows(names), names, [f"CAST({quote(name)} AS {type_name})" for name in names])
            add(below, value_query(below, kind), *VALUE_STATISTICS)
    lists = [name for name in columns if columns[name].endswith("[]")]
    for names in _groups([name for name in columns if kinds[name] == "other" and name not in lists], len(counts)):
        for day, *values in connection.sql(
            other_query(rows(names), {name: columns[name] for name in names})
        ).fetchall():
            counted = zip(names, values[::2], values[1::2], strict=True)
            found |= {(day, name): {"present": present, "distinct": distinct} for name, present, distinct in counted}
    for names in _groups(lists, LENGTHS * len(counts)):
        below = stack(rows(names), names, [f"len({quote(name)})" for name in names])
        add(below, length_query(below), "lengths")
    for text in (False, True):  # one pass handles items of one type
        of_type = [name for name in lists if kinds[name] == "ids" and columns[name].startswith("VARCHAR") == text]
        for names in _groups(of_type, len(counts)):
            item = "VARCHAR[]" if text else "BIGINT[]"
            below = stack(rows(names), names, [f"CAST({quote(name)} AS {item})" for name in names])
            add(below, item_query(below, text), "distinct", "histogram")
    for one in filter(None, (MapColumn.of(name, type_name) for name, type_name in columns.items())):
        keys = [key for (key,) in connection.sql(one.key_query(rows([one.name]))).fetchall()]
        if len(keys) <= MOST_KEYS:
            keys = [key for key in keys if f"{one.name}_{key}" not in columns]  # while a table is flattened
            kinds |= dict.fromkeys((f"{one.name}_{key}" for key in keys), kind_of(one.type_name, False))
            for group in _groups(keys, len(counts)):
                _measure_keys(one, group, rows, add)
    for (day, name), row in found.items():
        lengths = _length_statistics(row.pop("lengths") or {}) if "lengths" in row else {}
        row |= {**lengths, **row, DAY: day, "column": name, "kind": kinds[name], "rows": counts[day]}
        row["histogram"] = _counts(row.get("histogram"))
    return pa.Table.from_pylist(list(found.values()), SCHEMA).sort_by([(DAY, "ascending"), ("column", "ascending")])


def _measure_keys(one: MapColumn, keys: Sequence[int], rows: Rows, add: Callable[..., None]) -> None:
    """Measures keys of a map.

    Args:
        add: Runs a query for the statistics of a stack, and keeps what it returns.
    """
    kind, items = kind_of(one.type_name, False), "VARCHAR[]" if one.type_name.startswith("VARCHAR") else "BIGINT[]"
    if kind in SINGLE:
        below = one.stack(rows([one.name]), keys, f"CAST({one.value} AS {SINGLE[kind]})")
        add(below, value_query(below, kind), *VALUE_STATISTICS)
    if one.type_name.endswith("[]"):
        below = one.stack(rows([one.name]), keys, f"len({one.value})")
        add(below, length_query(below), "lengths")
    if kind == "ids":
        below = one.stack(rows([one.name]), keys, f"CAST({one.value} AS {items})")
        add(below, item_query(below, items == "VARCHAR[]"), "distinct", "histogram")


def _groups(columns: Sequence[C], days: int) -> Iterator[Sequence[C]]:
    """Splits columns into groups that are measured in one pass."""
    size = min(COLUMNS_AT_ONCE, max(1, SKETCHES_AT_ONCE // max(1, days)))
    return (columns[start : start + size] for start in range(0, len(columns), size))


def _length_statistics(counts: Mapping[int, int]) -> Row:
    lengths = sorted(length for length in counts if length > 0)
    present = sum(counts[length] for length in lengths)
    if not present:
        return {"present": 0, "distinct": 0}
    cumulated = np.cumsum([counts[length] for length in lengths])
    return {
        "present": present,
        "mean_length": sum(length * counts[length] for length in lengths) / present,
        "p99_length": lengths[int(np.searchsorted(cumulated, np.ceil(0.99 * present)))],
        "max_length": lengths[-1],
    }


def _counts(buckets: Mapping[int, int] | None) -> list[int] | None:
    return None if buckets is None else [int(buckets.get(number, 0)) for number in range(BUCKETS)]

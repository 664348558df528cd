"""Statistics of a table's columns by day, in a table of their own."""

import datetime
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from storage.names import TRAILING_DAYS
from storage.query import column_types, quote
from storage.reader import DAY, Fragment, SnapshotReader, SnapshotRef
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

if TYPE_CHECKING:
    import duckdb

Counts = npt.NDArray[np.int64]
PROFILE = "profile"
"""Suffix of a table of statistics."""
FAR = 20.0
"""Deviations from the mean from which a value is an outlier. One among n rows is at most sqrt(n) away."""
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
    connection: "duckdb.DuckDBPyConnection", reader: SnapshotReader, fragments: Sequence[Fragment], every: int = 1
) -> Rows:
    """Returns rows of a table as relations. Columns are read by field id: a name may once have meant another column.

    Args:
        reader: Of all columns that relations may have, and of `day`.
        every: Each so-many-th of the rows of a batch is read.
    """

    def rows(needed: Collection[str]) -> str:
        part = reader.narrow([DAY, *needed])
        batches = (batch for fragment in fragments for batch in part.batches(fragment))
        if every > 1:
            batches = (batch.take(pa.array(range(0, batch.num_rows, every))) for batch in batches)
        connection.register("stored_rows", pa.RecordBatchReader.from_batches(part.empty().schema, batches))
        return "stored_rows"

    return rows


def add_drift(measured: pa.Table, earlier: pa.Table, trailing_days: int = TRAILING_DAYS) -> pa.Table:
    """Adds the `drift` of each day against the days before it, taken from `earlier` and the statistics themselves."""
    parts = [part.select([DAY, "column", "histogram"]) for part in (earlier, measured)]
    rows = pa.concat_tables(parts).combine_chunks()
    days, names = rows[DAY].cast(pa.int32()).to_numpy(), rows["column"].combine_chunks().dictionary_encode()
    counts, fresh = _histograms(rows["histogram"].combine_chunks()), np.arange(len(rows)) >= len(earlier)
    there = fresh | ~np.isin(days, days[fresh])  # the versions of new days that the table has do not count
    order = np.lexsort((days, names.indices.to_numpy()))
    order = order[there[order]]
    sums = np.concatenate([np.zeros_like(counts[:1]), np.cumsum(counts[order], axis=0)])
    ids, places = names.indices.to_numpy()[order], np.arange(len(order))
    begins = np.maximum(np.searchsorted(ids, ids), places - trailing_days)
    drifts = np.full(len(rows), np.nan)
    drifts[order] = stability(counts[order], sums[places] - sums[begins])
    column = pa.array(drifts[fresh], pa.float64(), from_pandas=True)  # NaN is null
    return measured.set_column(SCHEMA.get_field_index("drift"), "drift", column)


def _histograms(lists: pa.ListArray) -> Counts:
    """Returns histograms as a matrix. A missing one is a row of zeros."""
    known, items = lists.is_valid().to_numpy(zero_copy_only=False), lists.flatten().to_numpy()
    found = np.zeros((len(lists), len(items) // max(1, int(known.sum()))), np.int64)
    found[known] = items.reshape(-1, found.shape[1]) if len(items) else 0
    return found


def stability(new: Counts, old: Counts) -> npt.NDArray[np.float64]:
    """Returns the population stability index of histograms against earlier ones: [rows], NaN where one is empty.

    Half a value is added to each bucket: an empty bucket would make the index infinite.

    Args:
        new, old: [rows, buckets].

    Example:
        >>> stability(np.array([[10, 10], [90, 10], [0, 0]]), np.array([[50, 50]] * 3)).round(2).tolist()
        [0.0, 0.85, nan]
    """
    shares = [(counts + 0.5) / (counts + 0.5).sum(axis=1, keepdims=True) for counts in (new, old)]
    found = np.sum((shares[0] - shares[1]) * np.log(shares[0] / shares[1]), axis=1)
    return np.where((new.sum(axis=1) > 0) & (old.sum(axis=1) > 0), found, np.nan)

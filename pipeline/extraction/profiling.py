"""Checks the days of an ingest by their statistics, and stores these."""

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import duckdb
import pyarrow as pa

from pipeline.data.profile import SCHEMA, add_drift, profile_name, profiles, store
from pipeline.errors import ConfigError
from pipeline.extraction.checks import CheckFinding, CheckResult, Columns, KnownDays, check, columns_of_day, rows_of_day
from pipeline.extraction.config import ChecksConfig
from storage.names import TRAILING_DAYS
from storage.query import quote
from storage.reader import DAY
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

HELD = "held"
"""Suffix of the table with the days that were held back."""
DAYS_AT_ONCE = 30
"""Stored days that are measured together."""

Warn = Callable[[str], None]
"""Called with a sentence for the log."""
Found = Callable[[datetime.date, Columns], list[CheckFinding]]
"""Returns the rules that a day breaks beside those of `check`, given the statistics of its new rows."""


@dataclass(frozen=True)
class CheckedProfile:
    """Statistics of new days and the result of their checks, before any is written."""

    profile: pa.Table | None
    """None: only the label was measured."""
    checked: CheckResult


@dataclass(frozen=True)
class NewDays:
    """The days of an ingest, for their checks."""

    rows: str
    """View of the rows to write."""
    measured: pa.Table
    """Their statistics, as far as they were measured."""
    counts: Mapping[datetime.date, int]
    """Day -> its rows."""
    open: Collection[datetime.date]
    """Those whose labels may still change."""
    label: str | None
    features: Sequence[str]
    """Names and patterns of the columns that features read."""
    all_columns: bool
    """Whether all columns were measured, or the label alone."""


def held_back_name(table: str) -> str:
    """Returns the name of the table with the held-back days of `table`."""
    return f"{table}_{HELD}"


def check_days(
    connection: duckdb.DuckDBPyConnection,
    new: NewDays,
    warehouse: Warehouse,
    table: str,
    config: ChecksConfig,
    find: Found,
) -> CheckedProfile:
    """Checks new days against the rules. Nothing is written.

    Args:
        find: Finds further rules that a day breaks.
    Raises:
        ConfigError: If there is no column `config.key`.
    """
    rows, measured, counts, complete = new.rows, new.measured, new.counts, new.all_columns
    earlier = profiles(warehouse, table, days_before(warehouse, table, counts, config.trailing_days) | counts.keys())
    by_key = config.key is not None and config.duplicates != "off"
    duplicates = count_duplicates(connection, rows, config.key or "") if by_key else {}
    if not complete:
        earlier = earlier.filter(pa.compute.equal(earlier["column"], pa.scalar(new.label, pa.string())))
    found = {day: find(day, columns_of_day(rows_of_day(measured, day))) for day in counts}
    known = KnownDays(counts, duplicates, found, new.open, new.features, warehouse.has_table(table))
    profile, checked = check(measured, earlier, config, new.label, known)
    return CheckedProfile(profile if complete else None, checked)


def store_profile(
    warehouse: Warehouse, table: str, profiled: CheckedProfile | None, days: Mapping[datetime.date, str]
) -> None:
    """Stores the statistics of days that were written, or drops those of older rows if there are none.

    Args:
        days: Day -> identity of what was written.
    """
    if profiled is not None and profiled.profile is not None:
        wanted = pa.array(list(days), pa.date32())
        rows = profiled.profile.filter(pa.compute.is_in(profiled.profile[DAY], wanted))
        store(warehouse, table, rows, days)
    elif warehouse.has_table(profile_name(table)):
        store(warehouse, table, SCHEMA.empty_table(), days)


def repair_profile(
    warehouse: Warehouse,
    table: str,
    unchanged: Mapping[datetime.date, str],
    numbers: Callable[[pa.Schema], Collection[str]],
) -> None:
    """Measures days of the table again if their stored statistics are older: an ingest ended between the two writes.

    Args:
        unchanged: Day of the table -> identity of what was written.
        numbers: Returns the integer columns that are counts or labels, not ids, given the table's schema.
    """
    name = profile_name(table)
    known = warehouse.day_identities(name) if warehouse.has_table(name) else {}
    stale = sorted(day for day, identity in unchanged.items() if known.get(day) != identity)
    if not stale:
        return
    from pipeline.data.measurement import measure_days

    snapshot = warehouse.current(table)
    counted = numbers(warehouse.schema(snapshot))
    for start in range(0, len(stale), DAYS_AT_ONCE):
        days = {day: unchanged[day] for day in stale[start : start + DAYS_AT_ONCE]}
        measured = measure_days(warehouse, snapshot, days, counted)
        earlier = profiles(warehouse, table, days_before(warehouse, table, days, TRAILING_DAYS))
        store(warehouse, table, add_drift(measured, earlier), days)


def release_days(warehouse: Warehouse, table: str, days: Collection[datetime.date]) -> None:
    """Removes days from the table of held-back days."""
    name = held_back_name(table)
    gone = dict.fromkeys(set(days) & warehouse.written_days(name).keys(), "passed")
    if gone:
        schema = warehouse.table(name).schema().as_arrow()
        replace_days(warehouse, name, gone, schema, [], 0)


def days_before(warehouse: Warehouse, table: str, days: Collection[datetime.date], trailing: int) -> set[datetime.date]:
    """Returns stored days with statistics that the given days are compared with."""
    name = profile_name(table)
    if not warehouse.has_table(name) or warehouse.table(name).current_snapshot() is None:
        return set()
    stored = sorted(warehouse.day_rows(warehouse.current(name)).keys() - set(days))
    return {other for day in days for other in [one for one in stored if one < day][-trailing:]}


def count_duplicates(connection: duckdb.DuckDBPyConnection, rows: str, key: str) -> dict[datetime.date, int]:
    """Returns day -> rows that repeat the key of another row of the day. The first row of each key does not count."""
    columns = connection.view(rows).columns
    if key not in columns:
        known = ", ".join([name for name in columns if not name.startswith("__")][:8])
        raise ConfigError("ingest.checks.key", "a column of the rows", f"'{key}', known: {known}", "Correct the name.")
    column = quote(key)
    return dict(
        connection.sql(
            f"SELECT {DAY}, CAST(sum(times - 1) AS BIGINT) FROM (SELECT {DAY}, {column}, count(*) AS times"
            f" FROM {quote(rows)} WHERE {column} IS NOT NULL GROUP BY {DAY}, {column} HAVING count(*) > 1)"
            f" GROUP BY {DAY}"
        ).fetchall()
    )

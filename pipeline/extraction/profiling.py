"""Measures the days of an ingest before they are written, checks them, and stores their statistics."""

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import duckdb
import pyarrow as pa

from pipeline.data.formats.reading import first_line
from pipeline.data.profile import (
    SCHEMA,
    add_drift,
    measure,
    measure_columns,
    measure_days,
    profile_name,
    profiles,
    store,
    types_of,
)
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.checks import CheckFinding, CheckResult, Columns, KnownDays, check, columns_of_day, rows_of_day
from pipeline.extraction.config import ChecksConfig, Rule
from storage.names import TRAILING_DAYS
from storage.query import column_types, connect, quote
from storage.reader import DAY
from storage.scratch import ScratchFolder
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
    counts: Mapping[datetime.date, int]
    """Day -> its rows."""
    open: Collection[datetime.date]
    """Those whose labels may still change."""
    label: str | None
    numbers: Collection[str]
    """Integer columns that are counts or labels, not ids."""
    features: Sequence[str]
    """Names and patterns of the columns that features read."""
    all_columns: bool
    """Whether to measure all columns, or the label alone."""


def held_back_name(table: str) -> str:
    """Returns the name of the table with the held-back days of `table`."""
    return f"{table}_{HELD}"


def profile_days(
    connection: duckdb.DuckDBPyConnection,
    new: NewDays,
    warehouse: Warehouse,
    table: str,
    config: ChecksConfig,
    warn: Warn,
    strict: Sequence[Rule],
    find: Found,
) -> CheckedProfile:
    """Measures new days and checks them against the rules. Nothing is written.

    Args:
        warn: Called if the measurement fails.
        strict: Rules that keep a day out of the table.
        find: Finds further rules that a day breaks.
    Raises:
        ConfigError: If there is no column `config.key`.
        DataError: If the days could not be measured, and a rule is set to fail or quarantine.
    """
    rows, counts, complete = new.rows, new.counts, new.all_columns
    try:
        measured = measure(connection, rows, new.numbers, counts) if complete else _measure_label(connection, new)
    except duckdb.Error as error:
        reason = first_line(error)
        if strict and not isinstance(error, duckdb.OutOfMemoryException):
            raise
        if strict:
            raise DataError(
                "statistics of the new days",
                f"a measurement, because ingest.checks sets {', '.join(strict)} to keep days out", reason,
                "Ingest fewer days at once, or set these rules to warn.",
            ) from error  # fmt: skip
        warn(f"days are written without statistics, and only rows and labels are checked: {reason}")
        measured, complete = _measure_label(connection, new), False
    earlier = profiles(warehouse, table, days_before(warehouse, table, counts, config.trailing_days) | counts.keys())
    by_key = config.key is not None and config.duplicates != "off"
    duplicates = count_duplicates(connection, rows, config.key or "") if by_key else {}
    if not complete:
        earlier = earlier.filter(pa.compute.equal(earlier["column"], pa.scalar(new.label, pa.string())))
    found = {day: find(day, columns_of_day(rows_of_day(measured, day))) for day in counts}
    known = KnownDays(counts, duplicates, found, new.open, new.features, warehouse.has_table(table))
    profile, checked = check(measured, earlier, config, new.label, known)
    return CheckedProfile(profile if complete else None, checked)


def _measure_label(connection: duckdb.DuckDBPyConnection, new: NewDays) -> pa.Table:
    """Measures the label alone. An event table has none."""
    if new.label is None:
        return SCHEMA.empty_table()
    types = {new.label: column_types(connection, new.rows)[new.label]}
    return measure_columns(connection, lambda needed: quote(new.rows), types, new.counts, new.numbers)


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
    numbers: Callable[[Mapping[str, str]], Collection[str]],
    warn: Warn,
    limits: Mapping[str, Any],
) -> None:
    """Measures days of the table again if their stored statistics are older: an ingest ended between the two writes.

    Args:
        unchanged: Day of the table -> identity of what was written.
        numbers: Column -> its type; returns `numbers` of `NewDays`.
        warn: As in `profile_days`.
        limits: Memory and threads of DuckDB, as arguments of `connect`.
    """
    name = profile_name(table)
    known = warehouse.day_identities(name) if warehouse.has_table(name) else {}
    stale = sorted(day for day, identity in unchanged.items() if known.get(day) != identity)
    if not stale:
        return
    with ScratchFolder("profile-", warehouse.home / "tmp") as folder, connect([], Path(folder), **limits) as connection:
        reader = warehouse.reader(warehouse.current(table), warehouse.schema(warehouse.current(table)).names)
        counted = numbers(types_of(connection, reader.empty()))
        for start in range(0, len(stale), DAYS_AT_ONCE):
            days = {day: unchanged[day] for day in stale[start : start + DAYS_AT_ONCE]}
            try:
                measured = measure_days(connection, warehouse, warehouse.current(table), days, counted)
            except duckdb.Error as error:
                warn(f"stored days of table '{table}' could not be measured: {first_line(error)}")
                store_profile(warehouse, table, None, days)
                continue
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

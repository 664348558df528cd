"""Measures and checks the days of a table that another engine writes. Its rows stay where they are."""

import datetime
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import get_args

import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.profile import profile_name, profiles, store, stored_rows
from pipeline.data.stored import to_numbers
from pipeline.errors import DataError
from pipeline.extraction.checks import CheckResult, KnownDays, check
from pipeline.extraction.config import IngestConfig, LabelColumns, Rule
from pipeline.extraction.days import asked_days
from pipeline.extraction.extract import IngestResult
from pipeline.extraction.opening import Report, SourceContext, duckdb_limits
from pipeline.extraction.profiling import DAYS_AT_ONCE, count_duplicates, days_before
from pipeline.extraction.samples import number_columns
from pipeline.transforms.schema import FeatureSchema, resolve
from storage.arrow import is_text
from storage.filters import parse_filter
from storage.keys import map_names
from storage.query import connect
from storage.reader import DAY, SnapshotRef
from storage.scratch import ScratchFolder
from storage.snapshot.row_filter import compared_columns
from storage.warehouse import Warehouse


def adopt(
    context: SourceContext,
    config: IngestConfig,
    row_filter: str | None = None,
    only: Iterable[datetime.date] = (),
    force: bool = False,
    report: Report = lambda what, done, total: None,
    on_checked: Callable[[CheckResult], None] = lambda checked: None,
) -> IngestResult:
    """Measures and checks days of a table that is read as it is, on first sight and after each change.

    Nothing can be held back from such a table. So a rule that is set to quarantine fails.

    Args:
        context: Names the table as it is read.
        row_filter: `filter` of the config. Rows that it leaves out need no label.
        only: Days to check; empty means all.
        force: Also checks days that were checked before.
        on_checked: Called with the result of the checks, also of a day that fails.
    Raises:
        ConfigError: If the table has no column of the label.
        DataError: If a label is neither 0 nor 1, or a day fails a check. Statistics of earlier days, measured
            `DAYS_AT_ONCE` together, stay.
        EmptyDatasetError: As `asked_days`.
    """
    warehouse, table, schema = context.warehouse, context.table, context.schema
    snapshot = warehouse.current(table)
    rows, contents = warehouse.day_rows(snapshot), warehouse.day_contents(snapshot)
    wanted = sorted(asked_days(rows, only, f"table '{table}'", "source.table"))
    name = profile_name(table)
    known = warehouse.day_identities(name) if warehouse.has_table(name) else {}
    due = [day for day in wanted if config.profile and (force or known.get(day) != contents[day])]
    results: list[CheckResult] = []
    try:
        with ScratchFolder("adopt-", warehouse.home / "tmp") as folder:
            for start in range(0, len(due), DAYS_AT_ONCE):
                group = due[start : start + DAYS_AT_ONCE]
                _check_labels(context, snapshot, group, row_filter)
                measured, checked = _check(warehouse, snapshot, schema, config, group, Path(folder))
                results.append(checked)
                checked.raise_failed("warn or off")
                store(warehouse, table, measured, {day: contents[day] for day in group})
                report("check", start + len(group), len(due))
    finally:
        merged = CheckResult.of(results)
        if merged.days:
            on_checked(merged)
    return IngestResult(
        snapshot=snapshot,
        rows=sum(rows[day] for day in due),
        days_written=(),
        days_checked=tuple(due),
        days_skipped=tuple(day for day in wanted if day not in due),
        days_changed=tuple(day for day in due if day in known and known[day] != contents[day]),
        quarantined={},
        unmatched={},
        days_elsewhere=0,
        checked=merged,
    )


def _check_labels(
    context: SourceContext, snapshot: SnapshotRef, days: Sequence[datetime.date], row_filter: str | None
) -> None:
    """Refuses days with labels other than 0 and 1. A filter of joined columns is for rows that are not read yet."""
    warehouse, label, condition = context.warehouse, context.schema.label, None
    names = warehouse.schema(snapshot).names
    resolve([label], names, "features.label")
    if row_filter is not None:
        condition = parse_filter(row_filter)
        if not set(compared_columns(condition)).issubset(names):
            return
    reader = warehouse.reader(snapshot, [label], condition)
    for day in days:
        for fragment in reader.fragments([day]):
            values = reader.read(fragment)[label].combine_chunks()
            if is_text(values.type):
                bad = values.filter(pc.fill_null(pc.invert(pc.is_in(values, pa.array(["0", "1"], values.type))), True))
            else:
                bad = values.filter(pc.invert(pc.is_in(to_numbers(values), pa.array([0.0, 1.0]))))
            if len(bad):
                theirs = warehouse.config.tables[context.table].table
                raise DataError(
                    f"label '{label}' of day {day}", "0 or 1 in each row",
                    f"{'null' if bad[0].as_py() is None else bad[0].as_py()} in {len(bad)} rows of '{fragment.path}'",
                    f"Leave such rows out with filter=\"{label} in (0, 1)\", or correct them in '{theirs}' with its "
                    "engine.",
                )  # fmt: skip


def _check(
    warehouse: Warehouse,
    snapshot: SnapshotRef,
    schema: FeatureSchema | LabelColumns,
    config: IngestConfig,
    days: Sequence[datetime.date],
    folder: Path,
) -> tuple[pa.Table, CheckResult]:
    """Returns the statistics of days, and the result of their checks."""
    verdicts = {rule: "fail" for rule in get_args(Rule) if config.checks.outcome(rule) == "quarantine"}
    rules = config.checks.model_copy(update=verdicts)
    columns = warehouse.schema(snapshot)
    names, maps = [name for name in columns.names if name != DAY], map_names(columns)
    earlier = days_before(warehouse, snapshot.table, days, rules.trailing_days)
    from pipeline.data.measurement import measure_days  # loads numba

    measured = measure_days(warehouse, snapshot, days, number_columns(schema, names, (), maps))
    with connect([], folder, **duckdb_limits(config.memory_bytes)) as connection:
        duplicates = {}
        if rules.key is not None and rules.duplicates != "off":
            reader = warehouse.reader(snapshot, [DAY, rules.key])
            view = stored_rows(connection, reader, reader.fragments(days))([rules.key])
            duplicates = count_duplicates(connection, view, rules.key)
        features = schema.named_columns() if isinstance(schema, FeatureSchema) else ()
        before, known = profiles(warehouse, snapshot.table, earlier), warehouse.has_table(profile_name(snapshot.table))
        new = KnownDays(duplicates=duplicates, features=features, has_table=known)
        return check(measured, before, rules, schema.label, new)

"""Stage entry: raw files in, labelled samples in the warehouse out."""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from pydantic import BaseModel

from pipeline.errors import DataError, EmptyDatasetError
from pipeline.extraction.checks import Checked
from pipeline.extraction.config import IngestConfig, SourceConfig
from pipeline.extraction.days import Day, groups, named, refused, survey, thinned, within
from pipeline.extraction.intake import Warn, held_name, inspect, keep_profile, mend_profile, release
from pipeline.extraction.join import Joined
from pipeline.extraction.opening import Opened, Report, opened
from pipeline.extraction.samples import count_rows, dense_columns
from pipeline.extraction.writing import order_of, write
from pipeline.transforms.schema import FeatureSchema
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse


class IngestResult(BaseModel, frozen=True):
    """What an ingest did."""

    snapshot: SnapshotRef
    rows: int
    days_written: tuple[datetime.date, ...]
    days_skipped: tuple[datetime.date, ...]
    quarantined: Mapping[str, int]
    unmatched: Mapping[str, int]
    days_elsewhere: int
    """Days of the table that this source does not have; they stay."""
    outcomes: Mapping[str, Joined] = {}
    """Label -> what became of its outcomes, where logs were joined."""
    by_day: Mapping[datetime.date, "DayRows"] = {}
    """Of the days written."""
    days_held: tuple[datetime.date, ...] = ()
    """Days that broke a rule and stand in the table of held days instead."""
    checked: Checked = Checked()


class DayRows(BaseModel, frozen=True):
    """Where the rows of a day went: `rows` is the sum of the others."""

    rows: int
    written: int
    quarantined: int
    left_out: int
    """Negatives that were thinned out."""


def extract(
    source: SourceConfig,
    config: IngestConfig,
    schema: FeatureSchema,
    warehouse: Warehouse,
    table: str,
    root: Path,
    logs: Path,
    only: Iterable[datetime.date] = (),
    again: bool = False,
    report: Report = lambda what, done, total: None,
    on_checked: Callable[[Checked], None] = lambda checked: None,
    warn: Warn = lambda sentence: None,
) -> IngestResult:
    """Writes the days of a source into the warehouse; days that stand there from the same input are left alone.

    Args:
        root: Folder that relative paths start from.
        logs: Folder the generator writes its logs into.
        only: Days to write; none means all.
        again: Writes days that stand there already, too, and looks again at those that were held back.
        on_checked: Called with what the rules say of the new days, before anything is written.
        warn: Called with what went wrong and does not end the ingest.
    Raises:
        ConfigError: If the source does not have the columns that the configuration names.
        DataError: If values are of the wrong kind, too many labels of a day are bad, or a day breaks a rule that fails.
        EmptyDatasetError: If there are no rows, a day asked for has none, or no day may be written and none is.
    """
    with opened(source, schema, warehouse, table, root, logs, report, bool(config.order_by)) as rows:
        order = order_of(rows, config.order_by)
        days = survey(rows, source, schema, config.order_by)
        wanted = named(days, only)
        _refuse_spoiled(rows, wanted, config)
        stored = warehouse.written_days(table)
        done = {} if again else stored
        held = {} if again else warehouse.written_days(held_name(table))
        todo = [day for day in wanted if day.identity not in (done.get(day.day), held.get(day.day))]
        if rows.join is not None and todo:
            rows.join.attribute(rows.view, within(todo))
            todo = [day for day in thinned(rows, todo) if day.kept or day.day in stored]
        intake = None
        if config.profile:
            numbers = _numbers(rows, schema, source)
            standing = {day.day: day.identity for day in wanted if day.identity == done.get(day.day)}
            mend_profile(rows.connection, warehouse, table, standing, numbers, warn)
        if config.profile and todo:
            good, counts = rows.good(within(todo)), {day.day: day.kept for day in todo}
            checks, label = config.checks, schema.label
            intake = inspect(rows.connection, good, counts, warehouse, table, checks, label, numbers, warn)
        checked = Checked() if intake is None else intake.checked
        if intake is not None:
            on_checked(checked)
        checked.refuse()
        back = checked.held
        broken = [day for day in todo if day.day in back]
        left = [day for day in wanted if held.get(day.day) == day.identity != done.get(day.day)]
        todo = [day for day in todo if day not in broken]
        if broken:
            write(rows, warehouse, table, broken, order, held_name(table))
        release(warehouse, table, [day.day for day in todo])
        if not todo and not warehouse.has_table(table):
            raise _no_table(table, wanted, [*broken, *left])
        total = sum(day.kept for day in todo)
        written = 0
        for group in groups(todo, config.rows_per_commit):
            write(rows, warehouse, table, group, order, table, partial(_report_from, report, written, total))
            keep_profile(warehouse, table, intake, {day.day: day.identity for day in group})
            written += sum(day.kept for day in group)
        new = [*todo, *broken]
        quarantined = refused(rows, new)
        unmatched = {
            path: count_rows(rows.connection, rows.view, f"{column} IS NULL AND {within(todo)}")
            for path, column in rows.unmatched
        }
        outcomes = rows.join.counts() if rows.join is not None and new else {}
    touched = {day.day for day in [*new, *left]}
    return IngestResult(
        snapshot=warehouse.current(table),
        rows=written,
        days_written=tuple(day.day for day in todo),
        days_skipped=tuple(day.day for day in wanted if day.day not in touched),
        quarantined=quarantined,
        unmatched=unmatched,
        days_elsewhere=len(stored.keys() - {day.day for day in days}),
        outcomes=outcomes,
        by_day={
            day.day: DayRows(rows=day.rows, written=day.kept, quarantined=day.refused, left_out=day.left_out)
            for day in todo
        },
        days_held=tuple(sorted(day.day for day in [*broken, *left])),
        checked=checked,
    )


def _refuse_spoiled(rows: Opened, days: Sequence[Day], config: IngestConfig) -> None:
    spoiled = [day for day in days if day.refused > config.max_quarantined_share * day.rows or day.refused == day.rows]
    if spoiled:
        reasons = refused(rows, spoiled)
        worst = max(spoiled, key=lambda day: day.refused / day.rows)
        raise DataError(
            f"labels of {len(spoiled)} day(s), worst {worst.day}",
            f"at most {config.max_quarantined_share:.2%} bad rows a day, and a good one",
            f"{worst.refused} of {worst.rows} ({', '.join(reasons)})",
            "Mend the source, or raise ingest.max_quarantined_share.",
        )


def _no_table(table: str, days: Sequence[Day], held: Sequence[Day]) -> EmptyDatasetError:
    """Why there is no table at all after an ingest."""
    if held:
        return EmptyDatasetError(
            f"table '{table}'", "a day that keeps the rules of ingest.checks",
            f"{len(held)} day(s), all held in table '{held_name(table)}'",
            "Mend the source, or relax the rule and run again with again=true.",
        )  # fmt: skip
    return EmptyDatasetError(
        f"{len(days)} day(s) of the source", "rows to keep", "only negatives that are thinned out",
        "Raise source.outcomes.keep_negatives.",
    )  # fmt: skip


def _numbers(rows: Opened, schema: FeatureSchema, source: SourceConfig) -> set[str]:
    """Columns whose integers are counts or labels, not ids."""
    made = source.made(schema.label)
    return {schema.label, *made, *dense_columns(schema, rows.columns, made)}


def _report_from(report: Report, base: int, total: int, rows: int) -> None:
    report("ingest", base + rows, total)

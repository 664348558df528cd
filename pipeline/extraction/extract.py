"""Stage entry: reads raw files and writes labelled samples into the warehouse."""

import datetime
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pyarrow as pa
from pydantic import BaseModel

from pipeline.data.day_notes import DayNote, day_notes
from pipeline.data.formats.checksums import verify_pages
from pipeline.data.joined.states import note_states
from pipeline.data.present import newest_day
from pipeline.errors import ConfigError, DataError, EmptyDatasetError, keep_if_failed
from pipeline.extraction.absolute import KEYS_MATCHED, Broken, count_matched, find_few, open_sources
from pipeline.extraction.checks import CheckFinding, CheckResult, Columns
from pipeline.extraction.config import IngestConfig, Verdict
from pipeline.extraction.data_loss import StoredDay, add_statistics, find_losses, read_stored_days
from pipeline.extraction.days import (
    Accounts,
    SourceDay,
    account,
    choose_files,
    count_left_out,
    count_refused,
    days_condition,
    first_kept,
    list_days,
    rows_of_days,
    select_days,
)
from pipeline.extraction.enrich import (
    EnrichResult,
    MaterializationPlan,
    materialize_days,
    name_of,
    plan_materialization,
)
from pipeline.extraction.inventory import Inventory, inventory_path, learn
from pipeline.extraction.join import LabelJoin
from pipeline.extraction.opening import OpenSource, Report, SourceContext, SourceReader, fingerprint, stored_types
from pipeline.extraction.own_source import refuse_strangers, remember
from pipeline.extraction.profiling import (
    CheckedProfile,
    NewDays,
    Warn,
    check_days,
    held_back_name,
    release_days,
    repair_profile,
    store_profile,
)
from pipeline.extraction.samples import (
    ANONYMOUS,
    GOOD,
    count_repeated,
    count_rows,
    find_misfits,
    maps_of,
    name_type,
    number_columns,
)
from pipeline.extraction.writing import (
    counting,
    good_rows,
    identities_of,
    notes_of,
    order_clause,
    write_days,
    write_refused,
)
from pipeline.transforms.schema import FeatureSchema
from storage.keys import map_names
from storage.query import column_types, quote
from storage.reader import SnapshotRef
from storage.snapshot.writing import StagedDays, in_commits, replace_days, stage_days


class IngestResult(BaseModel, frozen=True):
    """What an ingest did."""

    snapshot: SnapshotRef
    rows: int
    days_written: tuple[datetime.date, ...]
    days_skipped: tuple[datetime.date, ...]
    quarantined: Mapping[str, int]
    """Reason -> rows refused for it."""
    unmatched: Mapping[str, int]
    """Side table -> rows without a match in it."""
    days_elsewhere: int
    """Days of the table that this source does not have; they stay."""
    outcomes: Mapping[str, LabelJoin] = {}
    """Label -> how its outcomes were matched, if logs were joined."""
    by_day: Mapping[datetime.date, "DayRows"] = {}
    """Row counts of the days written."""
    files: Accounts | None = None
    """What became of the rows of each file. None: a table that is read as it is."""
    days_held: tuple[datetime.date, ...] = ()
    """Days that broke a rule. They are held back in a table of their own."""
    days_changed: tuple[datetime.date, ...] = ()
    """Days of the same input that another engine has changed in the table. They stay as they are."""
    days_checked: tuple[datetime.date, ...] = ()
    """Days of a table that is read as it is, measured and checked now."""
    days_outdated: tuple[datetime.date, ...] = ()
    """Days of the table whose rows and labels are as an earlier config says."""
    days_open: tuple[datetime.date, ...] = ()
    """Requested days that are open: labels may still change."""
    materialized: EnrichResult | None = None
    """The columns of feature sources that were written into the days."""
    days_expired: tuple[datetime.date, ...] = ()
    """Days of an event table that `keep_days` no longer keeps. They have been removed."""
    stale_lookups: Mapping[str, int] = {}
    """Side table -> number of skipped days with earlier values of it."""
    checked: CheckResult = CheckResult()
    seconds: Mapping[str, float] = {}
    """Phase -> its seconds: look at files, plan days, write files, check, and commit."""


class DayRows(BaseModel, frozen=True):
    """Row counts of one day: `rows` is the sum of the others."""

    rows: int
    written: int
    quarantined: int
    left_out: int
    """Negatives removed by downsampling, rows without a label that are skipped, and repeated events."""
    open: bool = False
    """Whether labels may still change."""


@dataclass(frozen=True)
class _Ingest:
    """What stays the same during one ingest."""

    context: SourceContext
    config: IngestConfig
    force: bool
    report: Report
    warn: Warn
    reader: SourceReader
    inventory: Inventory

    def open(self, days: Sequence[SourceDay]) -> OpenSource:
        """Opens what is needed to write some days."""
        return self.reader.rows(choose_files(days, self.inventory, self.context, self.reader.files))

    @property
    def loss_outcome(self) -> Verdict:
        """Outcome for a day that would lose something."""
        outcome = self.config.checks.losses
        return "warn" if self.force and outcome != "off" else outcome


class _Phases:
    """Seconds of the phases of an ingest, which follow each other, some of them several times."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._begun = time.perf_counter()

    def end(self, phase: str) -> None:
        """Ends a phase."""
        now = time.perf_counter()
        self.seconds[phase], self._begun = self.seconds.get(phase, 0.0) + now - self._begun, now


@dataclass(frozen=True)
class _Plan:
    """The days of an ingest, by what happens to them."""

    wanted: list[SourceDay]
    """All days asked for."""
    due: list[SourceDay]
    """Days to check and write: new or changed ones, or all with `force`."""
    unchanged: Mapping[datetime.date, str]
    """Day -> identity, of the days that the table already has from the same input."""
    changed: list[datetime.date]
    """Days of the same input that another engine has changed in the table."""
    theirs: Collection[datetime.date]
    """Days that another engine has changed in the table, whatever their input."""
    held_back: list[SourceDay]
    """Days that an earlier ingest held back, from the same input and by the same rules."""
    held_identities: Mapping[datetime.date, str]
    """Day that the table lacks as it is -> its identity if held back, which changes with the rules: it is checked again
    then."""
    stored: Mapping[datetime.date, StoredDay]
    """The requested days as the table has them. Only due days have statistics."""
    materialization: MaterializationPlan
    definition: str
    """Fingerprint of what the config says rows and labels are."""
    rows: OpenSource | None
    """Rows of the due days. None: no day is due."""
    order: str
    """ORDER BY clause of the rows written."""
    notes: Mapping[datetime.date, DayNote]
    """Of the days of the table, before the ingest."""
    first: datetime.date
    """The first day that `keep_days` of an event table keeps."""
    elsewhere: int
    """Days of the table that the source does not have. Not counted if only some days are asked for."""


def extract(
    context: SourceContext,
    config: IngestConfig,
    only: Iterable[datetime.date] = (),
    force: bool = False,
    report: Report = lambda what, done, total: None,
    on_checked: Callable[[CheckResult], None] = lambda checked: None,
    warn: Warn = lambda sentence: None,
) -> IngestResult:
    """Writes the days of a source into the warehouse. Days that were written from the same input are skipped.

    Args:
        only: Days to write; empty means all.
        force: Also writes days that the table already has, and checks again those that were held back.
        on_checked: Called with the result of the checks on the new days, before the last group of them is written.
        warn: Called with each problem that does not end the ingest.
    Raises:
        ConfigError: If the source lacks a column that the configuration names.
        DataError: If values have the wrong type, too many labels of a day are bad, a day fails a check, or the table
            has rows of another source.
        EmptyDatasetError: If there are no rows, a day in `only` has none, or there is no table because no day may be
            written.
    """
    phases = _Phases()
    context = replace(context, only=frozenset(only), repeat_days=config.repeat_days)
    if not config.other_sources:
        refuse_strangers(context)
    with SourceReader(context, report, bool(config.order_by)) as reader:
        known = Inventory() if force else Inventory.read(inventory_path(context))
        ingest = _Ingest(context, config, force, report, warn, reader, learn(reader, known, warn))
        phases.end("look")
        plan = _plan_days(ingest)
        phases.end("plan")
        held = [f"{day.day}" for day in plan.held_back]
        with keep_if_failed(events={context.table: {"held": held}}):
            checked = _write_groups(ingest, plan, on_checked, held, phases)
            passed = [day for day in plan.due if day.day not in checked.held_back]
            broken = [day for day in plan.due if day.day in checked.held_back]
            if not passed and not context.warehouse.has_table(context.table):
                raise _no_table_error(context, plan.wanted, [*broken, *plan.held_back])
            stay = {day.day for day in [*broken, *plan.held_back]}
            release_days(context.warehouse, context.table, [day.day for day in plan.wanted if day.day not in stay])
            remember(context)
            expired = _expire_days(context, plan.first)
            materialized = _materialize_days(ingest, plan, passed)
        result = _result(ingest, plan, passed, broken, checked)
        phases.end("commit")
        more = {"materialized": materialized, "days_expired": tuple(expired), "seconds": phases.seconds}
        return result.model_copy(update=more)


def source_days(context: SourceContext) -> list[datetime.date]:
    """Returns the days of a source in order. Raises as `extract`."""
    with SourceReader(context) as reader:
        known = learn(reader, Inventory.read(inventory_path(context)), lambda sentence: None)
    return sorted({day for one in known.rows.values() for day in one.days})


def _plan_days(ingest: _Ingest) -> _Plan:
    """Sorts the days of the source by what the table has of them, and opens those that are due."""
    context = ingest.context
    days = list_days(ingest.inventory, context, ingest.reader.files, ingest.config.order_by)
    snapshot = _current(context)
    noted_days = {} if snapshot is None else day_notes(context.warehouse, snapshot)
    _warn_of_unfit(ingest, noted_days)
    stored, theirs, there = context.warehouse.state_of_days(context.table)
    first = first_kept({*stored, *(day.day for day in days)}, context.events)
    wanted = [day for day in select_days(days, context.only, context.place("path")) if day.day >= first]
    if context.events is not None and not ingest.force:
        _refuse_other_declaration(context, days[0].note.definition)
    _refuse_bad_days(ingest, wanted)
    written = {} if ingest.force else stored
    held = {} if ingest.force else context.warehouse.written_days(held_back_name(context.table))
    same = {} if ingest.force else theirs
    changed = [day.day for day in wanted if day.identity == same.get(day.day)]
    table = read_stored_days(context.warehouse, snapshot, [day.day for day in wanted], noted_days)
    materialized = {day.day: table[day.day].materialized if day.day in table else () for day in wanted}
    joined = context.schema.sources if isinstance(context.schema, FeatureSchema) else ()
    materialization = plan_materialization(joined, context.warehouse, context.root, materialized, ingest.warn)
    rules = ingest.config.checks.model_dump(mode="json")
    left = [day for day in wanted if day.identity not in (written.get(day.day), same.get(day.day))]
    fillable = {day.day: sorted(materialization.columns_of(day.day)) for day in left}
    read = (
        sorted(name for name in stored_types(context.warehouse, context.table) if context.reads(name)) if left else []
    )
    held_identities = {day.day: fingerprint([day.identity, rules, fillable[day.day], read])[:16] for day in left}
    held_back = [day for day in left if held.get(day.day) == held_identities[day.day]]
    noted = {
        "refill": tuple(name_of(one) for one in joined if one.stored or one in materialization.columns),
        "sources": note_states(joined, context.root, context.warehouse) if left else {},
    }
    due = [replace(day, note=day.note.model_copy(update=noted)) for day in left if day not in held_back]
    rows, order, due = _open_due(ingest, due, stored) if due else (None, "", due)
    return _Plan(
        wanted=wanted,
        due=due,
        stored=add_statistics(context.warehouse, context.table, table, [day.day for day in due], context.label),
        materialization=materialization,
        unchanged={day.day: day.identity for day in wanted if day.identity == written.get(day.day)},
        changed=changed,
        theirs=theirs.keys(),
        held_back=held_back,
        held_identities=held_identities,
        definition=days[0].note.definition,
        first=first,
        rows=rows,
        order=order,
        notes=noted_days,
        elsewhere=0 if context.only else sum(day >= first for day in {*there} - {day.day for day in days}),
    )


def _warn_of_unfit(ingest: _Ingest, notes: Mapping[datetime.date, DayNote]) -> None:
    """Warns of columns that something reads now, and that lack values of days when nothing did."""
    lacking: dict[str, list[datetime.date]] = {}
    for day, note in notes.items():
        for column in note.unfit:
            lacking.setdefault(column, []).append(day)
    for column, days in lacking.items():
        if ingest.context.reads(column) and not ingest.config.checks.skips(column):
            ingest.warn(
                f"column '{column}' is null in {len(days)} days where its values do not fit, the first is {min(days)}:"
                " nothing read it when they were written"
            )


def _current(context: SourceContext) -> SnapshotRef | None:
    """Returns the newest snapshot of the table. None: it was never written."""
    warehouse, table = context.warehouse, context.table
    there = warehouse.has_table(table) and warehouse.table(table).current_snapshot() is not None
    return warehouse.current(table) if there else None


def _open_due(
    ingest: _Ingest, due: Sequence[SourceDay], stored: Collection[datetime.date]
) -> tuple[OpenSource, str, list[SourceDay]]:
    """Opens the rows of the due days and gives them their labels.

    Returns:
        The rows, their order, and the days that have rows to keep or that the table has.
    """
    context = ingest.context
    rows = ingest.open(due)
    order = order_clause(rows, ingest.config.order_by)
    if rows.left_out:
        named = ", ".join(f"{name} ({kind})" for name, kind in rows.left_out.items())
        ingest.warn(f"columns left out, which the warehouse has no type for and no feature reads: {named}")
    for note in rows.notes:
        ingest.warn(note)
    _verify_files(rows, due, context)
    if rows.join is not None:
        rows.join.attribute(rows.view, days_condition(due))
    if context.events is not None:
        _warn_of_anonymous(ingest, rows, context.events.key, due)
        if context.events.unique is None:
            _warn_of_repeated(ingest, rows, context.place("unique"), due)
    if rows.join is not None or context.source.unlabelled == "skip" or context.events is not None:
        due = count_left_out(rows, due)
        return rows, order, [day for day in due if day.kept or day.day in stored]
    return rows, order, list(due)


def _warn_of_anonymous(ingest: _Ingest, rows: OpenSource, key: Sequence[str], due: Sequence[SourceDay]) -> None:
    """Says how many events are left out because they lack a key."""
    found = count_rows(rows.connection, rows.view, f"{ANONYMOUS} AND {rows_of_days(rows, due)}")
    if found:
        total = sum(day.rows for day in due)
        ingest.warn(f"{found:,} of {total:,} events of the days to write have no {' or '.join(key)} and are left out")


def _warn_of_repeated(ingest: _Ingest, rows: OpenSource, key: str, due: Sequence[SourceDay]) -> None:
    """Warns of events that the log may have delivered more than once."""
    found = count_repeated(rows.connection, rows.view, rows_of_days(rows, due))
    if found:
        total = sum(day.rows for day in due)
        ingest.warn(
            f"{found:,} of {total:,} events repeat another one in all columns, and count twice. If the log delivers"
            f" events more than once, set {key} to the columns that tell them apart, or to *."
        )


def _verify_files(rows: OpenSource, due: Sequence[SourceDay], context: SourceContext) -> None:
    """Compares the files of the due days with their checksums, if they have some."""
    wanted = {name for day in due for name in day.files}
    for file in rows.files.rows:
        if rows.read[file].form == "parquet" and str(file) in wanted:
            verify_pages(file, context.warehouse.config.catalog)


def _refuse_other_declaration(context: SourceContext, definition: str) -> None:
    """Refuses a table of samples, and an event table of another declaration, whose days would lack columns.

    The newest day tells: days that the source no longer has stay as they are, also with `force`.
    """
    warehouse = context.warehouse
    if not warehouse.has_table(context.table):
        return
    noted = day_notes(warehouse, warehouse.current(context.table))
    newest = newest_day(noted) or max(noted, default=None)
    if newest is not None and noted[newest].definition != definition:
        raise ConfigError(
            f"events.{context.table}", "the key, time and columns that its table was written with",
            "others, or a table of samples",
            "Restore them, choose another name, or write all of it again: `python -m flows.ingest CONFIG force=true`.",
        )  # fmt: skip


def _refuse_bad_days(ingest: _Ingest, days: Sequence[SourceDay]) -> None:
    max_share = ingest.config.max_quarantined_share
    bad = [day for day in days if day.refused > max_share * day.rows or day.refused == day.rows]
    if bad:
        reasons = count_refused(ingest.open(bad), bad)
        remedy = "Correct the source, or raise ingest.max_quarantined_share."
        worst = max(bad, key=lambda day: day.refused / day.rows)
        words = any(reason.startswith("label is not a number") for reason in reasons)
        signs = worst.refused * 2 >= worst.rows and all(reason.startswith("label is not 0 or 1") for reason in reasons)
        if words or signs:
            remedy = f"Name the value that counts as 1, such as source.positive={'yes' if words else 1}. {remedy}"
        raise DataError(
            f"{'labels' if ingest.context.label else 'events'} of {len(bad)} day(s), worst {worst.day}",
            f"at most {max_share:.2%} bad rows a day, and at least one good row",
            f"{worst.refused} of {worst.rows} ({', '.join(reasons)})",
            remedy,
        )


def _write_groups(
    ingest: _Ingest, plan: _Plan, on_checked: Callable[[CheckResult], None], held: list[str], phases: _Phases
) -> CheckResult:
    """Writes the due days, each group in one commit, and returns what all checks found.

    The data files of a group are written while its rows are measured, and become part of the table when its days have
    passed their checks. After a kill, or a day that fails, the groups before stay.

    Args:
        held: Gets the days that are held back.
    """
    context, results = ingest.context, list[CheckResult]()
    if ingest.config.profile:
        repair_profile(
            context.warehouse,
            context.table,
            plan.unchanged,
            lambda schema: _numbers(context, schema.names, map_names(schema)),
        )
    groups, done = [*in_commits(plan.due, lambda day: day.rows, ingest.config.rows_per_commit)], 0
    unmatched, shown = _find_unmatched(ingest, plan), False
    phases.end("check")
    try:
        for group in groups:
            part = replace(plan, due=group)
            with _measured(ingest, part, done, sum(day.kept for day in plan.due)) as (measured, staged):
                phases.end("write")
                profiled, checked = _check_days(ingest, part, measured, unmatched)
                results.append(checked)
                if group is groups[-1]:
                    shown = True
                    on_checked(CheckResult.of(results))
                phases.end("check")
                checked.raise_failed(rename=context.place("rename"))
                broken = [day for day in group if day.day in checked.held_back]
                _hold_back(ingest, part, broken)
                held += [f"{day.day}" for day in broken]
                passed = [_note_unfit(day, checked) for day in group if day not in broken]
                _warn_of_overwritten(ingest, [day.day for day in passed if day.day in plan.theirs])
                if passed:
                    _write_group(ingest, part, passed, profiled, staged)
                done += sum(day.kept for day in group)
                phases.end("commit")
    finally:
        if results and not shown:
            on_checked(CheckResult.of(results))
    return CheckResult.of(results)


def _note_unfit(day: SourceDay, checked: CheckResult) -> SourceDay:
    """Notes which columns of a day are null where their values do not fit."""
    unfit = [
        one.column for one in checked.findings
        if (one.day, one.rule, one.outcome) == (day.day, "changed_type", "warn") and one.column is not None
    ]  # fmt: skip
    return replace(day, note=day.note.model_copy(update={"unfit": tuple(unfit)})) if unfit else day


@contextmanager
def _measured(ingest: _Ingest, plan: _Plan, done: int, total: int) -> Iterator[tuple[pa.Table, StagedDays | None]]:
    """Measures the rows of the due days while their data files are written. Yields the statistics and the files.

    No file is part of the table yet.

    Args:
        done, total: Rows of earlier groups, and of all.
    """
    context, rows = ingest.context, plan.rows
    assert rows is not None
    from pipeline.data.measurement import ProfileBuilder  # loads numba

    only = None if ingest.config.profile else [name for name in rows.columns if name == context.label]
    schema, batches = good_rows(rows, plan.due, rows.columns, plan.order)
    types = column_types(rows.connection, rows.view)
    builder = ProfileBuilder(schema, _numbers(context, rows.columns, maps_of(types)), only=only)
    with stage_days(context.warehouse, context.table, schema) as staged:
        if staged is None:
            for batch in batches:
                builder.add(batch)
        else:
            on_rows = partial(_report_from, ingest.report, done, total)
            kept = sum(day.kept for day in plan.due)
            staged.write(counting(builder.watch(batches), on_rows), {day.day for day in plan.due}, kept)
        yield builder.table(), staged


def _numbers(context: SourceContext, names: Sequence[str], maps: Sequence[str]) -> set[str]:
    """Returns the integer columns that are counts or the label, not ids."""
    return (
        number_columns(context.schema, [*names], context.outcome_columns, maps) if context.label is not None else set()
    )


def _check_days(
    ingest: _Ingest, plan: _Plan, measured: pa.Table, unmatched: Sequence[CheckFinding]
) -> tuple[CheckedProfile, CheckResult]:
    """Checks the due days against earlier days and against their versions in the table.

    Args:
        measured: Statistics of the due days.
        unmatched: Further rules that they break.
    """
    rows, context, checks = plan.rows, ingest.context, ingest.config.checks
    assert rows is not None
    due = {day.day: day for day in plan.due}
    rows_view = rows.create_good_view(rows_of_days(rows, plan.due))

    misfits = _find_misfits(ingest, rows, plan.due)

    def find(day: datetime.date, statistics: Columns) -> list[CheckFinding]:
        of_day = [one.model_copy(update={"day": day}) for one in unmatched]
        misfit = [one for one in misfits if one.day == day]
        return [*misfit, *_find_losses(ingest, plan, due, day, statistics), *of_day]

    new = NewDays(
        rows=rows_view,
        measured=measured,
        counts={day.day: day.kept for day in plan.due},
        open={day.day for day in plan.due if day.note.open},
        label=context.label,
        features=context.schema.named_columns() if isinstance(context.schema, FeatureSchema) else (),
        all_columns=ingest.config.profile,
    )
    profiled = check_days(rows.connection, new, context.warehouse, context.table, checks, find)
    return profiled, profiled.checked


def _find_misfits(ingest: _Ingest, rows: OpenSource, due: Sequence[SourceDay]) -> list[CheckFinding]:
    """Returns values that would change in the table, as a rule that their days break.

    No verdict can admit them, but where nothing may read the column or `skip` names it: there they are null.
    """
    context, checks = ingest.context, ingest.config.checks
    stored = stored_types(context.warehouse, context.table)
    strict: Verdict = "quarantine" if checks.outcome("changed_type") == "quarantine" else "fail"
    found = []
    for one in find_misfits(rows.connection, rows.view, f"{GOOD} AND {rows_of_days(rows, due)}"):
        admitted = not context.reads(one.column) or checks.skips(one.column)
        example = f"others in {one.rows:,} rows, such as '{one.value}' in '{Path(rows.names[one.file]).name}'"
        found.append(
            CheckFinding(
                day=one.day, rule="changed_type", outcome="warn" if admitted else strict, column=one.column,
                expected=f"{name_type(stored[one.column])}, as in table '{context.table}'",
                got=f"{example}; they are null there" if admitted else example,
            )
        )  # fmt: skip
    return found


def _find_unmatched(ingest: _Ingest, plan: _Plan) -> list[CheckFinding]:
    """Returns what the rows of all due days together match nearly nothing of, as rules that each of them breaks."""
    context, checks, rows = ingest.context, ingest.config.checks, plan.rows
    outcome, least = checks.unmatched, checks.matched_share
    if outcome == "off" or rows is None or not plan.due:
        return []
    view = rows.create_good_view(rows_of_days(rows, plan.due))
    found: list[Broken] = []
    if rows.join is not None:
        found += [("unmatched", expected, got, label) for label, expected, got in rows.join.find_unmatched(least)]
    total = sum(day.kept for day in plan.due)
    for path, column in rows.unmatched:
        matched = count_rows(rows.connection, view, f"{column} IS NOT NULL")
        found += find_few(f"side table '{path}'", matched, total, least)
    sources = context.schema.sources if isinstance(context.schema, FeatureSchema) else ()
    for source in open_sources(sources, context.root, context.warehouse):
        on = list(source.source.on)
        if not {*on} <= {*rows.columns}:
            continue  # whoever joins it says so
        there = " AND ".join(f"{quote(name)} IS NOT NULL" for name in on)
        query = f"SELECT {', '.join(map(quote, on))} FROM {view} WHERE {there} LIMIT {KEYS_MATCHED}"
        keys = rows.connection.sql(query).to_arrow_table()
        found += find_few(source.source.place, count_matched(source, keys, least), len(keys), least)
    first = plan.due[0].day
    return [
        CheckFinding(day=first, rule=rule, outcome=outcome, column=column, expected=expected, got=got)
        for rule, expected, got, column in found
    ]


def _find_losses(
    ingest: _Ingest,
    plan: _Plan,
    due: Mapping[datetime.date, SourceDay],
    day: datetime.date,
    new: Columns,
) -> list[CheckFinding]:
    """Returns what a day would lose, as broken rules. With `force` they are warnings."""
    outcome, context = ingest.loss_outcome, ingest.context
    if day not in plan.stored or outcome == "off":
        return []
    generated, config = context.source.generator is not None, ingest.config.checks
    columns, files = plan.materialization.columns_of(day), ingest.reader.files
    there = {path.name for path in files.rows}, {path.name for path in files.outcomes}
    lost = find_losses(due[day], plan.stored[day], new, columns, config, context.label, generated, there)
    return [
        CheckFinding(day=day, rule="losses", outcome=outcome, column=column, expected=expected, got=got)
        for expected, got, column in lost
    ]


def _hold_back(ingest: _Ingest, plan: _Plan, broken: Sequence[SourceDay]) -> None:
    """Writes the days that broke a rule into the table of held-back days."""
    warehouse, table = ingest.context.warehouse, ingest.context.table
    if broken and plan.rows is not None:
        held = [replace(day, identity=plan.held_identities[day.day]) for day in broken]
        write_days(plan.rows, warehouse, table, held, plan.order, held_back_name(table))


def _warn_of_overwritten(ingest: _Ingest, days: Sequence[datetime.date]) -> None:
    if days:
        ingest.warn(
            f"{len(days)} days that another engine has changed are written again from the source, the first is"
            f" {days[0]}: the changes of that engine are lost"
        )


def _write_group(
    ingest: _Ingest, plan: _Plan, days: Sequence[SourceDay], profiled: CheckedProfile, staged: StagedDays | None
) -> None:
    """Commits the staged files of days. Their statistics follow."""
    warehouse, table, identities = ingest.context.warehouse, ingest.context.table, identities_of(days)
    assert plan.rows is not None
    if staged is None:  # raises
        write_days(plan.rows, warehouse, table, days, plan.order, table)
    else:
        write_refused(plan.rows, warehouse, table, days, plan.order)
        staged.commit(identities, notes_of(days))
    store_profile(warehouse, table, profiled, identities)


def _expire_days(context: SourceContext, first: datetime.date) -> list[datetime.date]:
    """Removes the days before `first` from the table, and returns them."""
    if first == datetime.date.min:
        return []
    warehouse, table = context.warehouse, context.table
    gone = [day for day in warehouse.day_rows(warehouse.current(table)) if day < first]
    release_days(warehouse, table, [day for day in warehouse.written_days(held_back_name(table)) if day < first])
    if gone:
        schema = warehouse.table(table).schema().as_arrow()
        replace_days(warehouse, table, dict.fromkeys(gone, "expired"), schema, [], 0)
    return gone


def _materialize_days(ingest: _Ingest, plan: _Plan, passed: Sequence[SourceDay]) -> EnrichResult | None:
    context, written = ingest.context, [day.day for day in passed]
    others = {day: plan.stored[day] for day in plan.unchanged if day in plan.stored}
    report = partial(ingest.report, "enrich")
    return materialize_days(
        plan.materialization, context.warehouse, context.table, context.root, written, others, report
    )


def _result(
    ingest: _Ingest, plan: _Plan, passed: Sequence[SourceDay], broken: Sequence[SourceDay], checked: CheckResult
) -> IngestResult:
    rows, due = plan.rows, [*passed, *broken]
    touched = {*(day.day for day in [*due, *plan.held_back]), *plan.changed}
    snapshot = ingest.context.warehouse.current(ingest.context.table)
    written = {day.day for day in passed}
    noted = {**plan.notes, **day_notes(ingest.context.warehouse, snapshot, written)}
    return IngestResult(
        snapshot=snapshot,
        rows=sum(day.kept for day in passed),
        days_written=tuple(day.day for day in passed),
        days_skipped=tuple(day.day for day in plan.wanted if day.day not in touched),
        quarantined={} if rows is None else count_refused(rows, due),
        unmatched=dict.fromkeys((one.path for one in ingest.context.source.lookups), 0)
        if rows is None
        else {
            path: count_rows(rows.connection, rows.view, f"{column} IS NULL AND {rows_of_days(rows, passed)}")
            for path, column in rows.unmatched
        },
        days_elsewhere=plan.elsewhere,
        outcomes=rows.join.count_outcomes() if rows is not None and rows.join is not None and due else {},
        by_day={
            day.day: DayRows(
                rows=day.rows, written=day.kept, quarantined=day.refused, left_out=day.left_out, open=day.note.open
            )
            for day in passed
        },
        files=account(ingest.inventory, ingest.reader.opened, passed, broken),
        days_changed=tuple(plan.changed),
        days_held=tuple(sorted(day.day for day in [*broken, *plan.held_back])),
        days_open=tuple(day.day for day in plan.wanted if day.note.open),
        days_outdated=tuple(
            sorted(day for day, note in noted.items() if note.definition != plan.definition and day >= plan.first)
        ),
        stale_lookups=_count_stale(noted, [day for day in plan.wanted if day.day in plan.unchanged]),
        checked=checked,
    )


def _count_stale(noted: Mapping[datetime.date, DayNote], days: Sequence[SourceDay]) -> dict[str, int]:
    """Returns side table -> number of days that were written with other values of it."""
    pairs = [(day.note.lookups, noted[day.day].lookups) for day in days if day.day in noted]
    found = Counter(path for now, then in pairs for path in now if now[path] not in then.values())
    return dict(found)


def _no_table_error(
    context: SourceContext, days: Sequence[SourceDay], held_back: Sequence[SourceDay]
) -> EmptyDatasetError:
    """Explains why an ingest wrote no table at all."""
    table = context.table
    if context.events is not None and not held_back:
        return EmptyDatasetError(
            f"events of table '{table}'", f"some with {' and '.join(context.events.key)}", "null in all",
            f"Correct {context.place('key')}.",
        )  # fmt: skip
    if held_back:
        return EmptyDatasetError(
            f"table '{table}'", "a day that keeps the rules of ingest.checks",
            f"{len(held_back)} day(s), all held back in table '{held_back_name(table)}'",
            "Correct the source, or relax the rule and run again.",
        )  # fmt: skip
    return EmptyDatasetError(
        f"{len(days)} day(s) of the source", "rows to keep", "only negatives that downsampling leaves out",
        "Raise source.outcomes.keep_negatives.",
    )  # fmt: skip


def _report_from(report: Report, base: int, total: int, rows: int) -> None:
    report("ingest", base + rows, total)

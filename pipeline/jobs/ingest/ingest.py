"""Writes source rows into days of the warehouse, and adds columns of feature sources to them."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from pipeline.catalog.events import Event, append_event, newest_events, read_events
from pipeline.config.files import ROOT
from pipeline.data.joined.source import pin_sources
from pipeline.errors import DataError, keep_if_failed
from pipeline.extraction.adopt import adopt
from pipeline.extraction.config import LabelColumns, names_in
from pipeline.extraction.days import FileAccount
from pipeline.extraction.enrich import EnrichResult
from pipeline.extraction.enrich import enrich as write_columns
from pipeline.extraction.extract import IngestResult, extract
from pipeline.extraction.opening import SourceContext, generate_logs
from pipeline.extraction.own_source import patterns_of
from pipeline.extraction.profiling import held_back_name
from pipeline.extraction.writing import quarantine_name
from pipeline.jobs.columns import warn_of_clocks
from pipeline.jobs.console import step
from pipeline.jobs.ingest.checks import show_checks, summarize_checks
from pipeline.jobs.ingest.recompute import newest_noted_day, recompute_features
from pipeline.jobs.leaks import refuse_leaks
from pipeline.jobs.workspace import Workspace


@step("ingest", makes="table")
def ingest(workspace: Workspace, days: tuple[datetime.date, ...] = (), force: bool = False) -> IngestResult:
    """Source rows -> warehouse days. Safe to repeat: a day is replaced as a whole or not at all."""
    with workspace.lock(workspace.ingest_lock), workspace.console.progress() as progress:
        return write_days(workspace, days, force, progress)


@step("ingest events", makes="table")
def ingest_events(workspace: Workspace, table: str, force: bool) -> IngestResult:
    """Logs of events -> days of their table. Safe to repeat: a day is replaced as a whole or not at all."""
    config, events = workspace.config, workspace.config.events[table]
    checks = config.ingest.checks.model_copy(update={"key": None})
    settings = config.ingest.model_copy(update={"order_by": (*events.key, events.time), "checks": checks})
    show = partial(show_checks, workspace, table)
    with workspace.lock(workspace.lock_of(table)):
        if events.path is None:
            with workspace.console.progress() as generating:
                logs = generate_logs(make_source_context(workspace), generating)
            events = events.model_copy(update={"path": f"{logs}/watched/*.parquet"})
        context = SourceContext(
            events.source, LabelColumns(), workspace.warehouse, table, ROOT, workspace.home / "logs",
            memory_bytes=config.ingest.memory_bytes, events=events,
        )  # fmt: skip
        _say_source(workspace, context)
        with workspace.console.progress(table) as progress:
            return extract(context, settings, (), force, progress, show, workspace.console.log.warning)


@step("enrich", makes="table")
def enrich(workspace: Workspace, start: datetime.date | None, end: datetime.date | None, force: bool) -> EnrichResult:
    """Columns of feature sources -> warehouse days. Safe to repeat: finished days are skipped."""
    config = workspace.config
    joined = [*config.features.joined, *(one for one in config.features.logs if one.stored)]
    with workspace.lock(workspace.ingest_lock), workspace.console.progress() as progress:
        show = partial(progress, "enrich")
        return write_columns(joined, workspace.warehouse, config.name, ROOT, start, end, force, show)


def _say_source(workspace: Workspace, context: SourceContext) -> None:
    """Logs the absolute paths that an ingest reads, so that nobody takes other files for them."""
    workspace.console.log.info("table %s: rows of %s", context.table, ", ".join(patterns_of(context)))


def make_source_context(workspace: Workspace) -> SourceContext:
    """Returns the run's source with all that reading it needs."""
    config, logs = workspace.config, workspace.home / "logs"
    roles = frozenset(names_in(config, {"features", "source", "events", "skip", "path"}))
    return SourceContext(
        config.source, config.features, workspace.warehouse, config.name, ROOT, logs,
        memory_bytes=config.ingest.memory_bytes, repeat_days=config.ingest.repeat_days, roles=roles,
    )  # fmt: skip


def write_days(
    workspace: Workspace, days: Sequence[datetime.date], force: bool, report: Callable[[str, int, int], None]
) -> IngestResult:
    """Writes days of the source into the warehouse, or checks those of a table that is read as it is.

    Args:
        days: Empty: all days.
    """
    config, show = workspace.config, partial(show_checks, workspace, workspace.config.name)
    if config.source.table is not None:
        context = make_source_context(workspace)
        return adopt(context, config.ingest, config.filter, days, force, report, show)
    context = make_source_context(workspace)
    _say_source(workspace, context)
    return extract(
        context,
        config.ingest,
        days,
        force,
        report,
        show,
        workspace.console.log.warning,
    )


def ingest_days(workspace: Workspace, day: datetime.date | None, force: bool) -> dict[str, Any]:
    """Writes the source's days, after those of the event tables, and accounts for each row.

    Args:
        day: The one day to write; None: all days of the source. Of event tables, all new or changed days are written.
        force: Also writes days that the warehouse already has from the same input, and days that lose something. With
            `day`, this is not for event tables.
    """
    refuse_leaks(workspace)
    noted = newest_noted_day(workspace)
    events = ingest_event_tables(workspace, force and day is None)
    with keep_if_failed(events=events):
        result = ingest(workspace, () if day is None else (day,), force)
    if result.materialized is not None:
        declare_columns(workspace, result.materialized.columns)
    log_ingest(workspace, workspace.config.name, result, workspace.config.source.table)
    summary = summarize_ingest(workspace, workspace.config.name, result)
    written = any(one["status"] == "ok" for one in [summary, *events.values()])
    summary["recomputed"] = recompute_features(workspace, noted, result.days_written) if written else None
    return summary | ({"events": events, "status": "ok" if written else "skipped"} if events else {})


def ingest_event_tables(workspace: Workspace, force: bool) -> dict[str, Any]:
    """Writes new and changed days of all event tables. Returns table -> what was done, as `ingest_days`."""
    found: dict[str, Any] = {}
    with keep_if_failed(events=found):
        for table in workspace.config.events:
            result = ingest_events(workspace, table, force)
            log_ingest(workspace, table, result, None)
            found[table] = summarize_ingest(workspace, table, result)
    return found


def log_ingest(workspace: Workspace, name: str, result: IngestResult, foreign: str | None) -> None:
    """Logs what an ingest did.

    Args:
        name: The table.
        foreign: `source.table`.
    """
    log = workspace.console.log
    if result.days_skipped:
        log.info(
            "skipped: %s days of table %s %s",
            len(result.days_skipped),
            name,
            "are in the warehouse from the same input" if foreign is None else "are as they were checked",
        )
    if result.days_changed and foreign is not None:
        log.info(
            "another engine changed %s days since they were checked, the first is %s",
            len(result.days_changed),
            result.days_changed[0],
        )
    elif result.days_changed:
        log.warning(
            "another engine changed %s days, the first is %s. They stay; force=true writes them from the source",
            len(result.days_changed),
            result.days_changed[0],
        )
    if result.days_elsewhere:
        log.info("%s other days stay in the table: the source does not have them", result.days_elsewhere)
    if result.days_held:
        log.warning(
            "%s days broke a rule and are held back in table %s, the first is %s. Table %s keeps its versions of them",
            len(result.days_held), held_back_name(name), result.days_held[0], name,
        )  # fmt: skip
    if result.days_expired:
        log.info(
            "%s days of table %s were removed, because newer ones are as many as keep_days",
            len(result.days_expired),
            name,
        )
    if result.days_outdated:
        log.warning(
            "%s days of table %s have the rows and labels of an earlier config, the first is %s",
            len(result.days_outdated), name, result.days_outdated[0],
        )  # fmt: skip
    if result.days_open:
        log.warning(
            "%s days are open, the first is %s: their labels may still change. Ingest later outcomes to close them",
            len(result.days_open),
            result.days_open[0],
        )
    if result.materialized is not None:
        log.info(
            "materialized: %s, %s days", ", ".join(result.materialized.columns), len(result.materialized.days_written)
        )
    for path, stale in result.stale_lookups.items():
        log.info("%s days keep the values of an earlier '%s'. Set refresh=past_days to write them again", stale, path)
    _log_files(workspace, name, result)
    for reason, rows in result.quarantined.items():
        log.warning("quarantined: %s rows, %s; see table %s", f"{rows:,}", reason, quarantine_name(name))


def _log_files(workspace: Workspace, name: str, result: IngestResult) -> None:
    """Says what became of the rows of all files, and of those that had bad ones."""
    if result.files is None:
        return
    log = workspace.console.log
    opened = "all" if result.files.opened >= result.files.count else result.files.opened or "none"
    log.info("table %s: %s files, %s opened: %s", name, result.files.count, opened, _describe_rows(result.files.total))
    seconds = sum(result.seconds.values())
    if result.rows:
        phases = ", ".join(f"{phase} {spent:.1f}" for phase, spent in result.seconds.items())
        log.info("table %s: %s rows/s over %.1f s: %s", name, f"{result.rows / seconds:,.0f}", seconds, phases)
    for file, one in result.files.incomplete.items():
        log.warning("file '%s': %s", file, _describe_rows(one))
    if result.files.unlisted:
        log.warning("%s more files have rows that were quarantined or left out", result.files.unlisted)


def _describe_rows(counts: FileAccount) -> str:
    found = [
        f"{count:,} {kind.replace('_', ' ')}" for kind, count in counts.model_dump(exclude={"rows"}).items() if count
    ]
    return " + ".join(found) + f" = {counts.rows:,} rows"


def summarize_ingest(workspace: Workspace, name: str, result: IngestResult) -> dict[str, Any]:
    """Returns what an ingest did with the days of a table, as the command prints it."""
    done = [*result.days_written, *result.days_checked, *result.days_expired]
    seen = (result.days_written, result.days_checked, result.days_skipped, result.days_held, result.days_changed)
    touched = sorted({day for days in seen for day in days})
    return {
        "status": "ok" if done else "skipped",
        "table": result.snapshot.table,
        "snapshot_id": result.snapshot.snapshot_id,
        "rows": result.rows,
        "seconds": {phase: round(spent, 3) for phase, spent in result.seconds.items()},
        "days_written": len(result.days_written),
        "days_skipped": len(result.days_skipped),
        "days_held": len(result.days_held),
        "days_changed": len(result.days_changed),
        "days_expired": len(result.days_expired),
        "days_checked": len(result.days_checked),
        "held": [f"{day}" for day in result.days_held],
        "days_materialized": 0 if result.materialized is None else len(result.materialized.days_written),
        "days_outdated": [f"{day}" for day in result.days_outdated],
        "days_open": [f"{day}" for day in result.days_open],
        "first_day": str(touched[0]) if touched else None,
        "last_day": str(touched[-1]) if touched else None,
        "quarantined": dict(result.quarantined),
        "quarantined_rows": sum(result.quarantined.values()),
        "unmatched_lookups": dict(result.unmatched),
        "stale_lookups": dict(result.stale_lookups),
        "left_out_rows": sum(rows.left_out for rows in result.by_day.values()),
        "files": None if result.files is None else result.files.model_dump(),
        "by_day": {f"{day}": rows.model_dump() for day, rows in result.by_day.items()},
        "outcomes": {label: joined.model_dump() for label, joined in result.outcomes.items()},
        "checks": summarize_checks(workspace, name, result.checked),
    }


def require_one_config(ingested: Mapping[str, Any]) -> None:
    """Refuses a table that has rows and labels of an earlier config beside those of this one.

    Args:
        ingested: Result of `ingest_days`.
    Raises:
        DataError: If some days are of an earlier config.
    """
    if days := ingested["days_outdated"]:
        span = days[0] if len(days) == 1 else f"{len(days)} days, the first is {days[0]}"
        raise DataError(
            f"table '{ingested['table']}'", "rows and labels of each day as the config says",
            f"those of an earlier config in {span}",
            "Restore the input of these days and run again, write held days as they are now with "
            "`python -m flows.ingest CONFIG day=DAY force=true`, or train on the table as it is with "
            "`python -m flows.train`.",
        )  # fmt: skip


def enrich_days(
    workspace: Workspace, start: datetime.date | None, end: datetime.date | None, force: bool
) -> dict[str, Any]:
    """Materializes columns of feature sources and stored logs, and declares new ones as beta in the catalog."""
    refuse_leaks(workspace)
    result = enrich(workspace, start, end, force)
    declare_columns(workspace, result.columns)
    log = workspace.console.log
    stored = [source for source in workspace.config.features.sources if source.stored]
    warn_of_clocks(pin_sources(stored, ROOT, workspace.warehouse), result.snapshot, workspace.warehouse, log)
    if result.days_skipped:
        log.info("skipped: %s days have these columns from the same feature source", len(result.days_skipped))
    if result.days_without:
        log.info("%s days stay as they are: the feature source has no rows for them", len(result.days_without))
    if result.matched_share is not None:
        log.info("%s of the keys were found", f"{result.matched_share:.1%}")
    return {
        "status": "ok" if result.days_written else "skipped",
        "table": result.snapshot.table,
        "snapshot_id": result.snapshot.snapshot_id,
        "columns": list(result.columns),
        "days_written": len(result.days_written),
        "days_skipped": len(result.days_skipped),
        "days_without": len(result.days_without),
        "rows": result.rows,
        "matched_share": result.matched_share,
        "bytes_written": result.bytes_written,
    }


@step("declare")
def declare_columns(workspace: Workspace, columns: Sequence[str]) -> None:
    """Declares columns that the catalog lacks as beta. Safe to repeat: earlier declarations stay."""
    warehouse, name = workspace.warehouse, workspace.config.name
    now, known = datetime.datetime.now(datetime.UTC), newest_events(read_events(warehouse, name))
    for column in columns:
        if column not in known:
            event = Event(at=now, feature=column, state="beta", by="flows.enrich", reason="materialized")
            append_event(warehouse, name, event)

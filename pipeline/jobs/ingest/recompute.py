"""Measures at each ingest how often features of an earlier day change when they are computed again later."""

import datetime
import math
from collections.abc import Collection, Mapping
from functools import partial
from typing import Any, NamedTuple

from pipeline.config.files import ROOT
from pipeline.data.day_notes import day_notes, materialized_columns
from pipeline.data.joined.source import FeatureSource, PinnedSource, pin_sources
from pipeline.data.joined.states import note_state, restore_state
from pipeline.data.present import newest_day
from pipeline.jobs.console import step
from pipeline.jobs.features.consistency import describe_differences, row_columns, show_differences
from pipeline.jobs.ingest.checks import MOST_LINES
from pipeline.jobs.workspace import Workspace
from pipeline.scoring.consistency import compare_pinned
from pipeline.transforms.plan.plan import build_plan
from storage.reader import SnapshotRef

MOST_ROWS = 100_000
"""Rows of the day that are compared at most, evenly spread over it."""
TOLERANCE = 1e-6
"""Largest difference of equal fractions, relative to the larger one."""
THEN, NOW = "then__", "now__"
"""Prefixes of computed columns. The table may have them under their own names."""


class NotedDay(NamedTuple):
    """The newest day of a table before an ingest."""

    day: datetime.date
    states: Mapping[str, str]
    """Feature source -> its state when the day was written."""


class _Comparison(NamedTuple):
    """What can be compared of a day's features."""

    then: list[PinnedSource]
    """Sources as they were when the day was written."""
    now: list[PinnedSource]
    """Sources as they are now."""
    columns: dict[str, tuple[str, str]]
    """Feature -> (column as written, which may be one of the table; column computed now)."""
    lost: list[str]
    """Names of sources whose state at that time is lost."""


def newest_noted_day(workspace: Workspace) -> NotedDay | None:
    """Returns the newest day of the table with the noted states of its feature sources. None: nothing to compare."""
    config, warehouse = workspace.config, workspace.warehouse
    if config.ingest.checks.changed_share is None or not config.features.sources or config.source.table is not None:
        return None
    if not warehouse.has_table(config.name):
        return None
    states = {day: note.sources for day, note in day_notes(warehouse, warehouse.current(config.name)).items()}
    day = newest_day(day for day in states if states[day])
    return None if day is None else NotedDay(day, states[day])


def recompute_features(
    workspace: Workspace, noted: NotedDay | None, written: Collection[datetime.date]
) -> dict[str, Any] | None:
    """Compares a day's features as they were written with the same features computed now.

    An ingest does not fail because of it: what goes wrong is a warning.

    Args:
        noted: The day before the ingest.
        written: Days that the ingest has written.
    Returns:
        The result, or None if there is nothing to compare.
    """
    if noted is None:
        return None
    with workspace.best_effort("computing features of an earlier day again"):
        return _compare_day(workspace, noted, noted.day in written)
    return None


@step("compute features again")
def _compare_day(workspace: Workspace, noted: NotedDay, rewritten: bool) -> dict[str, Any] | None:
    """A day's features as written -> their differences from the same features computed now. It only reads.

    Args:
        rewritten: Whether the day was written again since, so that the columns materialized before are gone.
    """
    warehouse, day = workspace.warehouse, noted.day
    rows = warehouse.current(workspace.config.name)
    found = _plan_comparison(workspace, rows, noted, rewritten)
    if found.lost:
        workspace.console.log.info(
            "the state of %s when day %s was written is lost: how often its values change is not measured",
            ", ".join(found.lost), day,
        )  # fmt: skip
    if not found.columns:
        return {"day": f"{day}", "rows": 0, "features": [], "lost": found.lost} if found.lost else None
    on = list(dict.fromkeys(column for one in found.now for column in row_columns(one)))
    count = warehouse.day_rows(rows)[day]
    with workspace.console.progress() as progress:
        result = compare_pinned(
            warehouse, rows, found.then, found.now, found.columns, on, {day: count}, TOLERANCE,
            partial(progress, "compute again"), workspace.console.log.info, math.ceil(count / MOST_ROWS),
        )  # fmt: skip
    features = list(result.features)
    return _report(workspace, day, {"day": f"{day}", "rows": result.rows, "features": features, "lost": found.lost})


def _plan_comparison(workspace: Workspace, rows: SnapshotRef, noted: NotedDay, rewritten: bool) -> _Comparison:
    """Finds the features whose source has changed since a day was written, and how to read them as they were."""
    warehouse, config = workspace.warehouse, workspace.config
    plan = build_plan(config.features, workspace.columns(rows, config.features.named_columns()))
    materialized = set() if rewritten else materialized_columns(warehouse, rows).get(noted.day, set())
    found = _Comparison([], [], {}, [])
    for source in config.features.sources:
        if source.name not in noted.states:
            continue
        [now] = pin_sources([source], ROOT, warehouse)
        columns = [name for name in FeatureSource(now, warehouse).schema.names if name in plan.columns]
        if not columns or noted.states[source.name] == note_state(now):
            continue
        in_rows = [name for name in columns if source.stored and name in materialized]
        then = None if in_rows else restore_state(now, noted.states[source.name], warehouse)
        if then is not None:
            found.then.append(_add_prefix(then, THEN))
        elif not in_rows:
            found.lost.append(source.place)
            continue
        found.now.append(_add_prefix(now, NOW))
        read = in_rows or [f"{THEN}{name}" for name in columns]
        found.columns.update({name: (of, f"{NOW}{name}") for name, of in zip(in_rows or columns, read, strict=True)})
    return found


def _add_prefix(pinned: PinnedSource, prefix: str) -> PinnedSource:
    """Returns a source whose columns have another prefix."""
    source = pinned.source
    return pinned.model_copy(update={"source": source.model_copy(update={"prefix": f"{prefix}{source.prefix}"})})


def _report(workspace: Workspace, day: datetime.date, result: dict[str, Any]) -> dict[str, Any]:
    """Shows the differences on the run's page, writes them below `home/reports`, and warns of large ones."""
    log, allowed = workspace.console.log, workspace.config.ingest.checks.changed_share or 0.0
    changing = [one for one in result["features"] if one["share"] > allowed]
    for one in changing[:MOST_LINES]:
        reasons, share = describe_differences(one)["reasons"], 100 * one["share"]
        log.warning("%.2f%% of '%s' on %s changed after the day was written: %s", share, one["feature"], day, reasons)
    if changing:
        log.warning(
            "%s features change by more than %.2f%%. Set delay_seconds to the time in which all events arrive, and "
            "as_of for sources that get new values", len(changing), 100 * allowed,
        )  # fmt: skip
    line = f"features of {result['rows']:,} rows of day {day} have other values than when it was written"
    return result | {"report": str(show_differences(workspace, [day], "ingest", result, line))}

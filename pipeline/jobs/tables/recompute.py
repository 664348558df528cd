"""Measures at each ingest how often features of an earlier day change when they are computed again later."""

import datetime
import math
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any, NamedTuple

from pipeline.config.files import ROOT
from pipeline.data.day_notes import DayNote, backfilled_columns, day_notes
from pipeline.data.joined.source import FeatureSource, PinnedSource, pin_sources
from pipeline.data.joined.states import note_state, restore_state
from pipeline.jobs.console import step
from pipeline.jobs.tables.checks import MOST_LINES
from pipeline.jobs.tables.consistency import describe_differences, report_path, row_columns
from pipeline.jobs.workspace import Workspace
from pipeline.scoring.consistency import compare_pinned
from pipeline.transforms.plan.plan import build_plan
from storage.artifacts import write_json
from storage.reader import SnapshotRef

MOST_ROWS = 100_000
"""Rows of the day that are compared at most, evenly spread over it."""
TOLERANCE = 1e-6
"""Largest difference of equal fractions, relative to the larger one."""
NOW = "now__"
"""Prefix of columns as they are computed now. The table may have them under their own names."""


class _Sources(NamedTuple):
    """Feature sources of a day, by what can be compared."""

    then: list[PinnedSource]
    """As they were when the day was written. Columns of the others are in its rows."""
    now: list[PinnedSource]
    """All that are compared, as they are now."""
    columns: list[str]
    """Columns to compare."""
    lost: list[str]
    """Names of sources whose state of then is lost."""


def recompute_features(workspace: Workspace, written: Collection[datetime.date]) -> dict[str, Any] | None:
    """Compares features of the newest earlier day, as when it was written, with the same features computed now.

    An ingest does not fail because of it: what goes wrong is a warning.

    Args:
        written: Days that the ingest has written now.
    Returns:
        The result, or None if there is nothing to compare.
    """
    config = workspace.config
    if config.ingest.checks.changed_share is None or not config.features.sources or config.source.table is not None:
        return None
    with workspace.best_effort("computing features of an earlier day again"):
        rows = workspace.warehouse.current(config.name)
        notes = day_notes(workspace.warehouse, rows)
        earlier = [day for day, note in notes.items() if note.sources and day not in written]
        if earlier:
            return _compare_day(workspace, rows, max(earlier), notes[max(earlier)])
    return None


@step("compute features again")
def _compare_day(workspace: Workspace, rows: SnapshotRef, day: datetime.date, note: DayNote) -> dict[str, Any] | None:
    """Features of a day when it was written -> their differences from the same features computed now. It only reads."""
    warehouse = workspace.warehouse
    plan = build_plan(workspace.config.features, workspace.columns(rows, workspace.config.features.named_columns()))
    found = _sort_sources(workspace, rows, day, note, plan.columns)
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
            partial(progress, "compute again"), NOW, math.ceil(count / MOST_ROWS),
        )  # fmt: skip
    features = sorted(result.features, key=lambda one: -one["share"])
    return _report(workspace, day, {"day": f"{day}", "rows": result.rows, "features": features, "lost": found.lost})


def _sort_sources(
    workspace: Workspace, rows: SnapshotRef, day: datetime.date, note: DayNote, wanted: Sequence[str]
) -> _Sources:
    """Finds the feature sources that have changed since a day was written, and their state of then.

    Args:
        wanted: Columns that the model reads.
    """
    warehouse = workspace.warehouse
    found = _Sources([], [], [], [])
    written = backfilled_columns(warehouse, rows).get(day, set())
    for source in workspace.config.features.sources:
        if source.name not in note.sources:
            continue
        [now] = pin_sources([source], ROOT, warehouse)
        columns = [name for name in FeatureSource(now, warehouse).schema.names if name in wanted]
        if source.stored:
            columns = [name for name in columns if name in written]
        if not columns or note.sources[source.name] == note_state(now):
            continue
        then = None if source.stored else restore_state(now, note.sources[source.name], warehouse)
        if then is None and not source.stored:
            found.lost.append(source.place)
            continue
        found.then.extend([] if then is None else [then])
        found.now.append(now.model_copy(update={"source": source.model_copy(update={"prefix": NOW + source.prefix})}))
        found.columns.extend(columns)
    return found


def _report(workspace: Workspace, day: datetime.date, result: dict[str, Any]) -> dict[str, Any]:
    """Shows the differences on the run's page, writes them below `home/reports`, and warns of large ones."""
    log, allowed = workspace.console.log, workspace.config.ingest.checks.changed_share or 0.0
    features, name = result["features"], workspace.config.name
    changing = [one for one in features if one["share"] > allowed]
    for one in changing[:MOST_LINES]:
        reasons, share = describe_differences(one)["reasons"], 100 * one["share"]
        log.warning("%.2f%% of '%s' on %s changed after the day was written: %s", share, one["feature"], day, reasons)
    if changing:
        log.warning(
            "%s features change by more than %.2f%%. Set delay_seconds to the time in which all events arrive, and "
            "as_of for sources that get new values", len(changing), 100 * allowed,
        )  # fmt: skip
    line = f"{sum(one['differing'] > 0 for one in features)} of {len(features)} features of day {day} have other values"
    path = report_path(workspace, [day], "ingest")
    write_json(path, result)
    log.info("%s than when it was written, in %s rows: %s", line, f"{result['rows']:,}", path)
    workspace.console.show_table("recomputed", name, [describe_differences(one) for one in features], line)
    return result | {"report": str(path)}

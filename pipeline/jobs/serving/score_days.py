"""Scores whole days with a version of the registry."""

import datetime
import time
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config.files import ROOT
from pipeline.data.joined.materialized import require_materialized
from pipeline.inference.model import LoadedModel
from pipeline.jobs.console import step
from pipeline.jobs.evaluation.trained import sources_as_trained
from pipeline.jobs.training.provenance import trained_sources
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import choose_version
from pipeline.registration.tracking import Tracker
from pipeline.registration.versions import download_packed
from pipeline.scoring.score import SCORES, plan_scoring, score
from storage.config import name_apart
from storage.reader import SnapshotRef
from storage.scratch import ScratchFolder


class Scores(BaseModel, frozen=True):
    """The result of a scoring."""

    version: int
    source: SnapshotRef
    written: SnapshotRef
    """Snapshot of the table of scores."""
    days: tuple[datetime.date, ...]
    skipped: tuple[datetime.date, ...]
    earlier: int
    """How many of these keep the scores of an earlier version."""
    rows: int
    rows_per_second: float | None
    mean_probability: float | None


@step("score")
def score_rows(
    workspace: Workspace,
    start: datetime.date | None,
    end: datetime.date | None,
    version: int | None,
    force: bool,
) -> Scores:
    """Scores the days of the newest snapshot that have no scores yet, or have changed since; see `plan_scoring`.

    Each model has a table of its own, and so has each version that is named: they would undo each other's work.
    Safe to repeat: a day is replaced as a whole, and finished days stay.

    Args:
        version: None: the champion.
    """
    config = workspace.config
    tracker, warehouse = workspace.tracking, workspace.warehouse
    number, identity = choose_version(tracker, config.model_name, version)
    source = warehouse.current(config.name)
    joined = sources_as_trained(workspace, source, trained_sources(workspace, number))
    key = config.model_key if version is None else name_apart(config.model_key, f"v{version}")
    work = plan_scoring(
        config.scoring, warehouse, source, config.filter, identity, start, end, force, joined, f"{key}_{SCORES}"
    )
    rows, mean, speed = 0, None, None
    if work.todo:
        model = _load_model(tracker, config.model_name, number, workspace.home / "tmp")
        require_materialized(config.features.sources, warehouse, source, list(model.columns), work.todo, ROOT)
        began = time.perf_counter()
        with workspace.console.progress() as progress:
            done = score(config.scoring, warehouse, work, model, number, partial(progress, "score"))
        rows, mean = done.rows, done.mean_probability
        speed = rows / (time.perf_counter() - began)
    return Scores(
        version=number,
        source=source,
        written=warehouse.current(work.table),
        days=tuple(work.todo),
        skipped=work.done,
        earlier=work.earlier,
        rows=rows,
        rows_per_second=speed,
        mean_probability=mean,
    )


def score_days(
    workspace: Workspace, start: datetime.date | None, end: datetime.date | None, version: int | None, force: bool
) -> dict[str, Any]:
    """Writes scores of days and reports which days were skipped.

    Args:
        version: None: the champion.
        force: Also scores days that have their scores.
    """
    result = score_rows(workspace, start, end, version, force)
    log = workspace.console.log
    if result.days:
        log.info("%s scores are in table %s of the warehouse", f"{result.rows:,}", result.written.table)
    own = len(result.skipped) - result.earlier
    if own:
        text = "skipped: %s days have scores of version %s and the same rows; force=true scores them again"
        log.info(text, own, result.version)
    if result.earlier:
        log.info("skipped: %s days keep the scores of an earlier version; start=DAY scores from there", result.earlier)
    return {
        "status": "ok" if result.days else "skipped",
        "model": workspace.config.model_name,
        "version": result.version,
        "days": [str(day) for day in result.days],
        "skipped_days": [str(day) for day in result.skipped],
        "rows": result.rows,
        "table": result.written.table,
        "snapshot_id": result.written.snapshot_id,
        "source_snapshot_id": result.source.snapshot_id,
        "rows_per_second": result.rows_per_second,
        "mean_probability": result.mean_probability,
    }


def _load_model(tracker: Tracker, name: str, version: int, temporary: Path) -> LoadedModel:
    """Loads a version's model. The fetched files are deleted afterwards; its tables stay mapped."""
    with ScratchFolder("score-", temporary) as folder:
        return LoadedModel(download_packed(tracker, name, version, Path(folder)))

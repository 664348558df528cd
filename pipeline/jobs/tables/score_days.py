"""Whole days scored by a version of the registry."""

import datetime
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from pydantic import BaseModel

from pipeline.config import RunConfig
from pipeline.jobs.console import Progress
from pipeline.jobs.training.job import joined_of, tracker_of, warehouse_of
from pipeline.registration.aliases import choose_version
from pipeline.registration.register import download_packed
from pipeline.registration.scorer import LoadedModel
from pipeline.registration.tracking import Tracker
from pipeline.scoring.score import plan_scoring, score
from storage.reader import SnapshotRef


class Scores(BaseModel, frozen=True):
    """What a scoring did."""

    version: int
    source: SnapshotRef
    written: SnapshotRef
    """The table of scores as it is now."""
    days: tuple[datetime.date, ...]
    skipped: tuple[datetime.date, ...]
    rows: int
    rows_per_second: float | None
    mean_probability: float | None


def score_days(
    config: RunConfig,
    start: datetime.date | None,
    end: datetime.date | None,
    version: int | None,
    again: bool,
    progress: Progress,
) -> Scores:
    """Scores the days of the newest snapshot that this version has not scored as they are now.

    Args:
        version: None: the champion.
    """
    tracker, warehouse = tracker_of(config), warehouse_of(config)
    number, identity = choose_version(tracker, config.model_name, version)
    source = warehouse.current(config.name)
    joined = joined_of(config)
    work = plan_scoring(config.scoring, warehouse, source, config.filter, identity, start, end, again, joined)
    rows, mean, speed = 0, None, None
    if work.todo:
        model = _fetched(tracker, config.model_name, number, config.home_path / "tmp")
        began = time.perf_counter()
        done = score(config.scoring, warehouse, work, model, number, lambda done, total: progress("score", done, total))
        rows, mean = done.rows, done.mean_probability
        speed = rows / (time.perf_counter() - began)
    return Scores(
        version=number,
        source=source,
        written=warehouse.current(work.table),
        days=tuple(work.todo),
        skipped=work.done,
        rows=rows,
        rows_per_second=speed,
        mean_probability=mean,
    )


def _fetched(tracker: Tracker, name: str, version: int, temporary: Path) -> LoadedModel:
    """A version's model in memory; what was fetched is taken away again."""
    temporary.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix="score-", dir=temporary) as folder:
        return LoadedModel(download_packed(tracker, name, version, Path(folder)))

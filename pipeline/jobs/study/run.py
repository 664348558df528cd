"""A study at work: its points measured or judged, each a run in MLflow below the study's."""

import time
from dataclasses import dataclass, field

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from pipeline.characterization.results import PointResult
from pipeline.errors import ContractError
from pipeline.jobs.console import Progress
from pipeline.jobs.study.job import Work
from pipeline.jobs.study.points import Tell, keep, measure, stored
from pipeline.jobs.study.quality import judged


@dataclass
class Clock:
    """How far a study is, and how long it will take."""

    total: int
    done: int = 0
    here: int = 0
    """Points of this process."""
    began: float = field(default_factory=time.monotonic)

    def count(self, stored: bool) -> str:
        """One more point is through, maybe by an earlier process; what is left in words, nothing before the first."""
        self.done += 1
        self.here += not stored
        if not self.here or self.done == self.total:
            return ""
        minutes = (time.monotonic() - self.began) / self.here * (self.total - self.done) / 60
        return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"


@task(cache_policy=NO_CACHE, task_run_name="measure points")
def run_points(work: Work) -> None:
    """Measures what is left of a study's points. Safe to repeat: those that are measured stay."""
    logger, config = get_run_logger(), work.config
    with Progress(logger, "points") as progress:
        clock = Clock(len(work.job.points))

        def tell(result: PointResult, stored: bool) -> PointResult:
            if not stored:
                result = recorded(work, result)
                logger.info("%s: %s", result.point.name, in_words(result))
            note = clock.count(stored)
            progress("points", clock.done, clock.total, note)
            return result

        if config.characterize.measure == "quality":
            work.results = compared(work, tell)
        else:
            work.results = measure(config, work.job.points, work.folder, tell, work.job.snapshot_id)


def recorded(work: Work, result: PointResult) -> PointResult:
    """The result with its run in MLflow, below the study's; a point that was judged has that of its sweep."""
    if result.mlflow_run_id is not None:
        work.tracker.log(result.mlflow_run_id, 0, dict(result.quality or {}))
        return result
    tags = {"mlflow.parentRunId": work.run_id, "mlflow.source.name": "flows.characterize", "dlrm.study": work.job.name}
    run_id = work.tracker.start(result.point.name, result.point.settings, tags, None)
    if result.measurement is not None:
        work.tracker.log(run_id, 0, result.measurement.flat())
    if result.reason is not None:
        work.tracker.tag(run_id, {"mlflow.note.content": result.reason})
    work.tracker.end(run_id, "FAILED" if result.state == "failed" else "FINISHED")
    return result.model_copy(update={"mlflow_run_id": run_id})


def in_words(result: PointResult) -> str:
    """What came out, in a line."""
    if result.quality is not None:
        return ", ".join(f"{name} {value:.4f}" for name, value in result.quality.items())
    if result.measurement is None:
        return f"{result.state}: {result.reason}"
    one = result.measurement
    parts = sorted(one.split_ms.items(), key=lambda part: -part[1])[:3]
    split = ", ".join(f"{name} {value / one.step_ms.median:.0%}" for name, value in parts)
    spread = (one.step_ms.high - one.step_ms.low) / one.step_ms.median
    return f"{one.rows_per_second.median:,.0f} rows/s, step {one.step_ms.median:.1f} ms (spread {spread:.0%}): {split}"


def compared(work: Work, tell: Tell) -> list[PointResult]:
    """NE of each point, as it is and with tuned learning rates."""
    results = []
    for point in work.job.points:
        before = stored(work.folder, point)
        if before is not None and before.state != "failed":
            results.append(tell(before, True))
            continue
        try:
            found = judged(work.config, point, work.run_id, work.job.snapshot_id)
            quality = {name: found[name] for name in ("ne", "tuned_ne")}
            result = PointResult(point=point, state="measured", quality=quality, mlflow_run_id=found["mlflow_run_id"])
        except ContractError as error:
            result = PointResult(point=point, state="failed", reason=str(error))
        results.append(keep(work.folder, tell(result, False)))
    return results

"""Runs an efficiency study: measures or sweeps its points. Each has an MLflow run below that of the study."""

import time
from dataclasses import dataclass, field
from typing import Any

from pipeline.errors import ContractError
from pipeline.jobs.console import step
from pipeline.jobs.workspace import Workspace
from pipeline.study.job import OpenStudy, load_result, open_study, pin_study
from pipeline.study.measure.group import OnResult, load_point, measure_points, save_point
from pipeline.study.measure.results import PointResult
from pipeline.study.page import conclude, describe_result
from pipeline.study.points.config import CharacterizeConfig
from pipeline.study.quality import sweep_point


@dataclass
class Clock:
    """Progress of a study, and its remaining time."""

    total: int
    done: int = 0
    here: int = 0
    """Points that this process measured."""
    began: float = field(default_factory=time.monotonic)

    def count(self, stored: bool) -> str:
        """Counts a point. Returns the remaining time in words, empty before the first point of this process.

        Args:
            stored: The point is from an earlier process.
        """
        self.done += 1
        self.here += not stored
        if not self.here or self.done == self.total:
            return ""
        minutes = (time.monotonic() - self.began) / self.here * (self.total - self.done) / 60
        return f"about {minutes:.0f} min left" if minutes >= 1 else "less than a minute left"


@step("measure points")
def run_points(work: OpenStudy) -> None:
    """Measures the remaining points of a study. Safe to repeat: measured points stay."""
    logger = work.console.log
    with work.console.progress("points") as progress:
        clock = Clock(len(work.job.points))

        def on_result(result: PointResult, stored: bool) -> PointResult:
            if not stored:
                result = record_point(work, result)
                logger.info("%s: %s", result.point.name, describe_result(result))
            note = clock.count(stored)
            progress("points", clock.done, clock.total, note)
            return result

        if work.job.settings.measure == "quality":
            work.results = sweep_points(work, on_result)
        else:
            work.results = measure_points(
                work.workspace, work.job.settings, work.job.points, work.folder, on_result, work.job.snapshot_id
            )


def record_point(work: OpenStudy, result: PointResult) -> PointResult:
    """Logs a result to an MLflow run below the study's, and returns it with the run's id.

    A point with a sweep has the run of the sweep.
    """
    if result.mlflow_run_id is not None:
        work.workspace.tracking.log(result.mlflow_run_id, 0, dict(result.quality or {}))
        return result
    tags = {"mlflow.parentRunId": work.run_id, "mlflow.source.name": "flows.characterize", "dlrm.study": work.job.name}
    run_id = work.workspace.tracking.start(result.point.name, result.point.settings, tags, None)
    if result.measurement is not None:
        work.workspace.tracking.log(run_id, 0, result.measurement.flat())
    if result.reason is not None:
        work.workspace.tracking.tag(run_id, {"mlflow.note.content": result.reason})
    work.workspace.tracking.end(run_id, "FAILED" if result.state == "failed" else "FINISHED")
    return result.model_copy(update={"mlflow_run_id": run_id})


def sweep_points(work: OpenStudy, on_result: OnResult) -> list[PointResult]:
    """Returns the NE of each point, as it is and with tuned values."""
    results = []
    for point in work.job.points:
        before = load_point(work.folder, point)
        if before is not None and before.state != "failed":
            results.append(on_result(before, True))
            continue
        try:
            found = sweep_point(work.workspace, work.job.settings, point, work.run_id, work.job.snapshot_id)
            quality = {name: found[name] for name in ("ne", "tuned_ne")}
            result = PointResult(point=point, state="measured", quality=quality, mlflow_run_id=found["mlflow_run_id"])
        except ContractError as error:
            result = PointResult(point=point, state="failed", reason=str(error))
        results.append(save_point(work.folder, on_result(result, False)))
    return results


def run_study(
    workspace: Workspace, settings: CharacterizeConfig, snapshot_id: int | None, force: bool, report: str | None
) -> dict[str, Any]:
    """Runs an efficiency study, resumes it, or returns its result where it is done.

    Args:
        snapshot_id: Snapshot to read where the study has no workload of its own; None takes the newest.
        force: Starts a new study where the same one is done.
        report: Folder for text, table and figures; None: the study's own.
    """
    job = pin_study(workspace, settings, snapshot_id, force)
    done = None if report else load_result(workspace, job)
    if done is not None:
        return done
    with open_study(workspace, job) as work:
        run_points(work)
        return conclude(work, report)

"""One of several trainings that are compared. It is evaluated on validation rows alone and never registered."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from filelock import FileLock
from pydantic import BaseModel

from pipeline.data.selection import Part
from pipeline.errors import ConfigError
from pipeline.jobs.training.job import TrainingJob, make_job, open_training_run, resolve_dataset
from pipeline.jobs.training.train import train_ranks
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from pipeline.registration.journal import Journal
from pipeline.registration.tracking import reporting_unreachable
from pipeline.training.launch.processes import Event

BEST_NE = "best_valid_ne"
"""Metric of a candidate's MLflow run."""
Watch = Callable[[Event | None], object]
"""Receives each event of a training, and None several times a second. Raises `StoppedEarly` to end it."""


class StoppedEarly(Exception):
    """Ends a candidate because others do better."""


class CandidateResult(BaseModel, frozen=True):
    """The result of a candidate."""

    run_id: str
    valid_ne: float | None
    """Best NE on the validation rows. None: it was stopped early."""
    summary: Mapping[str, Any] = {}
    """The ranks' summary."""


def pin_candidate(workspace: Workspace, identity: str, snapshot_id: int, folder: Path, plans: Path) -> TrainingJob:
    """Pins a candidate. It has no test rows.

    Args:
        identity: Of the search. The snapshot is tagged with it once for all candidates.
        folder: Of this candidate. An interrupted training resumes from it.
        plans: Folder of fitted plans. Candidates with the same columns, transforms and rows share one.
    Raises:
        ConfigError: If there are no validation rows.
    """
    snapshot, data = resolve_dataset(workspace, snapshot_id)
    known: dict[Part, DataSpec] = {part: spec for part, spec in data.items() if part != "test"}
    if "valid" not in known:
        raise ConfigError("split", "validation rows, by which candidates are ranked", "none", "Name some as `valid`.")
    fitted_on = hashlib.sha256(known["train"].model_dump_json().encode()).hexdigest()[:12]
    plans.mkdir(parents=True, exist_ok=True)
    with FileLock(plans / "lock"):
        job = make_job(plans / fitted_on, workspace, identity, (snapshot, known))
    return job.model_copy(update={"folder": str(folder)})


def train_candidate(
    workspace: Workspace,
    job: TrainingJob,
    name: str,
    tags: Mapping[str, str],
    watch: Watch | None = None,
    on_start: Callable[[str], object] | None = None,
) -> CandidateResult:
    """Trains one candidate in an MLflow run of its own, or resumes it.

    Args:
        name: Of the MLflow run.
        tags: Of the run, such as `mlflow.parentRunId`.
        on_start: Called with the run's id once the run exists.
    Raises:
        TrackingError: If MLflow does not answer. The weights are kept, and the same call resumes.
    """
    tracker = workspace.tracking
    with open_training_run(workspace, job, name, tags) as run_id:
        if on_start is not None:
            on_start(run_id)
        try:
            trained = train_ranks(workspace, job, run_id, watch=watch)
        except StoppedEarly:
            tracker.tag(run_id, {"dlrm.stopped_early": "true"})
            return CandidateResult(run_id=run_id, valid_ne=None)
        with reporting_unreachable("Once it answers, run the same command again to resume."):
            Journal(tracker, run_id, Path(job.folder), workspace.console.log.warning).deliver()
            tracker.log(run_id, trained.summary["steps"], {BEST_NE: trained.summary["valid_ne"]})
    return CandidateResult(run_id=run_id, valid_ne=trained.summary["valid_ne"], summary=trained.summary)

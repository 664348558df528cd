"""A training from its pin to a registered version."""

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from pipeline.evaluation.config import EvaluationConfig, require_installed
from pipeline.jobs.code_version import read_commit
from pipeline.jobs.columns import warn_of_columns
from pipeline.jobs.console import step
from pipeline.jobs.training.identity import name_test_rows
from pipeline.jobs.training.job import TrainingJob, open_training_run, resolve_job
from pipeline.jobs.training.train import train
from pipeline.jobs.workspace import Workspace
from pipeline.registration.tracking import CONFIG, Tracker


def train_version(
    workspace: Workspace,
    snapshot_id: int | None,
    force: bool,
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Trains, evaluates and registers a model version, or returns the result of the same training.

    Args:
        snapshot_id: Snapshot to read; None takes the newest.
        force: Trains even where the same training is in the registry.
        name: Of the MLflow run; None: what is special about the config.
        tags: Of the MLflow run, in addition to the usual ones.
    """
    with workspace.lock(workspace.training_lock):
        job = pin_job(workspace, snapshot_id, force)
        if job.done:
            if has_new_evaluation(workspace, job):
                from pipeline.jobs.training.finish import evaluate_again

                return evaluate_again(workspace, job)
            return load_result(workspace, job)
        with open_training_run(workspace, job, name, tags) as run_id:
            trained = train(workspace, job, run_id)
            # Not before: it imports PyTorch, which takes seconds that the ranks need to start.
            from pipeline.jobs.training.finish import finish

            return finish(workspace, job, trained, run_id)


@step("pin")
def pin_job(workspace: Workspace, snapshot_id: int | None, force: bool) -> TrainingJob:
    """Snapshot, split and fitted plan of a training. Safe to repeat: it only reads, and writes the plan once."""
    require_installed(workspace.config.evaluation.baselines)
    job = resolve_job(workspace, snapshot_id, force)
    counts = {part: f"{rows:,} rows of " for part, rows in job.rows.items()}
    parts = (f"{part} {counts.get(part, '')}{len(spec.selection.days)} days" for part, spec in job.data.items())
    workspace.console.log.info("snapshot %s: %s", job.snapshot.snapshot_id, ", ".join(parts))
    warn_of_columns(job.data["train"], workspace.warehouse, workspace.console.log)
    return job


def load_result(workspace: Workspace, job: TrainingJob) -> dict[str, Any]:
    """The result of a training that was done before."""
    assert job.done is not None
    version, run_id = job.done
    log, model = workspace.console.log, workspace.config.model_name
    result = workspace.tracking.load_result(run_id) | {"status": "skipped"}
    log.info("skipped: %s version %s has the same rows and config; force=true trains again", model, version)
    if result.get("git_commit") != read_commit():
        log.warning("the code has changed since: that model is of commit %s", result.get("git_commit"))
    return result


class _Stored(BaseModel, frozen=True):
    """What is read of the config that a run has logged."""

    evaluation: EvaluationConfig


def read_evaluation(tracker: Tracker, run_id: str) -> EvaluationConfig:
    """Reads the settings of the latest evaluation of a run.

    Raises:
        RegistryError: If the run has none.
    """
    return tracker.read_record(run_id, CONFIG, _Stored).evaluation


def has_new_evaluation(workspace: Workspace, job: TrainingJob) -> bool:
    """Whether a finished training would now be evaluated with other settings or on other rows."""
    assert job.done is not None
    run_id, tracker = job.done[1], workspace.tracking
    if _settings(read_evaluation(tracker, run_id)) != _settings(workspace.config.evaluation):
        return True
    return bool(tracker.load_result(run_id).get("test_rows") != name_test_rows(workspace.warehouse, job.data))


def _settings(evaluation: EvaluationConfig) -> dict[str, Any]:
    return evaluation.model_dump(exclude={"workers"})

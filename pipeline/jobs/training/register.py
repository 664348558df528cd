"""Registers a finished training later, from its run's folder."""

from pathlib import Path
from typing import Any

from pipeline.config import load
from pipeline.errors import ConfigError, RegistryError
from pipeline.jobs.training.finish import finish
from pipeline.jobs.training.job import (
    ABOUT,
    JOB,
    REGISTERED,
    RUN_ID,
    TrainingJob,
    make_job,
    open_training_run,
    resolve_dataset,
)
from pipeline.jobs.training.provenance import RECORD, Record, restore_config
from pipeline.jobs.training.train import TRAINED, TrainingResult
from pipeline.jobs.workspace import Workspace
from pipeline.registration.tracking import reporting_unreachable
from storage.artifacts import read_line, read_note


def register_run(workspace: Workspace, run: str | None) -> dict[str, Any]:
    """Evaluates and registers the model of a finished training. Does not repeat finished steps.

    Args:
        run: Id of the MLflow run, or name of the run's folder.
    """
    folder = _find_folder(workspace, run)
    record = read_note(folder / RECORD, Record)
    workspace = workspace.with_config(restore_config(record, workspace))
    run_id, tracker = read_line(folder / RUN_ID), workspace.tracking
    again = f"Run it again once it answers: python -m flows.register CONFIG run={run}"
    with reporting_unreachable(again):
        known = tracker.find_run(run_id)
    if (folder / REGISTERED).exists():
        if known is None:
            remedy = f"Restore MLflow's records, or {folder / RUN_ID}."
            raise RegistryError(f"MLflow run '{run_id}'", f"the run of '{folder}'", "none of that id", remedy)
        workspace.console.log.info("skipped: run %s is registered", run_id)
        with reporting_unreachable(again):
            tracker.end(run_id, "FINISHED")  # MLflow may have missed the end
            return tracker.load_result(run_id) | {"status": "skipped"}
    job = load_job(workspace, folder, record)
    if (job.identity, job.plan.hash) != (record.identity, record.plan_hash):
        remedy = f"Restore its files from a copy, or remove '{folder}' and train again."
        raise RegistryError(f"run folder '{folder}'", "files of one training", "those of several", remedy)
    trained = read_note(folder / TRAINED, TrainingResult)
    trained = trained.model_copy(update={"weights": str(folder / "weights.safetensors")})
    name = None if known is None else known.data.tags.get(ABOUT, known.info.run_name)
    with open_training_run(workspace, job, name) as run_id:
        return finish(workspace, job, trained, run_id)


def load_job(workspace: Workspace, folder: Path, record: Record) -> TrainingJob:
    if (folder / JOB).exists():
        return read_note(folder / JOB, TrainingJob).model_copy(update={"folder": str(folder)})
    # A finished training is registered even if a feature has been deprecated since.
    allowed = workspace.with_config(load(workspace.config, {"features.allow_deprecated": True}))
    data = resolve_dataset(allowed, record.snapshot.snapshot_id, record.pinned)
    return make_job(folder, workspace, record.identity, data)


def _find_folder(workspace: Workspace, run: str | None) -> Path:
    """Returns the folder of a finished training."""
    runs = workspace.home / "runs"
    done = [path.parent for path in sorted(runs.glob(f"*/{TRAINED}")) if (path.parent / RUN_ID).exists()]
    for folder in done:
        if run in (folder.name, read_line(folder / RUN_ID)):
            return folder
    open_runs = [folder.name for folder in done if not (folder / REGISTERED).exists()]
    remedy = f"Not registered yet: {', '.join(open_runs) or 'none'}."
    raise ConfigError("argument 'run'", f"a finished training in '{runs}'", run or "none", remedy)

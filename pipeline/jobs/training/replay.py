"""Trains a version again from its record and compares the two."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError, RegistryError
from pipeline.jobs.console import step
from pipeline.jobs.training.job import TrainingJob, make_job, open_training_run, resolve_dataset
from pipeline.jobs.training.provenance import (
    RECORD,
    Record,
    fetch_record,
    list_differences,
    override_recorded,
    restore_config,
)
from pipeline.jobs.training.rank import measure_uses, plan_placement
from pipeline.jobs.training.train import TrainingResult, make_rank_spec, train
from pipeline.jobs.workspace import Workspace
from storage.artifacts import write_json

RESULT = "replay.json"


def replay_version(workspace: Workspace, version: int | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Trains a version again and compares weights and plan.

    Args:
        overrides: Dotted key -> value. Only keys that do not change what is learned.
    Raises:
        ConfigError: If no version is named, or an override would change what is learned.
        RegistryError: If the version has no record, or was trained by flows.recurring.
    """
    if version is None:
        raise ConfigError("argument 'version'", "the version to train again", "none", "Add version=N.")
    name = workspace.config.model_name
    old = fetch_record(workspace.tracking, name, version)
    if old.day is not None:
        raise RegistryError(
            f"model '{name}', version {version}", "a training by flows.train", f"one of {old.day} by flows.recurring",
            "It continued another version: roll back to that one, then run flows.recurring day=... force=true.",
        )  # fmt: skip
    workspace = workspace.with_config(_make_config(old, workspace, overrides))
    job = pin_replay(workspace, old, f"{name}-{version}")
    tags = {"dlrm.replay_of": f"{name}/{version}", "mlflow.source.name": "flows.replay"}
    with open_training_run(workspace, job, f"replay of {name} version {version}", tags) as run_id:
        trained = train(workspace, job, run_id, old.placement)
        return compare_records(workspace, job, old, trained, run_id) | {"model": {"name": name, "version": version}}


def _make_config(old: Record, workspace: Workspace, overrides: Mapping[str, Any]) -> RunConfig:
    """Returns the recorded config with the recorded device and threads, and the overrides over them."""
    machine = {"training.threads_per_rank": old.threads_per_rank, "training.device": old.device}
    base = load(restore_config(old, workspace), machine)
    places = ("home", "warehouse", "registration")
    return override_recorded(base, {key: value for key, value in overrides.items() if key.split(".")[0] not in places})


@step("pin")
def pin_replay(workspace: Workspace, old: Record, name: str) -> TrainingJob:
    """Pins the recorded training in a folder of its own. Safe to repeat: an interrupted replay is found again."""
    folder = workspace.unfinished_folder("replays", name, RESULT)
    return make_job(folder, workspace, old.identity, resolve_dataset(workspace, old.snapshot.snapshot_id))


@step("compare")
def compare_records(
    workspace: Workspace, job: TrainingJob, old: Record, trained: TrainingResult, run_id: str
) -> dict[str, Any]:
    """Records of the version and its replay -> their differences. Safe to repeat: it replaces its result."""
    folder, tracker, log = Path(job.folder), workspace.tracking, workspace.console.log
    new = Record.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
    spec = make_rank_spec(workspace, job)
    planned = plan_placement(spec, measure_uses(spec)).placement
    found = list_differences(old, new, planned or ())
    equal = (old.weights_sha256, old.plan_hash) == (new.weights_sha256, new.plan_hash)
    result = {
        "status": "ok",
        "equal": equal,
        "differences": found,
        "weights_sha256": {"recorded": old.weights_sha256, "replayed": new.weights_sha256},
        "plan_hash": {"recorded": old.plan_hash, "replayed": new.plan_hash},
        "snapshot_id": job.snapshot.snapshot_id,
        "train": {key: value for key, value in trained.summary.items() if key != "event"},
        "mlflow_run_id": run_id,
    }
    log.info("the replay has %s", "the same weights and plan" if equal else "other weights or another plan")
    for line in found:
        log.warning("differs: %s", line)
    tracker.log_json(run_id, result, RESULT)
    tracker.log_file(run_id, folder / RECORD)
    tracker.tag(run_id, {"dlrm.replay_equal": str(equal).lower()})
    write_json(folder / RESULT, result)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the exported weights stay
    return result

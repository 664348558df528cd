"""Trains a version again from its record and compares the two."""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.tables import tables_of
from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError, RegistryError
from pipeline.jobs.console import step
from pipeline.jobs.training.job import PLAN, TrainingJob, make_job, open_training_run, resolve_dataset
from pipeline.jobs.training.provenance import (
    RECORD,
    Record,
    fetch_record,
    list_differences,
    override_recorded,
    restore_config,
)
from pipeline.jobs.training.rank.model import add_sharding_plan, measure_uses
from pipeline.jobs.training.train import TrainingResult, fetch_served, make_rank_spec, train
from pipeline.jobs.workspace import Workspace
from pipeline.registration.versions import TRAINED_FROM
from pipeline.training.state import checkpoint as store
from pipeline.training.tables.plan import check_plan
from pipeline.transforms.plan.carry_over import Start, carry_over_fit
from pipeline.transforms.plan.plan import Plan
from storage.artifacts import inside, read_note, write_json

RESULT = "replay.json"


def replay_version(workspace: Workspace, version: int | None, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Trains a version again and compares weights and plan.

    A version may continue an earlier one. Its replay starts from the earlier version's checkpoint. If that is gone, the
    earlier version is replayed first, and so on.

    Args:
        overrides: Dotted key -> value. Only keys that do not change what is learned.
    Raises:
        ConfigError: If no version is named, or an override would change what is learned.
        RegistryError: If the version has no record, or one that it continues has been removed.
    """
    if version is None:
        raise ConfigError("argument 'version'", "the version to train again", "none", "Add version=N.")
    missing = _list_missing(workspace, version)
    checkpoint: Path | None = None
    kept: list[Path] = []
    try:
        for number in missing:
            workspace.console.log.info("version %s: its checkpoint is gone, so it is replayed first", number)
            first, folder = _replay(workspace, number, overrides, checkpoint)
            kept.append(folder / "checkpoints")
            checkpoint = store.find_served(kept[-1])
            if not first["equal"]:
                workspace.console.log.warning(
                    "the replay of version %s differs, and so will those of the versions that continue it", number
                )
        result, folder = _replay(workspace, version, overrides, checkpoint)
        kept.append(folder / "checkpoints")
    finally:
        for one in kept:
            shutil.rmtree(one, ignore_errors=True)  # the exported weights stay
    return result | {"replayed_first": missing}


def _list_missing(workspace: Workspace, version: int) -> list[int]:
    """Returns the continued versions without a checkpoint, which must be replayed first. The oldest is first."""
    found: list[int] = []
    before = fetch_record(workspace.tracking, workspace.config.model_name, version).continues
    while before is not None and _find_checkpoint(workspace, before) is None:
        found.insert(0, before)
        try:
            before = fetch_record(workspace.tracking, workspace.config.model_name, before).continues
        except RegistryError as error:
            raise RegistryError(
                f"replay of model '{workspace.config.model_name}', version {version}",
                "the versions that it continues, back to one with a checkpoint or from scratch",
                f"no record of version {before}",
                "Retention has removed it, so this version cannot be replayed. Name a later one. To keep more: "
                "retention.runs_days, retention.versions_days, or recurring.scratch_every_days below them.",
            ) from error
    return found


def _find_checkpoint(workspace: Workspace, version: int) -> Path | None:
    """Returns the checkpoint that a version was exported from. None: it has been removed."""
    model = workspace.tracking.get_version(workspace.config.model_name, str(version))
    folder = None if model is None else model.tags.get("run_folder")
    if folder is None:
        return None
    root = inside(workspace.home / "runs", folder) / "checkpoints"
    fetch_served(workspace, root)
    return store.find_served(root)


def _replay(
    workspace: Workspace, version: int, overrides: Mapping[str, Any], checkpoint: Path | None
) -> tuple[dict[str, Any], Path]:
    """Trains one version again. Returns the comparison and the folder.

    Args:
        checkpoint: Where it starts, if it continues a version that was replayed. None: from that version's own.
    """
    name = workspace.config.model_name
    old = fetch_record(workspace.tracking, name, version)
    workspace = workspace.with_config(_make_config(old, workspace, overrides))
    job = pin_replay(workspace, old, f"{name}-{version}", checkpoint)
    width = workspace.config.model.embedding_width
    check_plan(
        old.placement,
        {table.name: (table.rows, width) for table in tables_of(job.plan.sparse)},
        workspace.config.training.world_size,
        f"{RECORD} of model '{name}', version {version}, key 'placement'",
    )
    tags = {"dlrm.replay_of": f"{name}/{version}", "mlflow.source.name": "flows.replay"}
    with open_training_run(workspace, job, f"replay of {name} version {version}", tags) as run_id:
        trained = train(workspace, job, run_id, old.placement)
        result = compare_records(workspace, job, old, trained, run_id) | {"model": {"name": name, "version": version}}
    return result, Path(job.folder)


def _make_config(old: Record, workspace: Workspace, overrides: Mapping[str, Any]) -> RunConfig:
    """Returns the recorded config with the recorded device and threads, and the overrides over them."""
    machine = {"training.threads_per_rank": old.threads_per_rank, "training.device": old.device}
    base = load(restore_config(old, workspace), machine)
    places = ("home", "warehouse", "registration")
    return override_recorded(base, {key: value for key, value in overrides.items() if key.split(".")[0] not in places})


@step("pin")
def pin_replay(workspace: Workspace, old: Record, name: str, checkpoint: Path | None = None) -> TrainingJob:
    """Pins the recorded training in a folder of its own. Safe to repeat: an interrupted replay is found again."""
    folder = workspace.unfinished_folder("replays", name, RESULT)
    snapshot, data = resolve_dataset(workspace, old.snapshot.snapshot_id, old.pinned)
    if old.continues is None:
        return make_job(folder, workspace, old.identity, (snapshot, data))
    before = workspace.tracking.get_version(workspace.config.model_name, str(old.continues))
    start_from = checkpoint or _find_checkpoint(workspace, old.continues)
    assert before is not None
    assert start_from is not None  # `replay_version` has made it
    known = workspace.tracking.read_record(str(before.run_id), PLAN, Plan)
    plan = carry_over_fit(data["train"].plan, known)
    data = {part: spec.model_copy(update={"plan": plan}) for part, spec in data.items()}
    job = make_job(folder, workspace, old.identity, (snapshot, data))
    tags = {TRAINED_FROM: f"{old.continues}"}
    return job.model_copy(update={"start": Start(checkpoint=str(start_from), plan=known), "tags": tags})


@step("compare")
def compare_records(
    workspace: Workspace, job: TrainingJob, old: Record, trained: TrainingResult, run_id: str
) -> dict[str, Any]:
    """Records of the version and its replay -> their differences. Safe to repeat: it replaces its result."""
    folder, tracker, log = Path(job.folder), workspace.tracking, workspace.console.log
    new = read_note(folder / RECORD, Record)
    spec = make_rank_spec(workspace, job)
    planned = add_sharding_plan(spec, measure_uses(spec)).placement
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
    return result

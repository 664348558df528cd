"""Flow: a version is trained again from its record, and compared."""

import itertools
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from pydantic import PositiveInt

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError, RegistryError
from pipeline.jobs.training import tasks
from pipeline.jobs.training.job import TrainingJob, job_in, selected, tracked_run, tracker_of
from pipeline.jobs.training.provenance import RECORD, Record, changed, differences, fetched, recorded_config
from pipeline.jobs.training.rank import placed, table_uses
from pipeline.jobs.training.summary import flow_run_name
from storage.artifacts import write_json

RESULT = "replay.json"


@flow(name="replay", flow_run_name=flow_run_name)
def replay(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    version: PositiveInt | None = None,
) -> dict[str, Any]:
    """A version of the registry in, whether it can be trained again to the same weights out.

    Snapshot, config, placement of the tables and threads are those of the version's record. Nothing is registered and
    no alias moves. `equal` says that weights and fitted plan are the same, bit for bit; `differences` lists all that
    is not as it was.

    Args:
        config: Says where home, warehouse and MLflow are, and the model's name; all else is in the record.
        overrides: Dotted key -> value; such as do not change what is learned, like preprocessing.workers.
        version: The version to train again.
    """
    here = load(config, overrides)
    if version is None:
        raise ConfigError("argument 'version'", "the version to train again", "none", "Add version=N.")
    name = here.model_name
    old = fetched(tracker_of(here), name, version)
    if old.day is not None:
        raise RegistryError(
            f"model '{name}', version {version}", "a training by flows.train", f"one of {old.day} by flows.recurring",
            "It went on from another version: go back to that one, then flows.recurring day=... again=true.",
        )  # fmt: skip
    settings = _settings(old, here, overrides or {})
    job = pin(settings, old, f"{name}-{version}")
    tags = {"dlrm.replay_of": f"{name}/{version}", "mlflow.source.name": "flows.replay"}
    with tracked_run(settings, job, f"replay of {name} version {version}", tags) as run_id:
        trained = tasks.train(settings, job, run_id, old.placement)
        return compare(settings, job, old, trained, run_id) | {"model": {"name": name, "version": version}}


def _settings(old: Record, here: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """The recorded config with the recorded device and number of threads, and what the overrides make of it."""
    machine = {"training.threads_per_rank": old.threads_per_rank, "training.device": old.device}
    base = load(recorded_config(old, here), machine)
    places = ("home", "warehouse", "registration")
    return changed(base, {key: value for key, value in overrides.items() if key.split(".")[0] not in places})


@task(cache_policy=NO_CACHE, task_run_name="pin")
def pin(config: RunConfig, old: Record, name: str) -> TrainingJob:
    """The recorded training in a folder of its own. Safe to repeat: one that was cut short is found again."""
    folders = (config.home_path / "replays" / f"{name}-{attempt}" for attempt in itertools.count())
    folder = next(folder for folder in folders if not (folder / RESULT).exists())
    return job_in(folder, config, old.identity, selected(config, old.snapshot.snapshot_id))


@task(cache_policy=NO_CACHE, task_run_name="compare")
def compare(config: RunConfig, job: TrainingJob, old: Record, trained: tasks.Trained, run_id: str) -> dict[str, Any]:
    """Record of the version and of its replay -> what differs. Safe to repeat: it replaces its result."""
    folder, tracker = Path(job.folder), tracker_of(config)
    new = Record.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
    spec = tasks.rank_spec(config, job)
    planned = placed(spec, table_uses(spec)).placement
    found = differences(old, new, planned or ())
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
    logger = get_run_logger()
    logger.info("the replay has %s weights", "the same" if equal else "other")
    for line in found:
        logger.warning("differs: %s", line)
    tracker.log_json(run_id, result, RESULT)
    tracker.log_file(run_id, folder / RECORD)
    tracker.tag(run_id, {"dlrm.replay_equal": str(equal).lower()})
    write_json(folder / RESULT, result)
    shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # the whole weights stay
    return result


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(replay)

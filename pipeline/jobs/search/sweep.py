"""A sweep before it runs: what it searches, where it keeps its trials, and what it shares among them."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.jobs.search.trials import (
    RESULT,
    SearchJob,
    Trials,
    check_label,
    check_parallel,
    check_section,
    open_search_run,
    pin_search,
)
from pipeline.jobs.training.identity import semantics
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.workspace import Workspace
from pipeline.search.config import SweepConfig
from pipeline.search.grid import count_trials
from pipeline.search.study import SearchStudy

STUDY = "study.db"
"""File in a sweep's folder."""
SOURCE = "flows.sweep"


def pin_sweep(workspace: Workspace, snapshot_id: int | None, force: bool) -> SearchJob:
    """The sweep that a config and a snapshot name; what can be wrong with it is found here.

    Args:
        snapshot_id: None takes the newest.
        force: Makes a new one beside one that is done.
    Raises:
        ConfigError: If a key cannot be searched, or a value of it does not fit the config.
    """
    config = workspace.config
    check_space(config)
    snapshot, data = resolve_dataset(workspace, snapshot_id)
    if "valid" not in data:
        raise ConfigError("split", "validation rows, by which trials are ranked", "none", "Name some as `valid`.")
    inputs = {"config": semantics(workspace), "sweep": config.sweep.identity()}
    return pin_search(workspace, "sweeps", snapshot, inputs, force)


def check_space(config: RunConfig) -> None:
    """Refuses keys that cannot be searched, before anything runs: each value is put into the config by itself.

    Raises:
        ConfigError: Names the key.
    """
    plain = drop_sweep(config)
    if not config.sweep.space:
        expected = "at least one key with its values"
        raise ConfigError("sweep.space", expected, "none", "Add one: `training.table_learning_rate: {low: .01, ...}`.")
    for key, dimension in config.sweep.space.items():
        check_section(f"sweep.space '{key}'", key)
        ends = dimension.choices if dimension.choices is not None else (dimension.low, dimension.high)
        configs = [load(plain, {key: value}) for value in ends]
        for changed in configs:
            check_label(f"sweep.space '{key}'", plain.features.label, changed.features.label)
        learned = [changed.semantics() for changed in configs]
        if len(learned) > 1 and all(other == learned[0] for other in learned[1:]):
            raise ConfigError(f"sweep.space '{key}'", "a key that changes what is learned", "none", "Leave it out.")
    limits = config.sweep.trial_overrides
    for key in limits:
        check_section(f"sweep.trial_overrides, key '{key}'", key)
    trial = load(plain, limits)
    check_label("sweep.trial_overrides, features.label", plain.features.label, trial.features.label)
    check_parallel("sweep.parallel", config.sweep.parallel, trial.training.launcher, trial.preprocessing.executor)


def drop_sweep(config: RunConfig) -> RunConfig:
    """The config of a plain training."""
    return config.model_copy(update={"sweep": SweepConfig()})


def read_own_values(config: RunConfig) -> dict[str, Any]:
    """The config's own values of the keys that are searched, those that the space has."""
    values = config.model_dump(mode="json")
    found = {key: _look_up(values, key) for key in config.sweep.space}
    return {key: value for key, value in found.items() if config.sweep.space[key].holds(value)}


def _look_up(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[int(part)] if isinstance(values, list) else (values or {}).get(part)
    return values


def load_result(workspace: Workspace, job: SearchJob) -> dict[str, Any] | None:
    """The result of a sweep that was done before with as many trials."""
    path = Path(job.folder) / RESULT
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if result is None or sum(result["trials"].values()) < count_trials(workspace.config.sweep):
        return None
    if not Path(result["config_path"]).exists():
        return None
    advice = "force=true makes a new one, a larger sweep.trials goes on"
    workspace.console.log.info("skipped: sweep %s is done; %s", job.name, advice)
    return dict(result) | {"status": "skipped"}


class Sweep(Trials):
    """A sweep at work."""

    def __init__(self, workspace: Workspace, job: SearchJob, run_id: str) -> None:
        config = workspace.config
        folder = Path(job.folder)
        super().__init__(
            workspace, SearchStudy(folder / STUDY, config.sweep, read_own_values(config)), job, folder, run_id
        )
        self.config = config
        # For the run's page; the log has a line a trial.
        self.progress = workspace.console.progress("trials", quiet=True)
        self.began, self.done_before = time.monotonic(), len(self.done())

    def settings(self, params: Mapping[str, Any]) -> RunConfig:
        """The config of a trial, with the limits of all trials."""
        return load(drop_sweep(self.config), {**self.config.sweep.trial_overrides, **params})

    def time_left(self, done: int) -> str:
        """In words; nothing before the first trial of this process is done."""
        here, left = done - self.done_before, count_trials(self.config.sweep) - done
        if here <= 0 or left <= 0:
            return ""
        minutes = (time.monotonic() - self.began) / here * left / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"


@contextmanager
def open_sweep(workspace: Workspace, job: SearchJob) -> Iterator[Sweep]:
    """The sweep with its file and its MLflow run, which is ended whatever happens."""
    config = workspace.config
    params = {f"sweep.{key}": value for key, value in config.sweep.model_dump(exclude_defaults=True).items()}
    tags = {"mlflow.source.name": SOURCE, "dlrm.sweep": job.name}
    with open_search_run(workspace, job, f"sweep of {config.name}", params, tags) as run_id:
        (Path(job.folder) / RESULT).unlink(missing_ok=True)  # of fewer trials: it has not ended any more
        sweep = Sweep(workspace, job, run_id)
        sweep.tidy_all()
        yield sweep

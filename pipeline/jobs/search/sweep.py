"""A pinned sweep: its search space, its folder and its trials."""

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

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
from pipeline.jobs.training.identity import LEARNED, describe_rows, semantics
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.workspace import Workspace
from pipeline.search.config import SweepConfig
from pipeline.search.grid import count_trials
from pipeline.search.study import SearchStudy
from storage.artifacts import read_values

STUDY = "study.db"
"""File in a sweep's folder."""
SOURCE = "flows.sweep"


def pin_sweep(workspace: Workspace, snapshot_id: int | None, force: bool) -> SearchJob:
    """Pins the sweep of a config and a snapshot, and checks it before anything runs.

    Args:
        snapshot_id: None takes the newest.
        force: Starts a new sweep if the last one is done.
    Raises:
        ConfigError: If a key cannot be searched, or a value of it does not fit the config.
    """
    config = workspace.config
    check_space(config)
    snapshot, data = resolve_dataset(workspace, snapshot_id)
    if "valid" not in data:
        raise ConfigError("split", "validation rows, by which trials are ranked", "none", "Name some as `valid`.")
    inputs = {"config": semantics(workspace, evaluation=True), "sweep": config.sweep.identity()}
    rows = {"plan": data["train"].plan.hash, **describe_rows(workspace.warehouse, data, LEARNED)}
    return pin_search(workspace, "sweeps", snapshot, rows, inputs, force)


def check_space(config: RunConfig) -> None:
    """Refuses keys that cannot be searched. Puts each of their values into the config to check it.

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
    """Returns the config without its sweep."""
    return config.model_copy(update={"sweep": SweepConfig()})


def read_own_values(config: RunConfig) -> dict[str, Any]:
    """Returns key -> the config's own value, for keys that are searched. Leaves out values outside the space."""
    values = config.model_dump(mode="json")
    found = {key: _look_up(values, key) for key in config.sweep.space}
    return {key: value for key, value in found.items() if config.sweep.space[key].holds(value)}


def _look_up(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[int(part)] if isinstance(values, list) else (values or {}).get(part)
    return values


class _Swept(BaseModel, frozen=True):
    """What `load_result` reads of a result."""

    trials: Mapping[str, int]
    config_path: str


def load_result(workspace: Workspace, job: SearchJob) -> dict[str, Any] | None:
    """Returns the result of a sweep that is done with as many trials, else None."""
    path = Path(job.folder) / RESULT
    result = read_values(path, _Swept) if path.exists() else None
    if result is None or sum(result["trials"].values()) < count_trials(workspace.config.sweep):
        return None
    if not os.path.exists(result["config_path"]):  # unlike Path.exists, takes any text
        return None
    advice = "force=true starts a new one, a larger sweep.trials adds trials"
    workspace.console.log.info("skipped: sweep %s is done; %s", job.name, advice)
    return dict(result) | {"status": "skipped"}


class Sweep(Trials):
    """A running sweep."""

    def __init__(self, workspace: Workspace, job: SearchJob, run_id: str) -> None:
        config = workspace.config
        folder = Path(job.folder)
        super().__init__(
            workspace, SearchStudy(folder / STUDY, config.sweep, read_own_values(config)), job, folder, run_id
        )
        self.config = config
        # On the run's page alone: the log has a line for each trial.
        self.progress = workspace.console.progress("trials", quiet=True)
        self.began, self.done_before = time.monotonic(), len(self.list_done())

    def make_config(self, params: Mapping[str, Any]) -> RunConfig:
        """Returns the config of a trial, with the overrides of all trials."""
        return load(drop_sweep(self.config), {**self.config.sweep.trial_overrides, **params})

    def describe_time_left(self, done: int) -> str:
        """Returns the remaining time in words. Empty before the first trial of this process is done."""
        here, left = done - self.done_before, count_trials(self.config.sweep) - done
        if here <= 0 or left <= 0:
            return ""
        minutes = (time.monotonic() - self.began) / here * left / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"


@contextmanager
def open_sweep(workspace: Workspace, job: SearchJob) -> Iterator[Sweep]:
    """Opens the sweep with its database and its MLflow run. Ends the run in any case."""
    config = workspace.config
    params = {f"sweep.{key}": value for key, value in config.sweep.model_dump(exclude_defaults=True).items()}
    tags = {"mlflow.source.name": SOURCE, "dlrm.sweep": job.name}
    with open_search_run(workspace, job, f"sweep of {config.name}", params, tags) as run_id:
        (Path(job.folder) / RESULT).unlink(missing_ok=True)  # a result of fewer trials
        sweep = Sweep(workspace, job, run_id)
        sweep.tidy_all()
        yield sweep

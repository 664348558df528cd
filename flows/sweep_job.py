"""A sweep before it runs: what it searches, where it keeps its trials, and what it shares among them."""

import hashlib
import itertools
import json
import logging
import shutil
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from pydantic import BaseModel

from flows.config import RunConfig, load
from flows.job import RUN_ID, own_folder, selected, tracker_of, warehouse_of
from flows.progress import Progress
from flows.record import commit
from pipeline.errors import ConfigError
from pipeline.registration.tracking import Tracker, answering
from pipeline.search.config import SweepConfig
from pipeline.search.study import Study, TrialRecord
from storage.artifacts import write_text
from storage.reader import SnapshotRef

STUDY, RESULT = "study.db", "result.json"
"""Files in a sweep's folder."""
SECTIONS = ("seed", "sampling", "features", "model", "training", "preprocessing")
"""Where keys may be searched: they change what is learned, and leave the rows alone that trials are ranked by."""
AGAIN = "Once it answers, run the same command again: the sweep goes on from here."


class SweepJob(BaseModel, frozen=True):
    """A sweep that is pinned down: what it reads, and where it keeps its trials."""

    identity: str
    folder: str
    snapshot: SnapshotRef

    @property
    def name(self) -> str:
        """What people call it by."""
        return Path(self.folder).name


def pinned_sweep(config: RunConfig, snapshot_id: int | None, again: bool) -> SweepJob:
    """The sweep that a config and a snapshot name; what can be wrong with it is found here.

    Args:
        snapshot_id: None takes the newest.
        again: Makes a new one beside one that is done.
    Raises:
        ConfigError: If a key cannot be searched, or a value of it does not fit the config.
    """
    check_space(config)
    snapshot, data = selected(config, snapshot_id)
    if "valid" not in data:
        raise ConfigError("split", "validation rows, by which trials are ranked", "none", "Name some as `valid`.")
    inputs = {"snapshot_id": snapshot.snapshot_id, "config": config.semantics(), "sweep": config.sweep.identity()}
    identity = hashlib.sha256(json.dumps(inputs, sort_keys=True).encode()).hexdigest()[:32]
    names = (f"{config.name}-{identity[:12]}-{attempt}" for attempt in itertools.count())
    folders = (config.home_path / "sweeps" / name for name in names)
    made = list(itertools.takewhile(Path.exists, folders))
    if not made or (again and (made[-1] / RESULT).exists()):
        made.append(config.home_path / "sweeps" / f"{config.name}-{identity[:12]}-{len(made)}")
    return SweepJob(identity=identity, folder=str(made[-1]), snapshot=snapshot)


def check_space(config: RunConfig) -> None:
    """Refuses keys that cannot be searched, before anything runs: each value is put into the config by itself.

    Raises:
        ConfigError: Names the key.
    """
    plain = without_sweep(config)
    if not config.sweep.space:
        expected = "at least one key with its values"
        raise ConfigError("sweep.space", expected, "none", "Add one: `training.table_learning_rate: {low: .01, ...}`.")
    for key, dimension in config.sweep.space.items():
        if key.split(".")[0] not in SECTIONS:
            raise ConfigError(f"sweep.space '{key}'", f"a key of {', '.join(SECTIONS)}", "another", "Leave it out.")
        ends = dimension.choices if dimension.choices is not None else (dimension.low, dimension.high)
        learned = [load(plain, {key: value}).semantics() for value in ends]
        if len(learned) > 1 and all(other == learned[0] for other in learned[1:]):
            raise ConfigError(f"sweep.space '{key}'", "a key that changes what is learned", "none", "Leave it out.")
    load(plain, config.sweep.trial_overrides)


def without_sweep(config: RunConfig) -> RunConfig:
    """The config of a plain training."""
    return config.model_copy(update={"sweep": SweepConfig()})


def own_values(config: RunConfig) -> dict[str, Any]:
    """The config's own values of the keys that are searched, those that the space has."""
    values = config.model_dump(mode="json")
    found = {key: _value(values, key) for key in config.sweep.space}
    return {key: value for key, value in found.items() if config.sweep.space[key].holds(value)}


def _value(values: Any, key: str) -> Any:
    for part in key.split("."):
        values = values[int(part)] if isinstance(values, list) else (values or {}).get(part)
    return values


def finished(job: SweepJob, config: RunConfig) -> dict[str, Any] | None:
    """The result of a sweep that was done before with as many trials."""
    path = Path(job.folder) / RESULT
    result = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    if result is None or sum(result["trials"].values()) < config.sweep.most_trials:
        return None
    advice = "again=true makes a new one, a larger sweep.trials goes on"
    get_run_logger().info("skipped: sweep %s is done; %s", job.name, advice)
    return dict(result) | {"status": "skipped"}


class Sweep:
    """A sweep at work; threads share it."""

    def __init__(self, config: RunConfig, job: SweepJob, tracker: Tracker, run_id: str) -> None:
        self.config, self.job, self.tracker, self.run_id = config, job, tracker, run_id
        self.folder = Path(job.folder)
        self.study = Study(self.folder / STUDY, config.sweep, own_values(config))
        self.stop = threading.Event()  # trials at work are to end; the same command goes on with them
        self.lock = threading.Lock()
        self.progress = Progress(
            logging.getLogger(__name__), "trials"
        )  # for the run's page; the log has a line a trial
        self.began, self.done_before = time.monotonic(), len(self.done())

    def done(self) -> list[TrialRecord]:
        """Trials that are complete, pruned or failed."""
        return [record for record in self.study.records() if record.state != "running"]

    def trial_folder(self, number: int) -> Path:
        """Checkpoints and logs of a trial, until it is done."""
        return self.folder / "trials" / f"{number:04d}"

    def tidy(self, record: TrialRecord) -> None:
        """Removes what a trial that is done leaves on disk; of one that failed the logs stay."""
        folder = self.trial_folder(record.number)
        shutil.rmtree(folder / "checkpoints" if record.state == "failed" else folder, ignore_errors=True)

    def settings(self, params: Mapping[str, Any]) -> RunConfig:
        """The config of a trial, with the limits of all trials."""
        return load(without_sweep(self.config), {**self.config.sweep.trial_overrides, **params})

    def time_left(self, done: int) -> str:
        """In words; nothing before the first trial of this process is done."""
        here, left = done - self.done_before, self.config.sweep.most_trials - done
        if here <= 0 or left <= 0:
            return ""
        minutes = (time.monotonic() - self.began) / here * left / 60
        return f", about {minutes:.0f} min left" if minutes >= 1 else ", less than a minute left"


@contextmanager
def opened(config: RunConfig, job: SweepJob) -> Iterator[Sweep]:
    """The sweep with its file and its MLflow run, which is ended whatever happens."""
    with own_folder(Path(job.folder)) as folder:
        warehouse_of(config).tag(job.snapshot, f"train-{job.identity[:12]}")  # once, not by trials side by side
        note = folder / RUN_ID
        resume = note.read_text(encoding="utf-8").strip() if note.exists() else None
        tags = {"snapshot_id": str(job.snapshot.snapshot_id), "git_commit": commit()}
        tags |= {"mlflow.source.name": "flows.sweep", "dlrm.sweep": job.name}
        tracker = tracker_of(config)
        with answering(AGAIN):
            tracker.reap()
            params = {f"sweep.{key}": value for key, value in config.sweep.model_dump(exclude_defaults=True).items()}
            run_id = tracker.start(f"sweep of {config.name}", config.flat() | params, tags, resume)
            tracker.log_json(run_id, config.shareable(), "config.json")
        write_text(note, run_id)
        sweep = Sweep(config, job, tracker, run_id)
        for record in sweep.done():  # a kill may have come before a folder was removed
            sweep.tidy(record)
        with tracker.ended(run_id), answering(AGAIN):
            yield sweep

"""The work of a sweep: what it is, its trials side by side, and what comes out of it."""

import contextvars
import hashlib
import itertools
import json
import shutil
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from prefect import get_run_logger, task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel

from flows.candidate import BEST_NE, StoppedEarly, candidate_job, train_candidate
from flows.config import RunConfig, load
from flows.job import RUN_ID, own_folder, selected, tracker_of, warehouse_of
from flows.judging import in_a_line
from flows.record import commit, shown
from pipeline.errors import ConfigError, ContractError, TrackingError, TrainingError
from pipeline.registration.tracking import Tracker, answering, unanswered
from pipeline.search import plots
from pipeline.search.config import SweepConfig
from pipeline.search.study import Draw, Study, TrialRecord
from pipeline.training.launch import Event
from storage.artifacts import write_json, write_text
from storage.reader import SnapshotRef

STUDY, BASE, BEST, RESULT = "study.db", "base.yaml", "best.yaml", "result.json"
"""Files in a sweep's folder."""
SECTIONS = ("seed", "sampling", "features", "model", "training", "preprocessing")
"""Where keys may be searched: they change what is learned, and leave the rows alone that trials are ranked by."""
MOST_ROWS = 50
"""Trials in a table for people."""
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


def run_trials(sweep: Sweep) -> None:
    """Runs what is left of the trials, `parallel` at a time.

    A trial that fails costs itself alone. If MLflow is away or the process is interrupted, the others are ended, too,
    and go on from their checkpoints when the same command is run again.
    """
    records = sweep.study.records()
    if records:
        get_run_logger().info("sweep %s goes on: %s", sweep.job.name, in_numbers(records))
    places = range(sweep.config.sweep.parallel)
    with ThreadPoolExecutor(len(places), thread_name_prefix="trial") as pool:
        try:
            workers = [pool.submit(contextvars.copy_context().run, _work, sweep) for _ in places]
            for worker in as_completed(workers):
                worker.result()
        finally:
            sweep.stop.set()


def _work(sweep: Sweep) -> None:
    """One trial after the other, until there are enough."""
    while not sweep.stop.is_set() and (draw := sweep.study.next()) is not None:
        try:
            run_trial(sweep, draw)
        except Exception as error:  # whatever is wrong with this trial, the others go on
            if sweep.stop.is_set() or isinstance(error, TrackingError) or unanswered(error):
                raise
            sweep.study.fail(draw.number, str(error) if isinstance(error, ContractError) else in_a_line(error))
        tell(sweep, draw.number)


@task(cache_policy=NO_CACHE, task_run_name="trial {draw.number}")
def run_trial(sweep: Sweep, draw: Draw) -> None:
    """One trial, from its values to its NE. Safe to repeat: it goes on from its last checkpoint."""
    study, number = sweep.study, draw.number
    get_run_logger().info("trial %s: %s", number, in_words(draw.params))
    twin = study.twin(draw)
    if twin is not None and twin.valid_ne is not None:
        study.note(number, same_as=twin.number)
        return study.finish(number, twin.valid_ne)
    if study.falls_behind(number):
        return study.prune(number)
    config, snapshot = sweep.settings(draw.params), sweep.job.snapshot.snapshot_id
    plans, folder = sweep.folder / "plans", sweep.trial_folder(number)
    job = candidate_job(config, sweep.job.identity, snapshot, folder, plans)
    tags = {"mlflow.parentRunId": sweep.run_id, "dlrm.trial": str(number), "mlflow.source.name": "flows.sweep"}
    outcome = train_candidate(config, job, f"trial {number}", tags, partial(watch, sweep, number))
    study.note(number, mlflow_run_id=outcome.run_id)
    return study.prune(number) if outcome.valid_ne is None else study.finish(number, outcome.valid_ne)


def watch(sweep: Sweep, number: int, event: Event | None) -> None:
    """Ends a trial that falls behind, or all of them when the sweep ends.

    Raises:
        StoppedEarly: If it falls behind.
        KeyboardInterrupt: If the sweep ends.
    """
    if sweep.stop.is_set():
        raise KeyboardInterrupt
    prune = sweep.config.sweep.prune
    if prune is None or event is None or event["event"] != "metrics":
        return
    ne = event["metrics"].get(prune.metric)
    if ne is not None and sweep.study.report(number, event["rows"], ne):
        raise StoppedEarly


def tell(sweep: Sweep, number: int) -> None:
    """What is known after a trial: a line for people, a point in MLflow, the best config so far."""
    with sweep.lock:
        done, best = sweep.done(), sweep.study.best
        record = next(record for record in done if record.number == number)
        result = {"complete": f"NE {shown(record.valid_ne)}", "failed": f"failed: {record.notes.get('error')}"}
        line = f"trial {number}: {result.get(record.state, record.state)}; "
        line += f"{len(done)} of {sweep.config.sweep.most_trials} done"
        line += f", best NE {shown(best.valid_ne)} (trial {best.number})" if best else ""
        get_run_logger().info("%s%s", line, sweep.time_left(len(done)))
        if best is not None:
            sweep.tracker.log(sweep.run_id, number, {"trial_valid_ne": record.valid_ne, BEST_NE: best.valid_ne})
            write_best(sweep, best)
        sweep.tidy(record)


def write_best(sweep: Sweep, best: TrialRecord) -> Path:
    """The best trial's config as a file over the config that was searched; its limits as a trial are not in it."""
    base, path = sweep.folder / BASE, sweep.folder / BEST
    plain = without_sweep(sweep.config)
    write_text(base, yaml.safe_dump(plain.model_dump(mode="json"), sort_keys=False, allow_unicode=True))
    base.chmod(0o600)  # it may hold the catalog's credentials
    values = load(plain, best.params).model_dump(mode="json")
    head = f"# Trial {best.number} of sweep {sweep.job.name}: NE {shown(best.valid_ne)} on the validation rows.\n"
    over = yaml.safe_dump({"base": BASE} | layered(values, best.params), sort_keys=False, allow_unicode=True)
    write_text(path, head + over)
    return path


def layered(values: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """The part of a config that dotted keys name; lists whole, since a file's list takes the place of its base's.

    Example:
        >>> layered({"a": {"b": 1, "c": [{"d": 2}, 3]}}, {"a.b": 1, "a.c.0.d": 2})
        {'a': {'b': 1, 'c': [{'d': 2}, 3]}}
    """
    found: dict[str, Any] = {}
    for key in keys:
        *sections, last = key.split(".")
        inner, into = values, found
        for name in sections:
            if isinstance(inner[name], list):
                last = name
                break
            inner, into = inner[name], into.setdefault(name, {})
        into[last] = inner[last]
    return found


@task(cache_policy=NO_CACHE, task_run_name="conclude")
def conclude(sweep: Sweep) -> dict[str, Any]:
    """All trials -> the result, figures and a table. Safe to repeat: it replaces itself.

    Raises:
        TrainingError: If no trial has an NE.
    """
    records, best, tracker = sweep.study.records(), sweep.study.best, sweep.tracker
    tracker.log_json(sweep.run_id, [record.model_dump() for record in records], "trials.json")
    if best is None:
        errors = [str(record.notes["error"]) for record in records if "error" in record.notes]
        raise TrainingError(
            "sweep", "one trial that ends with an NE", f"{in_numbers(records)}; the first: {(errors or ['pruned'])[0]}",
            "Change space, limits or pruning.",
        )  # fmt: skip
    path, shares, space = write_best(sweep, best), sweep.study.importances(), sweep.config.sweep.space
    figures = {"history": plots.history(records), "parallel_coordinates": plots.parallel_coordinates(records, space)}
    tracker.log_figures(sweep.run_id, figures | {"importance": plots.importance(shares)})
    tracker.log_file(sweep.run_id, path)
    table = as_table(records, list(space))
    head = f"Best: trial {best.number}, NE {shown(best.valid_ne)} on the validation rows, `{BEST}`.\n\n"
    tags = {f"best.{key}": json.dumps(value) for key, value in best.params.items()}
    tracker.tag(sweep.run_id, {"mlflow.note.content": head + table, "dlrm.best_trial": str(best.number)} | tags)
    create_markdown_artifact(f"# Sweep {sweep.job.name}\n\n{head}{table}", key=f"sweep-{_key(sweep.config.name)}")
    result = {
        "status": "ok",
        "study": sweep.job.name,
        "snapshot_id": sweep.job.snapshot.snapshot_id,
        "trials": dict(Counter(record.state for record in records)),
        "best": {"number": best.number, "params": dict(best.params), "valid_ne": best.valid_ne},
        "importances": shares,
        "config_path": str(path),
        "mlflow_run_id": sweep.run_id,
    }
    write_json(sweep.folder / RESULT, result)
    get_run_logger().info("best: trial %s, NE %s: %s", best.number, shown(best.valid_ne), in_words(best.params))
    return result


def in_numbers(records: Sequence[TrialRecord]) -> str:
    """How many trials there are of each state."""
    counts = Counter(record.state for record in records)
    return ", ".join(f"{count} {state}" for state, count in counts.items())


def in_words(params: Mapping[str, Any]) -> str:
    """The values of a trial as one line.

    Example:
        >>> in_words({"training.table_learning_rate": 0.0123456, "model.bottom_mlp": [32]})
        'training.table_learning_rate=0.01235, model.bottom_mlp=[32]'
    """
    return ", ".join(f"{key}={_rounded(value)}" for key, value in params.items())


def as_table(records: Sequence[TrialRecord], keys: Sequence[str]) -> str:
    """The trials as markdown, the best first."""
    order = sorted(records, key=lambda record: (record.valid_ne is None, record.valid_ne, record.number))
    lines = ["| trial | NE | " + " | ".join(f"`{key}`" for key in keys) + " |", "|---" * (len(keys) + 2) + "|"]
    for record in order[:MOST_ROWS]:
        ne = shown(record.valid_ne) if record.state == "complete" else record.state
        values = " | ".join(_rounded(record.params.get(key)) for key in keys)
        lines.append(f"| {record.number} | {ne} | {values} |")
    return "\n".join(lines)


def _rounded(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value).replace("|", "\\|")


def _key(name: str) -> str:
    return name.lower().replace("_", "-")

"""The engine of sweeps, releases and backtests: pinned work, its MLflow run, and trials, several at a time."""

import contextvars
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from filelock import FileLock
from pydantic import BaseModel

from pipeline.config import RunConfig, load
from pipeline.data.config import Part
from pipeline.errors import (
    ConfigError,
    ContractError,
    EmptyDatasetError,
    StorageError,
    TrackingError,
    TrainingError,
)
from pipeline.evaluation.metrics import format_metric
from pipeline.jobs.code_version import read_commit
from pipeline.jobs.console import Console, one_line, step
from pipeline.jobs.training.identity import digest
from pipeline.jobs.training.job import (
    PLANS,
    TrainingJob,
    make_job,
    open_run,
    open_training_run,
    resolve_dataset,
    tag_inputs,
)
from pipeline.jobs.training.train import train_ranks
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.preprocessing.dataset import DataSpec
from pipeline.registration.journal import Journal
from pipeline.registration.tracking import RESULT as RESULT_OF_RUN
from pipeline.registration.tracking import is_unreachable, reporting_unreachable
from pipeline.search.study import Draw, SearchStudy, TrialRecord
from pipeline.training.launch.processes import Event
from storage.artifacts import read_note, read_values, write_json
from storage.reader import SnapshotRef

Kind = Literal["sweep", "release", "backtest"]
RESULT = "result.json"
"""File in a search's folder once it has ended."""
PINNED = "search.json"
"""File in a search's folder with its `SearchJob`."""
STUDY = "study.db"
"""File with the trials, in a sweep's folder or in that of a release's stage."""
BEST_NE = "best_valid_ne"
"""Metric of a trial's MLflow run."""
SECTIONS = ("seed", "sampling", "features", "model", "training", "preprocessing")
"""Sections in which trials may differ. None of them changes the rows that trials are ranked by."""
MOST_FAILURES = 3
"""The search ends after this many failed trials in a row. What fails them may be common to all."""
AGAIN = "Once it answers, run the same command again to resume."


class StoppedEarly(Exception):
    """Ends a trial because others do better."""


class SearchJob(BaseModel, frozen=True):
    """A pinned search: what its trainings read, and where they are kept."""

    identity: str
    folder: str
    snapshot: SnapshotRef
    inputs: str = ""
    """Hash of what decides the outcome apart from the snapshot."""

    @property
    def name(self) -> str:
        """Name for people."""
        return Path(self.folder).name


def pin_search(
    workspace: Workspace,
    kind: Kind,
    snapshot: SnapshotRef,
    rows: Mapping[str, Any],
    inputs: Mapping[str, Any],
    force: bool,
) -> SearchJob:
    """Returns the search with these inputs: the one that was started, or a new one.

    Args:
        rows: What the trainings of the search read, of `describe_rows`.
        inputs: What decides the outcome, apart from the rows.
        force: Starts a new search if the last one has ended.
    """
    identity = digest({"rows": rows, **inputs})
    folder = workspace.latest_folder(f"{kind}s", f"{workspace.config.name}-{identity[:12]}", RESULT, force)
    if (folder / PINNED).exists():  # its snapshot has the same rows, and its checkpoints hold positions in its files
        return read_note(folder / PINNED, SearchJob)
    return SearchJob(identity=identity, folder=str(folder), snapshot=snapshot, inputs=digest(inputs))


def resolve_ranked(workspace: Workspace, snapshot_id: int | None) -> tuple[SnapshotRef, dict[Part, DataSpec]]:
    """Returns a snapshot and the parts of its split, as `resolve_dataset` does.

    Raises:
        ConfigError: If there are no validation rows.
    """
    snapshot, data = resolve_dataset(workspace, snapshot_id)
    if "valid" not in data:
        raise ConfigError("split", "validation rows, by which trials are ranked", "none", "Name some as `valid`.")
    return snapshot, data


def read_result(job: SearchJob, kind: type[BaseModel]) -> dict[str, Any] | None:
    """Returns what an ended search has written, with at least the fields of `kind`. None: it has not ended."""
    path = Path(job.folder) / RESULT
    return read_values(path, kind) if path.exists() else None


def find_unfinished(job: SearchJob) -> list[SearchJob]:
    """Returns searches with the same config on other snapshots that have not ended."""
    folders = [path.parent for path in sorted(Path(job.folder).parent.glob(f"*/{PINNED}"))]
    others = [read_note(folder / PINNED, SearchJob) for folder in folders if not (folder / RESULT).exists()]
    return [other for other in others if other.inputs == job.inputs and other.identity != job.identity]


@contextmanager
def prefix_errors(place: str) -> Iterator[None]:
    """Prefixes config errors from the block with the key that caused them."""
    try:
        yield
    except (ConfigError, EmptyDatasetError) as error:
        if error.where.startswith(("release.", "sweep.")):
            raise
        where = f"{place}, {error.where.removeprefix('config, ')}"
        raise type(error)(where, error.expected, error.actual, error.remedy) from None


def override(place: str, config: RunConfig, overrides: Mapping[str, Any]) -> RunConfig:
    """Returns a config with overrides that trials may have.

    Args:
        place: Key of the config that has the overrides.
    Raises:
        ConfigError: If a key is unknown or in another section than `SECTIONS`, or if trials would be ranked by another
            label than the others.
    """
    for key in overrides:
        if key.split(".")[0] not in SECTIONS:
            raise ConfigError(f"{place}, key '{key}'", f"a key of {', '.join(SECTIONS)}", "another", "Leave it out.")
    with prefix_errors(place):
        found = load(config, overrides)
    label, other = config.features.label, found.features.label
    if other != label:
        expected = f"the label by which all are ranked, '{label}'"
        raise ConfigError(f"{place}, features.label", expected, f"'{other}'", "Leave it out.")
    return found


def check_parallel(place: str, parallel: int, launcher: str, executor: str) -> None:
    """Refuses several trials at a time that use Ray: a process has one connection to it.

    Args:
        launcher: Of the ranks of a trial.
        executor: Of its preprocessing.
    Raises:
        ConfigError: If there are several at a time.
    """
    if parallel > 1 and "ray" in (launcher, executor):
        raise ConfigError(place, "1 with Ray: a process has one connection to it", f"{parallel}", "Set it to 1.")


@dataclass(eq=False)
class Search:
    """A running search."""

    workspace: Workspace
    job: SearchJob
    kind: Kind
    run_id: str
    """Of its MLflow run, the parent of those of its trials."""

    @property
    def console(self) -> Console:
        """Console of the workspace."""
        return self.workspace.console

    @property
    def folder(self) -> Path:
        """Folder of all that the search keeps."""
        return Path(self.job.folder)

    @property
    def child_tags(self) -> dict[str, str]:
        """Tags of the MLflow runs below its own."""
        return {"mlflow.parentRunId": self.run_id, "mlflow.source.name": f"flows.{self.kind}"}

    def conclude(self, text: str, tags: Mapping[str, str], result: Mapping[str, Any]) -> dict[str, Any]:
        """Shows the outcome on the run's page and in MLflow, and returns and keeps the whole result.

        Args:
            text: Markdown.
            tags: Of the MLflow run.
            result: What only this kind of search has.
        """
        tracker, name = self.workspace.tracking, self.workspace.config.name
        whole = {"status": "ok", "snapshot_id": self.job.snapshot.snapshot_id, **result, "mlflow_run_id": self.run_id}
        tracker.tag(self.run_id, {"mlflow.note.content": text, **tags})
        tracker.log_json(self.run_id, whole, RESULT_OF_RUN)
        with self.workspace.best_effort("page in Prefect"):
            self.console.show_text(self.kind, name, f"# {self.kind.capitalize()} {self.job.name}\n\n{text}")
        write_json(self.folder / RESULT, whole)
        return whole


@contextmanager
def open_search(
    workspace: Workspace, job: SearchJob, kind: Kind, name: str, settings: BaseModel | None = None
) -> Iterator[Search]:
    """Locks the search's folder and opens its MLflow run. Ends the run in any case.

    Args:
        name: Of the run.
        settings: Section of the config. The run's parameters are those of the config and these.
    """
    config, log = workspace.config, workspace.console.log
    with exclusive_dir(Path(job.folder)) as folder:
        # Once, before trials run side by side.
        tag_inputs(workspace.warehouse, job.identity, job.snapshot, workspace.feature_joins())
        for other in [] if (folder / PINNED).exists() else find_unfinished(job):
            log.info(
                "%s of the same config has not ended; to resume it although days were ingested since, add "
                "snapshot_id=%s", other.name, other.snapshot.snapshot_id,
            )  # fmt: skip
        write_json(folder / PINNED, job.model_dump(mode="json"))
        tags = {"snapshot_id": str(job.snapshot.snapshot_id), "git_commit": read_commit()}
        tags |= {"mlflow.source.name": f"flows.{kind}", f"dlrm.{kind}": job.name}
        section = settings.model_dump(exclude_defaults=True) if settings else {}
        params = config.flat() | {f"{kind}.{key}": value for key, value in section.items()}
        with open_run(folder, workspace, name, params, tags, AGAIN) as (run_id, _), reporting_unreachable(AGAIN):
            workspace.tracking.log_json(run_id, config.shareable(), "config.json")
            yield Search(workspace, job, kind, run_id)


def pin_trial(workspace: Workspace, search: SearchJob, folder: Path) -> TrainingJob:
    """Pins the training of a trial. It has no test rows.

    Args:
        folder: Of this trial. An interrupted training resumes from it.
    """
    snapshot, data = resolve_dataset(workspace, search.snapshot.snapshot_id)
    known: dict[Part, DataSpec] = {part: spec for part, spec in data.items() if part != "test"}
    plans = workspace.home / PLANS / workspace.config.name
    plans.mkdir(parents=True, exist_ok=True)
    with FileLock(plans / "lock"):  # trials with the same columns, transforms and rows share a fitted plan
        return make_job(folder, workspace, search.identity, (snapshot, known), plans=plans)


@dataclass(eq=False)
class Trials:
    """The trials of one study of a search. Threads share them."""

    search: Search
    study: SearchStudy
    folder: Path
    """Of this study."""
    make_config: Callable[[Mapping[str, Any]], RunConfig]
    """Values of a trial -> its config."""
    describe: Callable[[Draw], tuple[str, dict[str, str]]]
    """A trial -> its name, which is that of its MLflow run, and tags of the run."""
    report: Callable[[TrialRecord], object]
    """Called for each finished trial, one at a time."""
    stop: threading.Event = field(default_factory=threading.Event)
    """Set: running trials end; the same command resumes them."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    failures: int = 0
    """In a row."""

    @property
    def console(self) -> Console:
        """Console of the workspace."""
        return self.search.console

    def trial_folder(self, number: int) -> Path:
        """Returns the folder for checkpoints and logs of a trial."""
        return self.folder / "trials" / f"{number:04d}"

    def _tidy(self, record: TrialRecord) -> None:
        """Removes the files of a trial that is done. The logs of a failed one stay."""
        folder = self.trial_folder(record.number)
        shutil.rmtree(folder / "checkpoints" if record.state == "failed" else folder, ignore_errors=True)

    def run_all(self, parallel: int) -> None:
        """Runs the remaining trials, `parallel` at a time.

        A failed trial does not end the others, unless MLflow, the warehouse or the disk made it fail. Then, and when
        the process is interrupted, all trials end. The same command resumes them from their checkpoints.

        Raises:
            TrainingError: If three trials in a row have failed and more are left.
        """
        for record in self.study.done:  # a kill may have prevented it before
            self._tidy(record)
        with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as pool:
            try:
                context = contextvars.copy_context  # holds the flow that tasks and logs belong to
                workers = [pool.submit(context().run, self._work) for _ in range(parallel)]
                for worker in as_completed(workers):
                    worker.result()
            finally:
                self.stop.set()

    def _work(self) -> None:
        """Runs one trial after the other until all are done."""
        while not self.stop.is_set() and (draw := self.study.next()) is not None:
            try:
                run_trial(self, draw, self.describe(draw)[0])
            except Exception as error:  # the other trials continue
                if self.stop.is_set() or is_environment_error(error):
                    raise
                self.study.fail(draw.number, str(error) if isinstance(error, ContractError) else one_line(error))
            with self.lock:
                record = self.study.records()[draw.number]
                self.report(record)
                self._tidy(record)
                self._check_failures(record)

    def _check_failures(self, record: TrialRecord) -> None:
        """Raises after too many failures in a row: the cause is probably common to all trials."""
        self.failures = self.failures + 1 if record.state == "failed" else 0
        left = self.study.total - len(self.study.done)
        if self.failures < MOST_FAILURES or left <= 0:
            return
        last = str(record.notes["error"]).rstrip(".")
        remedy = f"Correct that, and run the same command again to run the other {left}. To start over, "
        raise TrainingError(
            "trials", "one of three in a row that ends with an NE", f"three failures; the last: {last}",
            remedy + f"remove '{self.search.folder}'.",
        )  # fmt: skip

    def train(self, draw: Draw) -> None:
        """Trains a trial to its NE in an MLflow run of its own, or until it falls behind. Resumes it.

        Raises:
            TrackingError: If MLflow does not answer. The weights are kept, and the same command resumes.
        """
        number, (name, tags), ne = draw.number, self.describe(draw), None
        workspace = Workspace(self.make_config(draw.params), self.console)  # not shared: trials run in threads
        job, tracker = pin_trial(workspace, self.search.job, self.trial_folder(number)), workspace.tracking
        with open_training_run(workspace, job, name, self.search.child_tags | tags) as run_id:
            self.study.note(number, mlflow_run_id=run_id)
            try:
                summary = train_ranks(workspace, job, run_id, watch=partial(self.watch, number)).summary
            except StoppedEarly:
                tracker.tag(run_id, {"dlrm.stopped_early": "true"})
            else:
                ne = summary["valid_ne"]
                with reporting_unreachable(AGAIN):
                    Journal(tracker, run_id, Path(job.folder), self.console.log.warning).deliver()
                    tracker.log(run_id, summary["steps"], {BEST_NE: ne})
        self.study.prune(number) if ne is None else self.study.finish(number, ne)

    def watch(self, number: int, event: Event | None) -> None:
        """Receives each event of a training, and None several times a second.

        Raises:
            StoppedEarly: If the trial falls behind.
            KeyboardInterrupt: If the search ends.
        """
        if self.stop.is_set():
            raise KeyboardInterrupt
        prune = self.study.config.prune
        if prune is None or event is None or event["event"] != "metrics":
            return
        ne = event["metrics"].get(prune.metric)
        if ne is not None and self.study.report(number, event["rows"], ne):
            raise StoppedEarly


@step("{name}")
def run_trial(trials: Trials, draw: Draw, name: str) -> None:
    """Runs a trial from its values to its NE. Safe to repeat: it resumes from its last checkpoint."""
    study, twin = trials.study, trials.study.twin(draw)
    if twin is not None and twin.valid_ne is not None:
        study.note(draw.number, same_as=twin.number)
        return study.finish(draw.number, twin.valid_ne)
    if study.falls_behind(draw.number):
        return study.prune(draw.number)
    return trials.train(draw)


def describe_outcome(record: TrialRecord) -> str:
    """Returns how a trial has ended, in words."""
    if record.state == "failed":
        return f"failed: {record.notes.get('error')}"
    return f"NE {format_metric(record.valid_ne)}" if record.state == "complete" else record.state


def is_environment_error(error: Exception) -> bool:
    """Whether MLflow, the warehouse or the disk caused the error, and any other trial would fail, too."""
    if isinstance(error, EmptyDatasetError):  # caused by the trial's own sampling
        return False
    return isinstance(error, TrackingError | StorageError | OSError) or is_unreachable(error)

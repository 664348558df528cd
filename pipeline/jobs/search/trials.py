"""Trials of a search: the pinned search, its MLflow run, and a training for each trial, several at a time."""

import contextvars
import hashlib
import json
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.config import RunConfig
from pipeline.errors import (
    ConfigError,
    ContractError,
    EmptyDatasetError,
    StorageError,
    TrackingError,
    TrainingError,
)
from pipeline.jobs.code_version import read_commit
from pipeline.jobs.console import Console, one_line
from pipeline.jobs.search.candidate import StoppedEarly, pin_candidate, train_candidate
from pipeline.jobs.training.job import open_run, tag_inputs
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.registration.tracking import is_unreachable, reporting_unreachable
from pipeline.search.grid import count_trials
from pipeline.search.study import Draw, SearchStudy, TrialRecord
from pipeline.training.launch.processes import Event
from storage.artifacts import read_note, write_json
from storage.reader import SnapshotRef

RESULT = "result.json"
"""File in a search's folder once it has ended."""
PINNED = "search.json"
"""File in a search's folder with its `SearchJob`."""
SECTIONS = ("seed", "sampling", "features", "model", "training", "preprocessing")
"""Sections in which trials may differ. None of them changes the rows that trials are ranked by."""
MOST_FAILURES = 3
"""The search ends after this many failed trials in a row. What fails them may be common to all."""
AGAIN = "Once it answers, run the same command again to resume."


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
    kind: str,
    snapshot: SnapshotRef,
    rows: Mapping[str, Any],
    inputs: Mapping[str, Any],
    force: bool,
) -> SearchJob:
    """Returns the search with these inputs: the one that was started, or a new one.

    Args:
        kind: Folder below `home`, such as `sweeps`.
        rows: What the trainings of the search read, of `describe_rows`.
        inputs: What decides the outcome, apart from the rows.
        force: Starts a new search if the last one has ended.
    """
    identity = _hash({"rows": rows, **inputs})
    folder = workspace.latest_folder(kind, f"{workspace.config.name}-{identity[:12]}", RESULT, force)
    if (folder / PINNED).exists():  # its snapshot has the same rows, and its checkpoints hold positions in its files
        return read_note(folder / PINNED, SearchJob)
    return SearchJob(identity=identity, folder=str(folder), snapshot=snapshot, inputs=_hash(inputs))


def _hash(values: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def find_unfinished(job: SearchJob) -> list[SearchJob]:
    """Returns searches with the same config on other snapshots that have not ended."""
    folders = [path.parent for path in sorted(Path(job.folder).parent.glob(f"*/{PINNED}"))]
    others = [read_note(folder / PINNED, SearchJob) for folder in folders if not (folder / RESULT).exists()]
    return [other for other in others if other.inputs == job.inputs and other.identity != job.identity]


def check_section(where: str, key: str) -> None:
    """Refuses a dotted key in which trials may not differ.

    Raises:
        ConfigError: If the key is in another section than `SECTIONS`.
    """
    if key.split(".")[0] not in SECTIONS:
        raise ConfigError(where, f"a key of {', '.join(SECTIONS)}", "another", "Leave it out.")


def check_label(where: str, label: str, other: str) -> None:
    """Refuses a trial that would be ranked by another label than the others.

    Args:
        label: Of the others.
        other: Of the trial.
    Raises:
        ConfigError: Names both labels.
    """
    if other != label:
        raise ConfigError(where, f"the label by which all are ranked, '{label}'", f"'{other}'", "Leave it out.")


def check_parallel(where: str, parallel: int, launcher: str, executor: str) -> None:
    """Refuses several trials at a time that use Ray: a process has one connection to it.

    Args:
        launcher: Of the ranks of a trial.
        executor: Of its preprocessing.
    Raises:
        ConfigError: If there are several at a time.
    """
    if parallel > 1 and "ray" in (launcher, executor):
        raise ConfigError(where, "1 with Ray: a process has one connection to it", f"{parallel}", "Set it to 1.")


@contextmanager
def open_search_run(
    workspace: Workspace, job: SearchJob, name: str, params: Mapping[str, Any], tags: Mapping[str, str]
) -> Iterator[str]:
    """Locks the search's folder and opens its MLflow run. Ends the run in any case.

    Args:
        name: Of the run.
        params: In addition to those of the config.
    """
    config = workspace.config
    with exclusive_dir(Path(job.folder)) as folder:
        # Once, before trials run side by side.
        tag_inputs(workspace.warehouse, job.identity, job.snapshot, workspace.feature_joins())
        if not (folder / PINNED).exists():
            for other in find_unfinished(job):
                workspace.console.log.info(
                    "%s of the same config has not ended; to resume it although days were ingested since, add "
                    "snapshot_id=%s", other.name, other.snapshot.snapshot_id,
                )  # fmt: skip
        write_json(folder / PINNED, job.model_dump(mode="json"))
        tags = {"snapshot_id": str(job.snapshot.snapshot_id), "git_commit": read_commit(), **tags}
        tracker, params = workspace.tracking, config.flat() | dict(params)
        with open_run(folder, workspace, name, params, tags, AGAIN) as (run_id, _), reporting_unreachable(AGAIN):
            tracker.log_json(run_id, config.shareable(), "config.json")
            yield run_id


class Trials:
    """The trials of a running study. Threads share them.

    Args:
        folder: Of this study.
        run_id: Parent of the trials' MLflow runs.
    """

    def __init__(self, workspace: Workspace, study: SearchStudy, job: SearchJob, folder: Path, run_id: str) -> None:
        self.workspace, self.study, self.job, self.folder, self.run_id = workspace, study, job, folder, run_id
        self.stop = threading.Event()  # set: running trials end; the same command resumes them
        self.lock = threading.Lock()
        self.failures = 0  # in a row

    @property
    def console(self) -> Console:
        """Console of the workspace."""
        return self.workspace.console

    def list_done(self) -> list[TrialRecord]:
        """Returns the trials that are complete, pruned or failed."""
        return [record for record in self.study.records() if record.state != "running"]

    def trial_folder(self, number: int) -> Path:
        """Returns the folder for checkpoints and logs of a trial."""
        return self.folder / "trials" / f"{number:04d}"

    def tidy(self, record: TrialRecord) -> None:
        """Removes the files of a trial that is done. The logs of a failed one stay."""
        folder = self.trial_folder(record.number)
        shutil.rmtree(folder / "checkpoints" if record.state == "failed" else folder, ignore_errors=True)

    def tidy_all(self) -> None:
        """Removes the files of all done trials. A kill may have prevented it before."""
        for record in self.list_done():
            self.tidy(record)

    def run_all(self, parallel: int, run: Callable[[Draw], object], report: Callable[[TrialRecord], object]) -> None:
        """Runs the remaining trials.

        A failed trial does not end the others, unless MLflow, the warehouse or the disk made it fail. Then, and when
        the process is interrupted, all trials end. The same command resumes them from their checkpoints.

        Args:
            parallel: Trials at a time.
            run: Runs one to its end.
            report: Called for each finished trial, one at a time.
        Raises:
            TrainingError: If three trials in a row have failed and more are left.
        """
        with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as pool:
            try:
                context = contextvars.copy_context  # holds the flow that tasks and logs belong to
                workers = [pool.submit(context().run, self._work, run, report) for _ in range(parallel)]
                for worker in as_completed(workers):
                    worker.result()
            finally:
                self.stop.set()

    def _work(self, run: Callable[[Draw], object], report: Callable[[TrialRecord], object]) -> None:
        """Runs one trial after the other until all are done."""
        while not self.stop.is_set() and (draw := self.study.next()) is not None:
            try:
                run(draw)
            except Exception as error:  # the other trials continue
                if self.stop.is_set() or is_environment_error(error):
                    raise
                self.study.fail(draw.number, str(error) if isinstance(error, ContractError) else one_line(error))
            with self.lock:
                record = next(record for record in self.list_done() if record.number == draw.number)
                report(record)
                self.tidy(record)
                self._check_failures(record)

    def _check_failures(self, record: TrialRecord) -> None:
        """Raises after too many failures in a row: the cause is probably common to all trials."""
        self.failures = self.failures + 1 if record.state == "failed" else 0
        left = count_trials(self.study.config) - len(self.list_done())
        if self.failures < MOST_FAILURES or left <= 0:
            return
        last = str(record.notes["error"]).rstrip(".")
        remedy = f"Correct that, and run the same command again to run the other {left}. To start over, "
        raise TrainingError(
            "trials", "one of three in a row that ends with an NE", f"three failures; the last: {last}",
            remedy + f"remove '{self.job.folder}'.",
        )  # fmt: skip

    def train(self, number: int, config: RunConfig, name: str, tags: Mapping[str, str]) -> None:
        """Trains a trial to its NE, or until it falls behind. Resumes from its last checkpoint.

        Args:
            name: Of its MLflow run.
            tags: In addition to the one that names the parent run.
        """
        if self.study.falls_behind(number):
            return self.study.prune(number)
        plans, snapshot = Path(self.job.folder) / "plans", self.job.snapshot.snapshot_id
        workspace = Workspace(config, self.console)  # not shared: trials run in threads
        job = pin_candidate(workspace, self.job.identity, snapshot, self.trial_folder(number), plans)
        tags = {"mlflow.parentRunId": self.run_id, **tags}

        def note_run(run_id: str) -> None:
            self.study.note(number, mlflow_run_id=run_id)

        outcome = train_candidate(workspace, job, name, tags, partial(self.watch, number), note_run)
        if outcome.valid_ne is None:
            return self.study.prune(number)
        return self.study.finish(number, outcome.valid_ne)

    def watch(self, number: int, event: Event | None) -> None:
        """Ends a trial that falls behind, or any trial once the search ends.

        Raises:
            StoppedEarly: If it falls behind.
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


def is_environment_error(error: Exception) -> bool:
    """Whether MLflow, the warehouse or the disk caused the error, and any other trial would fail, too."""
    if isinstance(error, EmptyDatasetError):  # caused by the trial's own sampling
        return False
    return isinstance(error, TrackingError | StorageError | OSError) or is_unreachable(error)

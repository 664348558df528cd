"""Trials side by side: a search pinned down, its run in MLflow, and below that a training a trial."""

import contextvars
import hashlib
import itertools
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

from flows.candidate import StoppedEarly, candidate_job, train_candidate
from flows.config import RunConfig
from flows.job import RUN_ID, own_folder, tracker_of, warehouse_of
from flows.judging import in_a_line
from flows.record import commit
from pipeline.errors import ContractError, TrackingError
from pipeline.registration.tracking import Tracker, answering, unanswered
from pipeline.search.study import Draw, Study, TrialRecord
from pipeline.training.launch import Event
from storage.artifacts import write_text
from storage.reader import SnapshotRef

RESULT = "result.json"
"""File in a search's folder once it has ended."""
SECTIONS = ("seed", "sampling", "features", "model", "training", "preprocessing")
"""Where trials may differ: it changes what is learned, and leaves the rows alone that they are ranked by."""
AGAIN = "Once it answers, run the same command again: it goes on from here."


class SearchJob(BaseModel, frozen=True):
    """Trainings to be compared, pinned down: what they read, and where they are kept."""

    identity: str
    folder: str
    snapshot: SnapshotRef

    @property
    def name(self) -> str:
        """What people call it by."""
        return Path(self.folder).name


def search_job(
    config: RunConfig, kind: str, snapshot: SnapshotRef, inputs: Mapping[str, Any], again: bool
) -> SearchJob:
    """The search that its inputs name: the one that was begun, or a new one.

    Args:
        kind: Folder below `home`, such as `sweeps`.
        inputs: What decides the outcome, beside the snapshot.
        again: Makes a new one beside one that has ended.
    """
    text = json.dumps({"snapshot_id": snapshot.snapshot_id, **inputs}, sort_keys=True)
    identity = hashlib.sha256(text.encode()).hexdigest()[:32]
    names = (f"{config.name}-{identity[:12]}-{attempt}" for attempt in itertools.count())
    folders = (config.home_path / kind / name for name in names)
    made = list(itertools.takewhile(Path.exists, folders))
    if not made or (again and (made[-1] / RESULT).exists()):
        made.append(config.home_path / kind / f"{config.name}-{identity[:12]}-{len(made)}")
    return SearchJob(identity=identity, folder=str(made[-1]), snapshot=snapshot)


@contextmanager
def search_run(
    config: RunConfig, job: SearchJob, name: str, params: Mapping[str, Any], tags: Mapping[str, str]
) -> Iterator[tuple[Tracker, str]]:
    """The search's folder for this process alone, and its MLflow run, which is ended whatever happens.

    Args:
        name: Of the run.
        params: Beside those of the config.
    """
    with own_folder(Path(job.folder)) as folder:
        warehouse_of(config).tag(job.snapshot, f"train-{job.identity[:12]}")  # once, not by trials side by side
        note = folder / RUN_ID
        resume = note.read_text(encoding="utf-8").strip() if note.exists() else None
        tags = {"snapshot_id": str(job.snapshot.snapshot_id), "git_commit": commit(), **tags}
        tracker = tracker_of(config)
        with answering(AGAIN):
            tracker.reap()
            run_id = tracker.start(name, config.flat() | dict(params), tags, resume)
            tracker.log_json(run_id, config.shareable(), "config.json")
        write_text(note, run_id)
        with tracker.ended(run_id), answering(AGAIN):
            yield tracker, run_id


class Trials:
    """Trials of a study at work, which threads share.

    Args:
        folder: Of this study.
        run_id: MLflow run that those of the trials are below.
    """

    def __init__(self, study: Study, job: SearchJob, folder: Path, tracker: Tracker, run_id: str) -> None:
        self.study, self.job, self.folder, self.tracker, self.run_id = study, job, folder, tracker, run_id
        self.stop = threading.Event()  # trials at work are to end; the same command goes on with them
        self.lock = threading.Lock()

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

    def tidy_all(self) -> None:
        """Removes what done trials left: a kill may have come before."""
        for record in self.done():
            self.tidy(record)

    def run_all(self, parallel: int, run: Callable[[Draw], object], tell: Callable[[TrialRecord], object]) -> None:
        """Runs what is left of the trials.

        A trial that fails costs itself alone. If MLflow is away or the process is interrupted, the others are ended,
        too, and go on from their checkpoints when the same command is run again.

        Args:
            parallel: Trials at a time.
            run: Runs one to its end.
            tell: Hears of each that is done, one at a time.
        """
        with ThreadPoolExecutor(parallel, thread_name_prefix="trial") as pool:
            try:
                context = contextvars.copy_context  # holds the flow that tasks and logs belong to
                workers = [pool.submit(context().run, self._work, run, tell) for _ in range(parallel)]
                for worker in as_completed(workers):
                    worker.result()
            finally:
                self.stop.set()

    def _work(self, run: Callable[[Draw], object], tell: Callable[[TrialRecord], object]) -> None:
        """One trial after the other, until there are enough."""
        while not self.stop.is_set() and (draw := self.study.next()) is not None:
            try:
                run(draw)
            except Exception as error:  # whatever is wrong with this trial, the others go on
                if self.stop.is_set() or isinstance(error, TrackingError) or unanswered(error):
                    raise
                self.study.fail(draw.number, str(error) if isinstance(error, ContractError) else in_a_line(error))
            with self.lock:
                record = next(record for record in self.done() if record.number == draw.number)
                tell(record)
                self.tidy(record)

    def train(self, number: int, config: RunConfig, name: str, tags: Mapping[str, str]) -> None:
        """Trains a running trial to its NE, or until it falls behind; goes on from its last checkpoint.

        Args:
            name: Of its MLflow run.
            tags: Beside the one that names the run above it.
        """
        if self.study.falls_behind(number):
            return self.study.prune(number)
        plans, snapshot = Path(self.job.folder) / "plans", self.job.snapshot.snapshot_id
        job = candidate_job(config, self.job.identity, snapshot, self.trial_folder(number), plans)
        tags = {"mlflow.parentRunId": self.run_id, **tags}
        outcome = train_candidate(config, job, name, tags, partial(self.watch, number))
        self.study.note(number, mlflow_run_id=outcome.run_id)
        if outcome.valid_ne is None:
            return self.study.prune(number)
        return self.study.finish(number, outcome.valid_ne)

    def watch(self, number: int, event: Event | None) -> None:
        """Ends a trial that falls behind, or all of them when the search ends.

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

"""Metrics of a run on their way to MLflow: written to a file, sent by a thread, kept until they have arrived."""

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from mlflow.entities import Metric
from pydantic import BaseModel, NonNegativeInt, ValidationError

from pipeline.registration.sections import in_section
from pipeline.registration.tracking import STOP_SECONDS, Tracker, redact
from storage.artifacts import write_json

POINTS, SENT = "metrics.jsonl", "metrics.sent.json"
BATCH_METRICS = 500
"""MLflow takes at most 1,000 in a request."""
RETRY_SECONDS = 5.0
"""Interval of attempts while MLflow is unreachable."""


class _Point(BaseModel, frozen=True):
    """A line of the file."""

    step: int
    time: int
    metrics: dict[str, int | float]


class _Sent(BaseModel, frozen=True):
    """How much of the file has arrived."""

    run_id: str
    bytes: NonNegativeInt


class Journal:
    """A file of metrics in the run's folder, and a thread that sends them. MLflow may be away for hours.

    Each metric is written once per step: a training that resumes from a checkpoint does not log steps again. A point
    that is sent twice because the answer was lost has the same time, and MLflow keeps one.

    Args:
        folder: Holds the file, and a note of how much of it has arrived in which run.
        warn: Called with a message when MLflow goes away and when it is back.
    """

    def __init__(self, tracker: Tracker, run_id: str, folder: Path, warn: Callable[[str], object]) -> None:
        self.tracker, self.run_id, self.warn = tracker, run_id, warn
        self.path, self.mark = folder / POINTS, folder / SENT
        self.path.touch()
        self.last: dict[str, int] = {}
        ends = self._read()
        sent = self._read_sent()
        self.sent = sent if sent in ends else 0
        self.away = False
        self.sending, self.wake, self.ending = threading.Lock(), threading.Event(), threading.Event()

    def _read(self) -> set[int]:
        """Reads the last step of each metric, and removes an incomplete last line. Returns where lines end."""
        whole, ends = 0, {0}
        with self.path.open("rb+") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                whole += len(line)
                ends.add(whole)
                if (point := self._parse(line)) is None:
                    self.warn(f"left out damaged metrics in '{self.path}', before byte {whole:,}")
                else:
                    self.last |= dict.fromkeys(point.metrics, point.step)
            file.truncate(whole)
        return ends

    def _read_sent(self) -> int:
        """Returns how much has arrived. What arrives twice does no harm, so a damaged note counts as none."""
        try:
            note = _Sent.model_validate_json(self.mark.read_bytes())
        except (FileNotFoundError, ValidationError):
            return 0
        return note.bytes if note.run_id == self.run_id else 0  # another run has nothing yet

    @staticmethod
    def _parse(line: bytes) -> _Point | None:
        try:
            return _Point.model_validate_json(line)
        except ValidationError:
            return None

    def __enter__(self) -> Self:
        self.thread = threading.Thread(target=self._send, daemon=True)
        self.thread.start()
        self.wake.set()  # an earlier process may have left something
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.ending.set()
        self.wake.set()
        self.thread.join(STOP_SECONDS)

    def log(self, step: int, metrics: Mapping[str, float | None]) -> None:
        """Writes metrics of one step. Skips undefined ones and those written already."""
        new = {key: value for key, value in metrics.items() if value is not None and step > self.last.get(key, -1)}
        if not new:
            return
        line = json.dumps({"step": step, "time": int(1e3 * time.time()), "metrics": new})
        whole = self.path.stat().st_size
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        except OSError:  # a full disk takes part of a line; the next line must not continue it
            os.truncate(self.path, whole)
            raise
        self.last |= dict.fromkeys(new, step)
        self.wake.set()

    def deliver(self) -> None:
        """Sends what has not arrived yet. It raises what MLflow raises, and can be called again."""
        with self.sending:
            for metrics, end in self._batches():
                self.tracker.client.log_batch(self.run_id, metrics=metrics)
                self.sent = end
                write_json(self.mark, {"run_id": self.run_id, "bytes": end})

    def _batches(self) -> Iterator[tuple[list[Metric], int]]:
        """Yields the metrics of each request, and the position in the file where it ends."""
        batch: list[Metric] = []
        end = self.sent
        with self.path.open("rb") as file:
            file.seek(end)
            for line in file:
                if not line.endswith(b"\n"):
                    break  # incomplete: it is being written
                end += len(line)
                if (point := self._parse(line)) is not None:
                    batch += [
                        Metric(in_section(name), value, point.time, point.step) for name, value in point.metrics.items()
                    ]
                if len(batch) >= BATCH_METRICS:
                    yield batch, end
                    batch = []
        if batch:
            yield batch, end

    def _send(self) -> None:
        while True:
            self.wake.wait()
            self.wake.clear()
            ending = self.ending.is_set()
            try:
                self.deliver()
            except Exception as error:  # no error of MLflow may stop the training
                self._note(error)
                self.ending.wait(RETRY_SECONDS)
                self.wake.set()
            else:
                self._note(None)
            if ending:
                return

    def _note(self, error: Exception | None) -> None:
        """Warns once when MLflow goes away, and once when it is back."""
        if error is not None and not self.away:
            reason = redact(" ".join(str(error).split()))[:300]
            self.warn(f"MLflow takes no metrics ({reason}); they are kept in '{self.path}' and sent later")
        elif error is None and self.away:
            self.warn("MLflow is back and has all metrics")
        self.away = error is not None

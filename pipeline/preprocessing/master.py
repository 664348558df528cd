"""The master: leases work to workers, replaces those that die or fall silent, and hands batches to ranks in order."""

import contextlib
import errno
import json
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, ContractError, DataError
from pipeline.preprocessing.autoscaler import PERIOD_SECONDS, Autoscaler, Period
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.executors import (
    Event,
    Executor,
    InlineExecutor,
    ProcessExecutor,
    WorkDone,
    WorkerStarted,
    WorkFailed,
)
from pipeline.preprocessing.memory import allow_many_segments
from pipeline.preprocessing.splits import Split
from pipeline.preprocessing.stream import BatchGroup, Request, Stream, WorkItem
from pipeline.preprocessing.worker import Costs, Worker
from storage.artifacts import write_text
from storage.reader import Fragment

TICK_SECONDS = 0.5
"""Longest time between two looks at the clock."""
START_SECONDS = 120.0
"""How long a worker may take to start."""
STRAGGLER = 4.0
"""Work that takes this many times the usual is given to an idle worker as well."""
STRAGGLER_SECONDS = 1.0
"""And at least so long."""
WORKERS_FILE, QUARANTINE_FILE = "workers.json", "quarantine.jsonl"


@dataclass
class _Worker:
    """What the master knows of a worker."""

    number: int
    since: float
    """Start of its work, or of itself."""
    pid: int | None = None
    item: WorkItem | None = None
    ready: bool = False


@dataclass
class Totals:
    """What the service has done so far."""

    costs: Costs = field(default_factory=Costs)
    rows: int = 0
    """Selected rows read."""
    restarts: int = 0
    late_results: int = 0
    """Results that came after another worker's, and were thrown away."""
    most_workers: int = 0
    peak_bytes: int = 0
    peak_rss_mb: dict[int, int] = field(default_factory=dict)
    """By worker."""
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    """Row groups that were given up, each with its rows and the reason."""
    ready_at: float | None = None
    """When the first worker was ready, on the monotonic clock."""

    def progress(self) -> tuple[float, int, int]:
        """Changes while workers get anywhere, or are replaced."""
        return self.costs.seconds, self.restarts, self.late_results

    @property
    def quarantined_rows(self) -> int:
        """Stored rows of the splits that were given up."""
        return sum(int(entry["rows"]) for entry in self.quarantined)


class Master:
    """Everything but the clients' connections: one step at a time, driven by events.

    Args:
        data: Rows that can be asked for, by name.
        config: Workers, bounds and what to do about faults.
        folder: Logs of the workers, their process ids and the list of lost rows are kept here.
        warn: Takes a text about each worker replaced and each split lost.
    """

    def __init__(
        self,
        data: Mapping[str, DataSpec],
        config: PreprocessingConfig,
        folder: Path,
        warn: Callable[[str], None] = lambda text: None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        allow_many_segments()
        self.data, self.config, self.folder, self.warn = data, config, folder, warn
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.executor = make_executor(data, config, folder, self.events)
        self.inline = isinstance(self.executor, InlineExecutor)
        self.autoscaler = Autoscaler(config.most_workers)
        self.autoscaler.workers = 1 if config.workers == "auto" or self.inline else config.workers
        self.fragments: dict[str, list[Fragment]] = {}
        self.streams: list[Stream] = []
        self.left: dict[Request, set[int]] = {}
        self.workers: dict[int, _Worker] = {}
        self.started = 0
        self.typical_seconds: dict[type, float] = {}
        self.totals = Totals()
        self.failure: ContractError | None = None
        self.period = Period(0.0, 0.0, 0, 0.0, 0, idle=False)
        self.period_began = time.monotonic()

    # -- streams ------------------------------------------------------------------------------------------------

    def open(self, request: Request, rank: int | None = None) -> Stream:
        """The stream of a request; ranks that ask alike share it, and a rank that asks again begins another one.

        Args:
            rank: The one that asks; None where there is no other.
        """
        if request.data not in self.data:
            known = ", ".join(f"'{name}'" for name in self.data)
            raise ConfigError(
                "preprocessing service", f"rows that it has: {known}", f"'{request.data}'", "Ask for one of them."
            )
        rank = request.ranks[0] if rank is None else rank
        found = next((stream for stream in self.streams if stream.request == request and rank in stream.missing), None)
        if found is None:
            if request.data not in self.fragments:
                self.fragments[request.data] = Worker(self.data[request.data]).fragments()
            config, fragments = self.config, self.fragments[request.data]
            share = config.memory // len(self.data)
            ahead = 2 * max(request.window_rows or 0, config.most_workers * config.split_rows)
            found = Stream(request, fragments, config.split_rows, share, self.executor.free, ahead)
            self.streams.append(found)
            left = self.left.pop(request, set())
            for other in left if rank not in left else ():
                found.leave(other)
        found.join(rank)
        return found

    def leave(self, stream: Stream, rank: int) -> None:
        """Notes that a rank takes no more; what no rank takes is closed."""
        if stream not in self.streams:
            return
        stream.leave(rank)
        if stream.left | stream.missing == set(stream.request.ranks):
            self.close_stream(stream)
            if stream.missing:  # they come yet, and must not wait for those that were here
                self.left[stream.request] = stream.left

    def close_stream(self, stream: Stream) -> None:
        """Ends a stream, whole or not."""
        self.totals.peak_bytes = max(self.totals.peak_bytes, stream.peak_bytes)
        stream.close()
        if stream in self.streams:
            self.streams.remove(stream)

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, timeout: float = TICK_SECONDS) -> None:
        """Waits for one event at most so long, deals with it, and gives out work."""
        with self.guard():
            if self.inline:  # what is done here and now is taken note of at once
                self.assign()
            event = self.next_event(timeout)
            if event is not None:
                self.handle(event)
            self.watch_workers()
            if not self.inline:
                self.assign()

    def next_event(self, timeout: float = TICK_SECONDS) -> Any:
        """The next event, of a worker or of whoever shares the queue; None if there is none for so long."""
        try:
            return self.events.get(timeout=timeout) if timeout else self.events.get_nowait()
        except queue.Empty:
            return None

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Turns any error into the end of all work, which every rank is told; the first one counts."""
        try:
            yield
        except Exception as error:
            found = wrap_service_error(error)
            if self.failure is None:
                self.failure = found
                self._end_workers()

    def watch_workers(self) -> None:
        """Replaces workers that fell silent, and starts those that are missing."""
        if self.failure is not None:
            return
        if self.events.empty():  # else a worker's answer may lie there
            self._check_leases()
        self._scale()

    def handle(self, event: Event) -> None:
        """Takes note of what happened to a worker."""
        worker = self.workers.get(event.worker)
        if worker is None:  # it was replaced meanwhile
            if isinstance(event, WorkDone):
                self.executor.free(event.memory)
                self.totals.late_results += 1
            return
        if isinstance(event, WorkerStarted):
            worker.pid, worker.ready = event.pid, True
            self.totals.ready_at = self.totals.ready_at or time.monotonic()
            self._note_workers()
            return
        item, worker.item = worker.item, None
        if isinstance(event, WorkDone):
            assert item is not None
            self._record_work(worker, item, event)
            if not item.stream.complete(item, event.memory, event.size, event.rows, event.costs):
                self.totals.late_results += 1
        elif isinstance(event, WorkFailed):
            assert item is not None
            self._handle_failure(item, event.error)
        else:
            self._replace(worker, item, event.reason)

    def _record_work(self, worker: _Worker, item: WorkItem, event: WorkDone) -> None:
        seconds, kind = event.costs.seconds, type(item.work)
        self.typical_seconds[kind] = max(seconds, 0.9 * self.typical_seconds.get(kind, 0.0) + 0.1 * seconds)
        self.totals.costs.add(event.costs)
        self.totals.rows += event.rows
        self.totals.peak_rss_mb[worker.number] = event.peak_rss_mb
        self.period.worked_seconds += seconds
        self.period.worked_rows += event.rows

    def _handle_failure(self, item: WorkItem, error: ContractError) -> None:
        """Work was not done: it is tried again, or its split is given up."""
        stream = item.stream
        if item not in stream.running:
            return
        item.failures += 1
        if item.failures < self.config.attempts:
            stream.retry(item)
        elif isinstance(item.work, Split) and self.config.on_corrupt == "quarantine":
            stream.quarantine(item)
            self._quarantine(item.work, stream, error)
        else:
            raise error

    def _quarantine(self, split: Split, stream: Stream, error: ContractError) -> None:
        file = self.folder / QUARANTINE_FILE
        lines = dict.fromkeys(file.read_text(encoding="utf-8").splitlines() if file.exists() else ())
        for fragment in split.fragments:
            entry = fragment.model_dump(mode="json") | {
                "data": stream.request.data,
                "epoch": stream.request.position.epoch,
                "reason": str(error),
            }
            self.totals.quarantined.append(entry)
            lines[json.dumps(entry)] = None  # once, however often a run is resumed
        write_text(file, "".join(f"{line}\n" for line in lines))
        self.warn(f"quarantined: {split.rows:,} rows of {split}: {error}")

    # -- workers ------------------------------------------------------------------------------------------------

    def _replace(self, worker: _Worker, item: WorkItem | None, reason: str) -> None:
        """Forgets a worker, has its work done again, and lets another take its place."""
        del self.workers[worker.number]
        self.executor.kill(worker.number)
        self._note_workers()
        self.totals.restarts += 1
        self.warn(f"worker {worker.number} (process {worker.pid}) is replaced: {reason}")
        if self.totals.restarts > self.config.restart_limit:
            raise DataError(
                "preprocessing workers", f"at most {self.config.restart_limit} to be replaced",
                f"{self.totals.restarts}: the last one had process id {worker.pid}, {reason}",
                f"See {self.folder}/worker-{worker.number}.log, or raise preprocessing.restart_limit.",
            )  # fmt: skip
        if item is not None and not any(other.item is item for other in self.workers.values()):
            where = str(item.work) if isinstance(item.work, Split) else "batches"
            self._handle_failure(
                item,
                DataError(
                    where,
                    "a worker that lives through it",
                    f"{self.config.attempts} that did not: {reason}",
                    f"See {self.folder}/worker-{worker.number}.log.",
                ),
            )

    def _check_leases(self) -> None:
        now = time.monotonic()
        for worker in list(self.workers.values()):
            silent = now - worker.since
            if worker.item is not None and silent > self.config.lease_seconds:
                item, worker.item = worker.item, None
                self._replace(worker, item, f"it was silent for {silent:.0f} s")
            elif not worker.ready and silent > START_SECONDS:
                self._replace(worker, None, f"it did not start within {START_SECONDS:.0f} s")

    def _scale(self) -> None:
        """Starts workers that are missing; thinks their number over every now and then."""
        now = time.monotonic()
        self.period.seconds = now - self.period_began
        if self.config.workers == "auto" and not self.inline and self.period.seconds >= PERIOD_SECONDS:
            if all(worker.ready for worker in self.workers.values()):  # else it shows too few of them
                self.autoscaler.after(self.period)
            self.period, self.period_began = Period(0.0, 0.0, 0, 0.0, 0, idle=False), now
        while len(self.workers) < self.autoscaler.workers:
            self.started += 1
            self.executor.start(self.started)
            self.workers[self.started] = _Worker(self.started, now)
            self.totals.most_workers = max(self.totals.most_workers, len(self.workers))
        idle = [worker for worker in self.workers.values() if worker.item is None and worker.ready]
        for worker in idle[: max(len(self.workers) - self.autoscaler.workers, 0)]:
            del self.workers[worker.number]
            self.executor.kill(worker.number)
            self._note_workers()

    def assign(self) -> None:
        """Gives every idle worker something to do."""
        for worker in list(self.workers.values()):
            if worker.ready and worker.item is None:
                item = self._next_item() or self._straggler()
                if item is None:
                    self.period.idle = True
                    return
                worker.item, worker.since = item, time.monotonic()
                self.executor.submit(worker.number, item.stream.request.data, item.work, item.inputs)

    def _next_item(self) -> WorkItem | None:
        for stream in reversed(self.streams):  # what was asked for last is waited for
            if (item := stream.next_item()) is not None:
                return item
        return None

    def _straggler(self) -> WorkItem | None:
        """Work that takes far longer than usual, to be done by a second worker too; the first result counts."""
        now = time.monotonic()
        leases = [worker for worker in self.workers.values() if worker.item is not None]
        for worker in sorted(leases, key=lambda worker: worker.since):
            item = worker.item
            assert item is not None
            usual = self.typical_seconds.get(type(item.work))
            alone = sum(other.item is item for other in leases) == 1
            late = usual is not None and now - worker.since > max(STRAGGLER * usual, STRAGGLER_SECONDS)
            if late and alone and item in item.stream.running:
                return item
        return None

    def _end_workers(self) -> None:
        for number in list(self.workers):
            del self.workers[number]
            self.executor.kill(number)
        with contextlib.suppress(OSError):
            self._note_workers()

    def _note_workers(self) -> None:
        """Keeps the file with the workers' process ids up to date."""
        pids = {str(worker.number): worker.pid for worker in self.workers.values() if worker.pid is not None}
        write_text(self.folder / WORKERS_FILE, json.dumps(pids) + "\n")

    # -- delivery -----------------------------------------------------------------------------------------------

    def note_consumed(self, rows: int, wait_seconds: float) -> None:
        """Takes note of what a client trained on, and of the time it waited."""
        self.period.rows += rows
        self.period.wait_seconds += wait_seconds

    def get_group(self, stream: Stream, number: int) -> BatchGroup | None:
        """A group of batches, or None while it is being made.

        Raises:
            ContractError: If it will never be.
        """
        if self.failure is not None:
            raise self.failure
        group = stream.group(number)
        if group is None and not stream.ended(number) and stream.is_stuck(number):
            raise ConfigError(
                "preprocessing.memory_bytes", "room for the rows of a shuffle window and a group of batches",
                f"{stream.memory_bytes:,} for '{stream.request.data}', {stream.bytes:,} of it in use",
                "Raise it, or lower preprocessing.shuffle_window_rows.",
            )  # fmt: skip
        return group

    def close(self) -> None:
        """Ends all workers."""
        for stream in list(self.streams):
            self.close_stream(stream)
        self._end_workers()
        self.executor.close()
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, WorkDone):
                self.executor.free(event.memory)


def wrap_service_error(error: Exception) -> ContractError:
    """Any error as one that ranks can be told; what was not foreseen is printed in full."""
    if isinstance(error, ContractError):
        return error
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        raise_limit = "Raise it (ulimit -n), or raise preprocessing.split_rows."
        return DataError("open files of the preprocessing", "fewer than the system's limit", "as many", raise_limit)
    sys.excepthook(type(error), error, error.__traceback__)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
    return DataError("preprocessing service", "to go on", reason, "See the output above it.")


def make_executor(
    data: Mapping[str, DataSpec], config: PreprocessingConfig, folder: Path, events: "queue.SimpleQueue[Any]"
) -> Executor:
    """The executor that a config names."""
    if config.executor == "inline":
        return InlineExecutor(data, folder, events)
    if config.executor == "process":
        return ProcessExecutor(data, folder, events)
    try:
        from pipeline.preprocessing.ray_executor import RayExecutor  # an extra: not always installed
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "preprocessing.executor 'ray'", "Ray to be installed", "no module of that name",
            "Install it: make setup EXTRAS=ray.",
        ) from None  # fmt: skip
    return RayExecutor(data, folder, events, config)

"""The master leases work to workers, replaces those that die or fall silent, and gives batches to ranks in order."""

import contextlib
import errno
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError, ContractError, DataError
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.groups import BatchGroup
from pipeline.preprocessing.epoch.memory import allow_many_segments
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.epoch.stream import Stream, WorkItem
from pipeline.preprocessing.executors import (
    Event,
    Executor,
    InlineExecutor,
    WorkDone,
    WorkerDied,
    WorkerStarted,
    WorkFailed,
)
from pipeline.preprocessing.pool import PoolWorker, WorkerPool, make_executor
from pipeline.preprocessing.quarantine import group_key, list_as_quarantined
from pipeline.preprocessing.transport.addresses import NetworkSettings
from pipeline.preprocessing.worker import Worker
from storage.reader import Fragment

TICK_SECONDS = 0.5
"""Longest time between two checks of the clock."""
CACHE_WARNINGS = {
    "damaged": "the cache of columns had a damaged entry; it was removed, and its columns are made again",
    "unwritten": "the disk is full or read-only. The run continues, and caches no more columns for a minute or longer",
}
"""Trouble with the cache -> what to say the first time."""


@dataclass
class Totals:
    """Counters of a service."""

    costs: Costs = field(default_factory=Costs)
    rows: int = 0
    """Selected rows read."""
    restarts: int = 0
    late_results: int = 0
    """Results dropped because they came late: after another worker's, from a replaced worker or for a closed stream.
    Also those that nobody had asked for."""
    most_workers: int = 0
    peak_bytes: int = 0
    peak_rss_mb: dict[int, int] = field(default_factory=dict)
    """By worker."""
    quarantined: list[dict[str, Any]] = field(default_factory=list)
    """Quarantined row groups with their rows and reasons. Each is listed once, even if several streams met it."""
    ready_at: float | None = None
    """Time on the monotonic clock when the first worker was ready."""

    def add(self, event: WorkDone) -> list[str]:
        """Adds finished work. Returns warnings of what its cache lacks for the first time, which costs time."""
        new = [name for name in CACHE_WARNINGS if event.costs.cache[name] and not self.costs.cache[name]]
        self.costs.add(event.costs)
        self.rows += event.rows
        self.peak_rss_mb[event.worker] = event.peak_rss_mb
        return [CACHE_WARNINGS[name] for name in new]

    def progress(self) -> tuple[float, int, int]:
        """Returns a value that changes whenever workers finish work or are replaced."""
        return self.costs.seconds, self.restarts, self.late_results

    @property
    def quarantined_rows(self) -> int:
        """Number of stored rows in the quarantined row groups."""
        return sum(int(entry["rows"]) for entry in self.quarantined)


class Master:
    """Runs the service one step at a time, driven by events. Knows nothing of the clients' connections.

    Args:
        data: The datasets that ranks can request, by name.
        config: Workers, bounds and the handling of faults.
        folder: Receives the workers' logs, their process ids and the list of quarantined rows.
        warn: Called with a message for each replaced worker and each quarantined split.
        clock: Returns seconds that never go back.
        make: Makes the executor. None: `make_executor`.
        network: How workers serve their results. None: they hand them over in shared memory.
        reserved: Processors of the cluster that workers must leave to ranks.
    """

    def __init__(
        self,
        data: Mapping[str, DataSpec],
        config: PreprocessingConfig,
        folder: Path,
        warn: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.monotonic,
        make: "Callable[..., Executor] | None" = None,
        network: NetworkSettings | None = None,
        reserved: int = 0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        allow_many_segments()
        self.data, self.config, self.folder, self.warn, self.clock = data, config, folder, warn, clock
        self.events: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.executor = (make or partial(make_executor, network=network))(data, config, folder, self.events)
        self.inline = isinstance(self.executor, InlineExecutor)
        self.pool = WorkerPool(self.executor, config, folder, clock, reserved)
        self.fragments: dict[str, list[Fragment]] = {}
        self.streams: list[Stream] = []
        self.left: dict[Request, set[int]] = {}
        self.totals = Totals()
        self.failure: ContractError | None = None

    # -- streams ------------------------------------------------------------------------------------------------

    def open(self, request: Request, rank: int | None = None) -> Stream:
        """Returns the stream of a request.

        Ranks with equal requests share a stream. A rank that repeats its request opens another one.

        Args:
            rank: The rank that sends the request. None stands for the request's only rank.
        """
        if request.data not in self.data:
            known = ", ".join(f"'{name}'" for name in self.data)
            raise ConfigError(
                "preprocessing service", f"the name of a dataset: {known}", f"'{request.data}'", "Request one of them."
            )
        rank = request.ranks[0] if rank is None else rank
        found = next((stream for stream in self.streams if stream.request == request and rank in stream.missing), None)
        if found is None:
            if request.data not in self.fragments:
                self.fragments[request.data] = Worker(self.data[request.data]).fragments()
            config, fragments, rows = self.config, self.fragments[request.data], self.data[request.data].rows
            share, most = config.memory // len(self.data), self.pool.autoscaler.most
            ahead = 2 * max(request.window_rows or 0, most * config.split_rows)
            if self.executor.keeps_results:  # each worker works on a block of its own
                ahead = (most + 1) * max(request.window_rows or 0, config.split_rows)
            found = Stream(request, fragments, config.split_rows, share, self.executor.free, ahead, rows)
            self.streams.append(found)
            left = self.left.pop(request, set())
            for other in left if rank not in left else ():
                found.leave(other)
        found.join(rank)
        return found

    def leave(self, stream: Stream, rank: int) -> None:
        """Notes that a rank takes no more groups. Closes the stream if no rank does."""
        if stream not in self.streams:
            return
        stream.leave(rank)
        if stream.left | stream.missing == set(stream.request.ranks):
            self.close_stream(stream)
            if stream.missing:  # these ranks are still to come and must not wait for those that left
                self.left[stream.request] = stream.left

    def close_stream(self, stream: Stream) -> None:
        """Ends a stream, finished or not."""
        self.totals.peak_bytes = max(self.totals.peak_bytes, stream.budget.peak)
        stream.close()
        if stream in self.streams:
            self.streams.remove(stream)

    # -- steps --------------------------------------------------------------------------------------------------

    def step(self, timeout: float = TICK_SECONDS) -> None:
        """Waits up to `timeout` seconds for an event, handles it and assigns work."""
        with self.guard():
            if self.inline:  # inline work is done as it is assigned, so its event is there at once
                self.assign()
            event = self.next_event(timeout)
            if event is not None:
                self.handle(event)
            self.watch_workers()
            if not self.inline:
                self.assign()

    def next_event(self, timeout: float = TICK_SECONDS) -> Any:
        """Returns the next event of a worker or of another user of the queue, or None after `timeout` seconds."""
        try:
            return self.events.get(timeout=timeout) if timeout else self.events.get_nowait()
        except queue.Empty:
            return None

    @contextlib.contextmanager
    def guard(self) -> Iterator[None]:
        """Ends all work at the first error and keeps that error for the ranks."""
        try:
            yield
        except Exception as error:
            found = wrap_service_error(error)
            if self.failure is None:
                self.failure = found
                self.pool.end_all()

    def watch_workers(self) -> None:
        """Replaces hung workers, starts missing ones and ends those that are too many."""
        if self.failure is not None:
            return
        if self.events.empty():  # otherwise a worker's answer may be in the queue
            for worker, reason in self.pool.overdue():
                self._replace(worker, worker.end_lease(), reason)
        self.pool.scale()
        self.totals.most_workers = max(self.totals.most_workers, len(self.pool.workers))
        for worker in self.pool.spare():
            kept = self._kept_by(worker.number)
            if worker.idle and not any(stream.keeps(kept) for stream in self.streams):
                self._end_worker(worker.number)

    def handle(self, event: Event) -> None:
        """Handles an event of a worker. Raises the error of one that may not start, and of work that always fails."""
        worker = self.pool.workers.get(event.worker)
        item = None if worker is None else worker.item
        if isinstance(event, WorkDone) and item is None:
            self.executor.free(event.memory)
            self.totals.late_results += 1
        if worker is None:  # it was replaced in the meantime
            return
        if isinstance(event, WorkerStarted):
            self.pool.note_start(worker, event)
            self.totals.ready_at = self.totals.ready_at or self.clock()
            return
        worker.end_lease()
        self.pool.rest(worker)
        if isinstance(event, WorkerDied):
            self._replace(worker, item, event.reason)
        elif isinstance(event, WorkFailed) and not worker.ready:
            raise event.error  # others could not start either
        elif item is None:
            self._replace(worker, None, "it sent a result that nobody had asked for")
        elif isinstance(event, WorkFailed):
            self._note_failure(item, event)
        else:
            self.pool.note_work(type(item.work), event.costs.seconds, event.rows)
            for text in self.totals.add(event):
                self.warn(text)
            if not item.stream.complete(item, event.memory, event.size, event.rows, event.costs):
                self.totals.late_results += 1

    def replace_keeper(self, stream: Stream, number: int) -> None:
        """Replaces the worker that keeps a group, because a rank cannot fetch it. The group is made again."""
        group = stream.groups.get(number)
        keeper = None if group is None else self.pool.workers.get(self.executor.keeper(group.memory) or 0)
        if keeper is not None and keeper.location is not None:
            self._replace_unreachable(keeper.location)

    def _replace_unreachable(self, location: str) -> None:
        for worker in [worker for worker in self.pool.workers.values() if worker.location == location]:
            self._replace(worker, worker.end_lease(), f"others could not fetch what it keeps at {location}")

    def _note_failure(self, item: WorkItem, event: WorkFailed) -> None:
        if event.unreachable is None:
            self._handle_failure(item, event.error)
            return
        item.stream.retry(item)
        self._replace_unreachable(event.unreachable)

    def _handle_failure(self, item: WorkItem, error: ContractError) -> None:
        """Retries failed work, quarantines its split or raises the error.

        The last attempt reads a split row group by row group, to quarantine only the unreadable ones.
        """
        stream, attempts = item.stream, self.config.attempts
        if item not in stream.running:
            return
        if any(other.item is item for other in self.pool.workers.values()):
            return  # the other one may succeed
        item.failures += 1
        expendable = item.is_expendable and self.config.on_corrupt == "quarantine"
        if expendable and item.several and item.failures >= attempts - 1:
            stream.divide(item)
        elif item.failures < attempts:
            stream.retry(item)
        elif expendable:
            assert isinstance(item.work, Split)
            stream.quarantine(item, error)
            self._quarantine(item.work, stream, error)
        else:
            raise error

    def _quarantine(self, split: Split, stream: Stream, error: ContractError) -> None:
        listed = {group_key(entry) for entry in self.totals.quarantined}
        entries = list_as_quarantined(self.folder, split, stream.request, error)
        self.totals.quarantined += [entry for entry in entries if group_key(entry) not in listed]
        self.warn(f"quarantined {split.rows:,} rows of {split}: {error}")

    # -- workers ------------------------------------------------------------------------------------------------

    def _replace(self, worker: PoolWorker, item: WorkItem | None, reason: str) -> None:
        """Removes a worker and retries its work. A new worker follows."""
        self._end_worker(worker.number)
        self.totals.restarts += 1
        self.warn(f"replacing worker {worker.number} (process {worker.pid}): {reason}")
        if self.totals.restarts > self.config.restart_limit:
            raise DataError(
                "preprocessing workers", f"at most {self.config.restart_limit} replacements",
                f"{self.totals.restarts}: the last worker had process id {worker.pid}, {reason}",
                f"See {self.folder}/worker-{worker.number}.log, or raise preprocessing.restart_limit.",
            )  # fmt: skip
        if item is not None:
            error = DataError(
                str(item.work) if isinstance(item.work, Split) else "batches", "work that a worker survives",
                f"{self.config.attempts} workers that did not: {reason}",
                f"See {self.folder}/worker-{worker.number}.log.",
            )  # fmt: skip
            self._handle_failure(item, error)

    def _kept_by(self, worker: int) -> Callable[[Any], bool]:
        """Returns whether a result is kept by a worker, as a function."""
        return lambda memory: self.executor.keeper(memory) == worker

    def assign(self) -> None:
        """Gives work to every idle worker."""
        keeps = self.executor.keeps_results
        spare = self.pool.spare() if keeps else []
        passed = []
        while (worker := self.pool.next_idle()) is not None:
            maker = self.pool.maker_of(worker.number) if keeps else None
            asking = maker, worker in spare, maker in (None, worker.number)
            items = (stream.next_item(*asking) for stream in reversed(self.streams))  # ranks wait for the last one
            item = next(filter(None, items), None) or self.pool.straggler()
            if item is not None:
                self.pool.lease(worker, item)
                continue
            self.pool.period.idle = True
            passed.append(worker)
            if not keeps:  # otherwise there may be work for another one
                break
        for worker in passed:
            self.pool.rest(worker)

    def _end_worker(self, number: int) -> None:
        """Ends a worker. Results that end with it are made again."""
        self.pool.end(number)
        if self.executor.keeps_results:
            for stream in self.streams:
                stream.lose(number, self._kept_by(number))

    # -- delivery -----------------------------------------------------------------------------------------------

    def note_consumed(self, rows: int, wait_seconds: float) -> None:
        """Notes the rows that a client trained on and the time that it waited."""
        self.pool.period.rows += rows
        self.pool.period.wait_seconds += wait_seconds

    def get_group(self, stream: Stream, number: int) -> BatchGroup | None:
        """Returns a group of batches, or None until it is made.

        Raises:
            ContractError: If the group will never be made.
        """
        if self.failure is not None:
            raise self.failure
        group = stream.groups.get(number)
        if group is None and not stream.ended(number) and stream.is_stuck(number):
            raise ConfigError(
                "preprocessing.memory_bytes", "room for the rows of a shuffle block and a group of batches",
                f"{stream.budget.limit:,} bytes for '{stream.request.data}', {stream.budget.used:,} of them in use",
                "Raise it, or lower preprocessing.shuffle_window_rows.",
            )  # fmt: skip
        return group

    def close(self) -> None:
        """Closes all streams and ends all workers."""
        for stream in list(self.streams):
            self.close_stream(stream)
        self.pool.end_all()
        self.executor.close()
        while True:
            try:
                event = self.events.get_nowait()
            except queue.Empty:
                return
            if isinstance(event, WorkDone):
                self.executor.free(event.memory)


def wrap_service_error(error: Exception) -> ContractError:
    """Returns any error as one that can be sent to ranks. Prints the traceback of an unexpected one."""
    if isinstance(error, ContractError):
        return error
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        remedy = "Raise the limit (ulimit -n), or raise preprocessing.split_rows."
        return DataError("open files of the preprocessing", "fewer than the system's limit", "as many", remedy)
    sys.excepthook(type(error), error, error.__traceback__)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
    return DataError("preprocessing service", "to keep running", reason, "See the traceback above.")

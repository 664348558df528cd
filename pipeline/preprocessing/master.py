"""The master leases work to workers, replaces those that die or fall silent, and gives batches to ranks in order."""

import contextlib
import errno
import heapq
import json
import queue
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from pipeline.data.position import LostRows
from pipeline.errors import ConfigError, ContractError, DataError, StorageError
from pipeline.preprocessing.autoscaler import PERIOD_SECONDS, Autoscaler, Period
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
    ProcessExecutor,
    ServingExecutor,
    WorkDone,
    WorkerDied,
    WorkerStarted,
    WorkFailed,
)
from pipeline.preprocessing.transport.addresses import NetworkSettings
from pipeline.preprocessing.worker import Worker
from storage.artifacts import holding, write_text
from storage.reader import Fragment

TICK_SECONDS = 0.5
"""Longest time between two checks of the clock."""
START_SECONDS = 120.0
"""Time limit for a worker to start."""
STRAGGLER = 4.0
"""Work that takes this many times the typical time is given to an idle worker as well."""
STRAGGLER_SECONDS = 1.0
"""Work that takes less than this is never given to a second worker."""
CACHE_WARNINGS = {
    "damaged": "the cache of columns had a damaged entry; it was removed, and its columns are made again",
    "unwritten": "the disk is full or read-only. The run continues and caches no more columns",
}
"""Trouble with the cache -> what to say the first time."""
WORKERS_FILE, QUARANTINE_FILE = "workers.json", "quarantine.jsonl"


class _Entry(LostRows, frozen=True):
    """A line of the list of quarantined row groups. It says more."""

    data: str


ENTRY: TypeAdapter[dict[str, Any]] = TypeAdapter(Annotated[dict[str, Any], holding(_Entry)])


@dataclass
class _Worker:
    """The master's record of a worker."""

    number: int
    since: float
    """When it started its work, or when it was started itself."""
    pid: int | None = None
    location: str | None = None
    """Where it serves its results, if it keeps them."""
    item: WorkItem | None = None
    ready: bool = False


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
        self.reserved = reserved
        room = self._count_room()
        if reserved and room is not None and config.workers != "auto" and config.workers > room:
            self.executor.close()
            raise ConfigError(
                "preprocessing.workers", f"at most {room}, because ranks reserve {reserved} processors",
                f"{config.workers}", "Start fewer, or add nodes.",
            )  # fmt: skip
        most = config.max_workers or room if config.workers == "auto" else config.workers
        self.autoscaler = Autoscaler(most or config.most_workers)
        self.autoscaler.workers = 1 if config.workers == "auto" or self.inline else config.workers
        self.room, self.room_known = self.autoscaler.most, self.clock()
        self.fragments: dict[str, list[Fragment]] = {}
        self.streams: list[Stream] = []
        self.left: dict[Request, set[int]] = {}
        self.workers: dict[int, _Worker] = {}
        self.idle: list[int] = []  # a heap of workers that became idle; some may be gone
        self.heard_since = self.clock()  # no worker was silent for longer
        self.started = 0
        self.typical_seconds: dict[type, float] = {}
        self.totals = Totals()
        self.failure: ContractError | None = None
        self.period = Period(0.0, 0.0, 0, 0.0, 0, idle=False)
        self.period_began = self.clock()

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
            share = config.memory // len(self.data)
            most = self.autoscaler.most
            ahead = 2 * max(request.window_rows or 0, most * config.split_rows)
            if self.executor.keeps_results:  # each worker works on a window of its own
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
                self._end_workers()

    def watch_workers(self) -> None:
        """Replaces hung workers and starts missing ones."""
        if self.failure is not None:
            return
        if self.events.empty():  # otherwise a worker's answer may be in the queue
            self._check_leases()
        self._scale()

    def handle(self, event: Event) -> None:
        """Handles an event of a worker."""
        worker = self.workers.get(event.worker)
        item = None if worker is None else worker.item
        if isinstance(event, WorkDone) and item is None:
            self.executor.free(event.memory)
            self.totals.late_results += 1
        if worker is None:  # it was replaced in the meantime
            return
        if isinstance(event, WorkerStarted):
            worker.pid, worker.ready, worker.location = event.pid, True, event.location
            heapq.heappush(self.idle, worker.number)
            self.totals.ready_at = self.totals.ready_at or self.clock()
            self._note_workers()
            return
        worker.item = None
        heapq.heappush(self.idle, worker.number)
        if isinstance(event, WorkerDied):
            self._replace(worker, item, event.reason)
        elif item is None:
            self._replace(worker, None, "it sent a result that nobody had asked for")
        elif isinstance(event, WorkFailed) and event.unreachable is not None:
            item.stream.retry(item)
            self._replace_unreachable(event.unreachable)
        elif isinstance(event, WorkFailed):
            self._handle_failure(item, event.error)
        else:
            self._record_work(worker, item, event)
            if not item.stream.complete(item, event.memory, event.size, event.rows, event.costs):
                self.totals.late_results += 1

    def replace_keeper(self, stream: Stream, number: int) -> None:
        """Replaces the worker that keeps a group, because a rank cannot fetch it. The group is made again."""
        group = stream.group(number)
        keeper = None if group is None else self.workers.get(self.executor.keeper(group.memory) or 0)
        if keeper is not None and keeper.location is not None:
            self._replace_unreachable(keeper.location)

    def _replace_unreachable(self, location: str) -> None:
        for worker in [worker for worker in self.workers.values() if worker.location == location]:
            item, worker.item = worker.item, None
            self._replace(worker, item, f"others could not fetch what it keeps at {location}")

    def _record_work(self, worker: _Worker, item: WorkItem, event: WorkDone) -> None:
        seconds, kind = event.costs.seconds, type(item.work)
        self.typical_seconds[kind] = max(seconds, 0.9 * self.typical_seconds.get(kind, 0.0) + 0.1 * seconds)
        self._warn_of_cache(event.costs)
        self.totals.costs.add(event.costs)
        self.totals.rows += event.rows
        self.totals.peak_rss_mb[worker.number] = event.peak_rss_mb
        self.period.worked_seconds += seconds
        self.period.worked_rows += event.rows

    def _warn_of_cache(self, costs: Costs) -> None:
        """Warns once of each thing that the cache lacks and that costs time."""
        for name, text in CACHE_WARNINGS.items():
            if costs.cache[name] and not self.totals.costs.cache[name]:
                self.warn(text)

    def _handle_failure(self, item: WorkItem, error: ContractError) -> None:
        """Retries failed work, quarantines its split or raises the error.

        The last attempt reads a split row group by row group, to quarantine only the unreadable ones.
        """
        stream, attempts = item.stream, self.config.attempts
        if item not in stream.running:
            return
        if any(other.item is item for other in self.workers.values()):
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
        known = {_group_key(entry): entry for entry in read_quarantine(self.folder)}
        listed = {_group_key(entry) for entry in self.totals.quarantined}
        for fragment in split.fragments:
            entry = fragment.model_dump(mode="json") | {
                "data": stream.request.data,
                "epoch": stream.request.position.epoch,
                "reason": str(error),
            }
            known.setdefault(_group_key(entry), entry)  # listed once, however often a run is resumed
            if _group_key(entry) not in listed:
                self.totals.quarantined.append(entry)
        write_text(self.folder / QUARANTINE_FILE, "".join(f"{json.dumps(entry)}\n" for entry in known.values()))
        self.warn(f"quarantined {split.rows:,} rows of {split}: {error}")

    # -- workers ------------------------------------------------------------------------------------------------

    def _replace(self, worker: _Worker, item: WorkItem | None, reason: str) -> None:
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
            where = str(item.work) if isinstance(item.work, Split) else "batches"
            self._handle_failure(
                item,
                DataError(
                    where,
                    "work that a worker survives",
                    f"{self.config.attempts} workers that did not: {reason}",
                    f"See {self.folder}/worker-{worker.number}.log.",
                ),
            )

    def _check_leases(self) -> None:
        now = self.clock()
        if now - self.heard_since <= min(self.config.lease_seconds, START_SECONDS):
            return
        for worker in list(self.workers.values()):
            silent = now - worker.since
            if worker.item is not None and silent > self.config.lease_seconds:
                item, worker.item = worker.item, None
                self._replace(worker, item, f"it was silent for {silent:.0f} s")
            elif not worker.ready and silent > START_SECONDS:
                self._replace(worker, None, f"it did not start within {START_SECONDS:.0f} s")
        waited = (worker.since for worker in self.workers.values() if worker.item is not None or not worker.ready)
        self.heard_since = min(waited, default=now)

    def _count_room(self) -> int | None:
        """Returns how many workers the cluster has processors for besides the ranks. None: it is this machine."""
        cores = self.executor.cores
        return max(cores - self.reserved, 1) if cores is not None and self.reserved else cores

    @property
    def wanted_workers(self) -> int:
        """Number of workers to have. Those of a lost node are replaced only where ranks leave processors."""
        return min(self.autoscaler.workers, self.room)

    def _scale(self) -> None:
        """Starts missing workers and periodically rescales the pool."""
        now = self.clock()
        if self.reserved and now - self.room_known >= PERIOD_SECONDS:
            self.room, self.room_known = self._count_room() or self.room, now
        self.period.seconds = now - self.period_began
        if self.config.workers == "auto" and not self.inline and self.period.seconds >= PERIOD_SECONDS:
            if all(
                worker.ready for worker in self.workers.values()
            ):  # otherwise the period shows the output of too few
                self.autoscaler.after(self.period)
            self.period, self.period_began = Period(0.0, 0.0, 0, 0.0, 0, idle=False), now
        while len(self.workers) < self.wanted_workers:
            self.started += 1
            self.executor.start(self.started)
            self.workers[self.started] = _Worker(self.started, now)
            self.totals.most_workers = max(self.totals.most_workers, len(self.workers))
        if len(self.workers) <= self.wanted_workers:
            return
        for worker in self._spare_workers():
            kept = self._kept_by(worker.number)
            if worker.item is None and worker.ready and not any(stream.keeps(kept) for stream in self.streams):
                self._end_worker(worker.number)

    def _spare_workers(self) -> list[_Worker]:
        """Returns the workers that are too many: idle ones, or the newest if they have to hand out results first."""
        workers = list(self.workers.values())
        if self.executor.keeps_results:
            workers.reverse()
        else:
            workers = [worker for worker in workers if worker.item is None and worker.ready]
        return workers[: max(len(self.workers) - self.wanted_workers, 0)]

    def _kept_by(self, worker: int) -> Callable[[Any], bool]:
        """Returns whether a result is kept by a worker, as a function."""
        return lambda memory: self.executor.keeper(memory) == worker

    def assign(self) -> None:
        """Gives work to every idle worker."""
        keeps = self.executor.keeps_results
        spare = self._spare_workers() if keeps else []
        passed: list[int] = []
        while self.idle:
            number = heapq.heappop(self.idle)
            worker = self.workers.get(number)
            if worker is not None and worker.ready and worker.item is None:
                item = self._next_item(number if keeps else None, worker in spare) or self._straggler()
                if item is None:
                    self.period.idle = True
                    passed.append(number)
                    if keeps:  # there may be work for another one
                        continue
                    break
                worker.item, worker.since = item, self.clock()
                self.executor.submit(number, item.stream.request.data, item.work, item.inputs)
        for number in passed:
            heapq.heappush(self.idle, number)

    def _next_item(self, worker: int | None, spare: bool) -> WorkItem | None:
        for stream in reversed(self.streams):  # ranks wait for the stream requested last
            if (item := stream.next_item(worker, spare)) is not None:
                return item
        return None

    def _straggler(self) -> WorkItem | None:
        """Returns work that takes far longer than usual, for a second worker. The first result counts."""
        now = self.clock()
        old = (one for one in self.workers.values() if one.item is not None and now - one.since > STRAGGLER_SECONDS)
        for worker in sorted(old, key=lambda worker: worker.since):
            item = worker.item
            assert item is not None
            usual = self.typical_seconds.get(type(item.work))
            late = usual is not None and now - worker.since > max(STRAGGLER * usual, STRAGGLER_SECONDS)
            if late and not item.doubled and item in item.stream.running:
                item.doubled = True  # once: work that hangs would go from one new worker to the next for ever
                return item
        return None

    def _end_worker(self, number: int) -> None:
        """Ends a worker. Results that end with it are made again."""
        del self.workers[number]
        self.executor.kill(number)
        self._note_workers()
        if self.executor.keeps_results:
            for stream in self.streams:
                stream.lose(number, self._kept_by(number))

    def _end_workers(self) -> None:
        for number in list(self.workers):
            del self.workers[number]
            self.executor.kill(number)
        with contextlib.suppress(OSError):
            self._note_workers()

    def _note_workers(self) -> None:
        """Writes the workers' process ids to their file."""
        pids = {str(worker.number): worker.pid for worker in self.workers.values() if worker.pid is not None}
        write_text(self.folder / WORKERS_FILE, json.dumps(pids) + "\n")

    # -- delivery -----------------------------------------------------------------------------------------------

    def note_consumed(self, rows: int, wait_seconds: float) -> None:
        """Notes the rows that a client trained on and the time that it waited."""
        self.period.rows += rows
        self.period.wait_seconds += wait_seconds

    def get_group(self, stream: Stream, number: int) -> BatchGroup | None:
        """Returns a group of batches, or None until it is made.

        Raises:
            ContractError: If the group will never be made.
        """
        if self.failure is not None:
            raise self.failure
        group = stream.group(number)
        if group is None and not stream.ended(number) and stream.is_stuck(number):
            raise ConfigError(
                "preprocessing.memory_bytes", "room for the rows of a shuffle window and a group of batches",
                f"{stream.budget.limit:,} bytes for '{stream.request.data}', {stream.budget.used:,} of them in use",
                "Raise it, or lower preprocessing.shuffle_window_rows.",
            )  # fmt: skip
        return group

    def close(self) -> None:
        """Closes all streams and ends all workers."""
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


def read_quarantine(folder: Path) -> list[dict[str, Any]]:
    """Returns the row groups that a folder lists as quarantined, each with its data, epoch, rows and reason.

    Raises:
        StorageError: If the list is damaged.
    """
    file = folder / QUARANTINE_FILE
    try:
        return [ENTRY.validate_json(line) for line in file.read_bytes().splitlines()] if file.exists() else []
    except ValidationError:
        remedy = "Remove it: a training knows which rows it has lost, and only their reasons are gone."
        raise StorageError(f"file '{file}'", "what a training has written", "other content", remedy) from None


def _group_key(entry: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(entry[key] for key in ("data", "epoch", "path", "row_group"))


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


def make_executor(
    data: Mapping[str, DataSpec],
    config: PreprocessingConfig,
    folder: Path,
    events: "queue.SimpleQueue[Any]",
    network: NetworkSettings | None = None,
) -> Executor:
    """Creates the executor that a config names."""
    if config.executor == "inline":
        return InlineExecutor(data, folder, events)
    if config.executor == "process" and network is not None:
        return ServingExecutor(data, folder, events, network)
    if config.executor == "process":
        return ProcessExecutor(data, folder, events)
    try:
        from pipeline.preprocessing.ray_executor import RayExecutor  # Ray is an optional extra
    except ModuleNotFoundError as error:
        if error.name != "ray":
            raise
        raise ConfigError(
            "preprocessing.executor 'ray'", "Ray to be installed", "no module of that name",
            "Install it: make setup EXTRAS=ray.",
        ) from None  # fmt: skip
    return RayExecutor(data, folder, events, config, network)

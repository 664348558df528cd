"""WorkerPool: the workers of a service and the work that each of them has a lease on."""

import contextlib
import heapq
import json
import queue
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ConfigError
from pipeline.preprocessing.autoscaler import PERIOD_SECONDS, Autoscaler, Period
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.stream import WorkItem
from pipeline.preprocessing.executors import Executor, InlineExecutor, ProcessExecutor, ServingExecutor, WorkerStarted
from pipeline.preprocessing.transport.addresses import NetworkSettings
from storage.artifacts import write_text

START_SECONDS = 120.0
"""Time limit for a worker to start."""
STRAGGLER = 4.0
"""Work that takes this many times the typical time is given to an idle worker as well."""
STRAGGLER_SECONDS = 1.0
"""Work that takes less than this is never given to a second worker."""
WORKERS_FILE = "workers.json"


@dataclass(eq=False)
class PoolWorker:
    """A worker as the master knows it."""

    number: int
    since: float
    """When it started its work, or when it was started itself."""
    pid: int | None = None
    location: str | None = None
    """Where it serves its results, if it keeps them."""
    item: WorkItem | None = None
    ready: bool = False

    @property
    def idle(self) -> bool:
        """Whether it could begin with some work."""
        return self.ready and self.item is None

    def end_lease(self) -> WorkItem | None:
        """Takes its work from it and returns it."""
        item, self.item = self.item, None
        return item


class WorkerPool:
    """Starts and ends workers, as many as are wanted, and finds those that are idle, silent or slow.

    Args:
        executor: Runs the workers.
        folder: Receives the workers' process ids.
        clock: Returns seconds that never go back.
        reserved: Processors of the cluster that workers must leave to ranks.
    Raises:
        ConfigError: If the cluster does not have processors for so many workers.
    Attributes:
        makers: Workers that make batches, where results stay with workers: at most `connections`, the same until one of
            them ends, so that ranks stay connected to few. The others read splits for one of them each. Partitioned
            round-robin of DPP (Zhao et al. 2022, arXiv:2108.09373).
        period: What happened since the number of workers was last decided.
    """

    def __init__(
        self, executor: Executor, config: PreprocessingConfig, folder: Path, clock: Callable[[], float], reserved: int
    ) -> None:
        self.executor, self.config, self.folder, self.clock = executor, config, folder, clock
        self.reserved = reserved
        room = self._count_room()
        if reserved and room is not None and config.workers != "auto" and config.workers > room:
            executor.close()
            raise ConfigError(
                "preprocessing.workers", f"at most {room}, because ranks reserve {reserved} processors",
                f"{config.workers}", "Start fewer, or add nodes.",
            )  # fmt: skip
        most = config.max_workers or room if config.workers == "auto" else config.workers
        inline = isinstance(executor, InlineExecutor)
        self.autoscaler = Autoscaler(most or config.most_workers)
        self.autoscaler.workers = 1 if config.workers == "auto" or inline else config.workers
        self.scales = config.workers == "auto" and not inline
        self.room, self.room_known = self.autoscaler.most, clock()
        self.workers: dict[int, PoolWorker] = {}
        self.makers: list[int] = []
        self.resting: list[int] = []  # a heap of workers that became idle; some may be gone
        self.heard_since = clock()  # no worker was silent for longer
        self.started = 0
        self.typical_seconds: dict[type, float] = {}
        self.period, self.period_began = Period(0.0, 0.0, 0, 0.0, 0, idle=False), clock()

    @property
    def wanted(self) -> int:
        """Number of workers to have. Those of a lost node are replaced only where ranks leave processors."""
        return min(self.autoscaler.workers, self.room)

    def _count_room(self) -> int | None:
        """Returns how many workers the cluster has processors for besides the ranks. None: it is this machine."""
        cores = self.executor.cores
        return max(cores - self.reserved, 1) if cores is not None and self.reserved else cores

    # -- their number -------------------------------------------------------------------------------------------

    def scale(self) -> None:
        """Starts missing workers and periodically rescales the pool."""
        now = self.clock()
        if self.reserved and now - self.room_known >= PERIOD_SECONDS:
            self.room, self.room_known = self._count_room() or self.room, now
        self.period.seconds = now - self.period_began
        if self.scales and self.period.seconds >= PERIOD_SECONDS:
            if all(worker.ready for worker in self.workers.values()):  # otherwise it shows the output of too few
                self.autoscaler.after(self.period)
            self.period, self.period_began = Period(0.0, 0.0, 0, 0.0, 0, idle=False), now
        while len(self.workers) < self.wanted:
            self.started += 1
            self.executor.start(self.started)
            self.workers[self.started] = PoolWorker(self.started, now)

    def spare(self) -> list[PoolWorker]:
        """Returns the workers that are too many: idle ones, or the newest if they have to hand out results first.

        Of these, makers come last, because others read for them.
        """
        excess = len(self.workers) - self.wanted
        if excess <= 0:
            return []
        workers = list(self.workers.values())
        if self.executor.keeps_results:
            workers.sort(key=lambda worker: (worker.number in self.makers, -worker.number))
        else:
            workers = [worker for worker in workers if worker.idle]
        return workers[:excess]

    def note_start(self, worker: PoolWorker, event: WorkerStarted) -> None:
        """Notes that a worker is ready."""
        worker.pid, worker.ready, worker.location = event.pid, True, event.location
        if len(self.makers) < self.config.connections:
            self.makers.append(worker.number)
        self.rest(worker)
        self._note_pids()

    def end(self, number: int) -> None:
        """Ends a worker. If it made batches, the first that only reads takes its place."""
        del self.workers[number]
        if number in self.makers:
            readers = [one.number for one in self.workers.values() if one.ready and one.number not in self.makers]
            place = self.makers.index(number)
            self.makers[place : place + 1] = sorted(readers)[:1]
        self.executor.kill(number)
        self._note_pids()

    def maker_of(self, number: int) -> int:
        """Returns the worker that makes batches of what this one reads: itself, if it is a maker."""
        return number if number in self.makers else self.makers[number % len(self.makers)]

    def end_all(self) -> None:
        """Ends all workers."""
        for number in list(self.workers):
            del self.workers[number]
            self.executor.kill(number)
        with contextlib.suppress(OSError):
            self._note_pids()

    def _note_pids(self) -> None:
        pids = {str(worker.number): worker.pid for worker in self.workers.values() if worker.pid is not None}
        write_text(self.folder / WORKERS_FILE, json.dumps(pids) + "\n")

    # -- their leases -------------------------------------------------------------------------------------------

    def rest(self, worker: PoolWorker) -> None:
        """Notes that a worker has become idle."""
        heapq.heappush(self.resting, worker.number)

    def next_idle(self) -> PoolWorker | None:
        """Returns the idle worker with the lowest number, once. None: there is none."""
        while self.resting:
            worker = self.workers.get(heapq.heappop(self.resting))
            if worker is not None and worker.idle:
                return worker
        return None

    def lease(self, worker: PoolWorker, item: WorkItem) -> None:
        """Gives work to an idle worker."""
        worker.item, worker.since = item, self.clock()
        self.executor.submit(worker.number, item.stream.request.data, item.work, item.inputs)

    def note_work(self, kind: type, seconds: float, rows: int) -> None:
        """Notes how long work took, and the rows that it read."""
        self.typical_seconds[kind] = max(seconds, 0.9 * self.typical_seconds.get(kind, 0.0) + 0.1 * seconds)
        self.period.worked_seconds += seconds
        self.period.worked_rows += rows

    def overdue(self) -> Iterator[tuple[PoolWorker, str]]:
        """Yields the workers that are silent for too long, with the reason. The caller replaces them."""
        now = self.clock()
        if now - self.heard_since <= min(self.config.lease_seconds, START_SECONDS):
            return
        for worker in list(self.workers.values()):
            silent = now - worker.since
            if worker.item is not None and silent > self.config.lease_seconds:
                yield worker, f"it was silent for {silent:.0f} s"
            elif not worker.ready and silent > START_SECONDS:
                yield worker, f"it did not start within {START_SECONDS:.0f} s"
        waited = (worker.since for worker in self.workers.values() if not worker.idle)
        self.heard_since = min(waited, default=now)

    def straggler(self) -> WorkItem | None:
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

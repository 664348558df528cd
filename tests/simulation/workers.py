"""Simulated workers: they do the real work on rows that are their own numbers, and die, hang and fail by chance."""

import queue
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.errors import DataError
from pipeline.preprocessing.epoch.batches import BatchWork
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.memory import Arrays, Writer
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.executors import Event, Executor, WorkDone, WorkerDied, WorkerStarted, WorkFailed, _try_work
from pipeline.preprocessing.worker import Worker
from storage.reader import Fragment
from tests.simulation.world import World, require

FAULTS = ("a worker does not start", "a worker dies at its start", "a worker dies", "a worker hangs", "work fails", "a worker is slow", "a result is late")  # fmt: skip


class Disk:
    """Row groups whose rows are their own numbers. Some cannot be read for a while, and some never end.

    Args:
        damaged: (path, row group) -> times from when and until when it cannot be read.
        endless: Those of the damaged row groups whose reading hangs.
        share: Share of the rows that the filter selects.
    """

    def __init__(
        self,
        world: World,
        fragments: Sequence[Fragment],
        damaged: Mapping[Any, tuple[float, float]],
        endless: Collection[Any],
        share: float,
    ) -> None:
        self.world, self.fragments, self.damaged, self.share = world, fragments, dict(damaged), share
        self.endless = endless
        self.first: dict[Any, int] = {}
        count = 0
        for one in fragments:
            self.first[one.path, one.row_group] = count
            count += one.rows

    def rows(self, fragment: Fragment) -> list[int]:
        """Returns the selected rows."""
        first = self.first[fragment.path, fragment.row_group]
        rows = range(first, first + fragment.rows)
        return [row for row in rows if row * 2654435761 % 2**32 < self.share * 2**32]

    def readable(self, fragment: Fragment) -> bool:
        begin, end = self.damaged.get((fragment.path, fragment.row_group), (0.0, 0.0))
        return not begin <= self.world.now < end

    def hangs(self, work: Split | BatchWork) -> bool:
        """Whether work never ends."""
        read = work.fragments if isinstance(work, Split) else ()
        return any((one.path, one.row_group) in self.endless and not self.readable(one) for one in read)

    def repair(self) -> None:
        """Restores all files, as a person would."""
        self.damaged = {key: (begin, min(end, self.world.now)) for key, (begin, end) in self.damaged.items()}


class RowWorker(Worker):
    """A worker whose rows have one dense value and no ids. Orders and batches are made by the real code."""

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.spec = SimpleNamespace(plan=SimpleNamespace(sparse=(), dense=("row",)), shared=())  # type: ignore[assignment]
        self.orders = {}

    def transform_split(self, split: Split, writer: Writer) -> tuple[int, Costs]:
        rows: list[int] = []
        for fragment in split.fragments:
            if not self.disk.readable(fragment):
                raise DataError(f"{split}", "to be readable", "damage", "Restore it.")
            rows += self.disk.rows(fragment)
        shapes = {"0.dense": ("float32", (len(rows), 1)), "0.labels": ("float32", (len(rows),))}
        out = writer.add(shapes | {"0.starts": ("int64", (1,)), "0.ids": ("int32", (0,))})
        out["0.dense"][:, 0], out["0.labels"][:], out["0.starts"][:] = rows, np.array(rows) % 2, 0
        return len(rows), Costs()


@dataclass(eq=False)
class Memory:
    """A result in shared memory."""

    arrays: Arrays
    arrived: bool = False
    """Whether the master has heard of it."""
    freed: bool = False
    worker: int | None = None
    """The worker that keeps it. None: it outlives its worker."""
    gone: bool = False
    """Whether its worker has ended."""


@dataclass(eq=False)
class _Process:
    """A worker's process."""

    worker: RowWorker
    alive: bool = True
    heard: float = 0.0
    """When its last event arrives. Its events never overtake each other."""


class SimulatedExecutor(Executor):
    """Runs simulated workers.

    Args:
        disk: What they read.
        wake: Called when an event is in the queue.
        keeps: Whether results end with their workers, as they do where batches travel over the network.
    """

    def __init__(self, world: World, disk: Disk, wake: Callable[[], None], keeps: bool, *given: Any) -> None:
        data, folder, events = given[0], given[2], given[3]
        super().__init__(data, folder, events)
        self.world, self.disk, self.wake, self.keeps = world, disk, wake, keeps
        self.processes: dict[int, _Process] = {}
        self.made: list[Memory] = []
        self.loans: dict[int, Memory] = {}
        self.closed = False

    @property
    def keeps_results(self) -> bool:
        return self.keeps

    def keeper(self, memory: Memory) -> int | None:
        return memory.worker

    def start(self, worker: int) -> None:
        process = self.processes[worker] = _Process(RowWorker(self.disk))
        if self.world.strikes("a worker does not start"):
            return
        event: Event = WorkerStarted(worker, 1000 + worker)
        if self.world.strikes("a worker dies at its start"):
            event = WorkerDied(worker, "its process ended")
        self._send_after(self.world.between(0.2, 3.0), process, lambda: event)

    def submit(self, worker: int, data: str, work: Split | BatchWork, inputs: Sequence[Memory]) -> None:
        process = self.processes[worker]
        require(not any(memory.freed for memory in inputs), f"work got memory that was freed: {work}")
        require(not any(memory.gone for memory in inputs), f"work got rows of a worker that ended: {work}")
        seconds = self.world.between(0.05, 1.0)
        if self.disk.hangs(work) or self.world.strikes("a worker hangs"):
            return
        if self.world.strikes("a worker is slow"):
            seconds *= 40.0
        if self.world.strikes("a worker dies"):
            self._send_after(seconds / 2, process, lambda: WorkerDied(worker, "its process ended"))
        elif self.world.strikes("work fails"):
            error = DataError(f"{work}", "to be done", "a passing fault", "Try again.")
            self._send_after(seconds, process, lambda: WorkFailed(worker, error))
        else:
            self._send_after(seconds, process, lambda: self._do(worker, process, work, inputs, seconds))

    def _do(
        self, number: int, process: _Process, work: Split | BatchWork, inputs: Sequence[Memory], seconds: float
    ) -> Event:
        if any(memory.gone for memory in inputs):
            return WorkFailed(number, DataError(f"{work}", "rows of another worker", "a passing fault", "Try again."))
        event = _try_work(number, process.worker, work, [memory.arrays for memory in inputs])
        if isinstance(event, WorkFailed):
            return event
        memory = Memory(event.memory, worker=number if self.keeps else None)
        self.made.append(memory)
        return replace(event, memory=memory, costs=Costs(read_seconds=seconds), peak_rss_mb=1)

    def _send_after(self, seconds: float, process: _Process, make: Callable[[], Event]) -> None:
        def send() -> None:
            if not process.alive or self.closed:
                return
            event = make()
            delay = self.world.between(0.0, 0.02)
            if isinstance(event, WorkDone) and self.world.strikes("a result is late"):
                delay = self.world.between(0.0, 60.0)  # its worker may be replaced in the meantime
            process.heard = max(process.heard, self.world.now + delay)
            self.world.later(process.heard - self.world.now, lambda: self._arrive(event))

        self.world.later(seconds, send)

    def _arrive(self, event: Event) -> None:
        if not self.closed:
            if isinstance(event, WorkDone):
                event.memory.arrived = True
            self.events.put(event)
            self.wake()

    def kill(self, worker: int) -> None:
        self.processes.pop(worker).alive = False
        for memory in self.made:
            memory.gone = memory.gone or memory.worker == worker

    def free(self, memory: Memory) -> None:
        require(not memory.freed, "memory was freed twice")
        memory.freed = True

    def deliver(self, memory: Memory) -> tuple[dict[str, Any], list[int]]:
        require(not memory.freed, "a rank gets memory that was freed")
        require(not memory.gone, "a rank is sent to a worker that has ended")
        self.loans[len(self.loans)] = memory
        return {"loan": len(self.loans) - 1}, []

    def close(self) -> None:
        self.closed = True

    def require_all_freed(self) -> None:
        """Checks that nothing was leaked."""
        kept = [memory for memory in self.made if memory.arrived and not memory.gone]
        require(all(memory.freed for memory in kept), "memory was leaked")


def make_executor(world: World, disk: Disk, wake: Callable[[], None], keeps: bool) -> Callable[..., SimulatedExecutor]:
    """Returns what a master calls to make its executor."""

    def make(data: Any, config: Any, folder: Path, events: "queue.SimpleQueue[Any]") -> SimulatedExecutor:
        return SimulatedExecutor(world, disk, wake, keeps, data, config, folder, events)

    return make

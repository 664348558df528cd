"""A master with a fake clock and fake workers, which act only when a test says so."""

from pathlib import Path
from typing import Any

from pipeline.data.position import Position
from pipeline.errors import DataError
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.batches import BatchWork
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.executors import (
    Executor,
    WorkDone,
    WorkerStarted,
    WorkFailed,
)
from pipeline.preprocessing.master import Master
from tests.pipeline.preprocessing.reference import CONFIG

BAD = DataError("row 3", "something else", "this", "Change it.")


class FakeExecutor(Executor):
    """Workers that act only when a test calls `finish` or `fail`."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.alive: set[int] = set()
        self.work: dict[int, Split | BatchWork] = {}
        self.freed: list[str] = []
        self.made = 0

    def start(self, worker: int) -> None:
        self.alive.add(worker)
        self.events.put(WorkerStarted(worker, 1000 + worker))

    def submit(self, worker: int, data: str, work: Split | BatchWork, inputs: Any) -> None:
        assert worker in self.alive
        assert worker not in self.work
        self.work[worker] = work

    def kill(self, worker: int) -> None:
        self.alive.remove(worker)
        self.work.pop(worker, None)

    def free(self, memory: str) -> None:
        assert memory not in self.freed
        self.freed.append(memory)

    def deliver(self, memory: str) -> Any:
        raise NotImplementedError

    def finish(self, worker: int, seconds: float = 1.0) -> str:
        """Sends the result of a worker, even of one that is gone."""
        work = self.work.pop(worker, None)
        rows = work.rows if isinstance(work, Split) else 0
        self.made += 1
        memory = f"result {self.made}"
        self.events.put(WorkDone(worker, memory, 1000, rows, Costs(read_seconds=seconds), 77))
        return memory

    def fail(self, worker: int) -> None:
        del self.work[worker]
        self.events.put(WorkFailed(worker, BAD))


class Play:
    """A master, its clock and its warnings."""

    def __init__(self, data: DataSpec, folder: Path, **config: Any) -> None:
        self.now = 100.0
        self.said: list[str] = []
        settings = {"executor": "process", "workers": 2} | config
        given = CONFIG.model_copy(update=settings)
        self.master = Master({"days": data}, given, folder, self.said.append, lambda: self.now, self.make)

    def make(self, data: Any, config: Any, folder: Path, events: Any) -> FakeExecutor:
        self.executor = FakeExecutor(data, folder, events)
        return self.executor

    def steps(self) -> None:
        """Steps until nothing more happens."""
        for _ in range(20):
            self.master.step(timeout=0)

    def open(self, **request: Any) -> Any:
        given = {
            "data": "days", "number": 0, "position": Position(), "batch_rows": 160, "seed": 7, "window_rows": 250,
            "world_size": 1, "ranks": (0,),
        }  # fmt: skip
        return self.master.open(Request(**(given | request)))

    def after(self, seconds: float) -> None:
        self.now += seconds
        self.steps()

    def warmed(self) -> Any:
        """Opens a stream and reads two splits."""
        stream = self.open()
        self.steps()
        for _ in range(2):
            self.executor.finish(next(iter(self.executor.work)))
            self.steps()
        assert sorted(self.executor.work) == [1, 2]
        return stream

"""How many workers there are, driven step by step with a fake clock and fake workers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.errors import ConfigError
from pipeline.preprocessing.autoscaler import PERIOD_SECONDS
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.executors import (
    InlineExecutor,
    ProcessExecutor,
    WorkerDied,
)
from pipeline.preprocessing.master import Master
from pipeline.preprocessing.pool import make_executor
from tests.pipeline.preprocessing.fake_workers import FakeExecutor, Play
from tests.pipeline.preprocessing.reference import CONFIG


def test_a_worker_that_does_not_start(play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeExecutor, "start", lambda self, worker: self.alive.add(worker))
    it = play(workers=1)
    it.steps()
    it.after(119.0)
    assert it.executor.alive == {1}
    it.after(2.0)
    assert it.executor.alive == {2}
    assert it.said == ["replacing worker 1 (process None): it did not start within 120 s"]


def test_auto_adds_workers_while_the_trainer_waits_and_removes_idle_ones(play: Callable[..., Play]) -> None:
    it = play(workers="auto", max_workers=6)
    stream = it.open(window_rows=None, batch_rows=10)
    it.steps()
    assert it.executor.alive == {1}
    for _ in range(4):
        it.master.note_consumed(rows=100, wait_seconds=0.5 * PERIOD_SECONDS)
        it.after(PERIOD_SECONDS)
    assert len(it.executor.alive) == 5
    assert it.master.totals.most_workers == 5
    while it.executor.work:
        it.executor.finish(next(iter(it.executor.work)), seconds=0.1)
        it.steps()
    for _ in range(100):
        it.master.note_consumed(rows=100, wait_seconds=0.0)
        it.master.pool.period.worked_rows, it.master.pool.period.worked_seconds = 100, 0.1
        it.after(PERIOD_SECONDS)
    assert len(it.executor.alive) == 1
    assert it.master.totals.restarts == 0
    assert stream in it.master.streams


def test_no_worker_is_added_while_one_is_starting(play: Callable[..., Play], monkeypatch: pytest.MonkeyPatch) -> None:
    """The period was measured without it."""
    it = play(workers="auto", max_workers=6)
    it.open()
    it.steps()
    monkeypatch.setattr(FakeExecutor, "start", lambda self, worker: self.alive.add(worker))
    for _ in range(10):
        it.master.note_consumed(rows=100, wait_seconds=0.5 * PERIOD_SECONDS)
        it.after(PERIOD_SECONDS)
    assert it.executor.alive == {1, 2}


def test_make_executor(data: DataSpec, tmp_path: Path) -> None:
    import queue

    for name, kind in {"inline": InlineExecutor, "process": ProcessExecutor}.items():
        config = CONFIG.model_copy(update={"executor": name})
        assert type(make_executor({"days": data}, config, tmp_path, queue.SimpleQueue())) is kind


def test_workers_leave_the_processors_that_ranks_reserve(data: DataSpec, tmp_path: Path) -> None:
    class Cluster(FakeExecutor):
        cores = 6  # type: ignore[assignment]

    def make(data: Any, config: Any, folder: Path, events: Any) -> FakeExecutor:
        return Cluster(data, folder, events)

    auto, three = (CONFIG.model_copy(update={"workers": number, "max_workers": None}) for number in ("auto", 3))
    master = Master({"days": data}, auto, tmp_path, make=make, reserved=4)
    assert master.pool.autoscaler.most == 2
    with pytest.raises(ConfigError, match=r"workers: expected at most 2, because ranks reserve 4 processors, got 3"):
        Master({"days": data}, three, tmp_path, make=make, reserved=4)


def test_workers_of_a_lost_node_are_replaced_only_beside_the_ranks(data: DataSpec, tmp_path: Path) -> None:
    """Else they would take the processors on which ranks are to start again. They return with the node."""
    now = [100.0]

    class Cluster(FakeExecutor):
        cores = 8  # type: ignore[assignment]

    def make(data: Any, config: Any, folder: Path, events: Any) -> FakeExecutor:
        return Cluster(data, folder, events)

    config = CONFIG.model_copy(update={"executor": "process", "workers": 4, "max_workers": None})
    master = Master({"days": data}, config, tmp_path, clock=lambda: now[0], make=make, reserved=4)
    alive = master.executor.alive  # type: ignore[attr-defined]

    def settle() -> int:
        now[0] += PERIOD_SECONDS
        for _ in range(20):
            master.step(timeout=0)
        return len(alive)

    assert settle() == 4
    master.executor.cores = 4  # type: ignore[misc]  # a node with two workers is lost
    for worker in (1, 2):
        master.handle(WorkerDied(worker, "its actor ended"))
    assert settle() == 1
    master.executor.cores = 8  # type: ignore[misc]
    assert settle() == 4

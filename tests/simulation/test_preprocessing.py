"""Simulated schedules of the preprocessing: no promise is broken, and one seed is one schedule."""

import datetime
import subprocess
import sys
from collections import Counter
from pathlib import Path
from unittest.mock import patch

import pytest

from pipeline.preprocessing.epoch import stream
from storage.reader import Fragment
from tests.simulation.preprocessing import FAULTS, PATIENCE, Run, play
from tests.simulation.workers import Disk, Memory, SimulatedExecutor

ROOT = Path(__file__).resolve().parents[2]
SCHEDULES = 100
"""Schedules of each part."""


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_every_row_comes_once_or_is_lost_and_counted(part: int) -> None:
    """In the order of the plan, whatever dies, hangs, fails or is damaged, and it always ends."""
    struck: Counter[str] = Counter()
    for seed in range(part * SCHEDULES, (part + 1) * SCHEDULES):
        try:
            struck += play(seed).faults
        except Exception as error:
            pytest.fail(f"{type(error).__name__}: {error}. Repeat it: python -m tests.simulation seed={seed}")
    assert struck.keys() == set(FAULTS)


def test_ranks_stay_connected_to_the_same_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With 24 workers, 8 connections and 4 ranks, groups come from 8 workers, and from one more for each that dies."""
    run = Run(seed=3, folder=tmp_path, calm=True)
    run.world.faults = {"a worker dies": (3, 0.02)}
    settings = {"workers": 24, "connections": 8, "transport": "network", "split_rows": 5, "restart_limit": 16}
    run.config = run.config.model_copy(update=settings | {"attempts": 9, "memory_bytes": 1 << 24})
    day = datetime.date(2025, 1, 1)
    fragments = [Fragment(path=f"file-{i}", row_group=0, rows=5, day=day) for i in range(200)]
    run.disk = Disk(run.world, fragments, {}, set(), 1.0)
    run.world_size, run.epochs, run.batch_rows, run.window_rows, run.checkpoint_steps = 4, 1, 5, 20, 10**6
    keepers: list[int | None] = []
    deliver = SimulatedExecutor.deliver

    def noted(self: SimulatedExecutor, memory: Memory) -> object:
        keepers.append(memory.worker)
        return deliver(self, memory)

    monkeypatch.setattr(SimulatedExecutor, "deliver", noted)
    with patch.object(stream, "GROUP_ROWS", 5):
        run.command()
        run.world.run(lambda: run.finished is not None, PATIENCE, lambda: len(run.trained))
    run.check()
    died = run.world.struck["a worker dies"]
    assert (died, len(run.trained)) == (3, 200)
    assert 8 <= len(set(keepers)) <= 8 + died
    assert len(run.service.master.pool.workers) == 24


@pytest.mark.slow
def test_the_order_is_that_of_an_undisturbed_run() -> None:
    """Unless rows were lost."""
    compared = 0
    for seed in range(60):
        found = play(seed)
        if not found.lost_rows:
            calm = play(seed, calm=True)
            assert calm.order_hash == found.order_hash
            assert not calm.faults
            assert calm.reruns <= 1  # where the memory was too small
            compared += bool(found.faults)
    assert compared > 10


@pytest.mark.slow
def test_a_seed_repeats_its_schedule() -> None:
    """In another process, too."""
    command = [sys.executable, "-m", "tests.simulation", "seed=7"]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    trace = play(7).trace
    assert len(trace) > 2
    assert printed.splitlines() == trace

"""Simulated schedules of the preprocessing: no promise is broken, and one seed is one schedule."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.simulation.preprocessing import FAULTS, play

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

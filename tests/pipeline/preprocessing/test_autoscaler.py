"""The autoscaler against simulated trainers: it soon has enough workers, not many more, and then stays there."""

from itertools import pairwise

import numpy as np
import pytest

from pipeline.preprocessing.autoscaler import PERIOD_SECONDS, QUIET_PERIODS, SPARE, Autoscaler, Period

WORKER = 10_000.0
"""Rows a second that one worker delivers."""


def period(autoscaler: Autoscaler, trainer: float, noise: float = 1.0) -> Period:
    """Simulates a period with a trainer that can take this many rows per second."""
    worker = WORKER * noise
    delivered = min(trainer, autoscaler.workers * worker) * PERIOD_SECONDS
    return Period(
        seconds=PERIOD_SECONDS,
        wait_seconds=PERIOD_SECONDS * (1.0 - delivered / PERIOD_SECONDS / trainer) if trainer else 0.0,
        rows=int(delivered),
        worked_seconds=delivered / worker,
        worked_rows=int(delivered),
        idle=trainer < autoscaler.workers * worker,
    )


@pytest.mark.parametrize("share", [0.05, 0.9, 1.5, 2.5, 3.0, 7.2, 30.0])
@pytest.mark.parametrize("begin", [1, 16])
def test_it_reaches_the_number_needed_and_stays_there(share: float, begin: int) -> None:
    """From too few and from too many workers. Their speed varies by a tenth."""
    random = np.random.default_rng(1)
    autoscaler = Autoscaler(most=16)
    autoscaler.workers = begin
    history = [autoscaler.after(period(autoscaler, share * WORKER, random.uniform(0.95, 1.05))) for _ in range(200)]
    needed = min(int(np.ceil(share)), 16)
    assert needed <= history[-1] <= max(np.ceil(needed * SPARE) + 1, 1)
    assert len(set(history[-100:])) == 1
    if begin == 1:
        assert history[2] >= min(needed, 16)  # at once, not one by one
        assert max(history) <= np.ceil(needed * 1.06) + 1
    assert all(b >= a - 1 for a, b in pairwise(history))  # down by one at a time


def test_it_follows_a_trainer_that_changes() -> None:
    autoscaler = Autoscaler(most=16)
    for trainer, needed in [(5.5, 6), (1.5, 2), (12.0, 12), (0.5, 1)]:
        for _ in range(QUIET_PERIODS * 16):
            autoscaler.after(period(autoscaler, trainer * WORKER))
        assert needed <= autoscaler.workers <= needed * SPARE + 1


def test_the_bound_holds_whatever_happens() -> None:
    random = np.random.default_rng(2)
    autoscaler = Autoscaler(most=4)
    for _ in range(1000):
        wait, rows, worked = random.uniform(0, 4), int(random.integers(0, 10**6)), random.uniform(0, 8)
        found = autoscaler.after(
            Period(2.0, wait, rows, worked, int(random.integers(0, 10**6)), bool(random.integers(2)))
        )
        assert 1 <= found <= 4


def test_without_rows_nothing_changes() -> None:
    """Before the first batch, and while the trainer does something else."""
    autoscaler = Autoscaler(most=8)
    autoscaler.workers = 5
    for _ in range(50):
        assert autoscaler.after(Period(2.0, 0.0, 0, 0.0, 0, idle=True)) == 5


def test_one_quiet_period_is_not_enough() -> None:
    autoscaler = Autoscaler(most=8)
    autoscaler.workers = 8
    for i in range(100):
        quiet = period(autoscaler, WORKER)
        quiet.idle = i % QUIET_PERIODS != 0
        assert autoscaler.after(quiet) == 8

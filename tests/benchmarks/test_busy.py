"""The figures of a busy machine, with passes that take given times."""

import pytest

from benchmarks import busy

SECONDS = {("ours", 1): (0.003, 0.004), ("ours", 2): (0.002, 0.040), (busy.CHOOSING, 2): (0.002, 0.005)}
"""Contestant and threads -> seconds of a step, idle and busy."""


def test_chosen_threads_are_compared_with_the_better_number(monkeypatch: pytest.MonkeyPatch) -> None:
    others: list[int] = []
    counting = busy.counting

    def count(number: int):
        others.append(number)
        return counting(number)

    monkeypatch.setattr(busy, "counting", count)
    monkeypatch.setattr(busy.os, "sched_getaffinity", lambda process: {0, 1})
    monkeypatch.setattr(
        busy, "run_in_processes", lambda name, shape, ranks, threads, steps: SECONDS[name, threads][others[-1] > 0]
    )
    found = busy.measure(["tiny"], rounds=3, steps=1, others=1)
    assert found["shapes"]["tiny"]["2 threads, busy, ms"] == 40.0
    assert (found["tiny_idle_cost"], found["tiny_busy_cost"]) == (1.0, 1.25)
    assert others == [0, 0, 0, 1, 1, 1] * 3

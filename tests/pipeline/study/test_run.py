"""A study tells what time is left."""

import pytest

from pipeline.study import run
from pipeline.study.run import Clock


def test_time_left_counts_the_points_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(total=4, began=0.0)
    monkeypatch.setattr(run.time, "monotonic", lambda: 120.0)
    assert clock.count(stored=True) == ""
    assert clock.count(stored=False) == "about 4 min left"  # two are left, and the one of this process took two minutes

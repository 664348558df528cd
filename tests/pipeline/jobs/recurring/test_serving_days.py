"""Which model a backtest takes to serve which day."""

import datetime
from types import SimpleNamespace
from typing import Any

import pytest

from pipeline.evaluation.policy import Policy
from pipeline.jobs.recurring.backtest_rank import BacktestRank
from pipeline.training.state.progress import LossSums

DAYS = [datetime.date(2025, 1, number) for number in range(1, 6)]


class Replay(BacktestRank):
    """A backtest of models that are only known by the number of days they were trained on."""

    def __init__(self, judged_later: bool) -> None:
        self.spec: Any = SimpleNamespace(
            first_days=DAYS[:1], days=DAYS[1:], judged_later=judged_later, policy=Policy(), rows=dict.fromkeys(DAYS, 1)
        )
        self.trained_to = self.scratch_day = DAYS[0]
        self.trained = 0
        self.trainer: Any = SimpleNamespace(learner=SimpleNamespace(export=lambda path: None))
        self.served: list[float] = []

    def train_from_scratch(self, days: Any) -> int:
        self.trained = len(days)
        return 0

    def train_incremental(self, days: Any) -> int:
        self.trained += len(days)
        return 0

    def evaluate_day(self, day: datetime.date) -> LossSums:
        return LossSums(rows=1.0, loss=float(self.trained), labels=1.0, predictions=1.0)

    def emit_day(self, day: Any, sums: LossSums | None, *rest: Any) -> None:
        self.served += [] if sums is None else [sums.loss]


@pytest.mark.parametrize(("judged_later", "served"), [(False, [1.0, 2.0, 3.0, 4.0]), (True, [1.0, 1.0, 2.0, 3.0])])
def test_a_model_serves_from_the_day_after_its_verdict(judged_later: bool, served: list[float]) -> None:
    replay = Replay(judged_later)
    replay.run()
    assert replay.served == served

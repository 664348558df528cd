"""Quality from day to day: NE of models on days they have not seen yet."""

import datetime
import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel
from scipy.special import stdtrit

from pipeline.errors import ConfigError
from pipeline.evaluation.metrics import Floats, base_entropy

FEWEST_DAYS = 5
"""With fewer days an interval says nothing."""


class DaySums(BaseModel, frozen=True):
    """Sums over the rows of a day, scored before the model is trained on them."""

    day: datetime.date
    rows: float
    loss: float
    labels: float
    predictions: float

    @property
    def ne(self) -> float | None:
        """NE of the day alone. None: its labels are all alike."""
        entropy = base_entropy(self.labels / self.rows) if self.rows else 0.0
        return self.loss / self.rows / entropy if entropy else None

    @property
    def calibration(self) -> float | None:
        """Calibration of the day alone. None: it has no positive label."""
        return self.predictions / self.labels if self.labels else None


class Interval(BaseModel, frozen=True):
    """A value and its confidence interval."""

    value: float
    low: float
    high: float


def pooled_ne(days: Sequence[DaySums], level: float = 0.05) -> Interval | None:
    """Returns the log loss over the entropy of the pooled label rate of all days, with its interval over days.

    Days are the units of resampling: rows of one day have much in common. See `gate.ne_difference` for the form.

    Args:
        level: Chance that the interval misses the true NE.
    Example:
        >>> days = [DaySums(day="2013-02-01", rows=10, loss=6, labels=5, predictions=5)] * 5
        >>> round(pooled_ne(days).value, 4)
        0.8656
    """
    return _over_days(days, np.array([day.loss for day in days]), level)


def pooled_ne_difference(ours: Sequence[DaySums], theirs: Sequence[DaySums], level: float = 0.05) -> Interval | None:
    """Returns pooled NE of one series minus that of another over the same days, with its interval.

    Raises:
        ConfigError: If the series do not cover the same days and rows.
    """
    if [(day.day, day.rows, day.labels) for day in ours] != [(day.day, day.rows, day.labels) for day in theirs]:
        raise ConfigError(
            "next-day series", "the same days and rows in both", "different ones", "Run both backtests again."
        )
    pairs = zip(ours, theirs, strict=True)
    return _over_days(ours, np.array([one.loss - other.loss for one, other in pairs]), level)


def _over_days(days: Sequence[DaySums], losses: Floats, level: float) -> Interval | None:
    rows, labels = np.array([day.rows for day in days]), np.array([day.labels for day in days])
    entropy = base_entropy(float(labels.sum() / rows.sum())) if len(days) else 0.0
    if entropy == 0.0:
        return None
    rate, mean = labels.sum() / rows.sum(), losses.sum() / rows.sum()
    value = float(mean / entropy)
    if len(days) < FEWEST_DAYS:
        return Interval(value=value, low=-math.inf, high=math.inf)
    slope = value * math.log((1.0 - rate) / rate)  # of the entropy, by the rate
    residuals = losses - rows * mean - slope * (labels - rows * rate)
    error = math.sqrt(len(days) / (len(days) - 1) * float(np.square(residuals).sum())) / float(rows.sum()) / entropy
    margin = float(stdtrit(len(days) - 1, 1.0 - level / 2.0)) * error
    return Interval(value=value, low=value - margin, high=value + margin)


def trailing(days: Sequence[DaySums], span: int) -> list[tuple[datetime.date, float, float]]:
    """Returns (day, NE, calibration) over the last `span` days, for each day. Undefined points are dropped."""
    found = []
    for i, day in enumerate(days):
        last = days[max(i - span + 1, 0) : i + 1]
        sums = DaySums(day=day.day, **{name: sum(getattr(d, name) for d in last) for name in SUMS})
        if sums.ne is not None and sums.calibration is not None:
            found.append((day.day, sums.ne, sums.calibration))
    return found


SUMS = ("rows", "loss", "labels", "predictions")


class BacktestResult(BaseModel, frozen=True):
    """Quality and cost of a retraining policy over past days."""

    name: str
    days: tuple[DaySums, ...]
    rows_trained: Mapping[datetime.date, float]
    """Day -> rows trained on that day, once per epoch. Without the first model, which all policies share."""
    seconds: float
    """Training only, without the first model."""
    trainings: Mapping[str, int]
    """Kind of training -> number of trainings."""

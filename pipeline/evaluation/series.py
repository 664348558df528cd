"""Quality from day to day: the NE of models on days that they have not seen yet."""

import datetime
import math
from collections.abc import Mapping, Sequence

import numpy as np
from pydantic import BaseModel
from scipy.special import stdtrit  # type: ignore[import-untyped]

from pipeline.errors import ConfigError
from pipeline.evaluation.metrics import Floats, base_entropy

FEWEST_DAYS = 5
"""With fewer of them an interval says nothing."""


class DaySums(BaseModel, frozen=True):
    """Sums over the rows of a day, judged before the model is trained on them."""

    day: datetime.date
    rows: float
    loss: float
    labels: float
    predictions: float

    @property
    def ne(self) -> float | None:
        """Of the day alone; None where its labels are all alike."""
        entropy = base_entropy(self.labels / self.rows) if self.rows else 0.0
        return self.loss / self.rows / entropy if entropy else None

    @property
    def calibration(self) -> float | None:
        """Of the day alone; None where no label is positive."""
        return self.predictions / self.labels if self.labels else None


class Interval(BaseModel, frozen=True):
    """A value and the interval that chance leaves it."""

    value: float
    low: float
    high: float


def pooled_ne(days: Sequence[DaySums], level: float = 0.05) -> Interval | None:
    """Log loss of the rows of all days over the entropy of their pooled rate, and its interval over days.

    Days are what differs by chance: rows of one day have much in common. See `gate.ne_difference` for the form.

    Args:
        level: Chance that the interval leaves out the truth.
    Example:
        >>> days = [DaySums(day="2013-02-01", rows=10, loss=6, labels=5, predictions=5)] * 5
        >>> round(pooled_ne(days).value, 4)
        0.8656
    """
    return _over_days(days, np.array([day.loss for day in days]), level)


def pooled_ne_difference(ours: Sequence[DaySums], theirs: Sequence[DaySums], level: float = 0.05) -> Interval | None:
    """Pooled NE of one series less that of another over the same days, and the interval of the difference.

    Raises:
        ConfigError: If they are not of the same days and rows.
    """
    if [(day.day, day.rows, day.labels) for day in ours] != [(day.day, day.rows, day.labels) for day in theirs]:
        raise ConfigError("next-day series", "the same days and rows in both", "others", "Rehearse both anew.")
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
    over = value * math.log((1.0 - rate) / rate)  # the change of the entropy with the rate
    apart = losses - rows * mean - over * (labels - rows * rate)
    error = math.sqrt(len(days) / (len(days) - 1) * float(np.square(apart).sum())) / float(rows.sum()) / entropy
    reach = float(stdtrit(len(days) - 1, 1.0 - level / 2.0)) * error
    return Interval(value=value, low=value - reach, high=value + reach)


def trailing(days: Sequence[DaySums], span: int) -> list[tuple[datetime.date, float, float]]:
    """(day, NE, calibration) of the rows of the last `span` days at each day; undefined ones are left out."""
    found = []
    for i, day in enumerate(days):
        last = days[max(i - span + 1, 0) : i + 1]
        sums = DaySums(day=day.day, **{name: sum(getattr(d, name) for d in last) for name in SUMS})
        if sums.ne is not None and sums.calibration is not None:
            found.append((day.day, sums.ne, sums.calibration))
    return found


SUMS = ("rows", "loss", "labels", "predictions")


class BacktestResult(BaseModel, frozen=True):
    """What a retraining policy has brought and what it has cost."""

    name: str
    days: tuple[DaySums, ...]
    rows_trained: Mapping[datetime.date, float]
    """Day -> rows trained on that day, once for each epoch; the first model is left out: all policies have it."""
    seconds: float
    """Training alone, the first model left out."""
    trainings: Mapping[str, int]
    """Kind -> how many."""

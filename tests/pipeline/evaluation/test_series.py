"""NE from day to day."""

import datetime
import math

import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.evaluation.series import DaySums, pooled_ne, pooled_ne_difference, trailing


def made(seed: int, count: int = 60, noise: float = 0.0) -> list[DaySums]:
    """Days of differing size, rate and model error."""
    random, found = np.random.default_rng(7), []
    errors = np.random.default_rng(seed)
    for number in range(count):
        rows, rate = int(random.integers(300, 900)), random.uniform(0.1, 0.4)
        labels = random.random(rows) < rate
        p = np.clip(rate + noise * errors.normal(0.0, 0.1), 0.02, 0.98)
        loss = -np.where(labels, math.log(p), math.log1p(-p)).sum()
        day = datetime.date(2013, 2, 1) + datetime.timedelta(number)
        found.append(DaySums(day=day, rows=rows, loss=loss, labels=labels.sum(), predictions=p * rows))
    return found


def ne_of(days: list[DaySums]) -> float:
    rows, labels = sum(d.rows for d in days), sum(d.labels for d in days)
    p = labels / rows
    return sum(d.loss for d in days) / rows / -(p * math.log(p) + (1 - p) * math.log(1 - p))


def test_the_pooled_ne_takes_all_rows_together():
    days = made(1)
    assert pooled_ne(days).value == pytest.approx(ne_of(days), rel=1e-12)
    assert days[0].ne == pytest.approx(ne_of(days[:1]))
    assert days[0].calibration == pytest.approx(days[0].predictions / days[0].labels)


def test_the_interval_is_that_of_a_bootstrap_over_days():
    days, random = made(1), np.random.default_rng(3)
    drawn = [ne_of([days[i] for i in random.integers(0, len(days), len(days))]) for _ in range(2_000)]
    low, high = np.quantile(drawn, [0.025, 0.975])
    found = pooled_ne(days)
    assert found.high - found.low == pytest.approx(high - low, rel=0.15)


def test_two_policies_are_compared_on_the_same_days():
    worse, better, random = made(2, noise=1.0), made(3), np.random.default_rng(5)
    found = pooled_ne_difference(worse, better)
    assert found.value == pytest.approx(ne_of(worse) - ne_of(better), rel=1e-9)
    picks = [random.integers(0, 60, 60) for _ in range(2_000)]
    drawn = [ne_of([worse[i] for i in pick]) - ne_of([better[i] for i in pick]) for pick in picks]
    low, high = np.quantile(drawn, [0.025, 0.975])
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.25 * (high - low))
    assert found.low > 0.0
    with pytest.raises(ConfigError, match="the same days and rows"):
        pooled_ne_difference(worse, better[1:])


def test_few_days_have_no_interval_and_equal_labels_no_ne():
    days = made(1, 4)
    assert (pooled_ne(days).low, pooled_ne(days).high) == (-math.inf, math.inf)
    alike = [DaySums(day="2013-02-01", rows=5, loss=1.0, labels=0, predictions=1.0)]
    assert (pooled_ne(alike), pooled_ne([]), alike[0].ne, alike[0].calibration) == (None, None, None, None)


def test_trailing_days_are_pooled():
    days = made(1, 5)
    points = trailing(days, 3)
    assert [day for day, _, _ in points] == [d.day for d in days]
    assert points[4][1] == pytest.approx(ne_of(days[2:]))
    assert points[0][1] == pytest.approx(ne_of(days[:1]))
    assert points[4][2] == pytest.approx(sum(d.predictions for d in days[2:]) / sum(d.labels for d in days[2:]))

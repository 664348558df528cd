"""Quality of rows, computed from sums of fixed size. An undefined metric is None with a reason, never NaN."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]

EPS = 1e-12
"""Probabilities are clipped to [EPS, 1 - EPS] for the logarithm."""
ECE_BINS = 15
"""Bins of equal width for ECE (Guo et al. 2017, arXiv:1706.04599)."""
MAX_LOG_ODDS = 28.0
"""Log-odds of all clipped probabilities lie in [-MAX_LOG_ODDS, MAX_LOG_ODDS]."""


class Quality(BaseModel, frozen=True):
    """How well probabilities fit labels. Where rows have weights, all metrics but `rows` are weighted."""

    rows: int
    label_rate: float | None
    ne: float | None
    ne_recalibrated: float | None
    """NE after one shift of all log-odds that makes the mean prediction the label rate."""
    logloss: float | None
    auc: float | None
    pr_auc: float | None
    """Average precision."""
    calibration: float | None
    """Sum of predictions / sum of labels."""
    ece: float | None
    undefined: Mapping[str, str] = {}
    """Metric -> why it is None."""


class Bin(BaseModel, frozen=True):
    """Rows of similar prediction."""

    rows: int
    predicted: float
    observed: float


def format_metric(value: float | None) -> str:
    """Formats a metric for people; undefined is a dash.

    Example:
        >>> format_metric(0.87654), format_metric(None)
        ('0.8765', '–')
    """
    return "–" if value is None else f"{value:.4f}"


def format_interval(low: float | None, high: float | None) -> str:
    """Formats the bounds of an interval as `format_metric` does."""
    return f"{format_metric(low)} to {format_metric(high)}"


def losses(labels: Floats, probabilities: Floats) -> Floats:
    """Returns the log loss of each row, float64 [N]."""
    p = np.clip(probabilities, EPS, 1.0 - EPS)
    result: Floats = -(labels * np.log(p) + (1.0 - labels) * np.log1p(-p))
    return result


def base_entropy(rate: float) -> float:
    """Returns the entropy in nats of a label that is 1 at this rate."""
    if rate in (0.0, 1.0):
        return 0.0
    return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def log_odds_bins(probabilities: Floats, count: int) -> Integers:
    """Returns the bin of each probability among `count` bins of equal width in log-odds, int64 [N]."""
    p = np.clip(probabilities, EPS, 1.0 - EPS)
    return ((np.log(p) - np.log1p(-p) + MAX_LOG_ODDS) * (count / (2.0 * MAX_LOG_ODDS))).astype(np.int64)


def quality(
    rows: int,
    weight: float,
    positives: float,
    predicted: float,
    loss: float,
    by_log_odds: Floats,
    by_width: Floats,
    broken: int = 0,
) -> Quality:
    """Computes all metrics from sums.

    Args:
        rows: Number of rows.
        weight, positives, predicted, loss: Sums by weight of rows, positive rows, probabilities and losses.
        by_log_odds: [bins, 2]: weight of rows and of positive rows. AUC and PR-AUC treat rows of a bin as ties.
        by_width: [ECE_BINS, 3]: the same and weighted predictions, by probability.
        broken: Rows without a valid probability.
    Source:
        NE: He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook", section 3.
    """
    undefined: dict[str, str] = {}
    every = ("label_rate", "ne", "ne_recalibrated", "logloss", "auc", "pr_auc", "calibration", "ece")
    if rows == 0 or broken:
        reason = f"{broken} predictions are not probabilities" if broken else "no rows"
        return Quality(rows=rows, **dict.fromkeys(every), undefined=dict.fromkeys(every, reason))
    rate, entropy = positives / weight, base_entropy(positives / weight)
    if entropy == 0.0:
        undefined |= dict.fromkeys(("ne", "ne_recalibrated", "auc", "pr_auc"), "all labels are alike")
    if rate == 0.0:
        undefined["calibration"] = "no positive label"
    return Quality(
        rows=rows,
        label_rate=rate,
        ne=loss / weight / entropy if entropy else None,
        ne_recalibrated=_recalibrated_loss(by_log_odds) / weight / entropy if entropy else None,
        logloss=loss / weight,
        auc=auc(by_log_odds) if entropy else None,
        pr_auc=average_precision(by_log_odds) if entropy else None,
        calibration=predicted / positives if rate else None,
        ece=ece(by_width),
        undefined=undefined,
    )


def auc(by_prediction: Floats) -> float:
    """Returns the chance that a positive row ranks above a negative one. Ties count half.

    Shapes:
        by_prediction: [bins, 2]: weight of rows and of positive rows, in the order of rising predictions.
    Source:
        Mann and Whitney 1947: the U statistic over midranks.
    """
    positives = by_prediction[:, 1]
    negatives = by_prediction[:, 0] - positives
    below = np.cumsum(negatives) - 0.5 * negatives
    return float((positives * below).sum() / (positives.sum() * negatives.sum()))


def average_precision(by_prediction: Floats) -> float:
    """Returns the area under precision over recall, as steps: the mean precision at the positive rows."""
    rows, hits = (np.cumsum(by_prediction[::-1, column]) for column in (0, 1))
    gained = by_prediction[::-1, 1]
    found = gained > 0.0
    return float((gained[found] * (hits[found] / rows[found])).sum() / hits[-1])


def ece(by_width: Floats) -> float:
    """Returns the expected calibration error: the mean gap between prediction and outcome over bins, by weight."""
    return float(np.abs(by_width[:, 2] - by_width[:, 1]).sum() / by_width[:, 0].sum())


def equal_bins(by_log_odds: Floats, predicted: Floats, count: int = 20) -> list[Bin]:
    """Groups rows by prediction into bins of about equal weight.

    Shapes:
        by_log_odds: [bins, 2]: weight of rows and of positive rows. predicted: [bins], weighted predictions.
    """
    rows = by_log_odds[:, 0]
    before = np.cumsum(rows) - rows
    total = rows.sum() or 1.0  # no rows
    group = np.minimum((before + 0.5 * rows) * count // total, count - 1).astype(np.int64)
    sums = [np.bincount(group, values, minlength=count) for values in (rows, by_log_odds[:, 1], predicted)]
    bins = zip(*sums, strict=True)
    return [Bin(rows=round(n), predicted=float(p / n), observed=float(y / n)) for n, y, p in bins if n]


def curves(by_prediction: Floats, points: int = 200) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """Returns (false positive rate, true positive rate) and (recall, precision) points, in the order of falling
    predictions. Both are empty where undefined."""
    rows, hits = (np.cumsum(by_prediction[::-1, column]) for column in (0, 1))
    total, positives = rows[-1], hits[-1]
    if not 0.0 < positives < total:
        return [], []
    at = np.unique(np.searchsorted(rows, np.linspace(min(1.0, total), total, points)))
    roc = [((rows[i] - hits[i]) / (total - positives), hits[i] / positives) for i in at]
    precision = [(hits[i] / positives, hits[i] / rows[i]) for i in at]
    return [(0.0, 0.0), *_plain(roc)], _plain(precision)


def _plain(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in pairs]


class Moments(NamedTuple):
    """Sums over rows, each with its weight squared. They give the variance of a weighted mean."""

    ones: float
    """Sum of squared weights."""
    positives: float
    """Sum of squared weights of positive rows."""
    values: float
    """Sum of the values."""
    of_positives: float
    """Sum of the values of positive rows."""
    squares: float
    """Sum of the squared values."""

    def spread(self, mean: float, rate: float, slope: float) -> float:
        """Returns the sum of squares of (value - mean) - slope * (label - rate), each by its squared weight."""
        values = self.squares - 2.0 * mean * self.values + mean * mean * self.ones
        products = self.of_positives - mean * self.positives - rate * self.values + mean * rate * self.ones
        labels = (1.0 - 2.0 * rate) * self.positives + rate * rate * self.ones
        return max(values - 2.0 * slope * products + slope * slope * labels, 0.0)


def ne_error(rows: int, weight: float, positives: float, loss: float, moments: Moments) -> float | None:
    """Returns the standard error of an NE with rows as independent draws. None: NE is undefined.

    Args:
        weight, positives, loss: Sums by weight of rows, positive rows and losses.
        moments: Of the losses.
    Source:
        The delta method for a ratio: NE is a mean loss over a function of the mean label.
    """
    rate = positives / weight if weight else 0.0
    entropy = base_entropy(rate)
    if entropy == 0.0 or rows < 2:
        return None
    mean = loss / weight
    slope = mean / entropy * math.log((1.0 - rate) / rate)  # of the entropy, by the rate
    return math.sqrt(moments.spread(mean, rate, slope) * rows / (rows - 1)) / weight / entropy


def _recalibrated_loss(by_log_odds: Floats) -> float:
    """Sums the losses after a shift of all log-odds that makes predictions add up to the labels.

    Rows are taken to lie in the middle of their bin.
    """
    count = len(by_log_odds)
    used = np.flatnonzero(by_log_odds[:, 0])
    middle = (used + 0.5) * (2.0 * MAX_LOG_ODDS / count) - MAX_LOG_ODDS
    rows, positives = by_log_odds[used, 0], by_log_odds[used, 1]
    low, high = -2.0 * MAX_LOG_ODDS, 2.0 * MAX_LOG_ODDS
    for _ in range(60):
        shift = 0.5 * (low + high)
        if (rows / (1.0 + np.exp(-(middle + shift)))).sum() > positives.sum():
            high = shift
        else:
            low = shift
    shifted = middle + low
    return float((rows * np.logaddexp(0.0, shifted) - positives * shifted).sum())

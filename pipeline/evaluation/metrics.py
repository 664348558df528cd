"""Quality of some rows, from sums that any number of rows fits into. Undefined is None with a reason, never NaN."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]
Counts = Integers | Floats
"""Rows, or the sums of their weights."""

EPS = 1e-12
"""Probabilities are held in [EPS, 1 - EPS] for the logarithm."""
ECE_BINS = 15
"""Bins of equal width for ECE (Guo et al. 2017, arXiv:1706.04599)."""
UNIT = 2.0**-30
"""Losses and probabilities are added up as whole numbers of this size: order and parts change no bit of a sum."""
REACH = 28.0
"""Log-odds of all probabilities lie in [-REACH, REACH]."""


class Quality(BaseModel, frozen=True):
    """How well probabilities fit labels; where rows have weights, each counts by its weight in all but `rows`."""

    rows: int
    label_rate: float | None
    ne: float | None
    ne_recalibrated: float | None
    """NE once all log-odds are shifted by the one number that makes the mean prediction the label rate."""
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


def losses(labels: Floats, probabilities: Floats) -> Floats:
    """Log loss of each row, float64 [N]."""
    p = np.clip(probabilities, EPS, 1.0 - EPS)
    result: Floats = -(labels * np.log(p) + (1.0 - labels) * np.log1p(-p))
    return result


def base_entropy(rate: float) -> float:
    """Entropy in nats of a label that is 1 at this rate."""
    if rate in (0.0, 1.0):
        return 0.0
    return -(rate * math.log(rate) + (1.0 - rate) * math.log1p(-rate))


def log_odds_bins(probabilities: Floats, count: int) -> Integers:
    """Which of `count` bins of equal width in log-odds each probability is in, int64 [N]."""
    p = np.clip(probabilities, EPS, 1.0 - EPS)
    return ((np.log(p) - np.log1p(-p) + REACH) * (count / (2.0 * REACH))).astype(np.int64)


def quality(
    rows: int,
    positives: float,
    predicted: float,
    loss: float,
    by_log_odds: Counts,
    by_width: Counts,
    broken: int = 0,
    weight: float | None = None,
) -> Quality:
    """All metrics, from sums.

    Args:
        predicted, loss: Sums of probabilities and of losses.
        by_log_odds: [bins, 2]: rows and positive rows by log-odds. AUC and PR-AUC take rows of a bin for ties.
        by_width: [ECE_BINS, 3]: rows, positive rows and units of prediction by probability.
        broken: Rows whose prediction is not a probability.
        weight: Sum of the weights of the rows, by which positives, predicted, loss and bins count them then.
    Source:
        NE: He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook", section 3.
    """
    undefined: dict[str, str] = {}
    every = ("label_rate", "ne", "ne_recalibrated", "logloss", "auc", "pr_auc", "calibration", "ece")
    if rows == 0 or broken:
        reason = f"{broken} predictions are not probabilities" if broken else "no rows"
        return Quality(rows=rows, **dict.fromkeys(every), undefined=dict.fromkeys(every, reason))
    total = rows if weight is None else weight
    rate, entropy = positives / total, base_entropy(positives / total)
    if entropy == 0.0:
        undefined |= dict.fromkeys(("ne", "ne_recalibrated", "auc", "pr_auc"), "all labels are alike")
    if rate == 0.0:
        undefined["calibration"] = "no positive label"
    return Quality(
        rows=rows,
        label_rate=rate,
        ne=loss / total / entropy if entropy else None,
        ne_recalibrated=_recalibrated_loss(by_log_odds) / total / entropy if entropy else None,
        logloss=loss / total,
        auc=auc(by_log_odds) if entropy else None,
        pr_auc=average_precision(by_log_odds) if entropy else None,
        calibration=predicted / positives if rate else None,
        ece=ece(by_width),
        undefined=undefined,
    )


def auc(by_log_odds: Counts) -> float:
    """Chance that a positive row is ranked above a negative one, ties counting half.

    Shapes:
        by_log_odds: [bins, 2]: rows and positive rows, predictions rising.
    Source:
        Mann and Whitney 1947: the U statistic over midranks.
    """
    positives = by_log_odds[:, 1].astype(np.float64)
    negatives = by_log_odds[:, 0] - positives
    below = np.cumsum(negatives) - 0.5 * negatives
    return float((positives * below).sum() / (positives.sum() * negatives.sum()))


def average_precision(by_log_odds: Counts) -> float:
    """Area under the curve of precision over recall, as steps: the mean precision at the rows that are positive."""
    rows, hits = (np.cumsum(by_log_odds[::-1, column]) for column in (0, 1))
    gained = by_log_odds[::-1, 1]
    found = gained > 0
    return float((gained[found] * (hits[found] / rows[found])).sum() / hits[-1])


def ece(by_width: Counts) -> float:
    """Expected calibration error: mean gap between prediction and outcome over bins, weighted by rows."""
    return float(np.abs(by_width[:, 2] * UNIT - by_width[:, 1]).sum() / by_width[:, 0].sum())


def equal_bins(by_log_odds: Counts, predicted: Integers, count: int = 20) -> list[Bin]:
    """Rows grouped by prediction into bins of about equally many.

    Shapes:
        by_log_odds: [bins, 2]: rows and positive rows. predicted: int64 [bins], units of prediction.
    """
    rows = by_log_odds[:, 0]
    before = np.cumsum(rows) - rows
    total = rows.sum() or 1  # weights may sum to less than 1
    group = np.minimum((before + 0.5 * rows) * count // total, count - 1).astype(np.int64)
    sums = [np.bincount(group, values, minlength=count) for values in (rows, by_log_odds[:, 1], predicted * UNIT)]
    bins = zip(*sums, strict=True)
    return [Bin(rows=round(n), predicted=float(p / n), observed=float(y / n)) for n, y, p in bins if n]


def curves(by_log_odds: Counts, points: int = 200) -> tuple[list[tuple[float, float]], list[tuple[float, float]]]:
    """(false positive rate, true positive rate) and (recall, precision), predictions falling; empty where undefined."""
    rows, hits = (np.cumsum(by_log_odds[::-1, column]) for column in (0, 1))
    total, positives = rows[-1], hits[-1]
    if not 0 < positives < total:
        return [], []
    at = np.unique(np.searchsorted(rows, np.linspace(min(1, total), total, points)))
    roc = [((rows[i] - hits[i]) / (total - positives), hits[i] / positives) for i in at]
    precision = [(hits[i] / positives, hits[i] / rows[i]) for i in at]
    return [(0.0, 0.0), *_plain(roc)], _plain(precision)


def _plain(pairs: Sequence[tuple[Any, Any]]) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in pairs]


class Moments(NamedTuple):
    """Sums of squares and products over rows, each with its weight squared: what chance makes of a weighted mean."""

    ones: float
    """Of the weights alone; without weights, the rows."""
    positives: float
    values: float
    of_positives: float
    """Of the values of positive rows."""
    squares: float
    """Of the squared values."""

    def spread(self, mean: float, rate: float, over: float) -> float:
        """Sum of squares of (value - mean) - over * (label - rate), each by its weight."""
        values = self.squares - 2.0 * mean * self.values + mean * mean * self.ones
        products = self.of_positives - mean * self.positives - rate * self.values + mean * rate * self.ones
        labels = (1.0 - 2.0 * rate) * self.positives + rate * rate * self.ones
        return max(values - 2.0 * over * products + over * over * labels, 0.0)


def weighted_ne_error(rows: int, weight: float, positives: float, loss: float, moments: Moments) -> float | None:
    """As `ne_interval_error`, of rows with weights.

    Args:
        weight, positives, loss: Weighted sums.
        moments: Of the losses.
    """
    rate = positives / weight if weight else 0.0
    entropy = base_entropy(rate)
    if entropy == 0.0 or rows < 2:
        return None
    mean, slope = loss / weight, math.log((1.0 - rate) / rate)
    spread = moments.spread(mean, rate, mean / entropy * slope)
    return math.sqrt(spread * rows / (rows - 1)) / weight / entropy


def ne_interval_error(rows: int, positives: int, loss: float, squared: float, of_positives: float) -> float | None:
    """Standard error of an NE whose rows are drawn independently; None where NE is undefined.

    Args:
        loss, squared, of_positives: Sums of losses, of their squares, and of the losses of positive rows.
    Source:
        The delta method for a ratio: NE is a mean loss over a function of the mean label.
    """
    rate = positives / rows if rows else 0.0
    entropy = base_entropy(rate)
    if entropy == 0.0 or rows < 2:
        return None
    mean, slope = loss / rows, math.log((1.0 - rate) / rate)
    over = mean / entropy * slope  # of the entropy, by the rate
    variance = squared / rows - mean * mean
    covariance = of_positives / rows - mean * rate
    spread = variance - 2.0 * over * covariance + over * over * rate * (1.0 - rate)
    return math.sqrt(max(spread, 0.0) / (rows - 1)) / entropy


def _recalibrated_loss(by_log_odds: Counts) -> float:
    """Sum of losses with all log-odds shifted so that predictions add up to the labels; rows stand in mid-bin."""
    count = len(by_log_odds)
    used = np.flatnonzero(by_log_odds[:, 0])
    middle = (used + 0.5) * (2.0 * REACH / count) - REACH
    rows, positives = by_log_odds[used, 0].astype(np.float64), by_log_odds[used, 1].astype(np.float64)
    low, high = -2.0 * REACH, 2.0 * REACH
    for _ in range(60):
        shift = 0.5 * (low + high)
        if (rows / (1.0 + np.exp(-(middle + shift)))).sum() > positives.sum():
            high = shift
        else:
            low = shift
    shifted = middle + low
    return float((rows * np.logaddexp(0.0, shifted) - positives * shifted).sum())

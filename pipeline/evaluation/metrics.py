"""NE, log loss, AUC, calibration, ECE. Undefined is None with a reason, never a huge number or NaN."""

import math
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

Floats = npt.NDArray[np.float64]

EPS = 1e-12
"""Probabilities are held in [EPS, 1 - EPS] for the logarithm."""
ECE_BINS = 15
"""Bins of equal width for ECE (Guo et al. 2017, arXiv:1706.04599)."""


class Quality(BaseModel, frozen=True):
    """How well probabilities fit labels."""

    rows: int
    label_rate: float | None
    ne: float | None
    logloss: float | None
    auc: float | None
    calibration: float | None
    """Sum of predictions / sum of labels."""
    ece: float | None
    undefined: Mapping[str, str] = {}
    """Metric -> why it is None."""


def quality(labels: npt.ArrayLike, probabilities: npt.ArrayLike) -> Quality:
    """All metrics of some rows.

    Shapes:
        labels, probabilities: [N], labels 0 or 1.
    Source:
        NE: He et al. 2014, "Practical lessons from predicting clicks on ads at Facebook", section 3.
    Example:
        >>> quality([0, 1, 1, 0], [0.5, 0.5, 0.5, 0.5]).ne
        1.0
        >>> quality([1, 1], [0.5, 0.5]).undefined["ne"]
        'all labels are alike'
    """
    y, p = np.asarray(labels, np.float64), np.asarray(probabilities, np.float64)
    if len(y) == 0:
        names = ("label_rate", "ne", "logloss", "auc", "calibration", "ece")
        return Quality(rows=0, **dict.fromkeys(names), undefined=dict.fromkeys(names, "no rows"))
    undefined: dict[str, str] = {}
    rate = float(y.mean())
    logloss = float(losses(y, p).mean())
    entropy = base_entropy(rate)
    if entropy == 0.0:
        undefined |= {"ne": "all labels are alike", "auc": "all labels are alike"}
    if rate == 0.0:
        undefined["calibration"] = "no positive label"
    return Quality(
        rows=len(y),
        label_rate=rate,
        ne=logloss / entropy if entropy else None,
        logloss=logloss,
        auc=auc(y, p) if entropy else None,
        calibration=float(p.sum() / y.sum()) if rate else None,
        ece=ece(y, p),
        undefined=undefined,
    )


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


def auc(labels: Floats, probabilities: Floats) -> float:
    """Chance that a positive row is ranked above a negative one, ties counting half; exact.

    Source:
        Mann and Whitney 1947: the U statistic over midranks.
    """
    _, inverse, counts = np.unique(probabilities, return_inverse=True, return_counts=True)
    midranks = np.cumsum(counts) - (counts - 1) / 2.0
    positives = float(labels.sum())
    negatives = len(labels) - positives
    rank_sum = float(midranks[inverse][labels == 1.0].sum())
    return (rank_sum - positives * (positives + 1.0) / 2.0) / (positives * negatives)


def ece(labels: Floats, probabilities: Floats) -> float:
    """Expected calibration error: mean gap between prediction and outcome over bins, weighted by rows."""
    return float(
        sum(bin_.rows * abs(bin_.predicted - bin_.observed) for bin_ in bins(labels, probabilities)) / len(labels)
    )


class Bin(BaseModel, frozen=True):
    """Rows of similar prediction."""

    rows: int
    predicted: float
    observed: float


def bins(labels: Floats, probabilities: Floats, equal_rows: bool = False, count: int = ECE_BINS) -> list[Bin]:
    """Rows grouped by prediction: into intervals of equal width, or of equally many rows."""
    if equal_rows:
        order = np.argsort(probabilities, kind="stable")
        index = np.empty(len(order), np.int64)
        index[order] = np.arange(len(order)) * count // len(order)
    else:
        index = np.minimum((probabilities * count).astype(np.int64), count - 1)
    rows = np.bincount(index, minlength=count)
    predicted = np.bincount(index, probabilities, minlength=count)
    observed = np.bincount(index, labels, minlength=count)
    return [
        Bin(rows=int(rows[i]), predicted=float(predicted[i] / rows[i]), observed=float(observed[i] / rows[i]))
        for i in range(count)
        if rows[i]
    ]

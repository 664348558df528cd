"""How well one column tells the label by itself. A column that tells nearly all of it is most likely a leak."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

LEAK_AUC = 0.98
"""A column that orders rows by their label with a higher AUC, by itself, counts as a leak."""
LEAK_PURITY = 0.95
"""So does one whose values alone give a higher share of the rarer label's rows."""
STRONG_AUC = 0.9
"""From this AUC on, a person should look at the column."""
MOST_ROWS = 100_000
"""Most rows that are looked at."""
FOLDS = 5
INTERVALS = 256
"""Most intervals of a column of numbers."""
FEWEST = 5
"""Rows of each label that an AUC needs."""
FEWEST_PRESENT = 20
"""Rows with a value that are enough to say that a value comes with one label only."""
CHANCE = 1e-6
"""Highest chance of that under which it is no accident."""

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Alone(NamedTuple):
    """What a column tells of the label by itself, on rows that did not teach it."""

    auc: float = 0.5
    """AUC of the order that its values give."""
    purity: float = 0.0
    """Share of the rarer label's rows that its values alone give right, less the rows that they give wrong."""
    one_sided: int | None = None
    """The label of all rows with a value, while other rows have both. None: rows with a value have both."""

    @property
    def leaks(self) -> bool:
        """Whether it tells more than a column that is known before the label does."""
        return self.auc > LEAK_AUC or self.purity > LEAK_PURITY or self.one_sided is not None

    @property
    def words(self) -> str:
        """What it tells, as the end of a sentence."""
        if self.one_sided is not None:
            return f"every row with a value has label {self.one_sided}"
        if self.auc > LEAK_AUC or self.purity <= LEAK_PURITY:
            return f"by itself it has an AUC of {self.auc:.4f}"
        return f"its values alone give {self.purity:.1%} of the rarer label"


NOTHING = Alone()
"""Of a column that was not looked at."""


def look_at_numbers(values: Floats, labels: Floats) -> Alone:
    """Looks at numbers: their order, and the label rate of their intervals, whatever the order of those.

    Shapes:
        values: float64 [N], NaN where there is none. labels: float64 [N], 0 or 1.
    """
    present = ~np.isnan(values)
    known, rows = values[present], int(present.sum())
    codes = np.full(len(values), -1, np.int64)
    if rows:
        shares = np.arange(1, min(INTERVALS, max(2, rows // 10))) / min(INTERVALS, max(2, rows // 10))
        borders = np.unique(np.quantile(known, shares, method="lower"))
        codes[present] = np.searchsorted(borders, known, side="left")
    order = _auc(known, labels[present])
    return _best(Alone(auc=max(order, 1.0 - order)), look_at_groups(codes, labels))


def look_at_groups(codes: Integers, labels: Floats) -> Alone:
    """Looks at ids: the label rate of the other folds' rows with the same id.

    Shapes:
        codes: int64 [N], -1 where there is none. labels: float64 [N].
    """
    present = codes >= 0
    return _with_presence(present, labels, _score(_rates(codes[present], labels[present]), labels[present]))


def look_at_lists(offsets: Integers, codes: Integers, labels: Floats) -> Alone:
    """Looks at lists of ids: the mean of the rates of their ids, and their lengths.

    Shapes:
        offsets: int64 [N + 1]. codes: int64 [M], ids of all lists. labels: float64 [N].
    """
    lengths = np.diff(offsets)
    row = np.repeat(np.arange(len(labels)), lengths)
    rates = _rates(codes, labels[row], _folds(len(labels))[row])
    held = lengths > 0
    means = np.bincount(row, rates, len(labels))[held] / lengths[held]
    by_items = _with_presence(held, labels, _score(means, labels[held]))
    return _best(by_items, look_at_numbers(np.where(held, lengths, np.nan).astype(np.float64), labels))


def _with_presence(present: npt.NDArray[np.bool_], labels: Floats, values: Alone) -> Alone:
    """Adds what having a value tells."""
    both = _score(_rates(present.astype(np.int64), labels), labels)
    return _best(values, both)._replace(one_sided=_one_sided(present, labels))


def _one_sided(present: npt.NDArray[np.bool_], labels: Floats) -> int | None:
    rows, hits = int(present.sum()), int(labels[present].sum())
    if rows < FEWEST_PRESENT or rows == len(labels) or 0 < hits < rows:
        return None
    rate = float(labels.mean()) if hits else 1.0 - float(labels.mean())
    return (1 if hits else 0) if 0.0 < rate < 1.0 and rows * math.log(rate) < math.log(CHANCE) else None


def _best(one: Alone, other: Alone) -> Alone:
    sided = one.one_sided if one.one_sided is not None else other.one_sided
    return Alone(max(one.auc, other.auc), max(one.purity, other.purity), sided)


def _folds(rows: int) -> Integers:
    return np.random.default_rng(0).integers(0, FOLDS, rows)


def _rates(codes: Integers, labels: Floats, folds: Integers | None = None) -> Floats:
    """Returns for each row the label rate of its code in the other folds, with one row of the mean rate added."""
    if not len(codes):
        return np.zeros(0)
    _, codes = np.unique(codes, return_inverse=True)
    cell = codes * FOLDS + (_folds(len(codes)) if folds is None else folds)
    size = (int(codes.max()) + 1) * FOLDS
    rows, hits = np.bincount(cell, minlength=size), np.bincount(cell, labels, size)
    others = [np.bincount(codes, weights) for weights in (None, labels)]
    return np.asarray((others[1][codes] - hits[cell] + labels.mean()) / (others[0][codes] - rows[cell] + 1.0))


def _score(scores: Floats, labels: Floats) -> Alone:
    """Returns AUC and purity of probabilities."""
    rarer = min(labels.sum(), len(labels) - labels.sum())
    if rarer < FEWEST:
        return NOTHING
    return Alone(_auc(scores, labels), max(0.0, 1.0 - float(((scores > 0.5) != (labels > 0.5)).sum() / rarer)))


def _auc(scores: Floats, labels: Floats) -> float:
    """Returns the share of pairs of both labels that are in order. A tie is half in order."""
    _, codes = np.unique(scores, return_inverse=True)
    hits = np.bincount(codes, labels) if len(codes) else np.zeros(0)
    rest = np.bincount(codes) - hits if len(codes) else hits
    if min(hits.sum(), rest.sum()) < FEWEST:
        return 0.5
    return float((hits * (np.cumsum(rest) - rest / 2.0)).sum() / hits.sum() / rest.sum())

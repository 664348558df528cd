"""Sums over scored rows, in memory that does not grow with the rows.

Sums of floats depend on the order in which they are added. Each portion of the rows is summed alone, and portions are
merged in the order of the data (`evaluate.OrderedMerge`): the bits do not depend on which process scored what.
"""

import datetime
import zlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.evaluation.metrics import (
    ECE_BINS,
    Floats,
    Integers,
    Moments,
    Quality,
    auc,
    average_precision,
    log_odds_bins,
    losses,
    ne_error,
    quality,
)
from pipeline.evaluation.ranked import RankedSums

FINE_BINS, COARSE_BINS = 1 << 16, 1 << 12
"""Bins of log-odds, fine ones for all rows and coarse ones for a slice. AUC and PR-AUC are exact for up to twice as
many different predictions; for more, rows whose predictions are next to each other count as equal, about 1 / bins of
all rows at most."""
MOST_VALUES = 1_000
"""Values of a slice column. A column with more of them has no slices."""
UNIT_GROUPS = 1_024
"""Groups of the gate's units, such as users. More units than this share groups."""

_NONE = -1
"""Group of rows without a unit, before they get one."""


class MemberSums:
    """Arrays of sums by member, float64 [K, ...] each."""

    def merge(self, other: Self, members: Sequence[int] | None = None) -> None:
        """Adds the sums of other rows.

        Args:
            members: The member here for each member of `other`. None: the same one.
        """
        for name, array in vars(self).items():
            added = getattr(other, name)
            if isinstance(array, RankedSums):
                array.merge(added, members)
            elif members is None:
                array += added
            else:
                array[np.array(members, np.int64)] += added[: len(members)]

    def grow(self, members: int) -> None:
        """Makes room for so many members."""
        for name, array in vars(self).items():
            if isinstance(array, RankedSums):
                continue
            more = np.zeros((members - len(array), *array.shape[1:]))
            setattr(self, name, np.concatenate([array, more]))


class MetricSums(MemberSums):
    """Sums of the predictions for K members: the values of a slice column, or all rows as the only member.

    A row without a weight has weight 1.

    Shapes:
        sums: float64 [K, 6]: rows, rows without a probability, and by weight: rows, positive rows, predictions, losses.
        moments: float64 [K, 5], of the losses (see `Moments`).
        by_log_odds: float64 [K, bins, 2]: weight of rows and of positive rows.
        by_width: float64 [K, ECE_BINS, 3]: the same and weighted predictions, by probability.
        predicted: float64 [K, bins], weighted predictions by log-odds. For all rows only.
        ranked: weight of rows and of positive rows by prediction.
    """

    def __init__(self, members: int = 1, bins: int = FINE_BINS) -> None:
        self.sums = np.zeros((members, 6))
        self.moments = np.zeros((members, 5))
        self.by_log_odds = np.zeros((members, bins, 2))
        self.by_width = np.zeros((members, ECE_BINS, 3))
        self.predicted = np.zeros((members, bins if bins == FINE_BINS else 0))
        self.ranked = RankedSums(bins)

    def add(
        self,
        labels: Floats,
        probabilities: Floats,
        members: Integers | None = None,
        weights: Floats | None = None,
    ) -> None:
        """Adds rows.

        Args:
            labels: 0 or 1, float64 [N].
            probabilities: float64 [N].
            members: int64 [N], the member of each row. None: the first for all.
            weights: float64 [N]. None: 1 for all.
        """
        at = np.zeros(len(labels), np.int64) if members is None else members
        weights = np.ones(len(labels)) if weights is None else weights
        probabilities = np.asarray(probabilities, np.float64)
        good = (probabilities >= 0.0) & (probabilities <= 1.0)  # NaN is neither
        if not good.all():
            _add(self.sums, at[~good], (0.0, 1.0))
            at, labels, probabilities, weights = at[good], labels[good], probabilities[good], weights[good]
        loss, positive, predicted = losses(labels, probabilities), weights * labels, weights * probabilities
        _add(self.sums, at, (1.0, 0.0, weights, positive, predicted, weights * loss))
        _add_moments(self.moments, at, labels, loss, weights)
        self.ranked.add(at, probabilities, weights, positive)
        count = self.by_log_odds.shape[1]
        bins = at * count + log_odds_bins(probabilities, count)
        _add(self.by_log_odds, bins, (weights, positive))
        if self.predicted.shape[1]:
            _add(self.predicted[..., None], bins, (predicted,))
        widths = np.minimum((probabilities * ECE_BINS).astype(np.int64), ECE_BINS - 1)
        _add(self.by_width, at * ECE_BINS + widths, (weights, positive, predicted))

    @property
    def rows(self) -> Integers:
        """Rows of each member, with or without a probability, int64 [K]."""
        return self.sums[:, :2].sum(axis=1).astype(np.int64)

    def quality(self, member: int = 0) -> Quality:
        """Returns all metrics of a member's rows."""
        _, broken, weight, positives, predicted, loss = self.sums[member].tolist()
        by_log_odds, by_width = self.by_log_odds[member], self.by_width[member]
        rows = int(self.rows[member])
        found = quality(rows, weight, positives, predicted, loss, by_log_odds, by_width, int(broken))
        if found.auc is None:
            return found
        ranked = self.ranked.of(member)
        return found.model_copy(update={"auc": auc(ranked), "pr_auc": average_precision(ranked)})

    def ne_error(self, member: int = 0) -> float | None:
        """Returns the standard error of a member's NE, with rows as independent draws."""
        rows, _, weight, positives, _, loss = self.sums[member].tolist()
        return ne_error(int(rows), weight, positives, loss, Moments(*self.moments[member].tolist()))


class PairedSums(MemberSums):
    """Sums of the losses of two models on the same rows, for K members and by groups of units.

    Shapes:
        rows: float64 [K].
        by_unit: float64 [K, UNIT_GROUPS, 3]: by weight, rows, positive rows and differences of the losses.
        moments: float64 [K, 5], of the differences (see `Moments`).
    """

    def __init__(self, members: int = 1) -> None:
        self.rows = np.zeros(members)
        self.by_unit = np.zeros((members, UNIT_GROUPS, 3))
        self.moments = np.zeros((members, 5))

    def add(
        self,
        labels: Floats,
        difference: Floats,
        units: Integers,
        members: Integers | None = None,
        weights: Floats | None = None,
    ) -> None:
        """Adds rows.

        Args:
            labels: 0 or 1, float64 [N].
            difference: Loss of the first model minus that of the second, float64 [N].
            units: int64 [N], each below UNIT_GROUPS.
            members, weights: As in `MetricSums.add`.
        """
        at = np.zeros(len(labels), np.int64) if members is None else members
        weights = np.ones(len(labels)) if weights is None else weights
        np.add.at(self.rows, at, 1.0)
        _add(self.by_unit, at * UNIT_GROUPS + units, (weights, weights * labels, weights * difference))
        _add_moments(self.moments, at, labels, difference, weights)


class CalibrationSums(MemberSums):
    """Sums of the labels and of two models' predictions on the same rows, by groups of units.

    Shapes:
        by_unit: float64 [UNIT_GROUPS, 3]: by weight, positive rows and the predictions of each model.
        products: float64 [3, 3]: products of each two of them, row by row, each by its squared weight.
    """

    def __init__(self) -> None:
        self.by_unit = np.zeros((UNIT_GROUPS, 3))
        self.products = np.zeros((3, 3))

    def add(
        self, labels: Floats, ours: Floats, theirs: Floats | None, units: Integers, weights: Floats | None = None
    ) -> None:
        """Adds rows.

        Args:
            labels, ours, theirs: float64 [N], probabilities of both models. theirs: None: there is one model.
            units, weights: As in `PairedSums.add`.
        """
        other = np.zeros(len(labels)) if theirs is None else theirs
        values = np.nan_to_num(np.stack([labels, ours, other], axis=1), posinf=0.0, neginf=0.0)
        values *= 1.0 if weights is None else weights[:, None]
        _add(self.by_unit, units, tuple(values.T))
        self.products += np.einsum("ni,nj->ij", values, values)  # not BLAS: its bits depend on the threads


class Members:
    """The values of a column, numbered in the order in which they appear.

    Attributes:
        codes: Value as text -> its number. None: there were too many values.
    """

    def __init__(self) -> None:
        self.codes: dict[str, int] | None = {}

    def encode(self, values: pa.Array | pa.ChunkedArray) -> Integers | None:
        """Returns the number of each row's value, int64 [N]. None: the column has too many values."""
        if self.codes is None:
            return None
        combined = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        encoded = pc.dictionary_encode(combined, null_encoding="encode")
        own = self.number(["(null)" if not value.is_valid else str(value.as_py()) for value in encoded.dictionary])
        return None if own is None else np.array(own, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]

    def number(self, names: Sequence[str]) -> list[int] | None:
        """Returns the numbers of values given as text. None: the column has too many values."""
        if self.codes is None:
            return None
        own = [self.codes.setdefault(name, len(self.codes)) for name in names]
        if len(self.codes) > MOST_VALUES:
            self.codes = None
            return None
        return own


def _add(sums: Floats, at: Integers, values: Sequence[Floats | float]) -> None:
    """Adds values to rows `at` of sums, seen as rows of its last axis. NumPy is fast where indices are flat."""
    flat, width = sums.reshape(-1), sums.shape[-1]
    for column, value in enumerate(values):
        if not (isinstance(value, float) and value == 0.0):
            np.add.at(flat, at * width + column, value)


def _add_moments(sums: Floats, at: Integers, labels: Floats, values: Floats, weights: Floats) -> None:
    """Adds rows to moments, float64 [K, 5] (see `Moments`)."""
    weight = np.square(weights)
    weighted = weight * values
    _add(sums, at, (weight, weight * labels, weighted, weighted * labels, weighted * values))


def unit_groups(values: pa.ChunkedArray) -> Integers:
    """Returns the group of each row's unit, int64 [N]. Up to UNIT_GROUPS consecutive days have one group each.

    A row without a unit, null or NaN, is a unit of its own.
    """
    encoded = pc.dictionary_encode(values.combine_chunks())
    units = encoded.dictionary.to_pylist()
    groups = np.array([_NONE if unit != unit else _group(unit) for unit in units] + [_NONE], np.int64)  # noqa: PLR0124
    found = groups[pc.fill_null(encoded.indices, len(units)).to_numpy(zero_copy_only=False)]
    alone = np.flatnonzero(found == _NONE)
    found[alone] = [_group(int(row)) for row in alone]
    return found


def _group(value: Any) -> int:
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value.toordinal() % UNIT_GROUPS
    if isinstance(value, int):  # multiplicative hashing (Knuth, volume 3, section 6.4): ids may share a stride
        return (value * 0x9E3779B97F4A7C15 % 2**64) // (2**64 // UNIT_GROUPS)
    return zlib.crc32(str(value).encode()) % UNIT_GROUPS

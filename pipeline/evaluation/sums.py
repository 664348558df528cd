"""Sums over scored rows in fixed memory. Whole numbers: rows in any order and any parts give the same bits."""

import datetime
import zlib
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import DataError
from pipeline.evaluation.metrics import (
    ECE_BINS,
    UNIT,
    Counts,
    Floats,
    Integers,
    Moments,
    Quality,
    log_odds_bins,
    losses,
    ne_interval_error,
    quality,
    weighted_ne_error,
)

FINE_BINS, COARSE_BINS = 1 << 16, 1 << 12
"""Bins of log-odds for all rows, where AUC is right to 1e-5 (4,000 rows; closer for more), and for a slice: to 1e-4."""
MOST_VALUES = 1_000
"""Values of a slice column; one with more of them is no slice column."""
COARSE, FINE = 2.0**-20, 2.0**-50
"""Units of squares; sums of either hold 8 billion rows."""
LARGE = 2.0**10
"""Unit of what is too large for them where rows have weights."""
UNIT_GROUPS = 1_024
"""Groups that the units of the gate, such as users, are put into where there are more of them."""


class Sums:
    """Arrays of sums by member, int64 [K, ...] each."""

    sums: Integers

    def merge(self, other: Self, members: Sequence[int] | None = None) -> None:
        """Takes the rows of another one in; `members` says where each of its members stands here, None: at its own."""
        at = np.arange(len(other.sums)) if members is None else np.array(members, np.int64)
        for name in vars(self):
            getattr(self, name)[at] += getattr(other, name)[: len(at)]
        self.fits()

    def of_weights(self) -> list[Integers]:
        """Sums that are never negative unless they became too large; none where rows have no weights."""
        return []

    def fits(self) -> None:
        """Refuses sums of weights that have become too large for whole numbers.

        Raises:
            DataError: If there are any.
        """
        if any((array < 0).any() for array in self.of_weights()):
            raise DataError(
                "weights of the evaluation rows", "less than 8 billion in all, losses by weight as well", "more",
                "Scale the weight column down.",
            )  # fmt: skip

    def grow(self, members: int) -> None:
        """Makes room for so many members."""
        for name, array in vars(self).items():
            more = np.zeros((members - len(array), *array.shape[1:]), np.int64)
            setattr(self, name, np.concatenate([array, more]))


class Tally(Sums):
    """Sums of the predictions for K members of a column's values (or for all rows as the only one).

    Shapes:
        sums: int64 [K, 8]: rows, positive rows, rows without a probability, units of prediction, of loss and of the
        loss of positive rows, and squared losses as two numbers (see `squares`).
        by_log_odds: int64 [K, bins, 2]: rows, positive rows. by_width: int64 [K, ECE_BINS, 3]: these, and units of
        prediction. predicted: int64 [K, bins], kept for all rows alone.
        Where rows have weights, all sums and bins but the counts of rows are of units times weight, bins count units
        of weight, and there are also weights: int64 [K, 2], units of weight of rows and of positive rows, and moments:
        int64 [K, 5, 3] (see `Moments`), each as three numbers (see `limbs`). Products are rounded to 2^-30.
    """

    def __init__(self, members: int = 1, bins: int = FINE_BINS, weighted: bool = False) -> None:
        self.sums = np.zeros((members, 8), np.int64)
        self.weights = np.zeros((members, 2 if weighted else 0), np.int64)
        self.moments = np.zeros((members, 5 if weighted else 0, 3), np.int64)
        self.by_log_odds = np.zeros((members, bins, 2), np.int64)
        self.by_width = np.zeros((members, ECE_BINS, 3), np.int64)
        self.predicted = np.zeros((members, bins if bins == FINE_BINS else 0), np.int64)

    @property
    def weighted(self) -> bool:
        """Whether rows have weights."""
        return self.weights.shape[1] > 0

    def of_weights(self) -> list[Integers]:
        return [self.sums, self.weights] if self.weighted else []

    def add(
        self,
        labels: Floats,
        probabilities: Floats,
        members: Integers | None = None,
        weights: Floats | None = None,
    ) -> None:
        """Takes rows in.

        Args:
            labels: 0 or 1, float64 [N].
            probabilities: float64 [N].
            members: int64 [N]: what each row belongs to. None: all to the first.
            weights: float64 [N], where rows have weights.
        """
        at = np.zeros(len(labels), np.int64) if members is None else members
        probabilities = np.asarray(probabilities, np.float64)
        good = (probabilities >= 0.0) & (probabilities <= 1.0)  # NaN is neither
        if not good.all():
            _add(self.sums, at[~good], (0, 0, 1))
            at, labels, probabilities = at[good], labels[good], probabilities[good]
            weights = None if weights is None else weights[good]
        positive = labels.astype(np.int64)
        loss = losses(labels, probabilities)
        if weights is not None:
            self._add_weighted(at, positive, probabilities, loss, weights)
            return
        units, predicted = in_units(loss), in_units(probabilities)
        _add(self.sums, at, (1, positive, 0, predicted, units, units * positive, *squares(loss)))
        self._add_binned(at, probabilities, 1, positive, predicted)

    def _add_weighted(
        self, at: Integers, positive: Integers, probabilities: Floats, loss: Floats, weights: Floats
    ) -> None:
        units, predicted, weight = in_units(loss * weights), in_units(probabilities * weights), in_units(weights)
        _add(self.sums, at, (1, positive, 0, predicted, units, units * positive))
        _add(self.weights, at, (weight, weight * positive))
        add_moments(self.moments, at, positive, loss, weights)
        self._add_binned(at, probabilities, weight, weight * positive, predicted)
        self.fits()

    def _add_binned(
        self, at: Integers, probabilities: Floats, ones: Integers | int, positive: Integers, predicted: Integers
    ) -> None:
        count = self.by_log_odds.shape[1]
        bins = at * count + log_odds_bins(probabilities, count)
        _add(self.by_log_odds, bins, (ones, positive))
        if self.predicted.shape[1]:
            _add(self.predicted[..., None], bins, (predicted,))
        widths = np.minimum((probabilities * ECE_BINS).astype(np.int64), ECE_BINS - 1)
        _add(self.by_width, at * ECE_BINS + widths, (ones, positive, predicted))

    def quality(self, member: int = 0) -> Quality:
        """All metrics of a member's rows."""
        rows, positives, broken, predicted, loss, *_ = self.sums[member].tolist()
        by_width: Counts = self.by_width[member]
        weight = None
        if self.weighted:
            weight, positives = (float(value) * UNIT for value in self.weights[member])
            by_width = by_width * np.array([UNIT, UNIT, 1.0])
        return quality(
            rows + broken, positives, predicted * UNIT, loss * UNIT, self.binned(member), by_width, broken, weight
        )

    def binned(self, member: int = 0) -> Counts:
        """[bins, 2]: rows and positive rows by log-odds; where rows have weights, the sums of these."""
        return self.by_log_odds[member] * UNIT if self.weighted else self.by_log_odds[member]

    def ne_error(self, member: int = 0) -> float | None:
        """Standard error of a member's NE, rows taken as independent."""
        rows, positives, _, _, loss, of_positives, *squared = self.sums[member].tolist()
        if self.weighted:
            weight, positives = (float(value) * UNIT for value in self.weights[member])
            return weighted_ne_error(rows, weight, positives, loss * UNIT, moments_of(self.moments[member]))
        return ne_interval_error(rows, positives, loss * UNIT, sum_of_squares(*squared), of_positives * UNIT)


class Pairs(Sums):
    """Sums of the losses of two models on the same rows, for K members and by groups of units.

    Shapes:
        sums: int64 [K, 3]: units of the difference of the losses where the label is 1, and the squares of all
        differences as two numbers (see `squares`).
        by_unit: int64 [K, UNIT_GROUPS, 3]: rows, positive rows and units of the difference of the losses.
        Where rows have weights, these are units of weight, the difference times the weight, and there are also
        counts: int64 [K, 1], the rows, and moments: int64 [K, 5, 3] of the difference, as in `Tally`.
    """

    def __init__(self, members: int = 1, weighted: bool = False) -> None:
        self.sums = np.zeros((members, 3), np.int64)
        self.by_unit = np.zeros((members, UNIT_GROUPS, 3), np.int64)
        self.counts = np.zeros((members, 1 if weighted else 0), np.int64)
        self.moments = np.zeros((members, 5 if weighted else 0, 3), np.int64)

    @property
    def weighted(self) -> bool:
        """Whether rows have weights."""
        return self.counts.shape[1] > 0

    def of_weights(self) -> list[Integers]:
        return [self.by_unit[..., :2]] if self.weighted else []

    def add(
        self,
        labels: Floats,
        apart: Floats,
        units: Integers,
        members: Integers | None = None,
        weights: Floats | None = None,
    ) -> None:
        """Takes rows in.

        Args:
            labels: 0 or 1, float64 [N].
            apart: Loss of the one model less that of the other, float64 [N].
            units: int64 [N], each below UNIT_GROUPS.
            members, weights: As of `Tally.add`.
        """
        at = np.zeros(len(labels), np.int64) if members is None else members
        if weights is not None:
            positive, weight = labels.astype(np.int64), in_units(weights)
            values = (weight, weight * positive, in_units(apart * weights))
            _add(self.by_unit, at * UNIT_GROUPS + units, values)
            _add(self.counts, at, (1,))
            add_moments(self.moments, at, positive, apart, weights)
            self.fits()
            return
        positive, difference = labels.astype(np.int64), in_units(apart)
        _add(self.sums, at, (difference * positive, *squares(apart)))
        _add(self.by_unit, at * UNIT_GROUPS + units, (1, positive, difference))


class Members:
    """The values of a column, numbered as they come.

    Attributes:
        codes: Value as text -> its number; None once there were too many.
    """

    def __init__(self) -> None:
        self.codes: dict[str, int] | None = {}

    def number(self, values: pa.Array | pa.ChunkedArray) -> Integers | None:
        """The number of each row's value, int64 [N]; None where the column has too many."""
        if self.codes is None:
            return None
        combined = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        encoded = pc.dictionary_encode(combined, null_encoding="encode")
        own = self.numbered(["(null)" if not value.is_valid else str(value.as_py()) for value in encoded.dictionary])
        return None if own is None else np.array(own, np.int64)[encoded.indices.to_numpy(zero_copy_only=False)]

    def numbered(self, names: Sequence[str]) -> list[int] | None:
        """The numbers of values given as text; None where they are too many."""
        if self.codes is None:
            return None
        own = [self.codes.setdefault(name, len(self.codes)) for name in names]
        if len(self.codes) > MOST_VALUES:
            self.codes = None
            return None
        return own


def _add(sums: Integers, at: Integers, values: Sequence[Integers | int]) -> None:
    """Adds to rows `at` of sums, seen as rows of its last axis; NumPy is fast where indices are flat."""
    flat, width = sums.reshape(-1), sums.shape[-1]
    for column, value in enumerate(values):
        if not (isinstance(value, int) and value == 0):
            np.add.at(flat, at * width + column, value)


def in_units(values: Floats) -> Integers:
    """Whole numbers of UNIT."""
    result: Integers = np.rint(values * (1.0 / UNIT)).astype(np.int64)
    return result


def squares(values: Floats) -> tuple[Integers, Integers]:
    """Squares as whole numbers of COARSE and, for the rest, of FINE: models that hardly differ have tiny squares."""
    return _parts(np.square(values))


def _parts(values: Floats) -> tuple[Integers, Integers]:
    coarse = np.floor(values / COARSE)
    return coarse.astype(np.int64), np.rint((values - coarse * COARSE) / FINE).astype(np.int64)


def sum_of_squares(coarse: int, fine: int) -> float:
    """What sums of `squares` stand for."""
    return coarse * COARSE + fine * FINE


def limbs(values: Floats) -> tuple[Integers, Integers, Integers]:
    """Numbers of any size as whole numbers of 2^10, COARSE and FINE, so that sums of all three have room."""
    large = np.floor(values / LARGE)
    return (large.astype(np.int64), *_parts(values - large * LARGE))


def add_moments(sums: Integers, at: Integers, positive: Integers, values: Floats, weights: Floats) -> None:
    """Adds rows to moments, int64 [K, 5, 3]; see `Moments`."""
    weight, weighted = np.square(weights), np.square(weights) * values
    products = (weight, weight * positive, weighted, weighted * positive, weighted * values)
    for number, product in enumerate(products):
        _add(sums, at * len(products) + number, limbs(product))


def moments_of(sums: Integers) -> Moments:
    """What sums of `limbs`, int64 [5, 3], stand for."""
    return Moments(*(large * LARGE + sum_of_squares(coarse, fine) for large, coarse, fine in sums.tolist()))


def unit_groups(values: pa.ChunkedArray) -> Integers:
    """The group of each row's unit, int64 [N]; up to UNIT_GROUPS days in a row have one each."""
    encoded = pc.dictionary_encode(values.combine_chunks(), null_encoding="encode")
    groups = np.array([_group(value.as_py()) for value in encoded.dictionary], np.int64)
    return groups[encoded.indices.to_numpy(zero_copy_only=False)] if len(groups) else np.empty(0, np.int64)


def _group(value: Any) -> int:
    if isinstance(value, datetime.date) and not isinstance(value, datetime.datetime):
        return value.toordinal() % UNIT_GROUPS
    if isinstance(value, int):  # multiplicative hashing (Knuth, volume 3, section 6.4): ids may share a stride
        return (value * 0x9E3779B97F4A7C15 % 2**64) // (2**64 // UNIT_GROUPS)
    return zlib.crc32(str(value).encode()) % UNIT_GROUPS

"""Rows by their prediction, for metrics that look at its rank alone, in memory that does not grow with the rows."""

from collections.abc import Sequence
from typing import Self

import numpy as np
import numpy.typing as npt

from pipeline.evaluation.metrics import Floats, Integers
from storage.compiled import compiled

HALF = np.float64(0.5).view(np.int64)
LEVELS = 63


class RankedSums:
    """Weight of rows and of positive rows by prediction, for K members.

    Each prediction has a cell of its own. If a member has more than 2 * `most` of them, neighbours are joined whose
    weight is about 1 / `most` of the member's at most, wherever they are: predictions may all be close to each other.

    Args:
        most: Most cells of a member after neighbours are joined.
    Attributes:
        cells: int64 [M, 3], member, start and level in rising order. A cell holds the keys (see `rank_keys`) of a
            member from its start on, 2 ** level of them. Cells of a member do not overlap.
        sums: float64 [M, 2], weight of rows and of positive rows.
    Example:
        >>> ranked = RankedSums(100)
        >>> ranked.add(np.zeros(3, np.int64), np.array([0.3, 0.1, 0.3]), np.ones(3), np.array([0.0, 0.0, 1.0]))
        >>> ranked.of(0).tolist()
        [[1.0, 0.0], [2.0, 1.0]]
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.cells, self.sums = np.zeros((0, 3), np.int64), np.zeros((0, 2))

    def add(self, members: Integers, probabilities: Floats, weights: Floats, positive: Floats) -> None:
        """Adds rows.

        Args:
            members: int64 [N].
            probabilities: float64 [N], within [0, 1].
            weights, positive: float64 [N], weight of each row, and the same of positive rows.
        """
        keys = rank_keys(probabilities)
        order = np.lexsort((keys, members))
        cells = np.stack([members, keys, np.zeros(len(keys), np.int64)], axis=1)
        self._join(cells[order], np.stack([weights, positive], axis=1)[order])

    def merge(self, other: Self, members: Sequence[int] | None = None) -> None:
        """Adds the rows of another one. `members`: the member here for each member there. None: the same one."""
        cells, sums = other.cells, other.sums
        if members is not None:
            cells = cells.copy()
            cells[:, 0] = np.array(members, np.int64)[cells[:, 0]]
            order = np.argsort(cells[:, 0], kind="stable")
            cells, sums = cells[order], sums[order]
        self._join(cells, sums)

    def of(self, member: int) -> Floats:
        """Returns weight of rows and of positive rows of a member's cells, float64 [n, 2], by rising prediction."""
        first, end = np.searchsorted(self.cells[:, 0], [member, member + 1])
        return self.sums[first:end]

    def _join(self, cells: Integers, sums: Floats) -> None:
        rows = len(self.cells) + len(cells)
        made, values = np.empty((rows, 3), np.int64), np.empty((rows, 2))
        count = _merge(self.cells, self.sums, cells, sums, made, values)
        if count > 2 * self.most:
            count = _shrink(made, values, count, self.most)
        self.cells, self.sums = made[:count].copy(), values[:count].copy()


def rank_keys(probabilities: Floats) -> Integers:
    """Returns int64 [N] in the order of the probabilities, equal for equal ones alone.

    They are as fine near 1 as near 0, because both p and 1 - p are exact on their side of one half.

    Example:
        >>> rank_keys(np.array([0.0, 0.25, 0.5, 0.75])).tolist() == [-HALF, -(2**52), 0, 2**52]
        True
    """
    low = probabilities <= 0.5
    sides = np.where(low, probabilities, 1.0 - probabilities) + 0.0  # -0 becomes 0
    found: npt.NDArray[np.int64] = np.where(low, sides.view(np.int64) - HALF, HALF - sides.view(np.int64))
    return found


@compiled
def _merge(cells: Integers, sums: Floats, others: Integers, their: Floats, made: Integers, values: Floats) -> int:
    """Merges two sorted lists of cells. Cells inside another one, and equal ones, are added to it. Returns how many."""
    i, j, count, last = 0, 0, 0, 0
    while i < len(cells) or j < len(others):
        own = j == len(others)
        if i < len(cells) and not own:
            own = cells[i, 2] >= others[j, 2]
            for part in range(1, -1, -1):
                if cells[i, part] != others[j, part]:
                    own = cells[i, part] < others[j, part]
        if own:
            member, start, level, weight, positive = cells[i, 0], cells[i, 1], cells[i, 2], sums[i, 0], sums[i, 1]
            i += 1
        else:
            member, start, level, weight, positive = others[j, 0], others[j, 1], others[j, 2], their[j, 0], their[j, 1]
            j += 1
        if count and made[count - 1, 0] == member and start <= last:
            values[count - 1, 0] += weight
            values[count - 1, 1] += positive
            continue
        made[count, 0], made[count, 1], made[count, 2] = member, start, level
        values[count, 0], values[count, 1] = weight, positive
        last = start + ((1 << level) - 1)
        count += 1
    return count


@compiled
def _shrink(cells: Integers, sums: Floats, count: int, most: int) -> int:
    """Joins neighbours of members with more than 2 * most cells. Returns how many cells there are then."""
    kept, first = 0, 0
    while first < count:
        end, total = first, 0.0
        while end < count and cells[end, 0] == cells[first, 0]:
            total += sums[end, 0]
            end += 1
        left, heaviest = end - first, 2.0 * total / most
        while end - first > 2 * most and left > most:
            left = _join_neighbours(cells, sums, first, first + left, heaviest)
            heaviest *= 2.0
        for place in range(first, first + left):
            _move(cells, sums, place, kept)
            kept += 1
        first = end
    return kept


@compiled
def _join_neighbours(cells: Integers, sums: Floats, first: int, end: int, heaviest: float) -> int:
    """Joins the cells of each larger cell that is not heavier than this, from the smallest on. Returns the rest."""
    for level in range(1, LEVELS):
        kept, place = first, first
        while place < end:
            parent, begin, weight, smaller = cells[place, 1] >> level, place, 0.0, True
            while place < end and cells[place, 1] >> level == parent:
                weight += sums[place, 0]
                smaller = smaller and cells[place, 2] < level
                place += 1
            joined = smaller and place - begin > 1 and weight <= heaviest
            for inner in range(begin, place):
                if joined and inner > begin:
                    sums[kept - 1, 0] += sums[inner, 0]
                    sums[kept - 1, 1] += sums[inner, 1]
                    continue
                _move(cells, sums, inner, kept)
                kept += 1
            if joined:
                cells[kept - 1, 1], cells[kept - 1, 2] = parent << level, level
        end = kept
    return end - first


@compiled
def _move(cells: Integers, sums: Floats, place: int, to: int) -> None:
    for part in range(3):
        cells[to, part] = cells[place, part]
    for part in range(2):
        sums[to, part] = sums[place, part]

"""Cuts a snapshot into ordered units of work, as a function of snapshot, seed and epoch alone."""

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from storage.reader import Fragment


class Split(BaseModel, frozen=True):
    """A work unit: row groups that are read, transformed and, if need be, quarantined together."""

    fragments: tuple[Fragment, ...]

    @property
    def rows(self) -> int:
        """Stored rows, before any filter."""
        return sum(fragment.rows for fragment in self.fragments)

    def __str__(self) -> str:
        first, last = self.fragments[0], self.fragments[-1]
        text = f"row group {first.row_group} of file '{first.path}'"
        return text if first == last else f"{text} to row group {last.row_group} of file '{last.path}'"


class Blocks(Sequence[list[Split]]):
    """The blocks of an epoch in order. A block's splits are made when it is asked for, because an epoch may be long.

    Args:
        order: Position of each row group among the fragments.
        starts: First of each block's row groups in that order.
        split_rows: See `cut_epoch`.
    """

    def __init__(
        self, fragments: Sequence[Fragment], order: npt.NDArray[np.int64], starts: Sequence[int], split_rows: int
    ) -> None:
        self.fragments, self.order, self.split_rows = fragments, order, split_rows
        self.starts = np.array([*starts, len(order)])
        self.last: tuple[int, list[Split]] = (-1, [])

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, number: Any) -> Any:
        if isinstance(number, slice):
            return [self[i] for i in range(len(self))[number]]
        number = range(len(self))[number]
        if self.last[0] != number:
            chosen = [self.fragments[i] for i in self.order[self.starts[number] : self.starts[number + 1]]]
            self.last = number, [Split(fragments=tuple(group)) for group in _group_fragments(chosen, self.split_rows)]
        return self.last[1]


def cut_epoch(
    fragments: Sequence[Fragment], seed: int, epoch: int, window_rows: int | None, split_rows: int
) -> Sequence[list[Split]]:
    """Cuts an epoch into ordered shuffle blocks, and each block into splits.

    Every epoch permutes all row groups differently. Rows are shuffled inside a block, which bounds both the memory
    and the reach of the shuffle.

    Args:
        window_rows: Minimum rows of a block (the last may have fewer). None keeps the order of the table.
        split_rows: Row groups of a block are read together up to this many rows. A larger one is read alone.
    """
    if not fragments:
        return []
    if window_rows is None:  # a split is a block
        sizes = [len(group) for group in _group_fragments(fragments, split_rows)]
        return Blocks(fragments, np.arange(len(fragments)), list(accumulate(sizes[:-1], initial=0)), split_rows)
    order = make_generator(seed, epoch, 0).permutation(len(fragments))
    starts: list[int] = []
    rows = window_rows
    for place, i in enumerate(order):
        if rows >= window_rows:
            starts.append(place)
            rows = 0
        rows += fragments[i].rows
    return Blocks(fragments, order, starts, split_rows)


def _group_fragments(fragments: Sequence[Fragment], split_rows: int) -> list[list[Fragment]]:
    groups: list[list[Fragment]] = []
    rows = 0
    for fragment in fragments:
        if not groups or rows + fragment.rows > split_rows:
            groups.append([])
            rows = 0
        groups[-1].append(fragment)
        rows += fragment.rows
    return groups


def permute_rows(seed: int, epoch: int, block: int, rows: int) -> npt.NDArray[np.int64]:
    """Returns the order of the rows of a block."""
    return make_generator(seed, epoch, block + 1).permutation(rows)


def permute_sessions(seed: int, epoch: int, block: int, sessions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns an order of the rows of a block that permutes whole sessions. Rows of one keep their order.

    Args:
        sessions: Session of each row, int64 [N]. Neighbouring rows with equal values are one session.
    """
    borders = np.flatnonzero(np.diff(sessions, prepend=~sessions[:1])) if len(sessions) else np.empty(0, np.int64)
    order = permute_rows(seed, epoch, block, len(borders))
    lengths = np.diff(borders, append=len(sessions))[order]
    before = np.cumsum(lengths) - lengths
    return np.repeat(borders[order] - before, lengths) + np.arange(len(sessions))


def make_generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """Returns counter-based random numbers. Any part of the order can be computed without the parts before it."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, stream])))

"""Cuts a snapshot into ordered units of work, as a function of snapshot, seed and epoch alone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from storage.reader import Fragment


class Split(BaseModel, frozen=True):
    """Row groups that are read, transformed and, if need be, quarantined together."""

    fragments: tuple[Fragment, ...]

    @property
    def rows(self) -> int:
        """Stored rows, before any filter."""
        return sum(fragment.rows for fragment in self.fragments)

    def __str__(self) -> str:
        first, last = self.fragments[0], self.fragments[-1]
        text = f"row group {first.row_group} of file '{first.path}'"
        return text if first == last else f"{text} to row group {last.row_group} of file '{last.path}'"


def cut_epoch(
    fragments: Sequence[Fragment], seed: int, epoch: int, window_rows: int | None, split_rows: int
) -> list[list[Split]]:
    """Cuts an epoch into ordered windows, and each window into splits.

    Every epoch permutes all row groups differently. Rows are shuffled inside a window, which bounds both the memory
    and the reach of the shuffle.

    Args:
        window_rows: Minimum rows of a window (the last may have fewer). None keeps the order of the table.
        split_rows: Row groups of a window are read together up to this many rows. A larger one is read alone.
    """
    if window_rows is None:
        return [[split] for split in _group_fragments(fragments, split_rows)]
    order = make_generator(seed, epoch, 0).permutation(len(fragments))
    windows: list[list[Fragment]] = []
    rows = window_rows
    for i in order:
        if rows >= window_rows:
            windows.append([])
            rows = 0
        windows[-1].append(fragments[i])
        rows += fragments[i].rows
    return [_group_fragments(window, split_rows) for window in windows]


def _group_fragments(fragments: Sequence[Fragment], split_rows: int) -> list[Split]:
    groups: list[list[Fragment]] = []
    rows = 0
    for fragment in fragments:
        if not groups or rows + fragment.rows > split_rows:
            groups.append([])
            rows = 0
        groups[-1].append(fragment)
        rows += fragment.rows
    return [Split(fragments=tuple(group)) for group in groups]


def permute_rows(seed: int, epoch: int, window: int, rows: int) -> npt.NDArray[np.int64]:
    """Returns the order of the rows of a window."""
    return make_generator(seed, epoch, window + 1).permutation(rows)


def permute_sessions(seed: int, epoch: int, window: int, sessions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns an order of the rows of a window that permutes whole sessions. Rows of one keep their order.

    Args:
        sessions: Session of each row, int64 [N]. Neighbouring rows with equal values are one session.
    """
    borders = np.flatnonzero(np.diff(sessions, prepend=~sessions[:1])) if len(sessions) else np.empty(0, np.int64)
    order = permute_rows(seed, epoch, window, len(borders))
    lengths = np.diff(borders, append=len(sessions))[order]
    before = np.cumsum(lengths) - lengths
    return np.repeat(borders[order] - before, lengths) + np.arange(len(sessions))


def make_generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """Returns counter-based random numbers. Any part of the order can be computed without the parts before it."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, stream])))

"""A snapshot cut into ordered units of work: a function of snapshot, seed and epoch alone."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel

from storage.reader import Fragment


class Split(BaseModel, frozen=True):
    """Row groups that are read, transformed and, if it comes to that, lost together."""

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
    """The epoch in order: windows, each cut into splits.

    Row groups are permuted over the whole epoch, for every epoch anew; rows are shuffled inside a window,
    so it bounds both the memory and the reach of the shuffle.

    Args:
        window_rows: Rows of a window at least (the last may have fewer); None keeps the order of the table.
        split_rows: Row groups of a window are read together up to this many rows; a larger one is read alone.
    """
    if window_rows is None:
        return [[split] for split in _splits(fragments, split_rows)]
    order = make_generator(seed, epoch, 0).permutation(len(fragments))
    windows: list[list[Fragment]] = []
    held = window_rows
    for i in order:
        if held >= window_rows:
            windows.append([])
            held = 0
        windows[-1].append(fragments[i])
        held += fragments[i].rows
    return [_splits(window, split_rows) for window in windows]


def _splits(fragments: Sequence[Fragment], split_rows: int) -> list[Split]:
    groups: list[list[Fragment]] = []
    held = 0
    for fragment in fragments:
        if not groups or held + fragment.rows > split_rows:
            groups.append([])
            held = 0
        groups[-1].append(fragment)
        held += fragment.rows
    return [Split(fragments=tuple(group)) for group in groups]


def permute_rows(seed: int, epoch: int, window: int, rows: int) -> npt.NDArray[np.int64]:
    """Order of the rows of a window."""
    return make_generator(seed, epoch, window + 1).permutation(rows)


def permute_sessions(seed: int, epoch: int, window: int, sessions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Order of the rows of a window in which sessions change places as a whole: rows of one stay together, in order.

    Args:
        sessions: Session of each row, int64 [N]; neighbouring rows with equal values are one.
    """
    borders = np.flatnonzero(np.diff(sessions, prepend=~sessions[:1])) if len(sessions) else np.empty(0, np.int64)
    order = permute_rows(seed, epoch, window, len(borders))
    lengths = np.diff(borders, append=len(sessions))[order]
    before = np.cumsum(lengths) - lengths
    return np.repeat(borders[order] - before, lengths) + np.arange(len(sessions))


def make_generator(seed: int, epoch: int, stream: int) -> np.random.Generator:
    """Counter-based random numbers: any part of the order can be made without what precedes it."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, epoch, stream])))

"""The numba loops that concatenate the features of a chunk and scatter its rows into batches."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.transforms.kernels.hashing import Ids
from storage.compiled import compiled, prefetch

ZERO, ONE, FOUR = np.uint64(0), np.uint64(1), np.uint64(4)
"""Unsigned numbers for indices. Numba checks a signed index for being negative unless it sees that it cannot be."""
PREFETCH_LISTS, LINE = np.uint64(16), np.uint64(16)
"""Lists between the prefetch of a list and its copy, and ids of 32 bits in a cache line."""


@compiled
def append_lists(
    values: Ids, offsets: Ids, out: npt.NDArray[Any], starts: npt.NDArray[Any], first: int, at: int
) -> int:
    """Copies the lists of a feature to `out[at:]` and their first positions to `starts[first:]`.

    Returns:
        The position in `out` after the last list.
    """
    shift, end = at - offsets[0], at + offsets[-1] - offsets[0]
    begins, source, target = starts[first : first + len(offsets) - 1], values[offsets[0] : offsets[-1]], out[at:end]
    for i in range(len(begins)):
        begins[i] = offsets[i] + shift
    for j in range(len(target)):  # from 0: the compiler then sees that no index is negative, and takes vectors
        target[j] = source[j]
    return end


@compiled
def write_starts(lengths: npt.NDArray[Any], starts: npt.NDArray[Any], first: int, at: int) -> None:
    """Writes the first positions of lists of some lengths to `starts[first:]`, if the first list begins at `at`."""
    begins = starts[first : first + len(lengths)]
    for i in range(len(begins)):
        begins[i] = at
        at += lengths[i]


@compiled
def scatter_lengths(
    rows: Ids, slots: Ids, strides: Ids, starts: npt.NDArray[Any], features: Ids, out: npt.NDArray[np.int32]
) -> None:
    """Writes the lengths of the lists of some rows of a chunk to `out[slots + f * strides]`.

    Args:
        features: Number f of each feature of the chunk.
        out: Lengths of all batches.
    """
    if len(features) == 0:
        return
    count = (len(starts) - 1) // len(features)
    for i in range(len(features)):
        for j in range(len(rows)):
            at = i * count + rows[j]
            out[slots[j] + features[i] * strides[j]] = starts[at + 1] - starts[at]


@compiled
def scatter_ids(
    rows: Ids,
    slots: Ids,
    strides: Ids,
    starts: npt.NDArray[Any],
    ids: npt.NDArray[Any],
    base: int,
    feature: int,
    out_starts: Ids,
    out: Ids,
) -> None:
    """Copies the ids of lists of one feature to their places among the values of all batches.

    Copies four ids at a time. The last four may overlap the four before, because a loop over a short rest costs branch
    mispredictions. Indices are unsigned: checks for negative ones took about a third of the time. Lists are short and
    lie anywhere, so the loop asks for a coming one, of whose ids 16 to 32 are in two cache lines, and for its place.

    Args:
        base: Index in `starts` of the feature's first list.
    """
    final = np.uint64(len(rows)) - ONE
    for j in range(np.uint64(len(rows))):
        coming = min(j + PREFETCH_LISTS, final)
        begin = np.uint64(starts[np.uint64(base + rows[coming])])
        prefetch(ids, begin)
        prefetch(ids, begin + LINE)
        prefetch(out, out_starts[np.uint64(slots[coming] + feature * strides[coming])])
        at = np.uint64(base + rows[j])
        first, count = np.uint64(starts[at]), np.uint64(starts[at + ONE] - starts[at])
        target = np.uint64(out_starts[np.uint64(slots[j] + feature * strides[j])])
        if count < FOUR:
            for i in range(count):
                out[target + i] = ids[first + i]
            continue
        k: Any = ZERO
        while k < count:
            k = min(k, count - FOUR)
            for i in range(FOUR):
                out[target + k + i] = ids[first + k + i]
            k += FOUR


@compiled
def scatter_rows(
    rows: Ids,
    places: Ids,
    dense: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    dense_out: npt.NDArray[np.float32],
    labels_out: npt.NDArray[np.float32],
) -> None:
    """Copies the dense values and labels of some rows of a chunk to their places among the rows of all batches."""
    for j in range(len(rows)):
        labels_out[places[j]] = labels[rows[j]]
        for d in range(dense.shape[1]):
            dense_out[places[j], d] = dense[rows[j], d]


@compiled
def number_bags(source: Ids, shares: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """Numbers the bags of each share. Consecutive rows of one run share a bag.

    Args:
        source: int64 [R], run of each row of all shares.
        shares: int64 [S, 2], first row and number of rows of each share.
    Returns:
        (number of the row's bag within its share, int64 [R]; whether the row is the first of its bag, bool [R])
    """
    inverse, begins = np.zeros(len(source), np.int64), np.zeros(len(source), np.bool_)
    for s in range(len(shares)):
        first, rows = shares[s, 0], shares[s, 1]
        bag = -1
        for i in range(first, first + rows):
            if i == first or source[i] != source[i - 1]:
                bag += 1
                begins[i] = True
            inverse[i] = bag
    return inverse, begins

"""The numba loops that put the features of a split side by side and deal its rows out to batches."""

from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.transforms.kernels.jit import compiled

Ids = npt.NDArray[np.int64]


@compiled
def append_lists(
    values: Ids, offsets: Ids, out: npt.NDArray[Any], starts: npt.NDArray[Any], first: int, at: int
) -> int:
    """Copies the lists of a feature to `out` from `at` on, and where each begins to `starts` from `first` on."""
    shift = at - offsets[0]
    for i in range(len(offsets) - 1):
        starts[first + i] = offsets[i] + shift
    for j in range(offsets[0], offsets[-1]):
        out[j + shift] = values[j]
    return offsets[-1] + shift


@compiled
def scatter_lengths(
    rows: Ids, lanes: Ids, strides: Ids, starts: npt.NDArray[Any], features: Ids, out: npt.NDArray[np.int32]
) -> None:
    """Lengths of the lists of some rows of a chunk, to `lanes + f * strides` of all batches' lengths.

    Args:
        features: The numbers f of the chunk's features.
    """
    if len(features) == 0:
        return
    count = (len(starts) - 1) // len(features)
    for i in range(len(features)):
        for j in range(len(rows)):
            at = i * count + rows[j]
            out[lanes[j] + features[i] * strides[j]] = starts[at + 1] - starts[at]


@compiled
def scatter_ids(
    rows: Ids,
    lanes: Ids,
    strides: Ids,
    starts: npt.NDArray[Any],
    ids: npt.NDArray[Any],
    base: int,
    feature: int,
    out_starts: Ids,
    out: Ids,
) -> None:
    """The ids of those lists of one feature, to where all batches' values have them; its lists begin at `base`.

    Four at a time, the last four over some of those before: short lists have no loop to be predicted.
    """
    for j in range(len(rows)):
        first = starts[base + rows[j]]
        count = starts[base + rows[j] + 1] - first
        target = out_starts[lanes[j] + feature * strides[j]]
        if count < 4:
            for k in range(count):
                out[target + k] = ids[first + k]
            continue
        k = 0
        while k < count:
            k = min(k, count - 4)
            out[target + k] = ids[first + k]
            out[target + k + 1] = ids[first + k + 1]
            out[target + k + 2] = ids[first + k + 2]
            out[target + k + 3] = ids[first + k + 3]
            k += 4


@compiled
def scatter_rows(
    rows: Ids,
    places: Ids,
    dense: npt.NDArray[np.float32],
    labels: npt.NDArray[np.float32],
    dense_out: npt.NDArray[np.float32],
    labels_out: npt.NDArray[np.float32],
) -> None:
    """Numbers and labels of those rows, to their places among the rows of all batches."""
    for j in range(len(rows)):
        labels_out[places[j]] = labels[rows[j]]
        for d in range(dense.shape[1]):
            dense_out[places[j], d] = dense[rows[j], d]


@compiled
def number_bags(source: Ids, shares: Ids) -> tuple[Ids, npt.NDArray[np.bool_]]:
    """The bag of each row where rows that follow each other in a share and come from one run have one in common.

    Args:
        source: int64 [R], run of each row of all shares. shares: int64 [S, 2], first row and rows of each.
    Returns:
        (bag among those of its share, int64 [R]; whether it is the first row of its bag, bool [R])
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

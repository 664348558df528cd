"""Weights of ids. A list with weights has both in one number of 64 bits, so it travels as any other list does."""

import numpy as np
import numpy.typing as npt

from pipeline.transforms.kernels.hashing import Floats, Ids
from storage.compiled import compiled

Weights = npt.NDArray[np.float32]
ID_BITS = 32
"""Low bits of a number: the id. The bits above are those of its weight, a float32."""
MOST_IDS = 1 << ID_BITS


def pack(ids: Ids, weights: Weights) -> Ids:
    """Joins ids in [0, 2**32) and their weights.

    Example:
        >>> packed = pack(np.array([7, 2**32 - 1]), np.array([0.5, -2.0], np.float32))
        >>> ids, weights = unpack(packed)
        >>> ids.tolist(), weights.tolist()
        ([7, 4294967295], [0.5, -2.0])
    """
    return (weights.view(np.int32).astype(np.int64) << ID_BITS) | ids


def unpack(packed: Ids) -> tuple[Ids, Weights]:
    """Returns what `pack` joined: ids int64 [V], weights float32 [V]."""
    return packed & (MOST_IDS - 1), (packed >> ID_BITS).astype(np.int32).view(np.float32)


@compiled
def weights_of(offsets: Ids, scores: Floats, score_offsets: Ids, stored_offsets: Ids) -> tuple[Weights, int]:
    """Returns the weight of each id, and how many of them have none.

    An id has none if its score is not a finite float32, or if its row has not as many scores as ids. It gets 0.

    Args:
        offsets: Lists of the ids that are left of the stored ones, from the first.
        stored_offsets: Lists of the ids as they are stored.
    """
    out = np.zeros(offsets[-1], np.float32)
    without = 0
    for i in range(len(offsets) - 1):
        start, length = offsets[i], offsets[i + 1] - offsets[i]
        if score_offsets[i + 1] - score_offsets[i] != stored_offsets[i + 1] - stored_offsets[i]:
            without += length
            continue
        for j in range(length):
            weight = np.float32(scores[score_offsets[i] + j])
            if np.isfinite(weight):
                out[start + j] = weight
            else:
                without += 1
    return out, without


@compiled
def divide_by_sums(weights: Weights, offsets: Ids) -> None:
    """Divides the weights of each list by the sum of their absolute values, in place. Zeros stay zeros."""
    for i in range(len(offsets) - 1):
        total = 0.0
        for j in range(offsets[i], offsets[i + 1]):
            total += abs(weights[j])
        if total > 0.0:
            for j in range(offsets[i], offsets[i + 1]):
                weights[j] = np.float32(weights[j] / total)

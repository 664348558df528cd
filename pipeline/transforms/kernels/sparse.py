"""Loops of the ops that read one list of ids."""

import numpy as np

from pipeline.transforms.kernels.hashing import Ids, mix
from storage.compiled import compiled


@compiled
def first_x(values: Ids, offsets: Ids, limit: int) -> tuple[Ids, Ids, int]:
    """Keeps the first `limit` ids of each list: (values, offsets, ids dropped)."""
    starts = np.empty(len(offsets), np.int64)
    starts[0] = 0
    for i in range(len(offsets) - 1):
        starts[i + 1] = starts[i] + min(offsets[i + 1] - offsets[i], limit)
    out = np.empty(starts[-1], np.int64)
    for i in range(len(offsets) - 1):
        for j in range(starts[i + 1] - starts[i]):
            out[starts[i] + j] = values[offsets[i] + j]
    return out, starts, len(values) - len(out)


@compiled
def clamp_ids(values: Ids, low: int, high: int) -> tuple[Ids, int]:
    """Limits ids to [low, high]: (ids, how many were outside)."""
    out = np.empty(len(values), np.int64)
    outside = 0
    for i in range(len(values)):
        out[i] = min(max(values[i], low), high)
        outside += out[i] != values[i]
    return out, outside


@compiled
def fill_lists(values: Ids, offsets: Ids, value: int) -> tuple[Ids, Ids, int]:
    """Replaces empty lists by [value]: (values, offsets, lists filled)."""
    starts = np.empty(len(offsets), np.int64)
    starts[0] = 0
    for i in range(len(offsets) - 1):
        starts[i + 1] = starts[i] + max(offsets[i + 1] - offsets[i], 1)
    out = np.empty(starts[-1], np.int64)
    filled = 0
    for i in range(len(offsets) - 1):
        length = offsets[i + 1] - offsets[i]
        if length == 0:
            out[starts[i]] = value
            filled += 1
        for j in range(length):
            out[starts[i] + j] = values[offsets[i] + j]
    return out, starts, filled


@compiled
def enumerate_lists(offsets: Ids) -> Ids:
    """Numbers the ids of each list: 0, 1, 2, ..."""
    out = np.empty(offsets[-1], np.int64)
    for i in range(len(offsets) - 1):
        for j in range(offsets[i], offsets[i + 1]):
            out[j] = j - offsets[i]
    return out


@compiled
def hash_table(vocabulary: Ids) -> Ids:
    """Makes a hash table of the positions of distinct ids: at least twice as many slots as ids, -1 if free."""
    size = 2
    while size < 2 * len(vocabulary):
        size *= 2
    slots = np.full(size, -1, np.int64)
    last = np.uint64(size - 1)
    for i in range(len(vocabulary)):
        slot = mix(vocabulary[i]) & last
        while slots[slot] >= 0:
            slot = (slot + np.uint64(1)) & last
        slots[slot] = i
    return slots


@compiled
def map_ids(values: Ids, offsets: Ids, vocabulary: Ids, slots: Ids, unknown: int) -> tuple[Ids, Ids, int]:
    """Finds the position of each id in the vocabulary: (values, offsets, how many are not in it).

    Those become `unknown`, or are dropped if that is negative.
    """
    out = np.empty(len(values), np.int64)
    starts = np.zeros(len(offsets), np.int64)
    last = np.uint64(len(slots) - 1)
    place = bad = 0
    for i in range(len(offsets) - 1):
        for j in range(offsets[i], offsets[i + 1]):
            slot = mix(values[j]) & last
            while slots[slot] >= 0 and vocabulary[slots[slot]] != values[j]:
                slot = (slot + np.uint64(1)) & last
            found = slots[slot]
            if found < 0:
                found = unknown
                bad += 1
            if found >= 0:
                out[place] = found
                place += 1
        starts[i + 1] = place
    return out[:place], starts, bad

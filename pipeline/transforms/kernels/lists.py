"""Loops of the ops that read several lists of a row."""

import numpy as np
import numpy.typing as npt

from pipeline.transforms.kernels.hashing import Floats, Ids, chain, mix
from storage.compiled import compiled

Flags = npt.NDArray[np.bool_]


@compiled
def cartesian(values: Ids, offsets: Ids, others: Ids, other_offsets: Ids, limit: int) -> tuple[Ids, Ids, int]:
    """Hashes the first `limit` pairs of each row, the first list outermost: (values, offsets, pairs dropped)."""
    starts = np.zeros(len(offsets), np.int64)
    left_out = 0
    for i in range(len(offsets) - 1):
        pairs = (offsets[i + 1] - offsets[i]) * (other_offsets[i + 1] - other_offsets[i])
        starts[i + 1] = starts[i] + min(pairs, limit)
        left_out += pairs - min(pairs, limit)
    out = np.empty(starts[-1], np.int64)
    for i in range(len(offsets) - 1):
        first, width = other_offsets[i], other_offsets[i + 1] - other_offsets[i]
        for k in range(starts[i + 1] - starts[i]):
            out[starts[i] + k] = np.int64(chain(mix(values[offsets[i] + k // width]), mix(others[first + k % width])))
    return out, starts, left_out


@compiled
def append_lists(values: Ids, offsets: Ids, others: Ids, other_offsets: Ids) -> tuple[Ids, Ids]:
    """Appends the second list of each row to the first: (values, offsets)."""
    starts = offsets + other_offsets
    out = np.empty(starts[-1], np.int64)
    for i in range(len(offsets) - 1):
        place = starts[i]
        for j in range(offsets[i], offsets[i + 1]):
            out[place] = values[j]
            place += 1
        for j in range(other_offsets[i], other_offsets[i + 1]):
            out[place] = others[j]
            place += 1
    return out, starts


@compiled
def ngrams(values: Ids, offsets: Ids, n: int) -> tuple[Ids, Ids]:
    """Hashes every n neighbours of each list: (values, offsets)."""
    starts = np.zeros(len(offsets), np.int64)
    for i in range(len(offsets) - 1):
        starts[i + 1] = starts[i] + max(offsets[i + 1] - offsets[i] - n + 1, 0)
    out = np.empty(starts[-1], np.int64)
    for i in range(len(offsets) - 1):
        for k in range(starts[i + 1] - starts[i]):
            first = offsets[i] + k
            state = mix(values[first])
            for j in range(first + 1, first + n):
                state = chain(state, mix(values[j]))
            out[starts[i] + k] = np.int64(state)
    return out, starts


@compiled
def positions(values: Ids, offsets: Ids, others: Ids, other_offsets: Ids) -> Ids:
    """Finds the first position of each id in the other list of its row, -1 if it is not in it."""
    out = np.empty(len(values), np.int64)
    for i in range(len(offsets) - 1):
        other = others[other_offsets[i] : other_offsets[i + 1]]
        if len(other) <= 16:  # scanning a short list is faster than sorting it
            for j in range(offsets[i], offsets[i + 1]):
                out[j] = -1
                for k in range(len(other)):
                    if other[k] == values[j]:
                        out[j] = k
                        break
            continue
        order = np.argsort(other, kind="mergesort")  # stable: the first of equals comes first
        ascending = other[order]
        for j in range(offsets[i], offsets[i + 1]):
            place = np.searchsorted(ascending, values[j])
            there = place < len(ascending) and ascending[place] == values[j]
            out[j] = order[place] if there else -1
    return out


@compiled
def keep_marked(values: Ids, offsets: Ids, keep: Flags) -> tuple[Ids, Ids]:
    """Keeps the marked ids of each row: (values, offsets)."""
    out = np.empty(len(values), np.int64)
    starts = np.zeros(len(offsets), np.int64)
    place = 0
    for i in range(len(offsets) - 1):
        for j in range(offsets[i], offsets[i + 1]):
            if keep[j]:
                out[place] = values[j]
                place += 1
        starts[i + 1] = place
    return out[:place], starts


@compiled
def firsts(places: Ids, offsets: Ids, other_offsets: Ids) -> Flags:
    """Marks the first occurrence of each position in its row."""
    seen = np.zeros(other_offsets[-1], np.bool_)
    out = np.zeros(len(places), np.bool_)
    for i in range(len(offsets) - 1):
        for j in range(offsets[i], offsets[i + 1]):
            if places[j] >= 0:
                target = other_offsets[i] + places[j]
                out[j] = not seen[target]
                seen[target] = True
    return out


@compiled
def align(scores: Floats, score_offsets: Ids, offsets: Ids) -> tuple[Floats, Flags]:
    """Aligns scores with their ids: (scores, rows with unequal numbers of both). Scores of such rows are NaN."""
    out = np.full(offsets[-1], np.nan, np.float64)
    bad = np.zeros(len(offsets) - 1, np.bool_)
    for i in range(len(offsets) - 1):
        length = offsets[i + 1] - offsets[i]
        bad[i] = score_offsets[i + 1] - score_offsets[i] != length
        if not bad[i]:
            for j in range(length):
                out[offsets[i] + j] = scores[score_offsets[i] + j]
    return out, bad


@compiled
def sum_equal_ids(scores: Floats, offsets: Ids, places: Ids) -> Floats:
    """Sums the scores of equal ids at the first place of the id, 0 elsewhere. NaN counts as 0.

    `places` are the positions of the ids in their own list.
    """
    out = np.zeros(len(scores), np.float64)
    for i in range(len(offsets) - 1):
        for j in range(offsets[i], offsets[i + 1]):
            if not np.isnan(scores[j]):
                out[offsets[i] + places[j]] += scores[j]
    return out


@compiled
def look_up(places: Ids, offsets: Ids, sums: Floats, other_offsets: Ids) -> Floats:
    """Looks up the other list's number at each position, 0 if there is none."""
    out = np.zeros(len(places), np.float64)
    for i in range(len(offsets) - 1):
        for j in range(offsets[i], offsets[i + 1]):
            if places[j] >= 0:
                out[j] = sums[other_offsets[i] + places[j]]
    return out


@compiled
def row_sums(values: Floats, offsets: Ids) -> Floats:
    """Sums each list, in its order."""
    out = np.zeros(len(offsets) - 1, np.float64)
    for i in range(len(out)):
        for j in range(offsets[i], offsets[i + 1]):
            out[i] += values[j]
    return out


@compiled
def row_extremes(values: Floats, offsets: Ids, keep: Flags) -> tuple[Floats, Floats, Ids]:
    """Finds the least and greatest marked number of each list (infinities if none) and how many are marked."""
    low = np.full(len(offsets) - 1, np.inf, np.float64)
    high = np.full(len(offsets) - 1, -np.inf, np.float64)
    counts = np.zeros(len(offsets) - 1, np.int64)
    for i in range(len(low)):
        for j in range(offsets[i], offsets[i + 1]):
            if keep[j]:
                low[i], high[i] = min(low[i], values[j]), max(high[i], values[j])
                counts[i] += 1
    return low, high, counts


@compiled
def fold_numbers(states: npt.NDArray[np.uint64], bits: Ids) -> npt.NDArray[np.uint64]:
    """Continues each row's hash over one number."""
    out = np.empty(len(states), np.uint64)
    for i in range(len(states)):
        out[i] = chain(states[i], mix(bits[i]))
    return out


@compiled
def fold_lists(states: npt.NDArray[np.uint64], bits: Ids, offsets: Ids) -> npt.NDArray[np.uint64]:
    """Continues each row's hash over a list and its length."""
    out = np.empty(len(states), np.uint64)
    for i in range(len(states)):
        state = states[i]
        for j in range(offsets[i], offsets[i + 1]):
            state = chain(state, mix(bits[j]))
        out[i] = chain(state, mix(offsets[i + 1] - offsets[i]))
    return out


@compiled
def seeded(seed: int) -> int:
    """Returns the first hash of a seed."""
    return mix(seed)

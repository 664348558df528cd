"""Finds the events of a key before a time, sums them, and merges sorted events."""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from storage.compiled import compiled

Places = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]
DIRECT = 128
"""Longest windows that are added up value by value, 2 * BLOCK."""
BLOCK = 64
DIGIT_BITS, MANTISSA_BITS = 32, 53
MASK = (1 << DIGIT_BITS) - 1
OTHERS = 3
"""Counts behind the digits of a sum."""


@compiled
def find_events(
    times: Places, starts: Places, numbers: Places, borders: Places, back: int, until: bool, end: Places
) -> None:
    """Writes the place after the last event of each row's key before the row's border.

    Args:
        times: int64 [E], ordered by key, then by time.
        starts: int64 [K + 1], the first place of each key.
        numbers: int64 [N], the key of each row; -1: none, and its place is 0.
        borders: int64 [N].
        back: How far to go back from each border.
        until: Also counts events at the border.
        end: int64 [N].
    """
    for row in range(len(numbers)):
        number = numbers[row]
        if number < 0:
            end[row] = 0
            continue
        low, high, border = starts[number], starts[number + 1], borders[row] - back
        while low < high:
            middle = (low + high) >> 1
            time = times[middle]
            if time < border or (until and time == border):
                low = middle + 1
            else:
                high = middle
        end[row] = low


class EventOrder(NamedTuple):
    """Sorted events: by the hash of their key, time and part."""

    hashes: npt.NDArray[np.uint64]
    """uint64 [K], of each key."""
    times: Places
    """int64 [E]."""
    starts: Places
    """int64 [K + 1], the first place of each key."""
    parts: npt.NDArray[np.uint32]
    """uint32 [E], the number of the part of the source that an event is from."""


@compiled
def merge_events(
    events: EventOrder, others: EventOrder, numbers: Places, size: int, at: Places, places: Places, keys: Places
) -> int:
    """Merges sorted events with others, and returns how many it has placed. Further calls place the next ones.

    Args:
        numbers: int64, by number of a part of `events`: its number among those of `others`; -1: leave its events out.
        size: Number of events of each side to look at.
        at: int64 [4], the next event of each side and its key. Changed.
        places: int64 [2 * size]. Gets the place of an event after `at`, or of one of `others` as -1 less its place.
        keys: int64 [2 * size]. Gets the key of each in the same way.
    """
    event, other, key, other_key = at[0], at[1], at[2], at[3]
    ends, count = (min(len(events.times), at[0] + size), min(len(others.times), at[1] + size)), 0
    whole = ends[0] == len(events.times), ends[1] == len(others.times)
    while (event < ends[0] or whole[0]) and (other < ends[1] or whole[1]) and (event < ends[0] or other < ends[1]):
        while event < ends[0] and events.starts[key + 1] <= event:
            key += 1
        while other < ends[1] and others.starts[other_key + 1] <= other:
            other_key += 1
        if event < ends[0] and numbers[events.parts[event]] < 0:
            event += 1
        elif event < ends[0] and (other == ends[1] or _is_first(events, event, key, numbers, others, other, other_key)):
            places[count], keys[count] = event - at[0], key - at[2]
            event, count = event + 1, count + 1
        else:
            places[count], keys[count] = at[1] - other - 1, at[3] - other_key - 1
            other, count = other + 1, count + 1
    at[0], at[1], at[2], at[3] = event, other, key, other_key
    return count


@compiled
def _is_first(
    events: EventOrder, event: int, key: int, numbers: Places, others: EventOrder, other: int, other_key: int
) -> bool:
    """Tells whether an event comes before one of the others."""
    if events.hashes[key] != others.hashes[other_key]:
        return events.hashes[key] < others.hashes[other_key]
    if events.times[event] != others.times[other]:
        return events.times[event] < others.times[other]
    return numbers[events.parts[event]] <= others.parts[other]


class KeySums(NamedTuple):
    """What gives the sum of any window of one key, each in the same time."""

    first: int
    """Place of the key's first event."""
    low: int
    """Digit 0 counts multiples of 2 ** low."""
    blocks: Places
    """int64 [blocks + 1, digits + 3], of the events before each BLOCK-th one: the exact sum of the finite values in
    digits of DIGIT_BITS bits, then how many are infinite, how many minus infinite, and how many are no NaN."""


def sum_values(values: Numbers, begin: Places, end: Places) -> tuple[Numbers, Places]:
    """Returns the sum of the values from `begin` to `end` of each row, and how many there are.

    Up to DIRECT values are added in their order. Longer windows are left at 0 (see `sum_long`).

    Args:
        values: float64 [E]. NaN is left out.
        begin, end: int64 [N].
    Example:
        >>> sum_values(np.array([1.0, np.nan, 2.0]), np.array([0, 1]), np.array([3, 2]))
        (array([3., 0.]), array([2, 0]))
    """
    sums, counts = np.zeros(len(begin)), np.zeros(len(begin), np.int64)
    _sum(values, begin, end, sums, counts)
    return sums, counts


def sum_key(values: Numbers, first: int, end: int) -> KeySums:
    """Adds up the events of a key, at the places from `first` to `end`, once for all of its windows."""
    low, digits = _measure(values, first, end)
    blocks = np.zeros(((end - first) // BLOCK + 1, digits + OTHERS), np.int64)
    _sum_blocks(values, first, low, blocks)
    return KeySums(first, low, blocks)


def sum_long(values: Numbers, key: KeySums, begin: Places, end: Places) -> tuple[Numbers, Places]:
    """Returns what `sum_values` does, for windows of one key.

    A sum is that of the exact numbers, rounded to one of its two neighbours. It depends on the values of the window
    alone, not on those before it, and costs the same for each length.
    """
    sums, counts = np.empty(len(begin)), np.empty(len(begin), np.int64)
    _sum_long(values, key.first, key.low, key.blocks, begin, end, sums, counts)
    return sums, counts


@compiled
def _sum(values: Numbers, begin: Places, end: Places, sums: Numbers, counts: Places) -> None:
    for row in range(len(begin)):
        if end[row] - begin[row] > DIRECT:
            continue
        for place in range(begin[row], end[row]):
            if not np.isnan(values[place]):
                sums[row] += values[place]
                counts[row] += 1


@compiled
def _measure(values: Numbers, first: int, end: int) -> tuple[int, int]:
    """Returns the power of two of digit 0, and how many digits hold the sum of all values."""
    low, high = 2_000, -2_000
    for place in range(first, end):
        value = values[place]
        if np.isfinite(value) and value != 0.0:
            exponent = math.frexp(value)[1] - MANTISSA_BITS
            low, high = min(low, exponent), max(high, exponent)
    return (low, (high - low) // DIGIT_BITS + 4) if low <= high else (0, 1)


@compiled
def _add(value: float, low: int, sums: Places) -> None:
    """Adds a number to sums, int64 [digits + 3]. Digits may get larger than their bits: it is settled at the end."""
    others = len(sums) - OTHERS
    if np.isnan(value):
        return
    sums[others + 2] += 1
    if np.isinf(value):
        sums[others + (0 if value > 0 else 1)] += 1
        return
    if value == 0.0:
        return
    part, exponent = math.frexp(abs(value))
    mantissa = np.int64(math.ldexp(part, MANTISSA_BITS))
    shift = exponent - MANTISSA_BITS - low
    digit, bits = shift // DIGIT_BITS, shift % DIGIT_BITS
    lower = (mantissa & MASK) << bits  # below 2 ** 63
    upper = ((mantissa >> DIGIT_BITS) << bits) + (lower >> DIGIT_BITS)
    sign = 1 if value > 0 else -1
    sums[digit] += sign * (lower & MASK)
    sums[digit + 1] += sign * (upper & MASK)
    sums[digit + 2] += sign * (upper >> DIGIT_BITS)


@compiled
def _round(sums: Places, low: int) -> float:
    """Returns the number that digits stand for. Changes them."""
    others = len(sums) - OTHERS
    plus, minus = sums[others] > 0, sums[others + 1] > 0
    if plus or minus:
        return np.nan if plus and minus else np.inf if plus else -np.inf
    sign = 1.0
    for _ in range(2):
        for digit in range(others - 1):
            carry = sums[digit] >> DIGIT_BITS
            sums[digit] -= carry << DIGIT_BITS
            sums[digit + 1] += carry
        if sums[others - 1] >= 0:
            break
        sign = -1.0
        for digit in range(others):
            sums[digit] = -sums[digit]
    total = 0.0
    for digit in range(others):  # the smallest first, so that what is rounded off is below the last digits
        total += math.ldexp(float(sums[digit]), low + DIGIT_BITS * digit)
    return sign * total


@compiled
def _sum_blocks(values: Numbers, first: int, low: int, blocks: Places) -> None:
    for block in range(1, len(blocks)):
        blocks[block] = blocks[block - 1]
        for place in range(first + (block - 1) * BLOCK, first + block * BLOCK):
            _add(values[place], low, blocks[block])


@compiled
def _sum_long(
    values: Numbers, first: int, low: int, blocks: Places, begin: Places, end: Places, sums: Numbers, counts: Places
) -> None:
    for row in range(len(begin)):
        start, stop = -((first - begin[row]) // BLOCK), (end[row] - first) // BLOCK
        found = blocks[stop] - blocks[start]
        for place in range(begin[row], first + start * BLOCK):
            _add(values[place], low, found)
        for place in range(first + stop * BLOCK, end[row]):
            _add(values[place], low, found)
        counts[row] = found[len(found) - 1]
        sums[row] = _round(found, low)

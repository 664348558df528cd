"""Tells in what way two lists of the same events differ."""

import numpy as np
import numpy.typing as npt

from storage.compiled import compiled

Items = npt.NDArray[np.int32]
Offsets = npt.NDArray[np.int64]
Codes = npt.NDArray[np.int8]

SAME, MISSING_THEN, MISSING_NOW, NUMBER, VALUE, ORDER = range(6)
NEWEST_THEN, OLDEST_THEN, BETWEEN_THEN, NEWEST_NOW, OLDEST_NOW, BETWEEN_NOW = range(6, 12)
LONGER, SHORTER, ITEMS = range(12, 15)


@compiled
def compare_lists(then: Items, then_offsets: Offsets, now: Items, now_offsets: Offsets, codes: Codes) -> None:
    """Writes how each row's list differs: SAME, or why. Lists have the newest item first.

    Args:
        then, now: int32 [I], the items of all rows.
        then_offsets, now_offsets: int64 [N + 1], where each row's items begin.
        codes: int8 [N].
    """
    for row in range(len(codes)):
        one = then[then_offsets[row] : then_offsets[row + 1]]
        two = now[now_offsets[row] : now_offsets[row + 1]]
        codes[row] = _compare(one, two)


@compiled
def _compare(then: Items, now: Items) -> int:
    m, n = len(then), len(now)
    if m == n and np.array_equal(then, now):
        return SAME
    if m == 0:
        return MISSING_THEN
    if n == 0:
        return MISSING_NOW
    if m == n and np.array_equal(np.sort(then), np.sort(now)):
        return ORDER
    if n >= m and _adds_newest(then, now):
        return NEWEST_THEN
    if m >= n and _adds_newest(now, then):
        return NEWEST_NOW
    if n > m and np.array_equal(now[:m], then):
        return OLDEST_THEN
    if m > n and np.array_equal(then[:n], now):
        return OLDEST_NOW
    if n >= m and _adds_between(then, now):
        return BETWEEN_THEN
    if m >= n and _adds_between(now, then):
        return BETWEEN_NOW
    return LONGER if n > m else SHORTER if n < m else ITEMS


@compiled
def _adds_newest(few: Items, many: Items) -> bool:
    """Whether `many` is some items before those of `few`, whose oldest may have fallen off."""
    for added in range(max(1, len(many) - len(few)), len(many)):
        if np.array_equal(many[added:], few[: len(many) - added]):
            return True
    return False


@compiled
def _adds_between(few: Items, many: Items) -> bool:
    """Whether `many` is the items of `few` with others between them.

    Of full lists, which are as long, the oldest items may have fallen off: half of them must still be there.
    """
    found = 0
    for item in many:
        if found < len(few) and item == few[found]:
            found += 1
    return found == len(few) or (len(few) == len(many) and 2 * found >= len(few))

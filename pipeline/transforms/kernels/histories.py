"""Finds the events of a key before a time, and sums them."""

import numpy as np
import numpy.typing as npt

from storage.compiled import compiled

Places = npt.NDArray[np.int64]
Numbers = npt.NDArray[np.float64]


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


def sum_values(values: Numbers, begin: Places, end: Places) -> tuple[Numbers, Places]:
    """Returns the sum of the values from `begin` to `end` of each row, in their order, and how many there are.

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


@compiled
def _sum(values: Numbers, begin: Places, end: Places, sums: Numbers, counts: Places) -> None:
    for row in range(len(begin)):
        for place in range(begin[row], end[row]):
            if not np.isnan(values[place]):
                sums[row] += values[place]
                counts[row] += 1

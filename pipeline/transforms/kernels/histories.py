"""Finds the events of a key before a time."""

import numpy as np
import numpy.typing as npt

from pipeline.transforms.kernels.jit import compiled

Places = npt.NDArray[np.int64]


@compiled
def find_events(
    times: Places, starts: Places, numbers: Places, borders: Places, until: bool, first: Places, end: Places
) -> None:
    """Writes the first place of each row's key, and the place after its last event before the row's border.

    Args:
        times: int64 [E], ordered by key, then by time.
        starts: int64 [K + 1], the first place of each key.
        numbers: int64 [N], the key of each row; -1: none.
        borders: int64 [N].
        until: Also counts events at the border.
        first, end: int64 [N], equal where there is no event.
    """
    for row in range(len(numbers)):
        number = numbers[row]
        if number < 0:
            first[row] = end[row] = 0
            continue
        low, high, border = starts[number], starts[number + 1], borders[row]
        first[row] = low
        while low < high:
            middle = (low + high) >> 1
            time = times[middle]
            if time < border or (until and time == border):
                low = middle + 1
            else:
                high = middle
        end[row] = low

"""Sums the values of events over windows. The work grows with the rows and the events, not with their product."""

import numpy as np
import numpy.typing as npt

from pipeline.data.joined.index import TimedIndex
from pipeline.transforms.kernels.histories import DIRECT, KeySums, Numbers, Places, sum_key, sum_long, sum_values

KEPT_BYTES = 64 << 20
"""Bytes of the sums of keys that a process keeps. They take about an eighth of the bytes of the values."""


class WindowSums:
    """Sums over windows of the events of a key. Keys with long windows are added up once and kept."""

    def __init__(self) -> None:
        self._kept: dict[tuple[int, int], KeySums] = {}
        self._bytes = 0

    def find(
        self, column: int, index: TimedIndex, numbers: Places, begin: Places, end: Places
    ) -> tuple[Numbers, Places]:
        """Returns the sum of each row's window and how many of its values are no NaN, float64 [N] and int64 [N].

        Args:
            column: Number of the column of the index with the values.
            numbers: int64 [N], the key of each row.
            begin, end: int64 [N], the window as places in the index.
        """
        values: npt.NDArray[np.float64] = index.values[column].to_numpy()
        sums, counts = sum_values(values, begin, end)
        long = np.flatnonzero(end - begin > DIRECT)
        if len(long):
            rows = long[np.argsort(numbers[long], kind="stable")]
            for part in np.split(rows, np.flatnonzero(np.diff(numbers[rows])) + 1):
                key = self._load(column, index, values, int(numbers[part[0]]))
                sums[part], counts[part] = sum_long(values, key, begin[part], end[part])
        return sums, counts

    def _load(self, column: int, index: TimedIndex, values: Numbers, number: int) -> KeySums:
        if (column, number) not in self._kept:
            made = sum_key(values, int(index.starts[number]), int(index.starts[number + 1]))
            self._kept[column, number] = made
            self._bytes += made.blocks.nbytes
            while self._bytes > KEPT_BYTES and len(self._kept) > 1:
                self._bytes -= self._kept.pop(next(iter(self._kept))).blocks.nbytes
        return self._kept[column, number]

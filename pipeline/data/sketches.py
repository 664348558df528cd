"""Loops that add values of a column to its statistics, and what a sketch of distinct values says.

Distinct values are counted by HyperLogLog (Flajolet et al. 2007): a register keeps the longest run of zeros of the
hashes that fall on it. With 1,024 registers the error is 3 %.
"""

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipeline.transforms.kernels.hashing import Floats, Ids, mix
from storage.compiled import compiled, inlined

BUCKETS = 16
INDEX_BITS = 10
REGISTERS = 1 << INDEX_BITS
COUNT, MEAN, SQUARES, MINIMUM, MAXIMUM = range(5)
"""Places in the moments: finite values, their mean, the sum of squares about it, and their bounds."""
LARGEST = 1e150
"""Larger values overflow when squared. They count as present and as distinct, and in nothing else."""
HALF = 0x6A09E667F3BCD
"""Mantissa of the root of 2."""

Registers = npt.NDArray[np.uint8]


class Sketch(NamedTuple):
    """What the loops add to."""

    registers: Registers
    """[REGISTERS]: of distinct values."""
    histogram: Ids
    """[BUCKETS]: values by bucket."""
    moments: Floats
    """[5], see COUNT. Lists and text leave them as they are."""

    @classmethod
    def new(cls) -> "Sketch":
        """Returns the sketch of no values."""
        moments = np.array([0.0, 0.0, 0.0, np.inf, -np.inf])
        return cls(np.zeros(REGISTERS, np.uint8), np.zeros(BUCKETS, np.int64), moments)


@inlined
def _register(registers: Registers, hashed: int) -> None:
    index = np.int64(hashed >> np.uint64(64 - INDEX_BITS))
    rest, rank = hashed << np.uint64(INDEX_BITS), max(registers[index], 1)
    while rank <= 64 - INDEX_BITS and rest >> np.uint64(64 - rank) == 0:  # so many zeros or more
        rank += 1
    registers[index] = rank


@compiled
def add_numbers(values: Floats, bits: Ids, registers: Registers, histogram: Ids, moments: Floats) -> int:
    """Adds numbers to the statistics of a column. Returns how many are not NaN.

    A histogram has one bucket for zero, 11 for positive numbers and 4 for negative ones. Positive buckets are half
    powers of two, negative ones powers of two, both cyclic. The bucket depends on the value alone, so any two days can
    be compared. A change of scale shows unless it is a power of 2 ** 5.5: those of units (10, 60, 1000, 1024) show.

    Args:
        bits: The same memory as `values`.
    """
    present, count, total, low, high = 0, 0, 0.0, moments[MINIMUM], moments[MAXIMUM]
    for i in range(len(values)):
        value = values[i]
        if np.isnan(value):
            continue
        present += 1
        _register(registers, mix(bits[i] if value != 0.0 else 0))
        if abs(value) >= LARGEST:
            continue
        count += 1
        total += value
        low, high = min(low, value), max(high, value)
        power = ((bits[i] >> 52) & 0x7FF) - 1023
        if value == 0.0:
            histogram[0] += 1
        elif value > 0.0:
            upper = 1 if bits[i] & 0xFFFFFFFFFFFFF >= HALF else 0
            histogram[1 + (2 * power + upper) % 11] += 1
        else:
            histogram[12 + power % 4] += 1
    if count:
        mean, squares = total / count, 0.0
        for i in range(len(values)):
            if abs(values[i]) < LARGEST:
                squares += (values[i] - mean) ** 2
        _merge(moments, count, mean, squares, low, high)
    return present


@compiled
def add_ids(values: Ids, registers: Registers, histogram: Ids, moments: Floats) -> None:
    """Adds ids to the statistics of a column, as `add_numbers`. Their buckets are those of a hash."""
    total, low, high = 0.0, moments[MINIMUM], moments[MAXIMUM]
    for i in range(len(values)):
        value = values[i]
        _register(registers, mix(value))
        whole = abs(value) % 2147483647 * 1103515245 % 2147483647
        histogram[(whole if value >= 0 else -whole) & 15] += 1
        total += value
        low, high = min(low, np.float64(value)), max(high, np.float64(value))
    if len(values):
        mean, squares = total / len(values), 0.0
        for i in range(len(values)):
            squares += (values[i] - mean) ** 2
        _merge(moments, len(values), mean, squares, low, high)


@compiled
def add_hashes(hashes: Ids, registers: Registers, histogram: Ids) -> None:
    """Adds values that are known by a hash to the statistics of a column."""
    for i in range(len(hashes)):
        mixed = mix(hashes[i])
        _register(registers, mixed)
        histogram[mixed & np.uint64(15)] += 1


@inlined
def _merge(moments: Floats, count: int, mean: float, squares: float, low: float, high: float) -> None:
    """Adds the moments of more values (Chan et al. 1979)."""
    whole, apart = moments[COUNT] + count, mean - moments[MEAN]
    moments[SQUARES] += squares + apart * apart * moments[COUNT] * count / whole
    moments[MEAN] += apart * count / whole
    moments[COUNT], moments[MINIMUM], moments[MAXIMUM] = whole, low, high


def estimate_distinct(registers: Registers) -> int:
    """Estimates how many different values registers have seen.

    Example:
        >>> registers, histogram, moments = Sketch.new()
        >>> add_hashes(np.array([7, 7, 9]), registers, histogram)
        >>> estimate_distinct(registers), int(histogram.sum())
        (2, 3)
    """
    empty = np.count_nonzero(registers == 0)
    raw = 0.7213 / (1 + 1.079 / REGISTERS) * REGISTERS**2 / np.sum(2.0 ** -registers.astype(np.float64))
    few = raw <= 2.5 * REGISTERS and empty > 0
    return round(REGISTERS * math.log(REGISTERS / empty) if few else raw)

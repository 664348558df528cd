"""A hash of each row's key columns, equal for equal values in every chunk, run and process."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from pipeline.transforms.column import Column
from pipeline.transforms.kernels.lists import fold_lists, fold_numbers, seeded


def row_hashes(columns: Sequence[Column], seed: int) -> npt.NDArray[np.uint64]:
    """Returns a hash of each row's numbers and ids in the given columns, uint64 [N].

    The hash starts as mix(seed) and continues as chain(hash, mix(x)) over the bits of each number or id, and after
    each list over its length. Missing numbers are equal to one another, and so are 0 and -0.
    """
    states = np.full(len(columns[0]), seeded(seed), np.uint64)
    for column in columns:
        bits = _bits(column.values)
        states = fold_numbers(states, bits) if column.offsets is None else fold_lists(states, bits, column.offsets)
    return states


def missing_keys(columns: Sequence[Column]) -> npt.NDArray[np.int64]:
    """Returns the rows that have no value in any of the columns, int64 [M]. NaN is none."""
    missing = np.ones(len(columns[0]), bool)
    for column in columns:
        missing &= np.isnan(column.values) if column.offsets is None else np.diff(column.offsets) == 0
    return np.flatnonzero(missing)


def _bits(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """Returns values as 64 bits, equal for equal values."""
    if values.dtype == np.int64:
        return values  # type: ignore[return-value]
    numbers = values.astype(np.float64) + 0.0  # -0 becomes 0
    numbers[np.isnan(numbers)] = np.nan  # NaN has many bit patterns; keep one
    return numbers.view(np.int64)

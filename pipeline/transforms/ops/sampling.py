"""Sampling: a filter of rows, the second kind of transform."""

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, Field

from pipeline.transforms.column import Column
from pipeline.transforms.kernels import lists
from pipeline.transforms.ops.op import Counts, Id


class Sampling(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Keeps a share of the rows, chosen by a hash of their key columns and a seed.

    Rows with equal keys are kept or left out together, in every chunk, run and process: a user as a key samples
    users. Missing numbers are equal to one another; 0 and -0 are equal. The hash starts as mix(seed) and goes on as
    chain(hash, mix(x)) over the bits of each number or id, and after each list over its length; a row is kept
    where the upper 53 bits of its hash, as a fraction of 1, are below the rate.

    Source:
        arXiv:2108.09373, table 11. mix and chain: pipeline/transforms/kernels/hashing.py.
    Example:
        >>> users = Column(np.array([1, 1, 2, 3]), np.arange(5))
        >>> Sampling(inputs=("user",), rate=0.5, seed=2).keep([users]).tolist()
        [False, False, True, True]
    """

    kind: Literal["sampling"] = "sampling"
    inputs: tuple[str, ...] = Field(min_length=1)
    """Key columns."""
    rate: float = Field(gt=0.0, le=1.0)
    """Share of the keys to keep."""
    seed: Id = 0
    """Another seed keeps other keys."""

    def keep(self, columns: Sequence[Column], counts: Counts | None = None) -> npt.NDArray[np.bool_]:
        """Which rows to keep, given the key columns; the others are counted as 'sampling rows'.

        Shapes:
            columns of N rows each -> bool [N].
        """
        mask = (row_hashes(columns, self.seed) >> np.uint64(11)) * 2.0**-53 < self.rate
        if counts is not None and not mask.all():
            counts["sampling rows"] += int(len(mask) - mask.sum())
        return mask


def row_hashes(columns: Sequence[Column], seed: int) -> npt.NDArray[np.uint64]:
    """A hash of each row's numbers and ids in some columns, uint64 [N]; rows with equal ones have equal hashes."""
    states = np.full(len(columns[0]), lists.seeded(seed), np.uint64)
    for column in columns:
        bits = _bits(column.values)
        if column.offsets is None:
            states = lists.fold_numbers(states, bits)
        else:
            states = lists.fold_lists(states, bits, column.offsets)
    return states


def _bits(values: npt.NDArray[np.generic]) -> npt.NDArray[np.int64]:
    """Values as 64 bits, equal for equal values."""
    if values.dtype == np.int64:
        return values  # type: ignore[return-value]
    numbers = values.astype(np.float64) + 0.0  # -0 becomes 0
    numbers[np.isnan(numbers)] = np.nan  # one of the many
    return numbers.view(np.int64)

"""Where a training is in its data, and what its batches cost."""

from pydantic import BaseModel, NonNegativeInt


class LostRows(BaseModel, frozen=True):
    """A row group that was quarantined. A training lacks its rows."""

    epoch: int
    path: str
    row_group: int
    rows: NonNegativeInt
    """Stored rows, before any filter."""


class Position(BaseModel, frozen=True):
    """Position in the data after a batch. It counts global batches and rows, so it is valid at every world size."""

    epoch: NonNegativeInt = 0
    batches: NonNegativeInt = 0
    """Global batches already taken from this epoch."""
    window: NonNegativeInt = 0
    """Number of the epoch's shuffle block in which the next batch begins."""
    row: NonNegativeInt = 0
    """First row of the next batch in that block, in shuffled order."""
    lost: tuple[LostRows, ...] = ()
    """Row groups that were quarantined before this position, in all epochs. The order of a shuffle block's rows
    depends on them."""


class Times(BaseModel, frozen=True):
    """Seconds spent on a global batch before training."""

    extract: float = 0.0
    """Reading and decoding its rows in workers."""
    transform: float = 0.0
    """Transforming, shuffling and batching them in workers."""
    wait: float = 0.0
    """Waiting for it in this rank."""


NO_TIMES = Times()

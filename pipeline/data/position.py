"""Where a training is in its data, and what its batches cost."""

from pydantic import BaseModel


class Position(BaseModel, frozen=True):
    """Position in the data after a batch. It counts global batches and rows, so it is valid at every world size."""

    epoch: int = 0
    batches: int = 0
    """Global batches already taken from this epoch."""
    window: int = 0
    """Window of the epoch in which the next batch begins."""
    row: int = 0
    """Row of that window, in shuffled order, with which it begins."""


class Times(BaseModel, frozen=True):
    """Seconds spent on a global batch before training."""

    extract: float = 0.0
    """Reading and decoding its rows in workers."""
    transform: float = 0.0
    """Transforming, shuffling and batching them in workers."""
    wait: float = 0.0
    """Waiting for it in this rank."""


NO_TIMES = Times()

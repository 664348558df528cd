"""Records of the rank protocol: a request for an epoch, and the note on each batch."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from pipeline.data.position import Position

GROUP_ROWS = 32_768
"""Batches are made and delivered in groups of about this many rows, at least one batch."""


class Request(BaseModel, frozen=True):
    """A rank's request for an epoch. All ranks send equal requests."""

    data: str
    """Name of the dataset, such as `train`."""
    number: NonNegativeInt
    """Number of streams of this dataset that the rank requested before."""
    position: Position
    batch_rows: PositiveInt
    """Rows of the GLOBAL batch."""
    seed: NonNegativeInt
    window_rows: PositiveInt | None
    """None keeps the order of the table."""
    world_size: PositiveInt
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    """Ranks that take batches."""
    attempt: NonNegativeInt = 0
    """Number of earlier starts of the ranks. Ranks of different attempts never share a stream."""


@dataclass
class BatchNote:
    """Metadata of a global batch."""

    position: Position
    rows: int
    extract_seconds: float
    """Worker time spent on reading and decoding its rows."""
    transform_seconds: float
    """Worker time spent on transforming, shuffling and batching them."""

"""Chooses the sizes of model and training by the number of rows and ids."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.suggestion.facts import ColumnFacts

SMALL = 10_000
"""Fewer training rows need a stronger decay of the tables."""


@dataclass(frozen=True)
class Shape:
    """The sections `model` and `training`, with their reasons."""

    model: Mapping[str, Any]
    model_why: str
    training: Mapping[str, Any]
    training_why: str


def choose_shape(ids: Sequence[ColumnFacts], rows: int, validates: bool) -> Shape:
    """Chooses width, dropout, optimizer, batch, rates and passes.

    Args:
        ids: Columns of ids or text.
        rows: Training rows.
        validates: Whether there are validation rows.
    """
    most = max((fact.distinct for fact in ids), default=0)
    batch = batch_rows(rows)
    model = {
        "embedding_width": width(most),
        "bottom_mlp": [64],
        "top_mlp": [128, 64],
        "interaction": "dcn",
        "dropout": 0.3,
        "embedding_init": 0.1,
    }
    training: dict[str, Any] = {
        "batch_rows": batch,
        "epochs": 20 if validates else 3,
        **({"validate_every": 0.25, "patience": 6} if validates else {}),
        "average_from": 0.5,
        "table_optimizer": "adam",
        "table_learning_rate": 8e-3,
        "table_weight_decay": 1e-2 if rows < SMALL else 1e-3,
        "dense_learning_rate": 1e-3,
        "dense_weight_decay": 1e-5,
    }
    steps = math.ceil(rows / batch)
    why = f"{rows:,} training rows: {steps:,} steps a pass; {'stops early' if validates else 'no validation rows'}"
    return Shape(model, f"the largest column has about {most:,} ids", training, why)


def width(most: int) -> int:
    """Returns the width of the tables for a largest column of so many ids.

    Example:
        >>> width(10), width(5_000), width(1_000_000)
        (8, 16, 32)
    """
    return 8 if most <= 50 else 16 if most <= 200_000 else 32


def batch_rows(rows: int) -> int:
    """Returns a power of two that makes about 200 steps a pass.

    Example:
        >>> batch_rows(2_000), batch_rows(40_000), batch_rows(10**8)
        (64, 256, 4096)
    """
    return int(min(4_096, max(64, 1 << round(math.log2(max(1, rows / 200))))))

"""Chooses the sizes of model and training by the number of rows and ids."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.suggestion.facts import ColumnFacts

DEVIATION = 0.3
"""Of the weights of tables, before any row is seen."""
MOST_EPOCHS = 100
"""With validation rows. Patience ends a training long before."""


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
        "epochs": MOST_EPOCHS if validates else 3,
        **({"validate_every": 0.25, "patience": 6} if validates else {}),
        "average_from": 0.5,
        "table_optimizer": "adam",
        "table_learning_rate": 8e-3,
        "table_weight_decay": table_weight_decay(rows, batch, most),
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


def table_weight_decay(rows: int, batch: int, most: int) -> float:
    """Returns the L2 penalty that makes a table's row the most likely one under a normal prior.

    The penalty acts on a row once in each batch that reads it, beside the mean of the batch's gradients. A prior of
    deviation s counts once for all rows: 1 / s^2 = decay * batch * batches of a pass that read it. The column with most
    ids decides, as its rows have the fewest.

    Source:
        MacKay 2003, "Information Theory, Inference, and Learning Algorithms", chapter 41.
    Example:
        >>> [table_weight_decay(*one) for one in ((6_000, 64, 316), (80_000, 512, 1_682), (10**8, 4_096, 10))]
        [0.0091, 0.00046, 1e-06]
    """
    reads = min(rows / batch, max(1.0, rows / max(1, most)))
    return float(f"{min(1e-2, max(1e-6, 1.0 / (DEVIATION**2 * batch * reads))):.1e}")


def batch_rows(rows: int) -> int:
    """Returns a power of two that makes about 200 steps a pass.

    Example:
        >>> batch_rows(2_000), batch_rows(40_000), batch_rows(10**8)
        (64, 256, 4096)
    """
    return int(min(4_096, max(64, 1 << round(math.log2(max(1, rows / 200))))))

"""Points spread over the space of models, to fit the speed of a machine on."""

import math
from collections.abc import Sequence
from typing import Any

from scipy.stats.qmc import Sobol

from models.config import DLRMConfig
from pipeline.study.measure.cost import list_layers
from pipeline.study.points.points import StudyPoint

SPANS = {
    "dense_features": (16, 2_048),
    "sparse_features": (4, 100),
    "batch_rows": (128, 8_192),
    "hash_size": (1_000, 1_000_000),
    "mlp": (64, 512),
    "depth": (1, 3),
    "embedding_width": (16, 128),
    "lookups": (1, 32),
}
"""Bounds of each setting. Points are evenly spread on a logarithmic scale."""
INTERACTIONS = ("dot", "cat", "dcn")
SEED = 1
MOST_FLOP, MOST_LOOKED_UP, MOST_HELD = 2e10, 1e8, 6e7
"""Limits: operations per step, numbers read from tables per step, numbers in all tables. Larger points get smaller
batches and tables. On a small machine one of them would take as long as all others."""
MOST_CROSSED = 1_024
"""Input width of cross layers at most. Their matrices grow with its square."""


def draw_points(count: int, world_sizes: Sequence[int]) -> list[StudyPoint]:
    """Draws the first points of a fixed sequence. A longer draw extends a shorter one.

    Source:
        Owen 1998, "Scrambling Sobol' and Niederreiter-Xing points": any first points fill the space evenly.
    """
    sequence = Sobol(len(SPANS) + 2, rng=SEED).random_base2(max(math.ceil(math.log2(count)), 1))
    return [_point(number, shares.tolist(), world_sizes) for number, shares in enumerate(sequence[:count])]


def _point(number: int, shares: Sequence[float], world_sizes: Sequence[int]) -> StudyPoint:
    drawn = {
        name: low * (high / low) ** share for (name, (low, high)), share in zip(SPANS.items(), shares, strict=False)
    }
    world_size = world_sizes[int(shares[-2] * len(world_sizes))]
    interaction = INTERACTIONS[int(shares[-1] * len(INTERACTIONS))]
    width = 1 << round(math.log2(drawn["embedding_width"]))
    sparse, dense, lookups = (round(drawn[name]) for name in ("sparse_features", "dense_features", "lookups"))
    if interaction == "dcn":
        sparse = min(sparse, max(MOST_CROSSED // width - 1, 1))
    layers = [round(drawn["mlp"] / 16) * 16] * round(drawn["depth"])
    vectors = sparse + 1
    model = DLRMConfig(embedding_width=width, bottom_mlp=layers, top_mlp=layers, interaction=interaction)
    weights = sum(layer.inputs * layer.outputs for layer in list_layers(model, dense, vectors))
    crossed = 4 * vectors**2 * width if interaction == "dot" else 0
    rows = min(drawn["batch_rows"], MOST_FLOP / (6 * weights + crossed), MOST_LOOKED_UP / (sparse * lookups * width))
    settings: dict[str, Any] = {
        "characterize.workload.dense_features": dense,
        "characterize.workload.sparse_features": sparse,
        "characterize.workload.hash_size": round(min(drawn["hash_size"], MOST_HELD / (sparse * width))),
        "characterize.workload.lookups": lookups,
        "model.embedding_width": width,
        "model.bottom_mlp": layers,
        "model.top_mlp": layers,
        "model.interaction": interaction,
        "training.batch_rows": max(round(rows), SPANS["batch_rows"][0]),
        "training.world_size": world_size,
    }
    return StudyPoint(values={"point": number, "ranks": world_size}, settings=settings)

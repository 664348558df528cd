"""Fused sparse optimizer, dense optimizer, learning-rate schedule, and one initial state for all placements."""

import hashlib
from typing import Any

import numpy as np
import torch
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from pipeline.training.config import TrainConfig

INIT_BLOCK_ROWS = 65_536
"""Rows of a table drawn from one stream, so that a shard can be made without the rest of its table."""


def fuse_table_optimizer(model: nn.Module, config: TrainConfig) -> None:
    """Exact row-wise Adagrad that updates the tables inside the backward pass; call before sharding.

    Source:
        Mudigere et al. 2022, arXiv:2104.05158, section 4.1.
    """
    settings = {"lr": config.table_learning_rate, "eps": 1e-8, "weight_decay": config.table_weight_decay}
    apply_optimizer_in_backward(RowWiseAdagrad, model.get_submodule("embeddings").parameters(), settings)


def dense_optimizer(model: DistributedModelParallel, config: TrainConfig) -> torch.optim.Optimizer:
    """Optimizer of the parameters that every rank holds a copy of."""
    parameters = [parameter for _, parameter in dense_parameters(model)]
    kinds: dict[str, Any] = {
        "adam": torch.optim.Adam,
        "adamw": torch.optim.AdamW,
        "adagrad": torch.optim.Adagrad,
        "sgd": torch.optim.SGD,
    }
    optimizer: torch.optim.Optimizer = kinds[config.dense_optimizer](
        parameters, lr=config.dense_learning_rate, weight_decay=config.dense_weight_decay
    )
    return optimizer


def dense_parameters(model: DistributedModelParallel) -> list[tuple[str, nn.Parameter]]:
    """(name, parameter) of everything but the tables."""
    return [(name, parameter) for name, parameter in model.named_parameters() if not name.startswith("embeddings.")]


def schedule(config: TrainConfig, step: int) -> float:
    """Factor on both learning rates for update number `step`, counted from 0.

    Example:
        >>> [schedule(TrainConfig(warmup_steps=2, decay_steps=4), step) for step in range(5)]
        [0.5, 1.0, 1.0, 0.5, 0.0]
    """
    factor = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if config.decay_steps is not None and step > config.warmup_steps:
        left = max(0.0, (config.decay_steps - step) / (config.decay_steps - config.warmup_steps))
        factor *= config.decay_floor + (1.0 - config.decay_floor) * left
    return factor


def set_learning_rates(
    model: DistributedModelParallel, optimizer: torch.optim.Optimizer, config: TrainConfig, step: int
) -> None:
    """Puts the schedule's rates for a step into both optimizers."""
    factor = schedule(config, step)
    for group in optimizer.param_groups:
        group["lr"] = config.dense_learning_rate * factor
    for group in model.fused_optimizer.param_groups:
        group["lr"] = config.table_learning_rate * factor
    model.fused_optimizer.step()  # updates nothing: it hands the rate to the kernels, which update in the backward pass


def init_tables(model: DistributedModelParallel, seed: int, half_width: float | None) -> None:
    """Fills the tables with uniform numbers that depend on seed, table and row alone, not on the placement.

    Args:
        half_width: Numbers lie in [-this, this]; None: 1 / sqrt(rows of the table).
    """
    for name, tensor in model.state_dict().items():
        if not hasattr(tensor, "local_shards"):
            continue
        rows, width = tensor.size()
        bound = half_width if half_width is not None else 1.0 / float(np.sqrt(rows))
        for shard in tensor.local_shards():
            first, column = shard.metadata.shard_offsets
            count, columns = shard.metadata.shard_sizes
            for block in range(first // INIT_BLOCK_ROWS, -(-(first + count) // INIT_BLOCK_ROWS)):
                start = block * INIT_BLOCK_ROWS
                values = _block(seed, name, block, min(INIT_BLOCK_ROWS, rows - start), width, bound)
                low, high = max(start, first), min(start + len(values), first + count)
                part = values[low - start : high - start, column : column + columns]
                with torch.no_grad():
                    shard.tensor[low - first : high - first].copy_(torch.from_numpy(part))


def _block(seed: int, name: str, block: int, rows: int, width: int, bound: float) -> np.ndarray:
    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, block])))
    return random.uniform(-bound, bound, (rows, width)).astype(np.float32)

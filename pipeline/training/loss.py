"""Loss of some rows, and the sums that metrics are made of."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from pipeline.data.batch import Batch
from pipeline.training.config import TrainConfig


def logits_of(model: nn.Module, batch: Batch, config: TrainConfig) -> torch.Tensor:
    """Returns the logits, float32 [B]. Matrix products outside the tables run in `dense_precision`."""
    with dense_precision(config, batch.dense.device):
        logits: torch.Tensor = model(*batch.inputs)
    return logits.float()


def dense_precision(config: TrainConfig, device: torch.device) -> AbstractContextManager[object]:
    """Lets matrix products inside the block run in `dense_precision`."""
    return nullcontext() if config.dense_precision != "bf16" else torch.autocast(device.type, torch.bfloat16)


def loss_sums(logits: torch.Tensor, losses: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Returns (rows, loss, labels, predictions) of some rows, weighted by row, float64 [4].

    Args:
        losses: Loss of each row times its weight.
    """
    each = torch.stack([weights, losses, labels * weights, torch.sigmoid(logits) * weights])
    return each.sum(dim=1, dtype=torch.float64)

"""A training as a plain loop, losses by a script, and the weights of a trainer."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from pipeline.data.batch import Batch
from pipeline.training.state import checkpoint
from pipeline.training.state.progress import LossSums
from pipeline.training.trainer import Trainer

STEPS = 14
"""Batches of an epoch: 13 of 160 rows, and one of a single row."""


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    whole = checkpoint.full_state(trainer.model.state_dict())
    assert whole is not None
    return {name: value.clone() for name, value in whole.items()}


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(a[name].equal(b[name]) for name in a)


def scripted(values: list[float], seen: list[dict[str, torch.Tensor]] | None = None) -> Callable[[Any], LossSums]:
    """A validation that returns these NEs, one per call, and records the weights it sees."""
    coming = iter(values)

    def validate(model: Any) -> LossSums:
        assert not model.training
        if seen is not None:
            whole = checkpoint.full_state(model.state_dict())
            assert whole is not None
            seen.append({name: value.clone() for name, value in whole.items()})
        return LossSums(rows=100, labels=50, predictions=50, loss=next(coming) * 100 * math.log(2.0))

    return validate


class PlainLoop:
    """The same model on nn.functional, with its optimizers written out."""

    def __init__(self, weights: dict[str, torch.Tensor], table_rate: float, make_optimizer: Callable[..., Any]) -> None:
        self.weights = {name: value.clone().requires_grad_() for name, value in weights.items()}
        self.tables = [value for name, value in self.weights.items() if name.startswith("embeddings.")]
        self.moments = [torch.zeros(len(table)) for table in self.tables]
        dense = [value for name, value in self.weights.items() if not name.startswith("embeddings.")]
        self.optimizer = make_optimizer(dense, lr=0.02, weight_decay=0.01)
        self.table_rate = table_rate

    def forward(self, batch: Batch) -> torch.Tensor:
        w = self.weights
        dense = batch.dense
        for layer in ("bottom.0", "bottom.2"):
            dense = F.relu(F.linear(dense, w[f"{layer}.weight"], w[f"{layer}.bias"]))
        vectors = [dense]
        for table, (name, mode) in zip(self.tables, {"cat_user": "sum", "list_items": "mean"}.items(), strict=True):
            ids = batch.sparse[name]
            vectors.append(F.embedding_bag(ids.values(), table, ids.offsets()[:-1], mode=mode))
        pairs = [(vectors[i] * vectors[j]).sum(1, keepdim=True) for i, j in ((0, 1), (0, 2), (1, 2))]
        hidden = F.relu(F.linear(torch.cat([dense, *pairs], 1), w["top.0.weight"], w["top.0.bias"]))
        return F.linear(hidden, w["logit.weight"], w["logit.bias"]).squeeze(1)

    def step(self, batch: Batch) -> np.ndarray:
        """Returns the losses of the rows before the update."""
        losses = F.binary_cross_entropy_with_logits(self.forward(batch), batch.labels, reduction="none")
        self.optimizer.zero_grad()
        for table in self.tables:
            table.grad = None
        losses.mean().backward()
        self.optimizer.step()
        with torch.no_grad():
            for table, moment in zip(self.tables, self.moments, strict=True):
                assert table.grad is not None
                moment += table.grad.square().mean(1)
                table -= self.table_rate * table.grad / (moment.sqrt() + 1e-8)[:, None]
        return losses.detach().double().numpy()

"""A plain training loop, and what tests of the trainer give it: validations, batches that end or are bad."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from pipeline.data.batch import Batch
from pipeline.data.position import LostRows, Position
from pipeline.preprocessing.client import Client
from pipeline.training.state import checkpoint
from pipeline.training.state.progress import LossSums
from pipeline.training.trainer import Trainer

Maker = Callable[..., tuple[Trainer, list[dict[str, Any]]]]
STEPS = 14
"""Batches of an epoch: 13 of 160 rows, and one of a single row."""
CACHED: dict[str, Any] = {"table_memory": "uvm_caching"}
"""Tables in host memory. The device caches a fifth, so rows are swapped at every step."""
ON_CUDA = pytest.mark.gpu
PLACES = pytest.mark.parametrize("place", [{}, pytest.param(CACHED, marks=ON_CUDA)], ids=["device", "cached"])
LOST = (LostRows(epoch=0, path="file:///day.parquet", row_group=3, rows=90),)


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


class Cut(Exception):
    """The batch never came."""


def cut_after(client: Client, batches: int) -> Callable[[Position], Iterator[Batch]]:
    """Yields this many of the client's batches, then raises an error."""
    left = batches

    def stream(position: Position) -> Iterator[Batch]:
        nonlocal left
        for batch in client.batches(position):
            if left == 0:
                raise Cut
            left -= 1
            yield batch

    return stream


def poisoned(client: Client, step: int, value: float) -> Callable[[Position], Iterator[Batch]]:
    """Yields the client's batches. Replaces one dense number of the batch with this index."""

    def stream(position: Position) -> Iterator[Batch]:
        for batch in client.batches(position):
            if batch.position.batches == step + 1:
                batch.dense[3, 1] = value
            yield batch

    return stream

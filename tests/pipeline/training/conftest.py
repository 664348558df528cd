"""Trainers inside this process, as a group of one rank."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.jobs.training.rank.model import build_model, open_client
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.training.restore import Restore
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.state.progress import LossSums
from pipeline.training.trainer import Trainer, TrainingData


@pytest.fixture
def make_trainer(
    rank_spec: Callable[..., RankSpec], device: torch.device, tmp_path: Path
) -> Callable[..., tuple[Trainer, list[dict[str, Any]]]]:
    """(validate, batches, dropout, **training) -> a trainer on the small warehouse, and the list of its events."""

    def make(
        validate: Callable[[Any], LossSums] | None = None,
        batches: Callable[[Position], Iterator[Batch]] | None = None,
        dropout: float = 0.0,
        **training: Any,
    ) -> tuple[Trainer, list[dict[str, Any]]]:
        spec = rank_spec(tmp_path, **training)
        spec = spec.model_copy(update={"model": spec.model.model_copy(update={"dropout": dropout})})
        model, _ = build_model(spec, 1, device)
        events: list[dict[str, Any]] = []
        source = batches or train_batches(spec).batches
        data, restore = TrainingData(source, validate), Restore(Checkpoints(tmp_path / "checkpoints"))
        return Trainer(model, spec.training, data, restore, events.append, spec.seed, device), events

    return make


@pytest.fixture
def train_client(rank_spec: Callable[..., RankSpec], tmp_path: Path) -> Client:
    """The batches that a trainer of the small warehouse sees."""
    return train_batches(rank_spec(tmp_path))


def train_batches(spec: RankSpec) -> Client:
    return open_client(
        spec, InlineSource({"train": spec.train}, spec.preprocessing), "train", spec.train, 0, shuffled=True
    )

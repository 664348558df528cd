"""Batches whose loss is not finite are left out by all ranks, and nothing else changes."""

import itertools
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.errors import TrainingError
from pipeline.preprocessing.client import Client
from pipeline.transforms.column import Column
from tests.pipeline.bags import sparse_tensor
from tests.pipeline.training.loops import STEPS, Maker, PlainLoop, poisoned, same, weights_of


@pytest.mark.parametrize("values", [(math.nan,), (math.nan, math.inf)])
def test_a_batch_can_be_left_out(make_trainer: Maker, train_client: Client, values: tuple[float, ...]) -> None:
    """Against a plain loop that never saw the batches."""
    source: Any = train_client
    value: float | torch.Tensor
    for i, value in enumerate(values):
        source = SimpleNamespace(batches=poisoned(source, 6 + i, value))
    trainer, events = make_trainer(None, source.batches, on_nonfinite="skip", dense_optimizer="adam")
    loop = PlainLoop(weights_of(trainer), table_rate=0.1, make_optimizer=torch.optim.Adam)
    progress = trainer.train()
    for batch in train_client.batches():
        if not 7 <= batch.position.batches < 7 + len(values):
            loop.step(batch)
    for name, value in weights_of(trainer).items():
        torch.testing.assert_close(value, loop.weights[name].detach(), atol=1e-4, rtol=0.0)
    assert (progress.steps, progress.rows, progress.skipped_batches) == (STEPS, 2081, len(values))
    assert progress.first_sight.rows == 2081 - 160 * len(values)
    metrics = [event["metrics"] for event in events if event["event"] == "metrics"]
    assert metrics[-1]["skipped_batches"] == len(values)


def test_leaving_batches_out_changes_nothing_else(make_trainer: Maker, tmp_path: Path) -> None:
    weights = []
    for policy in ("stop", "skip"):
        trainer, _ = make_trainer(on_nonfinite=policy)
        trainer.train()
        weights.append(weights_of(trainer))
        (tmp_path / "checkpoints").rename(tmp_path / policy)
    assert same(*weights)


def test_ten_batches_in_a_row_end_training(make_trainer: Maker) -> None:
    trainer, _ = make_trainer(
        None, lambda position: forever(math.nan), on_nonfinite="skip", checkpoint_every_steps=None
    )
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "loss at step 10: expected a finite number, got none in 10 batches in a row. "
        "Clamp dense columns with far outliers (kind: clamp), or lower the learning rates; the last good checkpoint is kept."
    )


def forever(value: float) -> Iterator[Batch]:
    """Batches of one row with this value in every dense column."""
    names = ["cat_user", "list_items"]
    column = Column(np.array([1]), np.array([0, 1]))
    for number in itertools.count(1):
        yield Batch(
            dense=torch.full((1, 3), value), sparse=sparse_tensor(names, (column, column)), labels=torch.ones(1),
            weights=torch.ones(1), position=Position(batches=number), global_rows=1,
        )  # fmt: skip


def test_no_warnings_in_a_step(make_trainer: Maker) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer, _ = make_trainer(max_steps=2)
        trainer.train()

"""The loop against a plain one: same losses and same weights. What it does after which steps, and how it ends."""

import itertools
import math
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.errors import TrainingError
from pipeline.preprocessing.client import Client
from pipeline.training.state import async_checkpoint, checkpoint
from pipeline.training.state.progress import LossSums
from tests.pipeline.training.loops import STEPS, Cut, Maker, PlainLoop, cut_after, poisoned, same, scripted, weights_of


def normalized(losses: np.ndarray, labels: np.ndarray) -> float:
    return float(losses.mean() / log_loss(labels, np.full(len(labels), labels.mean())))


@pytest.mark.parametrize(
    ("sharding", "kind", "optimizer"),
    [("table_wise", "adamw", torch.optim.AdamW), ("row_wise", "adam", torch.optim.Adam)],
)
def test_training_is_the_plain_loop(
    make_trainer: Maker, train_client: Client, sharding: str, kind: str, optimizer: Callable[..., Any]
) -> None:
    trainer, events = make_trainer(epochs=2, sharding=sharding, dense_optimizer=kind)
    loop = PlainLoop(weights_of(trainer), table_rate=0.1, make_optimizer=optimizer)
    progress = trainer.train()
    found = {event["step"]: event["metrics"] for event in events if event["event"] == "metrics"}
    assert sorted(found) == list(range(1, 2 * STEPS + 1))
    losses: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    for epoch in (0, 1):
        for batch in train_client.batches(Position(epoch=epoch)):
            losses.append(loop.step(batch))
            labels.append(batch.labels.numpy())
            metrics = found[len(losses)]
            if len(batch.labels) > 1:
                assert metrics["train_ne_window"] == pytest.approx(normalized(losses[-1], labels[-1]), abs=1e-4)
            else:
                assert metrics["train_ne_window"] is None
            if epoch == 0 and len(losses) > 1:
                first = np.concatenate(losses), np.concatenate(labels)
                assert metrics["train_ne_progressive"] == pytest.approx(normalized(*first), abs=1e-4)
    for name, value in weights_of(trainer).items():
        torch.testing.assert_close(
            value, loop.weights[name].detach(), atol=1e-4, rtol=0.0, msg=partial("{}: {}".format, name)
        )
    first = np.concatenate(losses[:STEPS]), np.concatenate(labels[:STEPS])
    assert progress.first_sight.ne == pytest.approx(normalized(*first), abs=1e-4)
    assert progress.first_sight.rows == 2081
    assert (progress.steps, progress.rows) == (2 * STEPS, 2 * 2081)


def test_validates_after_each_epoch_by_default(make_trainer: Maker) -> None:
    trainer, events = make_trainer(scripted([0.9, 0.8, 0.85]), epochs=3, batch_rows=700)
    progress = trainer.train()
    steps = [event["step"] for event in events if "valid_ne" in event.get("metrics", {})]
    assert steps == [3, 6, 9]
    assert progress.best_step == 6


@pytest.mark.parametrize("steps", [1, 13, 14, 20])
def test_max_steps_counts_all_attempts(make_trainer: Maker, train_client: Client, steps: int) -> None:
    if steps > 5:
        cut, _ = make_trainer(None, cut_after(train_client, 5), max_steps=steps, epochs=9)
        with pytest.raises(Cut):
            cut.train()
    trainer, _ = make_trainer(max_steps=steps, epochs=9)
    assert trainer.train().steps == steps


def test_checkpoints_are_written_as_configured_and_few_are_kept(make_trainer: Maker, tmp_path: Path) -> None:
    trainer, _ = make_trainer(scripted([0.5]), checkpoint_every_steps=4, keep_checkpoints=2)
    trainer.train()
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        "best", "step-0000000012", "step-0000000014",
    ]  # fmt: skip


@pytest.mark.parametrize("stop", [9, 23])
def test_checkpoints_by_the_clock_change_nothing(
    make_trainer: Maker, train_client: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stop: int
) -> None:
    """Every reading of the clock adds a second. An interrupted training resumes where the clock last saved it."""
    plain, _ = make_trainer(epochs=2, checkpoint_every_steps=None)
    plain.train()
    (tmp_path / "checkpoints").rename(tmp_path / "plain")
    ticks = itertools.count()
    clock = SimpleNamespace(monotonic=lambda: next(ticks), perf_counter=time.perf_counter)
    monkeypatch.setattr(async_checkpoint, "time", clock)
    settings: dict[str, Any] = {"epochs": 2, "checkpoint_every_steps": None, "checkpoint_every_seconds": 6}
    first, events = make_trainer(None, cut_after(train_client, stop), **settings)
    with pytest.raises(Cut):
        first.train()
    saved = [event["step"] for event in events if event["event"] == "saved"]
    assert saved == [step for step in (6, 12, 18) if step <= stop]
    second, events = make_trainer(**settings)
    second.train()
    assert events[0]["event"] == "resumed"
    assert events[0]["step"] == saved[-1]
    assert same(weights_of(second), weights_of(plain))


def test_the_metrics_say_how_long_checkpoints_block_training(make_trainer: Maker) -> None:
    trainer, events = make_trainer(checkpoint_every_steps=4, checkpoint_async=False)
    trainer.train()
    blocked = {
        event["step"]: event["metrics"]["checkpoint_blocked_seconds"]
        for event in events
        if "checkpoint_blocked_seconds" in event.get("metrics", {})
    }
    assert list(blocked) == [5, 9, 13]  # the steps after a checkpoint
    assert 0.0 < sum(blocked.values()) < trainer.checkpointer.blocked_seconds


def test_no_checkpoint_before_the_end(make_trainer: Maker, tmp_path: Path) -> None:
    trainer, _ = make_trainer(checkpoint_every_steps=None)
    trainer.train()
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-0000000014"]


def finite_checkpoint(root: Path) -> int | None:
    """Returns the step of the newest checkpoint and checks that its numbers are finite."""
    folder = checkpoint.find_latest(root)
    if folder is None:
        return None
    tensors = {name: torch.zeros(size) for name, size in checkpoint.stored_shapes(folder).items()}
    checkpoint.load(folder, tensors)
    assert all(tensor.isfinite().all() for tensor in tensors.values())
    return int(checkpoint.read_progress(folder)["steps"])


def test_a_loss_that_is_not_finite_ends_training(make_trainer: Maker, train_client: Client, tmp_path: Path) -> None:
    trainer, _ = make_trainer(None, poisoned(train_client, 6, math.nan), log_every_steps=5)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "loss at step 8: expected a finite number, got nan. "
        "Clamp dense columns with far outliers (kind: clamp), or lower the learning rates; the last good checkpoint is kept."
    )
    assert finite_checkpoint(tmp_path / "checkpoints") == 4


@pytest.mark.parametrize("policy", ["stop", "skip"])
@pytest.mark.parametrize("rate", [1e30, 1e38])
def test_exploding_rates_leave_a_finite_checkpoint_or_none(
    make_trainer: Maker, tmp_path: Path, rate: float, policy: str
) -> None:
    trainer, _ = make_trainer(
        dense_optimizer="sgd", dense_learning_rate=rate, checkpoint_every_steps=1, on_nonfinite=policy
    )
    with pytest.raises(TrainingError, match=r"expected .*finite.* the last good checkpoint is kept"):
        trainer.train()
    finite_checkpoint(tmp_path / "checkpoints")


def test_weights_that_are_not_finite_are_not_saved(make_trainer: Maker, tmp_path: Path) -> None:
    """A step's loss belongs to the weights before its update. It may be finite when the new weights are not."""
    trainer, _ = make_trainer(checkpoint_every_steps=2, checkpoint_async=False)
    step = trainer.train_step

    def breaking(batch: Batch, coming: Batch | None = None) -> None:
        step(batch, coming)
        if trainer.progress.steps == 3:
            with torch.no_grad():
                dict(trainer.model.named_parameters())["logit.bias"].fill_(math.inf)

    trainer.train_step = breaking  # type: ignore[method-assign]
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "weights at step 4, 'model/logit.bias': expected finite numbers, got inf or nan. "
        "Clamp dense columns with far outliers (kind: clamp), or lower the learning rates; the last good checkpoint is kept."
    )
    assert finite_checkpoint(tmp_path / "checkpoints") == 2


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_validation_that_is_not_finite_ends_training(make_trainer: Maker, tmp_path: Path, loss: float) -> None:
    trainer, _ = make_trainer(scripted([0.5, loss]), validate_every_steps=2)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        f"validation loss at step 4: expected a finite number, got {loss}. "
        "Clamp dense columns with far outliers (kind: clamp), or lower the learning rates; the last good checkpoint is kept."
    )
    checkpoint.verify(tmp_path / "checkpoints" / "best")
    assert checkpoint.read_progress(tmp_path / "checkpoints" / "best")["best_step"] == 2


def test_validation_needs_both_labels(make_trainer: Maker) -> None:
    trainer, _ = make_trainer(
        lambda model: LossSums(rows=5, labels=5, loss=1.0, predictions=3.0), validate_every_steps=1
    )
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == ("validation rows: expected both labels, got only one. Choose other validation rows.")


def test_an_epoch_without_rows_is_an_error(make_trainer: Maker) -> None:
    trainer, _ = make_trainer(None, lambda position: iter(()))
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "training rows: expected at least one batch an epoch, got none. Check the split and the filter."
    )


def test_the_end_is_always_validated(make_trainer: Maker) -> None:
    trainer, _ = make_trainer(scripted([0.9, 0.8]), max_steps=7, validate_every_steps=5)
    progress = trainer.train()
    assert progress.best_step == 7
    assert progress.best_ne == pytest.approx(0.8)


def test_running_out_of_rows_before_max_steps_is_an_error(make_trainer: Maker) -> None:
    trainer, _ = make_trainer(max_steps=100, epochs=2)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        f"training.max_steps: expected 100 steps, got rows for {2 * STEPS}. Raise epochs, or lower max_steps."
    )

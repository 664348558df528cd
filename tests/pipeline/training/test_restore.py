"""A training goes on after any interruption as if there had been none, and ends with its best model."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.errors import TrainingError
from pipeline.preprocessing.client import Client
from pipeline.training.state import checkpoint
from pipeline.training.state.progress import TrainingProgress
from tests.pipeline.training.loops import (
    CACHED,
    LOST,
    ON_CUDA,
    PLACES,
    STEPS,
    Cut,
    Maker,
    cut_after,
    same,
    scripted,
    weights_of,
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "stops"),
    [
        ({}, (0, 3, 9, STEPS, 23)),
        ({"dense_optimizer": "adagrad", "sharding": "row_wise"}, (9,)),
        ({"dense_optimizer": "sgd"}, (23,)),
        ({"dropout": 0.3}, (9,)),
        ({"checkpoint_async": False}, (9,)),
        ({"average_from_step": 3, "average_every_steps": 2, "sharding": "row_wise"}, (9, 23)),
        pytest.param(CACHED, (9,), marks=ON_CUDA),
        pytest.param(CACHED | {"average_from_step": 3, "average_every_steps": 2}, (23,), marks=ON_CUDA),
        pytest.param({"table_memory": "uvm"}, (9,), marks=ON_CUDA),
        ({"table_precision": "fp16"}, (9,)),
        pytest.param({"table_optimizer": "adam"}, (9,), marks=ON_CUDA),
    ],
    ids=[
        *("adam", "adagrad", "sgd", "dropout", "synchronous", "average"),
        *("cached", "cached average", "host", "fp16", "adam of tables"),
    ],
)
def test_an_interrupted_training_resumes_with_the_same_bits(
    make_trainer: Maker, train_client: Client, tmp_path: Path, settings: dict[str, Any], stops: tuple[int, ...]
) -> None:
    settings = {"epochs": 2, "warmup_steps": 5, "decay_steps": 40, "validate_every_steps": 5} | settings
    nes = {5: 0.9, 10: 0.7, 15: 0.8, 20: 0.6, 25: 0.65, 28: 0.64}
    whole, _ = make_trainer(scripted(list(nes.values())), **settings)
    expected = whole.train()
    weights = weights_of(whole)
    for stop in stops:
        (tmp_path / "checkpoints").rename(tmp_path / f"done before {stop}")
        first, _ = make_trainer(scripted(list(nes.values())), cut_after(train_client, stop), **settings)
        with pytest.raises(Cut):
            first.train()
        kept = stop - stop % 4
        second, events = make_trainer(scripted([ne for step, ne in nes.items() if step > kept]), **settings)
        progress = second.train()
        assert (events[0]["event"] == "resumed") == (kept > 0)
        assert events[0]["step"] == (kept or 1)
        assert same(weights_of(second), weights)
        assert without_times(progress) == without_times(expected)


def without_times(progress: TrainingProgress) -> dict[str, Any]:
    values = progress.model_dump(exclude={"busy_seconds", "wait_seconds"})
    sums = values.pop("first_sight")
    return values | {name: pytest.approx(value, rel=1e-12) for name, value in sums.items()}


def test_a_finished_training_trains_no_further(make_trainer: Maker) -> None:
    first, _ = make_trainer(scripted([0.5]))
    done = first.train()
    again, events = make_trainer(scripted([]))
    assert again.train() == done
    assert [event["event"] for event in events] == ["resumed"]
    assert same(weights_of(again), weights_of(first))


@PLACES
def test_early_stopping_restores_the_best_weights(make_trainer: Maker, tmp_path: Path, place: dict[str, str]) -> None:
    seen: list[dict[str, torch.Tensor]] = []
    trainer, events = make_trainer(
        scripted([0.9, 0.7, 0.71, 0.7, 0.2], seen),
        validate_every_steps=2,
        patience=2,
        epochs=5,
        checkpoint_every_steps=3,
        **place,
    )
    progress = trainer.train()
    assert (progress.steps, progress.best_step) == (8, 4)
    assert progress.best_ne == pytest.approx(0.7)
    assert same(weights_of(trainer), seen[1])
    assert not same(weights_of(trainer), seen[3])
    checkpoint.verify(tmp_path / "checkpoints" / "best")
    nes = [event["metrics"]["valid_ne"] for event in events if "valid_ne" in event.get("metrics", {})]
    assert nes == pytest.approx([0.9, 0.7, 0.71, 0.7])


def test_the_best_model_of_an_attempt_that_ended_counts_with_its_own_step(
    make_trainer: Maker, train_client: Client
) -> None:
    """The next attempt may train differently from its checkpoint on, for example because other rows are lost."""
    settings = {"validate_every_steps": 2, "checkpoint_every_steps": 3, "max_steps": 7}
    seen: list[dict[str, torch.Tensor]] = []
    first, _ = make_trainer(scripted([0.9, 0.5], seen), cut_after(train_client, 5), **settings)
    with pytest.raises(Cut):
        first.train()
    second, _ = make_trainer(scripted([0.95, 0.95, 0.95]), **settings)
    progress = second.train()
    assert progress.best_step == 4
    assert progress.best_ne == pytest.approx(0.5)
    assert same(weights_of(second), seen[1])


def test_a_best_model_that_lacks_rows_is_taken_only_if_that_is_accepted(
    make_trainer: Maker, train_client: Client
) -> None:
    """An attempt that lost rows after its last checkpoint has left it, and the next one has lost none."""
    settings = {"validate_every_steps": 2, "checkpoint_every_steps": 3, "max_steps": 7}

    def batches(position: Position) -> Iterator[Batch]:
        for batch in cut_after(train_client, 5)(position):
            known = LOST if batch.position.batches == 4 else ()
            yield replace(batch, position=batch.position.model_copy(update={"lost": known}))

    first, _ = make_trainer(scripted([0.9, 0.5]), batches, **settings)
    with pytest.raises(Cut):
        first.train()
    second, _ = make_trainer(scripted([0.95, 0.95, 0.95]), **settings)
    second.restore.keeps_lost = False
    with pytest.raises(TrainingError, match="a training without 90 rows that were quarantined"):
        second.train()


def test_checkpoint_of_another_hash_size_names_the_tensor(make_trainer: Maker, tmp_path: Path) -> None:
    trainer, _ = make_trainer(max_steps=2)
    trainer.train()
    folder = checkpoint.find_latest(tmp_path / "checkpoints")
    assert folder is not None
    wanted = trainer.learner.state()
    name = "model/embeddings.embedding_bags.cat_user.weight"
    wanted[name] = torch.zeros(51, 4)
    with pytest.raises(
        checkpoint.CheckpointError, match=rf"tensor '{name}': expected shape \(51, 4\), got \(50, 4\)\."
    ):
        checkpoint.load(folder, wanted)


def test_rows_that_were_lost_stay_in_every_checkpoint(make_trainer: Maker, train_client: Client) -> None:
    """Also those that are lost after the last batch of an epoch."""

    def batches(position: Position) -> Iterator[Batch]:
        for batch in train_client.batches(position):
            known = position.lost + LOST[: batch.position.batches > 5]
            yield replace(batch, position=batch.position.model_copy(update={"lost": known}))

    trainer, _ = make_trainer(batches=batches, max_steps=8)
    trainer.train()
    assert trainer.progress.position.lost == LOST
    longer, events = make_trainer(epochs=2)
    longer.data = replace(longer.data, lost=lambda: LOST * 2)
    longer.progress = longer.restore.begin(longer.learner, events.append)
    assert [event["lost"] for event in events if event["event"] == "resumed"] == [90]
    longer.progress = longer.progress.model_copy(update={"finished": False})
    longer.train_epoch()
    assert longer.progress.position == Position(epoch=1, lost=LOST * 2)


def test_a_training_that_lacks_rows_is_taken_up_only_if_that_is_accepted(
    make_trainer: Maker, train_client: Client, tmp_path: Path
) -> None:
    def batches(position: Position) -> Iterator[Batch]:
        for batch in train_client.batches(position):
            yield replace(batch, position=batch.position.model_copy(update={"lost": LOST}))

    make_trainer(batches=batches, max_steps=2)[0].train()
    trainer, _ = make_trainer()
    trainer.restore.keeps_lost = False
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "checkpoint of step 2: expected all rows, because preprocessing.on_corrupt is fail, got a training without 90 "
        "rows that were quarantined, the first in row group 3 of file 'file:///day.parquet'. Set "
        "preprocessing.on_corrupt=quarantine to go on without these rows, or delete the folder "
        f"'{tmp_path}/checkpoints' to train from the start."
    )

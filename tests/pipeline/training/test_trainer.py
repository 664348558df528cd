"""The loop against a plain one: same losses and same weights, also after any interruption."""

import itertools
import math
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss

from pipeline.data.batch import Batch
from pipeline.data.position import LostRows, Position, Times
from pipeline.errors import TrainingError
from pipeline.preprocessing.client import Client
from pipeline.training import trainer as trainer_module
from pipeline.training.state import async_checkpoint, checkpoint
from pipeline.training.state.progress import LossSums, TrainingProgress
from pipeline.training.trainer import Trainer
from pipeline.transforms.column import Column
from tests.pipeline.bags import sparse_tensor
from tests.pipeline.training.plain_loop import STEPS, PlainLoop, same, scripted, weights_of

Maker = Callable[..., tuple[Trainer, list[dict[str, Any]]]]


CACHED: dict[str, Any] = {"table_memory": "uvm_caching"}
"""Tables in host memory. The device caches a fifth, so rows are swapped at every step."""
ON_CUDA = pytest.mark.gpu
PLACES = pytest.mark.parametrize("place", [{}, pytest.param(CACHED, marks=ON_CUDA)], ids=["device", "cached"])


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
            value, loop.weights[name].detach(), atol=1e-4, rtol=0.0, msg=lambda m, n=name: f"{n}: {m}"
        )
    first = np.concatenate(losses[:STEPS]), np.concatenate(labels[:STEPS])
    assert progress.first_sight.ne == pytest.approx(normalized(*first), abs=1e-4)
    assert progress.first_sight.rows == 2081
    assert (progress.steps, progress.rows) == (2 * STEPS, 2 * 2081)


def test_ne_is_log_loss_over_entropy() -> None:
    random = np.random.default_rng(0)
    labels, predictions = (random.random(500) < 0.2).astype(float), random.uniform(0.01, 0.9, 500)
    entropy = log_loss(labels, np.full(500, labels.mean()))
    parts = [
        LossSums(
            rows=len(y), labels=float(y.sum()), predictions=float(p.sum()),
            loss=float(log_loss(y, p, labels=[0, 1], normalize=False)),
        )
        for y, p in ((labels[:100], predictions[:100]), (labels[100:], predictions[100:]))
    ]  # fmt: skip
    assert parts[0].plus(parts[1]).ne == pytest.approx(log_loss(labels, predictions) / entropy, rel=1e-12)
    assert LossSums().plus(parts[0]) == parts[0]


@pytest.mark.parametrize("labels", [0.0, 5.0])
def test_ne_of_one_class_is_undefined(labels: float) -> None:
    assert LossSums(rows=5.0, loss=1.0, labels=labels).ne is None


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
    assert (progress.steps, progress.best_step, progress.best_ne) == (8, 4, pytest.approx(0.7))
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
    assert (progress.best_step, progress.best_ne) == (4, pytest.approx(0.5))
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
    second.keeps_lost = False
    with pytest.raises(TrainingError, match="a training without 90 rows that were quarantined"):
        second.train()


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


@pytest.mark.parametrize("values", [(math.nan,), (math.nan, math.inf)])
def test_a_batch_can_be_left_out(make_trainer: Maker, train_client: Client, values: tuple[float, ...]) -> None:
    """Against a plain loop that never saw the batches."""
    source: Any = train_client
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
        "Lower the learning rates; the last good checkpoint is kept."
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


def poisoned(client: Client, step: int, value: float) -> Callable[[Position], Iterator[Batch]]:
    """Yields the client's batches. Replaces one dense number of the batch with this index."""

    def stream(position: Position) -> Iterator[Batch]:
        for batch in client.batches(position):
            if batch.position.batches == step + 1:
                batch.dense[3, 1] = value
            yield batch

    return stream


def test_a_loss_that_is_not_finite_ends_training(make_trainer: Maker, train_client: Client, tmp_path: Path) -> None:
    trainer, _ = make_trainer(None, poisoned(train_client, 6, math.nan), log_every_steps=5)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "loss at step 8: expected a finite number, got nan. Lower the learning rates; the last good checkpoint is kept."
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

    def breaking(*batches: Batch | None) -> None:
        step(*batches)
        if trainer.progress.steps == 3:
            with torch.no_grad():
                dict(trainer.model.named_parameters())["logit.bias"].fill_(math.inf)

    trainer.train_step = breaking  # type: ignore[method-assign]
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "weights at step 4, 'model/logit.bias': expected finite numbers, got inf or nan. "
        "Lower the learning rates; the last good checkpoint is kept."
    )
    assert finite_checkpoint(tmp_path / "checkpoints") == 2


@pytest.mark.parametrize("loss", [math.nan, math.inf])
def test_a_validation_that_is_not_finite_ends_training(make_trainer: Maker, tmp_path: Path, loss: float) -> None:
    trainer, _ = make_trainer(scripted([0.5, loss]), validate_every_steps=2)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        f"validation loss at step 4: expected a finite number, got {loss}. "
        "Lower the learning rates; the last good checkpoint is kept."
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


def test_no_warnings_in_a_step(make_trainer: Maker) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        trainer, _ = make_trainer(max_steps=2)
        trainer.train()


def test_checkpoint_of_another_hash_size_names_the_tensor(make_trainer: Maker, tmp_path: Path) -> None:
    trainer, _ = make_trainer(max_steps=2)
    trainer.train()
    folder = checkpoint.find_latest(tmp_path / "checkpoints")
    assert folder is not None
    wanted = trainer.state()
    name = "model/embeddings.embedding_bags.cat_user.weight"
    wanted[name] = torch.zeros(51, 4)
    with pytest.raises(
        checkpoint.CheckpointError, match=rf"tensor '{name}': expected shape \(51, 4\), got \(50, 4\)\."
    ):
        checkpoint.load(folder, wanted)


@PLACES
@pytest.mark.parametrize("validated", [True, False])
def test_the_exported_weights_are_the_mean_over_steps(
    make_trainer: Maker, tmp_path: Path, validated: bool, place: dict[str, str]
) -> None:
    on_the_way = []
    for step in (4, 6, 8):
        plain, _ = make_trainer(max_steps=step)
        plain.train()
        on_the_way.append(weights_of(plain))
        (tmp_path / "checkpoints").rename(tmp_path / f"checkpoints {step}")
    seen: list[dict[str, torch.Tensor]] = []
    validate = scripted([0.5], seen) if validated else None
    averaged, _ = make_trainer(validate, max_steps=8, average_from_step=4, average_every_steps=2, **place)
    averaged.train()
    found = weights_of(averaged)
    for name, value in found.items():
        expected = torch.stack([weights[name].double() for weights in on_the_way]).mean(0)
        assert torch.allclose(value.double(), expected, atol=1e-6)
    assert not validated or same(found, seen[0])


@PLACES
def test_averaging_does_not_disturb_training(make_trainer: Maker, tmp_path: Path, place: dict[str, str]) -> None:
    plain, _ = make_trainer(max_steps=8, **place)
    plain.train()
    weights = weights_of(plain)
    (tmp_path / "checkpoints").rename(tmp_path / "plain")
    averaged, _ = make_trainer(
        scripted([0.5, 0.4, 0.6, 0.7]), max_steps=8, average_from_step=2, average_every_steps=2, validate_every_steps=2,
        **place,
    )  # fmt: skip
    averaged.train()
    averaged.load(checkpoint.find_latest(tmp_path / "checkpoints"))
    assert same(weights_of(averaged), weights)


def test_the_end_is_always_validated(make_trainer: Maker) -> None:
    trainer, _ = make_trainer(scripted([0.9, 0.8]), max_steps=7, validate_every_steps=5)
    progress = trainer.train()
    assert (progress.best_step, progress.best_ne) == (7, pytest.approx(0.8))


def test_running_out_of_rows_before_max_steps_is_an_error(make_trainer: Maker) -> None:
    trainer, _ = make_trainer(max_steps=100, epochs=2)
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        f"training.max_steps: expected 100 steps, got rows for {2 * STEPS}. Raise epochs, or lower max_steps."
    )


STEP_SECONDS = 0.5
"""Duration of each step on the tests' clock."""


def times_of(epoch: int, batches: int) -> Times:
    """Returns made-up times of a batch. All differ, also between kinds."""
    return Times(extract=3.0 + epoch + batches / 8, transform=20.0 - batches / 4, wait=(7 * epoch + batches) % 5 / 4)


def timed(batches: Callable[[Position], Iterator[Batch]]) -> Callable[[Position], Iterator[Batch]]:
    def stream(position: Position) -> Iterator[Batch]:
        for batch in batches(position):
            yield replace(batch, times=times_of(batch.position.epoch, batch.position.batches))

    return stream


def times_by_step(steps: int) -> list[Times]:
    return [times_of(step // STEPS, step % STEPS + 1) for step in range(steps)]


@pytest.fixture
def steady_clock(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock that advances only during steps."""
    if device.type == "cuda":
        pytest.skip("on CUDA the trainer times the wait for a batch itself")
    now = 0.0

    def tick() -> float:  # the trainer looks before a step and after it
        nonlocal now
        now += STEP_SECONDS
        return now

    monkeypatch.setattr(trainer_module, "time", SimpleNamespace(perf_counter=tick))
    monkeypatch.setattr(Trainer, "await_device", lambda trainer: None)


NAMES = {"extract": "batch_extract_seconds", "transform": "batch_transform_seconds", "wait": "batch_wait_seconds"}


@pytest.mark.parametrize("cut", [None, 3, 9, STEPS, 23])
@pytest.mark.usefixtures("steady_clock")
def test_each_window_reports_the_times_of_its_batches(
    make_trainer: Maker, train_client: Client, cut: int | None
) -> None:
    """Compares with sums over the made-up times. A resumed training reports the same as an uninterrupted one."""
    settings = {"epochs": 2, "log_every_steps": 4, "checkpoint_every_steps": 6}
    if cut is not None:
        first, _ = make_trainer(None, timed(cut_after(train_client, cut)), **settings)
        with pytest.raises(Cut):
            first.train()
    resumed = 0 if cut is None else cut - cut % 6
    trainer, events = make_trainer(None, timed(train_client.batches), **settings)
    progress = trainer.train()
    known = times_by_step(2 * STEPS)
    ends = [end for end in (4, 6, 8, 12, 14, 16, 18, 20, 24, 28) if end > resumed]  # logs, checkpoints, ends of epochs
    found = [event for event in events if event["event"] == "metrics"]
    assert [event["step"] for event in found] == ends
    for start, end, event in zip([resumed, *ends], ends, found, strict=False):
        window, so_far = known[start:end], known[:end]
        for kind, name in NAMES.items():
            assert event["metrics"][name] == pytest.approx(np.mean([getattr(times, kind) for times in window]))
        for name, stretch in (("stall_fraction_window", window), ("stall_fraction", so_far)):
            waited = sum(times.wait for times in stretch)
            assert event["metrics"][name] == pytest.approx(waited / (waited + STEP_SECONDS * len(stretch)))
    waited = sum(times.wait for times in known)
    assert progress.wait_seconds == pytest.approx(waited)
    assert progress.busy_seconds == pytest.approx(waited + STEP_SECONDS * 2 * STEPS)
    assert progress.stalled == pytest.approx(progress.wait_seconds / progress.busy_seconds)


@pytest.mark.usefixtures("steady_clock")
def test_batches_that_are_ready_do_not_stall(make_trainer: Maker, train_client: Client) -> None:
    at_once = (replace(batch, times=Times(extract=1.0)) for batch in train_client.batches())
    trainer, events = make_trainer(None, lambda position: at_once)
    assert trainer.train().stalled == 0.0
    assert {event["metrics"]["stall_fraction_window"] for event in events if "metrics" in event} == {0.0}
    assert {event["metrics"]["batch_extract_seconds"] for event in events if "metrics" in event} == {1.0}


LOST = (LostRows(epoch=0, path="file:///day.parquet", row_group=3, rows=90),)


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
    longer.lost = lambda: LOST * 2
    longer.restore()
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
    trainer.keeps_lost = False
    with pytest.raises(TrainingError) as caught:
        trainer.train()
    assert str(caught.value) == (
        "checkpoint of step 2: expected all rows, because preprocessing.on_corrupt is fail, got a training without 90 "
        "rows that were quarantined, the first in row group 3 of file 'file:///day.parquet'. Set "
        "preprocessing.on_corrupt=quarantine to go on without these rows, or delete the folder "
        f"'{tmp_path}/checkpoints' to train from the start."
    )

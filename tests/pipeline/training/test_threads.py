"""The number of threads of a step follows what steps take, and never changes a weight."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from pipeline.training import threads
from pipeline.training.state.progress import LossSums
from pipeline.training.threads import FIRST_STEPS, TRIAL_SHARE, ThreadChooser

Make = Callable[..., tuple[Any, list[dict[str, Any]]]]


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def run(chooser: ThreadChooser, seconds: dict[int, float], steps: int) -> float:
    """Makes steps that take so long with each number of threads. Returns the time of all."""
    total = 0.0
    for _ in range(steps):
        total += seconds[chooser.threads]
        chooser.after_step(seconds[chooser.threads], lambda: True)
    return total


def test_the_faster_number_of_threads_is_used_while_it_is_faster() -> None:
    """Idle, then busy, then idle again: with all threads 2 and 36 ms, with one 3 ms."""
    told: list[tuple[int, float, float]] = []
    chooser = ThreadChooser(4, lambda number: None, lambda *values: told.append(values))
    run(chooser, {4: 0.002, 1: 0.003}, 5_000)
    assert (chooser.chosen, told) == (4, [])
    run(chooser, {4: 0.036, 1: 0.003}, 500)
    assert chooser.chosen == 1
    took = run(chooser, {4: 0.036, 1: 0.003}, 100_000)
    assert took < 0.003 * 100_000 * (1 + 2 * TRIAL_SHARE)
    run(chooser, {4: 0.002, 1: 0.003}, 20_000)
    assert (chooser.chosen, [one[0] for one in told]) == (4, [1, 4])
    assert told[0][1:] == (0.036, 0.003)


def test_trials_take_a_hundredth_of_the_time_and_small_gains_change_nothing() -> None:
    used: list[int] = []
    chooser = ThreadChooser(2, used.append, lambda *values: pytest.fail("changed"))
    took = run(chooser, {2: 0.010, 1: 0.009}, FIRST_STEPS)
    assert used == [1]
    took += run(chooser, {2: 0.010, 1: 0.019}, 100_000)
    assert 0.010 * 100_000 < took < 0.010 * 100_000 * (1 + 2 * TRIAL_SHARE)
    chooser.restore()
    assert used[-1] == 2


def test_batches_that_are_not_full_always_have_all_threads() -> None:
    """In trials and after them. They are not timed, so a trial of full batches goes on behind them."""
    used = [4]
    chooser = ThreadChooser(4, used.append, lambda *values: None)
    seen: list[tuple[bool, int]] = []
    for step in range(600):
        full = step % 7 != 6
        chooser.begin(full)
        seen.append((full, used[-1]))
        chooser.after_step({4: 0.036, 1: 0.003}[used[-1]] if full else 1e-9, lambda: True)
    assert {threads for full, threads in seen if not full} == {4}
    assert {threads for full, threads in seen[300:] if full} == {1}
    chooser.restore()
    assert used[-1] == 4


@pytest.mark.slow
def test_weights_stay_where_bits_of_other_batches_depend_on_threads(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    """A product by the number of threads, for batches that are not full, stands for a library that cuts its sums."""
    settings = {"threads_per_rank": None, "epochs": 3, "batch_rows": 32, "embedding_kernel": "numba"}
    found, changes, validated, others = [], 0, list[int](), 0

    def validate(model: Any) -> LossSums:
        validated.append(torch.get_num_threads())
        return LossSums.of(torch.tensor([4.0, 2.0, 2.0, 2.0]))

    for name in ("fixed", "changing"):
        trainer, events = make_trainer(validate, **settings, validate_every_steps=5)
        trainer.restore.checkpoints.folder = trainer.restore.checkpoints.folder.with_name(name)
        if name == "fixed":
            trainer.threads = None
        else:
            for key, value in {"FIRST_STEPS": 2, "TRIAL_STEPS": 2, "TRIAL_SHARE": 1e9, "GAIN": 0.0}.items():
                monkeypatch.setattr(threads, key, value)
        inner = threads.get_unwrapped_module(trainer.model)

        def scored(dense: Any, vectors: Any, score: Any = inner.score) -> Any:
            nonlocal others
            full = len(dense) == 32
            others += not full
            return score(dense, vectors) * (1 if full else torch.get_num_threads())

        monkeypatch.setattr(inner, "score", scored)
        trainer.train()
        changes += sum(event["event"] == "threads" for event in events)
        state = trainer.model.state_dict().items()
        found.append({key: getattr(one, "local_tensor", lambda one=one: one)().clone() for key, one in state})
    assert changes > 3
    assert others > 3
    assert set(validated) == {2}
    for key, value in found[0].items():
        assert torch.equal(value, found[1][key]), key


def test_there_is_no_trial_if_bits_depend_on_threads() -> None:
    chooser = ThreadChooser(2, lambda number: pytest.fail("changed"), lambda *values: pytest.fail("changed"))
    asked: list[bool] = []
    for _ in range(3 * FIRST_STEPS):
        chooser.after_step(0.01, lambda: bool(asked.append(True)))
    assert asked == [True]


@pytest.mark.nightly
def test_a_training_that_changes_threads_learns_the_same_weights(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    """Every trial ends with a change here. The reference never changes."""
    settings = {"threads_per_rank": None, "epochs": 4, "batch_rows": 32, "embedding_kernel": "numba"}
    fixed, _ = make_trainer(**settings)
    fixed.threads = None
    fixed.train()
    for name, value in {"FIRST_STEPS": 2, "TRIAL_STEPS": 2, "TRIAL_SHARE": 1e9, "GAIN": 0.0}.items():
        monkeypatch.setattr(threads, name, value)
    changing, events = make_trainer(**settings)
    changing.restore.checkpoints.folder = changing.restore.checkpoints.folder.with_name("others")
    changing.train()
    found = [event["threads"] for event in events if event["event"] == "threads"]
    assert len(found) > 3
    assert set(found) == {1, 2}
    assert torch.get_num_threads() == 2
    for (name, one), other in zip(fixed.model.state_dict().items(), changing.model.state_dict().values(), strict=True):
        one, other = (getattr(value, "local_tensor", lambda value=value: value)() for value in (one, other))
        assert torch.equal(one, other), name


@pytest.mark.parametrize(
    "settings", [{"threads_per_rank": 2}, {"dense_gradient_norm": 1.0}, {"dropout": 0.5}, {"lanes": 2}]
)
def test_threads_stay_where_weights_could_depend_on_them(
    make_trainer: Make, two_threads: None, settings: dict[str, Any]
) -> None:
    trainer, _ = make_trainer(**{"threads_per_rank": None} | settings)
    assert trainer.threads is None


@pytest.mark.nightly
def test_a_model_with_other_bits_on_two_threads_is_found(
    make_trainer: Make, monkeypatch: pytest.MonkeyPatch, two_threads: None
) -> None:
    """A product that multiplies by the number of threads stands for a library that cuts its sums."""
    trainer, events = make_trainer(threads_per_rank=None, epochs=4, batch_rows=32)
    inner = threads.get_unwrapped_module(trainer.model)
    score = inner.score
    monkeypatch.setattr(inner, "score", lambda *values: score(*values) * torch.get_num_threads())
    monkeypatch.setattr(threads, "FIRST_STEPS", 2)
    trainer.threads = threads.choose_threads(trainer.model, trainer.config, trainer.device, trainer.report_threads)
    trainer.train()
    assert trainer.threads.may_change is False
    assert not [event for event in events if event["event"] == "threads"]

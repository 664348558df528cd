"""Learning rates by formula; initial tables by an independent draw of the same numbers."""

import hashlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from models.config import DLRMConfig
from pipeline.errors import ConfigError
from pipeline.jobs.training.rank.model import build_model
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import Client
from pipeline.training.config import TrainConfig
from pipeline.training.optim import INIT_BLOCK_ROWS, LearningRates, _block, dense_parameters, schedule
from pipeline.training.state import checkpoint


def test_schedule_is_flat_by_default() -> None:
    assert {schedule(TrainConfig(), step) for step in (0, 1, 10**6)} == {1.0}


@pytest.mark.parametrize(("warmup", "decay", "floor"), [(0, 10, 0.0), (4, 12, 0.25), (5, None, 0.0), (1, 2, 1.0)])
def test_schedule_closed_form(warmup: int, decay: int | None, floor: float) -> None:
    """Straight lines through (-1, 0), (warmup - 1, 1), (warmup, 1) and (decay, floor), flat after that."""
    config = TrainConfig(warmup_steps=warmup, decay_steps=decay, decay_floor=floor)
    end = (decay, floor) if decay else (1000, 1.0)
    x, y = zip(*([(-1, 0.0), (warmup - 1, 1.0)] if warmup else []), (warmup, 1.0), end, strict=True)
    for step in range(20):
        assert schedule(config, step) == pytest.approx(np.interp(step, x, y), abs=1e-12)


def test_decay_must_come_after_the_warmup() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(warmup_steps=5, decay_steps=5)
    assert str(caught.value) == "training.decay_steps: expected more than warmup_steps=5, got 5. Raise decay_steps."


def test_every_rank_needs_a_row() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(world_size=4, batch_rows=3)
    assert (
        str(caught.value)
        == "training.batch_rows: expected at least world_size=4, one row per rank, got 3. Raise batch_rows."
    )


@pytest.mark.parametrize("wrong", [{"table_optimizer": "lamb"}, {"max_steps": 0}, {"sync": "none"}, {"more": 1}])
def test_other_values_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        TrainConfig(**wrong)


def test_both_optimizers_follow_the_schedule(make_trainer: Callable[..., tuple]) -> None:
    trainer, _ = make_trainer(warmup_steps=4, table_learning_rate=0.4, dense_learning_rate=0.2)
    LearningRates(trainer.model, trainer.learner.optimizer, trainer.config).set(1)
    assert {group["lr"] for group in trainer.learner.optimizer.param_groups} == {0.1}
    assert [group["lr"] for group in trainer.model.fused_optimizer.param_groups] == pytest.approx([0.2, 0.2])


@pytest.mark.parametrize(("warmup_steps", "moved"), [(0, 0.4), (4, 0.1)])
def test_tables_follow_the_schedule(
    make_trainer: Callable[..., tuple], train_client: Client, warmup_steps: int, moved: float
) -> None:
    """Row-wise Adagrad divides its first gradient by that gradient's root mean square, which leaves the rate."""
    trainer, _ = make_trainer(warmup_steps=warmup_steps, table_learning_rate=0.4)
    before = checkpoint.full_state(trainer.model.state_dict())
    trainer.train_step(next(train_client.batches()))
    after = checkpoint.full_state(trainer.model.state_dict())
    assert before is not None
    assert after is not None
    for name in (name for name in before if name.startswith("embeddings.")):
        change = (after[name] - before[name]).double().pow(2).mean(1).sqrt()
        touched = change[change > 0]
        assert len(touched)
        assert touched.tolist() == pytest.approx([moved] * len(touched), rel=1e-2)


def test_the_dense_optimizer_holds_everything_but_the_tables(make_trainer: Callable[..., tuple]) -> None:
    trainer, _ = make_trainer()
    held = [parameter for group in trainer.learner.optimizer.param_groups for parameter in group["params"]]
    names = [name for name, _ in dense_parameters(trainer.model)]
    assert {name.split(".")[0] for name in names} == {"bottom", "top", "logit"}
    assert len(held) == len(names) == 2 * (2 + 1 + 1)


def drawn(seed: int, name: str, rows: int, width: int, bound: float) -> np.ndarray:
    """Uniform numbers of a whole table: one counter-based stream per (seed, table, block of rows)."""
    stream = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    random = np.random.Generator(np.random.Philox(np.random.SeedSequence([seed, stream, 0])))
    return (random.random((rows, width)) * 2.0 * bound - bound).astype(np.float32)


@pytest.mark.parametrize("sharding", ["table_wise", "row_wise"])
@pytest.mark.parametrize("half_width", [None, 0.5])
def test_initial_tables(
    rank_spec: Callable[..., RankSpec], device: torch.device, tmp_path: Path, sharding: str, half_width: float | None
) -> None:
    spec = rank_spec(tmp_path, sharding=sharding)
    spec = spec.model_copy(update={"model": DLRMConfig(embedding_width=4, embedding_init=half_width)})
    model, plan = build_model(spec, 1, device)
    assert {row["sharding"] for row in plan} == {sharding}
    whole = checkpoint.full_state(model.state_dict())
    assert whole is not None
    tables = {name: value for name, value in whole.items() if name.startswith("embeddings.")}
    assert [value.shape[0] for value in tables.values()] == [50, 83]
    for name, value in tables.items():
        bound = half_width or value.shape[0] ** -0.5
        np.testing.assert_allclose(value, drawn(spec.seed, name, *value.shape, bound), atol=1e-7)  # type: ignore[call-arg]
        assert value.abs().max() <= bound
    first, second = tables.values()
    assert not torch.equal(first[:50] / first.abs().max(), second[:50] / second.abs().max())


def test_blocks_of_a_large_table_differ() -> None:
    first, second = (_block(0, "t", block, 4, 2, 1.0) for block in (0, 1))
    assert not np.array_equal(first, second)
    assert np.array_equal(_block(0, "t", 0, INIT_BLOCK_ROWS, 2, 1.0)[:4], first)  # a short block is a prefix


def test_spans_in_epochs_are_those_steps() -> None:
    """1,000 rows in batches of 64 are 16 steps an epoch, the last with 40 rows."""
    config = TrainConfig(batch_rows=64, warmup=0.25, decay=3, validate_every=0.5, average_from=1.5)
    steps = TrainConfig(
        batch_rows=64, warmup_steps=4, decay_steps=48, validate_every_steps=8, average_from_step=24
    )  # fmt: skip
    assert config.in_steps(1_000) == steps
    assert steps.in_steps(1_000) is steps
    assert TrainConfig(validate_every=1e-9).in_steps(10).validate_every_steps == 1
    assert [one.averages for one in (config, steps, TrainConfig())] == [True, True, False]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"average_from": 1, "average_from_step": 5}, "training.average_from: expected average_from or average_from_step, got both"),
        ({"warmup": 1, "warmup_steps": 5}, "training.warmup: expected warmup or warmup_steps, got both"),
        ({"warmup": 1, "decay": 0.5}, "training.decay: expected more than warmup=1.0, got 0.5"),
    ],
)  # fmt: skip
def test_a_span_has_one_unit(given: dict[str, float], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.model_validate(given)
    assert str(caught.value).startswith(said)


def test_a_training_that_continues_goes_on_counting_updates(make_trainer: Callable[..., tuple]) -> None:
    """Adam on tables corrects its moments by the number of updates that they contain, those of earlier trainings too."""
    trainer, _ = make_trainer(table_optimizer="adam")
    rates = trainer.learner.rates
    rates.set(2, steps_before=10)
    assert {kernel.steps for kernel in rates.kernels} == {13}

"""Optimizers, precisions and kernels of the trainer, each against a simpler computation of the same numbers."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import ComputeDevice, EmbeddingLocation
from pydantic import ValidationError
from torch import nn

from pipeline.errors import ConfigError
from pipeline.training.config import TrainConfig
from pipeline.training.optim import BETAS, EPS, ReplicatedTables, dense_parameters
from pipeline.training.state import checkpoint
from pipeline.training.tables.bags import NumbaBags, set_update_number
from pipeline.training.trainer import Trainer

Maker = Callable[..., tuple[Trainer, list[dict[str, Any]]]]
FUSED = {
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adagrad": EmbOptimType.EXACT_ADAGRAD,
    "sgd": EmbOptimType.EXACT_SGD,
    "adam": EmbOptimType.ADAM,
}


def weights_of(trainer: Trainer) -> dict[str, torch.Tensor]:
    whole = checkpoint.full_state(trainer.model.state_dict())
    assert whole is not None
    return {name: value.float().clone() for name, value in whole.items()}


def train(make_trainer: Maker, steps: int, **settings: Any) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Returns a trainer after some steps, and its initial weights. Removes its checkpoints."""
    trainer, _ = make_trainer(max_steps=steps, checkpoint_every_steps=None, **settings)
    first = weights_of(trainer)
    trainer.train()
    shutil.rmtree(trainer.restore.checkpoints.folder)
    return trainer, first


@pytest.mark.parametrize("decay", [0.0, 0.2])
@pytest.mark.parametrize("kind", FUSED)
def test_replicated_tables_follow_the_rule_of_fused_ones(kind: str, decay: float) -> None:
    random = np.random.default_rng(5)
    start = torch.from_numpy(random.normal(size=(9, 8)).astype(np.float32))
    config = TrainConfig(table_optimizer=kind, table_weight_decay=decay)
    weight = nn.Parameter(start.clone())
    replicated = ReplicatedTables({"t": weight}, config)
    fused = NumbaBags(
        [(9, 8, EmbeddingLocation.HOST, ComputeDevice.CPU)],
        optimizer=FUSED[kind], learning_rate=0.1, eps=EPS, beta1=BETAS[0], beta2=BETAS[1], weight_decay=decay,
    )  # fmt: skip
    fused.split_embedding_weights()[0].copy_(start)
    replicated.param_groups[0]["lr"] = 0.1
    for step in range(1, 6):
        ids = torch.from_numpy(random.integers(0, 7, 12))  # rows 7 and 8 are never read
        gradient = torch.from_numpy(random.normal(size=(4, 8)).astype(np.float32))
        offsets = torch.arange(0, 13, 3)
        replicated.steps = step
        set_update_number(fused, step)
        fused(ids, offsets).backward(gradient)
        weight.grad = None
        nn.functional.embedding_bag(ids, weight, offsets[:-1], mode="sum").backward(gradient)
        replicated.step()
    torch.testing.assert_close(weight.detach(), fused.split_embedding_weights()[0], atol=1e-5, rtol=1e-5)
    assert weight[7:].equal(start[7:])
    [state] = fused.get_optimizer_state() or [{}]
    for found, expected in zip(replicated.state[weight].values(), state.values(), strict=kind != "sgd"):
        torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.skipif(os.environ["DLRM_TEST_DEVICE"] != "cpu", reason="one of them is for CPU")
@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd"])
def test_both_kernels_train_to_the_same_weights(make_trainer: Maker, optimizer: str) -> None:
    ours, first = train(make_trainer, 20, table_optimizer=optimizer, epochs=2, embedding_kernel="numba")
    found = weights_of(ours)
    theirs, second = train(make_trainer, 20, table_optimizer=optimizer, epochs=2, embedding_kernel="fbgemm")
    for name, value in weights_of(theirs).items():
        assert first[name].equal(second[name])
        assert not value.equal(first[name])
        torch.testing.assert_close(found[name], value, atol=2e-5, rtol=0.0)


def test_adam_moves_each_number_by_the_rate_at_first(make_trainer: Maker) -> None:
    """Closed form: m / (1 - beta1) over sqrt(v / (1 - beta2)) is the sign of the gradient."""
    trainer, first = train(make_trainer, 1, table_optimizer="adam", table_learning_rate=0.02)
    name = "embeddings.embedding_bags.cat_user.weight"
    moved = (weights_of(trainer)[name] - first[name]).abs()
    assert (moved.sum(1) == 0).any()
    moved = moved[moved > 0]
    assert len(moved) > 100
    assert moved.max() < 0.0201
    assert moved.quantile(0.05) > 0.019  # a few gradients near eps move less


def test_adam_is_resumed_bit_by_bit(make_trainer: Maker, tmp_path: Path) -> None:
    """Its two moments and its number of steps come back."""
    whole, _ = train(make_trainer, 9, table_optimizer="adam")
    cut, _ = make_trainer(max_steps=9, checkpoint_every_steps=5, table_optimizer="adam", keep_checkpoints=9)
    cut.train()
    (tmp_path / "checkpoints" / "step-0000000009").rename(tmp_path / "gone")
    again, _ = make_trainer(max_steps=9, checkpoint_every_steps=None, table_optimizer="adam")
    again.progress = again.restore.begin(again.learner, print)
    assert again.progress.steps == 5
    again.train()
    found = weights_of(again)
    assert all(value.equal(found[name]) for name, value in weights_of(whole).items())


def test_tables_have_their_own_learning_rates(make_trainer: Maker) -> None:
    """Under SGD a table's first step is its rate times the gradient, which is the same for all."""
    rates = {"cat_*": 0.3, "*": 0.7}
    both, first = train(make_trainer, 1, table_optimizer="sgd", table_learning_rate=0.1)
    own, _ = train(make_trainer, 1, table_optimizer="sgd", table_learning_rates=rates, warmup_steps=0)
    for table, factor in (("cat_user", 3.0), ("list_items", 7.0)):
        name = f"embeddings.embedding_bags.{table}.weight"
        step, own_step = weights_of(both)[name] - first[name], weights_of(own)[name] - first[name]
        assert step.abs().max() > 1e-6
        torch.testing.assert_close(own_step, factor * step, atol=1e-7, rtol=1e-2)


def test_dense_gradients_are_scaled_to_their_norm(make_trainer: Maker) -> None:
    """Under SGD the length of the first step is the rate times the norm."""
    settings = {"dense_optimizer": "sgd", "dense_learning_rate": 0.5, "dense_weight_decay": 0.0}
    free, first = train(make_trainer, 1, **settings)
    held, _ = train(make_trainer, 1, dense_gradient_norm=0.01, **settings)
    names = [name for name, _ in dense_parameters(held.model)]
    steps = [
        torch.cat([(weights_of(trainer)[name] - first[name]).flatten() for name in names]) for trainer in (free, held)
    ]
    assert steps[0].norm() > 0.01
    assert steps[1].norm().item() == pytest.approx(0.5 * 0.01, rel=1e-3)
    torch.testing.assert_close(steps[1] / steps[1].norm(), steps[0] / steps[0].norm(), atol=1e-4, rtol=0.0)


def test_bf16_costs_little_and_keeps_weights_in_fp32(make_trainer: Maker) -> None:
    exact, _ = train(make_trainer, 28, epochs=2)
    rough, _ = train(make_trainer, 28, epochs=2, dense_precision="bf16")
    assert {value.dtype for value in rough.model.state_dict().values()} == {torch.float32}
    found, expected = rough.progress.first_sight.ne, exact.progress.first_sight.ne
    assert found is not None
    assert expected is not None
    assert found != expected
    assert found == pytest.approx(expected, abs=5e-3)


def test_fp16_tables_train_nearly_alike(make_trainer: Maker) -> None:
    exact, _ = train(make_trainer, 28, epochs=2)
    half, _ = train(make_trainer, 28, epochs=2, table_precision="fp16")
    tables = {name: value for name, value in half.model.state_dict().items() if name.startswith("embeddings.")}
    assert {value.dtype for value in tables.values()} == {torch.float16}
    assert half.progress.first_sight.ne == pytest.approx(exact.progress.first_sight.ne, abs=5e-3)


@pytest.mark.nightly
def test_compiled_training_is_the_plain_one(make_trainer: Maker) -> None:
    plain, first = train(make_trainer, 20, epochs=2)
    compiled, second = train(make_trainer, 20, epochs=2, compile=True)
    for name, value in weights_of(compiled).items():
        assert first[name].equal(second[name])
        torch.testing.assert_close(value, weights_of(plain)[name], atol=1e-4, rtol=0.0)


@pytest.mark.parametrize("settings", [{"table_precision": "fp16"}, {"device": "cuda"}])
def test_the_numba_kernel_is_refused_where_it_cannot_run(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig(embedding_kernel="numba", **settings)
    assert str(caught.value) == (
        "training.embedding_kernel: expected fbgemm or auto with fp16 tables or on CUDA, got numba. Set embedding_kernel: auto."
    )


@pytest.mark.parametrize("wrong", [{"table_optimizer": "lamb"}, {"table_learning_rates": {"a": 0.0}}])
def test_other_optimizers_and_rates_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TrainConfig(**wrong)

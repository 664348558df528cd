"""Estimates agree with a real model, trainer and checkpoint."""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.jobs.training.rank.model import build_model, open_client
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import InlineSource
from pipeline.study.estimate.memory import (
    RankMachine,
    RankMemory,
    TablePart,
    count_machines,
    derive_shape,
    estimate_checkpoint_bytes,
    estimate_memory,
    has_room,
)
from pipeline.training.config import TrainConfig
from pipeline.training.restore import Restore
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.trainer import Trainer, TrainingData

BAGS = [SparseFeature("a", "t", 9, "sum"), SparseFeature("b", "t", 9, "sum"), SparseFeature("c", "u", 50, "mean")]
SETTINGS: list[dict[str, Any]] = [
    {},
    {"table_optimizer": "adam", "dense_optimizer": "sgd"},
    {"table_optimizer": "sgd", "dense_optimizer": "adagrad", "embedding_kernel": "fbgemm"},
    {"table_optimizer": "adagrad", "dense_optimizer": "adamw", "average_from_step": 1, "average_every_steps": 1},
    {"table_precision": "fp16", "embedding_kernel": "fbgemm"},
    {"sharding": "data_parallel"},
]


@pytest.mark.parametrize("interaction", ["dot", "cat", "dcn"])
@pytest.mark.parametrize("rank", [None, 3])
def test_the_shape_is_the_models(interaction: Any, rank: int | None) -> None:
    config = DLRMConfig(embedding_width=4, bottom_mlp=(6,), top_mlp=(5, 3), interaction=interaction, cross_rank=rank)
    shape = derive_shape(config, 2, BAGS)
    model = DLRM(config, 2, BAGS)
    assert shape.tables == {"t": (9, 4), "u": (50, 4)}
    numbers = sum(parameter.numel() for parameter in model.parameters())
    assert shape.dense_parameters == numbers - 59 * 4


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(map(str, settings.values())) or "default")
def test_state_and_checkpoint_are_those_of_a_trainer(
    settings: dict[str, Any], rank_spec: Callable[..., RankSpec], device: torch.device, tmp_path: Path
) -> None:
    spec = rank_spec(tmp_path, **settings | {"max_steps": 2, "checkpoint_async": False})
    model, _ = build_model(spec, 1, device)
    reader = open_client(
        spec, InlineSource({"train": spec.train}, spec.preprocessing), "train", spec.train, 0, shuffled=True
    )
    data, restore = TrainingData(reader.batches), Restore(Checkpoints(tmp_path / "made"))
    trainer = Trainer(model, spec.training, data, restore, lambda event: None, 1, device)
    trainer.train()
    kept = spec.training
    shape = derive_shape(spec.model, len(spec.train.plan.dense), spec.train.plan.sparse)
    parts = [TablePart(rows=rows, columns=width) for rows, width in shape.tables.values()]
    memory = estimate_memory(shape, kept, parts, 160, 40.0, 0)
    state = {name: _bytes(tensor) for name, tensor in trainer.learner.state().items()}
    steps = sum(size for name, size in state.items() if name.endswith("/step"))
    assert memory.tables == sum(size for name, size in state.items() if "embeddings" in name and name[0] != "a")
    assert memory.average == sum(size for name, size in state.items() if name.startswith("average/"))
    gradients = sum(p.grad.numel() for n, p in model.named_parameters() if "embeddings" not in n and p.grad is not None)
    dense = sum(size for name, size in state.items() if "embeddings" not in name and name[0] != "a")
    assert memory.dense == dense - steps + 4 * gradients
    folder = checkpoint.list_checkpoints(tmp_path / "made")[-1]
    found = sum(path.stat().st_size for path in folder.iterdir())
    assert estimate_checkpoint_bytes(shape, kept) == pytest.approx(found, rel=0.06), (
        "mostly the file's header for each tensor"
    )


def _bytes(tensor: Any) -> int:
    return sum(part.numel() * part.element_size() for part in checkpoint.local_parts(tensor))


def rank(**sizes: int) -> RankMemory:
    names = RankMemory.model_fields
    return RankMemory(**{name: sizes.get(name, 0) for name in names})


def test_memory_in_closed_form() -> None:
    """One layer of 1 + 2 x 4 -> 1 over two vectors and their product. Both optimizers keep moments of each number."""
    shape = derive_shape(
        DLRMConfig(embedding_width=4, top_mlp=()),
        0,
        [SparseFeature("a", "t", 9, "sum"), SparseFeature("b", "u", 5, "sum")],
    )
    kept = TrainConfig(table_optimizer="adam", dense_optimizer="adam")
    memory = estimate_memory(shape, kept, [TablePart(rows=9, columns=4), TablePart(rows=5, columns=4)], 10, 8.0, 1_000)
    assert memory.tables == 14 * 4 * 4 * 3
    assert memory.dense == (5 + 1) * 4 * 4
    assert memory.checkpoint == memory.tables + 6 * 4 * 3
    assert memory.total == sum(getattr(memory, name) for name in RankMemory.model_fields)


def test_room_is_shared_or_each_ranks_own() -> None:
    ranks = [rank(process=10, tables=40), rank(process=10, tables=20)]
    own = RankMachine(memory_bytes=50, most_ranks=2, shared=False)
    assert has_room(ranks, own)
    assert not has_room(ranks, own.model_copy(update={"shared": True}))
    assert not has_room(ranks, own.model_copy(update={"most_ranks": 1}))
    assert has_room(ranks, RankMachine(memory_bytes=90, most_ranks=2), others_bytes=10)
    assert not has_room(ranks, RankMachine(memory_bytes=90, most_ranks=2), others_bytes=11)


@pytest.mark.parametrize(("memory", "expected"), [(200, 1), (110, 1), (109, 2), (60, 2), (59, 3), (10, None)])
def test_tables_are_shared_out_over_machines(memory: int, expected: int | None) -> None:
    whole = rank(process=6, activations=4, tables=100)
    assert count_machines(whole, RankMachine(memory_bytes=memory, most_ranks=8)) == expected


def test_a_copy_of_a_table_has_a_gradient() -> None:
    shape = derive_shape(DLRMConfig(embedding_width=4, top_mlp=()), 0, BAGS)
    cut, copied = (
        estimate_memory(shape, TrainConfig(), [TablePart(rows=50, columns=4, copied=copied)], 1, 8.0, 0)
        for copied in (False, True)
    )
    assert copied.kernel - cut.kernel == 4 * (50 * 4 - 50)
    assert math.isclose(copied.tables, cut.tables)

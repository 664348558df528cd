"""A row of weight 3 trains like three such rows, on whichever rank it is."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import Client
from pipeline.preprocessing.dataset import DataSpec
from pipeline.training.metrics import evaluate_sums
from pipeline.training.trainer import Trainer
from pipeline.transforms.column import Column
from tests.pipeline.bags import sparse_tensor
from tests.pipeline.conftest import completed, completed_here
from tests.pipeline.preprocessing.reference import bags
from tests.pipeline.training.loops import weights_of

Maker = Callable[..., tuple[Trainer, list[dict[str, Any]]]]


def with_weights(batch: Batch, times: np.ndarray) -> Batch:
    return replace(batch, weights=torch.from_numpy(times.astype(np.float32)), global_weight=float(times.sum()))


def repeated(batch: Batch, times: np.ndarray) -> Batch:
    at = np.repeat(np.arange(len(times)), times)
    lists = [[row[feature] for row in bags(batch)] for feature in range(len(batch.sparse.keys()))]
    columns = tuple(
        Column(
            np.array([value for i in at for value in ids[i]], np.int64),
            np.concatenate([[0], np.cumsum([len(ids[i]) for i in at])]),
        )
        for ids in lists
    )
    return replace(
        batch, dense=batch.dense[at], labels=batch.labels[at], weights=torch.ones(len(at)), global_rows=len(at),
        sparse=sparse_tensor(list(batch.sparse.keys()), columns),
    )  # fmt: skip


def times_of(batch: Batch) -> np.ndarray:
    return np.random.default_rng(batch.position.batches).integers(1, 5, len(batch.labels))


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "sgd"])
def test_a_weight_counts_as_that_many_rows(
    make_trainer: Maker, train_client: Client, tmp_path: Path, optimizer: str
) -> None:
    made = list(train_client.batches())
    found = []
    for change in (with_weights, repeated):

        def stream(position: Position, change: Callable[[Batch, np.ndarray], Batch] = change) -> Iterator[Batch]:
            return (change(batch, times_of(batch)) for batch in made[position.batches :])

        trainer, _ = make_trainer(None, stream, table_optimizer=optimizer, log_every_steps=5)
        progress = trainer.train()
        sums = evaluate_sums(trainer.model, stream(Position()), trainer.device, trainer.config)
        found.append((weights_of(trainer), progress.first_sight, sums))
        (tmp_path / "checkpoints").rename(tmp_path / change.__name__)
    (weights, first_sight, sums), (others, first_sights, other_sums) = found
    assert first_sight.model_dump() == pytest.approx(first_sights.model_dump(), rel=1e-5)
    assert sums.model_dump() == pytest.approx(other_sums.model_dump(), rel=1e-4)
    for name, value in weights.items():
        torch.testing.assert_close(value, others[name], atol=2e-4, rtol=0.0)


@pytest.mark.nightly
def test_the_number_of_ranks_changes_nothing(
    days: list[pa.Table], make_warehouse: Callable[..., DataSpec], rank_spec: Callable[..., RankSpec],
    device: torch.device, tmp_path: Path,
) -> None:  # fmt: skip
    """Ranks have different sums of weights. On one of them the last rows of a batch are padding."""
    importance = [np.where(np.arange(day.num_rows) % 3, 5.0, 0.25) for day in days]
    tables = [day.append_column("importance", pa.array(w)) for day, w in zip(days, importance, strict=True)]
    data = make_warehouse(tmp_path / "warehouse", tables).model_copy(update={"weight": "importance"})
    found = []
    for world_size in (1, 2):
        spec = rank_spec(tmp_path / f"{world_size}", world_size=world_size)
        spec = spec.model_copy(
            update={
                part: data.model_copy(update={"selection": getattr(spec, part).selection})
                for part in ("train", "valid", "probe")
            }
        )
        found.append(completed_here(spec, device) if world_size == 1 else completed(spec))
    one, two = found
    for name in ("ne_progressive", "valid_ne"):
        assert one.result[name] == pytest.approx(two.result[name], abs=1e-5)
    for name, value in one.weights.items():
        torch.testing.assert_close(value, two.weights[name], atol=1e-4, rtol=0.0)

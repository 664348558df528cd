"""Trains one small model under many sharding plans: `python -m tests.pipeline.training.placements`."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from safetensors.torch import save_file
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.jobs.training.rank.group import start_group
from pipeline.training.config import TrainConfig
from pipeline.training.restore import Restore
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.tables import model, shared
from pipeline.training.trainer import Trainer, TrainingData
from storage.artifacts import write_json

SEED = 5
MODEL = DLRMConfig(embedding_width=16, bottom_mlp=(8,), top_mlp=(8,), embedding_init=0.3)
BAGS = [
    SparseFeature("user", "user", 50, "sum"),
    SparseFeature("shop", "shop", 7, "sum"),
    SparseFeature("goods", "goods", 83, "mean"),
    SparseFeature("liked", "tags", 31, "mean"),
    SparseFeature("seen", "tags", 31, "mean"),
]
"""Sum and mean pooling, a small table, and a table that two features share."""
ORDER = [2, 3, 0, 4, 1]
"""Another order of the features: means before sums, and another feature between those that share a table."""
WEIGHTED = [replace(bag, weighted=bag.table != "shop") for bag in BAGS]
"""All tables but one are looked up with weights."""
ROWS, STEPS, DENSE = 24, 12, 3


class Conditions(BaseModel):
    """What else differs between cases."""

    weighted: bool = False
    zeros: bool = False
    """Whether half of the weights are 0, so that rows are read without a gradient."""
    uneven: int | None = None
    """Gives ranks other numbers of rows at each step, the first in one step as few as this. None: equal numbers."""
    reordered: bool = False
    """Whether the features come in the order of `ORDER`."""
    apart: bool = False
    """Whether ranks take themselves to be on machines that share no memory."""


class Cases(BaseModel):
    """What the ranks receive: a name for each TrainConfig, and some of the values of `Conditions`."""

    world_size: int
    hosts: int = 1
    """Hosts that the ranks take themselves to be on."""
    device: Literal["cpu", "cuda"] = "cpu"
    cases: dict[str, dict[str, Any]]


def conditions(settings: dict[str, Any]) -> Conditions:
    """Takes the conditions out of the settings of a case."""
    return Conditions(**{name: settings.pop(name) for name in Conditions.model_fields if name in settings})


def training(world_size: int, device: str = "cpu", **settings: Any) -> TrainConfig:
    base = {
        "world_size": world_size,
        "device": device,
        "batch_rows": ROWS,
        "table_learning_rate": 0.1,
        "dense_learning_rate": 0.02,
    }
    return TrainConfig(**base | settings)


def batches(
    rank: int = 0, world_size: int = 1, weighted: bool = False, uneven: int | None = None, zeros: bool = False
) -> Iterator[Batch]:
    """Returns this rank's rows of each step. Some bags are empty, and in one step all of one feature's."""
    random, of_weights, of_shares = (np.random.default_rng(seed) for seed in (7, 8, 9))
    bounds = [ROWS * number // world_size for number in range(world_size + 1)]
    for step in range(STEPS):
        if uneven is not None:
            bounds[1:-1] = sorted(of_shares.integers(1, ROWS, world_size - 1)) if step else [uneven] * (world_size - 1)
        share = slice(bounds[rank], bounds[rank + 1])
        dense = random.normal(size=(ROWS, DENSE)).astype(np.float32)
        labels = (random.random(ROWS) < 0.4).astype(np.float32)
        lengths = random.integers(0, 4, (len(BAGS), ROWS))
        lengths[step % len(BAGS)] *= step != 3
        ids = [[random.integers(0, bag.rows, n) for n in row] for bag, row in zip(BAGS, lengths, strict=True)]
        weights = [
            [of_weights.normal(size=len(one)) if bag.weighted else np.ones(len(one)) for one in row]
            for bag, row in zip(WEIGHTED, ids, strict=True)
        ]
        if zeros:
            weights = [[one * (of_weights.random(len(one)) < 0.5) for one in row] for row in weights]
        sparse = KeyedJaggedTensor(
            keys=[bag.name for bag in BAGS],
            values=join(ids, share, torch.int64),
            weights=join(weights, share, torch.float32) if weighted else None,
            lengths=torch.from_numpy(lengths[:, share].reshape(-1).astype(np.int32)),
        )
        mine = torch.from_numpy(labels[share])
        yield Batch(torch.from_numpy(dense[share]), sparse, mine, torch.ones_like(mine), Position(), ROWS)


def join(lists: list[list[np.ndarray]], rows: slice, dtype: torch.dtype) -> torch.Tensor:
    """Concatenates the lists of some rows, feature by feature."""
    return torch.tensor([number for of_feature in lists for one in of_feature[rows] for number in one], dtype=dtype)


def trained(
    config: TrainConfig, device: torch.device, given: Conditions | None = None
) -> tuple[list[float], dict[str, torch.Tensor] | None]:
    """Returns the loss of each step and, on rank 0, the whole weights."""
    given = given or Conditions()
    torch.manual_seed(SEED)
    bags = WEIGHTED if given.weighted else BAGS
    whole = DLRM(MODEL, DENSE, [bags[at] for at in ORDER] if given.reordered else bags, device="meta")
    with patch.object(shared, "share_memory", lambda *_: None) if given.apart else nullcontext():
        sharded, _ = model.shard_model(whole, config, device, SEED, MODEL.embedding_init)
    data = TrainingData(lambda position: iter(()))
    trainer = Trainer(sharded, config, data, Restore(Checkpoints(Path())), print, SEED, device)
    losses = []
    for batch in batches(dist.get_rank(), dist.get_world_size(), given.weighted, given.uneven, given.zeros):
        if given.reordered:
            batch = replace(batch, sparse=batch.sparse.permute(ORDER))
        trainer.train_step(batch.to(device))
        losses.append(trainer.step.take_sums().loss / ROWS)
    return losses, checkpoint.full_state(sharded.state_dict())


def main(path: str) -> None:
    """Trains every case and writes losses and weights next to the spec."""
    spec, folder, rank = Cases.model_validate_json(Path(path).read_text()), Path(path).parent, int(os.environ["RANK"])
    os.environ["LOCAL_WORLD_SIZE"] = str(spec.world_size // spec.hosts)
    place = {"hosts": spec.hosts, "launcher": "external"} if spec.hosts > 1 else {}
    device = start_group(training(spec.world_size, spec.device), rank)
    losses = {}
    for name, settings in spec.cases.items():
        given = conditions(settings)
        config = training(spec.world_size, spec.device, **place, **settings)
        losses[name], weights = trained(config, device, given)
        if weights is not None:
            save_file(weights, folder / f"{name}.safetensors")
    if rank == 0:
        write_json(folder / "losses.json", losses)
        os.write(int(os.environ["DLRM_EVENTS_FD"]), (json.dumps({"event": "result"}) + "\n").encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

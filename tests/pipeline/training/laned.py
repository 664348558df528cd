"""Trains one small model in lanes: `python -m tests.pipeline.training.laned`. `test_lanes.py` compares world sizes."""

import hashlib
import itertools
import json
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from pydantic import BaseModel
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.jobs.training.rank import start_group
from pipeline.training.config import TrainConfig
from pipeline.training.state import checkpoint
from pipeline.training.tables.model import shard_model
from pipeline.training.trainer import Trainer, evaluate_sums
from storage.artifacts import write_json

SEED, DENSE = 5, 13
MODEL = DLRMConfig(embedding_width=16, bottom_mlp=(96, 40), top_mlp=(120, 56), embedding_init=0.3)
BAGS = [
    SparseFeature("user", "user", 50, "sum"),
    SparseFeature("shop", "shop", 7, "sum"),
    SparseFeature("goods", "goods", 83, "mean"),
    SparseFeature("liked", "tags", 31, "mean"),
    SparseFeature("seen", "tags", 31, "mean"),
]
"""Sum and mean pooling, a small table whose rows repeat often, and a table that two features share."""
WEIGHTED = [replace(bag, weighted=bag.table != "shop") for bag in BAGS]
ROWS = (500, 500, 500, 333, 500, 12, 7, 1, 500, 61)
"""Rows of each batch. Some are short, as the last of an epoch may be, down to fewer rows than lanes."""
MOST_IDS = 6
LANES = 12


class Cases(BaseModel):
    """What the ranks receive: a name for each TrainConfig, the dropout of its model, and whether ids have weights."""

    world_size: int
    cases: dict[str, dict[str, Any]]
    batches: tuple[int, int] = (0, len(ROWS))
    """First batch to train, and the first not to."""
    start: str | None = None
    """Folder of earlier ranks, whose checkpoints the training goes on from."""


def training(world_size: int, **settings: Any) -> TrainConfig:
    base = {
        "world_size": world_size,
        "device": "cpu",
        "lanes": LANES,
        "batch_rows": max(ROWS),
        "sharding": "table_wise",
        "table_learning_rate": 0.1,
        "dense_learning_rate": 0.02,
    }
    return TrainConfig(**base | settings)


def batches(rank: int = 0, world_size: int = 1, weighted: bool = False) -> Iterator[Batch]:
    """Returns this rank's rows of each batch, cut and padded as `pipeline/preprocessing/epoch/batches.py` does."""
    random, of_ids = np.random.default_rng(7), np.random.default_rng(8)
    for rows in ROWS:
        dense = random.normal(size=(rows, DENSE)).astype(np.float32)
        labels = (random.random(rows) < 0.4).astype(np.float32)
        weights = random.uniform(0.5, 2.0, rows).astype(np.float32)
        lengths = random.integers(0, MOST_IDS, (len(BAGS), rows))
        ids = [[random.integers(0, bag.rows, n) for n in row] for bag, row in zip(BAGS, lengths, strict=True)]
        by_id = [
            [of_ids.normal(size=len(one)) if bag.weighted else np.ones(len(one)) for one in row]
            for bag, row in zip(WEIGHTED, ids, strict=True)
        ]
        share = slice(rank * rows // world_size, (rank + 1) * rows // world_size)
        padding = -(-rows // world_size) - (share.stop - share.start)
        mine = [np.pad(part[share], [(0, padding)] + [(0, 0)] * (part.ndim - 1)) for part in (dense, labels, weights)]
        yield Batch(
            torch.from_numpy(mine[0]),
            KeyedJaggedTensor(
                keys=[bag.name for bag in BAGS],
                values=joined(ids, share),
                weights=joined(by_id, share).float() if weighted else None,
                lengths=torch.from_numpy(
                    np.pad(lengths[:, share], [(0, 0), (0, padding)]).reshape(-1).astype(np.int32)
                ),
            ),
            torch.from_numpy(mine[1]),
            torch.from_numpy(mine[2]),
            Position(),
            rows,
            global_weight=float(weights.sum(dtype=np.float64)),
        )


def joined(lists: list[list[np.ndarray]], share: slice) -> torch.Tensor:
    """Joins some rows' lists of all features."""
    return torch.from_numpy(np.concatenate([one for row in lists for one in [*row[share], row[0][:0]]]))


def make_trainer(config: TrainConfig, dropout: float, weighted: bool = False) -> Trainer:
    torch.manual_seed(SEED)
    model = MODEL.model_copy(update={"dropout": dropout})
    sharded, _ = shard_model(
        DLRM(model, DENSE, WEIGHTED if weighted else BAGS, device="meta"),
        config,
        torch.device("cpu"),
        SEED,
        model.embedding_init,
    )
    return Trainer(sharded, config, lambda position: iter(()), None, Path(), print, SEED, torch.device("cpu"))


def mine(weighted: bool = False) -> Iterator[Batch]:
    return batches(dist.get_rank(), dist.get_world_size(), weighted)


def trained(spec: Cases, name: str, folder: Path) -> dict[str, Any] | None:
    """Returns hashes of the weights and of a checkpoint, the losses and the validation, on rank 0."""
    settings = dict(spec.cases[name])
    dropout, weighted = settings.pop("dropout", 0.0), settings.pop("weighted", False)
    config = training(spec.world_size, **settings)
    trainer = make_trainer(config, dropout, weighted)
    trainer.checkpoints.folder = folder / name
    if spec.start is not None:
        trainer.load(Path(spec.start) / name / "end")
    losses = []
    trainer.batches = lambda position: itertools.islice(mine(weighted), *spec.batches)
    for batch, coming in trainer.steps():
        trainer.train_step(batch, coming)
        trainer.progress = trainer.progress.after(batch)
        losses.append(trainer.take_window().loss)
    weights = checkpoint.full_state(trainer.model.state_dict())
    trainer.save("end")
    trainer.checkpointer.wait()
    trainer.model.eval()
    with torch.no_grad():
        sums = evaluate_sums(trainer.model, mine(weighted), trainer.device, config)
    if weights is None:
        return None
    state = checkpoint.read_whole(trainer.checkpoints.folder / "end", "model/", "dense/", "tables/")
    return {"weights": digest(weights), "state": digest(state), "losses": losses, "validation": sums.model_dump()}


def digest(tensors: dict[str, torch.Tensor]) -> str:
    found = hashlib.sha256()
    for name in sorted(tensors):
        found.update(name.encode() + tensors[name].contiguous().numpy().tobytes())
    return found.hexdigest()


def main(path: str) -> None:
    """Trains every case and writes what it returns next to the spec."""
    spec, folder, rank = Cases.model_validate_json(Path(path).read_text()), Path(path).parent, int(os.environ["RANK"])
    start_group(training(spec.world_size), rank)
    found = {name: trained(spec, name, folder) for name in spec.cases}
    if rank == 0:
        write_json(folder / "found.json", found)
        os.write(int(os.environ["DLRM_EVENTS_FD"]), (json.dumps({"event": "result"}) + "\n").encode())
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])

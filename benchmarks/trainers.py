"""Ways to train one DLRM on the same batches: our trainer, plain TorchRec and plain PyTorch.

    python -m benchmarks.trainers --contestant ours --shape lists

A pass builds the model, makes a few steps to warm up, and then times the steps. With `--ranks 2` each rank is a process
with one thread, and its batch is its share of the global one.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_default_sharders
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.train_pipeline import TrainPipelineBase, TrainPipelineSparseDist
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

from benchmarks.machine import ROOT
from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.processes.forkserver import start_process
from pipeline.processes.process import LIBRARY_ENVIRONMENT
from pipeline.training.config import TrainConfig
from pipeline.training.restore import Restore
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.tables.model import shard_model
from pipeline.training.trainer import Trainer, TrainingData

WARM_UP, BATCHES = 4, 6
DENSE, TABLE_RATE, DENSE_RATE = 13, 0.05, 1e-3
BOTTOM, TOP = (512, 256), (512, 256)


@dataclass(frozen=True)
class StepShape:
    """A model and its batches.

    Args:
        ids: Mean ids per list. 1 means exactly one; otherwise the number is uniform between 1 and 2 * ids - 1.
    """

    tables: int = 26
    rows: int = 100_000
    width: int = 64
    batch_rows: int = 4_096
    ids: int = 10


LANES = ("ours_lanes_2", "ours_lanes_4", "ours_lanes_8")
"""Contestants that train in as many lanes; `benchmarks/lanes.py` compares them with `ours`."""
CHOOSING = "ours_choosing_threads"
"""Contestant that chooses its threads while it trains; `benchmarks/busy.py` compares it with `ours`."""
SHAPES = {
    "lists": StepShape(),
    "single": StepShape(ids=1),
    "narrow": StepShape(width=16),
    "few_tables": StepShape(tables=4, rows=1_000_000),
    "small_batch": StepShape(batch_rows=512),
    "tiny": StepShape(tables=3, rows=1_000, width=8, batch_rows=64),
}


@dataclass
class Rows(Pipelineable):
    """A batch for TorchRec's pipelines."""

    dense: torch.Tensor
    sparse: KeyedJaggedTensor
    labels: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> "Rows":
        """Copies the batch to another device."""
        moved = [part.to(device, non_blocking=non_blocking) for part in (self.dense, self.sparse, self.labels)]
        return Rows(*moved)

    def pin_memory(self) -> "Rows":
        """Copies the batch to page-locked memory."""
        return Rows(self.dense.pin_memory(), self.sparse.pin_memory(), self.labels.pin_memory())

    def record_stream(self, stream: Any) -> None:
        """Marks the batch as used by another CUDA stream than the one that made it."""
        for part in (self.dense, self.sparse, self.labels):
            part.record_stream(stream)


@lru_cache(maxsize=1)  # drawing ten million ids takes seconds
def batches(shape: StepShape, rank: int = 0, ranks: int = 1, count: int = BATCHES) -> list[Rows]:
    """Returns this rank's share of the global batches. Ids follow Zipf's law and are spread over the rows."""
    random = np.random.default_rng(1)
    made = []
    share = slice(rank * shape.batch_rows // ranks, (rank + 1) * shape.batch_rows // ranks)
    for _ in range(count):
        lengths = np.ones((shape.tables, shape.batch_rows), np.int32)
        if shape.ids > 1:
            lengths = random.integers(1, 2 * shape.ids, lengths.shape).astype(np.int32)
        ids = random.zipf(1.2, int(lengths.sum())) % 2**40 * 2_654_435_761 % shape.rows
        ends = lengths.reshape(-1).cumsum().reshape(lengths.shape)
        mine = [ids[ends[t, share.start] - lengths[t, share.start] : ends[t, share.stop - 1]] for t in range(len(ends))]
        sparse = KeyedJaggedTensor(
            names(shape),
            torch.from_numpy(np.concatenate(mine).astype(np.int64)),
            lengths=torch.from_numpy(lengths[:, share].reshape(-1).copy()),
        )
        dense = random.normal(size=(shape.batch_rows, DENSE)).astype(np.float32)[share]
        labels = (random.random(shape.batch_rows) < 0.3).astype(np.float32)[share]
        made.append(Rows(torch.from_numpy(dense.copy()), sparse, torch.from_numpy(labels.copy())))
    return made


def names(shape: StepShape) -> list[str]:
    """Returns feature names, one per table."""
    return [f"f{i}" for i in range(shape.tables)]


# -- plain TorchRec, as in its documentation -----------------------------------------------------------------------


class HandWritten(nn.Module):
    """A minimal DLRM for TorchRec's pipelines: batch -> (loss, nothing)."""

    def __init__(self, shape: StepShape, tables: nn.Module) -> None:
        super().__init__()
        self.tables = tables
        self.bottom, self.top = _mlp(DENSE, [*BOTTOM, shape.width]), _mlp(pairs(shape) + shape.width, [*TOP, 1])[:-1]
        self.features, self.width = shape.tables, shape.width
        rows, columns = torch.triu_indices(shape.tables + 1, shape.tables + 1, offset=1)
        self.register_buffer("rows", rows, persistent=False)
        self.register_buffer("columns", columns, persistent=False)

    def forward(self, batch: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns the mean loss of the batch and the logits."""
        dense = self.bottom(batch.dense)
        vectors = self.tables(batch.sparse).values().reshape(-1, self.features, self.width)
        both = torch.cat([dense.unsqueeze(1), vectors], dim=1)
        products = torch.bmm(both, both.transpose(1, 2))[:, self.rows, self.columns]
        logits = self.top(torch.cat([dense, products], dim=1)).squeeze(1)
        return F.binary_cross_entropy_with_logits(logits, batch.labels), logits.detach()


def pairs(shape: StepShape) -> int:
    """Number of products of the interaction."""
    return (shape.tables + 1) * shape.tables // 2


def _mlp(inputs: int, sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*layers)


def torchrec(
    shape: StepShape, rank: int, ranks: int, device: torch.device, pipeline: type, pinned: bool = False
) -> Callable[[], None]:
    """A single-file TorchRec loop: fused row-wise Adagrad, the default plan without data_parallel tables, and Adam.

    Args:
        pinned: Batches lie in page-locked memory, as if a loader had copied them there at no cost.
    """
    configs = [
        EmbeddingBagConfig(name=name, num_embeddings=shape.rows, embedding_dim=shape.width, feature_names=[name])
        for name in names(shape)
    ]
    model = HandWritten(shape, EmbeddingBagCollection(tables=configs, device=torch.device("meta")))
    apply_optimizer_in_backward(RowWiseAdagrad, model.tables.parameters(), {"lr": TABLE_RATE})
    topology = Topology(world_size=ranks, compute_device=device.type, local_world_size=ranks)
    planner = EmbeddingShardingPlanner(
        topology=topology, batch_size=shape.batch_rows // ranks, constraints=_fused_only(shape)
    )
    plan = planner.plan(model, get_default_sharders())
    env = ShardingEnv.from_process_group(dist.group.WORLD)  # type: ignore[arg-type]
    whole = DistributedModelParallel(model, env=env, device=device, plan=plan)
    rest = [value for name, value in whole.named_parameters() if "tables" not in name]
    steps = pipeline(whole, torch.optim.Adam(rest, lr=DENSE_RATE), device)
    made = batches(shape, rank, ranks)
    endless = _endless([one.pin_memory() for one in made] if pinned else made)
    return lambda: steps.progress(endless)


def _fused_only(shape: StepShape) -> dict[str, ParameterConstraints]:
    kinds = ParameterConstraints(sharding_types=["table_wise"], compute_kernels=["fused"])
    return dict.fromkeys(names(shape), kinds)


def _endless(made: list[Any]) -> Iterator[Any]:
    while True:
        yield from made


# -- plain PyTorch ---------------------------------------------------------------------------------------------------


class Bags(nn.Module):
    """One nn.EmbeddingBag per table, with sparse gradients."""

    def __init__(self, shape: StepShape) -> None:
        super().__init__()
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(shape.rows, shape.width, mode="sum", sparse=True, include_last_offset=True)
            for _ in range(shape.tables)
        )

    def forward(self, sparse: KeyedJaggedTensor) -> "Bags.Values":
        """Concatenates the pooled vectors."""
        features = [sparse[key] for key in sparse.keys()]  # noqa: SIM118  a KeyedJaggedTensor is no mapping
        pooled = [bag(one.values(), one.offsets()) for bag, one in zip(self.bags, features, strict=True)]
        return Bags.Values(torch.cat(pooled, dim=1))

    @dataclass
    class Values:
        """The interface that HandWritten needs from a table module's output."""

        vectors: torch.Tensor

        def values(self) -> torch.Tensor:
            """float32 [B, F * E]."""
            return self.vectors


def pytorch(shape: StepShape, rank: int, ranks: int, device: torch.device, rowwise: bool) -> Callable[[], None]:
    """nn.EmbeddingBag with sparse gradients and SGD or row-wise Adagrad, on one CPU rank."""
    assert ranks == 1
    assert device.type == "cpu"
    model = HandWritten(shape, Bags(shape))
    tables = [bag.weight for bag in model.tables.bags]  # type: ignore[union-attr]
    rest = [value for name, value in model.named_parameters() if not name.startswith("tables.")]
    dense, sgd = torch.optim.Adam(rest, lr=DENSE_RATE), torch.optim.SGD(tables, lr=TABLE_RATE)
    moments = [torch.zeros(shape.rows) for _ in tables]
    endless = _endless(batches(shape))

    def step() -> None:
        dense.zero_grad()
        sgd.zero_grad()
        loss, _ = model(next(endless))
        loss.backward()
        dense.step()
        if not rowwise:
            sgd.step()
            return
        with torch.no_grad():
            for table, moment in zip(tables, moments, strict=True):
                gradient = table.grad.coalesce()
                ids, values = gradient.indices()[0], gradient.values()
                moment[ids] += values.square().mean(1)
                table.index_add_(0, ids, values / (moment[ids].sqrt() + 1e-8)[:, None], alpha=-TABLE_RATE)

    return step


# -- this project ----------------------------------------------------------------------------------------------------


def ours(shape: StepShape, rank: int, ranks: int, device: torch.device, **settings: Any) -> Callable[[], None]:
    """Our trainer, step by step."""
    config = TrainConfig(
        world_size=ranks, batch_rows=shape.batch_rows, table_learning_rate=TABLE_RATE, device=device.type,
        sharding="table_wise", **({"threads_per_rank": torch.get_num_threads()} | settings),
    )  # fmt: skip
    bags = [SparseFeature(name, name, shape.rows, "sum") for name in names(shape)]
    model = DLRM(DLRMConfig(embedding_width=shape.width, bottom_mlp=BOTTOM, top_mlp=TOP), DENSE, bags, "meta")
    whole, _ = shard_model(model, config, device, seed=1, half_width=None)
    made = [
        Batch(one.dense, one.sparse, one.labels, torch.ones_like(one.labels), Position(), shape.batch_rows)
        for one in batches(shape, rank, ranks)
    ]
    data, nothing = TrainingData(lambda position: _endless(made)), Restore(Checkpoints(Path()))
    trainer = Trainer(whole, config, data, nothing, lambda event: None, 1, device)
    steps = trainer.steps()
    return lambda: trainer.train_step(*next(steps))


CONTESTANTS: dict[str, Callable[..., Callable[[], None]]] = {
    "torchrec_base": partial(torchrec, pipeline=TrainPipelineBase),
    "torchrec_sparse_dist": partial(torchrec, pipeline=TrainPipelineSparseDist),
    "torchrec_sparse_dist_pinned": partial(torchrec, pipeline=TrainPipelineSparseDist, pinned=True),
    "pytorch_sgd": partial(pytorch, rowwise=False),
    "pytorch_rowwise_adagrad": partial(pytorch, rowwise=True),
    "ours_fbgemm": partial(ours, embedding_kernel="fbgemm"),
    "ours": ours,
    "ours_ahead": partial(ours, send_ids_ahead=True),
    "ours_compiled": partial(ours, compile=True),
    "ours_bf16": partial(ours, dense_precision="bf16"),
    "ours_bf16_compiled": partial(ours, dense_precision="bf16", compile=True),
    CHOOSING: partial(ours, threads_per_rank=None),
    "ours_without_graph": partial(ours, cuda_graph=False),
    **{name: partial(ours, lanes=int(name.removeprefix("ours_lanes_"))) for name in LANES},
}
ON_CUDA = ("torchrec_sparse_dist_pinned", "ours_without_graph")
"""Contestants that differ from others on CUDA alone; see `benchmarks/cuda.py`."""
ON_RANKS = [name for name in CONTESTANTS if not name.startswith("pytorch")]
"""Contestants that train on several ranks."""


def run_in_processes(contestant: str, shape: str, ranks: int, threads: int, steps: int) -> float:
    """Runs one pass in its own processes and returns the median seconds of a step."""
    words = ["--contestant", contestant, "--shape", shape, "--ranks", str(ranks), "--steps", str(steps)]
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as folder:
        processes, logs = [], [Path(folder, f"rank-{rank}.log") for rank in range(ranks)]
        for rank, path in enumerate(logs):
            environment = os.environ | LIBRARY_ENVIRONMENT | {
                "OMP_NUM_THREADS": str(threads), "RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo", "DLRM_MEETING": f"{folder}/store",
            }  # fmt: skip
            with path.open("wb") as log:
                processes.append(
                    start_process("benchmarks.trainers", f"dlrm rank {rank}", words, environment, ROOT, log)
                )
        codes = [process.wait() for process in processes]
        outputs = [path.read_text(errors="replace") for path in logs]
    for code, output in zip(codes, outputs, strict=True):
        if code:
            raise RuntimeError(f"{contestant}, {shape}: exit code {code}: {output[-2000:]}")
    return max(float(json.loads(output.splitlines()[-1])["seconds"]) for output in outputs)


def one_pass(contestant: str, shape: StepShape, ranks: int, steps: int) -> dict[str, float]:
    """Returns the median seconds of this rank's steps, and of the build and warm-up."""
    rank = int(os.environ.get("RANK", "0"))
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    torch.manual_seed(1)
    meeting = os.environ.get("DLRM_MEETING") or tempfile.mkdtemp() + "/store"
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=ranks)
    begun = time.perf_counter()
    step = CONTESTANTS[contestant](shape, rank, ranks, torch.device("cpu"))
    for _ in range(WARM_UP):
        step()
    warm = time.perf_counter() - begun
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    dist.barrier()
    dist.destroy_process_group()
    return {"seconds": median(seconds), "warm_up_seconds": warm}


def main(words: Sequence[str]) -> None:
    """Prints the figures of one pass as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.trainers")
    parser.add_argument("--contestant", choices=CONTESTANTS, required=True)
    parser.add_argument("--shape", choices=SHAPES, default="lists")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--batch-rows", type=int, help="rows of a global batch instead of the shape's")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args(words)
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    shape = SHAPES[options.shape]
    shape = replace(shape, batch_rows=options.batch_rows or shape.batch_rows)
    print(json.dumps(one_pass(options.contestant, shape, options.ranks, options.steps)))


if __name__ == "__main__":
    main(sys.argv[1:])

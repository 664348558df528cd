"""Staged batches and the dense part as a CUDA graph change no bit of a training."""

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.dlrm import DLRM, SharedFeatures
from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.training.graph import GraphStep
from pipeline.training.restore import Restore
from pipeline.training.staging import AHEAD, Packed, StagedBatches
from pipeline.training.state.checkpoint import local_parts
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.tables.model import shard_model
from pipeline.training.trainer import Trainer, TrainingData
from tests.pipeline.training.placements import BAGS, DENSE, MODEL, SEED, WEIGHTED, batches, training

DEVICE = torch.device("cuda", 0)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("nccl", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def shared_batch() -> Batch:
    """Two features over five rows; the second has two lists, shared by rows."""
    lengths = torch.tensor([1, 0, 2, 1, 1, 2, 1, 0, 0, 0], dtype=torch.int32)
    ids = KeyedJaggedTensor(["a", "b"], torch.arange(8), lengths=lengths)
    shared = SharedFeatures(torch.tensor([0, 0, 1, 1, 1]), (1,))
    return Batch(torch.rand(5, 3), ids, torch.rand(5), torch.rand(5), Position(batches=4), 5, shared=shared)


def arrays(batch: Batch) -> list[torch.Tensor]:
    """Everything in a batch, in host memory."""
    sparse, shared = batch.sparse, batch.shared
    found = [batch.dense, batch.labels, batch.weights, sparse.values(), sparse.lengths(), sparse.offsets()]
    found += [one for one in (sparse.weights_or_none(), shared and shared.inverse_B) if one is not None]
    return [one.cpu() for one in found]


def require_same(one: Batch, other: Batch) -> None:
    for a, b in zip(arrays(one), arrays(other), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)
    assert one.sparse.keys() == other.sparse.keys()
    assert (one.position, one.global_rows) == (other.position, other.global_rows)


@pytest.mark.parametrize("narrow", [False, True])
def test_a_packed_batch_is_the_same_batch(narrow: bool) -> None:
    for batch in (shared_batch(), *list(batches(weighted=True))[:4], next(batches())):
        packed = Packed.of(batch, narrow)
        memory = torch.full((packed.size + 100,), 255, dtype=torch.uint8)
        packed.write(memory)
        require_same(packed.read(memory[: packed.size].clone()), batch)


def test_narrow_ids_take_half_the_bytes() -> None:
    batch = replace(
        shared_batch(), sparse=KeyedJaggedTensor(["a"], torch.arange(10_000), lengths=torch.tensor([10_000]))
    )
    assert Packed.of(batch, False).size - Packed.of(batch, True).size == pytest.approx(40_000, abs=256)


def train(given: list[Batch], weighted: bool = False, ranks: int = 1, **settings: Any) -> dict[str, torch.Tensor]:
    """Trains on CUDA and returns the weights that this rank has: dense ones, and whole tables."""
    torch.manual_seed(SEED)
    config = training(ranks, "cuda", sharding="table_wise", **settings)
    whole = DLRM(MODEL, DENSE, WEIGHTED if weighted else BAGS, device="meta")
    model, _ = shard_model(whole, config, DEVICE, SEED, MODEL.embedding_init)
    data = TrainingData(lambda position: iter(given))
    trainer = Trainer(model, config, data, Restore(Checkpoints(Path())), print, SEED, DEVICE)
    for batch, coming in trainer.steps():
        trainer.train_step(batch, coming)
    assert (isinstance(trainer.step, GraphStep) and bool(trainer.step.graph.inputs)) == config.cuda_graph
    trainer.step.take_sums()
    state = model.state_dict()
    return {name: part.cpu() for name, tensor in state.items() for part in local_parts(tensor)}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "settings",
    [{}, {"dense_precision": "bf16"}, {"weighted": True}, {"dense_gradient_norm": 0.1, "on_nonfinite": "skip"}],
)
def test_a_graph_learns_the_same_bits(alone: None, settings: dict[str, Any]) -> None:
    """Among batches of 24 rows are some of other sizes and one whose rows weigh less."""
    given = list(batches(weighted=settings.get("weighted", False)))
    given[5] = replace(given[5], weights=torch.linspace(0.0, 2.0, 24), global_weight=24.0)
    given[7] = replace(given[7], global_weight=30.0)
    if not settings.get("weighted"):
        given.insert(3, next(batches(0, 2)))
    plain = train(given, cuda_graph=False, **settings)
    graphed = train(given, **settings)
    assert plain.keys() == graphed.keys()
    for name, tensor in plain.items():
        assert torch.equal(tensor, graphed[name]), name


def train_shared(rank: int, folder: str) -> None:
    """Runs in each of two processes on one device. NCCL refuses that, so they exchange by gloo."""
    os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    torch.cuda.set_device(DEVICE)
    torch.use_deterministic_algorithms(True, warn_only=True)
    for name, settings in SHARED.items():
        given = list(batches(rank, 2))
        given[4] = replace(next(batches(rank, 4)), global_rows=12)  # the graph does not take it
        save_file(train(given, ranks=2, **settings), f"{folder}/{name}-{rank}.safetensors")
    dist.barrier()
    dist.destroy_process_group()


SHARED: dict[str, dict[str, Any]] = {
    "plain": {"cuda_graph": False},
    "graph": {},
    "ahead": {"send_ids_ahead": True},
    "skip": {"on_nonfinite": "skip"},
}


@pytest.mark.gpu
def test_two_ranks_on_one_device_learn_what_one_learns(alone: None, tmp_path: Path) -> None:
    torch.multiprocessing.spawn(train_shared, (str(tmp_path),), nprocs=2)
    single = train([*islice(batches(), 4), replace(next(batches(0, 2)), global_rows=12), *islice(batches(), 5, None)])
    plain, *others = (
        load_file(tmp_path / f"{name}-1.safetensors") | load_file(tmp_path / f"{name}-0.safetensors") for name in SHARED
    )
    assert plain.keys() == single.keys()
    for name, tensor in plain.items():
        assert all(torch.equal(tensor, other[name]) for other in others), name
        torch.testing.assert_close(tensor, single[name], rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
def test_staged_batches_are_the_same_batches_in_order() -> None:
    given = [replace(one, position=Position(batches=n)) for n, one in enumerate([*batches(weighted=True)] * 5)]
    given.insert(30, shared_batch())
    staged = StagedBatches(iter(given), DEVICE, narrow=True)
    for one, other in zip(given, staged.iterate(), strict=True):
        assert other.dense.device == DEVICE
        require_same(other, one)
    assert not staged.thread.is_alive()


@pytest.mark.gpu
def test_an_error_of_the_batches_reaches_the_trainer() -> None:
    def broken() -> Iterator[Batch]:
        yield shared_batch()
        raise ValueError("no rows")

    staged = StagedBatches(broken(), DEVICE, narrow=True).iterate()
    next(staged)
    with pytest.raises(ValueError, match="no rows"):
        next(staged)


@pytest.mark.gpu
def test_closing_ends_the_thread_and_reads_no_further() -> None:
    closed = threading.Event()
    read = []

    def endless() -> Iterator[Batch]:
        try:
            while True:
                read.append(1)
                yield shared_batch()
        finally:
            closed.set()

    staged = StagedBatches(endless(), DEVICE, narrow=False)
    batches_of = staged.iterate()
    next(batches_of)
    batches_of.close()  # type: ignore[attr-defined]
    assert closed.is_set()
    assert not staged.thread.is_alive()
    assert len(read) <= AHEAD + 4

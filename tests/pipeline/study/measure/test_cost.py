"""Closed-form counts agree with PyTorch's own counter and with real tables."""

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.study.measure.cost import TableLoad, count_batch_load, count_load, count_row_bytes
from pipeline.training.config import TrainConfig
from pipeline.training.tables.model import shard_model

ROWS, DENSE = 32, 5
BAGS = [
    SparseFeature("a", "one", 50, "sum"),
    SparseFeature("b", "one", 50, "sum"),
    SparseFeature("c", "other", 30, "mean"),
]
MODELS = {
    "dot": DLRMConfig(embedding_width=8, bottom_mlp=(16, 12), top_mlp=(24,), interaction="dot"),
    "cat": DLRMConfig(embedding_width=8, bottom_mlp=(), top_mlp=(24, 6), interaction="cat"),
    "dcn": DLRMConfig(embedding_width=8, bottom_mlp=(16,), top_mlp=(), interaction="dcn", cross_layers=3),
    "low_rank": DLRMConfig(embedding_width=4, bottom_mlp=(16,), top_mlp=(9,), interaction="dcn", cross_rank=2),
}
SETUP = TrainConfig(batch_rows=ROWS, world_size=1)


def batches(count: int, rows: int = ROWS, seed: int = 1) -> list[Batch]:
    random = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        lengths = random.integers(0, 6, (len(BAGS), rows)).astype(np.int32)
        ids = [random.integers(0, bag.rows, n.sum()) for bag, n in zip(BAGS, lengths, strict=True)]
        sparse = KeyedJaggedTensor(
            [bag.name for bag in BAGS], torch.from_numpy(np.concatenate(ids)), lengths=torch.from_numpy(lengths.ravel())
        )
        dense = torch.from_numpy(random.random((rows, DENSE), np.float32))
        made.append(Batch(dense, sparse, torch.ones(rows), torch.ones(rows), Position(), ROWS))
    return made


@pytest.mark.parametrize(("name", "dense"), list(product(MODELS, (DENSE, 0))))
def test_operations_and_parameters_are_those_that_pytorch_counts(name: str, dense: int) -> None:
    [batch] = batches(1)
    model = DLRM(MODELS[name], dense, BAGS)
    pooled = torch.rand(ROWS, len(BAGS), MODELS[name].embedding_width, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model.score(batch.dense, pooled).sum().backward()
    load = count_batch_load(MODELS[name], dense, BAGS, [batch], SETUP)
    assert load.mlp_flop + load.interaction_flop == counter.get_total_flops()
    kept = [value for path, value in model.named_parameters() if not path.startswith("embeddings.")]
    assert load.dense_parameters == sum(value.numel() for value in kept)


def test_lookups_and_rows_are_those_of_the_batches() -> None:
    made = batches(3)
    load = count_batch_load(MODELS["dot"], DENSE, BAGS, made, SETUP)
    assert load.lookups == pytest.approx(np.mean([len(batch.sparse.values()) for batch in made]))
    distinct = [
        len({*batch.sparse["a"].values().tolist(), *batch.sparse["b"].values().tolist()})
        + len(set(batch.sparse["c"].values().tolist()))
        for batch in made
    ]
    assert load.distinct_rows == pytest.approx(np.mean(distinct))
    of_a_row = 8 * load.lookups / ROWS + 4 * len(BAGS) + 4 * DENSE + 4
    assert load.sample_bytes == pytest.approx(of_a_row)
    # read for each lookup; of each distinct row the weights and one number of state are read and written
    assert load.embedding_bytes == pytest.approx(4 * 8 * load.lookups + 2 * (4 * 8 + 4) * load.distinct_rows)


def test_shares_of_ranks_make_a_global_batch() -> None:
    first, second = batches(2, rows=ROWS // 2)
    load = count_batch_load(MODELS["dot"], DENSE, BAGS, [first, second], SETUP)
    assert load.lookups == len(first.sparse.values()) + len(second.sparse.values())
    both = [{*first.sparse[bag.name].values().tolist(), *second.sparse[bag.name].values().tolist()} for bag in BAGS]
    assert load.distinct_rows == len(both[0] | both[1]) + len(both[2])


def test_statistics_and_batches_drawn_from_them_agree() -> None:
    rows, tables, hash_size, lookups = 512, 4, 1_000, 3
    random = np.random.default_rng(7)
    names = [f"sparse_{i}" for i in range(tables)]
    made = []
    for _ in range(4):
        ids = torch.from_numpy(random.integers(0, hash_size, rows * tables * lookups))
        lengths = torch.full((rows * tables,), lookups, dtype=torch.int32)
        sparse = KeyedJaggedTensor(names, ids, lengths=lengths)
        made.append(Batch(torch.rand(rows, DENSE), sparse, torch.ones(rows), torch.ones(rows), Position(), rows))
    bags = [SparseFeature(name, name, hash_size, "sum") for name in names]
    setup = TrainConfig(batch_rows=rows, world_size=2)
    # of n uniform draws from N, N (1 - (1 - 1/N)^n) are distinct
    distinct = hash_size * (1 - (1 - 1 / hash_size) ** (rows * lookups))
    drawn = count_batch_load(MODELS["cat"], DENSE, bags, made, setup)
    stated = count_load(MODELS["cat"], DENSE, [TableLoad(hash_size, lookups, distinct)] * tables, setup)
    assert stated.model_dump() == pytest.approx(drawn.model_dump(), rel=0.02)


@pytest.mark.parametrize("optimizer", ["rowwise_adagrad", "adagrad", "sgd", "adam"])
def test_bytes_of_tables_are_those_of_a_built_model(optimizer: Any, device: torch.device) -> None:
    config = TrainConfig(
        world_size=1, batch_rows=ROWS, device=device.type, sharding="table_wise", table_optimizer=optimizer,
        dense_optimizer="adam",
    )  # fmt: skip
    model, _ = shard_model(DLRM(MODELS["dot"], DENSE, BAGS, "meta"), config, device, 1, None)
    # with the second state of our own Adam kernel, without scalars such as counters
    states = [value for state in model.fused_optimizer.state_dict()["state"].values() for value in state.values()]
    of_states = sum(value.local_tensor().nbytes if hasattr(value, "local_tensor") else 0 for value in states)
    tables = sum(50 * 8 * 4 if "one" in name else 30 * 8 * 4 for name in ("one", "other"))
    assert sum(rows * sum(count_row_bytes(8, "fp32", optimizer)) for rows in (50, 30)) == tables + of_states


def sent(kind: str, ranks: int, **settings: Any) -> float:
    """Returns the bytes between ranks for the tables alone."""
    setup = TrainConfig(batch_rows=ROWS, world_size=ranks, **settings)
    load = count_load(MODELS["dot"], DENSE, [TableLoad(50, 2.0, 40.0, kind=kind)], setup)
    return load.communication_bytes - 2 * (ranks - 1) * 4 * load.dense_parameters * (setup.sync == "synchronous")


def test_bytes_between_ranks_by_hand() -> None:
    """Counts message by message. Rank r holds some rows of a row-wise table, a whole table, or a copy."""
    ids, lengths, vector, half = 2 * ROWS * 8, ROWS * 4, 8 * 4, 8 * 2
    assert sent("table_wise", 1) == 0
    assert sent("table_wise", 2) == (ids + lengths + 2 * ROWS * vector) / 2
    assert sent("table_wise", 4) == (ids + lengths + 2 * ROWS * vector) * 3 / 4
    assert sent("row_wise", 4) == ids * 3 / 4 + 3 * (lengths + 2 * ROWS * vector)
    assert sent("data_parallel", 4) == 2 * 3 * 50 * vector
    assert sent("table_wise", 2, vector_communication="fp16") == (ids + lengths + ROWS * (vector + half)) / 2
    assert sent("table_wise", 2, sync="hogwild") == 0

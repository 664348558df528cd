"""All sharding plans train like one process without TorchRec's sharding, and repeat bit for bit."""

import itertools
import json
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import get_unwrapped_module
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.config import SparseFeature
from models.dlrm import DLRM
from pipeline.errors import TrainingError
from pipeline.training.launch.processes import Limits, run_ranks
from pipeline.training.optim import INIT_BLOCK_ROWS, _block
from pipeline.training.tables import shared
from pipeline.training.tables.model import shard_model
from pipeline.training.tables.planner import plan_sharding
from pipeline.training.tables.shared import share_exchange
from tests.pipeline.training.placements import (
    BAGS,
    DENSE,
    MODEL,
    SEED,
    WEIGHTED,
    Cases,
    batches,
    conditions,
    trained,
    training,
)

ROOT = Path(__file__).resolve().parents[4]
LOSS_TOLERANCE, TOLERANCE = 1e-5, 1e-4
"""float32 sums differ in their order, which rounds gradients of about 1e-2 by 6e-8. Adagrad's first update is the rate,
0.1, times g / |g|. If one number of a gradient is 1e-6 by chance, that rounding is 1e-4 of a weight."""


def rules(**kinds: str) -> list[dict[str, Any]]:
    return [{"tables": [table], "kind": kind} for table, kind in kinds.items()]


MIXED = rules(user="table_wise", shop="row_wise", goods="table_wise", tags="row_wise")
CASES: dict[str, dict[str, Any]] = {
    "auto": {},
    "table_wise": {"sharding": "table_wise"},
    "row_wise": {"sharding": "row_wise"},
    "table_row_wise": {"sharding": "table_row_wise"},
    "by_differencing": {"sharding": "table_wise", "partitioner": "largest_differencing"},
    "data_parallel": {"sharding": "data_parallel"},
    "copies_and_parts": {
        "sharding": rules(user="data_parallel", shop="row_wise", goods="row_wise", tags="data_parallel")
    },
    "mixed": {"sharding": MIXED},
    "mixed_again": {"sharding": MIXED},
    "mixed_two": {"sharding": rules(user="table_row_wise", shop="table_wise", goods="row_wise", tags="table_row_wise")},
    "by_numbers": {"sharding": "table_wise", "table_optimizer": "adagrad"},
    "column_wise": {"sharding": "column_wise", "table_optimizer": "adagrad"},
    "table_column_wise": {"sharding": "table_column_wise", "table_optimizer": "adagrad"},
    "grid_shard": {
        "sharding": rules(user="grid_shard", shop="grid_shard", goods="column_wise", tags="table_row_wise"),
        "table_optimizer": "adagrad",
    },
    "all_kinds": {
        "sharding": rules(user="grid_shard", shop="column_wise", goods="table_wise", tags="row_wise"),
        "table_optimizer": "adagrad",
    },
    "columns_and_rows": {
        "sharding": rules(user="row_wise", shop="table_column_wise", goods="row_wise", tags="column_wise"),
        "table_optimizer": "adagrad",
    },
    "weighted_table_wise": {"sharding": "table_wise", "weighted": True},
    "weighted_row_wise": {"sharding": "row_wise", "weighted": True},
    "weighted_copies": {
        "sharding": rules(user="data_parallel", shop="row_wise", goods="table_wise", tags="data_parallel"),
        "weighted": True,
    },
    "weighted_columns": {"sharding": "column_wise", "table_optimizer": "adagrad", "weighted": True},
    "uneven": {"sharding": MIXED, "uneven": 1},
    "uneven_weighted": {"sharding": rules(user="table_wise", goods="row_wise"), "weighted": True, "uneven": 1},
    "without_rows": {"sharding": "table_wise", "uneven": 0},
}
REORDERED = {
    f"{kind}_reordered": {"sharding": kind, "reordered": True} for kind in ("table_wise", "row_wise", "table_row_wise")
}
"""Cases with another model than the others, because its features have another order."""
APART = ("row_wise", "column_wise", "grid_shard", "weighted_row_wise", "without_rows", "mixed_two", "all_kinds")
"""Cases that are also trained by ranks that share no memory, beside those of `REORDERED`."""
ROUGHER = {
    f"{kind}_fp16": {"sharding": kind, "vector_communication": "fp16", "gradient_communication": "fp16"}
    for kind in ("table_wise", "row_wise")
}
ROUGH_TOLERANCE = 2e-3
"""Tolerance of losses: fp16 keeps 11 bits of a vector's numbers."""
Result = tuple[dict[str, list[float]], dict[str, dict[str, torch.Tensor]]]


ON_CUDA = {
    f"{kind}_{memory}": {"sharding": kind, "table_memory": memory}
    for kind in ("table_wise", "row_wise")
    for memory in ("uvm", "uvm_caching")
}


MANY = ("table_wise", "row_wise", "mixed_two", "table_column_wise", "all_kinds", "columns_and_rows")
"""Cases with more ranks than cores."""
BY_HOST = ("table_row_wise", "grid_shard", "mixed_two", "all_kinds", "table_column_wise", "auto")
"""Cases with two ranks on each of two hosts."""


def by_ranks(
    world_size: int,
    folder: Path,
    device: Literal["cpu", "cuda"] = "cpu",
    cases: Mapping[str, dict[str, Any]] | None = None,
    hosts: int = 1,
) -> Result:
    both = {case: CASES[case] for case in APART} | REORDERED
    apart = {f"{case}_apart": settings | {"apart": True} for case, settings in both.items()}
    cases = cases or CASES | ROUGHER | (ON_CUDA if device == "cuda" else REORDERED | apart)
    run_ranks(
        "tests.pipeline.training.placements",
        Cases(world_size=world_size, hosts=hosts, device=device, cases=cases),
        folder,
        world_size,
        1,
        Limits(deadline_seconds=250),
        print,
        ROOT,
    )
    weights = {name: load_file(folder / f"{name}.safetensors") for name in cases}
    return json.loads((folder / "losses.json").read_text()), weights


@pytest.fixture(scope="module")
def one(device: torch.device) -> Result:
    """All cases on one rank, in this process."""
    found = {}
    for name, settings in CASES.items():
        usual = dict(settings)
        given = conditions(usual)
        losses, weights = trained(training(1, **usual), device, given)
        assert weights is not None
        found[name] = losses, weights
    return {name: losses for name, (losses, _) in found.items()}, {
        name: weights for name, (_, weights) in found.items()
    }


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return by_ranks(2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return by_ranks(4, tmp_path_factory.mktemp("four"), cases={case: CASES[case] for case in MANY})


@pytest.fixture(scope="module")
def two_hosts(tmp_path_factory: pytest.TempPathFactory) -> Result:
    return by_ranks(4, tmp_path_factory.mktemp("hosts"), cases={case: CASES[case] for case in BY_HOST}, hosts=2)


@pytest.fixture(scope="module")
def cuda(tmp_path_factory: pytest.TempPathFactory) -> Result:
    """All cases on up to two CUDA devices."""
    return by_ranks(min(torch.cuda.device_count(), 2), tmp_path_factory.mktemp("cuda"), "cuda")


def reference(optimizer: str, weighted: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The same training in plain PyTorch: dense gradients of whole tables, and Adagrad written out."""
    torch.manual_seed(SEED)
    model = DLRM(MODEL, DENSE, WEIGHTED if weighted else BAGS)
    torch.manual_seed(SEED)
    meta = DLRM(MODEL, DENSE, BAGS, device="meta")
    tables = {name: value for name, value in model.named_parameters() if name.startswith("embeddings.")}
    with torch.no_grad():
        for name, value in meta.named_parameters():
            if name not in tables:
                model.get_parameter(name).copy_(value)
        for name, value in tables.items():
            assert len(value) < INIT_BLOCK_ROWS
            value.copy_(torch.from_numpy(_block(SEED, name, 0, *value.shape, MODEL.embedding_init)))  # type: ignore[call-arg]
    config = training(1)
    rest = torch.optim.Adam([v for n, v in model.named_parameters() if n not in tables], lr=config.dense_learning_rate)
    moments = {
        name: torch.zeros(len(value), 1 if optimizer == "rowwise_adagrad" else value.shape[1])
        for name, value in tables.items()
    }
    losses = []
    for batch in batches(weighted=weighted):
        model.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(batch.dense, batch.sparse), batch.labels)
        loss.backward()
        losses.append(loss.item())
        rest.step()
        with torch.no_grad():
            for name, value in tables.items():
                square = value.grad**2
                moments[name] += square.mean(1, keepdim=True) if optimizer == "rowwise_adagrad" else square
                value.sub_(config.table_learning_rate * value.grad / (moments[name].sqrt() + 1e-8))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.fixture(scope="module")
def unsharded() -> dict[tuple[str, bool], tuple[list[float], dict[str, torch.Tensor]]]:
    kinds = itertools.product(("rowwise_adagrad", "adagrad"), (False, True))
    return {kind: reference(*kind) for kind in kinds}


def check(found: Result, case: str, unsharded: dict[tuple[str, bool], Any]) -> None:
    settings = (CASES | ON_CUDA)[case]
    losses, weights = unsharded[settings.get("table_optimizer", "rowwise_adagrad"), settings.get("weighted", False)]
    assert found[0][case] == pytest.approx(losses, abs=LOSS_TOLERANCE)
    assert found[1][case].keys() == weights.keys()
    for name, value in weights.items():
        torch.testing.assert_close(
            found[1][case][name], value, atol=TOLERANCE, rtol=0.0, msg=partial("{}: {}".format, name)
        )


@pytest.mark.parametrize("case", CASES)
def test_one_rank_trains_like_plain_pytorch(one: Result, unsharded: dict[tuple[str, bool], Any], case: str) -> None:
    check(one, case, unsharded)


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_train_like_plain_pytorch(two: Result, unsharded: dict[tuple[str, bool], Any], case: str) -> None:
    check(two, case, unsharded)


ZEROS = {
    f"{optimizer}_{decay}_{kind}": {
        "sharding": kind, "table_optimizer": optimizer, "table_weight_decay": decay, "table_learning_rate": 0.02,
        "weighted": True, "zeros": True,
    }
    for optimizer, decay in (("adam", 0.0), ("adam", 0.1), ("rowwise_adagrad", 0.1)) for kind in ("table_wise", "data_parallel")
}  # fmt: skip


def check_zeros(found: dict[str, dict[str, torch.Tensor]]) -> None:
    for case in (name for name in ZEROS if name.endswith("data_parallel")):
        for name, expected in found[case.replace("data_parallel", "table_wise")].items():
            difference = (found[case][name] - expected).abs().max().item()
            assert difference <= TOLERANCE, f"{case}, {name}: {difference}"


def test_rows_that_are_read_without_a_gradient_are_updated_under_every_plan(device: torch.device) -> None:
    """Decay and the moments of Adam change them, because they are read."""
    found = {}
    for name, settings in ZEROS.items():
        given = conditions(usual := dict(settings))
        found[name] = trained(training(1, device.type, **usual), device, given)[1] or {}
    check_zeros(found)


@pytest.mark.slow
def test_rows_that_another_rank_reads_without_a_gradient_are_updated(tmp_path: Path) -> None:
    check_zeros(by_ranks(2, tmp_path, cases=ZEROS)[1])


@pytest.mark.parametrize("bags", [BAGS, BAGS[:2]], ids=["sums and means", "sums"])
def test_one_rank_looks_up_what_torchrec_sends_to_itself(device: torch.device, bags: list[SparseFeature]) -> None:
    """Bit for bit, in any order of the ids."""
    whole = DLRM(MODEL, DENSE, bags, device="meta")
    model, _ = shard_model(whole, training(1, sharding="table_wise"), device, SEED, MODEL.embedding_init)
    tables = get_unwrapped_module(model).embeddings
    sparse = next(batches()).sparse.permute(list(reversed(range(len(bags))))).to(device)
    found, expected = tables(sparse).to_dict(), ShardedEmbeddingBagCollection.forward(tables, sparse).to_dict()
    assert sorted(found) == sorted(expected) == sorted(bag.name for bag in bags)
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.nightly
@pytest.mark.parametrize("case", MANY)
def test_four_ranks_train_like_plain_pytorch(four: Result, unsharded: dict[tuple[str, bool], Any], case: str) -> None:
    check(four, case, unsharded)


@pytest.mark.nightly
@pytest.mark.parametrize("case", BY_HOST)
def test_ranks_of_two_hosts_train_like_plain_pytorch(
    two_hosts: Result, unsharded: dict[tuple[str, bool], Any], case: str
) -> None:
    """As two hosts to TorchRec, and to our planner. tests/hosts has real ones."""
    check(two_hosts, case, unsharded)


def test_a_plan_for_other_hosts_is_refused(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """TorchRec looks at the first shard's rank only."""
    config = training(4, hosts=2, launcher="external", sharding="table_row_wise")
    whole = DLRM(MODEL, DENSE, BAGS, device="meta")
    plan = plan_sharding(DLRM(MODEL, DENSE, BAGS, device="meta"), config, "cpu")
    with pytest.raises(TrainingError) as caught:
        shard_model(whole, training(1), device, SEED, None, plan)
    assert str(caught.value) == (
        "sharding plan of table 'user': expected rows divided among all 1 ranks of a host, got among ranks 2, 3. "
        "Set training.hosts to the hosts of the ranks."
    )


def test_a_plan_repeats_bit_for_bit(one: Result, two: Result) -> None:
    for losses, weights in (one, two):
        assert losses["mixed_again"] == losses["mixed"]
        assert all(value.equal(weights["mixed"][name]) for name, value in weights["mixed_again"].items())


@pytest.mark.parametrize("case", [*APART, *REORDERED])
def test_shared_memory_carries_the_same_bits_as_sockets(two: Result, case: str) -> None:
    """For two ranks. TorchRec may add the parts of a divided table in another order if there are more."""
    losses, weights = two
    assert losses[case] == losses[f"{case}_apart"]
    assert all(value.equal(weights[f"{case}_apart"][name]) for name, value in weights[case].items())


@pytest.mark.parametrize("kind", ["table_wise", "row_wise"])
def test_shared_memory_grows_with_the_batch(device: torch.device, kind: Literal["table_wise", "row_wise"]) -> None:
    """With vectors and gradients as before, and after a batch without an update."""
    models = []
    for exchanged in (False, True):
        whole = DLRM(MODEL, DENSE, BAGS, device="meta")
        model, _ = shard_model(whole, training(1, sharding=kind), device, SEED, MODEL.embedding_init)
        if exchanged:
            share_exchange(model, whole.names)
        models.append(get_unwrapped_module(model).embeddings)
    random = np.random.default_rng(SEED)
    for rows in (1, 24, 3, 700, 20):
        lengths = random.integers(0, 9, (len(BAGS), rows)).astype(np.int32)
        ids = np.concatenate([random.integers(0, bag.rows, n.sum()) for bag, n in zip(BAGS, lengths, strict=True)])
        sparse = KeyedJaggedTensor(
            [bag.name for bag in BAGS], torch.from_numpy(ids), lengths=torch.from_numpy(lengths.reshape(-1))
        )
        expected, found = (ShardedEmbeddingBagCollection.forward(tables, sparse).to_dict() for tables in models)
        assert all(found[name].equal(expected[name]) for name in expected)
        if rows != 3:
            for vectors in (expected, found):
                sum((vector * torch.arange(16)).sum() for vector in vectors.values()).backward()


def test_a_backward_pass_of_overwritten_vectors_fails(device: torch.device) -> None:
    whole = DLRM(MODEL, DENSE, BAGS, device="meta")
    model, _ = shard_model(whole, training(1, sharding="table_wise"), device, SEED, MODEL.embedding_init)
    share_exchange(model, whole.names)
    tables = get_unwrapped_module(model).embeddings
    first, second = (
        ShardedEmbeddingBagCollection.forward(tables, batch.sparse).values().square().sum()
        for batch in itertools.islice(batches(), 2)
    )
    with pytest.raises(RuntimeError, match="has been modified inplace"):
        first.backward()
    second.backward()


def refuse(*given: Any) -> None:
    raise OSError


def test_ranks_that_cannot_map_memory_share_none(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    for place, name in ((os, "memfd_create"), (os, "ftruncate"), (shared.mmap, "mmap")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, refuse)
            assert shared.share_memory(100) is None
    assert set(os.listdir("/proc/self/fd")) <= before


def test_memory_of_others_is_not_mistaken_for_that_of_rank_0(tmp_path: Path) -> None:
    """A process of another host may have the same number, and so may its file."""
    made = shared._create(8, b"t" * 16)
    assert made is not None
    memory, fd = made
    memory[:8] = b"contents"
    opened = shared._open(f"/proc/self/fd/{fd}", 8, b"t" * 16)
    assert opened is not None
    found, mine = opened
    assert found[:8] == b"contents"
    (tmp_path / "file").write_bytes(b"contents" + b"t" * 16)
    with (tmp_path / "file").open() as file:
        assert shared._open(f"/proc/self/fd/{file.fileno()}", 8, b"t" * 16) is None
    assert shared._open(f"/proc/self/fd/{fd}", 8, b"u" * 16) is None
    assert shared._open("/proc/self/fd/-1", 8, b"t" * 16) is None
    os.close(fd)
    os.close(mine)


def test_an_id_outside_a_divided_table_is_refused(device: torch.device) -> None:
    whole = DLRM(MODEL, DENSE, BAGS, device="meta")
    model, _ = shard_model(whole, training(1, sharding="row_wise"), device, SEED, MODEL.embedding_init)
    share_exchange(model, whole.names)
    lengths = torch.tensor([0, 1, 0, 0, 0], dtype=torch.int32)
    with pytest.raises(IndexError, match="ids of feature 'shop' from 7 to 7, outside 7 rows"):
        get_unwrapped_module(model).embeddings(KeyedJaggedTensor(whole.names, torch.tensor([7]), lengths=lengths))


@pytest.mark.parametrize("case", ROUGHER)
def test_fp16_communication_costs_little_accuracy(two: Result, case: str) -> None:
    exact, rough = two[0][ROUGHER[case]["sharding"]], two[0][case]
    assert rough != exact
    assert rough == pytest.approx(exact, abs=ROUGH_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES | ON_CUDA)
def test_cuda_trains_like_plain_pytorch(cuda: Result, unsharded: dict[tuple[str, bool], Any], case: str) -> None:
    check(cuda, case, unsharded)

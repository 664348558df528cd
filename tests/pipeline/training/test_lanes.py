"""Weights of a training in lanes depend on its data alone: not on ranks, sharding plan or threads."""

import json
from collections.abc import Callable, Collection
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.dlrm import DLRM
from pipeline.config.run import load
from pipeline.data.batch import Batch
from pipeline.training.launch.processes import Limits, run_ranks
from pipeline.training.optim import _block
from pipeline.training.state import checkpoint
from pipeline.training.tables.planner import plan_sharding
from tests.pipeline.training.laned import BAGS, DENSE, LANES, MODEL, ROWS, SEED, Cases, batches, trained, training

ROOT = Path(__file__).resolve().parents[3]


def rules(**kinds: str) -> list[dict[str, Any]]:
    return [{"tables": [table], "kind": kind} for table, kind in kinds.items()]


ADAGRAD: dict[str, Any] = {"table_optimizer": "adagrad"}
SAME: dict[str, dict[str, dict[str, Any]]] = {
    "row-wise adagrad": {"table_wise": {}, "auto": {"sharding": "auto"}, "ahead": {"send_ids_ahead": True}},
    "adagrad": {
        "by_numbers": ADAGRAD,
        "column_wise": ADAGRAD | {"sharding": "column_wise"},
        "table_column_wise": ADAGRAD | {"sharding": "table_column_wise"},
        "mixed": ADAGRAD | {"sharding": rules(user="column_wise", goods="table_wise", tags="column_wise")},
    },
    "adam": {
        "adam": {"table_optimizer": "adam", "table_weight_decay": 1e-3, "dense_gradient_norm": 0.05},
        "adam_column_wise": {
            "table_optimizer": "adam", "table_weight_decay": 1e-3, "dense_gradient_norm": 0.05,
            "sharding": "column_wise",
        },
    },
    "weighted": {
        "weighted": ADAGRAD | {"weighted": True},
        "weighted_columns": ADAGRAD | {"weighted": True, "sharding": "column_wise"},
    },
    "bf16": {"bf16": {"dense_precision": "bf16"}},
    "dropout": {"dropout": {"dropout": 0.3}},
    "skip": {"skip": {"on_nonfinite": "skip", "table_gradient_limit": 1e-3, "dense_optimizer": "adagrad"}},
}  # fmt: skip
"""Trainings that differ in nothing that is learned -> cases of `laned.py`."""
TOLERANCE = 1e-4
"""Of weights against plain PyTorch, which adds in another order inside a lane."""
PLAIN = {"plain": {"lanes": None}}
Found = dict[str, dict[str, Any]]


CASES = {name: settings for group in SAME.values() for name, settings in group.items()} | PLAIN


def by_ranks(
    world_size: int,
    folder: Path,
    threads: int = 1,
    names: Collection[str] = tuple(CASES),
    batches: tuple[int, int] = (0, len(ROWS)),
    start: Path | None = None,
) -> Found:
    spec = Cases(
        world_size=world_size, cases={name: CASES[name] for name in names}, batches=batches,
        start=None if start is None else str(start),
    )  # fmt: skip
    run_ranks(
        "tests.pipeline.training.laned", spec, folder, world_size, threads, Limits(deadline_seconds=500), print, ROOT
    )
    found: Found = json.loads((folder / "found.json").read_text())
    return found


RUNS = {"one": (1, 1), "two threads": (1, 2), "two": (2, 1), "three": (3, 1), "four": (4, 1)}
"""Name -> ranks and threads."""
Find = Callable[[str], Found]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Find:
    """Returns what the ranks of a run find. Each runs once."""

    @cache
    def find(name: str) -> Found:
        ranks, threads = RUNS[name]
        return by_ranks(ranks, tmp_path_factory.mktemp(f"ranks-{ranks}-{threads}"), threads)

    return find


@pytest.mark.slow
@pytest.mark.parametrize("training", SAME)
@pytest.mark.parametrize(
    "run", ["one", "three", *(pytest.param(name, marks=pytest.mark.nightly) for name in ("two threads", "two", "four"))]
)
def test_every_number_of_ranks_and_every_plan_ends_with_the_same_bits(found: Find, training: str, run: str) -> None:
    """Weights, optimizer state, losses and validation, over whole and short batches."""
    first = found("one")[next(iter(SAME[training]))]
    assert {case: found(run)[case] for case in SAME[training] if found(run)[case] != first} == {}


@pytest.mark.slow
def test_without_lanes_the_bits_depend_on_the_ranks(found: Find) -> None:
    assert found("three")["plain"]["weights"] != found("one")["plain"]["weights"]
    assert found("one")["plain"]["weights"] != found("one")["table_wise"]["weights"]


def lane_of(batch: Batch, rows: slice) -> tuple[torch.Tensor, KeyedJaggedTensor]:
    """Dense numbers and lists of some rows."""
    lists = [batch.sparse[bag.name].to_dense()[rows] for bag in BAGS]
    lengths = torch.tensor([len(one) for bag in lists for one in bag], dtype=torch.int32)
    values = torch.cat([one for bag in lists for one in bag])
    return batch.dense[rows], KeyedJaggedTensor(keys=[bag.name for bag in BAGS], values=values, lengths=lengths)


def unsharded_model() -> DLRM:
    """The model of `laned.py` before the first step, without TorchRec's sharding."""
    torch.manual_seed(SEED)
    meta, model = DLRM(MODEL, DENSE, BAGS, device="meta"), DLRM(MODEL, DENSE, BAGS)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if name.startswith("embeddings."):
                value.copy_(torch.from_numpy(_block(SEED, name, 0, *value.shape, MODEL.embedding_init)))  # type: ignore[call-arg]
            else:
                value.copy_(meta.get_parameter(name))
    return model


def reference() -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and weights in plain PyTorch: lane after lane, their sum in order, and row-wise Adagrad written out."""
    model, config = unsharded_model(), training(1)
    tables = {name: value for name, value in model.named_parameters() if name.startswith("embeddings.")}
    rest = [value for name, value in model.named_parameters() if name not in tables]
    optimizer = torch.optim.Adam(rest, lr=config.dense_learning_rate)
    moments, losses = {name: torch.zeros(len(value), 1) for name, value in tables.items()}, []
    for batch in batches():
        sums, total = [torch.zeros_like(value) for value in model.parameters()], 0.0
        for lane in range(LANES):
            rows = slice(lane * batch.global_rows // LANES, (lane + 1) * batch.global_rows // LANES)
            if rows.start == rows.stop:
                continue
            logits = model(*lane_of(batch, rows))
            loss = F.binary_cross_entropy_with_logits(logits, batch.labels[rows], batch.weights[rows], reduction="sum")
            total += loss.item()
            for one, gradient in zip(sums, torch.autograd.grad(loss / batch.whole, [*model.parameters()]), strict=True):
                one += gradient
        losses.append(total)
        for value, one in zip(model.parameters(), sums, strict=True):
            value.grad = one
        optimizer.step()
        with torch.no_grad():
            for name, value in tables.items():
                moments[name] += value.grad.square().mean(1, keepdim=True)
                value.sub_(config.table_learning_rate * value.grad / (moments[name].sqrt() + 1e-8))
    return losses, {name: value.detach() for name, value in model.named_parameters()}


@pytest.mark.slow
def test_lanes_train_like_plain_pytorch(device: torch.device, tmp_path: Path) -> None:
    losses, weights = reference()
    found = trained(Cases(world_size=1, cases={"one": {}}), "one", tmp_path)
    assert found is not None
    assert found["losses"] == pytest.approx(losses, rel=1e-5)
    state = checkpoint.read_whole(tmp_path / "one" / "end", "model/")
    assert state.keys() == {f"model/{name}" for name in weights}
    for name, value in weights.items():
        torch.testing.assert_close(
            state[f"model/{name}"], value, atol=TOLERANCE, rtol=0.0, msg=partial("{}: {}".format, name)
        )


@pytest.mark.nightly
@pytest.mark.parametrize(("first", "then"), [(4, 1), (1, 3)])
def test_a_resumed_training_goes_on_with_other_ranks(found: Find, tmp_path: Path, first: int, then: int) -> None:
    """The checkpoint of one number of ranks, loaded by another, ends as the undisturbed training does."""
    names = ("table_wise", "adam", "dropout")
    by_ranks(first, tmp_path / "first", names=names, batches=(0, 5))
    resumed = by_ranks(then, tmp_path / "then", names=names, batches=(5, len(ROWS)), start=tmp_path / "first")
    for name in names:
        assert resumed[name]["state"] == found("one")[name]["state"]
        assert resumed[name]["losses"] == found("one")[name]["losses"][5:]


def test_auto_leaves_tables_whole() -> None:
    plan = plan_sharding(DLRM(MODEL, DENSE, BAGS, device="meta"), training(2, sharding="auto"), "cpu")
    assert {table.kind for table in plan} == {"table_wise"}


def test_lanes_are_part_of_the_identity_and_then_ranks_are_not() -> None:
    def semantics(**training: Any) -> dict[str, Any]:
        return load(
            ROOT / "configs/smoke.yaml", {f"training.{key}": value for key, value in training.items()}
        ).semantics()

    plain = semantics()
    assert semantics(lanes=4) != plain
    assert semantics(lanes=4) != semantics(lanes=8)
    assert semantics(lanes=4, world_size=1, sharding="table_wise") == semantics(lanes=4, world_size=4)
    assert semantics(world_size=1) != plain

"""Sharding plans have the configured type, are equal in every process and fit into memory."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from pydantic import ValidationError

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.errors import ConfigError, ContractError, TrainingError
from pipeline.training.config import ShardingRule, TrainConfig, requested_sharding_type
from pipeline.training.tables.plan import ShardingPlan, describe_plan, sum_per_rank
from pipeline.training.tables.planner import AUTO_SHARDING_TYPES, plan_sharding
from pipeline.training.tables.statistics import LOAD_FACTORS, TableUse

ROOT = Path(__file__).resolve().parents[4]
BAGS = [SparseFeature(f"f{i}", f"t{i}", 100 * (i + 1), "sum") for i in range(5)]


def placed(
    bags: list[SparseFeature] = BAGS, width: int = 16, uses: dict[str, TableUse] | None = None, **settings: Any
) -> ShardingPlan:
    config = TrainConfig(**{"batch_rows": 64, "device": "cpu"} | settings)
    return plan_sharding(DLRM(DLRMConfig(embedding_width=width), 2, bags, device="meta"), config, "cpu", uses)


KINDS = [
    "auto",
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_a_plan_has_the_configured_type_and_covers_every_table(kind: str, world_size: int) -> None:
    plan = placed(sharding=kind, world_size=world_size, table_optimizer="adagrad")
    assert [table.table for table in plan] == [bag.table for bag in BAGS]
    for table, bag in zip(plan, BAGS, strict=True):
        assert table.kind in (AUTO_SHARDING_TYPES if kind == "auto" else [kind])
        assert (table.rows, table.width) == (bag.rows, 16)
        assert table.kernel == ("dense" if table.kind == "data_parallel" else "fused")
        cells = [(row, column) for piece in table.pieces for row in range(piece.row, piece.row + piece.rows)
                 for column in range(piece.column, piece.column + piece.columns)]  # fmt: skip
        copies = world_size if table.kind == "data_parallel" else 1
        assert len(cells) == copies * len(set(cells)) == copies * bag.rows * 16
        assert {piece.rank for piece in table.pieces} <= set(range(world_size))
        assert all(piece.bytes > 4 * piece.rows * piece.columns for piece in table.pieces)
        assert all(piece.milliseconds > 0 for piece in table.pieces)
    assert {piece.rank for table in plan for piece in table.pieces} == set(range(world_size))


PRINT = """
from tests.pipeline.training.tables.test_planner import placed
print([table.model_dump_json() for kind in ("auto", "column_wise")
       for table in placed(sharding=kind, world_size=2, table_optimizer="adagrad")])
"""


@pytest.mark.slow
def test_another_process_makes_the_same_plan() -> None:
    """String hashes, and so the order of a set, differ between processes."""
    found = [
        subprocess.run([sys.executable, "-W", "ignore", "-c", PRINT], env={"PYTHONHASHSEED": seed, "OMP_NUM_THREADS": "1"},
                       cwd=ROOT, capture_output=True, text=True, check=True).stdout
        for seed in ("1", "2")
    ]  # fmt: skip
    plans = [placed(sharding=kind, world_size=2, table_optimizer="adagrad") for kind in ("auto", "column_wise")]
    assert found == [f"{[table.model_dump_json() for plan in plans for table in plan]}\n"] * 2


def test_the_first_rule_that_names_a_table_wins() -> None:
    rules = (
        ShardingRule(tables=("t1", "t[34]"), kind="row_wise"),
        ShardingRule(tables=("t*",), kind="table_wise"),
    )
    plan = placed(sharding=rules, world_size=2)
    assert [table.kind for table in plan] == ["table_wise", "row_wise", "table_wise", "row_wise", "row_wise"]
    assert requested_sharding_type(rules, "other") == "auto"


def use(table: str, ids: float, filled: float = 1.0) -> TableUse:
    rates = tuple(1.0 - share for share in LOAD_FACTORS)
    return TableUse(table=table, ids_per_bag=(ids,), filled_share=(filled,), distinct_rows=9.0, miss_rates=rates)


def test_measured_use_decides_which_tables_share_a_rank() -> None:
    """Of four tables of one size, the two with long bags go to different ranks."""
    bags = [SparseFeature(f"f{i}", f"t{i}", 1000, "sum") for i in range(4)]
    uses = {f"t{i}": use(f"t{i}", 50.0 if i in (0, 2) else 1.0) for i in range(4)}
    plan = placed(bags, sharding="table_wise", world_size=2, uses=uses, partitioner="largest_differencing")
    homes = [table.pieces[0].rank for table in plan]
    assert homes[0] != homes[2]
    assert homes[1] != homes[3]
    times = [table.pieces[0].milliseconds for table in plan]
    assert times[0] == times[2] > 5 * times[1]
    rare = placed(bags, sharding="table_wise", world_size=2, uses=uses | {"t0": use("t0", 50.0, 0.1)})
    assert rare[0].pieces[0].milliseconds < times[0] / 5


def test_memory_counts_the_optimizer() -> None:
    sizes = {
        optimizer: sum(
            sum_per_rank(
                describe_plan(placed(sharding="table_wise", world_size=1, table_optimizer=optimizer)), "bytes", 1
            )
        )
        for optimizer in ("sgd", "rowwise_adagrad", "adagrad", "adam")
    }
    weights = sum(4 * bag.rows * 16 for bag in BAGS)
    assert sizes["rowwise_adagrad"] - sizes["sgd"] == weights / 16
    assert sizes["adagrad"] - sizes["sgd"] == weights
    assert sizes["adam"] - sizes["sgd"] == 2 * weights


@pytest.mark.parametrize("partitioner", ["greedy", "largest_differencing"])
def test_a_plan_stays_within_the_memory(partitioner: str) -> None:
    """Two large tables with short bags may share a rank only if they fit."""
    bags = [SparseFeature(f"f{i}", f"t{i}", rows, "sum") for i, rows in enumerate((100_000, 1_000, 1_000, 100_000))]
    uses = {f"t{i}": use(f"t{i}", ids) for i, ids in enumerate((9.0, 40.0, 40.0, 9.0))}
    settings = {"bags": bags, "uses": uses, "sharding": "table_wise", "world_size": 2, "partitioner": partitioner}
    for memory in (20_000_000, 9_000_000, 8_000_000):
        rows = describe_plan(placed(**settings, memory_per_rank_bytes=memory))
        assert max(sum_per_rank(rows, "bytes", 2)) <= memory
    with pytest.raises(TrainingError):
        placed(**settings, memory_per_rank_bytes=6_000_000)


TWO_HOSTS = {"world_size": 4, "hosts": 2, "launcher": "external"}
HOSTS = ({0, 1}, {2, 3})


def test_table_row_wise_divides_rows_among_the_ranks_of_one_host() -> None:
    plan = placed(sharding="table_row_wise", **TWO_HOSTS)
    ranks = [{piece.rank for piece in table.pieces} for table in plan]
    assert all(one in HOSTS for one in ranks)
    assert all(host in ranks for host in HOSTS)
    for table in plan:
        assert [(piece.row, piece.rows, piece.columns) for piece in table.pieces] == [
            (0, table.rows // 2, 16), (table.rows // 2, table.rows // 2, 16)
        ]  # fmt: skip


def test_grid_shard_gives_each_host_columns_and_divides_their_rows_among_its_ranks() -> None:
    for table in placed(sharding="grid_shard", table_optimizer="adagrad", **TWO_HOSTS):
        by_column = {column: {p.rank for p in table.pieces if p.column == column} for column in (0, 8)}
        assert sorted(by_column.values(), key=min) == list(HOSTS)
        assert len(table.pieces) == 4
        assert all((piece.rows, piece.columns) == (table.rows // 2, 8) for piece in table.pieces)


def test_table_column_wise_cuts_no_more_columns_than_a_host_has_ranks() -> None:
    for table in placed(sharding="table_column_wise", table_optimizer="adagrad", **TWO_HOSTS):
        assert {piece.rank for piece in table.pieces} in HOSTS
        assert [piece.columns for piece in table.pieces] == [8, 8]


def test_rows_must_suffice_for_the_ranks_of_one_host() -> None:
    """Five rows cannot be divided among four ranks, but among two."""
    bags = [SparseFeature("f", "t", 5, "sum")]
    assert [piece.rows for piece in placed(bags, sharding="table_row_wise", **TWO_HOSTS)[0].pieces] == [3, 2]
    with pytest.raises(ConfigError, match="expected at least one row on each of 4 ranks"):
        placed(bags, sharding="row_wise", **TWO_HOSTS)
    few = [SparseFeature("f", "t", 4, "sum")]
    with pytest.raises(ConfigError, match="at least one row on each of 3 ranks, got 4 rows in shards of 2"):
        placed(few, sharding="table_row_wise", world_size=6, hosts=2, launcher="external")
    with pytest.raises(ConfigError, match="splits into at most 2 equal shards of a multiple of 4 columns, got 4"):
        placed(width=4, sharding="grid_shard", table_optimizer="adagrad", **TWO_HOSTS)


def test_auto_keeps_what_is_cut_on_one_host_if_the_network_is_slow() -> None:
    """A table that fits on no single rank."""
    bags = [SparseFeature("f", "t", 200_000, "sum")]
    settings = {"bags": bags, "sharding": "auto", "memory_per_rank_bytes": 10_000_000, **TWO_HOSTS}
    assert [table.kind for table in placed(**settings)] == ["table_row_wise"]
    (one,) = placed(**settings | {"hosts": 1})
    assert one.kind == "row_wise"
    slow, fast = ((placed(**settings, network_bytes_per_second=rate))[0].pieces for rate in (1e8, 1e10))
    assert slow[0].milliseconds > 10 * fast[0].milliseconds
    (alone,) = placed(**settings | {"hosts": 4, "memory_per_rank_bytes": None})
    assert alone.kind in ("table_wise", "row_wise")


def test_each_host_has_its_whole_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tables of 14 MB on hosts of 40 MB, which hold back 15 %."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=40_000_000))
    settings = {"bags": [SparseFeature(f"f{i}", f"t{i}", 200_000, "sum") for i in range(2)], "sharding": "table_wise"}
    assert {table.pieces[0].rank // 2 for table in placed(**settings, **TWO_HOSTS)} == {0, 1}
    with pytest.raises(TrainingError):
        placed(**settings, world_size=4)


@pytest.mark.parametrize("kind", ["auto", "table_wise"])
def test_lanes_have_whole_tables_on_several_hosts_too(kind: str) -> None:
    plan = placed(sharding=kind, lanes=4, **TWO_HOSTS)
    assert {table.kind for table in plan} == {"table_wise"}
    with pytest.raises(ConfigError, match="table_row_wise, which adds the vectors of a bag rank by rank"):
        TrainConfig(sharding="table_row_wise", lanes=4, **TWO_HOSTS)


REFUSED = {
    "a rule for nothing": (
        {"sharding": ({"tables": ["t0", "x*"], "kind": "row_wise"},)}, ConfigError,
        "training.sharding, rule 'x*': expected a pattern that matches one of the tables t0, t1, t2, t3, t4, "
        "got no match. Correct the pattern.",
    ),
    "uvm": (
        {"table_memory": "uvm_caching"}, ConfigError,
        "training.table_memory 'uvm_caching': expected a CUDA device, got cpu. "
        "Set it to `device`.",
    ),
    "bf16 over gloo": (
        {"vector_communication": "bf16"}, ConfigError,
        "training.vector_communication: expected fp32 or fp16 on CPU, since gloo does not support bf16, got bf16. "
        "Set it to fp16.",
    ),
    "adam of FBGEMM": (
        {"embedding_kernel": "fbgemm", "table_optimizer": "adam"}, ConfigError,
        "training.embedding_kernel 'fbgemm' on CPU: expected table_optimizer rowwise_adagrad, adagrad or sgd, got adam. "
        "Set embedding_kernel: auto, with fp32 tables.",
    ),
    "limit of copies": (
        {"sharding": "data_parallel", "table_gradient_limit": 0.1}, ConfigError,
        "training.sharding 'data_parallel' of table 't0': expected no table_gradient_limit, got 0.1, which clips "
        "gradients of bags, while copies only know their sums. Choose another sharding type for this table.",
    ),
    "halves of copies": (
        {"sharding": "data_parallel", "table_precision": "fp16"}, ConfigError,
        "training.sharding 'data_parallel' of table 't0': expected table_precision fp32, got fp16, in which copies would "
        "also keep their optimizer state. Choose another sharding type for this table.",
    ),
    "memory balanced": (
        {"partitioner": "memory_balanced"}, ConfigError,
        "training.partitioner 'memory_balanced': expected CUDA devices, got cpu. "
        "Set it to `greedy` or `largest_differencing`.",
    ),
    "a rank without rows": (
        {"bags": [SparseFeature("f", "t", 5, "sum")], "sharding": "row_wise", "world_size": 4}, ConfigError,
        "training.sharding 'row_wise' of table 't': expected at least one row on each of 4 ranks, got 5 rows in shards of 2. "
        "Set `table_wise` for this table, or use fewer ranks.",
    ),
    "grid of means": (
        {"bags": [SparseFeature("f", "t", 30, "mean")], "sharding": "grid_shard", "world_size": 2, "table_optimizer": "sgd"},
        ConfigError,
        "training.sharding 'grid_shard' of table 't': expected sum pooling, got mean pooling, which TorchRec would "
        "compute per shard and then sum. Set `table_row_wise` or `column_wise` for this table.",
    ),
    "narrow": (
        {"width": 10, "sharding": "column_wise", "world_size": 2, "table_optimizer": "adagrad"}, ConfigError,
        "training.sharding 'column_wise' of table 't0': expected an embedding_width that splits into at most 2 equal "
        "shards of a multiple of 4 columns, got 10. Change model.embedding_width, or set `table_wise`.",
    ),
    "another optimizer": (
        {"sharding": "table_column_wise"}, ConfigError,
        "training.sharding 'table_column_wise': expected an element-wise table optimizer, got rowwise_adagrad, "
        "which would keep one moment per column shard and so train differently. "
        "Set table_optimizer: adagrad.",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_before_ranks_start(case: str) -> None:
    settings, kind, sentence = REFUSED[case]
    with pytest.raises(ContractError) as caught:
        placed(**settings)
    assert type(caught.value) is kind
    assert str(caught.value) == sentence


@pytest.mark.parametrize("settings", [{}, {"table_gradient_limit": 0.1}, {"table_precision": "fp16"}])
def test_auto_makes_no_copies_on_cpu_or_if_they_would_train_differently(settings: dict[str, Any]) -> None:
    tables = placed(
        sharding="auto",
        world_size=2,
        bags=[SparseFeature("f", "t", 3, "sum"), SparseFeature("g", "u", 50, "sum")],
        **settings,
    )
    assert "data_parallel" not in {table.kind for table in tables}


def test_a_plan_that_does_not_fit_names_the_memory() -> None:
    with pytest.raises(TrainingError) as caught:
        placed(
            sharding="table_wise",
            world_size=2,
            memory_per_rank_bytes=2_000_000_000,
            bags=[SparseFeature("f", "t", 10**8, "sum")],
        )
    assert str(caught.value) == (
        "training.sharding 'table_wise': expected 1 tables that fit on 2 ranks, got 6.8 GB of tables with optimizer and "
        "buffers, with 2 GB per rank left for them. "
        "Use smaller tables, more memory (training.memory_per_rank_bytes), or `auto`."
    )


@pytest.mark.parametrize(
    "sharding", ["rows", [], [{"tables": [], "kind": "row_wise"}], [{"tables": ["a"], "kind": "x"}]]
)
def test_other_values_are_refused(sharding: Any) -> None:
    with pytest.raises(ValidationError):
        TrainConfig(sharding=sharding)


@pytest.mark.parametrize("rows", [1_000, 100_000])
def test_auto_cuts_no_table_on_one_rank(rows: int) -> None:
    """There is no other rank to share it with."""
    bags = [SparseFeature(f"f{i}", f"t{i}", rows, pooling) for i, pooling in enumerate(["sum", "mean"] * 3)]
    assert {table.kind for table in placed(sharding="auto", world_size=1, bags=bags, batch_rows=8_192)} == {
        "table_wise"
    }

"""Every sharding plan of the smoke config's tables trains alike. An impossible plan is refused with the reason."""

from pathlib import Path
from typing import Any

import pytest

from flows.sharding import sharding
from pipeline.evaluation import plots
from pipeline.jobs.console import format_rows
from pipeline.study import plans as sharding_plans
from pipeline.study.plans import TOLERANCE
from tests.homes import open_smoke

KINDS = ("row_wise", "table_wise", "table_column_wise", "grid_shard")
"""A few plans, because each starts its own ranks. tests/pipeline/training/tables/test_sharding.py covers all types."""


@pytest.fixture(scope="module")
def result(smoke: dict[str, Any], home: Path, plainly: Any) -> dict[str, Any]:
    with plainly(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(home))
        patch.setattr(sharding_plans, "KINDS", KINDS)
        return sharding(config="configs/smoke.yaml", world_sizes=[2], steps=4)


@pytest.mark.slow
def test_all_plans_train_alike(result: dict[str, Any]) -> None:
    assert result["status"] == "ok"
    assert result["tolerance"] == TOLERANCE
    plans = result["plans"]
    assert {(plan["kind"], plan["world_size"]) for plan in plans} >= {(k, 2) for k in KINDS if k != "grid_shard"} | {
        ("table_wise", 1)
    }
    for plan in plans:
        assert plan["loss_difference"] <= TOLERANCE
        assert len(plan["losses"]) == 4
        for key in ("predicted_bytes", "measured_bytes", "predicted_ms", "measured_ms"):
            assert len(plan[key]) == plan["world_size"]
            assert min(plan[key]) > 0
        assert sum(plan["measured_bytes"]) == pytest.approx(sum(plan["predicted_bytes"]), rel=0.05)
    best = result["recommended"]
    rivals = [plan for plan in plans if plan["table_optimizer"] == "rowwise_adagrad"]
    assert best["measured_ms"] == min(max(plan["measured_ms"]) for plan in rivals)


@pytest.mark.slow
def test_a_refused_plan_gives_the_reason(result: dict[str, Any]) -> None:
    refused = {(entry["kind"], entry["partitioner"]): entry["reason"] for entry in result["refused"]}
    assert "expected sum pooling, got mean pooling" in refused["grid_shard", "greedy"]
    assert "expected CUDA devices, got cpu" in refused["table_wise", "memory_balanced"]


@pytest.mark.nightly
def test_the_run_has_a_table_and_a_plot(result: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_HOME", str(home))
    client = open_smoke().tracking.client
    names = {item.path for folder in (None, "plots") for item in client.list_artifacts(result["mlflow_run_id"], folder)}
    assert {"placements.json", "plots/placements.svg"} <= names
    assert client.get_run(result["mlflow_run_id"]).info.status == "FINISHED"
    assert not (home / "placement" / "smoke" / "run").exists()


def test_a_training_keeps_its_plan(smoke: dict[str, Any], at_home: Path) -> None:
    tracker = open_smoke().tracking
    names = {
        item.path
        for folder in (None, "plots")
        for item in tracker.client.list_artifacts(smoke["mlflow_run_id"], folder)
    }
    assert {"sharding_plan.json", "plots/placement.svg"} <= names
    assert len(smoke["train"]["table_bytes"]) == len(smoke["train"]["step_milliseconds"]) == 2


def test_figures_add_up() -> None:
    rows = [{"table": f"t{i}", "ranks": [i % 2], "bytes": [2**20], "milliseconds": [1.0 + i]} for i in range(15)]
    memory, time = plots.sharding_plan(rows, 2).axes
    for axes, total in ((memory, 15.0), (time, sum(1.0 + i for i in range(15)))):
        assert sum(bar.get_height() for bar in axes.patches) == pytest.approx(total)  # type: ignore[attr-defined]
    assert format_rows(rows[:1]).splitlines()[1].split() == ["t0", "0", "1048576", "1"]

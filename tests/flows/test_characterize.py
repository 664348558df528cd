"""A study leaves MLflow runs, figures and a report, and reads the rows of a table once."""

from pathlib import Path
from typing import Any

import pytest

from flows.characterize import characterize
from pipeline.config import load
from pipeline.jobs.search.trials import SearchJob, pin_trial
from pipeline.jobs.training.job import open_training_run
from pipeline.jobs.training.train import train
from pipeline.jobs.workspace import Workspace
from pipeline.study import quality
from pipeline.study.measure import group
from pipeline.study.measure.group import POINTS, measure_points
from pipeline.study.points.config import CharacterizeConfig
from pipeline.study.points.load import load_study
from pipeline.study.points.points import list_points
from tests.homes import CONFIG, open_smoke
from tests.pipeline.study.tiny import BATCH, RATE, SWEEP, TINY

LIGHT = {"training.world_size": 1, "preprocessing.executor": "inline", "training.threads_per_rank": 1}
"""One process makes a trial a matter of seconds."""


@pytest.mark.nightly
@pytest.mark.parametrize("data", ["memory", "files"])
def test_the_flow_leaves_runs_figures_and_a_report(
    data: str, plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    overrides = TINY | {"characterize.data": data}
    result = characterize(config="configs/smoke.yaml", overrides=overrides)
    assert result["status"] == "ok"
    assert result["points"] == {"measured": 2}
    client = open_smoke().tracking.client
    experiment = client.get_experiment_by_name("smoke").experiment_id
    children = client.search_runs([experiment], f"tags.`mlflow.parentRunId` = '{result['mlflow_run_id']}'")
    assert sorted(run.info.run_name for run in children) == ["batch_rows 128", "batch_rows 64"]
    assert all(run.info.status == "FINISHED" and run.data.metrics["rows_per_second"] > 0 for run in children)
    text = Path(result["report"]).read_text(encoding="utf-8")
    assert "batch_rows" in text
    assert list(Path(result["report"]).parent.glob("*.png"))
    if data == "memory":
        again = characterize(config="configs/smoke.yaml", overrides=overrides)
        assert again == result | {"status": "skipped"}
    assert len(list((Path(result["report"]).parent / POINTS).iterdir())) == 2


def test_rows_are_prepared_once_for_points_that_read_the_same_rows(
    smoke: dict[str, Any], at_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a pass over the training rows, and there may be billions."""
    passes: list[str] = []
    prepared = group.prepare_rows
    monkeypatch.setattr(group, "prepare_rows", lambda work, at: passes.append(work.config.name) or prepared(work, at))
    monkeypatch.setattr(group, "run_ranks", lambda module, spec, *rest: [
        rest[-2]({"event": "point_failed", "key": task.key, "reason": task.plan.hash}) for task in spec.tasks
    ])  # fmt: skip
    axes = {"training.batch_rows": [64, 128], "features.sparse.0.transforms.0.size": [1_000, 2_000]}
    config = load_study("configs/smoke.yaml", {"characterize.axes": axes, "training.world_size": 1})
    results = measure_points(
        Workspace(config.run), config.characterize, list_points(config.characterize), tmp_path,
        snapshot_id=smoke["snapshot_id"],
    )  # fmt: skip
    assert len(passes) == 2
    assert len({one.reason for one in results}) == 2


@pytest.mark.nightly
def test_a_point_is_evaluated_once_with_its_own_values_and_once_with_tuned_ones(smoke, copied, monkeypatch):
    config, section = load(CONFIG, LIGHT | {"sweep": SWEEP}), CharacterizeConfig(axes={BATCH: [512, 1_024]})
    point = list_points(section)[1]
    tracker = Workspace(config).tracking
    parent = tracker.start("study", {}, {}, None)
    found = quality.sweep_point(Workspace(config), section, point, parent)
    run = tracker.client.get_run(found["mlflow_run_id"])
    assert (run.info.run_name, run.data.tags["mlflow.parentRunId"]) == ("batch_rows 1024", parent)
    trials = tracker.read_json(found["mlflow_run_id"], "trials.json")
    assert [trial["params"] == {RATE: config.training.table_learning_rate} for trial in trials] == [True, False]
    assert (found["ne"], found["tuned_ne"]) == (trials[0]["valid_ne"], min(trial["valid_ne"] for trial in trials))

    plain = load(config, point.settings)  # a training of the same config, outside a sweep
    snapshot = {"table": "smoke", "snapshot_id": smoke["snapshot_id"]}
    search = SearchJob(identity="x" * 32, folder=str(copied), snapshot=snapshot)
    job = pin_trial(Workspace(plain), search, copied / "trial")
    with open_training_run(Workspace(plain), job) as run_id:
        assert train(Workspace(plain), job, run_id).summary["valid_ne"] == found["ne"]

    monkeypatch.setattr("pipeline.jobs.search.sweep.run_trials", lambda *work: pytest.fail("trained again"))
    assert quality.sweep_point(Workspace(config), section, point, parent) == found

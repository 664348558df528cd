"""A study is measured point by point, resumes where it stopped, and survives a failed point."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.characterize import characterize
from pipeline.characterization.points import list_points
from pipeline.characterization.results import PHASES, PointResult
from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.jobs.estimate import footprint
from pipeline.jobs.study import points as characterizing
from pipeline.jobs.study import run
from pipeline.jobs.study.job import pin_study
from pipeline.jobs.study.points import POINTS, make_point_config, measure_points
from pipeline.jobs.study.run import Clock
from pipeline.jobs.workspace import Workspace

TINY = {
    "characterize.workload": {"dense_features": 4, "sparse_features": 3, "hash_size": 100, "lookups": 2},
    "characterize.steps": 2,
    "characterize.repeats": 3,
    "characterize.axes": {"training.batch_rows": [64, 128]},
    "training.world_size": 1,
    "training.threads_per_rank": 1,
}


def study(**overrides: Any) -> RunConfig:
    return load("configs/smoke.yaml", TINY | overrides)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"characterize\.axes: expected at least one axis with its values, got none"):
        pin_study(Workspace(load("configs/smoke.yaml")), None, False)


def test_a_point_that_does_not_fit_is_refused_before_anything_is_measured(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLRM_HOME", str(home))
    with pytest.raises(ConfigError, match="interaction"):
        pin_study(Workspace(study(**{"characterize.axes": {"model.interaction": ["dot", "sum"]}})), None, False)


def test_a_study_has_one_folder_whatever_the_order_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    job = pin_study(Workspace(study()), None, False)
    assert job == pin_study(Workspace(study()), None, False)
    assert job.folder != pin_study(Workspace(study(seed=2)), None, False).folder
    settings = [make_point_config(study(), point) for point in job.points]
    assert [one.training.batch_rows for one in settings] == [64, 128]


def test_a_config_of_several_hosts_is_measured_on_this_one() -> None:
    hosts = {"training.world_size": 2, "training.hosts": 2, "training.launcher": "external"}
    ranks = {"characterize.axes": {"training.world_size": [1, 2]}, "preprocessing.executor": "inline"}
    config = study(**hosts | ranks)
    found = [make_point_config(config, point).training for point in list_points(config.characterize)]
    assert [(one.world_size, one.hosts) for one in found] == [(1, 1), (2, 1)]
    assert footprint.set_world_size(config.training, 1).hosts == 1


def test_tables_beyond_the_memory_are_left_out(tmp_path: Path) -> None:
    huge = study(**{"characterize.axes": {"workload.hash_size": [2**40]}})
    (result,) = measure_points(Workspace(huge), list_points(huge.characterize), tmp_path)
    assert result.state == "left out"
    assert "expected 3 tables that fit on 1 ranks" in str(result.reason)


def test_time_left_counts_the_points_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(total=4, began=0.0)
    monkeypatch.setattr(run.time, "monotonic", lambda: 120.0)
    assert clock.count(stored=True) == ""
    assert clock.count(stored=False) == "about 4 min left"  # two are left, and the one of this process took two minutes


@pytest.mark.slow
def test_a_killed_point_fails_alone_and_is_retried(tmp_path: Path) -> None:
    config = study()
    wanted = list_points(config.characterize)
    run, killed = characterizing.run_ranks, []

    def kill_once(module: str, spec: Any, folder: Path, size: int, threads: Any, limits: Any, hear: Any, *rest: Any):
        def handle(event: dict[str, Any]) -> None:
            hear(event)
            if event["event"] == "point_begins" and not killed:
                killed.append(event["key"])
                for child in psutil.Process().children(recursive=True):
                    if child.name().startswith("dlrm rank"):
                        child.kill()

        return run(module, spec, folder, size, threads, limits, handle, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(characterizing, "run_ranks", kill_once)
        first = measure_points(Workspace(config), wanted, tmp_path)
    assert [result.state for result in first] == ["failed", "measured"]
    assert "SIGKILL" in str(first[0].reason)

    stored_flags: list[bool] = []

    def tell(result: PointResult, stored: bool) -> PointResult:
        stored_flags.append(stored)
        return result

    second = measure_points(Workspace(config), wanted, tmp_path, tell)
    assert [result.state for result in second] == ["measured", "measured"]
    assert sorted(stored_flags) == [False, True]
    assert second[1] == first[1]
    for result in second:
        one = result.measurement
        assert one is not None
        assert set(one.split_ms) == set(PHASES)
        assert sum(one.split_ms.values()) == pytest.approx(one.step_ms.median, rel=1e-6)
        batch_rows = result.point.settings["training.batch_rows"]
        assert one.rows_per_second.median == pytest.approx(1e3 * batch_rows / one.step_ms.median, rel=0.2)
        assert one.load.rows == batch_rows


@pytest.mark.slow
@pytest.mark.parametrize("data", ["memory", "files"])
def test_the_flow_leaves_runs_figures_and_a_report(
    data: str, plain: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    overrides = TINY | {"characterize.data": data}
    result = characterize(config="configs/smoke.yaml", overrides=overrides)
    assert result["status"] == "ok"
    assert result["points"] == {"measured": 2}
    client = Workspace(load("configs/smoke.yaml")).tracking.client
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


def test_a_point_refused_by_its_ranks_fails_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of several cannot continue alone: all ranks end and restart without that point."""
    config, begun = study(), list[str]()

    def refuse_first(module: str, spec: Any, folder: Path, size: int, threads: Any, limits: Any, hear: Any, *rest: Any):
        for task in spec.tasks:
            hear({"event": "point_begins", "key": task.key})
            begun.append(task.key)
            if len(begun) == 1:
                raise ConfigError("loss", "a number", "none", "Lower the rates.")
            hear({"event": "point_failed", "key": task.key, "reason": "too small"})

    monkeypatch.setattr(characterizing, "run_ranks", refuse_first)
    results = measure_points(Workspace(config), list_points(config.characterize), tmp_path)
    assert [(one.state, one.reason) for one in results] == [
        ("failed", "loss: expected a number, got none. Lower the rates."), ("failed", "too small"),
    ]  # fmt: skip


def test_rows_are_prepared_once_for_points_that_read_the_same_rows(
    smoke: dict[str, Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes a pass over the training rows, and there may be billions."""
    monkeypatch.setenv("DLRM_HOME", str(home))
    passes: list[str] = []
    prepared = characterizing.prepare_rows
    monkeypatch.setattr(
        characterizing, "prepare_rows", lambda work, at: passes.append(work.config.name) or prepared(work, at)
    )
    monkeypatch.setattr(characterizing, "run_ranks", lambda module, spec, *rest: [
        rest[-2]({"event": "point_failed", "key": task.key, "reason": task.plan.hash}) for task in spec.tasks
    ])  # fmt: skip
    axes = {"training.batch_rows": [64, 128], "features.sparse.0.transforms.0.size": [1_000, 2_000]}
    config = load("configs/smoke.yaml", {"characterize.axes": axes, "training.world_size": 1})
    results = measure_points(
        Workspace(config), list_points(config.characterize), tmp_path, snapshot_id=smoke["snapshot_id"]
    )
    assert len(passes) == 2
    assert len({one.reason for one in results}) == 2

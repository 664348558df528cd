"""Points are measured one by one. One that fails, or that kills its ranks, does so alone."""

from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace
from pipeline.study.estimate import footprint
from pipeline.study.measure import group
from pipeline.study.measure.group import make_point_config, measure_points
from pipeline.study.measure.results import PHASES, PointResult
from pipeline.study.points.points import list_points
from tests.pipeline.study.tiny import study


def test_a_config_of_several_hosts_is_measured_on_this_one() -> None:
    hosts = {"training.world_size": 2, "training.hosts": 2, "training.launcher": "external"}
    ranks = {"characterize.axes": {"training.world_size": [1, 2]}, "preprocessing.executor": "inline"}
    config = study(**hosts | ranks)
    found = [
        make_point_config(config.run, config.characterize, point).training for point in list_points(config.characterize)
    ]
    assert [(one.world_size, one.hosts) for one in found] == [(1, 1), (2, 1)]
    assert footprint.set_world_size(config.training, 1).hosts == 1


def test_tables_beyond_the_memory_are_left_out(tmp_path: Path) -> None:
    huge = study(**{"characterize.axes": {"workload.hash_size": [2**40]}})
    (result,) = measure_points(Workspace(huge.run), huge.characterize, list_points(huge.characterize), tmp_path)
    assert result.state == "left out"
    assert "expected 3 tables that fit on 1 ranks" in str(result.reason)


@pytest.mark.nightly
def test_a_killed_point_fails_alone_and_is_retried(tmp_path: Path) -> None:
    config = study()
    wanted = list_points(config.characterize)
    run, killed = group.run_ranks, list[str]()

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
        patch.setattr(group, "run_ranks", kill_once)
        first = measure_points(Workspace(config.run), config.characterize, wanted, tmp_path)
    assert [result.state for result in first] == ["failed", "measured"]
    assert "SIGKILL" in str(first[0].reason)

    stored_flags: list[bool] = []

    def tell(result: PointResult, stored: bool) -> PointResult:
        stored_flags.append(stored)
        return result

    second = measure_points(Workspace(config.run), config.characterize, wanted, tmp_path, tell)
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

    monkeypatch.setattr(group, "run_ranks", refuse_first)
    results = measure_points(Workspace(config.run), config.characterize, list_points(config.characterize), tmp_path)
    assert [(one.state, one.reason) for one in results] == [
        ("failed", "loss: expected a number, got none. Lower the rates."), ("failed", "too small"),
    ]  # fmt: skip

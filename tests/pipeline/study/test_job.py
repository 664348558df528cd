"""A study is pinned: each point is checked, and one that was started before is found again."""

from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace
from pipeline.study.job import StudyJob, pin_study
from pipeline.study.measure.group import make_point_config
from pipeline.study.points.load import StudyConfig, load_study
from tests.pipeline.study.tiny import study


def pin(config: StudyConfig) -> StudyJob:
    return pin_study(Workspace(config.run), config.characterize, None, False)


def test_nothing_to_measure_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"characterize\.axes: expected at least one axis with its values, got none"):
        pin(load_study("configs/smoke.yaml"))


def test_a_point_that_does_not_fit_is_refused_before_anything_is_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match="interaction"):
        pin(study(**{"characterize.axes": {"model.interaction": ["dot", "sum"]}}))


def test_a_study_has_one_folder_whatever_the_order_of_its_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    job = pin(study())
    assert job == pin(study())
    assert job.folder != pin(study(seed=2)).folder
    settings = [make_point_config(study().run, job.settings, point) for point in job.points]
    assert [one.training.batch_rows for one in settings] == [64, 128]

"""Quality of a point: its own values come first, and a finished sweep is not repeated."""

import pytest

from pipeline.characterization.points import StudyPoint, list_points
from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.jobs.search.trials import SearchJob, pin_trial
from pipeline.jobs.study import quality
from pipeline.jobs.study.job import pin_study
from pipeline.jobs.training.job import open_training_run
from pipeline.jobs.training.train import train
from pipeline.jobs.workspace import Workspace

CONFIG = "configs/smoke.yaml"
RATE, BATCH = "training.table_learning_rate", "training.batch_rows"
LIGHT = {"training.world_size": 1, "preprocessing.executor": "inline", "training.threads_per_rank": 1}
"""One process makes a trial a matter of seconds."""
SWEEP = {"strategy": "random", "trials": 2, "space": {RATE: {"low": 0.01, "high": 0.2, "log": True}}}
POINT = StudyPoint(values={BATCH: 512}, settings={BATCH: 512})


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (
            {"strategy": "grid", "space": {RATE: {"choices": [0.05]}}},
            "sweep: expected a first trial with the config's own values, got strategy=grid. Leave it out.",
        ),
        (
            {"begin_with_config": False},
            "sweep: expected a first trial with the config's own values, got begin_with_config=false. Leave it out.",
        ),
        (
            {"prune": {}, "parallel": 2},
            "sweep.parallel: expected 1 with `prune`: other trials may stop the one with the config's own values, "
            "got 2. Set it to 1, or sweep.prune to null.",
        ),
        (
            {"space": {RATE: {"low": 0.1, "high": 0.2}}},
            f"sweep.space '{RATE}' at batch_rows 512: expected the config's own value among its values, got others. "
            "Widen it.",
        ),
        (
            {"space": {}},
            "sweep.space: expected at least one key with its values, got none. Add one: `training.table_learning_rate: "
            "{low: .01, ...}`.",
        ),
    ],
)
def test_a_sweep_without_the_configs_own_values_is_refused(overrides, said):
    with pytest.raises(ConfigError) as error:
        quality.check_point_sweep(load(CONFIG, {"sweep": SWEEP | overrides}), POINT)
    assert str(error.value) == said


def test_a_study_of_quality_is_refused_before_its_first_point():
    axes = {RATE: {"own": {RATE: 0.05}, "outside": {RATE: 0.5}}}
    config = load(CONFIG, {"sweep": SWEEP, "characterize": {"axes": axes, "measure": "quality"}})
    with pytest.raises(ConfigError) as error:
        pin_study(Workspace(config), None, False)
    assert str(error.value) == (
        f"sweep.space '{RATE}' at table_learning_rate outside: expected the config's own value among its values, got "
        "others. Widen it."
    )


@pytest.mark.slow
def test_a_point_is_evaluated_once_with_its_own_values_and_once_with_tuned_ones(smoke, copied, monkeypatch):
    config = load(CONFIG, LIGHT | {"sweep": SWEEP, "characterize.axes": {BATCH: [512, 1_024]}})
    point = list_points(config.characterize)[1]
    tracker = Workspace(config).tracking
    parent = tracker.start("study", {}, {}, None)
    found = quality.sweep_point(Workspace(config), point, parent)
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
    assert quality.sweep_point(Workspace(config), point, parent) == found

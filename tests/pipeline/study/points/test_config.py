"""Impossible studies are refused before anything runs."""

import subprocess
import sys

import pytest

from pipeline.errors import ConfigError
from pipeline.study.points.config import CharacterizeConfig
from pipeline.study.points.load import load_study


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"axes": {"training.batch_rows": []}},
            "characterize.axes 'training.batch_rows': expected at least one value, got none. Add one.",
        ),
        (
            {"axes": {"workload.lookups": [1, 2]}},
            "characterize.axes 'workload.lookups': expected the section characterize.workload, which it changes, "
            "got none. Add it, for example as `workload: {}`.",
        ),
        (
            {"axes": {"model": {"M1": {"workload.lookups": 28}}}},
            "characterize.axes 'model', key 'workload.lookups': expected the section characterize.workload, "
            "which it changes, got none. Add it, for example as `workload: {}`.",
        ),
        (
            {"axes": {"characterize.steps": [1, 2]}},
            "characterize.axes 'characterize.steps': expected `workload.` and a key of it, `characterize.data`, or a "
            "key of another section, got 'characterize.steps'. Correct the key.",
        ),
        (
            {"axes": {"model.dropout": [0.1], "mlp": {"64": {"model.bottom_mlp": [64], "model.dropout": 0.2}}}},
            "characterize.axes 'mlp', key 'model.dropout': expected a key of only one axis, got also a key of "
            "'model.dropout'. Remove it from one.",
        ),
        (
            {"measure": "quality", "workload": {}},
            "characterize.workload with measure=quality: expected no workload, because a model cannot "
            "learn random labels, got one. Set it to null.",
        ),
    ],
)
def test_an_impossible_study_is_refused(settings, said):
    with pytest.raises(ConfigError) as error:
        CharacterizeConfig.model_validate(settings)
    assert str(error.value) == said


def test_a_workload_of_one_feature_has_no_pairs():
    alone = {"characterize.workload": {"sparse_features": 1, "dense_features": 0}}
    with pytest.raises(ConfigError) as error:
        load_study("configs/smoke.yaml", alone)
    assert str(error.value) == (
        "characterize.workload with model.interaction=dot: expected at least two features, got one. Raise "
        "sparse_features, or choose cat."
    )
    assert load_study("configs/smoke.yaml", alone | {"model.interaction": "cat"}).run.model.interaction == "cat"


def test_a_possible_study_is_accepted():
    axes = {"characterize.data": ["memory", "files"], "M": {"M1": {"workload.lookups": 28}, "as it is": {}}}
    assert CharacterizeConfig.model_validate({"axes": axes, "workload": {}}).workload is not None


def test_importing_the_config_loads_no_heavy_library():
    heavy = {"matplotlib", "mlflow", "numpy", "optuna", "pyarrow", "torch"}
    code = f"import sys, pipeline.study.points.config; print(sorted({heavy} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"

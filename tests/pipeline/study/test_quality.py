"""Quality of a point: its own values come first, and a finished sweep is not repeated."""

import pytest

from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.study.job import pin_study
from pipeline.study.points.config import CharacterizeConfig
from pipeline.study.points.points import StudyPoint
from pipeline.study.quality import check_point_sweep
from tests.homes import CONFIG, open_smoke
from tests.pipeline.study.tiny import BATCH, RATE, SWEEP

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
        check_point_sweep(load(CONFIG, {"sweep": SWEEP | overrides}), CharacterizeConfig(), POINT)
    assert str(error.value) == said


def test_a_study_of_quality_is_refused_before_its_first_point():
    axes = {RATE: {"own": {RATE: 0.05}, "outside": {RATE: 0.5}}}
    section = CharacterizeConfig(axes=axes, measure="quality")
    with pytest.raises(ConfigError) as error:
        pin_study(open_smoke(sweep=SWEEP), section, None, False)
    assert str(error.value) == (
        f"sweep.space '{RATE}' at table_learning_rate outside: expected the config's own value among its values, got "
        "others. Widen it."
    )

"""When a policy requests a training."""

import datetime

import pytest

from pipeline.errors import ConfigError
from pipeline.evaluation.policy import ChampionStanding, Policy, decide

DAY = datetime.date(2013, 3, 1)


def standing(**given):
    usual = {"trained_to": "2013-02-28", "scratch_day": "2013-01-31", "new_rows": 900, "ne": 0.9, "calibration": 1.1}
    return ChampionStanding.model_validate(usual | given)


@pytest.mark.parametrize(
    ("policy", "given", "training", "reason"),
    [
        ({}, {}, "incremental", "1 day since the champion's last"),
        ({"every_days": 2}, {}, "none", "no condition of the policy holds"),
        ({"every_days": 2}, {"trained_to": "2013-02-27"}, "incremental", "2 days since the champion's last"),
        ({"every_days": None}, {}, "none", "no condition of the policy holds"),
        ({"every_days": None, "after_rows": 900}, {}, "incremental", "900 new rows"),
        ({"every_days": None, "after_rows": 901}, {}, "none", "no condition of the policy holds"),
        ({"every_days": None, "ne_above": 0.89}, {}, "incremental", "the NE of the champion, 0.9000, is above 0.89"),
        ({"every_days": None, "ne_above": 0.9}, {}, "none", "no condition of the policy holds"),
        ({"every_days": None, "ne_above": 0.9}, {"ne": None}, "incremental", "the NE of the champion is undefined"),
        (
            {"every_days": None, "calibration_below": 0.9, "calibration_above": 1.2}, {"calibration": 0.8},
            "incremental", "the calibration of the champion, 0.8000, is below 0.9",
        ),
        (
            {"every_days": None, "calibration_below": 0.9, "calibration_above": 1.2}, {"calibration": 1.3},
            "incremental", "the calibration of the champion, 1.3000, is above 1.2",
        ),
        ({"scratch_every_days": 29}, {}, "scratch", "the last training from scratch is 29 days old"),
        ({"scratch_every_days": 30}, {}, "incremental", "1 day since the champion's last"),
    ],
)  # fmt: skip
def test_a_policy_decides(policy, given, training, reason):
    decision = decide(Policy(**policy), standing(**given), DAY)
    assert (decision.training, decision.reason) == (training, reason)


def test_bounds_of_the_calibration_must_leave_room():
    with pytest.raises(ConfigError, match="calibration_below: expected less than calibration_above"):
        Policy(calibration_below=1.0, calibration_above=0.9)


@pytest.mark.parametrize("value", [None, float("nan")])
@pytest.mark.parametrize(
    ("bound", "what"),
    [
        ({"ne_above": 0.9}, "NE"),
        ({"calibration_below": 0.9}, "calibration"),
        ({"calibration_above": 1.1}, "calibration"),
    ],
)
def test_an_undefined_number_is_out_of_its_bounds(value: float | None, bound: dict[str, float], what: str) -> None:
    day = datetime.date(2025, 1, 1)
    standing = ChampionStanding(trained_to=day, scratch_day=day, new_rows=8, ne=value, calibration=value)
    decision = decide(Policy.model_validate({"every_days": None, **bound}), standing, day)
    assert (decision.training, decision.reason) == ("incremental", f"the {what} of the champion is undefined")
    assert decide(Policy(every_days=None), standing, day).training == "none"

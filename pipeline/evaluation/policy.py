"""Retraining policy: when to train the champion incrementally on new days, and when to train from scratch."""

import datetime
import math
from collections.abc import Iterator
from typing import Literal, Self

from pydantic import BaseModel, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError


class Policy(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When to train the champion incrementally. The first condition that holds decides. Without conditions: never."""

    every_days: PositiveInt | None = 1
    """Trains this many days after the champion's last training day. None: no condition on time."""
    after_rows: PositiveInt | None = None
    """Trains once there are this many rows that the champion was not trained on."""
    ne_above: PositiveFloat | None = None
    """Trains if the champion's NE on a new day is higher, or undefined."""
    calibration_below: PositiveFloat | None = None
    """Trains if the champion's calibration on a new day (predictions / labels) is lower, or undefined."""
    calibration_above: PositiveFloat | None = None
    """Trains if the champion's calibration on a new day is higher, or undefined."""
    scratch_every_days: PositiveInt | None = None
    """Trains from scratch once the last training from scratch is this many days old. None: never."""
    window_days: PositiveInt | None = None
    """Number of newest days for a training from scratch. None: all days."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        low, high = self.calibration_below, self.calibration_above
        if low is not None and high is not None and low >= high:
            raise ConfigError(
                "recurring.calibration_below", f"less than calibration_above, {high:g}", f"{low:g}", "Correct one."
            )
        return self


class ChampionStanding(BaseModel, frozen=True):
    """The champion's age and quality on a day it has not seen."""

    trained_to: datetime.date
    """Last day it was trained on."""
    scratch_day: datetime.date
    """Last day of the training from scratch that it descends from."""
    new_rows: int
    """Rows up to the day that it was not trained on."""
    ne: float | None
    """On the day; None: undefined."""
    calibration: float | None
    rewritten_days: int = 0
    """Learned days that have other rows now, if they are most of them. 0 otherwise."""


class Decision(BaseModel, frozen=True):
    """What to do on a day."""

    training: Literal["none", "incremental", "scratch"]
    reason: str


def decide(policy: Policy, standing: ChampionStanding, day: datetime.date) -> Decision:
    """Decides what to do on a day.

    If most learned days have changed, a training that is due is from scratch. An incremental one would take as long,
    and learn most rows twice.

    Example:
        >>> day = datetime.date(2013, 1, 31)
        >>> standing = ChampionStanding(trained_to=day, scratch_day=day, new_rows=800, ne=0.9, calibration=1.2)
        >>> decide(Policy(every_days=7, calibration_above=1.1), standing, datetime.date(2013, 2, 1)).reason
        'the calibration of the champion, 1.2000, is above 1.1'
    """
    age, since = (day - standing.scratch_day).days, (day - standing.trained_to).days
    if policy.scratch_every_days is not None and age >= policy.scratch_every_days:
        return Decision(training="scratch", reason=f"the last training from scratch is {_days(age)} old")
    reasons = [
        (_reaches(since, policy.every_days), f"{_days(since)} since the champion's last"),
        (_reaches(standing.new_rows, policy.after_rows), f"{standing.new_rows:,} new rows"),
    ]
    found = [reason for holds, reason in reasons if holds]
    found += _drift("NE", standing.ne, None, policy.ne_above)
    found += _drift("calibration", standing.calibration, policy.calibration_below, policy.calibration_above)
    if found and standing.rewritten_days:
        days = f"{standing.rewritten_days} days, most of those that the champion has learned"
        return Decision(training="scratch", reason=f"{days}, have other rows now")
    if found:
        return Decision(training="incremental", reason=found[0])
    return Decision(training="none", reason="no condition of the policy holds")


def _days(count: int) -> str:
    return "1 day" if count == 1 else f"{count} days"


def _reaches(value: int, bound: int | None) -> bool:
    return bound is not None and value >= bound


def _drift(what: str, value: float | None, low: float | None, high: float | None) -> Iterator[str]:
    """Yields why a number is out of its bounds, if there are any. An undefined one is."""
    if low is None and high is None:
        return
    if value is None or math.isnan(value):
        yield f"the {what} of the champion is undefined"
    elif low is not None and value < low:
        yield f"the {what} of the champion, {value:.4f}, is below {low:g}"
    elif high is not None and value > high:
        yield f"the {what} of the champion, {value:.4f}, is above {high:g}"

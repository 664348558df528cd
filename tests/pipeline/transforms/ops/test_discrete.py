"""Ops that turn a number into an id."""

import math
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.transforms.ops import zones
from pipeline.transforms.ops.discrete import Bucketize, GetLocalHour, Onehot
from pipeline.transforms.ops.op import Op
from tests.pipeline.transforms.contract import QUICK, Case, apply

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
ZONES = [
    "Europe/Berlin",
    "America/New_York",
    "America/St_Johns",  # an offset in minutes, and changes at one minute past midnight
    "Australia/Lord_Howe",  # summer time of half an hour
    "Asia/Kathmandu",
    "Africa/Casablanca",  # winter time in Ramadan
    "Pacific/Apia",  # skipped a day
    "UTC",
]


def local(seconds: float, zone: str, part: str = "hour") -> list[int]:
    if not zones.FIRST <= seconds < zones.LAST:
        return []
    at = (EPOCH + timedelta(seconds=math.floor(seconds))).astimezone(ZoneInfo(zone))
    return [{"hour": at.hour, "weekday": at.weekday(), "month": at.month - 1}[part]]


def hour_off(seconds: float, offset_hours: float) -> list[int]:
    """Seconds and hours as floats. The rest is done in Python's integers."""
    if not abs(seconds) < 2**53 or not abs(offset_hours) <= 24:
        return []
    return [(math.floor(seconds) + math.floor(offset_hours * 3_600)) // 3_600 % 24]


def onehot(x: float) -> list[int]:
    if math.isnan(x):
        return []
    return [int(x)] if 0 <= x < 6 and x == int(x) else [9]


TIMES = st.floats(zones.FIRST, zones.LAST) | st.integers(zones.FIRST, zones.LAST).map(float) | st.floats()
EXAMPLES = {
    "bucketize": Case(
        Bucketize(borders=(2, 5, 10)), lambda x: [] if math.isnan(x) else [sum(b < x for b in (2, 5, 10))]
    ),
    "onehot": Case(Onehot(size=6, invalid=9), onehot, rows=st.tuples(st.integers(-2, 8).map(float) | st.floats())),
    "onehot, left out": Case(Onehot(size=6), lambda x: [i for i in onehot(x) if i != 9]),
    "get_local_hour": Case(GetLocalHour(), lambda t: hour_off(t, 0), rows=st.tuples(TIMES)),
    "get_local_hour, fixed": Case(GetLocalHour(offset_seconds=-12_600), lambda t: hour_off(t, -3.5)),
    "get_local_hour, of a row": Case(
        GetLocalHour(offset_unit="hours"), hour_off, rows=st.tuples(TIMES, st.floats(-30, 30) | st.floats())
    ),
    "get_local_hour, of a zone": Case(
        GetLocalHour(time_zone=ZONES[0]), lambda t: local(t, ZONES[0]), rows=st.tuples(TIMES)
    ),
    "get_local_hour, weekday": Case(
        GetLocalHour(time_zone=ZONES[6], part="weekday"), lambda t: local(t, ZONES[6], "weekday"), rows=st.tuples(TIMES)
    ),
    "get_local_hour, month": Case(
        GetLocalHour(time_zone=ZONES[1], part="month"), lambda t: local(t, ZONES[1], "month"), rows=st.tuples(TIMES)
    ),
}


def test_bucketize_goldens_of_torcharrow() -> None:
    assert apply(Bucketize(borders=(2, 5, 10)), [1, 2, 3, 5, 8, 10, 11]) == [[0], [0], [1], [1], [2], [2], [3]]


@pytest.mark.parametrize("zone", ZONES)
def test_hours_around_each_change_of_a_zone(zone: str) -> None:
    changes = zones.zone_offsets(zone).since.tolist()[1:]
    times = [float(second + shift) for second in changes for shift in (-3_600, -1, 0, 1, 3_600)]
    assert apply(GetLocalHour(time_zone=zone), times) == [local(time, zone) for time in times]


def test_weekdays_and_months_of_all_days_of_800_years() -> None:
    days = np.arange(np.datetime64("1700-01-01"), np.datetime64("2500-01-01"))
    times = (days.astype("M8[s]").astype(np.int64) + np.arange(len(days)) % 86_400).astype(float).tolist()
    found = {part: np.ravel(apply(GetLocalHour(part=part), times)) for part in ("weekday", "month")}
    assert (found["month"] == days.astype("M8[M]").astype(np.int64) % 12).all()
    assert found["weekday"].tolist() == [day.weekday() for day in days.tolist()]


@QUICK
@given(st.lists(TIMES), st.sampled_from(ZONES))
def test_hours_of_zones(times: list[float], zone: str) -> None:
    assert apply(GetLocalHour(time_zone=zone), times) == [local(time, zone) for time in times]


@pytest.mark.parametrize(
    ("fields", "inputs", "expected"),
    [
        ({}, [[-1.0, 0.0, 3_599.9, 3_600.0, 86_399.0]], [[23], [0], [0], [1], [23]]),
        ({"offset_seconds": 7_200}, [[0.0, 82_800.0]], [[2], [1]]),
        ({"time_unit": "milliseconds"}, [[3_600_000.0, -1.0]], [[1], [23]]),
        ({"time_unit": "microseconds"}, [[3_600_000_000.0, 3_599_999_999.0]], [[1], [0]]),
        ({"offset_unit": "hours"}, [[0.0, 0.0], [5.5, -1.0]], [[5], [23]]),
        ({"offset_unit": "minutes"}, [[0.0, 0.0], [345.0, -1.0]], [[5], [23]]),
        ({"offset_unit": "seconds"}, [[0.0, 0.0, math.nan], [19_800.0, math.nan, 0.0]], [[5], [], []]),
    ],
)
def test_local_hours(fields: dict[str, Any], inputs: list[list[float]], expected: list[list[int]]) -> None:
    assert apply(GetLocalHour(**fields), *inputs) == expected


def test_a_second_input_is_read_if_declared() -> None:
    assert GetLocalHour().reads == GetLocalHour.reads == ("dense",)
    assert GetLocalHour(offset_unit="minutes").reads == ("dense", "dense")


@pytest.mark.parametrize(
    ("op", "inputs", "counted"),
    [
        (Bucketize(borders=(1,)), [[math.nan]], {}),
        (Onehot(size=2), [[0.0, 2.0, -1.0, 0.5, math.inf, math.nan]], {"onehot value": 4}),
        (Onehot(size=2, invalid=2), [[0.0, 2.0, math.nan]], {"onehot value": 1}),
        (GetLocalHour(), [[0.0, math.inf, 1e300, math.nan]], {"get_local_hour value": 2}),
        (GetLocalHour(time_zone="UTC"), [[0.0, -1e10, 1e10, math.nan]], {"get_local_hour value": 2}),
        (GetLocalHour(offset_unit="hours"), [[0.0] * 4, [1.0, 25.0, -math.inf, math.nan]], {"get_local_hour value": 2}),
    ],
)
def test_changed_values_are_counted(op: Op, inputs: list[Any], counted: dict[str, int]) -> None:
    counts = Counter[str]()
    apply(op, *inputs, counts=counts)
    assert counts == counted


@pytest.mark.parametrize(
    ("op", "bound"),
    [
        (Bucketize(borders=(1, 2)), 3),
        (Bucketize(quantiles=8), 8),
        (Bucketize(quantiles=8).fit((0.0,)), 8),  # the table keeps the size planned before fitting
        (Onehot(size=5), 5),
        (Onehot(size=5, invalid=0), 5),
        (Onehot(size=5, invalid=5), 6),
        (GetLocalHour(), 24),
    ],
)
def test_bounds_of_ids(op: Op, bound: int) -> None:
    assert op.ids_below(None) == bound


def test_bucketize_learns_borders() -> None:
    op = Bucketize(quantiles=4, inputs=("age:dense",), output="age")
    fitted = op.fit((2.0, 5.0, 10.0))
    assert (op.fitted, fitted.fitted, fitted.learns) == (False, True, "quantiles")
    assert (fitted.inputs, fitted.output, fitted.quantiles) == (("age:dense",), "age", 4)
    assert apply(fitted, [1.0, 11.0]) == apply(Bucketize(borders=(2, 5, 10)), [1.0, 11.0])
    assert op.fit((0.0,)).borders == (0.0,)


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: Bucketize(borders=(3, 1)), "bucketize: expected increasing borders, got [3.0, 1.0]. Sort them."),
        (lambda: Bucketize(borders=(1, 1)), "bucketize: expected increasing borders, got [1.0, 1.0]. Sort them."),
        (
            lambda: Bucketize(borders=(3, 1), inputs=("age",), output="age_bucket"),
            "bucketize on 'age': expected increasing borders, got [3.0, 1.0]. Sort them.",
        ),
        (
            lambda: Bucketize(),
            "bucketize: expected borders, or quantiles to learn them, got neither. Give one of them.",
        ),
        (
            lambda: Bucketize(quantiles=2).fit((1.0, 2.0)),
            "bucketize: expected at most 1 borders for 2 quantiles, got 2. Leave out one of the two.",
        ),
        (
            lambda: apply(Bucketize(quantiles=2, output="age"), [1.0]),
            "bucketize on 'age': expected fitted borders, got none. Fit the plan first.",
        ),
        (
            lambda: GetLocalHour(time_zone="Mars/Olympus", output="hour"),
            "get_local_hour on 'hour': expected a zone of the IANA time zone database, got 'Mars/Olympus'. "
            "Write it as in Europe/Berlin. A machine without the database needs the package tzdata.",
        ),
        (
            lambda: GetLocalHour(time_zone="../etc/passwd", output="hour"),
            "get_local_hour on 'hour': expected a zone of the IANA time zone database, got '../etc/passwd'. "
            "Write it as in Europe/Berlin. A machine without the database needs the package tzdata.",
        ),
        (
            lambda: GetLocalHour(time_zone="UTC", offset_unit="hours"),
            "get_local_hour on 'value': expected one kind of time zone, got offset_unit and time_zone. "
            "Leave out the others.",
        ),
    ],
)
def test_errors_say_what_to_do(make: Callable[[], Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        make()
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("cls", "fields"),
    [
        (Bucketize, {"borders": ()}),
        (Bucketize, {"borders": (math.nan,)}),
        (Bucketize, {"quantiles": 1}),
        (Onehot, {}),
        (Onehot, {"size": 0}),
        (Onehot, {"size": 2**53 + 1}),
        (Onehot, {"size": 5, "invalid": -1}),
        (GetLocalHour, {"offset_seconds": 86_401}),
        (GetLocalHour, {"time_unit": "days"}),
    ],
)
def test_fields_out_of_range_are_refused(cls: type[Op], fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        cls(**fields)

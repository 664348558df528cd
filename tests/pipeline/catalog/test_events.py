"""Events: states change only as allowed, every event is kept, and the newest counts."""

import itertools
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.catalog.events import (
    MOVES,
    Event,
    append_event,
    build_event,
    newest_events,
    read_events,
    refuse_deprecated,
    state_since,
)
from pipeline.errors import ConfigError
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse

START = datetime(2024, 1, 1, tzinfo=UTC)
STATES = ("beta", "experimental", "active", "deprecated")
ALLOWED = {
    *itertools.pairwise(STATES),
    ("experimental", "beta"),
    ("beta", "deprecated"),
    ("experimental", "deprecated"),
    ("deprecated", "active"),
}


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    return Warehouse(WarehouseConfig(), tmp_path)


def event(day: int, feature: str, state: str, **fields: object) -> Event:
    return Event.model_validate(
        {"at": START + timedelta(days=day), "feature": feature, "state": state, "by": "me"} | fields
    )


@pytest.mark.parametrize(("before", "after"), itertools.product(STATES, STATES))
def test_a_state_follows_another_only_as_allowed(before: str, after: str) -> None:
    log = [event(0, "x", before, owner="ann")]
    if before == after or (before, after) in ALLOWED:
        done = build_event(log, ["x"], "x", "bob", {"state": after})
        assert (done.state, done.owner, done.by) == (after, "ann", "bob")
        return
    with pytest.raises(ConfigError) as error:
        build_event(log, ["x"], "x", "bob", {"state": after})
    allowed = " or ".join(MOVES[before])  # type: ignore[index]
    assert str(error.value) == (
        f"feature 'x', which is {before}: expected {allowed} as the next state, got {after}. Name one of them."
    )


def test_a_column_without_events_is_active_and_a_missing_column_can_only_be_beta() -> None:
    assert build_event([], ["x"], "x", "me", {"owner": "ann"}).state == "active"
    assert build_event([], ["x"], "new", "me", {"state": "beta"}).state == "beta"
    with pytest.raises(
        ConfigError, match=r"^feature .x., which is active: expected deprecated as the next state, got beta"
    ):
        build_event([], ["x"], "x", "me", {"state": "beta"})
    for changes in ({"state": "experimental"}, {"owner": "ann"}):
        with pytest.raises(ConfigError) as error:
            build_event([], ["price", "prize"], "pricee", "me", changes)
        assert str(error.value) == (
            "feature 'pricee': expected a feature of the table, got none of that name. "
            "Closest: price, prize. Correct the name, or declare it with state=beta."
        )


def test_fields_stay_until_they_change_and_alternatives_end_with_the_deprecation() -> None:
    gone = event(0, "x", "deprecated", owner="ann", description="old", alternatives=("y",), reason="slow")
    back = build_event([gone], ["x"], "x", "bob", {"state": "active", "owner": "bob"})
    assert (back.owner, back.description, back.alternatives, back.reason) == ("bob", "old", (), None)


def test_an_event_is_later_than_the_one_before_it_whatever_the_clocks_say(warehouse: Warehouse) -> None:
    ahead = Event(at=datetime.now(UTC) + timedelta(days=1), feature="x", state="deprecated", by="a clock ahead")
    append_event(warehouse, "t", ahead)
    append_event(warehouse, "t", build_event(read_events(warehouse, "t"), ["x"], "x", "me", {"state": "active"}))
    log = read_events(warehouse, "t")
    assert [one.state for one in log] == ["deprecated", "active"]
    refuse_deprecated(log, "the table", ["x"])


def test_since_is_the_first_day_of_the_current_state() -> None:
    log = [event(0, "x", "active"), event(1, "y", "beta"), event(2, "x", "deprecated"), event(3, "x", "deprecated")]
    assert state_since(log, "x") == START.date() + timedelta(days=2)
    assert state_since([*log, event(5, "x", "active"), event(6, "x", "active")], "x") == START.date() + timedelta(
        days=5
    )
    assert state_since(log, "z") is None


def test_two_threads_at_once_both_land_and_the_later_event_counts(warehouse: Warehouse) -> None:
    assert read_events(warehouse, "t") == []
    found = [event(day, f"f{day % 3}", STATES[day % 4], alternatives=("a", "b") if day % 2 else ()) for day in range(8)]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda one: append_event(warehouse, "t", one), found))
    assert read_events(warehouse, "t") == found
    assert newest_events(read_events(warehouse, "t")) == {"f0": found[6], "f1": found[7], "f2": found[5]}


def test_deprecated_features_are_refused_with_reason_and_alternatives() -> None:
    log = [
        event(0, "b", "deprecated", alternatives=("c", "d"), reason="the sensor is gone"),
        event(1, "a", "deprecated"),
        event(2, "z", "deprecated"),
        event(3, "c", "beta"),
    ]
    refuse_deprecated(log, "snapshot 5 of table 't'", ["c", "d"])
    with pytest.raises(ConfigError) as error:
        refuse_deprecated(log, "snapshot 5 of table 't'", ["a", "b", "c"])
    assert str(error.value) == (
        "features at snapshot 5 of table 't': expected none that is deprecated, got 'a', deprecated since 2024-01-02; instead: nothing; "
        "'b', deprecated since 2024-01-01, the sensor is gone; instead: 'c', 'd'. "
        "Read the alternatives, or set features.allow_deprecated=true."
    )

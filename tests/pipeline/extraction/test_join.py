"""Labels from outcomes: each impression once, each edge of the window on its side."""

import datetime
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from pipeline.errors import ConfigError, DataError

WINDOW_SECONDS = 600
START = pd.Timestamp("2024-01-01 12:00:00")


def seconds(values: list[float]) -> list[Any]:
    return [START + pd.Timedelta(seconds=value) for value in values]


def seconds_or_null(values: list[float | None]) -> list[Any]:
    return [None if value is None else seconds([value])[0] for value in values]


COUNTS = {"matched": 0, "repeated": 0, "late": 0, "early": 0, "unmatched": 0}


def source(**outcomes: Any) -> dict[str, Any]:
    return {
        "path": "features.parquet", "day_column": "event_time",
        "outcomes": {"path": "outcomes.parquet", "window_seconds": WINDOW_SECONDS, **outcomes},
    }  # fmt: skip


EDGES = [
    ("at once", [0.0], 1),
    ("inside", [300.0], 1),
    ("last microsecond", [599.999999], 1),
    ("at the end", [600.0], 0),
    ("late", [601.0], 0),
    ("before", [-0.000001], 0),
    ("lost", [], 0),
    ("twice", [10.0, 10.0], 1),
    ("early and inside", [-5.0, 5.0], 1),
    ("early and late", [-5.0, 700.0], 0),
]


def test_the_edges_of_the_window(ingest: Any, stored: Any, put: Any) -> None:
    put(
        "features.parquet",
        impression_id=list(range(len(EDGES))),
        event_time=seconds([0.0] * len(EDGES)),
        user=[1] * len(EDGES),
    )
    logged = [(i, delay) for i, (_, delays, _) in enumerate(EDGES) for delay in delays] + [
        (999, 1.0)
    ]  # without an impression
    put("outcomes.parquet", impression_id=[i for i, _ in logged], outcome_time=seconds([delay for _, delay in logged]))
    result = ingest(source())
    labels = stored()["label"].tolist()
    assert {name: label for (name, _, _), label in zip(EDGES, labels, strict=True)} == {
        name: label for name, _, label in EDGES
    }
    assert result.rows == len(EDGES)


def test_many_impressions_equal_pandas_and_keep_their_order(ingest: Any, stored: Any, put: Any) -> None:
    chance = random.Random(5)
    count = 4_000
    ids = chance.sample(range(10**9), count)
    shown = [float(i) for i in range(count)]
    clicks = [(i, shown[i] + chance.uniform(-200, 1_200)) for i in chance.choices(range(count), k=3_000)]
    features = put(
        "features.parquet", impression_id=ids, event_time=seconds(shown), user=[i % 50 for i in range(count)]
    )
    outcomes = put(
        "outcomes.parquet", impression_id=[ids[i] for i, _ in clicks], outcome_time=seconds([t for _, t in clicks])
    )
    ingest(source())
    delays = features.to_pandas().merge(outcomes.to_pandas(), on="impression_id")
    delay = delays["outcome_time"] - delays["event_time"]
    inside = set(delays[(delay >= pd.Timedelta(0)) & (delay < pd.Timedelta(seconds=WINDOW_SECONDS))]["impression_id"])
    frame = stored()
    assert frame["impression_id"].tolist() == ids  # each impression once, in the order of the log
    assert frame["label"].tolist() == [int(i in inside) for i in ids]
    assert 0.1 < frame["label"].mean() < 0.6


def test_an_impression_logged_twice_is_one_sample_and_names_may_differ(ingest: Any, stored: Any, put: Any) -> None:
    shown = [650.0, 0.0, 0.0, 0.0, None]
    put("features.parquet", request=["a", "a", None, "b", "c"], shown=seconds_or_null(shown), user=[1, 2, 3, 4, 5])
    put("outcomes.parquet", request=["a", None], clicked=seconds([655.0, 1.0]))
    names = source(on="request", feature_time="shown", outcome_time="clicked")
    result = ingest({**names, "day_column": None, "day": "2024-01-01"}, max_quarantined_share=0.6)
    assert stored()[["user", "label"]].to_numpy().tolist() == [[2, 0], [4, 0]]
    assert result.quarantined == {"impression is repeated": 1, "request is null": 1, "shown is null": 1}
    assert {**result.outcomes["label"].model_dump()} == COUNTS | {"late": 1, "unmatched": 1}


@pytest.mark.parametrize(
    ("features", "outcomes", "sentence"),
    [
        (
            {"event_time": seconds([0])},
            {"impression_id": [1], "outcome_time": seconds([1])},
            "source.outcomes, feature log: expected column 'impression_id', got event_time, user. Correct the names.",
        ),
        (
            {"impression_id": [1], "event_time": seconds([0])},
            {"impression_id": [1], "time": seconds([1])},
            "source.outcomes, outcome log: expected column 'outcome_time', got impression_id, time. Correct the names.",
        ),
        (
            {"impression_id": [1], "event_time": [1_700_000_000]},
            {"impression_id": [1], "outcome_time": seconds([1])},
            "source.outcomes, feature log: expected timestamps in column 'event_time', got BIGINT. "
            "Convert the column, name another, or set source.date_format if it is text.",
        ),
        (
            {"impression_id": [1], "event_time": seconds([0]), "Label": [0]},
            {"impression_id": [1], "outcome_time": seconds([1])},
            "source.outcomes: expected a feature log without 'Label', got one that already has this column. "
            "Rename the column or the label. Without source.outcomes, rows keep their own label.",
        ),
    ],
)
def test_logs_that_cannot_be_joined(
    ingest: Any, put: Any, features: dict[str, Any], outcomes: dict[str, Any], sentence: str
) -> None:
    put("features.parquet", **features, user=[1])
    put("outcomes.parquet", **outcomes)
    with pytest.raises(ConfigError) as error:
        ingest(source())
    assert str(error.value) == sentence


def test_one_column_cannot_be_key_and_time(ingest: Any) -> None:
    with pytest.raises(ConfigError) as error:
        ingest(source(on="t", feature_time="t", outcome_time="t"))
    assert str(error.value) == (
        "source.outcomes: expected key and time in different columns, got 't' for all three. "
        "Correct `on`, `feature_time` or `outcome_time`."
    )


def test_keys_of_both_logs_are_of_one_kind(ingest: Any, put: Any, warehouse: Any) -> None:
    """A DOUBLE holds one value for 256 neighbouring ids: a click would count for each of them."""
    ids = [2**60 + i for i in range(8)]
    put("features.parquet", impression_id=ids, event_time=seconds([0.0] * 8), user=[1] * 8)
    put("outcomes.parquet", impression_id=[float(ids[3]), None], outcome_time=seconds([1.0, 2.0]))
    with pytest.raises(ConfigError) as error:
        ingest(source())
    assert str(error.value) == (
        "source.outcomes, key 'impression_id': expected integers, text, dates or timestamps in both tables, "
        "got BIGINT in the feature log, DOUBLE in the outcome log. Write the key with one type in all files. "
        "Use integers for ids: a column of pandas with missing ids needs the type Int64."
    )
    assert not warehouse.has_table("events")


def test_times_in_another_format_need_to_be_told(ingest: Any, stored: Any, tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("impression_id,event_time,user\n1,02/03/2024 10:00:00,1\n2,02/03/2024 10:00:00,1\n")
    (tmp_path / "o.csv").write_text("impression_id,outcome_time\n2,02/03/2024 10:05:00\n")
    logs = {"path": "f.csv", "day_column": "event_time", "outcomes": {"path": "o.csv", "window_seconds": 600}}
    with pytest.raises(ConfigError) as error:
        ingest(logs)
    assert str(error.value) == (
        "source.outcomes, feature log: expected timestamps in column 'event_time', got text such as "
        "'02/03/2024 10:00:00'. Convert the column, name another, or set source.date_format if it is text."
    )
    assert ingest({**logs, "date_format": "%m/%d/%Y %H:%M:%S"}).days_written == (datetime.date(2024, 2, 3),)
    assert stored()["label"].tolist() == [0, 1]


# Dates in place of times, and logs that match nothing


def put_logs(put: Any, shown: Any = None, happened: Any = None, keys: Any = None, **more: Any) -> None:
    """60 impressions of one day, each fourth with an outcome after 5 minutes."""
    at = pd.Timestamp("2024-01-01 03:00") + pd.to_timedelta(np.arange(60) * 600, unit="s")
    clicked = at[::4] + pd.Timedelta(minutes=5)
    put("features.parquet", impression_id=np.arange(60), event_time=at if shown is None else shown(at), user=[1] * 60)
    put(
        "outcomes.parquet", impression_id=np.arange(60)[::4] if keys is None else keys(np.arange(60)[::4]),
        outcome_time=clicked if happened is None else happened(clicked), **more,
    )  # fmt: skip


AS_DATE = {
    "a date": lambda times: pa.array(times.date, pa.date32()),
    "midnight": lambda times: times.normalize(),
    "midnight of a zone": lambda times: times.normalize().tz_localize("UTC"),
}


@pytest.mark.parametrize("kind", AS_DATE)
@pytest.mark.parametrize("log", ["shown", "happened"])
def test_dates_against_times_are_refused(ingest: Any, put: Any, kind: str, log: str) -> None:
    zoned = {one: lambda times: times.tz_localize("UTC") for one in ("shown", "happened") if "zone" in kind}
    put_logs(put, **zoned | {log: AS_DATE[kind]})
    columns = ["column 'event_time' of the feature log", "column 'outcome_time' of the outcome log"]
    if log == "happened":
        columns.reverse()
    with pytest.raises(ConfigError) as error:
        ingest(source())
    assert str(error.value) == (
        f"source.outcomes: expected times of day in both logs, or dates in both, got dates in {columns[0]}, times in "
        f"{columns[1]}. Write both with the time of day: a date does not tell whether an outcome came after its "
        "impression."
    )


@pytest.mark.parametrize("kind", ["a date", "midnight"])
def test_dates_in_both_logs_have_windows_of_whole_days(ingest: Any, stored: Any, put: Any, kind: str) -> None:
    put_logs(put, shown=AS_DATE[kind], happened=AS_DATE["a date"])
    with pytest.raises(
        ConfigError, match="window_seconds with dates: expected whole days, multiples of 86400, got 600"
    ):
        ingest(source())
    ingest(source(window_seconds=86_400))
    assert stored()["label"].sum() == 15


@pytest.mark.one_in(4)
@pytest.mark.parametrize("log", ["shown", "happened", "changed", None])
def test_times_without_a_zone_count_as_utc_and_are_said(
    ingest: Any, stored: Any, put: Any, monkeypatch: pytest.MonkeyPatch, log: str | None
) -> None:
    """Wherever the machine is. One column has a zone, in which its times read differently; pandas is the reference."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        moved = {log: lambda times: times.tz_localize("UTC").tz_convert("America/New_York")}
        put_logs(put, shown=moved.get("shown"), happened=moved.get("happened"))
        changed = pd.to_datetime(["2024-01-01 00:00", "2024-01-01 06:15"])
        since = moved["changed"](changed) if log == "changed" else changed
        put("side.parquet", user=[1, 1], since=since, plan=[1, 2])
        notes: list[str] = []
        side = {"path": "side.parquet", "on": "user", "valid_from": "since", "as_of": "event_time"}
        ingest(source() | {"lookups": [side]}, warn=notes.append)
    finally:
        monkeypatch.undo()
        time.tzset()
    frame = stored().sort_values("impression_id")
    assert frame["label"].tolist() == [number % 4 == 0 for number in range(60)]
    at = pd.Timestamp("2024-01-01 03:00") + pd.to_timedelta(np.arange(60) * 600, unit="s")
    assert frame["plan"].tolist() == np.where(at < changed[1], 1, 2).tolist()
    outcomes, lookup = (
        any(note.startswith(place) for note in notes) for place in ("source.outcomes", "source.lookups")
    )
    assert (outcomes, lookup) == (log in ("shown", "happened"), log in ("shown", "changed"))
    assert len([note for note in notes if "has none and counts as UTC" in note]) == outcomes + lookup


UNMATCHED = {
    "keys in another spelling": {"keys": lambda keys: keys + 1_000},
    "times of another zone": {"happened": lambda times: times - pd.Timedelta(hours=5)},
    "times of a zone ahead": {"happened": lambda times: times + pd.Timedelta(hours=9)},
    "no times": {"happened": lambda times: pa.nulls(len(times), pa.timestamp("us"))},
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", UNMATCHED)
def test_an_outcome_log_that_matches_nothing_is_refused(ingest: Any, stored: Any, put: Any, case: str) -> None:
    put_logs(put, **UNMATCHED[case])
    with pytest.raises(DataError) as error:
        ingest(source(), profile=case == "no times", checks={"one_label": "off"})
    assert str(error.value) == (
        "day 2024-01-01, rule unmatched, column 'label': expected at least 1.0% of the outcomes of these impressions or "
        "this time inside the window, got 0 of 15. Correct the source, or set ingest.checks.unmatched to quarantine, "
        "warn or off."
    )
    put_logs(put)
    ingest(source())
    assert stored()["label"].sum() == 15


def test_outcomes_of_earlier_days_need_no_match(ingest: Any, stored: Any, put: Any) -> None:
    """The outcome log is kept for longer than the feature log."""
    put_logs(put)
    old = pd.Timestamp("2023-12-01") + pd.to_timedelta(np.arange(5_000), unit="m")
    put("more/old.parquet", impression_id=np.arange(5_000) + 10_000, outcome_time=old)
    ingest(source(path=["outcomes.parquet", "more/*.parquet"]))
    assert stored()["label"].sum() == 15


def test_an_action_that_never_occurs_is_refused(ingest: Any, put: Any) -> None:
    put_logs(put, action=["click", "like", "like"] * 5)
    with pytest.raises(DataError, match="'label': expected outcomes with action 'clik', got none, but like, click"):
        ingest(source(labels={"label": {"action": "clik"}, "liked": {"action": "like"}}))
    assert ingest(source(labels={"label": {"action": "click"}, "liked": {"action": "like"}})).rows == 60


def test_a_side_table_that_matches_nothing_is_refused(ingest: Any, put: Any) -> None:
    put("rows.parquet", user=[f"u{i}" for i in range(40)], label=[0, 1] * 20)
    put("users.parquet", user=[f"U{i}" for i in range(40)], age=list(range(40)))
    looked_up = {"path": "rows.parquet", "day": "2024-01-01", "lookups": [{"path": "users.parquet", "on": ["user"]}]}
    with pytest.raises(DataError, match=r"1.0% of the rows with a match in side table 'users.parquet', got 0 of 40"):
        ingest(looked_up, profile=False)
    assert ingest(looked_up, checks={"unmatched": "warn"}).unmatched == {"users.parquet": 40}
    put("users.parquet", user=["u7"], age=[7])
    assert ingest(looked_up, force=True).checked.findings == ()


@pytest.mark.parametrize("zone", [None, "UTC"])
@pytest.mark.parametrize("name", ["outcomes.csv", "outcomes.parquet"])
def test_a_log_of_outcomes_may_have_no_row_yet(
    name: str, zone: str | None, ingest: Any, stored: Any, put: Any, tmp_path: Path
) -> None:
    """As on the first day, where nobody has clicked. A header tells no type, and pandas writes such columns untyped."""
    shown = pa.array(seconds([0.0, 1.0]), pa.timestamp("us")).cast(pa.timestamp("us", zone))
    put("features.parquet", impression_id=["a", "b"], event_time=shown, user=[1, 2])
    if name.endswith("csv"):
        (tmp_path / name).write_text("impression_id,outcome_time\n")
    else:
        put(name, impression_id=pa.nulls(0), outcome_time=pa.nulls(0))
    given = source(path="outcomes*")
    result = ingest(given, checks={"one_label": "off"})
    assert (result.rows, stored()["label"].tolist()) == (2, [0, 0])
    assert result.outcomes["label"].model_dump() == COUNTS
    times = pa.array(seconds([2.0, 9e5]), pa.timestamp("us")).cast(pa.timestamp("us", zone))
    put("outcomes_2.parquet", impression_id=["b", "c"], outcome_time=times)
    ingest(given)
    assert stored()["label"].tolist() == [0, 1]

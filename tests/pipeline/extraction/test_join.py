"""Labels from outcomes: each impression once, each edge of the window on its side."""

import datetime
import random
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from pipeline.errors import ConfigError

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
            {"impression_id": [1], "event_time": seconds([0]), "label": [0]},
            {"impression_id": [1], "outcome_time": seconds([1])},
            "source.outcomes: expected a feature log without 'label', got one that already has this column. "
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

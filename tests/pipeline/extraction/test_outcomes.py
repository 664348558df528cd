"""Several outcomes, late ones, downsampled negatives, compared with a join in plain Python."""

import datetime
import hashlib
import random
from collections import Counter
from typing import Any

import pandas as pd
import pyarrow as pa
import pytest
from pydantic import ValidationError

from pipeline.errors import ConfigError, DataError, EmptyDatasetError
from pipeline.extraction.config import SourceConfig
from storage.warehouse import Warehouse

DAYS = [datetime.date(2024, 1, day) for day in (1, 2, 3, 4)]
MIDNIGHT = pd.Timestamp("2024-01-01")
LABELS: dict[str, Any] = {
    "label": {"action": "click", "window_seconds": 3_600},
    "converted": {"action": "purchase", "window_seconds": 86_400},
    "clicks": {"action": "click", "take": "count"},
    "spent": {"action": "purchase", "window_seconds": 86_400, "take": "sum", "amount": "price"},
}
WINDOWS = {"label": 3_600, "converted": 86_400, "clicks": 7_200, "spent": 86_400}
ACTIONS = {"label": "click", "converted": "purchase", "clicks": "click", "spent": "purchase"}


def logs(put: Any, unit: str | None = None) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Three days of impressions, some logged twice, and outcomes up to a day late. Each day is one file.

    Args:
        unit: Writes the times as numbers of it since 1970.
    """
    chance = random.Random(11)
    shown = [
        {"impression_id": f"i{i}", "event_time": chance.randrange(3 * 86_400), "user": i % 7}
        for i in chance.sample(range(10**6), 1_500)
    ]
    shown += [{**row, "event_time": row["event_time"] + chance.choice([0, 5, 90_000])} for row in shown[:40]]
    shown = [row for row in shown if row["event_time"] < 3 * 86_400]
    outcomes = [
        {
            "impression_id": chance.choice(shown)["impression_id"] if i % 20 else f"lost{i}",
            "action": chance.choice(["click", "click", "purchase", "hover"]), "price": chance.choice([0.1, 19.99, None]),
        }
        for i in range(2_000)
    ]  # fmt: skip
    begun = {row["impression_id"]: row["event_time"] for row in shown}
    for row in outcomes:
        row["outcome_time"] = begun.get(row["impression_id"], 0) + chance.randrange(-600, 100_000)
    outcomes += chance.sample(outcomes, 100)  # logged twice
    for name, log, key in (("features", shown, "event_time"), ("outcomes", outcomes, "outcome_time")):
        for day in range(-1, 5):
            rows = [row for row in log if row[key] // 86_400 == day]
            if rows:
                columns = {column: [row[column] for row in rows] for column in rows[0]}
                times: list[Any] = [MIDNIGHT + pd.Timedelta(seconds=value) for value in columns[key]]
                if unit is not None:
                    times = [(time - pd.Timestamp(0)) // pd.Timedelta(1, unit) for time in times]
                put(f"{name}/{day + 1}.parquet", **{**columns, key: times})
    return shown, outcomes


def source(**outcomes: Any) -> dict[str, Any]:
    settings = {"path": "outcomes/*.parquet", "window_seconds": 7_200, "labels": LABELS, **outcomes}
    return {"path": "features/*.parquet", "day_column": "event_time", "outcomes": settings}


def first_of(shown: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Impression -> its first row in time. Rows of equal time are equal in everything."""
    first: dict[str, dict[str, Any]] = {}
    for row in sorted(shown, key=lambda row: row["event_time"]):
        first.setdefault(row["impression_id"], row)
    return first


def expected(shown: list[dict[str, Any]], outcomes: list[dict[str, Any]]) -> tuple[dict[str, dict[str, Any]], Any]:
    """(impression -> labels, label -> counts of its outcomes), computed outcome by outcome."""
    first = first_of(shown)
    labels = {key: {"label": 0, "converted": 0, "clicks": 0, "spent": 0.0} for key in first}
    counts = {name: Counter(matched=0, repeated=0, late=0, early=0, unmatched=0) for name in LABELS}
    for name, found in counts.items():
        seen = set()
        for row in outcomes:
            if row["action"] != ACTIONS[name]:
                continue
            key = row["impression_id"]
            if key not in first:
                found["unmatched"] += 1
                continue
            delay = row["outcome_time"] - first[key]["event_time"]
            if not 0 <= delay < WINDOWS[name]:
                found["early" if delay < 0 else "late"] += 1
                continue
            found["repeated" if key in seen else "matched"] += 1
            seen.add(key)
            if name in ("label", "converted"):
                labels[key][name] = 1
            else:
                labels[key][name] += 1 if name == "clicks" else row["price"] or 0
    return labels, counts


def kept_by_hash(key: str, share: float, seed: int) -> bool:
    digest = hashlib.md5(f"{seed}:{key}".encode()).digest()
    return int.from_bytes(digest[8:], "little") < int(share * 2**64)


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("share", "seed", "unit"), [(None, 0, None), (0.25, 3, "milliseconds"), (1.0, 0, None), (None, 0, "seconds")]
)
def test_each_impression_is_one_sample_or_counted(
    ingest: Any, stored: Any, put: Any, warehouse: Warehouse, share: float | None, seed: int, unit: str | None
) -> None:
    shown, outcomes = logs(put, unit)
    thinning = {} if share is None else {"keep_negatives": share, "keep_seed": seed}
    result = ingest({**source(**thinning), "day_unit": unit}, max_quarantined_share=0.2, rows_per_commit=600)
    labels, counts = expected(shown, outcomes)
    frame = stored().set_index("impression_id")
    assert frame.index.is_unique
    positive = {key for key, values in labels.items() if any(values.values())}
    left_out = {key for key in labels.keys() - positive if share and not kept_by_hash(key, share, seed)}
    assert set(frame.index) == labels.keys() - left_out
    for name in LABELS:
        assert frame[name].to_dict() == pytest.approx({key: labels[key][name] for key in frame.index})
    if share is None:
        assert "sample_weight" not in frame.columns
    else:
        assert frame["sample_weight"].to_dict() == {key: 1.0 if key in positive else 1.0 / share for key in frame.index}
    assert {name: Counter(found.model_dump()) for name, found in result.outcomes.items()} == counts
    for found, name in ((found.model_dump(), name) for name, found in result.outcomes.items()):
        assert sum(found.values()) == sum(row["action"] == ACTIONS[name] for row in outcomes)
    repeats = len(shown) - len(labels)
    assert (repeats > 0, result.quarantined) == (True, {"impression is repeated": repeats})
    for day, rows in result.by_day.items():
        assert rows.rows == sum(row["event_time"] // 86_400 == (day - DAYS[0]).days for row in shown)
        assert rows.rows == rows.written + rows.quarantined + rows.left_out
    assert sum(rows.left_out for rows in result.by_day.values()) == len(left_out)
    assert warehouse.day_rows(warehouse.current("events")) == {day: rows.written for day, rows in result.by_day.items()}


def test_late_outcomes_write_the_days_they_concern(ingest: Any, stored: Any, put: Any) -> None:
    when = [MIDNIGHT + pd.Timedelta(hours=hours) for hours in (1, 23, 30, 60)]
    put("features/all.parquet", impression_id=[1, 2, 3, 4], event_time=when, user=[1, 2, 3, 4])
    clicks = {"action": ["click"], "price": [1.0]}
    put("outcomes/1.parquet", impression_id=[1], outcome_time=[when[0]], **clicks)
    put("outcomes/9.parquet", impression_id=[9], outcome_time=[MIDNIGHT + pd.Timedelta(days=5)], **clicks)
    assert ingest(source()).days_written == tuple(DAYS[:3])
    late = [when[1] + pd.Timedelta(minutes=30)]
    put("outcomes/2.parquet", impression_id=[2], outcome_time=late, **clicks)
    result = ingest(source())
    assert (result.days_written, result.days_skipped) == ((DAYS[0],), (DAYS[1], DAYS[2]))
    assert result.outcomes["label"].matched == 2
    assert stored()["label"].tolist() == [1, 1, 0, 0]
    assert ingest(source()).days_written == ()
    put("outcomes/3.parquet", impression_id=[3], outcome_time=[MIDNIGHT + pd.Timedelta(days=9)], **clicks)
    assert ingest(source()).days_written == ()  # beyond every window


def test_a_repeat_in_an_earlier_file_changes_the_later_day(ingest: Any, stored: Any, put: Any) -> None:
    when = [MIDNIGHT + pd.Timedelta(hours=hours) for hours in (1, 30, 31)]
    log = {"impression_id": [2, 3], "event_time": when[1:], "user": [1, 2]}
    put("features/2.parquet", **log)
    put("outcomes/1.parquet", impression_id=[9], outcome_time=when[:1], action=["click"], price=[1.0])
    ingest(source())
    put("features/1.parquet", impression_id=[2], event_time=when[:1], user=[1])
    assert ingest(source(), max_quarantined_share=0.5).days_written == tuple(DAYS[:2])
    assert stored()[["day", "impression_id"]].to_numpy().tolist() == [[DAYS[0], 2], [DAYS[1], 3]]


@pytest.mark.parametrize(
    "columns", [{"sparse": ["user", "conv*"]}, {"dense": ["clicks"]}, {"sparse": ["*_weight"]}], ids=str
)
def test_outcomes_are_no_features(ingest: Any, put: Any, columns: dict[str, Any]) -> None:
    logs(put)
    with pytest.raises(
        ConfigError, match=r"features: expected features other than outcomes and weights, got '\w+'\. Take"
    ):
        ingest(source(keep_negatives=0.5), **columns, max_quarantined_share=0.2)


WRONG = {
    "no trained label": (
        {"labels": {"converted": {"action": "purchase"}}},
        "source.outcomes.labels, features.label 'label': expected a label that is 0 or 1 (take=any), "
        "got no label of that name. Set features.label to one of: converted.",
    ),
    "a count": (
        {"labels": {"label": {"take": "count"}}},
        "source.outcomes.labels, features.label 'label': expected a label that is 0 or 1 (take=any), "
        "got take=count. Add a label with take=any.",
    ),
    "no action": (
        {"action_column": "kind"},
        "source.outcomes, outcome log: expected column 'kind', got "
        "impression_id, action, price, outcome_time. Correct the names.",
    ),
    "no amount": (
        {"labels": {"label": {}, "spent": {"take": "sum", "amount": "cost"}}},
        "source.outcomes, outcome log: expected column 'cost', got "
        "impression_id, action, price, outcome_time. Correct the names.",
    ),
    "a label that is there": (
        {"labels": {"label": {}, "user": {}}},
        "source.outcomes: expected a feature log without 'user', got one that already has this column. "
        "Rename the column or the label. Without source.outcomes, rows keep their own label.",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_labels_that_do_not_fit(ingest: Any, put: Any, kind: str) -> None:
    logs(put)
    changed, sentence = WRONG[kind]
    with pytest.raises(ConfigError) as error:
        ingest(source(**changed))
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("amount", "shown"), [("9,99", "9,99"), ("ten", "ten"), (float("nan"), "nan"), (1e40, "1e[+]40")]
)
def test_an_amount_that_cannot_be_summed_is_refused(ingest: Any, put: Any, amount: Any, shown: str) -> None:
    """It counted as 0."""
    logs(put)
    times = [MIDNIGHT + pd.Timedelta(minutes=1)] * 2
    put(
        "outcomes/0.parquet",
        impression_id=["x", "y"],
        outcome_time=times,
        action=["purchase"] * 2,
        price=[None, amount],
    )
    with pytest.raises(DataError, match=rf"column 'price' of the outcome log: .*, got '{shown}' in '0.parquet'"):
        ingest(source())


@pytest.mark.parametrize("kind", [pa.float64(), pa.decimal128(20, 1), pa.int8(), pa.string()])
def test_an_action_is_the_same_in_any_type(ingest: Any, stored: Any, put: Any, kind: pa.DataType) -> None:
    """pandas writes whole numbers as floats where one is missing, and 1.0 is the action 1."""
    when = [MIDNIGHT + pd.Timedelta(minutes=minutes) for minutes in range(4)]
    put("features/1.parquet", impression_id=["a", "b", "c"], event_time=when[:3], user=[1, 2, 3])
    actions = pa.array([1, 2, None]).cast(kind)
    put("outcomes/1.parquet", impression_id=["a", "b", "c"], outcome_time=when[3:] * 3, action=actions)
    ingest(source(labels={"label": {"action": "1"}}))
    assert stored().set_index("impression_id")["label"].to_dict() == {"a": 1, "b": 0, "c": 0}


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"labels": {"a b": {}}}, "got 'a b'. Rename the label."),
        ({"labels": {"__x": {}}}, "got '__x'. Rename the label."),
        ({"labels": {"sample_weight": {}}}, "got 'sample_weight'. Rename the label."),
        (
            {"labels": {"label": {"amount": "price"}}},
            "got take=any with `amount`. Remove `amount`, or set take=sum.",
        ),
        ({"labels": {"label": {}, "spent": {"take": "sum"}}}, "got take=sum without `amount`. Add `amount`."),
    ],
    ids=["space", "hidden", "ours", "amount", "no amount"],
)
def test_labels_that_contradict_themselves(changed: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        SourceConfig.model_validate(source(**changed))
    assert sentence in str(error.value)


@pytest.mark.parametrize("share", [0.0, -0.1, 1e-5, 1.5])
def test_shares_of_negatives(share: float) -> None:
    with pytest.raises(ValidationError, match="keep_negatives"):
        SourceConfig.model_validate(source(keep_negatives=share))


def test_another_repeat_makes_the_day_another(ingest: Any, stored: Any, put: Any) -> None:
    when = [MIDNIGHT + pd.Timedelta(hours=hours) for hours in (1, 2, 30, 31, 32)]
    put("features/2.parquet", impression_id=["x", "y", "z"], event_time=when[2:], user=[1, 2, 3])
    put("outcomes/1.parquet", impression_id=["q"], outcome_time=when[:1], action=["click"], price=[1.0])
    for first in ("x", "y"):
        put("features/1.parquet", impression_id=[first, "w"], event_time=when[:2], user=[1, 2])
        assert ingest(source(), max_quarantined_share=0.5).days_written == tuple(DAYS[:2])
        assert sorted(stored()["impression_id"]) == ["w", "x", "y", "z"]


def test_a_day_that_keeps_no_row_makes_no_snapshot(ingest: Any, put: Any) -> None:
    when = [MIDNIGHT + pd.Timedelta(hours=hours) for hours in (1, 30, 31)]
    put("features/1.parquet", impression_id=[1, 2, 3], event_time=when, user=[1, 2, 3])
    put("outcomes/1.parquet", impression_id=[1], outcome_time=when[:1], action=["click"], price=[1.0])
    first, second = (ingest(source(keep_negatives=1e-4)) for _ in range(2))
    assert (first.days_written, second.days_written) == ((DAYS[0],), ())
    assert first.snapshot == second.snapshot


def test_a_source_of_negatives_that_are_all_left_out(ingest: Any, put: Any) -> None:
    put("features/1.parquet", impression_id=[2], event_time=[MIDNIGHT], user=[1])
    put("outcomes/1.parquet", impression_id=[1], outcome_time=[MIDNIGHT], action=["click"], price=[1.0])
    with pytest.raises(EmptyDatasetError) as error:
        ingest(source(keep_negatives=1e-4))
    assert str(error.value) == (
        "1 day(s) of the source: expected rows to keep, got only negatives that downsampling leaves out. "
        "Raise source.outcomes.keep_negatives."
    )

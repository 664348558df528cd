"""Suggestions for columns of a known kind, and the file they are written to."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from pipeline.data.config import SplitConfig
from pipeline.errors import ConfigError
from pipeline.suggestion.choose import Suggestion, patterns, suggest
from pipeline.suggestion.write import render_config
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import FeatureSchema
from storage.reader import DAY
from tests.pipeline.suggestion.observing import look, suggest_for

DAYS = [datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(4)]


def table(rows: int = 4_000, days: int = 4) -> pa.Table:
    draw = np.random.default_rng(5)
    label = (draw.random(rows) < 0.3).astype(np.int64)
    return pa.table(
        {
            DAY: pa.array([DAYS[i * days // rows] for i in range(rows)]),
            "label": label,
            "cat_user": draw.integers(0, 300, rows),
            "cat_device": draw.integers(0, 300, rows),
            "country": [f"c{i}" for i in draw.integers(0, 20, rows)],
            "flag": pa.array(draw.random(rows) < 0.5),
            "hour": draw.integers(0, 24, rows),
            "views": pa.array(draw.lognormal(3.0, 1.5, rows).astype(np.int64)),
            "num_a": draw.normal(size=rows),
            "num_b": pa.array(draw.normal(size=rows), mask=draw.random(rows) < 0.2),
            "spiky": np.where(np.arange(rows) == 7, 1e4, draw.normal(size=rows)),
            "list_items": pa.array(
                [draw.integers(0, 5_000, n) for n in draw.geometric(0.1, rows)], pa.list_(pa.int64())
            ),
            "impression_id": np.arange(rows),
            "session_id": np.arange(rows) // 4,
            "at": pa.array([datetime.datetime(2025, 3, 1)] * rows, pa.timestamp("us")),
            "always": np.full(rows, 7),
            "never": pa.nulls(rows, pa.float64()),
            "clicked_again": label,
            "outcome_value": pa.array(draw.random(rows), mask=label == 0),
            "true_probability": draw.random(rows),
            "weight": draw.random(rows),
        }
    )


@pytest.fixture(scope="module")
def suggestion(tmp_path_factory: pytest.TempPathFactory) -> Suggestion:
    return suggest_for(table(), tmp_path_factory.mktemp("suggest"), {"weight": "the rows' weight"})


def test_each_column_has_its_use_and_the_reason(suggestion: Suggestion) -> None:
    uses = {choice.fact.name: choice.use for choice in suggestion.choices}
    assert {name for name in uses if uses[name] == "dense"} == {"num_a", "num_b", "spiky", "views"}
    assert {name for name in uses if uses[name] == "sparse"} == {"cat_user", "cat_device", "country", "flag", "hour", "list_items"}  # fmt: skip
    why = {choice.fact.name: choice.why for choice in suggestion.of("ignored")}
    assert why.pop("at").startswith("a time of day that never changes")
    assert why.pop("always") == "constant: one distinct value"
    assert why.pop("never") == "no values"
    assert why.pop("true_probability") == "leaks the label, judging by its name"
    assert why.pop("clicked_again") == "leaks the label: by itself it has an AUC of 1.0000"
    assert why.pop("outcome_value") == "leaks the label: every row with a value has label 1"
    assert why.pop("weight") == "the rows' weight"
    assert "rows an id: it identifies rows" in why.pop("impression_id")
    assert "rows an id: it identifies rows" in why.pop("session_id")
    assert why == {}


def test_numbers_come_from_the_measurement(suggestion: Suggestion) -> None:
    ops = {choice.fact.name: [dict(op) for op in choice.transforms] for choice in suggestion.choices}
    rows = table().to_pandas()
    p99 = int(np.quantile(rows["list_items"].map(len), 0.99, method="inverted_cdf"))
    assert ops["list_items"][0] == {"kind": "first_x", "limit": 5 * -(-p99 // 5)}
    for name, size in (("cat_user", 2_048), ("country", 128), ("hour", 128), ("flag", 16)):
        assert ops[name] == [{"kind": "sigrid_hash", "size": size}], name
    assert ops["list_items"][1]["size"] in (16_384, 32_768)
    assert [op["kind"] for op in ops["views"]] == ["log", "standardise", "fill_null"]
    assert [op["kind"] for op in ops["num_b"]] == ["standardise", "fill_null"]
    assert [op["kind"] for op in ops["spiky"]] == ["standardise", "clamp", "fill_null"]
    assert suggestion.shape.model["embedding_width"] == 16


def test_the_file_holds_sections_that_are_valid(suggestion: Suggestion) -> None:
    text = render_config(
        suggestion, {"name": "t", "source": {"path": "x"}, "training": {"epochs": 2}}, 4_000, 4, "files"
    )
    values: Any = yaml.safe_load(text)
    features = FeatureSchema.model_validate(values["features"])
    assert features.sparse[0].columns == ("cat_*",)
    assert [group.pooling for group in features.sparse if "list_items" in group.columns] == ["mean"]
    assert ("num_*",) in [group.columns for group in features.dense]
    split = SplitConfig.model_validate(values["split"])
    assert split.days is not None
    assert (split.days.train, split.days.valid, split.days.test) == (("2025-03-01..2025-03-02",), ("2025-03-03",), ("2025-03-04",))  # fmt: skip
    assert values["training"] == suggestion.shape.training, "the config's own were for other features"
    buckets = next(group for group in features.sparse if group.name == "{column}_bucket")
    assert set(buckets.columns) == {"num_*", "views", "spiky"}
    assert "# cat_user: about " in text
    assert "#   never: no values" in text


def test_patterns_match_the_wanted_names_and_nothing_else() -> None:
    names = ["a_1", "a_2", "b_1", "b_2", "c", "day"]
    assert patterns(["a_1", "a_2", "b_1", "c"], names) == ["a_*", "b_1", "c"]


def uses(rows: pa.Table, folder: Path) -> dict[str, str]:
    return {choice.fact.name: choice.use for choice in suggest_for(rows, folder).choices}


def test_codes_in_number_columns_are_ids(tmp_path: Path) -> None:
    """Label-encoded text, codes with gaps that the label depends on, and ids that pandas made floats."""
    draw, rows = np.random.default_rng(9), table(20_000)
    city = draw.integers(0, 230, 20_000)
    flight = draw.choice(np.sort(draw.choice(9_000, 400, replace=False)), 20_000)
    offset = dict(zip(range(9_000), draw.normal(scale=1.5, size=9_000), strict=True))
    label = draw.random(20_000) < 1 / (1 + np.exp(-np.array([offset[code] for code in flight])))
    user = np.where(draw.random(20_000) < 0.1, np.nan, draw.integers(0, 2_000, 20_000).astype(float))
    amount = draw.gamma(2.0, 150.0, 20_000).astype(np.int64)
    rows = pa.table(
        {
            DAY: rows[DAY],
            "label": label.astype(np.int64),
            "city": city,
            "flight": flight,
            "user_id": pa.array(user, from_pandas=True),
            "spent": amount,
            "rating": draw.normal(size=20_000),
            "num_item_age": amount,
        }
    )
    found = uses(rows, tmp_path)
    sparse = dict.fromkeys(("city", "flight", "user_id"), "sparse")
    assert found == sparse | dict.fromkeys(("spent", "rating", "num_item_age"), "dense")
    made = suggest_for(rows, tmp_path)
    forms = {(group.feature.use, group.feature.name, name) for group in made.groups for name in group.names}
    assert {("sparse", "", "flight"), ("dense", "{column}_number", "flight")} <= forms, "what looks like a code is both"
    text = render_config(made, {"name": "t", "source": {"path": "x"}}, 20_000, 4, "files")
    schema = FeatureSchema.model_validate(yaml.safe_load(text)["features"])
    assert "flight_number" in build_plan(schema, rows.schema).dense


def test_times_become_hours_and_no_number_that_only_grows(tmp_path: Path) -> None:
    rows = table()
    seconds = [int(day.strftime("%s")) + 60 * (i % 1_440) for i, day in enumerate(rows[DAY].to_pylist())]
    times = pa.array([value * 1_000_000 for value in seconds], pa.timestamp("us"))
    rows = rows.append_column("seen", times).append_column("event_time", pa.array(seconds))
    rows = rows.append_column("month", pa.array([day.day for day in rows[DAY].to_pylist()]))
    made = suggest_for(rows, tmp_path)
    assert {op["output"]: op.get("time_unit") for op in made.derived} == {"seen_hour": None, "event_time_hour": "seconds"}  # fmt: skip
    assert not [group for group in made.groups if group.feature.use == "dense" and set(group.names) & {"seen", "event_time"}]  # fmt: skip
    (month,) = [choice for choice in made.choices if choice.fact.name == "month"]
    assert (month.use, month.why.startswith("follows the day (correlation 1.000)")) == ("ignored", True)
    alone = suggest_for(rows.set_column(0, DAY, pa.array([DAYS[0]] * rows.num_rows)), tmp_path)
    dense = {name for group in alone.groups if group.feature.use == "dense" for name in group.names}
    assert {"seen", "event_time"} <= dense, "rows of all times are in all parts"


def test_times_and_dates_become_weekdays_and_months_that_training_rows_know(tmp_path: Path) -> None:
    """Where test rows are later, a weekday needs three weeks, and a month more than a year."""
    draw = np.random.default_rng(6)
    for days, later, expected in ((4, [], []), (30, ["weekday"], ["weekday"]), (500, ["weekday", "month"], ["weekday", "month"])):  # fmt: skip
        moments = np.datetime64("2024-01-01") + np.sort(draw.integers(0, days, 6_000)).astype("timedelta64[D]")
        seconds = moments.astype("M8[s]") + draw.integers(0, 86_400, 6_000).astype("timedelta64[s]")
        rows = pa.table(
            {
                DAY: pa.array(moments.astype("M8[D]")),
                "label": draw.integers(0, 2, 6_000),
                "shop": draw.integers(0, 30, 6_000),
                "born": pa.array(moments.astype("M8[D]")),
                "at": pa.array(seconds.astype("M8[us]")),
                "clock": seconds.astype(np.int64) * 1_000,
                "event_ms": seconds.astype(np.int64) * 1_000,
            }
        )
        made = suggest_for(rows, tmp_path)
        parts = {
            name: [op.get("part", "hour") for op in made.derived if op["inputs"] == [name]] for name in ("born", "at")
        }
        assert parts == {"born": later, "at": ["hour", *expected]}, days
        observed, split = look(rows, tmp_path)
        numbers = suggest(observed, "label", split, {}, ("clock", "milliseconds")).derived
        assert [op.get("part", "hour") for op in numbers if op["inputs"] == ["clock"]] == ["hour", *expected]
        text = render_config(made, {"name": "t", "source": {"path": "x"}}, 6_000, days, "files")
        plan = build_plan(FeatureSchema.model_validate(yaml.safe_load(text)["features"]), rows.schema)
        assert set(parts["at"]) <= {name.removeprefix("at_") for name in plan.features}


def test_few_ids_that_stay_the_same_have_rows_of_their_own(tmp_path: Path) -> None:
    """A hash gives one of ten of 1,000 ids a row that it shares. Rows of other days may have other ids."""
    rows, draw = table(20_000, days=1), np.random.default_rng(7)
    rows = rows.append_column("cat_many", pa.array(draw.integers(0, 15_000, 20_000) % 3_500 * 977))
    made = {one.fact.name: one for one in suggest_for(rows, tmp_path).choices}
    for name, distinct in (("cat_user", 300), ("country", 20), ("cat_many", 3_500), ("list_items", 5_000)):
        op = made[name].transforms[-1]
        assert (op["kind"], op["min_count"], op["unknown"]) == ("map_id", 2, op["size"]), name
        assert distinct <= op["size"] <= 1.4 * distinct, name
    daily = {one.fact.name: one for one in suggest_for(table(20_000, days=4), tmp_path).choices}
    assert daily["cat_user"].transforms[-1]["kind"] == "sigrid_hash"


def test_numbers_with_words_among_them_are_told(tmp_path: Path) -> None:
    prices = [f"{i * 0.37:.2f}" if i % 7 else "unknown" for i in range(4_000)]
    (price,) = [one for one in suggest_for(table().append_column("price", pa.array(prices)), tmp_path).choices if one.fact.name == "price"]  # fmt: skip
    assert price.why == (
        "86% of its values are numbers, others are text such as 'unknown': clean them, and it becomes a number"
    )


def test_numbers_alone_are_enough(tmp_path: Path) -> None:
    made = suggest_for(table().select([DAY, "label", "num_a"]), tmp_path)
    assert [(group.feature.use, group.names) for group in made.groups] == [
        ("dense", ("num_a",)),
        ("sparse", ("num_a",)),
    ]


def test_what_cannot_be_suggested(tmp_path: Path) -> None:
    rows = table().select([DAY, "label", "impression_id"])
    with pytest.raises(ConfigError, match=r"suggestion: expected a column to learn from, got 0 usable of 1"):
        suggest_for(rows, tmp_path)


def test_a_column_that_determines_the_label_leaks_it(tmp_path: Path) -> None:
    """The stars behind a label of four stars or more correlate with it far less than 1."""
    stars = np.random.default_rng(2).choice([1, 2, 3, 4, 5], 4_000, p=[0.06, 0.11, 0.27, 0.34, 0.22])
    words = np.array(["", "awful", "bad", "fine", "good", "great"])[stars]
    rows = table().set_column(1, "label", pa.array((stars >= 4).astype(np.int64)))
    made = suggest_for(rows.append_column("stars", pa.array(stars)).append_column("words", pa.array(words)), tmp_path)
    for name in ("stars", "words"):
        (choice,) = [one for one in made.choices if one.fact.name == name]
        assert choice.why == "leaks the label: by itself it has an AUC of 1.0000"


def test_columns_that_come_after_the_label_are_left_out_and_strong_ones_are_named(tmp_path: Path) -> None:
    rows, draw = table(), np.random.default_rng(6)
    label = rows["label"].to_numpy()
    clicked, late = label == 1, datetime.datetime(2025, 4, 1)
    leaks = {
        "dwell": pa.array(np.where(clicked, draw.gamma(2.0, 30.0, 4_000), 0.0)),
        "page": pa.array([f"p{code}" for code in draw.integers(0, 200, 4_000) + 200 * label]),
        "model_output": pa.array(label + 0.1 * draw.normal(size=4_000)),
        "paid_at": pa.array([late if hit else None for hit in clicked], pa.timestamp("us")),
        "refund": pa.array(draw.random(4_000), mask=~clicked | (draw.random(4_000) < 0.7)),
        "steps": pa.array([[1, 2, 900] if hit else [1, 2] for hit in clicked], pa.list_(pa.int64())),
    }
    for name, values in leaks.items():
        rows = rows.append_column(name, values)
    strong = label + 0.5 * draw.normal(size=4_000)
    made = suggest_for(rows.append_column("strong", pa.array(strong)), tmp_path)
    why = {choice.fact.name: choice.why for choice in made.choices}
    for name in leaks:
        assert why[name].startswith("leaks the label: "), (name, why[name])
    assert made.notes == ("'strong' by itself has an AUC of 0.92: keep it only if it is known before the label is",)


def test_ids_of_a_single_day_are_left_out_of_a_split_by_days(tmp_path: Path) -> None:
    rows = table(8_000, days=4)
    hours = [f"{day} {i % 24}h" for i, day in enumerate(rows[DAY].to_pylist())]
    (hour,) = [one for one in suggest_for(rows.append_column("hour_of_day", pa.array(hours)), tmp_path).choices if one.fact.name == "hour_of_day"]  # fmt: skip
    assert hour.why == "a value occurs on 1.0 days: test days have values that no training day has"


def test_the_column_that_gives_the_day_gives_the_hour_too(tmp_path: Path) -> None:
    """Also in numbers, whatever its name, if the config knows their unit. A day alone has no hour."""
    rows, draw = table(), np.random.default_rng(5)
    hours = draw.integers(0, 86_400, 4_000)
    moments = np.array(
        [datetime.datetime.combine(day, datetime.time()) for day in rows[DAY].to_pylist()], "datetime64[s]"
    )
    moments += hours.astype("timedelta64[s]")
    rows = rows.append_column("happened", pa.array(moments)).append_column("clock", pa.array(moments.astype(np.int64)))
    rows = rows.append_column("text_day", rows[DAY].cast(pa.string()))
    observed, split = look(rows, tmp_path)
    for given in (("happened", None), ("clock", "seconds"), ("text_day", None)):
        made = suggest(observed, "label", split, {}, given)
        (choice,) = [one for one in made.choices if one.fact.name == given[0]]
        expected = [] if given[0] == "text_day" else [f"{given[0]}_hour"]
        assert [one.column for one in choice.features] == expected, choice.why
    assert made.shape.model["embedding_width"] == 16, "seconds of a time are no ids"


def test_numbers_with_many_values_stay_numbers_and_inexact_ids_are_named(tmp_path: Path) -> None:
    draw, rows = np.random.default_rng(4), table()
    rows = rows.append_column("weight_of_car", pa.array(draw.lognormal(10.0, 1.0, 4_000).astype(np.int64)))
    rows = rows.append_column("line", pa.array(np.arange(4_000)))
    rows = rows.append_column("ad_id", pa.array(2.0**60 + 4_096.0 * draw.integers(0, 200, 4_000)))
    for number in range(3):
        rows = rows.append_column(f"empty_{number}", pa.array(np.full(4_000, 7)))
    made = suggest_for(rows, tmp_path)
    found = {choice.fact.name: choice for choice in made.choices}
    assert (found["weight_of_car"].use, found["line"].use) == ("dense", "ignored")
    assert found["ad_id"].why.startswith("ids beyond 2^53 as floats")
    text = render_config(made, {"name": "t", "source": {"path": "x"}}, 4_000, 4, "files", path="/home/x/t.yaml")
    assert "always, empty_0, empty_1, empty_2: constant: one distinct value" in text
    assert "python -m flows.suggest /home/x/t.yaml trials=12" in text

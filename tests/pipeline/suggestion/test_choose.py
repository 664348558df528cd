"""Suggestions for columns of a known kind, and the file they are written to."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml

from pipeline.data.config import SplitConfig
from pipeline.data.profile import rows_of, types_of
from pipeline.errors import ConfigError
from pipeline.suggestion.choose import Suggestion, patterns, suggest
from pipeline.suggestion.facts import TableFacts, observe
from pipeline.suggestion.write import render_config
from pipeline.transforms.schema import FeatureSchema
from storage.query import connect
from storage.reader import DAY

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


def observe_table(rows: pa.Table, folder: Path) -> TableFacts:
    with connect([], folder / "tmp", "512MB") as connection:
        connection.register("rows", rows)
        types = types_of(connection, rows)
        return observe(connection, lambda names: "rows", types, rows_of(connection, "rows"), "label")


@pytest.fixture(scope="module")
def suggestion(tmp_path_factory: pytest.TempPathFactory) -> Suggestion:
    observed = observe_table(table(), tmp_path_factory.mktemp("suggest"))
    return suggest(observed, "label", {"weight": "the rows' weight"})


def test_each_column_has_its_use_and_the_reason(suggestion: Suggestion) -> None:
    uses = {choice.fact.name: choice.use for choice in suggestion.choices}
    assert {name for name in uses if uses[name] == "dense"} == {"num_a", "num_b", "spiky", "views"}
    assert {name for name in uses if uses[name] == "sparse"} == {"cat_user", "cat_device", "country", "flag", "hour", "list_items"}  # fmt: skip
    why = {choice.fact.name: choice.why for choice in suggestion.of("ignored")}
    assert why.pop("at") == "a time; get_local_hour under `derived` turns it into hours"
    assert why.pop("always") == "constant: one distinct value"
    assert why.pop("never") == "no values"
    assert why.pop("true_probability") == "leaks the label, judging by its name"
    assert why.pop("clicked_again") == "leaks the label: correlation of its values with it 1.000"
    assert why.pop("outcome_value") == "leaks the label: correlation of having a value with it 1.000"
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
    assert suggestion.embedding_width == 16


def test_the_file_holds_sections_that_are_valid(suggestion: Suggestion) -> None:
    text = render_config(
        suggestion, {"name": "t", "source": {"path": "x"}, "training": {"epochs": 2}}, 4_000, 4, "files"
    )
    values: Any = yaml.safe_load(text)
    features = FeatureSchema.model_validate(values["features"])
    assert features.sparse[0].columns == ("cat_*",)
    assert features.sparse[-1].pooling == "mean"
    assert ("num_*",) in [group.columns for group in features.dense]
    split = SplitConfig.model_validate(values["split"])
    assert split.days is not None
    assert (split.days.train, split.days.valid, split.days.test) == (("2025-03-01..2025-03-02",), ("2025-03-03",), ("2025-03-04",))  # fmt: skip
    assert values["training"] == {"batch_rows": 256, "epochs": 2}
    assert "# cat_user: about " in text
    assert "#   never: no values" in text


def test_one_day_is_split_by_the_key_with_most_values(tmp_path: Path) -> None:
    found = suggest(observe_table(table(days=1), tmp_path), "label")
    assert found.split["hash"]["key"] in ("cat_user", "cat_device")
    two = suggest(observe_table(table(days=2), tmp_path), "label")
    assert two.split == {"days": {"train": ["2025-03-01..2025-03-01"], "test": ["2025-03-02"]}}


def test_patterns_match_the_wanted_names_and_nothing_else() -> None:
    names = ["a_1", "a_2", "b_1", "b_2", "c", "day"]
    assert patterns(["a_1", "a_2", "b_1", "c"], names) == ["a_*", "b_1", "c"]


def test_what_cannot_be_suggested(tmp_path: Path) -> None:
    rows = table()
    with pytest.raises(ConfigError, match=r"label 'missing': expected a column of 0 and 1, got columns"):
        suggest(observe_table(rows, tmp_path), "missing")
    with pytest.raises(ConfigError, match=r"suggestion: expected a column of ids, text or lists of ids, got 1 columns"):
        suggest(observe_table(rows.select([DAY, "label", "num_a"]), tmp_path), "label")

"""Splits for tables of known content: every part has rows and both labels."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.config import PARTS, SplitConfig
from pipeline.data.selection import select
from pipeline.errors import ConfigError
from pipeline.suggestion.splits import ChosenSplit
from storage.reader import DAY
from tests.pipeline.suggestion.observing import look

FIRST = datetime.date(2025, 3, 1)


def table(sizes: list[int], **columns: Any) -> pa.Table:
    """Rows of consecutive days."""
    draw, rows = np.random.default_rng(3), sum(sizes)
    days = [FIRST + datetime.timedelta(days=i) for i, size in enumerate(sizes) for _ in range(size)]
    made: dict[str, Any] = {
        DAY: pa.array(days),
        "label": (draw.random(rows) < 0.3).astype(np.int64),
        "user": draw.integers(0, 40, rows),
        "price": draw.random(rows),
    }
    return pa.table(made | columns)


def parts_of(rows: pa.Table, split: ChosenSplit) -> dict[str, pa.Table]:
    """The rows of each part, as a training selects them."""
    config, found = SplitConfig.model_validate(split.config), dict[str, pa.Table]()
    for part in PARTS:
        chosen = select(config, part, sorted(set(rows[DAY].to_pylist())), None)
        assert chosen is not None
        kept = rows.filter(pa.compute.is_in(rows[DAY], pa.array(chosen.days)))
        if chosen.equals is not None:
            kept = kept.filter(pa.compute.equal(kept[chosen.equals[0]], chosen.equals[1]))
        found[part] = chosen.keep(kept)
    return found


def check(rows: pa.Table, split: ChosenSplit) -> dict[str, int]:
    """Every row is in one part, and every part has both labels. Returns rows by part."""
    found = parts_of(rows, split)
    assert sum(part.num_rows for part in found.values()) == rows.num_rows
    for part in found.values():
        assert set(part["label"].to_pylist()) == {0, 1}
    return {name: part.num_rows for name, part in found.items()}


def test_the_last_days_test_as_far_as_they_have_rows(tmp_path: Path) -> None:
    rows = table([1_000] * 20 + [30, 11])
    observed, split = look(rows, tmp_path)
    assert split.by_time
    sizes = check(rows, split)
    assert sizes["test"] >= 2_000
    assert sizes["valid"] >= 2_000
    assert sizes["train"] >= 10_000
    assert split.train_rows == sizes["train"]
    assert max(rows[DAY].to_pylist()) == FIRST + datetime.timedelta(days=21)
    assert observed.rows == 20_041


def test_days_with_one_label_do_not_make_a_part(tmp_path: Path) -> None:
    rows = table([500] * 12)
    label = np.where(np.arange(6_000) >= 5_000, 0, rows["label"].to_numpy())
    rows = rows.set_column(1, "label", pa.array(label))
    check(rows, look(rows, tmp_path)[1])


@pytest.mark.parametrize("sizes", [[3_000], [2_000, 1_000], [2_990, 6, 4]], ids=str)
def test_too_few_days_are_split_row_by_row(sizes: list[int], tmp_path: Path) -> None:
    rows = table(sizes)
    _, split = look(rows, tmp_path)
    assert split.config["hash"]["key"] == "price"  # names rows, and no user is held out
    found = check(rows, split)
    assert found["test"] == pytest.approx(600, rel=0.25)
    assert found["valid"] == pytest.approx(600, rel=0.25)
    users = {name: set(part["user"].to_pylist()) for name, part in parts_of(rows, split).items()}
    assert users["train"] == users["test"]


def test_columns_that_only_together_tell_rows_apart_make_the_key(tmp_path: Path) -> None:
    draw = np.random.default_rng(4)
    rows = table([4_000], a=draw.integers(0, 90, 4_000), b=draw.integers(0, 80, 4_000).astype(str)).drop_columns(
        "price"
    )
    _, split = look(rows, tmp_path)
    assert set(split.config["hash"]["key"]) >= {"a", "b"}
    assert check(rows, split)["test"] == pytest.approx(800, rel=0.25)


def test_rows_that_are_equal_in_all_columns_cannot_be_split(tmp_path: Path) -> None:
    rows = pa.table({DAY: pa.array([FIRST] * 900), "label": [0, 1, 1] * 300, "kind": ["a", "b", "c"] * 300})
    with pytest.raises(ConfigError, match=r"suggestion, split: expected days, .*got 33% of the rows equal in kind"):
        look(rows, tmp_path)


@pytest.mark.parametrize("words", [("train", "valid", "test"), ("TRAIN", "dev", "Holdout")], ids=str)
def test_a_column_with_the_parts_is_the_split(words: tuple[str, str, str], tmp_path: Path) -> None:
    values = np.random.default_rng(6).choice(words, 4_000, p=[0.7, 0.15, 0.15])
    rows = table([2_000, 2_000], fold=values)
    _, split = look(rows, tmp_path)
    assert (split.column, split.validates, split.by_time) == ("fold", True, False)
    assert check(rows, split) == {part: int((values == word).sum()) for part, word in zip(PARTS, words, strict=True)}
    two = rows.filter(pa.compute.not_equal(rows["fold"], words[1]))
    _, split = look(two, tmp_path)
    assert (split.config["column"]["valid"], split.validates) == (None, False)


def test_a_column_whose_test_rows_have_one_label_is_not_the_split(tmp_path: Path) -> None:
    label = np.array([0, 1] * 2_000)
    fold = np.where((np.arange(4_000) % 10 == 0) & (label == 0), "test", "train")
    _, split = look(table([4_000], fold=fold).set_column(1, "label", pa.array(label)), tmp_path)
    assert "hash" in split.config


def test_the_configs_own_split_stays_if_it_fits(tmp_path: Path) -> None:
    rows = table([300] * 20)
    own = SplitConfig.model_validate({"every_nth_day": {"n": 10, "valid": 4, "test": 9}})
    _, split = look(rows, tmp_path, own)
    assert (split.config, split.by_time) == ({"every_nth_day": {"n": 10, "valid": 4, "test": 9}}, False)
    assert check(rows, split)["test"] == split.train_rows / 8
    elsewhere = SplitConfig.model_validate({"days": {"train": ["2020-01-01"], "test": ["2020-01-02"]}})
    _, split = look(rows, tmp_path, elsewhere)
    assert split.config["days"]["test"] == ["2025-03-19..2025-03-20"]

"""What no day can be, whatever the days before it were: the future, one label, features that teach nothing."""

import datetime
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.present import today
from pipeline.errors import DataError, EmptyDatasetError
from pipeline.extraction.extract import IngestResult
from storage.warehouse import Warehouse

DAY1, DAY2 = datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)
SAMPLES = {"path": "*.parquet", "day_column": "date"}


def put_day(put: Any, day: datetime.date, rows: int = 40, **columns: Any) -> None:
    """A file of rows of a day, every fourth with label 1."""
    values = {"user": np.arange(rows), "label": np.arange(rows) % 4 // 3, **columns}
    put(f"{day}.parquet", date=pa.array([day] * rows), **values)


def broken(result: IngestResult) -> list[tuple[str, str, str | None]]:
    return [(one.rule, one.outcome, one.column) for one in result.checked.findings]


# The future


@pytest.mark.one_in(3)
@pytest.mark.parametrize("profile", [True, False])
@pytest.mark.parametrize("days", [2, 30, 27_000])
def test_a_day_that_has_not_begun_is_held_back(
    ingest: Any, put: Any, warehouse: Warehouse, days: int, profile: bool
) -> None:
    later = today() + datetime.timedelta(days=days)
    put_day(put, DAY1)
    put_day(put, later, rows=1)
    result = ingest(SAMPLES, profile=profile)
    assert (result.days_written, result.days_held, broken(result)) == (
        (DAY1,),
        (later,),
        [("future", "quarantine", None)],
    )
    assert (result.checked.findings[0].got, result.rows) == ("1 rows of a day that has not begun", 40)
    assert warehouse.day_rows(warehouse.current("events_held")) == {later: 1}
    assert ingest(SAMPLES, profile=profile).days_held == (later,)


def test_tomorrow_may_have_begun_elsewhere(ingest: Any, put: Any) -> None:
    tomorrow = today() + datetime.timedelta(days=1)
    put_day(put, tomorrow)
    assert ingest(SAMPLES).days_written == (tomorrow,)


def test_nothing_but_the_future_is_refused(ingest: Any, put: Any) -> None:
    put_day(put, datetime.date(2099, 1, 1))
    with pytest.raises(EmptyDatasetError, match=r"1 day\(s\), all held back in table 'events_held'"):
        ingest(SAMPLES)
    assert ingest(SAMPLES, checks={"future": "warn"}).rows == 40


# One label


@pytest.mark.one_in(4)
@pytest.mark.parametrize("profile", [True, False])
@pytest.mark.parametrize("label", [0, 1])
def test_one_label_in_all_rows_is_refused(ingest: Any, put: Any, label: int, profile: bool) -> None:
    put_day(put, DAY1, label=[label] * 40)
    with pytest.raises(DataError) as error:
        ingest(SAMPLES, profile=profile)
    assert str(error.value) == (
        f"day 2024-01-01, rule one_label: expected rows of both labels, got label {label} in all 40 rows. Correct the "
        "source, or set ingest.checks.one_label to quarantine, warn or off."
    )
    assert ingest(SAMPLES, profile=profile, checks={"one_label": "warn"}).rows == 40


def test_a_value_of_the_label_that_no_row_has_is_refused(ingest: Any, put: Any) -> None:
    put_day(put, DAY1, label=["yes", "no"] * 20)
    with pytest.raises(DataError, match="label 0 in all 40 rows"):
        ingest(SAMPLES | {"positive": "Yes"})
    assert ingest(SAMPLES | {"positive": "yes"}).rows == 40


def test_one_label_among_other_days_is_refused_unless_it_may_be_chance(ingest: Any, put: Any) -> None:
    put_day(put, DAY1, rows=400)
    put_day(put, DAY2, rows=30, label=[0] * 30)  # 0.75 ** 30 is 2e-4
    assert ingest(SAMPLES).rows == 430
    later = datetime.date(2024, 1, 3)
    put_day(put, later, rows=60, label=[0] * 60)  # 3e-8
    with pytest.raises(DataError, match="day 2024-01-03, rule one_label"):
        ingest(SAMPLES)
    assert ingest(SAMPLES, checks={"one_label": "quarantine"}).days_held == (later,)


# Features


def test_features_that_teach_nothing_are_named_once(ingest: Any, put: Any) -> None:
    for number, day in enumerate((DAY1, DAY2, datetime.date(2024, 1, 3))):
        same = {"one": [7.0] * 40, "word": ["a"] * 40, "empty": pa.nulls(40, pa.float64()), "unread": [1] * 40}
        put_day(put, day, weekday=[number] * 40, half=[1.0] * 20 + [None] * 20, **same)
    features = {"sparse": ["user", "word", "weekday"], "dense": ["one", "empty", "half"]}
    assert broken(ingest(SAMPLES, **features, only=[DAY1, DAY2])) == [
        ("constant", "warn", "empty"), ("constant", "warn", "one"), ("constant", "warn", "word")
    ]  # fmt: skip
    assert broken(ingest(SAMPLES, **features)) == []

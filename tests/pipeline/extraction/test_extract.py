"""Days, bad labels and repetition: what the warehouse holds after an ingest."""

import datetime
import itertools
import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import EqualTo

from pipeline.errors import ConfigError, DataError, EmptyDatasetError
from pipeline.extraction import extract
from pipeline.extraction.config import LabelColumns, SourceConfig
from pipeline.extraction.opening import SourceContext, SourceReader
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse
from tests.homes import read_rows

ROOT = Path(__file__).resolve().parents[3]
DAY1, DAY2, DAY3 = (datetime.date(2024, 1, day) for day in (1, 2, 3))
FIXED = {"path": "rows.parquet", "day": "2024-01-01"}
BY_DAY = {"path": "*.parquet", "day_column": "date"}


def at(*texts: str, zone: str | None = None) -> pa.Array:
    return pa.array([pd.Timestamp(text, tz=zone) for text in texts])


def days_of(warehouse: Warehouse) -> dict[datetime.date, int]:
    return warehouse.day_rows(warehouse.current("events"))


# Days


DAYS = {
    "date": pa.array([DAY2, DAY1, DAY2]),
    "timestamp": at("2024-01-02 00:00:00", "2024-01-01 23:59:59.999999", "2024-01-02 23:59:59"),
    "nanoseconds": at("2024-01-02", "2024-01-01 12:00", "2024-01-02").cast(pa.timestamp("ns")),
    "zoned": at("2024-01-02 09:00", "2024-01-02 08:59", "2024-01-02 12:00", zone="Asia/Tokyo"),
    "text": pa.array(["2024-01-02", "2024-01-01", "2024-01-02"]),
    "text with time": pa.array(["2024-01-02 00:00:01", "2024-01-01T23:00:00", "2024-01-02T10:00:00Z"]),
}


@pytest.mark.parametrize("kind", DAYS)
def test_the_day_comes_from_a_column_of_any_kind(ingest: Any, stored: Any, put: Any, kind: str) -> None:
    put("rows.parquet", user=[1, 2, 3], label=[0, 1, 0], when=DAYS[kind])
    result = ingest({"path": "rows.parquet", "day_column": "when"})
    assert result.days_written == (DAY1, DAY2)
    frame = stored()
    assert list(zip(frame["day"], frame["user"], strict=True)) == [(DAY1, 2), (DAY2, 1), (DAY2, 3)]


@pytest.mark.parametrize(
    ("source", "columns", "named"),
    [
        (FIXED, {"day": [31]}, "column 'day' of the source: expected another name than day, the table's column for the "
         "day of a row, got '31' in a row of 2024-01-01. Rename it: source.rename={\"day\": \"own_day\"}, or"),
        (BY_DAY, {"date": [DAY1], "Day": ["Mon"]}, "column 'Day' of the source: expected another name than day"),
        (BY_DAY, {"date": [DAY1], "day": [DAY2]}, "got '2024-01-02' in a row of 2024-01-01"),
        (BY_DAY, {"date": [DAY1], "DAY": [True]}, "got 'true' in a row of 2024-01-01"),
        (BY_DAY, {"date": [DAY1], "day": pa.array([None], pa.float64())}, "got 'None' in a row of 2024-01-01"),
    ],
)  # fmt: skip
def test_a_column_that_the_day_of_the_table_would_hide_is_refused(
    ingest: Any, put: Any, warehouse: Warehouse, source: dict[str, Any], columns: dict[str, Any], named: str
) -> None:
    put("rows.parquet", user=[1], label=[0], **columns)
    with pytest.raises(ConfigError, match=re.escape(named)):
        ingest(source)
    assert not warehouse.has_table("events")


@pytest.mark.parametrize("day", [[DAY1, DAY2], ["2024-01-01", "2024-01-02"]])
def test_a_column_day_that_says_the_same_is_no_other_one(ingest: Any, stored: Any, put: Any, day: list[Any]) -> None:
    """As the folders of a log by day do."""
    put("rows.parquet", user=[1, 2], label=[0, 1], date=[DAY1, DAY2], day=day)
    ingest(BY_DAY)
    assert stored()["day"].tolist() == [DAY1, DAY2]
    put("rows.parquet", user=[1, 2], label=[0, 1], date=[DAY1, DAY2], day=[4, 5])
    ingest({**BY_DAY, "rename": {"day": "weekday"}})
    assert list(zip(stored()["day"], stored()["weekday"], strict=True)) == [(DAY1, 4), (DAY2, 5)]


def test_rows_without_a_day(ingest: Any, put: Any) -> None:
    put("rows.parquet", user=[1, 2, 3], label=[0, 1, 0], when=["2024-01-02", "soon", None])
    with pytest.raises(DataError) as error:
        ingest({"path": "rows.parquet", "day_column": "when"})
    assert str(error.value) == (
        "source.day_column 'when': expected a date in every row, got no date in 2 rows, such as 'soon' in "
        "'rows.parquet'. Write ISO dates, times in UTC, or set source.date_format; or filter those rows out."
    )


UNFIT = {
    "infinity": (pa.array([2**31 - 1, 19_000], pa.int32()).cast(pa.date32()), "infinity"),
    "year 12024": (pa.array([3_672_700, 19_000], pa.int32()).cast(pa.date32()), "12025-07-06"),
    "before Christ": (pa.array([-800_000, 19_000], pa.int32()).cast(pa.date32()), "0222-09-04 (BC)"),
    "largest timestamp": (pa.array([2**63 - 1, 0]).cast(pa.timestamp("us")), "infinity"),
    "text of another zone": (pa.array(["2024-01-01T23:30:00-05:00", "2024-01-01"]), "2024-01-01T23:30:00-05:00"),
    "word of DuckDB": (pa.array(["epoch", "2024-01-01"]), "epoch"),
    "number": (pa.array([20240101, 20240101]), "20240101"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_values_that_give_no_day_are_named(ingest: Any, put: Any, warehouse: Warehouse, case: str) -> None:
    values, shown = UNFIT[case]
    put("rows.parquet", user=[1, 2], label=[0, 1], when=values)
    with pytest.raises(DataError) as error:
        ingest({"path": "rows.parquet", "day_column": "when"})
    assert f"got no date in {2 if case == 'number' else 1} rows, such as '{shown}' in 'rows.parquet'." in str(
        error.value
    )
    assert not warehouse.has_table("events")


def test_only_some_days_and_days_that_are_not_there(ingest: Any, put: Any, warehouse: Warehouse) -> None:
    put("rows.parquet", user=[1, 2, 3, 4], label=[0, 1, 0, 1], date=[DAY1, DAY2, DAY2, DAY3])
    result = ingest(BY_DAY, only=[DAY2])
    assert (result.days_written, result.rows, days_of(warehouse)) == ((DAY2,), 2, {DAY2: 2})
    result = ingest(BY_DAY)
    assert (result.days_written, result.days_skipped, result.rows) == ((DAY1, DAY3), (DAY2,), 2)
    with pytest.raises(EmptyDatasetError) as error:
        ingest(BY_DAY, only=[datetime.date(2024, 2, 1), DAY1])
    assert str(error.value) == (
        "day 2024-02-01: expected a day of the source, 2024-01-01 to 2024-01-03, got no row of it. Name another day."
    )


@pytest.mark.parametrize("name", ["rows.parquet", "rows.csv"])
def test_no_rows(ingest: Any, put: Any, tmp_path: Path, name: str) -> None:
    put("rows.parquet", user=pa.array([], pa.int64()), label=pa.array([], pa.int64()))
    (tmp_path / "rows.csv").write_text("user,label\n")
    with pytest.raises(EmptyDatasetError) as error:
        ingest({**FIXED, "path": name})
    assert str(error.value) == "source: expected at least one row, got none. Check source.path."


# Rewriting


def test_an_unchanged_source_is_skipped_and_a_changed_file_is_not(
    ingest: Any, stored: Any, put: Any, warehouse: Warehouse
) -> None:
    put("1.parquet", user=[1], label=[0], date=[DAY1])
    put("2.parquet", user=[2], label=[0], date=[DAY2])
    first = ingest(BY_DAY)
    again = ingest(BY_DAY)
    assert (again.days_written, again.days_skipped, again.rows) == ((), (DAY1, DAY2), 0)
    assert again.snapshot == first.snapshot
    put("2.parquet", user=[5, 6], label=[0, 1], date=[DAY2, DAY2])
    changed = ingest(BY_DAY)
    assert (changed.days_written, changed.days_skipped, changed.rows) == ((DAY2,), (DAY1,), 2)
    assert stored()["user"].tolist() == [1, 5, 6]
    put("3.parquet", user=[7], label=[0], date=[DAY3])
    assert ingest(BY_DAY).days_written == (DAY3,)


def test_a_day_that_another_engine_changed_stays_and_is_named(
    ingest: Any, stored: Any, put: Any, warehouse: Warehouse
) -> None:
    put("1.parquet", user=[1], label=[0], date=[DAY1])
    put("2.parquet", user=[2], label=[0], date=[DAY2])
    ingest(BY_DAY)
    table = warehouse.table("events")
    table.append(table.scan(EqualTo("day", DAY2.isoformat())).to_arrow())
    again = ingest(BY_DAY)
    assert (again.days_written, again.days_skipped, again.days_changed) == ((), (DAY1,), (DAY2,))
    assert stored()["user"].tolist() == [1, 2, 2]
    forced = ingest(BY_DAY, force=True)
    assert (forced.days_written, forced.days_changed) == ((DAY1, DAY2), ())
    table.append(table.scan(EqualTo("day", DAY2.isoformat())).to_arrow())
    put("2.parquet", user=[5, 6], label=[0, 1], date=[DAY2, DAY2])
    assert ingest(BY_DAY).days_held == (DAY2,)  # the source has changed, too, and lacks the other engine's rows
    said: list[str] = []
    assert ingest(BY_DAY, checks={"losses": "off"}, force=True, warn=said.append).days_written == (DAY1, DAY2)
    assert said == [
        "1 days that another engine has changed are written again from the source, the first is 2024-01-02: "
        "the changes of that engine are lost"
    ]
    assert stored()["user"].tolist() == [1, 5, 6]
    theirs = stored()[:1].assign(day=DAY3)  # a day that only the other engine has
    table.refresh().append(pa.Table.from_pandas(theirs, table.schema().as_arrow(), preserve_index=False))
    assert ingest(BY_DAY).days_elsewhere == 1


def test_a_table_that_was_rolled_back_is_written_again(
    ingest: Any, stored: Any, put: Any, warehouse: Warehouse
) -> None:
    put("1.parquet", user=[1], label=[0], date=[DAY1])
    first = ingest(BY_DAY)
    put("1.parquet", user=[5, 6], label=[0, 1], date=[DAY1, DAY1])
    ingest(BY_DAY)
    warehouse.table("events").manage_snapshots().rollback_to_snapshot(first.snapshot.snapshot_id).commit()
    assert stored()["user"].tolist() == [1]
    assert ingest(BY_DAY).days_written == (DAY1,)
    assert stored()["user"].tolist() == [5, 6]


def test_a_changed_outcome_log_writes_every_day_again(ingest: Any, stored: Any, put: Any) -> None:
    put("rows/1.parquet", impression_id=[1, 2], user=[1, 2], shown=at("2024-01-01", "2024-01-02"))
    put("users.parquet", user=[1, 2], age=[30, 40])
    put("clicks.parquet", impression_id=[1], outcome_time=at("2024-01-01 00:01:00"))
    source = {
        "path": "rows/*.parquet", "day_column": "shown", "lookups": [{"path": "users.parquet", "on": ["user"]}],
        "outcomes": {"path": "clicks.parquet", "feature_time": "shown"},
    }  # fmt: skip
    ingest(source)
    assert stored()[["age", "label"]].to_numpy().tolist() == [[30, 1], [40, 0]]
    put("users.parquet", user=[1, 2], age=[31, 41])
    assert ingest(source).days_written == ()
    put("clicks.parquet", impression_id=[1, 2], outcome_time=at("2024-01-01 00:01:00", "2024-01-02 00:01:00"))
    assert ingest(source).days_written == (DAY1, DAY2)
    assert stored()[["age", "label"]].to_numpy().tolist() == [[31, 1], [41, 1]]


def test_days_are_written_in_groups(ingest: Any, stored: Any, put: Any, warehouse: Warehouse) -> None:
    days = [DAY1 + datetime.timedelta(days=i // 10) for i in range(50)]
    put("rows.parquet", user=list(range(50)), label=[0, 1] * 25, date=days)
    ingest(BY_DAY, rows_per_commit=25)
    assert len(warehouse.table("events").snapshots()) == 3  # 2 + 2 + 1 days
    assert stored()["user"].tolist() == list(range(50))


def test_groups_of_days_come_out_as_one_group(
    ingest: Any, stored: Any, put: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows, refused rows and statistics. The rows of each group are made once, for all."""
    random, days = np.random.default_rng(1), [DAY1 + datetime.timedelta(days=i // 40) for i in range(280)]
    label = [i % 2 if i % 23 else None for i in range(280)]
    put("rows.parquet", user=random.integers(0, 9, 280).tolist(), label=label, date=days)
    made: list[int] = []
    whole = extract.good_rows
    monkeypatch.setattr(extract, "good_rows", lambda rows, due, *rest: made.append(len(due)) or whole(rows, due, *rest))
    homes, results = [Warehouse(WarehouseConfig(), tmp_path / name) for name in ("one", "groups")], []
    for home, rows in zip(homes, (10**6, 100), strict=True):
        made.clear()
        results.append(ingest(BY_DAY, rows_per_commit=rows, max_quarantined_share=0.1, into=home))
        assert made == ([7] if rows > 100 else [2, 2, 2, 1])
    assert [len(home.table("events").snapshots()) for home in homes] == [1, 4]
    for table in ("events", "events_quarantine", "events_profile"):
        one, groups = (read_rows(home, table, home.schema(home.current(table)).names).sort_by("day") for home in homes)
        assert one.equals(groups), table
    same = {"snapshot", "seconds", "checked"}
    assert results[0].model_dump(exclude=same) == results[1].model_dump(exclude=same)
    verdicts = [[(day.day, day.outcome, day.rows) for day in one.checked.days] for one in results]
    assert verdicts[0] == verdicts[1]
    assert len(verdicts[0]) == 7


def test_groups_before_a_day_that_fails_stay(ingest: Any, stored: Any, put: Any, warehouse: Warehouse) -> None:
    days = [DAY1 + datetime.timedelta(days=i // 100) for i in range(500)]
    put("rows.parquet", user=list(range(500)), label=[0, 1] * 200 + [1] * 100, date=days)
    checks = {"one_label": "fail"}
    shown: list[Any] = []
    with pytest.raises(DataError, match="2024-01-05"):
        ingest(BY_DAY, rows_per_commit=200, checks=checks, on_checked=shown.append)
    assert sorted(days_of(warehouse)) == sorted(set(days))[:4]
    assert [[day.day for day in one.days] for one in shown] == [sorted(set(days))]
    put("rows.parquet", user=list(range(500)), label=[0, 1] * 250, date=days)
    assert len(ingest(BY_DAY, rows_per_commit=200, checks=checks).days_written) == 5  # a file of all days has changed
    assert stored()["user"].tolist() == list(range(500))


def test_days_of_several_groups_are_held_back(ingest: Any, put: Any, warehouse: Warehouse) -> None:
    days = [DAY1 + datetime.timedelta(days=i // 100) for i in range(500)]
    label = [0, 1] * 50 + [1] * 100 + [0, 1] * 100 + [1] * 100
    put("rows.parquet", user=list(range(500)), label=label, date=days)
    result = ingest(BY_DAY, rows_per_commit=200, checks={"one_label": "quarantine"})
    bad = [DAY2, DAY1 + datetime.timedelta(4)]
    assert list(result.days_held) == sorted(warehouse.written_days("events_held")) == bad
    assert sorted(days_of(warehouse)) == sorted({*days} - {*bad})
    again = ingest(BY_DAY, rows_per_commit=200, checks={"one_label": "warn"})
    assert list(again.days_written) == bad
    assert not warehouse.day_rows(warehouse.current("events_held"))


def test_what_was_found_in_groups_is_told_whatever_ends_the_ingest(
    ingest: Any, put: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = [DAY1 + datetime.timedelta(days=i // 10) for i in range(50)]
    put("rows.parquet", user=list(range(50)), label=[0, 1] * 25, date=days)
    commit, shown, count = extract.StagedDays.commit, list[Any](), itertools.count()

    def fails(staged: Any, *rest: Any) -> Any:
        if next(count) == 1:
            raise OSError("no room")
        return commit(staged, *rest)

    monkeypatch.setattr(extract.StagedDays, "commit", fails)
    with pytest.raises(OSError, match="no room"):
        ingest(BY_DAY, rows_per_commit=20, on_checked=shown.append)
    assert [[day.day for day in one.days] for one in shown] == [sorted(set(days))[:4]]


@pytest.mark.parametrize("rows", [300, 5_000_000])
def test_what_rows_match_is_judged_over_all_groups(ingest: Any, put: Any, rows: int, warehouse: Warehouse) -> None:
    """The side table has no row of the last day yet."""
    days = [DAY1 + datetime.timedelta(days=i // 300) for i in range(1_200)]
    put("rows/1.parquet", user=list(range(1_200)), label=[0, 1] * 600, date=days)
    put("users.parquet", user=list(range(900)), age=[1, 2, 3] * 300)
    source = {"path": "rows/*", "day_column": "date", "lookups": [{"path": "users.parquet", "on": ["user"]}]}
    ingest(source, rows_per_commit=rows)
    assert len(days_of(warehouse)) == 4


@pytest.mark.slow
def test_rows_of_many_days_keep_the_order_of_their_file(ingest: Any, stored: Any, tmp_path: Path) -> None:
    """Threads read row groups side by side."""
    days = [DAY1 + datetime.timedelta(2 * (row % 7)) for row in range(400)]
    rows = pa.table({"user": range(400), "label": [0, 1] * 200, "date": days})
    for number in range(3):
        pq.write_table(rows.slice(number), tmp_path / f"{number}.parquet", row_group_size=7)
    for number in range(5):
        ingest(BY_DAY, into=(home := Warehouse(WarehouseConfig(), tmp_path / f"home{number}")))
        found = stored(into=home)
        expected = [row for day in range(7) for number in range(3) for row in range(number, 400) if row % 7 == day]
        assert found["user"].tolist() == expected


def test_two_fresh_homes_hold_the_same_rows_in_the_same_order(ingest: Any, stored: Any, tmp_path: Path) -> None:
    source = {
        "generator": {"days": 2, "rows_per_day": 6_000, "chunk_rows": 2_500},
        "outcomes": {"window_seconds": 1_200}, "day_column": "event_time",
    }  # fmt: skip
    homes = [Warehouse(WarehouseConfig(), tmp_path / name) for name in ("first", "second")]
    results = [ingest(source, sparse=["cat_*", "list_*"], dense=["num_*"], into=home) for home in homes]
    first, second = (stored(into=home) for home in homes)
    assert results[0].rows == len(first) == 12_000
    pd.testing.assert_frame_equal(first, second)
    log = pd.concat(pd.read_parquet(path) for path in sorted((tmp_path / "logs").glob("*/features/*.parquet")))
    assert first["impression_id"].tolist() == log["impression_id"].tolist()
    assert not list((tmp_path / "first" / "tmp").iterdir())


def test_rows_of_a_day_are_sorted_by_columns_and_then_by_their_order_in_files(
    ingest: Any, stored: Any, put: Any
) -> None:
    session, step = [7, 8, 7, 9, 8, 7, 7], [2, 1, 1, 1, 1, 1, 3]
    put("rows.parquet", user=list(range(7)), label=[0, 1, 0, 1, 0, 1, 0], session=session, step=step,
        date=[DAY1, DAY1, DAY1, DAY2, DAY1, DAY1, DAY2])  # fmt: skip
    plain = ingest(BY_DAY, only=[DAY2])
    result = ingest(BY_DAY, order_by=["session", "step"])
    assert result.days_written == (DAY1, DAY2)  # stored in another order: another day
    assert plain.rows == 2
    assert stored()["user"].tolist() == [2, 5, 0, 1, 4, 6, 3]
    assert ingest(BY_DAY, order_by=["session", "step"]).days_written == ()
    assert ingest(BY_DAY).days_written == (DAY1, DAY2)
    assert stored()["user"].tolist() == [0, 1, 2, 4, 5, 3, 6]


@pytest.mark.parametrize(
    ("column", "sentence"),
    [
        ("sesion", "ingest.order_by 'sesion': expected a column of the table, got none of that name. Closest: session"),
        ("liked", "ingest.order_by 'liked': expected one value a row, got a list. Name another column."),
    ],
)
def test_columns_that_rows_cannot_be_sorted_by(ingest: Any, put: Any, column: str, sentence: str) -> None:
    put("rows.parquet", user=[1], label=[0], session=[2], liked=pa.array([[1, 2]]))
    with pytest.raises(ConfigError) as error:
        ingest(FIXED, order_by=[column])
    assert str(error.value).startswith(sentence)


# Bad labels


BAD = {
    None: "label is null",
    "2": "label is not 0 or 1",
    "-1": "label is not 0 or 1",
    "x": "label is not a number",
    "nan": "label is null",
}


@pytest.mark.parametrize(
    ("labels", "found", "key"),
    [
        (["yes", "no"], "20 of 20 (label is not a number)", "source.positive=yes"),
        ([1, -1], "10 of 20 (label is not 0 or 1)", "source.positive=1"),
    ],
)
def test_other_labels_are_refused_with_the_key_that_reads_them(
    ingest: Any, stored: Any, put: Any, labels: list[Any], found: str, key: str
) -> None:
    put("rows.parquet", user=list(range(20)), label=labels * 10)
    with pytest.raises(DataError) as error:
        ingest(FIXED)
    assert str(error.value).endswith(
        f"got {found}. Name the value that counts as 1, such as {key}. "
        "Correct the source, or raise ingest.max_quarantined_share."
    )
    ingest({**FIXED, "positive": labels[0]})
    assert stored()["label"].tolist() == [1, 0] * 10


def test_bad_labels_are_quarantined_with_their_reason(ingest: Any, stored: Any, put: Any, warehouse: Warehouse) -> None:
    labels = [*BAD, *["0", "1", "1.0", "0.0"] * 5]
    put("rows.parquet", user=list(range(25)), label=labels, tags=[[i] for i in range(25)])
    result = ingest(FIXED, max_quarantined_share=0.2)
    assert result.rows == 20
    assert dict(result.quarantined) == {"label is null": 2, "label is not a number": 1, "label is not 0 or 1": 2}
    assert stored()["user"].tolist() == list(range(5, 25))
    assert stored()["label"].tolist() == [0, 1, 1, 0] * 5
    bad = stored("events_quarantine")
    assert bad["day"].tolist() == [DAY1] * 5
    assert bad["reason"].tolist() == list(BAD.values())
    originals = [json.loads(text) for text in bad["source_row"]]
    assert [(row["user"], row["tags"], row["__raw_label"]) for row in originals] == [
        (i, [i], key) for i, key in enumerate(BAD)
    ]
    put("rows.parquet", user=[1, 2], label=["0", "1"])  # repaired
    assert dict(ingest(FIXED).quarantined) == {}
    assert len(stored("events_quarantine")) == 0


def test_each_row_of_each_file_is_accounted_for(ingest: Any, stored: Any, tmp_path: Path) -> None:
    """Files of three formats with rows of several days, of which one was written before and one breaks a rule."""
    random = np.random.default_rng(5)
    frames = {}
    for number in range(45):
        rows: int | dict[str, int] = int(random.integers(0, 9))
        frame = pd.DataFrame({
            "user": [f"{number}.{i}" for i in range(rows)], "label": random.choice([0, 1, 1, 7, None], rows),
            "date": random.choice([f"{DAY1}", f"{DAY2}", "2099-01-01"], rows, p=[0.2, 0.6, 0.2]), "num": 1.0,
        })  # fmt: skip
        path: Path | str = tmp_path / f"all/{number:02}.{'csv' if number < 2 else 'jsonl' if number < 4 else 'parquet'}"
        path.parent.mkdir(exist_ok=True)
        if path.suffix == ".csv":
            frame.to_csv(path, index=False)
        elif path.suffix == ".jsonl":
            frame.to_json(path, orient="records", lines=True)
        else:
            kinds = [("user", pa.string()), ("label", pa.int64()), ("date", pa.string()), ("num", pa.float64())]
            pq.write_table(pa.Table.from_pandas(frame, pa.schema(kinds), preserve_index=False), path)
        frames[str(path)] = frame
    source = {"path": "all/*", "day_column": "date", "unlabelled": "skip"}
    ingest(source, dense=["num"], only=[DAY1], max_quarantined_share=0.9)
    result = ingest(source, dense=["num"], max_quarantined_share=0.9)
    files, total = result.files, Counter[str]()
    assert files is not None
    for path, frame in frames.items():
        new = frame[frame["date"] != f"{DAY1}"]
        good = new["label"].isin([0, 1])
        rows = {
            "rows": len(frame), "written": int((good & (new["date"] == f"{DAY2}")).sum()),
            "quarantined": int((new["label"] == 7).sum()), "left_out": int(new["label"].isna().sum()),
            "held": int((good & (new["date"] != f"{DAY2}")).sum()), "other_days": len(frame) - len(new),
        }  # fmt: skip
        total.update(rows)
        if path in files.incomplete:
            assert files.incomplete[path].model_dump() == rows
            assert rows["quarantined"] + rows["left_out"] > 0
    assert (files.count, files.total.model_dump()) == (45, dict(total))
    assert len(files.incomplete) == 20
    worst = {path: int((~new[new["date"] != f"{DAY1}"]["label"].isin([0, 1])).sum()) for path, new in frames.items()}
    assert [*files.incomplete] == sorted(worst, key=lambda path: (-worst[path], path))[:20]
    assert files.unlisted == sum(bad > 0 for bad in worst.values()) - 20
    bad = stored("events_quarantine")
    expected = {json.loads(row)["user"].split(".")[0] for row in bad["source_row"]}
    assert {Path(path).stem.lstrip("0") or "0" for path in bad["source_file"]} == expected


def test_too_many_bad_labels_stop_all_days_unwritten(ingest: Any, stored: Any, put: Any, warehouse: Warehouse) -> None:
    put("1.parquet", user=[1], label=[0], date=[DAY1])
    before = ingest(BY_DAY).snapshot
    put("1.parquet", user=[1, 2], label=[0, 1], date=[DAY1, DAY1])
    put("2.parquet", user=list(range(4)), label=[0, None, 7, 1], date=[DAY2] * 4)
    with pytest.raises(DataError) as error:
        ingest(BY_DAY, max_quarantined_share=0.49)
    assert str(error.value) == (
        "labels of 1 day(s), worst 2024-01-02: expected at most 49.00% bad rows a day, and at least one good row, "
        "got 2 of 4 (label is not 0 or 1, label is null). Correct the source, or raise ingest.max_quarantined_share."
    )
    assert warehouse.current("events") == before
    assert not warehouse.has_table("events_quarantine")
    assert ingest(BY_DAY, max_quarantined_share=0.5).rows == 4


def test_a_day_without_a_good_row_is_refused(ingest: Any, put: Any) -> None:
    put("rows.parquet", user=[1], label=[5])
    with pytest.raises(DataError, match="and at least one good row, got 1 of 1"):
        ingest(FIXED, max_quarantined_share=1.0)


# Columns


def test_what_rows_do_not_have_of_their_files_is_said(ingest: Any, stored: Any, put: Any) -> None:
    """The index of pandas, folders of other engines, a name that no file has, columns of side tables."""
    columns = {"user": [1, 2], "label": [0, 1], "__index_level_0__": [7, 8], "__key": [1, 2], "__file": ["x", "y"]}
    put("day=2024-01-01/country=us/rows.parquet", **columns)
    put("users.parquet", user=[1, 2], age=[30, 40], __fragment=[1, 1])
    source = {"path": "*/*/rows.parquet", "day_column": "day", "rename": {"usr": "person"}}
    said: list[str] = []
    ingest(
        source | {"lookups": [{"path": "users.parquet", "on": "user"}]}, warn=said.append, checks={"one_label": "off"}
    )
    assert said == [
        "columns left out of source.lookups 'users.parquet', whose names begin with __: __fragment",
        "columns left out, whose names begin with __ (source.rename gives them others): __index_level_0__, __key, __file",
        "source.rename names columns that these files do not have: usr",
        "folders name values that are no columns of the rows: country",
    ]
    assert sorted(stored().columns) == ["age", "day", "label", "user"]
    ingest(source | {"rename": {"__key": "key"}}, warn=said.append, checks={"one_label": "off", "losses": "off"})
    assert stored()["key"].tolist() == [1, 2]


def test_a_column_name_that_the_warehouse_does_not_take(ingest: Any, put: Any, warehouse: Warehouse) -> None:
    put("rows.parquet", **{"user": [1], "label": [0], 'a"b': [1]})
    put("more.parquet", **{"user": [1], "label": [0], "hours-per-week": [40]})
    with pytest.raises(ConfigError) as error:
        ingest({"path": ["rows.parquet", "more.parquet"], "day": "2024-01-01"})
    assert str(error.value) == (
        """columns of the source: expected names of letters, digits and _, got 'a"b', 'hours-per-week'. """
        """Give them other names: source.rename={"a\\"b": "a_b", "hours-per-week": "hours_per_week"}."""
    )
    assert not warehouse.has_table("events")


def test_renamed_columns_have_their_new_names_everywhere(ingest: Any, stored: Any, put: Any) -> None:
    put("rows.parquet", **{"user id": [1, 2], "to buy?": [0, 1], "the-day": [DAY1, DAY2], "own": [5, 6]})
    put("users.parquet", **{"user id": [1, 2], "home town": ["a", "b"]})
    names = {"user id": "user", "to buy?": "label", "the-day": "date", "home town": "town"}
    source = {"path": "rows.parquet", "day_column": "date", "rename": names}
    ingest(source | {"lookups": [{"path": "users.parquet", "on": ["user"]}]}, sparse=["user", "town"])
    frame = stored()
    assert set(frame.columns) == {"user", "label", "date", "own", "town", "day"}
    assert frame[["user", "label", "town", "own"]].to_numpy().tolist() == [[1, 0, "a", 5], [2, 1, "b", 6]]
    with pytest.raises(
        ConfigError, match=r"source.rename, files of source.path: expected names that no column has, got 'own'"
    ):
        ingest(source | {"rename": names | {"user id": "own"}})
    with pytest.raises(ConfigError, match=r"source.rename 'own': expected a name of letters, digits and _"):
        ingest(source | {"rename": {"own": "o-n"}})


# The configuration


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        (
            {"day": "2024-01-01"},
            "source: expected one of `path`, `table` and `generator`, got none of them. Give exactly one.",
        ),
        (
            {"path": "a", "generator": {}, "day_column": "event_time", "outcomes": {}},
            "source: expected one of `path`, `table` and `generator`, got `path` and `generator`. Give exactly one.",
        ),
        ({"path": "a"}, "source: expected either `day_column` or `day`, got neither. Give exactly one."),
        (
            {"path": "a", "day": "2024-01-01", "day_column": "d"},
            "source: expected either `day_column` or `day`, got both. Give exactly one.",
        ),
        (
            {"generator": {}, "day_column": "event_time"},
            "source: expected `outcomes` together with `generator`, got none. Add `outcomes: {}`.",
        ),
        (
            {"path": "a", "day": "2024-01-01", "outcomes": {}},
            "source.outcomes: expected `path` of the outcome log, got none. Add it.",
        ),
    ],
)
def test_a_source_that_contradicts_itself(source: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        SourceConfig.model_validate(source)
    assert str(error.value) == sentence


# Size


MEASURED = """
import pathlib, sys
from pipeline.extraction.config import IngestConfig, SourceConfig
from pipeline.extraction.extract import extract
from pipeline.extraction.opening import SourceContext
from pipeline.transforms.schema import FeatureSchema
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse

folder, rows_per_day = pathlib.Path(sys.argv[1]), int(sys.argv[2])
source = SourceConfig.model_validate({
    "generator": {"days": 3, "rows_per_day": rows_per_day}, "outcomes": {}, "day_column": "event_time",
})
hashed = [{"kind": "sigrid_hash", "size": 100}]
schema = FeatureSchema.model_validate({
    "dense": [{"columns": ["num_*"]}], "sparse": [{"columns": ["cat_*", "list_*"], "transforms": hashed}],
})
warehouse = Warehouse(WarehouseConfig(), folder / "home")
context = SourceContext(source, schema, warehouse, "events", folder, folder / "logs", memory_bytes=256 << 20)
result = extract(context, IngestConfig())
[peak] = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]  # ru_maxrss counts the parent's, too
print(result.rows, peak.split()[1])
"""


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_log(tmp_path: Path) -> None:
    def rows_and_peak(rows_per_day: int) -> tuple[int, int]:
        folder = tmp_path / str(rows_per_day)
        command = [sys.executable, "-c", MEASURED, str(folder), str(rows_per_day)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        run = subprocess.run(command, check=True, capture_output=True, text=True, env=environment, timeout=280)
        rows, peak = map(int, run.stdout.split())
        return rows, peak

    small, large = rows_and_peak(200_000), rows_and_peak(500_000)  # the writer holds about 260,000 rows at once
    assert (small[0], large[0]) == (600_000, 1_500_000)
    assert large[1] < 1.3 * small[1]


@pytest.mark.parametrize("size", [None, 300 << 20])
def test_duckdb_has_a_quarter_of_the_memory_or_what_the_config_says(
    tmp_path: Path, put: Any, warehouse: Warehouse, size: int | None
) -> None:
    put("rows.parquet", user=[1], label=[0])
    source = SourceConfig.model_validate(FIXED)
    context = SourceContext(source, LabelColumns(), warehouse, "events", tmp_path, tmp_path / "logs", memory_bytes=size)
    with SourceReader(context) as reader, reader.open(reader.files) as rows:
        [(memory, threads)] = rows.connection.sql(
            "SELECT current_setting('memory_limit'), current_setting('threads')"
        ).fetchall()
    cores = len(os.sched_getaffinity(0))
    if size is not None:
        assert (memory, threads) == ("300.0 MiB", min(2, cores))
    else:
        units = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}
        number, unit = memory.split()
        assert float(number) * units[unit] == pytest.approx(psutil.virtual_memory().total / 4, rel=0.05)
        assert threads == cores


def test_too_little_memory_names_the_key(ingest: Any, put: Any) -> None:
    put("rows.parquet", user=list(range(50_000)), label=[0, 1] * 25_000)
    with pytest.raises(DataError, match=r"rows that fit into .*memory.* Raise ingest\.memory_bytes"):
        ingest(FIXED, memory_bytes=1_000_000)


def test_lists_of_floats_are_measured_and_checked(ingest: Any, put: Any, warehouse: Warehouse) -> None:
    days = [datetime.date(2024, 1, 1 + i // 4) for i in range(24)]
    scores = pa.array([[0.5] * (i % 4) for i in range(24)], pa.list_(pa.float64()))
    put("rows.parquet", user=list(range(24)), label=[0, 1] * 12, date=days, scores=scores)
    result = ingest({"path": "rows.parquet", "day_column": "date"})
    assert (len(result.days_written), result.checked.findings) == (6, ())

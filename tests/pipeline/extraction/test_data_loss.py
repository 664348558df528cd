"""A day that would get poorer is held back with what it would lose. Days are open until their labels are final."""

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from pipeline.data.day_notes import InputFiles, day_notes, open_days
from pipeline.data.formats.files import stamp
from pipeline.data.profile import profile_name
from pipeline.errors import DataError
from pipeline.extraction.extract import IngestResult
from storage.reader import SnapshotRef
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAYS = [datetime.date(2024, 1, day) for day in range(1, 7)]
LOGS = {
    "path": "features/*.parquet",
    "day_column": "shown",
    "outcomes": {"path": "outcomes/*.parquet", "feature_time": "shown", "window_seconds": 3_600},
}
PLAIN = {"path": "rows/*.parquet", "day_column": "date"}


def put_logs(put: Any, days: list[datetime.date], rows: int = 100) -> None:
    """A file of impressions and a file of outcomes a day. A quarter of the impressions have an outcome."""
    for day in days:
        at = pd.Timestamp(day) + pd.to_timedelta(np.arange(rows) * 800, unit="s")
        keys = day.toordinal() * rows + np.arange(rows)
        put(f"features/{day}.parquet", impression_id=keys, shown=at, user=np.arange(rows) % 7)
        put(f"outcomes/{day}.parquet", impression_id=keys[::4], outcome_time=at[::4] + pd.Timedelta(minutes=5))


def put_hours(put: Any, day: datetime.date, hours: range, **columns: Any) -> None:
    """A file of 50 rows an hour."""
    for hour in hours:
        label = [int(i % 5 == 0) for i in range(50)]
        put(f"rows/{day}-{hour:02}.parquet", date=[day] * 50, user=list(range(50)), label=label, **columns)


def losses(result: IngestResult) -> list[str]:
    """The findings, without the sentence about the day."""
    return [f"{one.outcome} {one.day} {one.column or ''}: {one.expected}, got {one.got}" for one in result.checked.findings if one.rule == "losses"]  # fmt: skip


def rows_of(warehouse: Warehouse) -> dict[datetime.date, int]:
    return warehouse.day_rows(warehouse.current("events"))


def rate_of(stored: Any, day: datetime.date) -> float:
    frame = stored()
    return float(frame[frame["day"] == day]["label"].mean())


# What a day would lose


@pytest.mark.slow
def test_days_that_lose_their_outcome_files_are_held(
    ingest: Any, stored: Any, put: Any, warehouse: Warehouse, tmp_path: Path
) -> None:
    put_logs(put, DAYS)
    ingest(LOGS)
    before = warehouse.current("events")
    for day in DAYS[:3]:
        (tmp_path / "outcomes" / f"{day}.parquet").unlink()
    result = ingest(LOGS)
    assert (result.days_written, result.days_held, result.snapshot) == ((), tuple(DAYS[:3]), before)
    assert losses(result)[:3] == [
        "quarantine 2024-01-01 : 1 outcome files, as when the table got the day, got 0, without 2024-01-01.parquet",
        "quarantine 2024-01-01 : at least 25 rows with label 1 (label rate 0.2500), as in the table, "
        "got 0 (label rate 0.0000)",
        "quarantine 2024-01-02 : 1 outcome files, as when the table got the day, got 0, without 2024-01-02.parquet",
    ]
    assert rate_of(stored, DAYS[0]) == 0.25
    assert ingest(LOGS).days_held == tuple(DAYS[:3]), "nothing has changed"
    forced = ingest(LOGS, only=[DAYS[0]], force=True)
    assert (forced.days_written, forced.days_held) == ((DAYS[0],), ())
    assert losses(forced)[0].startswith("warn 2024-01-01 : 1 outcome files")
    assert (rate_of(stored, DAYS[0]), rate_of(stored, DAYS[1])) == (0.0, 0.25)
    put_logs(put, DAYS[:3])
    assert ingest(LOGS).days_written == tuple(DAYS[:3])
    assert rate_of(stored, DAYS[0]) == 0.25


@pytest.mark.parametrize("profile", [True, False])
def test_a_day_that_loses_files_and_rows_is_held(
    ingest: Any, put: Any, warehouse: Warehouse, tmp_path: Path, profile: bool
) -> None:
    for day in DAYS[:2]:
        put_hours(put, day, range(6))
    ingest(PLAIN, profile=profile)
    for hour in range(1, 6):
        (tmp_path / "rows" / f"{DAYS[0]}-{hour:02}.parquet").unlink()
    result = ingest(PLAIN, profile=profile)
    assert (result.days_written, result.days_held, result.days_skipped) == ((), (DAYS[0],), (DAYS[1],))
    assert losses(result)[:2] == [
        "quarantine 2024-01-01 : 6 files, as when the table got the day, got 1, without 2024-01-01-01.parquet, "
        "2024-01-01-02.parquet, 2024-01-01-03.parquet and 2 more",
        "quarantine 2024-01-01 : at least 300 rows, as in the table, got 50",
    ]
    assert rows_of(warehouse) == {DAYS[0]: 300, DAYS[1]: 300}
    with pytest.raises(DataError) as error:
        ingest(PLAIN, profile=profile, checks={"losses": "fail"}, force=False, only=[DAYS[0]], order_by=["user"])
    assert str(error.value).startswith("day 2024-01-01, rule losses: expected 6 files, as when the table got the day")
    assert str(error.value).endswith(" Restore the input, or write the day as it is now with force=true.")
    assert ingest(PLAIN, profile=profile, checks={"losses": "warn"}, order_by=["user"]).days_held == ()
    assert rows_of(warehouse) == {DAYS[0]: 50, DAYS[1]: 300}


@pytest.mark.one_in(3)
@pytest.mark.parametrize("profiles", [(False, False), (True, False), (False, True)])
def test_a_day_that_loses_labels_is_held_whether_or_not_columns_are_measured(
    ingest: Any, put: Any, warehouse: Warehouse, profiles: tuple[bool, bool]
) -> None:
    before, now = profiles
    put_logs(put, DAYS[:3])
    ingest(LOGS, profile=before)
    frame = pd.read_parquet(warehouse.home.parent / f"outcomes/{DAYS[0]}.parquet")
    put(f"outcomes/{DAYS[0]}.parquet", **{name: frame[name][:12] for name in frame})
    result = ingest(LOGS, profile=now)
    assert (result.days_held, losses(result)) == (
        (DAYS[0],),
        ["quarantine 2024-01-01 : at least 25 rows with label 1 (label rate 0.2500), as in the table, got 12 (label rate 0.1200)"],
    )  # fmt: skip


def test_a_day_that_loses_values_is_held_with_the_columns(ingest: Any, put: Any, warehouse: Warehouse) -> None:
    full = {"price": [1.5] * 50, "size": list(range(50)), "kind": ["a"] * 50}
    put_hours(put, DAYS[0], range(2), **full)
    ingest(PLAIN, dense=["price"])
    half = {"price": [1.5] * 25 + [None] * 25, "size": pa.nulls(50, pa.int64())}
    put_hours(put, DAYS[0], range(2), **half)
    result = ingest(PLAIN, dense=["price"])
    assert (result.days_held, losses(result)) == (
        (DAYS[0],),
        [
            "quarantine 2024-01-01 kind: values in 100.0% of the rows, as in the table, got 0.0%",
            "quarantine 2024-01-01 price: values in 100.0% of the rows, as in the table, got 50.0%",
            "quarantine 2024-01-01 size: values in 100.0% of the rows, as in the table, got 0.0%",
        ],
    )
    skipped = ingest(PLAIN, dense=["price"], checks={"skip": ["price", "size", "kind"]}, order_by=["user"])
    assert skipped.days_written == (DAYS[0],)


def test_a_day_that_grows_or_stays_as_rich_is_written(ingest: Any, put: Any, tmp_path: Path) -> None:
    put_hours(put, DAYS[0], range(2))
    ingest(PLAIN)
    put_hours(put, DAYS[0], range(1, 4))
    assert ingest(PLAIN).days_written == (DAYS[0],)
    label = [int(i % 5 == 0) for i in range(49)]
    put(f"rows/{DAYS[0]}-00.parquet", date=[DAYS[0]] * 49, user=list(range(49)), label=label)
    assert losses(ingest(PLAIN)) == ["quarantine 2024-01-01 : at least 200 rows, as in the table, got 199"]
    assert ingest(PLAIN, checks={"loss_share": 0.01}, order_by=["user"]).days_written == (DAYS[0],)


def test_a_config_with_other_labels_loses_nothing_but_files(ingest: Any, stored: Any, put: Any, tmp_path: Path) -> None:
    put_logs(put, DAYS[:3])
    assert ingest(LOGS).days_outdated == ()
    (tmp_path / "outcomes" / f"{DAYS[0]}.parquet").unlink()
    shorter = LOGS | {"outcomes": LOGS["outcomes"] | {"window_seconds": 60}}  # type: ignore[operator]
    late = {"unmatched": "off"}
    result = ingest(shorter, checks=late)
    assert (result.days_written, result.days_held) == ((DAYS[1], DAYS[2]), (DAYS[0],))
    assert losses(result) == [
        "quarantine 2024-01-01 : the outcome files that the table got the day from, got a source without "
        "2024-01-01.parquet"
    ]
    assert (rate_of(stored, DAYS[0]), rate_of(stored, DAYS[1])) == (0.25, 0.0)
    assert (result.days_outdated, ingest(shorter, checks=late).days_outdated) == ((DAYS[0],), (DAYS[0],))
    assert ingest(shorter, checks=late, only=[DAYS[0]], force=True).days_outdated == ()


def test_the_same_files_elsewhere_may_lose_nothing(ingest: Any, put: Any, tmp_path: Path) -> None:
    """Paths do not say what rows and labels are: the same files in another folder make no day due."""
    put_logs(put, DAYS[:3])
    ingest(LOGS)
    (tmp_path / "features").rename(tmp_path / "moved")
    moved = ingest(LOGS | {"path": "moved/*.parquet"})
    assert (moved.days_written, moved.days_outdated) == ((), ())
    put_logs(put, DAYS[:1], rows=60)
    result = ingest(LOGS | {"path": ["moved/2024-01-0[23].parquet", "features/*.parquet"]})
    assert (result.days_held, losses(result)[0]) == (
        (DAYS[0],), "quarantine 2024-01-01 : at least 100 rows, as in the table, got 60"
    )  # fmt: skip


def test_a_changed_column_of_days_is_no_loss(ingest: Any, put: Any) -> None:
    sent, seen = ([pd.Timestamp(DAYS[0])] * count + [pd.Timestamp(DAYS[1])] * (60 - count) for count in (30, 10))
    put("rows/all.parquet", sent=sent, seen=seen, user=range(60), label=[0, 1] * 30)
    ingest(PLAIN | {"day_column": "sent"})
    result = ingest(PLAIN | {"day_column": "seen"})
    assert (result.days_written, losses(result)) == ((DAYS[0], DAYS[1]), [])


def test_a_day_whose_input_is_restored_leaves_the_held_ones(
    ingest: Any, stored: Any, put: Any, warehouse: Warehouse, tmp_path: Path
) -> None:
    put_hours(put, DAYS[0], range(2))
    put_hours(put, DAYS[1], range(2))
    ingest(PLAIN)
    away = tmp_path / f"{DAYS[0]}-01.parquet"
    (tmp_path / "rows" / away.name).rename(away)
    assert (ingest(PLAIN).days_held, len(stored("events_held"))) == ((DAYS[0],), 50)
    away.rename(tmp_path / "rows" / away.name)
    restored = ingest(PLAIN)
    assert (restored.days_written, restored.days_held, restored.days_skipped) == ((), (), tuple(DAYS[:2]))
    assert len(stored("events_held")) == 0


def test_a_day_that_was_held_is_checked_again_by_other_rules_alone(
    ingest: Any, put: Any, warehouse: Warehouse, tmp_path: Path
) -> None:
    put_hours(put, DAYS[0], range(4))
    ingest(PLAIN)
    (tmp_path / "rows" / f"{DAYS[0]}-03.parquet").unlink()
    put_hours(put, DAYS[0], range(4, 5))
    put(f"rows/{DAYS[0]}-04.parquet", date=[DAYS[0]] * 40, user=list(range(40)), label=[int(i % 5 == 0) for i in range(40)])  # fmt: skip
    assert ingest(PLAIN).days_held == (DAYS[0],)
    held = warehouse.current("events_held")
    assert (ingest(PLAIN).days_held, warehouse.current("events_held")) == ((DAYS[0],), held), "nothing has changed"
    assert ingest(PLAIN, checks={"loss_share": 0.1}).days_written == (DAYS[0],)


def test_refused_rows_are_not_lost(ingest: Any, put: Any) -> None:
    """The quarantine table has them, and their share is limited."""
    put_hours(put, DAYS[0], range(2))
    ingest(PLAIN)
    put(f"rows/{DAYS[0]}-00.parquet", date=[DAYS[0]] * 50, user=list(range(50)), label=[7] + [int(i % 5 == 0) for i in range(1, 50)])  # fmt: skip
    result = ingest(PLAIN, max_quarantined_share=0.02)
    assert (losses(result), result.days_written, result.rows) == ([], (DAYS[0],), 99)


def test_a_day_of_an_earlier_version_is_compared_by_rows_and_statistics(
    ingest: Any, put: Any, warehouse: Warehouse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_logs(put, DAYS[:2])
    with monkeypatch.context() as earlier:
        earlier.setattr("pipeline.extraction.extract.notes_of", lambda days: {})
        ingest(LOGS)
    assert day_notes(warehouse, warehouse.current("events")) == {}
    put(f"outcomes/{DAYS[0]}.parquet", impression_id=[0], outcome_time=[pd.Timestamp(DAYS[0])])
    assert losses(ingest(LOGS)) == [
        "quarantine 2024-01-01 : at least 25 rows with label 1 (label rate 0.2500), as in the table, "
        "got 0 (label rate 0.0000)"
    ]


def test_statistics_of_other_rows_are_not_compared_with(ingest: Any, put: Any, warehouse: Warehouse) -> None:
    """An ingest that was killed between rows and statistics leaves those of the rows before."""
    put_hours(put, DAYS[0], range(1), size=list(range(50)))
    ingest(PLAIN)
    schema = warehouse.table(profile_name("events")).schema().as_arrow()
    stale = warehouse.reader(warehouse.current(profile_name("events")), schema.names)
    batches = [batch for fragment in stale.fragments() for batch in stale.batches(fragment)]
    count = sum(batch.num_rows for batch in batches)
    replace_days(warehouse, profile_name("events"), {DAYS[0]: "another"}, batches[0].schema, batches, count)
    put_hours(put, DAYS[0], range(1))
    assert losses(ingest(PLAIN)) == []


def test_many_files_are_counted_and_some_are_named(put: Any, tmp_path: Path) -> None:
    for number in range(60):
        put(f"many/{number:02}.parquet", user=[number])
    files = [stamp(path) for path in sorted((tmp_path / "many").iterdir())]
    found = InputFiles.of(files)
    assert (found.count, len(found.stamps), found.stamps[0][0]) == (60, 50, "00.parquet")
    assert found.bytes == sum(path.stat().st_size for path in (tmp_path / "many").iterdir())
    assert InputFiles.of(files[:3]).names_missing_in(InputFiles.of(files[1:4])) == ["00.parquet"]
    assert InputFiles.of(files[:3]).names_missing_in(found) == [], "the other list does not name all its files"


# Side tables


@pytest.mark.slow
def test_a_changed_side_table_writes_past_days_only_if_it_may(ingest: Any, stored: Any, put: Any) -> None:
    source = PLAIN | {"lookups": [{"path": "users.parquet", "on": ["user"]}]}
    put_hours(put, DAYS[0], range(1))
    put("users.parquet", user=list(range(50)), clicks=[1] * 50)
    ingest(source)
    put("users.parquet", user=list(range(50)), clicks=[2] * 50)
    put_hours(put, DAYS[1], range(1))
    result = ingest(source)
    assert (result.days_written, result.days_skipped) == ((DAYS[1],), (DAYS[0],))
    assert dict(result.stale_lookups) == {"users.parquet": 1}
    assert stored().groupby("day")["clicks"].first().to_dict() == {DAYS[0]: 1, DAYS[1]: 2}
    refreshed = PLAIN | {"lookups": [{"path": "users.parquet", "on": ["user"], "refresh": "past_days"}]}
    assert ingest(refreshed).days_written == (DAYS[0], DAYS[1])
    put("users.parquet", user=list(range(50)), clicks=[3] * 50)
    assert (ingest(refreshed).days_written, ingest(refreshed).days_written) == ((DAYS[0], DAYS[1]), ())
    put("users.parquet", user=list(range(50)), clicks=[4] * 50)
    forced = ingest(source, force=True)
    assert (forced.days_written, dict(forced.stale_lookups)) == ((DAYS[0], DAYS[1]), {})


# Open days


def is_open(warehouse: Warehouse, snapshot: SnapshotRef | None = None) -> list[datetime.date]:
    return sorted(open_days(warehouse, snapshot or warehouse.current("events")))


def test_a_day_is_open_until_the_outcome_log_covers_its_last_window(
    ingest: Any, stored: Any, put: Any, warehouse: Warehouse
) -> None:
    put_logs(put, DAYS[:2])
    first = ingest(LOGS)
    assert first.days_open == (DAYS[1],)
    assert {day: rows.open for day, rows in first.by_day.items()} == {DAYS[0]: False, DAYS[1]: True}
    assert is_open(warehouse) == [DAYS[1]]
    assert ingest(LOGS).days_written == (), "nothing has changed"
    late = pd.Timestamp(DAYS[1]) + pd.Timedelta(hours=22, seconds=6)
    put("outcomes/late.parquet", impression_id=[DAYS[1].toordinal() * 100 + 99], outcome_time=[late])
    again = ingest(LOGS)
    assert (again.days_written, again.days_open) == ((DAYS[1],), (DAYS[1],)), "one more label, and still open"
    end = pd.Timestamp(DAYS[1]) + pd.Timedelta(seconds=99 * 800 + 3_600)
    put("outcomes/end.parquet", impression_id=[-1], outcome_time=[end - pd.Timedelta(seconds=1)])
    assert ingest(LOGS).days_open == (DAYS[1],)
    put("outcomes/next.parquet", impression_id=[-1], outcome_time=[end])
    closed = ingest(LOGS)
    assert (closed.days_written, closed.days_open, is_open(warehouse)) == ((DAYS[1],), (), [])
    assert is_open(warehouse, first.snapshot) == [DAYS[1]], "as it was in that snapshot"
    assert ingest(LOGS).days_written == ()


def test_a_day_without_its_outcome_log_is_open(ingest: Any, put: Any, warehouse: Warehouse, tmp_path: Path) -> None:
    put_logs(put, DAYS[:3])
    (tmp_path / "outcomes" / f"{DAYS[2]}.parquet").unlink()
    assert ingest(LOGS).days_open == (DAYS[1], DAYS[2])
    assert is_open(warehouse) == [DAYS[1], DAYS[2]]


def test_the_longest_window_of_all_labels_decides(ingest: Any, put: Any) -> None:
    put_logs(put, DAYS[:3])
    labels = {"label": {"window_seconds": 600}, "late": {"window_seconds": 86_400}}
    source = LOGS | {"outcomes": LOGS["outcomes"] | {"labels": labels}}  # type: ignore[operator]
    assert ingest(source).days_open == (DAYS[1], DAYS[2])


def test_an_outcome_of_the_future_closes_no_day(ingest: Any, put: Any) -> None:
    put_logs(put, DAYS[:1])
    put("outcomes/wrong.parquet", impression_id=[-1], outcome_time=[pd.Timestamp("2199-01-01")])
    assert ingest(LOGS).days_open == (DAYS[0],)


@pytest.mark.parametrize("kind", ["samples", "generated"])
def test_samples_and_generated_logs_have_no_open_day(ingest: Any, put: Any, warehouse: Warehouse, kind: str) -> None:
    put_hours(put, DAYS[0], range(1))
    generated = {"generator": {"days": 2, "rows_per_day": 200}, "outcomes": {}, "day_column": "event_time"}
    result = ingest(PLAIN if kind == "samples" else generated, sparse=["user" if kind == "samples" else "cat_user"])
    assert (result.days_open, is_open(warehouse)) == ((), [])

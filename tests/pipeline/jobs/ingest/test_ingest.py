"""Days from their ingest to the training: open days, and days without materialized columns."""

import datetime
import logging
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import duckdb
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.catalog.events import newest_events, read_events
from pipeline.config import load
from pipeline.data.day_notes import materialized_columns, open_days
from pipeline.data.joined.materialized import written_columns
from pipeline.data.joined.reader import open_reader
from pipeline.errors import ConfigError
from pipeline.jobs.ingest.ingest import enrich_days, ingest_days
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.workspace import Workspace
from storage.errors import ConflictError
from storage.warehouse import Warehouse
from tests.homes import read_rows

DAYS = [datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(4)]
NAMED = {"days": {"train": ["2025-03-01..2025-03-03"], "test": ["2025-03-04"]}}


def put_day(root: Path, number: int, outcomes: bool = True, side: bool = True, rows: int = 40) -> None:
    """A file of impressions and one of outcomes, and a file with a score for each user."""
    day = DAYS[number]
    at = pd.Timestamp(day) + pd.to_timedelta(np.arange(rows) * 2_000, unit="s")
    keys = number * 1_000 + np.arange(rows)
    logs = {"features": {"impression_id": keys, "event_time": at, "user": np.arange(rows) % 10}}
    logs |= {"outcomes": {"impression_id": keys[::3], "outcome_time": at[::3]}} if outcomes else {}
    logs |= (
        {"side": {"day": [day] * 10, "user": np.arange(10), "score": np.arange(10) + 100.0 * number}} if side else {}
    )
    for name, columns in logs.items():
        (root / name).mkdir(exist_ok=True)
        pq.write_table(pa.table(columns), root / name / f"{day}.parquet")


def workspace(root: Path, split: dict[str, Any] = NAMED, **joined: Any) -> Workspace:
    """With `joined`, the keys of a feature source, the config reads its column."""
    source = {"path": f"{root}/side/*.parquet", "on": "user", "day_column": "day"} | joined
    values = {
        "name": "beta", "home": str(root / "home"),
        "source": {
            "path": f"{root}/features/*.parquet", "day_column": "event_time",
            "outcomes": {"path": f"{root}/outcomes/*.parquet", "window_seconds": 3_600},
        },
        "features": {
            "dense": [{"columns": ["score"]}] if joined else [],
            "sparse": [{"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": 16}]}],
            "joined": [source] if joined else [],
        },
        "split": split, "model": {"interaction": "cat"},
    }  # fmt: skip
    return Workspace(load(values))


def scores(warehouse: Warehouse) -> dict[datetime.date, set[float | None]]:
    """Day -> tens of its scores, which tell the day that they are of."""
    frame = read_rows(warehouse, "beta", ["day", "score"]).to_pydict()
    found: dict[datetime.date, set[float | None]] = {}
    for day, score in zip(frame["day"], frame["score"], strict=True):
        found.setdefault(day, set()).add(None if score is None else score // 100)
    return found


@pytest.fixture(autouse=True)
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DLRM_HOME", raising=False)


# Open days


@pytest.mark.nightly
def test_an_open_day_is_trained_on_only_if_the_config_says_so(tmp_path: Path) -> None:
    for number in range(4):
        put_day(tmp_path, number)
    result = ingest_days(workspace(tmp_path), None, False)
    assert (result["days_open"], result["by_day"]["2025-03-04"]["open"]) == (["2025-03-04"], True)
    with pytest.raises(ConfigError, match=r"split, part 'test': expected closed days"):
        resolve_dataset(workspace(tmp_path), None)
    _, data = resolve_dataset(workspace(tmp_path, NAMED | {"open_days": True}), None)
    assert data["test"].selection.days == (DAYS[3],)
    hashed = {"hash": {"key": "user", "shares": {"train": 0.5, "test": 0.5}}}
    snapshot, data = resolve_dataset(workspace(tmp_path, hashed), None)
    assert data["train"].selection.days == tuple(DAYS[:3])
    warehouse = workspace(tmp_path).warehouse
    assert open_days(warehouse, snapshot) == {DAYS[3]}
    after = pd.Timestamp(DAYS[3]) + pd.Timedelta(days=2)
    pq.write_table(pa.table({"impression_id": [-1], "outcome_time": [after]}), tmp_path / "outcomes" / "later.parquet")
    closed = ingest_days(workspace(tmp_path), None, False)
    assert (closed["days_written"], closed["days_open"]) == (1, [])
    _, data = resolve_dataset(workspace(tmp_path), None)
    assert data["test"].selection.days == (DAYS[3],)
    _, before = resolve_dataset(workspace(tmp_path, hashed), snapshot.snapshot_id)
    assert before["train"].selection.days == tuple(DAYS[:3]), "the day was open in that snapshot"


# Materialized columns


@pytest.mark.nightly
def test_an_ingest_says_where_its_time_went(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for number in range(2):
        put_day(tmp_path, number)
    begun = time.perf_counter()
    with caplog.at_level(logging.INFO):
        done = ingest_days(workspace(tmp_path), None, False)
    whole = time.perf_counter() - begun
    assert list(done["seconds"]) == ["look", "plan", "check", "write", "commit"]
    assert 0.0 < sum(done["seconds"].values()) <= whole
    [line] = [line for line in caplog.messages if "rows/s over" in line]
    rate = float(line.split(": ")[1].split(" rows/s")[0].replace(",", ""))
    assert rate == pytest.approx(80 / sum(done["seconds"].values()), abs=1.0)
    caplog.clear()
    with caplog.at_level(logging.INFO):
        assert ingest_days(workspace(tmp_path), None, False)["status"] == "skipped"
    assert not [line for line in caplog.messages if "rows/s" in line]


def test_days_that_lack_a_stored_column_are_refused_until_it_is_back_filled(tmp_path: Path) -> None:
    for number in range(4):
        put_day(tmp_path, number)
    plain, stored = workspace(tmp_path), workspace(tmp_path, NAMED | {"open_days": True}, stored=True)
    ingest_days(plain, None, False)
    enrich_days(workspace(tmp_path, stored=False), None, DAYS[1], False)
    with pytest.raises(ConfigError) as error:
        resolve_dataset(stored, None)
    assert str(error.value) == (
        f"features.joined '{tmp_path}/side/*.parquet' (stored): expected score materialized in each day, got no "
        "materialization of 2 days, the first is 2025-03-03. Run `python -m flows.enrich` with this config."
    )
    enrich_days(stored, None, None, False)
    resolve_dataset(stored, None)
    (tmp_path / "side" / "2025-03-02.parquet").unlink()
    ingest_days(plain, DAYS[1], True)
    resolve_dataset(stored, None)  # the feature source has passed that day without a row
    (tmp_path / "side" / "2025-03-04.parquet").unlink()
    ingest_days(plain, DAYS[3], True)
    with pytest.raises(ConfigError, match="got no materialization of 2025-03-04"):
        resolve_dataset(stored, None)  # its rows may still come


@pytest.mark.slow
def test_an_ingest_back_fills_the_days_it_writes(tmp_path: Path) -> None:
    for number in range(2):
        put_day(tmp_path, number)
    stored = workspace(tmp_path, stored=True)
    first = ingest_days(stored, None, False)
    assert (first["days_written"], first["days_materialized"]) == (2, 2)
    assert newest_events(read_events(stored.warehouse, "beta"))["score"].state == "beta"
    assert scores(stored.warehouse) == {DAYS[0]: {0.0}, DAYS[1]: {1.0}}
    put_day(tmp_path, 2, side=False)
    late = ingest_days(stored, None, False)
    assert (late["days_written"], late["days_materialized"]) == (2, 1), "day 2 is new, and day 1 has closed"
    assert scores(stored.warehouse)[DAYS[2]] == {None}
    put_day(tmp_path, 2)
    again = ingest_days(stored, DAYS[2], False)
    assert (again["days_written"], again["days_materialized"]) == (1, 1)
    before = stored.warehouse.current("beta")
    assert ingest_days(stored, None, False)["status"] == "skipped"
    assert stored.warehouse.current("beta") == before
    assert scores(stored.warehouse) == {day: {float(number)} for number, day in enumerate(DAYS[:3])}
    assert open_days(stored.warehouse, before) == {DAYS[2]}, "a materialization keeps the day's note"


@pytest.mark.nightly
def test_an_ingest_leaves_days_from_before_the_source_was_stored_to_enrich(tmp_path: Path) -> None:
    for number in range(3):
        put_day(tmp_path, number)
    ingest_days(workspace(tmp_path), None, False)
    stored = workspace(tmp_path, stored=True)
    enrich_days(stored, DAYS[2], None, False)
    put_day(tmp_path, 3, side=False)
    late = ingest_days(stored, None, False)
    assert (late["days_written"], late["days_materialized"]) == (2, 1), "day 3 is new, and day 2 has closed"
    assert scores(stored.warehouse) == {DAYS[0]: {None}, DAYS[1]: {None}, DAYS[2]: {2.0}, DAYS[3]: {None}}
    side = pa.table({"day": [DAYS[3]] * 10, "user": np.arange(10), "score": np.arange(10) + 300.0})
    pq.write_table(side, tmp_path / "side" / f"{DAYS[3]}.parquet")
    again = ingest_days(stored, None, False)
    assert (again["days_written"], again["days_materialized"]) == (0, 1), "day 3 was to be materialized"
    assert scores(stored.warehouse) == {DAYS[0]: {None}, DAYS[1]: {None}, DAYS[2]: {2.0}, DAYS[3]: {3.0}}


@pytest.mark.nightly
def test_a_held_day_is_written_once_the_config_names_its_feature_source(tmp_path: Path) -> None:
    put_day(tmp_path, 0)
    plain, joined = workspace(tmp_path), workspace(tmp_path, stored=False)
    ingest_days(plain, None, False)
    enrich_days(joined, None, None, False)
    put_day(tmp_path, 0, rows=42)
    assert [ingest_days(plain, None, False)["held"] for _ in range(2)] == [["2025-03-01"]] * 2
    found = ingest_days(joined, None, False)
    assert (found["days_written"], found["days_materialized"], found["held"]) == (1, 1, [])
    assert plain.warehouse.day_rows(plain.warehouse.current("beta_held")) == {}


@pytest.mark.nightly
def test_a_day_that_would_lose_back_filled_columns_is_held(tmp_path: Path) -> None:
    for number in range(2):
        put_day(tmp_path, number)
    plain = workspace(tmp_path)
    ingest_days(plain, None, False)
    enrich_days(workspace(tmp_path, stored=False), None, None, False)
    put_day(tmp_path, 0, rows=42)
    held = ingest_days(plain, None, False)
    assert (held["days_written"], held["held"]) == (0, ["2025-03-01"])
    finding = held["checks"]["findings"][0]
    assert (finding["column"], finding["got"]) == ("score", "no feature source for them in features.joined")
    assert scores(plain.warehouse)[DAYS[0]] == {0.0}
    trial = ingest_days(workspace(tmp_path, stored=False), None, True)
    assert (trial["days_written"], trial["days_materialized"]) == (2, 2), (
        "a config that names the source fills it again"
    )
    assert scores(plain.warehouse) == {DAYS[0]: {0.0}, DAYS[1]: {1.0}}
    assert ingest_days(plain, None, True)["held"] == []
    assert materialized_columns(plain.warehouse, plain.warehouse.current("beta")) == {DAYS[0]: set(), DAYS[1]: set()}


def test_a_lost_feature_source_holds_the_days_that_need_it(tmp_path: Path) -> None:
    put_day(tmp_path, 0)
    stored = workspace(tmp_path, stored=True)
    ingest_days(stored, None, False)
    (tmp_path / "side" / "2025-03-01.parquet").unlink()
    put_day(tmp_path, 0, rows=42, side=False)
    assert ingest_days(stored, None, False)["held"] == ["2025-03-01"]


def test_with_a_lag_a_row_reads_an_earlier_day_of_the_source(tmp_path: Path) -> None:
    for number in range(3):
        put_day(tmp_path, number)
    lagging = workspace(tmp_path, NAMED | {"open_days": True}, lag_days=1, stored=True)
    ingest_days(lagging, None, False)
    assert scores(lagging.warehouse) == {DAYS[0]: {None}, DAYS[1]: {0.0}, DAYS[2]: {1.0}}
    put_day(tmp_path, 3, side=False)
    ingest_days(lagging, None, False)
    assert scores(lagging.warehouse)[DAYS[3]] == {2.0}
    resolve_dataset(lagging, None)  # the source begins after the first day
    with pytest.raises(ConfigError, match=r"expected `day_column` with `lag_days`, got none"):
        workspace(tmp_path, lag_days=1, day_column=None)


def test_two_backfills_at_once_keep_the_columns_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put_day(tmp_path, 0)
    ingest_days(workspace(tmp_path), None, False)
    pq.write_table(pa.table({"user": np.arange(10), "weight": np.arange(10)}), tmp_path / "weights.parquet")
    other = workspace(tmp_path, path=f"{tmp_path}/weights.parquet", day_column=None)
    write, others = Warehouse.set_properties, [other]

    def after_another(self: Warehouse, name: str, values: Mapping[str, str]) -> None:
        while others:  # another machine is between our reading and our writing
            enrich_days(others.pop(), None, None, False)
        write(self, name, values)

    monkeypatch.setattr(Warehouse, "set_properties", after_another)
    monkeypatch.setattr(Workspace, "lock", lambda self, work: nullcontext())
    with pytest.raises(ConflictError, match="rows written in the meantime"):
        enrich_days(workspace(tmp_path, stored=False), None, None, False)
    warehouse = other.warehouse
    assert written_columns(warehouse, "beta") == {"score", "weight"}


# Times with and without a zone


@pytest.mark.parametrize("zoned", [True, False])
def test_times_of_a_source_in_a_zone_are_compared_in_utc_and_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, zoned: bool
) -> None:
    """Wherever the machine is; DuckDB is the reference."""
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    try:
        put_day(tmp_path, 0, side=False)
        since = pd.to_datetime(["2025-03-01 00:00", "2025-03-01 05:00", "2025-03-01 11:10"] * 10)
        rows = {"user": np.repeat(np.arange(10), 3), "score": np.arange(30.0)}
        given = since.tz_localize("UTC").tz_convert("America/New_York") if zoned else since
        (tmp_path / "side").mkdir()
        pq.write_table(pa.table(rows | {"since": given}), tmp_path / "side" / "all.parquet")
        keys = {"day_column": None, "valid_from": "since", "as_of": "event_time"}
        space = workspace(
            tmp_path, {"hash": {"key": "user", "shares": {"train": 0.5, "test": 0.5}}, "open_days": True}, **keys
        )
        with caplog.at_level(logging.WARNING):
            ingest_days(space, None, False)
            resolve_dataset(space, None)
        snapshot = space.warehouse.current("beta")
        reader = open_reader(space.warehouse, snapshot, ["user", "event_time", "score"], None, space.feature_joins())
        got = pa.concat_tables([pa.table(reader.read(one)) for one in reader.fragments()]).to_pandas()
    finally:
        monkeypatch.undo()
        time.tzset()
    shown, side = got.drop(columns="score"), pd.DataFrame(rows | {"since": since})  # noqa: F841, DuckDB reads them
    expected = duckdb.sql(
        "SELECT side.score FROM shown ASOF JOIN side ON shown.user = side.user AND shown.event_time >= side.since"
        " ORDER BY shown.event_time"
    ).fetchall()
    assert got.sort_values("event_time")["score"].tolist() == [score for (score,) in expected]
    said = [line for line in caplog.messages if "time 'since' has a zone, as_of 'event_time' has none" in line]
    assert len(said) == zoned

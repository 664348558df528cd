"""Columns of feature sources in existing days: everything else stays, whatever happens meanwhile."""

import datetime
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.data.joined import materialized
from pipeline.data.joined.materialized import note_columns, require_materialized, written_columns
from pipeline.data.joined.reader import open_reader
from pipeline.data.joined.source import pin_sources
from pipeline.errors import ConfigError, ContractError, DataError, EmptyDatasetError
from pipeline.extraction.enrich import EnrichResult, enrich
from pipeline.transforms.joins import FeatureJoin
from storage.config import WarehouseConfig
from storage.errors import ConflictError
from storage.layout.rewrite import days_to_compact, rewrite_days
from storage.reader import SnapshotRef
from storage.snapshot.maintenance import expire
from storage.snapshot.writing import append_rows, replace_days
from storage.warehouse import Warehouse
from tests.homes import read_rows, write_days

DAYS = [datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(4)]
CONFIG = WarehouseConfig(row_group_rows=40, file_rows=100)
SOURCE = FeatureJoin(path="side/*.parquet", on="user", day_column="day")


def day_of(number: int, rows: int = 230) -> pa.Table:
    random = np.random.default_rng(number)
    return pa.table(
        {
            "day": pa.array([DAYS[number]] * rows, pa.date32()),
            "user": pa.array(random.integers(0, 50, rows), mask=random.random(rows) < 0.1),
            "num": pa.array(random.normal(size=rows), mask=random.random(rows) < 0.2),
            "text": pa.array([f"t{i}" for i in random.integers(0, 9, rows)]),
            "ids": pa.array([list(range(i)) for i in random.integers(0, 4, rows)], pa.list_(pa.int64())),
            "at": pa.array(random.integers(0, 1 << 50, rows), pa.timestamp("us")),
        }
    )


def ingest(warehouse: Warehouse, number: int, identity: str = "first", **columns: Any) -> SnapshotRef:
    return write_days(warehouse, day_of(number), name="t", identity=identity)


def save_side(root: Path, number: int, seed: int = 0) -> None:
    random = np.random.default_rng([number, seed])
    users = random.permutation(60)[:40]
    (root / "side").mkdir(exist_ok=True)
    side = {
        "day": [DAYS[number]] * 40,
        "user": users,
        "score": random.normal(size=40),
        "liked": [[int(i)] * 2 for i in users],
    }
    pq.write_table(pa.table(side), root / "side" / f"{number}.parquet")


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    """Four days. The feature source has rows of the first three."""
    warehouse = Warehouse(CONFIG, tmp_path / "home")
    for number in range(4):
        ingest(warehouse, number)
        if number < 3:
            save_side(tmp_path, number)
    return warehouse


def run(warehouse: Warehouse, *sources: FeatureJoin, **more: Any) -> EnrichResult:
    return enrich(sources or (SOURCE,), warehouse, "t", warehouse.home.parent, **more)


def files(warehouse: Warehouse, snapshot: SnapshotRef) -> dict[datetime.date, str]:
    return warehouse.day_names(snapshot)


def on_disk(home: Path) -> set[str]:
    return {str(path) for path in home.rglob("*.parquet")}


def test_a_materialization_writes_what_the_reader_joins_and_nothing_else(warehouse):
    before = warehouse.current("t")
    joined = pin_sources([SOURCE], warehouse.home.parent, warehouse)
    wanted = open_reader(warehouse, before, ["score", "liked"], None, joined)
    expected = pa.concat_tables([wanted.read(fragment) for fragment in wanted.fragments()])
    old = read_rows(warehouse, before)
    done = run(warehouse)
    assert (done.days_written, done.days_without, done.rows) == (tuple(DAYS[:3]), (DAYS[3],), 690)
    after = warehouse.current("t")
    assert read_rows(warehouse, after, old.column_names).equals(old)  # values and order
    assert read_rows(warehouse, after, ["score", "liked"]).cast(expected.schema).equals(expected)
    assert files(warehouse, after)[DAYS[3]] == files(warehouse, before)[DAYS[3]]
    assert read_rows(warehouse, before).equals(old)  # pinned
    assert warehouse.written_days("t") == dict.fromkeys(DAYS, "first")  # so that an ingest skips them
    found = [
        value for value in read_rows(warehouse, after, ["liked"]).column("liked")[:690].to_pylist() if value is not None
    ]
    assert done.matched_share == pytest.approx(len(found) / 690)
    assert done.bytes_written == sum(
        file.file_size_in_bytes for day in DAYS[:3] for file in warehouse.day_files(after)[day]
    )
    assert len(warehouse.table("t").snapshots()) == 4 + 1  # small days share a commit


def test_days_are_due_once_for_each_input_and_each_ingest(warehouse, tmp_path):
    run(warehouse, end=DAYS[1])
    assert run(warehouse).days_written == (DAYS[2],)
    again = run(warehouse)
    assert (again.days_written, again.days_skipped, again.days_without) == ((), tuple(DAYS[:3]), (DAYS[3],))
    assert again.matched_share is None
    save_side(tmp_path, 1, seed=1)
    assert run(warehouse).days_written == (DAYS[1],)
    ingest(warehouse, 0, "second")
    assert set(read_rows(warehouse, warehouse.current("t"), ["score"])["score"][:230].to_pylist()) == {None}
    assert run(warehouse).days_written == (DAYS[0],)
    assert warehouse.written_days("t")[DAYS[0]] == "second"
    assert run(warehouse, force=True).days_written == tuple(DAYS[:3])
    (tmp_path / "side" / "2.parquet").unlink()
    assert run(warehouse).days_written == (DAYS[2],)  # values that the source withdrew are null again
    assert set(read_rows(warehouse, warehouse.current("t"), ["score"])["score"][460:690].to_pylist()) == {None}
    assert run(warehouse).days_without == (DAYS[2], DAYS[3])


def test_a_second_feature_source_leaves_the_columns_of_the_first(warehouse, tmp_path):
    run(warehouse)
    first = read_rows(warehouse, warehouse.current("t"), ["score", "liked"])
    pq.write_table(pa.table({"text": [f"t{i}" for i in range(9)], "weight": range(9)}), tmp_path / "w.parquet")
    whole = FeatureJoin(path="w.parquet", on="text")
    assert run(warehouse, whole).days_written == tuple(DAYS)
    rows = read_rows(warehouse, warehouse.current("t"))
    assert rows.select(["score", "liked"]).equals(first)
    assert [f"t{i}" for i in rows["weight"].to_pylist()] == rows["text"].to_pylist()
    assert run(warehouse, SOURCE, whole).days_written == ()


KILL = """
import os, signal, sys
from pathlib import Path
from pipeline.extraction.enrich import enrich
from storage.snapshot import writing
from storage.warehouse import Warehouse
from tests.pipeline.extraction.test_enrich import CONFIG, SOURCE
from pyiceberg.table import Transaction
home, at, when = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
plain, commits = Transaction.commit_transaction, []
def commit(self):
    files = [update for update in self._updates if type(update).__name__ == "AddSnapshotUpdate"]
    commits.extend(files)
    if files and len(commits) == at and when == "before":
        os.kill(os.getpid(), signal.SIGKILL)
    table = plain(self)
    if files and len(commits) == at:
        os.kill(os.getpid(), signal.SIGKILL)
    return table
Transaction.commit_transaction, writing.COMMIT_ROWS = commit, 1
enrich((SOURCE,), Warehouse(CONFIG, home), "t", home.parent)
"""


@pytest.mark.nightly
@pytest.mark.parametrize(("at", "when"), [(1, "before"), (2, "after"), (3, "before")])
def test_a_killed_materialization_resumes(at, when, warehouse):
    home, undisturbed = warehouse.home, on_disk(warehouse.home)
    old = read_rows(warehouse, warehouse.current("t"))
    arguments = [sys.executable, "-c", KILL, str(home), str(at), when]
    done = subprocess.run(arguments, cwd=Path(__file__).resolve().parents[3], capture_output=True, text=True)
    assert done.returncode == -9, done.stderr[-2000:]
    whole = at if when == "after" else at - 1
    after = warehouse.current("t")
    assert read_rows(warehouse, after, old.column_names).equals(old)
    changed = [day for day in DAYS if files(warehouse, after)[day] not in _first_files(warehouse)]
    assert changed == DAYS[:whole]
    assert on_disk(home) >= undisturbed
    assert run(warehouse).days_written == tuple(DAYS[whole:3])
    assert run(warehouse).days_written == ()


def _first_files(warehouse: Warehouse) -> list[str]:
    """Contents of the days as they were ingested."""
    snapshots = warehouse.table("t").snapshots()[:4]
    return [
        files(warehouse, SnapshotRef(table="t", snapshot_id=one.snapshot_id))[day]
        for one, day in zip(snapshots, DAYS, strict=True)
    ]


def test_neither_expiry_nor_another_layout_makes_days_due_again(warehouse, tmp_path):
    run(warehouse)
    rewrite_days(warehouse, "t", [DAYS[0]], tmp_path / "tmp")
    assert expire(warehouse, "t", datetime.timedelta(0)).snapshots > 0
    assert len(warehouse.table("t").snapshots()) == 1
    assert run(warehouse).days_skipped == tuple(DAYS[:3])
    ingest(warehouse, 1, "second")
    assert run(warehouse).days_written == (DAYS[1],)


def test_a_day_ingested_meanwhile_is_not_overwritten(warehouse):
    first = run(warehouse, end=DAYS[0]).snapshot
    rows = read_rows(warehouse, first)
    ingest(warehouse, 1, "second")
    days = {DAYS[1]: "first"}
    with pytest.raises(ConflictError, match="rows written in the meantime"):
        replace_days(warehouse, "t", days, rows.schema, rows.to_batches(), 230, made_of=first)
    assert warehouse.written_days("t")[DAYS[1]] == "second"


def refused(warehouse: Warehouse, *sources: FeatureJoin, **more: Any) -> str:
    with pytest.raises(ContractError) as error:
        run(warehouse, *sources, **more)
    return f"{type(error.value).__name__}: {error.value}"


def test_what_is_refused(warehouse, tmp_path):
    before, there = warehouse.current("t"), on_disk(warehouse.home)
    with pytest.raises(
        ConfigError, match=r"histories and windows: expected one to materialize, which has stored: true, got none"
    ):
        enrich((), warehouse, "t", tmp_path)
    assert refused(warehouse, start=datetime.date(2026, 1, 1)) == (
        f"{EmptyDatasetError.__name__}: days to materialize: expected days among 2025-03-01 to 2025-03-04, "
        "got none from 2026-01-01 to the last. Change start and end."
    )
    pq.write_table(pa.table({"user": [1], "num": [1.0]}), tmp_path / "own.parquet")
    assert "expected columns that the rows do not have, got existing columns num" in refused(warehouse, FeatureJoin(path="own.parquet", on="user"))  # fmt: skip
    pq.write_table(pa.table({"user": [1, 1], "x": [1.0, 2.0]}), tmp_path / "twice.parquet")
    said = refused(warehouse, FeatureJoin(path="twice.parquet", on="user"))
    assert said.startswith(f"{DataError.__name__}: features.joined 'twice.parquet': expected each key once, got key 1")
    assert (warehouse.current("t"), on_disk(warehouse.home)) == (before, there)
    assert not [path for path in os.listdir(tmp_path) if path.endswith(".tmp")]


def test_a_day_that_another_engine_has_written_is_due_again(warehouse):
    run(warehouse)
    more = day_of(1, 5)
    append_rows(warehouse, "t", more.schema, more.to_pylist())
    assert run(warehouse).days_written == (DAYS[1],)
    assert run(warehouse).days_written == ()


def test_a_column_that_was_dropped_is_written_again(warehouse):
    run(warehouse)
    with warehouse.table("t").update_schema() as update:
        update.delete_column("score")
    assert run(warehouse).days_written == tuple(DAYS[:3])
    assert "score" in warehouse.schema(warehouse.current("t")).names


def test_values_of_an_ingest_are_not_overwritten(warehouse):
    run(warehouse)
    rows = day_of(1).append_column("score", pa.array([-1.0] * 230))
    write_days(warehouse, rows, name="t", identity="second")
    assert refused(warehouse) == (
        "ConfigError: day 2025-03-02 of table 't': expected no values in score, got values that no materialization wrote. "
        "Set `prefix`, or overwrite them with force=true."
    )
    assert run(warehouse, force=True).days_written == tuple(DAYS[:3])
    assert run(warehouse).days_written == ()


def test_equal_rows_in_another_layout_have_equal_contents(warehouse, tmp_path):
    """They stay equal after the snapshots expire. Their positions in files do not."""
    before = warehouse.day_contents(warehouse.current("t"))
    names = warehouse.day_names(warehouse.current("t"))
    rewrite_days(warehouse, "t", [DAYS[0]], tmp_path / "tmp")
    rewrite_days(warehouse, "t", [DAYS[0]], tmp_path / "tmp")
    assert warehouse.day_contents(warehouse.current("t")) == before
    expire(warehouse, "t", datetime.timedelta(0))
    assert warehouse.day_contents(warehouse.current("t")) == before
    after = warehouse.day_names(warehouse.current("t"))
    assert [day for day in DAYS if after[day] != names[day]] == [DAYS[0]]
    ingest(warehouse, 0, "second")
    assert warehouse.day_contents(warehouse.current("t"))[DAYS[0]] != before[DAYS[0]]


def test_a_new_column_leaves_what_a_model_has_learned_of_a_day(warehouse):
    before = warehouse.day_contents(warehouse.current("t"))
    assert run(warehouse).days_written == tuple(DAYS[:3])
    assert warehouse.day_contents(warehouse.current("t")) == before
    expire(warehouse, "t", datetime.timedelta(0))
    assert warehouse.day_contents(warehouse.current("t")) == before
    result = run(warehouse, SOURCE.model_copy(update={"prefix": "more_"}))
    assert (result.days_written, warehouse.day_contents(result.snapshot)) == (tuple(DAYS[:3]), before)


def test_other_values_of_a_column_are_another_content_of_their_days(warehouse, tmp_path):
    """A training may have read the earlier values, or the nulls of a day that no materialization had written."""
    before = run(warehouse).snapshot
    save_side(tmp_path, 1, seed=7)
    save_side(tmp_path, 3)
    assert run(warehouse).days_written == (DAYS[1], DAYS[3])
    assert changed(warehouse, before) == [DAYS[1], DAYS[3]]


def test_a_column_that_comes_back_is_another_content(warehouse):
    before = run(warehouse).snapshot
    with warehouse.table("t").update_schema() as update:
        update.delete_column("score")
    run(warehouse)
    assert changed(warehouse, before) == DAYS[:3]


def changed(warehouse: Warehouse, before: SnapshotRef) -> list[datetime.date]:
    now, then = warehouse.day_contents(warehouse.current("t")), warehouse.day_contents(before)
    return [day for day in DAYS if now[day] != then[day]]


def test_columns_that_were_dropped_or_renamed_since_the_last_commit_stay_so(warehouse):
    numbers = read_rows(warehouse, warehouse.current("t"), ["num"])["num"].to_pylist()
    with warehouse.table("t").update_schema() as update:
        update.delete_column("text")
        update.rename_column("num", "number")
    run(warehouse)
    after = warehouse.current("t")
    assert set(warehouse.schema(after).names) == {"day", "user", "number", "ids", "at", "score", "liked"}
    assert read_rows(warehouse, after, ["number"])["number"].to_pylist() == numbers


def test_many_columns_are_noted_in_one_commit(warehouse):
    commits = len(warehouse.table("t").metadata.metadata_log)
    names = {f"c{number}" for number in range(40)}
    note_columns(warehouse, "t", names)
    assert len(warehouse.table("t").metadata.metadata_log) == commits + 1
    assert written_columns(warehouse, "t") == names
    note_columns(warehouse, "t", names)
    assert len(warehouse.table("t").metadata.metadata_log) == commits + 1


def test_a_feature_source_is_opened_once_for_all_days_that_lack_it(warehouse, tmp_path, monkeypatch):
    stored = SOURCE.model_copy(update={"stored": True})
    note_columns(warehouse, "t", ["score"])
    opened: list[int] = []
    pin = materialized.pin_sources
    monkeypatch.setattr(materialized, "pin_sources", lambda *given: opened.append(1) or pin(*given))
    with pytest.raises(ConfigError, match="no materialization of"):
        require_materialized([stored], warehouse, warehouse.current("t"), ["score"], DAYS, tmp_path)
    assert len(opened) == 1


def test_days_of_a_commit_have_no_more_files_than_their_rows_need(tmp_path):
    warehouse = Warehouse(WarehouseConfig(file_rows=300), tmp_path / "home")
    for number in range(3):
        ingest(warehouse, number)
        save_side(tmp_path, number)
    run(warehouse)
    assert days_to_compact(warehouse, warehouse.current("t")) == []
    assert {len(found) for found in warehouse.day_files(warehouse.current("t")).values()} == {1}

"""Whole days are scored once per model and content, even if the work is interrupted."""

import datetime
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.data.joined.source import pin_sources
from pipeline.errors import ConfigError, DataError, EmptyDatasetError
from pipeline.scoring.config import ScoringConfig
from pipeline.scoring.score import ScoringResult, ScoringWork, plan_scoring, score
from pipeline.transforms.joins import FeatureJoin
from storage.config import WarehouseConfig
from storage.errors import StorageError
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse
from tests.homes import read_rows, rows_of, write_days

ROOT = Path(__file__).resolve().parents[3]
DAYS = tuple(datetime.date(2025, 3, 1) + datetime.timedelta(days=i) for i in range(3))
ROWS = (25, 31, 7)
KEEP = ("user", "items", "price")


def make_day(number: int, offset: int = 0) -> pa.Table:
    """Rows with nulls in every column but `row`, which numbers them."""
    row = np.arange(ROWS[number]) + sum(ROWS[:number]) + offset
    return pa.table(
        {
            "day": pa.array([DAYS[number]] * len(row), pa.date32()),
            "row": row,
            "user": [f"u{i}" if i % 3 else None for i in row.tolist()],
            "items": pa.array([[i, None, i + 1][: i % 4] if i % 5 else None for i in row.tolist()], pa.list_(pa.int64())),
            "price": [i / 4 if i % 7 else None for i in row.tolist()],
        }
    )  # fmt: skip


class Model:
    """Gives a probability that depends on the row, its list and its nulls."""

    columns: Mapping[str, str] = {"row": "long", "items": "list<long>", "price": "double"}

    def __init__(self, fail_at: int | None = None, value: float | None = None) -> None:
        self.fail_at, self.value = fail_at, value
        self.rows = 0

    def score(self, rows: pa.Table) -> Any:
        for row in rows.column("row").to_pylist():
            if row == self.fail_at and self.value is None:
                raise RuntimeError("out of order")
        self.rows += rows.num_rows
        found = [expected(row) for row in rows.select(list(self.columns)).to_pylist()]
        return np.array(
            [self.value if self.value is not None and row == self.fail_at else one
             for row, one in zip(rows.column("row").to_pylist(), found, strict=True)]
        )  # fmt: skip


def expected(row: Mapping[str, Any]) -> float:
    return (row["row"] + 0.1 * len(row["items"] or []) + 0.01 * (row["price"] is None)) / 1_000


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    """Days of several files and row groups."""
    warehouse = Warehouse(WarehouseConfig(row_group_rows=4, file_rows=10), tmp_path)
    for number in range(len(DAYS)):
        put(warehouse, number)
    return warehouse


def put(warehouse: Warehouse, number: int, offset: int = 0) -> SnapshotRef:
    return write_days(warehouse, make_day(number, offset), name="t", chunk_rows=5)


def plan(
    warehouse: Warehouse,
    config: ScoringConfig | None = None,
    row_filter: str | None = None,
    model: str = "m 1",
    **range_: Any,
) -> ScoringWork:
    return plan_scoring(
        config or ScoringConfig(keep=KEEP), warehouse, warehouse.current("t"), row_filter, model, **range_
    )


def run(
    warehouse: Warehouse,
    config: ScoringConfig | None = None,
    scorer: Model | None = None,
    version: int = 1,
    **what: Any,
) -> tuple[ScoringWork, ScoringResult]:
    config = config or ScoringConfig(keep=KEEP)
    work = plan(warehouse, config, **what)
    return work, score(config, warehouse, work, scorer or Model(), version)


def stored(
    warehouse: Warehouse, columns: tuple[str, ...] = ("day", *KEEP, "probability", "model_version")
) -> list[dict[str, Any]]:
    return read_rows(warehouse, "t_scores", columns).to_pylist()


def wanted(*tables: pa.Table, version: int = 1) -> list[dict[str, Any]]:
    rows = pa.concat_tables(tables).to_pylist()
    kept = [{name: row[name] for name in ("day", *KEEP)} for row in rows]
    return [one | {"probability": expected(row), "model_version": version} for one, row in zip(kept, rows, strict=True)]


def every_day() -> list[pa.Table]:
    return [make_day(number) for number in range(len(DAYS))]


@pytest.mark.parametrize("rows_per_commit", [1, 40, 1_000])
def test_every_row_has_its_score_in_the_order_of_the_table(warehouse, rows_per_commit):
    work, done = run(warehouse, ScoringConfig(keep=KEEP, rows_per_commit=rows_per_commit))
    assert (tuple(work.todo), work.done, done.rows) == (DAYS, (), sum(ROWS))
    found, right = stored(warehouse), wanted(*every_day())
    assert found == right
    assert done.mean_probability == pytest.approx(np.mean([row["probability"] for row in right]))
    commits = {1: 3, 40: 2, 1_000: 1}[rows_per_commit]
    assert len(warehouse.table("t_scores").snapshots()) == commits


def test_finished_days_are_skipped_until_rows_model_columns_or_filter_change(warehouse):
    run(warehouse)
    assert (plan(warehouse).todo, plan(warehouse).done) == ({}, DAYS)
    assert tuple(plan(warehouse, force=True).todo) == DAYS
    assert (plan(warehouse, model="m 2").todo, plan(warehouse, model="m 2").earlier) == ({}, 3)
    assert tuple(plan(warehouse, model="m 2", start=DAYS[1]).todo) == DAYS[1:]
    assert tuple(plan(warehouse, model="m 2", end=DAYS[1]).todo) == DAYS[:2]
    assert tuple(plan(warehouse, ScoringConfig(keep=("user",))).todo) == DAYS
    assert tuple(plan(warehouse, row_filter="row > 3").todo) == DAYS
    put(warehouse, 1, offset=500)  # the same identity of the ingest, other rows
    assert (tuple(plan(warehouse).todo), plan(warehouse).done) == ((DAYS[1],), (DAYS[0], DAYS[2]))
    scorer = Model()
    run(warehouse, scorer=scorer)
    assert scorer.rows == ROWS[1]
    assert stored(warehouse) == wanted(make_day(0), make_day(1, 500), make_day(2))
    run(warehouse, model="m 2", version=2, start=DAYS[0])
    assert stored(warehouse) == wanted(make_day(0), make_day(1, 500), make_day(2), version=2)


def test_a_new_day_of_a_feature_source_leaves_finished_days(warehouse):
    def plan_joined():
        joined = pin_sources([FeatureJoin(table="side", on="row", day_column="day")], Path(), warehouse)
        return plan_scoring(ScoringConfig(), warehouse, warehouse.current("t"), None, "m", joined=joined)

    def put_side(day, value):
        write_days(warehouse, rows_of(day, row=[1], extra=[value]), name="side")

    put_side(DAYS[0], 0.5)
    score(ScoringConfig(), warehouse, plan_joined(), Model(), 1)
    put_side(DAYS[-1] + datetime.timedelta(days=1), 0.5)
    assert plan_joined().done == DAYS
    put_side(DAYS[1], 0.5)
    assert tuple(plan_joined().todo) == DAYS[1:2]


def test_a_failure_leaves_whole_days_and_the_next_run_does_the_rest(warehouse):
    one_by_one = ScoringConfig(keep=KEEP, rows_per_commit=1)
    with pytest.raises(RuntimeError):
        run(warehouse, one_by_one, Model(fail_at=ROWS[0] + 20))
    assert stored(warehouse) == wanted(make_day(0))
    scorer = Model()
    work, _ = run(warehouse, one_by_one, scorer)
    assert (work.done, scorer.rows) == (DAYS[:1], ROWS[1] + ROWS[2])
    assert stored(warehouse) == wanted(*every_day())


KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.scoring.config import ScoringConfig
from pipeline.scoring.score import plan_scoring, score
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse
import numpy as np

class Model:
    columns = {"row": "long"}
    def score(self, rows):
        if 45 in rows.column("row").to_pylist():
            os.kill(os.getpid(), signal.SIGKILL)
        return np.full(rows.num_rows, 0.5)

config = ScoringConfig(keep=("row",), rows_per_commit=1)
warehouse = Warehouse(WarehouseConfig(row_group_rows=4, file_rows=10), Path(sys.argv[1]))
score(config, warehouse, plan_scoring(config, warehouse, warehouse.current("t"), None, "m"), Model(), 1)
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_day_leaves_the_days_before_it(warehouse, tmp_path):
    ended = subprocess.run([sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path)], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL
    assert [row["row"] for row in stored(warehouse, ("row",))] == list(range(ROWS[0]))
    assert tuple(plan(warehouse, ScoringConfig(keep=("row",)), model="m").todo) == DAYS[1:]


def test_a_filter_chooses_the_rows_and_a_day_without_any_is_nothing_to_do(warehouse):
    config = ScoringConfig(keep=("row",))
    work, done = run(warehouse, config, row_filter="row >= 20 and row < 30")
    assert (tuple(work.todo), work.done, done.rows) == (DAYS[:2], DAYS[2:], 10)
    assert [row["row"] for row in stored(warehouse, ("row",))] == list(range(20, 30))
    assert plan(warehouse, config, row_filter="row >= 20 and row < 30").todo == {}
    work, done = run(warehouse, config, row_filter="row < 3")  # the second day loses its scores
    assert (tuple(work.todo), done.rows) == (DAYS[:2], 3)
    assert [row["row"] for row in stored(warehouse, ("row",))] == [0, 1, 2]
    assert plan(warehouse, config, row_filter="row < 3").todo == {}


def test_a_range_of_days(warehouse):
    for bounds, days in (
        ({"start": DAYS[1]}, DAYS[1:]),
        ({"end": DAYS[1]}, DAYS[:2]),
        ({"start": DAYS[1], "end": DAYS[1]}, DAYS[1:2]),
    ):
        assert tuple(plan(warehouse, **bounds).todo) == days
    run(warehouse, end=DAYS[0])
    work, _ = run(warehouse)
    assert (tuple(work.todo), work.done) == (DAYS[1:], DAYS[:1])
    assert stored(warehouse) == wanted(*every_day())


def test_columns_that_the_model_lacks_are_named_before_a_row_is_read(warehouse):
    scorer = Model()
    scorer.columns = {"row": "long", "age": "double", "city": "string"}
    with pytest.raises(ConfigError) as caught:
        run(warehouse, scorer=scorer, version=4)
    assert str(caught.value) == (
        "table 't': expected the columns that version 4 reads, got none named age, city. "
        "Write them to the table, or name another version: version=N."
    )
    assert scorer.rows == 0
    assert not warehouse.has_table("t_scores")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_score_that_is_no_number_is_not_written(warehouse, value):
    with pytest.raises(DataError) as caught:
        run(warehouse, scorer=Model(ROWS[0] + 4, value))
    assert str(caught.value) == (
        f"score of a row of 2025-03-02: expected a probability, got {value}. Check the model: version=N takes another."
    )
    assert warehouse.written_days("t_scores") == {}


@pytest.mark.parametrize(
    ("change", "kind", "sentence"),
    [
        ({"start": datetime.date(2026, 1, 1)}, EmptyDatasetError, "days to score: expected days among 2025-03-01 to 2025-03-03, got none from 2026-01-01 to the last. Change start and end."),
        ({"config": ScoringConfig(keep=("usr",))}, ConfigError, "scoring.keep 'usr': expected a column of the table, got none of that name. Closest: user. Correct the name."),
        ({"row_filter": "age > 1"}, ConfigError, "filter 'age > 1': expected columns of the table, got 'age'. Closest: day, user, price, items, items.element, row. Correct the name."),
        ({"row_filter": "row > 999"}, EmptyDatasetError, "filter 'row > 999': expected at least one row to score, got none. Change the filter."),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_said(warehouse, change, kind, sentence):
    with pytest.raises(kind) as caught:
        plan(warehouse, **change)
    assert str(caught.value) == sentence


@pytest.mark.parametrize("keep", [("day",), ("user", "probability"), ("model_version",), ("user", "user")])
def test_reserved_columns_cannot_be_kept(keep):
    with pytest.raises(ConfigError) as caught:
        ScoringConfig(keep=keep)
    assert str(caught.value) == (
        "scoring.keep: expected each column once, without day, probability and model_version, which are always there, "
        f"got {keep[-1]}. Leave it out."
    )


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(StorageError):
        Warehouse(WarehouseConfig(), tmp_path).current("t")

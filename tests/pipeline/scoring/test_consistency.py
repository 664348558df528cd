"""Served rows are matched by key and compared, whatever their order, files and types; and sources at two times."""

import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pc_csv
import pyarrow.parquet as pq
import pytest

from pipeline.data.joined.source import pin_sources
from pipeline.errors import ConfigError, DataError, StorageError
from pipeline.scoring.consistency import ConsistencyResult, compare_pinned, compare_served, open_served
from pipeline.serving.config import ServedVersion
from pipeline.serving.row_log import RowLog
from pipeline.transforms.joins import EventWindow, History
from storage.config import WarehouseConfig
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse
from tests.homes import START, moments, read_rows, rows_of, write_days

DAYS, ROWS, USERS, LAST = 3, 400, 9, 5
COLUMNS = ("user", "num", "seen_item", "seen_count_86400")


@pytest.fixture
def warehouse(tmp_path: Path) -> Warehouse:
    """Rows that are one of a user and a second, and a log of events."""
    random = np.random.default_rng(5)
    warehouse = Warehouse(WarehouseConfig(row_group_rows=60, file_rows=150), tmp_path)
    for day in range(DAYS):
        at = day * 86_400 + np.arange(ROWS) * 200
        users = random.integers(0, USERS, ROWS)
        num = pa.array(random.normal(size=ROWS).astype(np.float32), mask=random.random(ROWS) < 0.1)
        date = START.date() + datetime.timedelta(days=day)
        write_days(warehouse, rows_of(date, ROWS, at=moments(at), user=users, num=num), name="t")
    write_events(warehouse, np.arange(0, DAYS * 86_400, 400))
    return warehouse


def write_events(warehouse: Warehouse, seconds: np.ndarray, tag: str = "a") -> None:
    """Replaces the log by events at these seconds, whose user and item follow from the second."""
    log = rows_of(START.date(), len(seconds), user=seconds // 400 % USERS, time=moments(seconds), item=seconds)
    write_days(warehouse, log, name="log", identity=tag)


def sources() -> list[History | EventWindow]:
    common = {"table": "log", "on": "user", "time": "time", "as_of": "at", "prefix": "seen_"}
    return [
        History.model_validate({**common, "last": LAST, "columns": "item"}),
        EventWindow.model_validate({**common, "seconds": [86_400]}),
    ]


def served_rows(warehouse: Warehouse, seconds: np.ndarray) -> pa.Table:
    """What a server sent that had the events of these seconds: a loop over rows."""
    rows = read_rows(warehouse, "t", ["user", "at", "num"])
    lists, counts = [], []
    for row in rows.to_pylist():
        at = (row["at"] - START).total_seconds()
        mine = [int(one) for one in seconds if one // 400 % USERS == row["user"] and one < at]
        lists.append(mine[::-1][:LAST])
        counts.append(sum(one >= at - 86_400 for one in mine))
    numbers = rows.column("num").cast(pa.float64())
    return (
        rows.set_column(2, "num", numbers)
        .append_column("seen_item", pa.array(lists, pa.list_(pa.int64())))
        .append_column("seen_count_86400", pa.array(counts, pa.float64()))
        .append_column("probability", pa.array(np.zeros(len(rows))))
    )


def compare(
    warehouse: Warehouse, served: str, on: tuple[str, ...] = ("user", "at"), days: int = DAYS
) -> ConsistencyResult:
    reference = warehouse.current("t")
    joined = pin_sources(sources(), Path("/"), warehouse)
    rows = dict(list(warehouse.day_rows(reference).items())[:days])
    found = open_served(warehouse, served, Path("/"))
    return compare_served(warehouse, found, reference, joined, COLUMNS, on, rows, 1e-6)


def by_feature(found: ConsistencyResult) -> dict[str, dict[str, int]]:
    return {one["feature"]: dict(one["reasons"]) for one in found.features}


def test_rows_served_as_they_are_computed_do_not_differ(warehouse, tmp_path):
    """Shuffled, in several files, of which one lacks a column, and in a table of the warehouse."""
    served = served_rows(warehouse, np.arange(0, DAYS * 86_400, 400))
    served = served.take(np.random.default_rng(6).permutation(len(served)))
    folder = tmp_path / "served"
    folder.mkdir()
    pq.write_table(served[:500], folder / "a.parquet", row_group_size=64)
    pq.write_table(served[500:].drop_columns("num"), folder / "b.parquet")
    found = compare(warehouse, str(folder))
    assert (found.rows, found.only_then, found.only_now) == (DAYS * ROWS, 0, 0)
    assert by_feature(found) == {"num": {}, "seen_item": {}, "seen_count_86400": {}}
    assert {one["feature"]: one["rows"] for one in found.features}["num"] == 500
    day = pa.array([START.date()] * 500, pa.date32())
    stored = served[:500].append_column("day", day)
    replace_days(warehouse, "served", {START.date(): "a"}, stored.schema, stored.to_batches(), 500)
    found = compare(warehouse, "served")
    assert (found.rows, found.only_then, found.only_now) == (500, 0, DAYS * ROWS - 500)
    assert not any(by_feature(found).values())


def test_the_log_of_a_server_is_compared(warehouse, tmp_path):
    """Two versions, of which one reads no `num`. Its own columns are not compared."""
    served = served_rows(warehouse, np.arange(0, DAYS * 86_400, 400)).drop_columns("probability")
    log = RowLog(tmp_path / "rows", 1 << 30, lambda written, dropped: None)
    for number, rows in ((1, served[:300]), (1, served[300:700]), (2, served[700:].drop_columns("num"))):
        version = ServedVersion(model="t", version=number, run_id="r", snapshot=None)
        log.add(version, rows, np.zeros(len(rows)))
    log.close()
    found = compare(warehouse, str(tmp_path / "rows"))
    assert (found.rows, found.only_then, found.only_now) == (DAYS * ROWS, 0, 0)
    assert by_feature(found) == {"num": {}, "seen_item": {}, "seen_count_86400": {}}
    assert [one["rows"] for one in found.features] == [700, DAYS * ROWS, DAYS * ROWS]


def test_a_log_that_came_late_shows_as_other_and_missing_values(warehouse, tmp_path):
    """The server lacked the last two hours of each row's user; one number was wrong, and one row was never logged."""
    seconds = np.arange(0, DAYS * 86_400, 400)
    served = served_rows(warehouse, seconds)
    lists = served.column("seen_item").to_pylist()
    late = [one[1:] for one in lists]
    numbers = served.column("num").to_pylist()
    row = next(i for i, one in enumerate(numbers) if one is not None)
    numbers[row] += 0.25
    served = served.set_column(3, "seen_item", pa.array(late)).set_column(2, "num", pa.array(numbers))
    pq.write_table(served[:-1], tmp_path / "served.parquet")
    found = compare(warehouse, str(tmp_path / "served.parquet"))
    single, more = (sum(len(one) == 1 for one in lists[:-1]), sum(len(one) > 1 for one in lists[:-1]))
    assert by_feature(found)["seen_item"] == {"other value": more, "missing then": single}
    [num] = [one for one in found.features if one["feature"] == "num"]
    assert num["reasons"] == {"other value": 1}
    assert num["largest_difference"] == pytest.approx(0.25)
    key = served.slice(row, 1).to_pylist()[0]
    assert num["examples"] == {"other value": [[f"{key['user']}", f"{key['at']}"]]}
    assert found.only_now == 1
    assert compare(warehouse, str(tmp_path / "served.parquet"), days=1).only_then == (DAYS - 1) * ROWS - 1


def test_rows_of_csv_files_are_compared(warehouse, tmp_path):
    served = served_rows(warehouse, np.arange(0, DAYS * 86_400, 400)).select(["user", "at", "num"])
    pc_csv.write_csv(served, tmp_path / "served.csv")
    found = compare(warehouse, str(tmp_path / "*.csv"))
    assert (found.rows, by_feature(found)) == (DAYS * ROWS, {"num": {}})


def test_sources_at_two_times_are_compared(warehouse):
    """Events of one user that arrive later change the lists and counts of that user's later rows, and no others."""
    before, day = np.arange(0, DAYS * 86_400, 400), 86_400
    late = np.array([day + 7 + 400 * USERS * i for i in range(3)])  # user 0, in the middle of the log
    late = late - late // 400 % USERS * 400
    reference = warehouse.current("t")
    then = pin_sources(sources(), Path("/"), warehouse)
    write_events(warehouse, np.sort(np.concatenate([before, late])), "b")
    now = pin_sources(sources(), Path("/"), warehouse)
    rows, columns = warehouse.day_rows(reference), ["seen_item", "seen_count_86400"]
    found = compare_pinned(
        warehouse, reference, then, now, {name: (name, name) for name in columns}, ["user", "at"], rows, 0.0
    )
    one, two = (served_rows(warehouse, seconds) for seconds in (before, np.sort(np.concatenate([before, late]))))
    assert {summary["feature"] for summary in found.features} == set(columns)
    for summary in found.features:
        name = summary["feature"]
        pairs = list(zip(one.column(name).to_pylist(), two.column(name).to_pylist(), strict=True))
        assert summary["differing"] == sum(a != b for a, b in pairs) > 0
        assert summary["rows"] == found.rows == DAYS * ROWS
        assert all(key[0] == "0" for keys in summary["examples"].values() for key in keys)
    same = compare_pinned(
        warehouse, reference, now, now, {name: (name, name) for name in columns}, ["user", "at"], rows, 0.0
    )
    assert not any(summary["differing"] for summary in same.features)


def test_what_cannot_be_compared_is_refused(warehouse, tmp_path):
    served, path = served_rows(warehouse, np.arange(0)), tmp_path / "served.parquet"
    pq.write_table(served, path)
    with pytest.raises(ConfigError, match=r"argument 'on' 'usr': expected a column of the table"):
        compare(warehouse, str(path), ("usr",))
    with pytest.raises(DataError, match=r"one row for each user, got several of user \d\. Name more columns: on="):
        compare(warehouse, str(path), ("user",))
    pq.write_table(pa.concat_tables([served, served[:1]]), path)
    with pytest.raises(DataError, match=r"served.parquet': expected one row for each user, at, got several of user"):
        compare(warehouse, str(path))
    pq.write_table(served.select(["user", "at", "probability"]), path)
    with pytest.raises(ConfigError, match=r"expected some of num, seen_item, seen_count_86400, got user, at, prob"):
        compare(warehouse, str(path))
    pq.write_table(served.set_column(2, "num", pa.array(["x"] * len(served))), path)
    with pytest.raises(ConfigError, match=r"argument 'served', column 'num': expected float, or a type like it"):
        compare(warehouse, str(path))
    with pytest.raises(ConfigError, match=r"argument 'served': expected at least one file"):
        compare(warehouse, str(tmp_path / "*.csv"))
    with pytest.raises(StorageError, match="'nothing'"):
        compare(warehouse, "nothing")
    twice = pa.table([[1], [2], moments(np.zeros(1))], names=["user", "user", "at"])
    pq.write_table(twice, path)
    with pytest.raises(DataError, match=r"served.parquet': .*duplicate field names"):
        compare(warehouse, str(path))

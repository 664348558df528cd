"""Several writers add events at once to a table that does not exist yet, and no event is lost."""

import datetime
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException

from storage.errors import ConflictError, StorageError
from storage.snapshot.writing import append_rows
from storage.warehouse import Warehouse
from tests.homes import read_rows, rows_of, write_days

ROOT = Path(__file__).resolve().parents[3]
SCHEMA = pa.schema([("day", pa.date32()), ("who", pa.string()), ("number", pa.int64())])
EVENTS = 4
DAY = datetime.date(2024, 1, 1)
WRITER = """
import sys
from pathlib import Path
from tests.storage.snapshot.test_writing import event
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse

warehouse = Warehouse(WarehouseConfig(), Path(sys.argv[1]))
sys.stdin.readline()
for number in range(int(sys.argv[3])):
    event(warehouse, sys.argv[2], number)
"""


def event(warehouse: Warehouse, who: str, number: int) -> None:
    day = DAY + datetime.timedelta(days=number % 2)
    append_rows(warehouse, "log", SCHEMA, [{"day": day, "who": who, "number": number}])


def stored(warehouse: Warehouse) -> list[tuple[str, int]]:
    reader = warehouse.reader(warehouse.current("log"), ["who", "number"])
    rows = [row for fragment in reader.fragments() for row in reader.read(fragment).to_pylist()]
    return sorted((row["who"], row["number"]) for row in rows)


@pytest.mark.slow
def test_two_processes_at_once_lose_no_event(warehouse: Warehouse, home: Path) -> None:
    warehouse.catalog.list_namespaces()  # this creates the catalog's database
    commands = [[sys.executable, "-c", WRITER, str(home), who, str(EVENTS)] for who in "ab"]
    writers = [subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, text=True) for command in commands]
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.close()
    assert [writer.wait(60) for writer in writers] == [0, 0]
    expected = [(who, number) for who in "ab" for number in range(EVENTS)]
    assert stored(warehouse) == expected


def test_a_commit_is_one_snapshot_and_takes_several_days(warehouse: Warehouse) -> None:
    rows = [{"day": DAY + datetime.timedelta(days=i % 3), "who": "a", "number": i} for i in range(6)]
    reference = append_rows(warehouse, "log", SCHEMA, rows)
    assert len(warehouse.table("log").snapshots()) == 1
    assert list(warehouse.day_rows(reference).values()) == [2, 2, 2]
    wider = SCHEMA.append(pa.field("why", pa.string()))
    append_rows(warehouse, "log", wider, [{"day": DAY, "who": "b", "number": 9, "why": "new"}])
    assert stored(warehouse) == sorted([("a", i) for i in range(6)] + [("b", 9)])


def test_a_conflict_without_end_leaves_nothing(warehouse: Warehouse, home: Path, monkeypatch) -> None:
    event(warehouse, "a", 0)
    with warehouse.table("log").transaction() as change:
        change.set_properties({"commit.retry.num-retries": "1", "commit.retry.min-wait-ms": "0"})
    files = sorted(home.rglob("*.parquet"))

    def faster(*_: object, **__: object) -> None:
        raise CommitFailedException("another writer")

    monkeypatch.setattr(SqlCatalog, "commit_table", faster)
    monkeypatch.setattr("storage.snapshot.writing._evolve", lambda warehouse, name, schema, *_: warehouse.table(name))
    with pytest.raises(ConflictError) as error:
        event(warehouse, "a", 1)
    assert str(error.value) == (
        "table 'log': expected no other writer meanwhile, got a commit of another writer. Run the command again."
    )
    assert sorted(home.rglob("*.parquet")) == files


# Columns that another engine took away


def change(warehouse: Warehouse, renames: Sequence[tuple[str, str]], drops: Sequence[str] = ()) -> None:
    """Renames and drops columns as another engine does, each in a commit of its own."""
    for old, new in renames:
        with warehouse.table("events").update_schema() as update:
            update.rename_column(old, new)
    for name in drops:
        with warehouse.table("events").update_schema() as update:
            update.delete_column(name)


MAPS = pa.map_(pa.int32(), pa.float32())


def row(day: int, **values: Any) -> pa.Table:
    kinds = {"maps": MAPS}
    columns = {name: pa.array([value], kinds.get(name)) for name, value in values.items()}
    return rows_of(DAY.replace(day=day), **columns)


@pytest.mark.parametrize(
    ("renames", "drops", "named"),
    [
        ([("num", "price")], [], "column 'num' of table 'events': expected field 2 of that name, got another engine's "
         "rename of it to 'price'. Rename it back, or follow it in the source with rename={\"num\": \"price\"}"),
        ([("num", "Num")], [], "rename of it to 'Num'"),
        ([("day", "date")], [], "column 'day' of table 'events': expected field 1 of that name"),
        ([("maps", "dense")], [], "rename of it to 'dense'"),
        ([("num", "t"), ("other", "num"), ("t", "other")], [], "rename of it to 'other'"),
        ([("num", "t"), ("other", "num")], [], "rename of it to 't'"),
        ([], ["num"], "column 'num' of table 'events': expected field 2, which it was, got a drop of it by another "
         "engine. It would be null in all earlier days. Give the source's column another name"),
        ([], ["maps"], "column 'maps' of table 'events': expected field 4, which it was, got a drop"),
        ([("num", "price")], ["price"], "got a drop"),
    ],
)  # fmt: skip
def test_a_column_that_another_engine_took_away_is_not_split(
    warehouse: Warehouse, renames: list[tuple[str, str]], drops: list[str], named: str
) -> None:
    write_days(warehouse, row(1, num=1.0, other=2.0, maps=[(1, 2.0)]))
    change(warehouse, renames, drops)
    before = warehouse.table("events").metadata
    with pytest.raises(StorageError, match=re.escape(named)):
        write_days(warehouse, row(2, num=3.0, other=4.0, maps=[(1, 2.0)]))
    assert warehouse.table("events").metadata == before


def test_a_column_is_written_by_the_name_that_another_engine_gave_it(warehouse: Warehouse) -> None:
    write_days(warehouse, row(1, num=1.0, other=2.0))
    change(warehouse, [("num", "price"), ("other", "num")])
    write_days(warehouse, row(2, price=3.0, num=4.0))
    change(warehouse, [("num", "rank"), ("rank", "num")])
    write_days(warehouse, row(3, price=5.0, num=6.0))
    found = read_rows(warehouse, "events").sort_by("day")
    assert found.drop_columns("day").to_pydict() == {"price": [1.0, 3.0, 5.0], "num": [2.0, 4.0, 6.0]}
    append_rows(warehouse, "log", SCHEMA, [{"day": DAY, "who": "a", "number": 1}])
    with warehouse.table("log").update_schema() as update:
        update.rename_column("who", "name")
    with pytest.raises(StorageError, match="rename of it to 'name'"):
        append_rows(warehouse, "log", SCHEMA, [{"day": DAY, "who": "b", "number": 2}])


def test_a_column_whose_name_differs_in_case_alone_is_not_split(warehouse: Warehouse) -> None:
    write_days(warehouse, rows_of(datetime.date(2025, 1, 1), score=[1.5]), name="cased")
    with pytest.raises(StorageError) as refused:
        write_days(warehouse, rows_of(datetime.date(2025, 1, 2), Score=[2.5]), name="cased")
    assert str(refused.value) == (
        "column 'Score' of table 'cased': expected a name that differs from others in more than its case, got 'score' in "
        'the table: the values of one column would be in two. Write one of them everywhere, such as rename={"Score": '
        '"score"}.'
    )
    assert warehouse.schema(warehouse.current("cased")).names == ["day", "score"]

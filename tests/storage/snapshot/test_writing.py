"""Several writers add events at once to a table that does not exist yet, and no event is lost."""

import datetime
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException

from storage.errors import ConflictError
from storage.snapshot.writing import append_rows
from storage.warehouse import Warehouse

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
    monkeypatch.setattr("storage.snapshot.writing._evolve", lambda warehouse, name, schema: warehouse.table(name))
    with pytest.raises(ConflictError) as error:
        event(warehouse, "a", 1)
    assert str(error.value) == (
        "table 'log': expected no other writer meanwhile, got a commit of another writer. Run the command again."
    )
    assert sorted(home.rglob("*.parquet")) == files

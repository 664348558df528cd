"""Several writers at once lose nothing, and files that are staged become part of the table or go."""

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

from storage.config import WarehouseConfig
from storage.errors import ConflictError, StorageError, UnknownCommitError
from storage.snapshot.writing import StagedDays, append_rows, replace_days, stage_days
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
         "engine. It would be null in all earlier days. Give the column another name"),
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
        'the table: the values of one column would be in two. Write one of them everywhere, such as source.rename={"Score": '
        '"score"}.'
    )
    assert warehouse.schema(warehouse.current("cased")).names == ["day", "score"]


DAYS = [DAY + datetime.timedelta(days=i) for i in range(3)]


def samples(**more: Any) -> pa.Table:
    """Two rows of each day."""
    parts = [rows_of(day, 2, id=[10 * i, 10 * i + 1]) for i, day in enumerate(DAYS)]
    whole = pa.concat_tables(parts)
    for name, value in more.items():
        whole = whole.append_column(name, pa.array([value] * 6))
    return whole


def stage(staged: StagedDays | None, rows: pa.Table, count: int | None = None) -> StagedDays:
    assert staged is not None
    staged.write(rows.to_batches(), DAYS, rows.num_rows if count is None else count)
    return staged


def named(*numbers: int) -> dict[datetime.date, str]:
    return {DAYS[number]: f"identity {number}" for number in numbers}


def stored_ids(warehouse: Warehouse, names: Sequence[str] = ("id",)) -> list[int]:
    return sorted(read_rows(warehouse, warehouse.current("events"), [*names])["id"].to_pylist())


def data_files(home: Path) -> int:
    return len([*home.rglob("*.parquet")])


def test_days_that_are_committed_stay_and_others_leave_no_file(warehouse: Warehouse, home: Path) -> None:
    rows = samples()
    with stage_days(warehouse, "events", rows.schema) as staged:
        stage(staged, rows)
        assert (data_files(home), warehouse.has_table("events")) == (3, False)
        stage(staged, rows).commit(named(0, 2), {DAYS[0]: {"who": "we"}})
    assert (stored_ids(warehouse), data_files(home)) == ([0, 1, 20, 21], 2)
    assert warehouse.written_days("events") == named(0, 2)
    assert warehouse.day_notes("events") == {DAYS[0]: {"who": "we"}}


def test_a_table_that_nothing_is_committed_to_is_not_created(warehouse: Warehouse, home: Path) -> None:
    def killed(staged: StagedDays | None) -> None:
        stage(staged, samples())
        assert data_files(home) == 3
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), stage_days(warehouse, "events", samples().schema) as staged:
        killed(staged)
    assert (warehouse.has_table("events"), data_files(home)) == (False, 0)


def test_rows_that_are_missing_or_of_another_day_are_refused(warehouse: Warehouse, home: Path) -> None:
    with (
        pytest.raises(StorageError, match=r"^table 'events': expected 7 rows to write, got 6\."),
        stage_days(warehouse, "events", samples().schema) as staged,
    ):
        stage(staged, samples(), 7)
    other = rows_of(DAYS[2] + datetime.timedelta(1), id=[1])
    with (
        pytest.raises(StorageError, match=r"expected rows of 2024-01-01 to 2024-01-03 only, got rows of 2024-01-04"),
        stage_days(warehouse, "events", other.schema) as staged,
    ):
        stage(staged, other)
    assert data_files(home) == 0


def test_a_new_column_is_added_with_the_commit(warehouse: Warehouse, home: Path) -> None:
    write_days(warehouse, samples())
    wide = samples(price=0.5)
    with stage_days(warehouse, "events", wide.schema) as staged:
        stage(staged, wide)
    assert "price" not in warehouse.schema(warehouse.current("events")).names
    before = data_files(home)
    with stage_days(warehouse, "events", wide.schema) as staged:
        stage(staged, wide).commit(named(1), {})
    found = read_rows(warehouse, warehouse.current("events"), ["id", "price"]).sort_by("id")
    assert found["price"].to_pylist() == [None, None, 0.5, 0.5, None, None]
    assert data_files(home) == before + 1


def test_columns_that_the_table_cannot_have_are_told_by_the_write(warehouse: Warehouse) -> None:
    write_days(warehouse, samples())
    text = samples().set_column(1, "id", pa.array(["a"] * 6))
    with stage_days(warehouse, "events", text.schema) as staged:
        assert staged is None
    with pytest.raises(StorageError, match="A table's column keeps its type"):
        replace_days(warehouse, "events", named(0, 1, 2), text.schema, text.to_batches(), 6)


@pytest.mark.parametrize("new", [True, False])
def test_a_column_that_another_writer_adds_meanwhile_is_a_conflict(warehouse: Warehouse, home: Path, new: bool) -> None:
    """Both would be the same field. If both writers added the same ones, or only the other one, nothing is in the way."""
    if not new:
        write_days(warehouse, samples())
    wide, other = samples(price=0.5), samples(size=7)
    with stage_days(warehouse, "events", wide.schema) as staged:
        written = stage(staged, wide)
        replace_days(warehouse, "events", named(2), other.schema, other.slice(4).to_batches(), 2)
        with pytest.raises(ConflictError, match=r"^schema of table 'events'"):
            written.commit(named(0), {})
        files = data_files(home) - 3
    assert data_files(home) == files
    with stage_days(warehouse, "events", wide.schema) as staged:
        stage(staged, wide)
        replace_days(warehouse, "events", named(2), wide.schema, wide.slice(4).to_batches(), 2)
        stage(staged, wide).commit(named(0), {})
    assert stored_ids(warehouse) == [0, 1, *([] if new else [10, 11]), 20, 21]
    both, third = samples(price=0.5, size=7), samples(third=True)
    with stage_days(warehouse, "events", both.schema) as staged:
        written = stage(staged, both)
        replace_days(warehouse, "events", named(2), third.schema, third.slice(4).to_batches(), 2)
        written.commit(named(1), {})
    found = read_rows(warehouse, warehouse.current("events"), ["id", "price", "size", "third"]).sort_by("id")
    assert found.slice(found.num_rows - 4).to_pylist() == [
        *({"id": i, "price": 0.5, "size": 7, "third": None} for i in (10, 11)),
        *({"id": i, "price": None, "size": None, "third": True} for i in (20, 21)),
    ]


@pytest.mark.parametrize("new", [True, False])
def test_rows_that_another_writer_gives_a_day_meanwhile_are_not_lost(warehouse: Warehouse, new: bool) -> None:
    if not new:
        write_days(warehouse, samples())
    newer = rows_of(DAYS[0], 1, id=[7])
    with stage_days(warehouse, "events", samples().schema) as staged:
        written = stage(staged, samples())
        replace_days(warehouse, "events", named(0), newer.schema, newer.to_batches(), 1)
        with pytest.raises(
            ConflictError, match=r"^table 'events': expected 2024-01-01 .*, got rows written in the mean"
        ):
            written.commit(named(0, 1), {})
        written.commit(named(1), {})
    assert stored_ids(warehouse) == [7, 10, 11, *([] if new else [20, 21])]


def test_files_of_a_commit_without_an_answer_stay(
    warehouse: Warehouse, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_days(warehouse, samples())
    late = list[Any]()
    commit = type(warehouse.catalog).commit_table

    def gives_up(*arguments: Any) -> None:
        late.append(arguments)
        raise TimeoutError("504 gateway timeout.")

    with monkeypatch.context() as patch:
        patch.setattr(type(warehouse.catalog), "commit_table", gives_up)
        with pytest.raises(UnknownCommitError), stage_days(warehouse, "events", samples().schema) as staged:
            stage(staged, samples()).commit(named(1), {})
    [arguments] = late
    commit(*arguments)
    assert stored_ids(warehouse) == [0, 1, 10, 11, 20, 21]


def test_an_interrupt_after_the_commit_does_not_delete_its_staged_files(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_days(warehouse, samples())
    commit = type(warehouse.catalog).commit_table

    def interrupted(*arguments: Any) -> None:
        commit(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(type(warehouse.catalog), "commit_table", interrupted)
    with pytest.raises(KeyboardInterrupt), stage_days(warehouse, "events", samples().schema) as staged:
        stage(staged, samples()).commit(named(1), {})
    assert stored_ids(warehouse) == [0, 1, 10, 11, 20, 21]


def test_days_that_follow_each_other_share_no_file_and_may_have_empty_batches(warehouse: Warehouse) -> None:
    """A row group whose rows another engine has all deleted is read as an empty batch."""
    days = [DAY + datetime.timedelta(days=number) for number in range(3)]
    rows = pa.table({"day": [day for day in days for _ in range(70)], "number": range(210)})
    batches = [rows.slice(0, 0).combine_chunks().to_batches() or [pa.RecordBatch.from_pylist([], rows.schema)]]
    batches += [rows.slice(begin, 35).combine_chunks().to_batches() for begin in range(0, 210, 35)]
    together = [batch for of in batches for batch in (*of, pa.RecordBatch.from_pylist([], rows.schema))]
    small = Warehouse(WarehouseConfig(file_rows=100), warehouse.home)
    replace_days(small, "events", dict.fromkeys(days, "i"), rows.schema, together, 210, by_day=True)
    assert read_rows(small, "events", rows.column_names).equals(rows)
    assert [len(files) for files in small.day_files(small.current("events")).values()] == [1, 1, 1]

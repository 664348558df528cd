"""Days are replaced as a whole, pinned rows stay, and a killed writer leaves nothing behind."""

import datetime
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyiceberg.expressions import EqualTo
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.utils.config import Config

from storage.config import WarehouseConfig
from storage.errors import ConflictError, StorageError, UnknownCommitError
from storage.layout.rewrite import rewrite_days
from storage.reader import SnapshotRef
from storage.snapshot.commit import ReplacedDays
from storage.snapshot.maintenance import expire
from storage.snapshot.writing import append_rows, replace_days
from storage.warehouse import Warehouse
from tests.homes import read_rows, rows_of, write_days

ROOT = Path(__file__).resolve().parents[2]
DAY1, DAY2, DAY3 = (datetime.date(2024, 1, day) for day in (1, 2, 3))


def rows(day: datetime.date, count: int, first: int = 0, **columns: Any) -> pa.Table:
    return rows_of(day, count, id=pa.array(range(first, first + count), pa.int64()), **columns)


write = partial(write_days, chunk_rows=5)


def read(warehouse: Warehouse, snapshot: SnapshotRef, columns: list[str], row_filter: Any = None) -> pd.DataFrame:
    return read_rows(warehouse, snapshot, columns, row_filter).to_pandas()


def ids(warehouse: Warehouse, snapshot: SnapshotRef | None = None) -> list[int]:
    return read(warehouse, snapshot or warehouse.current("events"), ["id"])["id"].tolist()


def on_disk(home: Path) -> set[str]:
    return {str(path) for path in home.rglob("*.parquet")}


def in_table(warehouse: Warehouse, name: str = "events") -> set[str]:
    """Returns the data files of all snapshots."""
    table = warehouse.table(name)
    scans = [table.scan(snapshot_id=snapshot.snapshot_id) for snapshot in table.snapshots()]
    return {task.file.file_path.removeprefix("file://") for scan in scans for task in scan.plan_files()}


# Replacing and pinning


def test_a_replaced_day_leaves_the_others_alone_and_a_pinned_snapshot_as_it_was(warehouse: Warehouse) -> None:
    old = write(warehouse, rows(DAY1, 23), rows(DAY2, 3, 100))
    new = write(warehouse, rows(DAY1, 2, 500))
    assert warehouse.day_rows(old) == {DAY1: 23, DAY2: 3}
    assert warehouse.day_rows(new) == {DAY1: 2, DAY2: 3}
    assert ids(warehouse, old) == [*range(23), 100, 101, 102]
    assert ids(warehouse, new) == [500, 501, 100, 101, 102]
    assert warehouse.current("events") == new
    assert len(warehouse.table("events").snapshots()) == 2  # one commit a call, for any number of files


def test_several_days_change_in_one_commit(warehouse: Warehouse) -> None:
    write(warehouse, rows(DAY1, 3), rows(DAY2, 3, 10), rows(DAY3, 3, 20))
    new = write(warehouse, rows(DAY3, 1, 50), rows(DAY1, 1, 40))
    assert ids(warehouse, new) == [40, 10, 11, 12, 50]
    assert len(warehouse.table("events").snapshots()) == 2


def test_chunks_files_and_row_groups_keep_the_order_of_the_rows(warehouse: Warehouse) -> None:
    snapshot = write(warehouse, rows(DAY2, 150, 1_000), rows(DAY1, 47))
    fragments = warehouse.reader(snapshot, ["id"]).fragments()
    assert ids(warehouse, snapshot) == [*range(47), *range(1_000, 1_150)]
    assert [f.day for f in fragments] == sorted(f.day for f in fragments)
    assert max(f.rows for f in fragments) == 4
    assert sum(f.rows for f in fragments) == 197
    assert len({f.path for f in fragments if f.day == DAY2}) > 10  # names sort by number, not as text


def test_a_day_can_be_emptied(warehouse: Warehouse) -> None:
    write(warehouse, rows(DAY1, 5), rows(DAY2, 6))
    empty = replace_days(warehouse, "events", {DAY1: "gone"}, rows(DAY1, 0).schema, [], 0)
    assert warehouse.day_rows(empty) == {DAY2: 6}


def test_written_days_hold_the_last_identity(warehouse: Warehouse) -> None:
    assert warehouse.written_days("events") == {}
    write(warehouse, rows(DAY1, 2), rows(DAY2, 2), identity="first")
    write(warehouse, rows(DAY1, 2), identity="second")
    assert warehouse.written_days("events") == {DAY1: "second", DAY2: "first"}
    reopened = Warehouse(WarehouseConfig(), warehouse.home)
    assert reopened.written_days("events") == {DAY1: "second", DAY2: "first"}


@pytest.mark.parametrize("most_asked", [0, 1_000])
@pytest.mark.parametrize("harm", [Path.unlink, lambda path: path.write_bytes(b"PAR1")], ids=["lost", "cut"])
def test_a_day_without_all_of_its_bytes_is_not_written(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch, harm: Callable[[Path], object], most_asked: int
) -> None:
    """Whether sizes are asked for one by one or listed."""
    monkeypatch.setattr("storage.warehouse.MOST_ASKED", most_asked)
    write(warehouse, rows(DAY1, 3), rows(DAY2, 3), rows(DAY3, 3), identity="first")
    asked, plain = list[str](), PyArrowFileIO.new_input
    monkeypatch.setattr(PyArrowFileIO, "new_input", lambda io, path: asked.append(path) or plain(io, path))
    assert warehouse.written_days("events") == dict.fromkeys([DAY1, DAY2, DAY3], "first")
    assert any(path.endswith(".parquet") for path in asked) == bool(most_asked)
    (path,) = (warehouse.home / "dlrm" / "events" / "data" / f"day={DAY2}").glob("*.parquet")
    harm(path)
    assert warehouse.written_days("events") == {DAY1: "first", DAY3: "first"}
    assert warehouse.state_of_days("events").whole == {DAY1, DAY3}


def test_a_day_that_another_engine_has_changed_is_not_as_written(warehouse: Warehouse) -> None:
    write(warehouse, rows(DAY1, 3), rows(DAY2, 3), rows(DAY3, 3), identity="first")
    table = warehouse.table("events")
    table.append(rows(DAY1, 3).cast(table.schema().as_arrow()))
    table.overwrite(rows(DAY2, 1).cast(table.schema().as_arrow()), EqualTo("day", DAY2.isoformat()))
    assert warehouse.written_days("events") == {DAY3: "first"}
    assert warehouse.changed_days("events") == {DAY1: "first", DAY2: "first"}
    expire(warehouse, "events", datetime.timedelta(0))
    assert warehouse.changed_days("events") == {DAY1: "first", DAY2: "first"}
    rewrite_days(warehouse, "events", [DAY1], warehouse.home / "tmp")  # other files, the same foreign rows
    assert warehouse.written_days("events") == {DAY3: "first"}
    assert warehouse.changed_days("events") == {DAY1: "first", DAY2: "first"}
    write(warehouse, rows(DAY1, 3), rows(DAY2, 3), identity="first")
    assert warehouse.written_days("events") == dict.fromkeys([DAY1, DAY2, DAY3], "first")
    assert warehouse.changed_days("events") == {}


def test_a_table_that_was_rolled_back_has_the_days_of_the_earlier_write(warehouse: Warehouse) -> None:
    first = write(warehouse, rows(DAY1, 3), identity="first")
    write(warehouse, rows(DAY1, 3, 100), identity="second")
    warehouse.table("events").manage_snapshots().rollback_to_snapshot(first.snapshot_id).commit()
    assert warehouse.written_days("events") == {DAY1: "first"}
    assert warehouse.changed_days("events") == {}
    expire(warehouse, "events", datetime.timedelta(0))
    write(warehouse, rows(DAY2, 3), identity="other")
    expire(warehouse, "events", datetime.timedelta(0))
    assert warehouse.written_days("events") == {DAY1: "first", DAY2: "other"}


def test_contents_of_a_day_stay_while_other_days_change(warehouse: Warehouse) -> None:
    before = warehouse.day_contents(write(warehouse, rows(DAY1, 25), rows(DAY2, 3)))
    assert list(before) == [DAY1, DAY2]
    after = warehouse.day_contents(write(warehouse, rows(DAY2, 3), rows(DAY3, 1)))
    assert (after[DAY1], list(after)) == (before[DAY1], [DAY1, DAY2, DAY3])
    assert after[DAY2] != before[DAY2]
    assert len(set(after.values())) == 3


def test_a_tag_keeps_its_snapshot(warehouse: Warehouse) -> None:
    old = write(warehouse, rows(DAY1, 3))
    warehouse.tag(old, "train-a")
    new = write(warehouse, rows(DAY1, 4))
    warehouse.tag(old, "train-a")  # a second time changes nothing
    table = warehouse.table("events")
    assert table.refs()["train-a"].snapshot_id == old.snapshot_id
    table.maintenance.expire_snapshots().older_than(datetime.datetime.now() + datetime.timedelta(days=1)).commit()
    assert ids(warehouse, old) == [0, 1, 2]
    with pytest.raises(StorageError) as error:
        warehouse.tag(new, "train-a")
    assert str(error.value) == (
        f"tag 'train-a' of table 'events': expected snapshot {new.snapshot_id}, got {old.snapshot_id}. "
        "A tag cannot move to another snapshot. Choose another name."
    )


# Columns


def test_new_columns_read_null_in_old_rows(warehouse: Warehouse) -> None:
    old = write(warehouse, rows(DAY1, 3))
    new = write(warehouse, rows(DAY2, 2, x=[0.5, None], tags=[[1, 2], None]))
    frame = read(warehouse, new, ["x", "id", "tags"])
    assert frame["id"].tolist() == [0, 1, 2, 0, 1]
    assert frame["x"].isna().tolist() == [True, True, True, False, True]
    assert [None if tags is None else list(tags) for tags in frame["tags"]] == [None, None, None, [1, 2], None]
    assert read(warehouse, new, ["x"])["x"].isna().sum() == 4  # only a column that old files lack
    assert warehouse.schema(old).names == ["day", "id"]
    assert warehouse.schema(new).names == ["day", "id", "x", "tags"]
    newest = write(warehouse, rows(DAY3, 1))  # a source without the new columns
    assert read(warehouse, newest, ["x"])["x"].isna().tolist() == [True, True, True, False, True, True]


def test_a_column_dropped_and_added_again_is_null_in_old_files(warehouse: Warehouse) -> None:
    old = write(warehouse, rows(DAY1, 3, x=[1.0, 2.0, 3.0]))
    with warehouse.table("events").update_schema() as update:
        update.delete_column("x")
    new = write(warehouse, rows(DAY2, 1, x=[9.0]), anew=["x"])
    assert read(warehouse, new, ["x"])["x"].dropna().tolist() == [9.0]
    assert read(warehouse, old, ["x"])["x"].tolist() == [1.0, 2.0, 3.0]


def test_a_renamed_column_keeps_its_values(warehouse: Warehouse) -> None:
    write(warehouse, rows(DAY1, 3, x=[1.0, 2.0, 3.0]))
    with warehouse.table("events").update_schema() as update:
        update.rename_column("x", "y")
    new = write(warehouse, rows(DAY2, 1, y=[4.0]))
    assert read(warehouse, new, ["y"])["y"].tolist() == [1.0, 2.0, 3.0, 4.0]


def test_a_column_may_widen(warehouse: Warehouse) -> None:
    write(warehouse, rows(DAY1, 2, n=pa.array([1, 2], pa.int32())))
    wide = write(warehouse, rows(DAY2, 1, n=pa.array([2**40], pa.int64())))
    narrow = write(warehouse, rows(DAY3, 1, n=pa.array([5], pa.int32())))
    assert warehouse.schema(wide).field("n").type == pa.int64()
    assert read(warehouse, narrow, ["n"])["n"].tolist() == [1, 2, 2**40, 5]


def test_a_column_that_changes_its_type_is_refused(warehouse: Warehouse, home: Path) -> None:
    old = write(warehouse, rows(DAY1, 2, x=[1.0, 2.0]))
    with pytest.raises(StorageError) as error:
        write(warehouse, rows(DAY1, 1).set_column(1, "id", pa.array(["a"])).append_column("x", pa.array([[1]])))
    assert str(error.value) == (
        "columns of table 'events': expected id integer, x float, got id text, x list of integer. "
        "A table's column keeps its type. Convert it, begin a new one with "
        'source.rename={"id": "id_2", "x": "x_2"} (null in all earlier days), or write all days into another table with '
        "name=NAME."
    )
    assert warehouse.current("events") == old
    assert on_disk(home) == in_table(warehouse)


def test_a_table_that_somebody_else_made_is_not_taken_for_one_beside_another(warehouse: Warehouse) -> None:
    write(warehouse, rows(DAY1, 3), name="ads")
    theirs = write(warehouse, rows(DAY1, 3), name="ads_quarantine")
    with warehouse.table("ads_quarantine").transaction() as transaction:
        transaction.remove_properties("dlrm.part-of")  # as if another engine had made it
    refused = rows(DAY1, 1).rename_columns(["day", "reason"])
    with pytest.raises(StorageError) as error:
        write(warehouse, refused, name="ads_quarantine")
    assert str(error.value) == (
        "table 'ads_quarantine': expected the one that belongs to table 'ads', got a table without reason. "
        "Rename table 'ads_quarantine', or set another name than 'ads'."
    )
    assert warehouse.current("ads_quarantine") == theirs


def test_a_table_of_the_same_columns_that_another_engine_made_is_not_ours(warehouse: Warehouse) -> None:
    theirs = rows(DAY1, 3)
    warehouse.catalog.create_table("dlrm.ads_held", theirs.schema).append(theirs)
    with pytest.raises(StorageError, match="expected the one that belongs to table 'ads', got a table without x"):
        write(warehouse, rows(DAY2, 2, x=[1.0, 2.0]), name="ads_held")


def test_a_table_beside_another_may_get_columns(warehouse: Warehouse) -> None:
    write(warehouse, rows(DAY1, 3), name="ads_scores")
    assert warehouse.table("ads_scores").properties["dlrm.part-of"] == "ads"
    snapshot = write(warehouse, rows(DAY2, 3, x=[1.0, 2.0, 3.0]), name="ads_scores")
    assert warehouse.schema(snapshot).names == ["day", "id", "x"]


# What does not exist


def test_what_cannot_be_read_is_named(warehouse: Warehouse) -> None:
    snapshot = write(warehouse, rows(DAY1, 2, price=[1.0, 2.0]))
    unknown = SnapshotRef(table="events", snapshot_id=5)
    no_snapshot = (
        "snapshot 5 of table 'events': expected a snapshot of the table, got none of that id. "
        "It may have expired. Use the current snapshot."
    )
    cases: list[tuple[Callable[[], object], str]] = [
        (
            lambda: warehouse.reader(snapshot, ["pricee"]),
            "column 'pricee': expected a column of table 'events', got none of that name. "
            "Closest: price. Correct the name.",
        ),
        (
            lambda: warehouse.reader(snapshot, ["id"], EqualTo("x", 1)),
            "row filter of table 'events': expected a filter that matches its columns, "
            "got Could not find field with name x, case_sensitive=True. Correct it.",
        ),
        (
            lambda: warehouse.reader(snapshot, ["id"], EqualTo("id", "abc")),
            "row filter of table 'events': expected a filter that matches its columns, "
            "got Could not convert abc into a long. Correct it.",
        ),
        (
            lambda: warehouse.current("event"),
            "table 'event': expected a table of the warehouse, got tables: events. Run `python -m flows.ingest` first.",
        ),
        (lambda: warehouse.reader(unknown, ["id"]), no_snapshot),
        (lambda: warehouse.day_rows(unknown), no_snapshot),
        (lambda: warehouse.schema(unknown), no_snapshot),
        (lambda: warehouse.tag(unknown, "t"), no_snapshot),
    ]
    for call, sentence in cases:
        with pytest.raises(StorageError) as error:
            call()
        assert str(error.value) == sentence


def test_an_absent_and_an_empty_table(warehouse: Warehouse) -> None:
    assert not warehouse.has_table("events")
    with pytest.raises(StorageError, match=r"got tables: none\. Run"):
        warehouse.current("events")
    with pytest.raises(StorageError, match="rows to write"):
        replace_days(warehouse, "events", {DAY1: "i"}, rows(DAY1, 0).schema, [], 1)
    with pytest.raises(StorageError) as error:
        warehouse.current("events")
    assert (
        str(error.value) == "table 'events': expected at least one day, got an empty table. Run the ingest flow first."
    )


@pytest.mark.parametrize("name", ["", "1a", "a-b", "a b", "a.b", "../a", "a\n", 'a"', "ä", "a" * 129])
def test_names_of_another_form_are_refused(warehouse: Warehouse, name: str) -> None:
    sentence = (
        f"name {name!r}: expected a name that matches ^[A-Za-z_][A-Za-z0-9_]{{0,127}}$, got another form. Rename it."
    )
    with pytest.raises(StorageError) as error:
        write(warehouse, rows(DAY1, 1), name=name)
    assert str(error.value) == sentence
    with pytest.raises(StorageError) as error:
        write(warehouse, rows(DAY1, 1).append_column(name, pa.array([1])))
    assert str(error.value) == sentence
    assert not warehouse.has_table("events")


def test_the_longest_name_is_accepted(warehouse: Warehouse) -> None:
    longest = "_" + "a" * 127
    snapshot = write(warehouse, rows(DAY1, 1, **{longest: [7]}))
    assert read(warehouse, snapshot, [longest])[longest].tolist() == [7]


# What goes wrong while writing


def test_another_number_of_rows_is_refused_and_nothing_stays(warehouse: Warehouse, home: Path) -> None:
    old = write(warehouse, rows(DAY1, 5))
    table = rows(DAY1, 30)
    with pytest.raises(StorageError) as error:
        replace_days(warehouse, "events", {DAY1: "i"}, table.schema, table.to_batches(max_chunksize=5), 31)
    assert str(error.value) == (
        "table 'events': expected 31 rows to write, got 30. The source changed while it was read. Run the command again."
    )
    assert warehouse.current("events") == old
    assert on_disk(home) == in_table(warehouse)


def test_rows_of_another_day_are_refused_before_the_commit(warehouse: Warehouse, home: Path) -> None:
    old = write(warehouse, rows(DAY1, 5), rows(DAY2, 5))
    table = rows(DAY3, 4)
    with pytest.raises(StorageError) as error:
        replace_days(warehouse, "events", {DAY1: "i", DAY2: "i"}, table.schema, table.to_batches(), 4)
    assert str(error.value) == (
        "table 'events': expected rows of 2024-01-01 to 2024-01-02 only, got rows of 2024-01-03. "
        "Pass all days of the rows."
    )
    assert warehouse.current("events") == old
    assert on_disk(home) == in_table(warehouse)


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_an_error_between_batches_leaves_the_old_day_and_no_files(
    warehouse: Warehouse, home: Path, kind: type[BaseException]
) -> None:
    old = write(warehouse, rows(DAY1, 5))

    def batches() -> Iterator[pa.RecordBatch]:
        yield from rows(DAY1, 35).to_batches(max_chunksize=5)
        assert len(on_disk(home)) > 1  # some files are already written
        raise kind("stop")

    with pytest.raises(kind, match="stop"):
        replace_days(warehouse, "events", {DAY1: "i"}, rows(DAY1, 0).schema, batches(), 100)
    assert warehouse.current("events") == old
    assert ids(warehouse) == [0, 1, 2, 3, 4]
    assert on_disk(home) == in_table(warehouse)


def test_a_full_disk_leaves_no_half_file(warehouse: Warehouse, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(warehouse, rows(DAY1, 5))
    new_output = PyArrowFileIO.new_output

    def full(io: PyArrowFileIO, location: str) -> Any:
        output = new_output(io, location)
        if "/00000-1-" in location:  # the second data file
            Path(location.removeprefix("file://")).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return output

    with monkeypatch.context() as patch:
        patch.setattr(PyArrowFileIO, "new_output", full)
        with pytest.raises(OSError, match="No space"):
            write(warehouse, rows(DAY1, 35))
    assert warehouse.current("events") == old
    assert on_disk(home) == in_table(warehouse)


def test_an_interrupt_after_the_commit_does_not_delete_its_files(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(warehouse, rows(DAY1, 5))
    commit = type(warehouse.catalog).commit_table

    def interrupted(*arguments: Any) -> None:
        commit(*arguments)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(warehouse.catalog), "commit_table", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(warehouse, rows(DAY1, 3, 70))
    assert ids(warehouse) == [70, 71, 72]


@pytest.mark.parametrize("append", [False, True])
def test_a_commit_that_takes_effect_after_its_error_keeps_its_files(
    warehouse: Warehouse, home: Path, monkeypatch: pytest.MonkeyPatch, append: bool
) -> None:
    """A gateway gives up on a catalog that is still at work."""
    write(warehouse, rows(DAY1, 5))
    commit, late = type(warehouse.catalog).commit_table, list[Any]()
    change: Callable[[], object] = partial(write, warehouse, rows(DAY1, 1, 70))
    if append:
        change = partial(append_rows, warehouse, "events", rows(DAY1, 0).schema, [{"day": DAY1, "id": 70}])

    def gives_up(*arguments: Any) -> None:
        late.append(arguments)
        raise TimeoutError("504 gateway timeout.")

    with monkeypatch.context() as patch:
        patch.setattr(type(warehouse.catalog), "commit_table", gives_up)
        with pytest.raises(UnknownCommitError) as error:
            change()
    assert str(error.value) == (
        "commit to table 'events': expected an answer of the catalog, got 504 gateway timeout. "
        "It may still take effect. Run the command again: it skips what was written."
    )
    assert ids(warehouse) == list(range(5))
    [arguments] = late
    commit(*arguments)
    assert sorted(ids(warehouse)) == ([*range(5), 70] if append else [70])
    assert on_disk(home) == in_table(warehouse)


def test_a_commit_whose_answer_is_lost_counts(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    write(warehouse, rows(DAY1, 5))
    commit = type(warehouse.catalog).commit_table

    def lost(*arguments: Any) -> None:
        commit(*arguments)
        raise ConnectionError("reset by peer")

    with monkeypatch.context() as patch:
        patch.setattr(type(warehouse.catalog), "commit_table", lost)
        snapshot = write(warehouse, rows(DAY1, 3, 70))
    assert warehouse.current("events") == snapshot
    assert ids(warehouse) == [70, 71, 72]


def test_an_interrupted_commit_keeps_its_files(
    warehouse: Warehouse, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(warehouse, rows(DAY1, 5))
    before = on_disk(home)

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(warehouse.catalog), "commit_table", interrupted)
        with pytest.raises(KeyboardInterrupt):
            write(warehouse, rows(DAY1, 3, 70))
    assert ids(warehouse) == list(range(5))
    assert len(on_disk(home) - before) == 1  # the catalog may have got the message


def test_rows_lost_by_the_commit_are_noticed(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    write(warehouse, rows(DAY2, 3))
    keep = ReplacedDays.append_data_file
    monkeypatch.setattr(
        ReplacedDays, "append_data_file", lambda self, file: keep(self, file) if file.record_count == 10 else self
    )
    with pytest.raises(StorageError) as error:
        write(warehouse, rows(DAY1, 13))
    assert str(error.value) == (
        "table 'events': expected 13 rows in 1 days after the commit, got 10. "
        "Do not train on this snapshot. Ingest the days again."
    )


# Two writers of one catalog


def race(home: Path, mine: pa.Table, theirs: pa.Table) -> tuple[Warehouse, SnapshotRef]:
    """Writes `mine`. Another writer commits `theirs` between its batches."""
    warehouse, other = Warehouse(WarehouseConfig(file_rows=10), home), Warehouse(WarehouseConfig(), home)
    write(warehouse, rows(DAY1, 5), rows(DAY2, 5))

    def batches() -> Iterator[pa.RecordBatch]:
        yield from mine.to_batches(max_chunksize=10)
        write(other, theirs, identity="theirs")

    days = dict.fromkeys(mine["day"].to_pylist(), "mine")
    return warehouse, replace_days(warehouse, "events", days, mine.schema, batches(), mine.num_rows)


def test_of_two_writers_of_one_day_exactly_one_wins(home: Path) -> None:
    with pytest.raises(ConflictError) as error:
        race(home, rows(DAY1, 25, 100), rows(DAY1, 3, 200))
    assert str(error.value) == (
        "table 'events': expected no other writer of 2024-01-01, got a commit of another writer. Run the command again."
    )
    warehouse = Warehouse(WarehouseConfig(), home)
    assert ids(warehouse) == [200, 201, 202, *range(5)]
    assert on_disk(home) == in_table(warehouse)
    assert warehouse.written_days("events") == {DAY1: "theirs", DAY2: "i"}


def test_two_writers_of_a_new_day_do_not_both_land(home: Path) -> None:
    with pytest.raises(ConflictError):
        race(home, rows(DAY3, 25, 100), rows(DAY3, 3, 200))
    assert ids(Warehouse(WarehouseConfig(), home)) == [*range(5), *range(5), 200, 201, 202]


def test_two_writers_of_different_days_both_land(home: Path) -> None:
    warehouse, mine = race(home, rows(DAY1, 25, 100), rows(DAY2, 3, 200))
    assert ids(warehouse) == ids(warehouse, mine) == [*range(100, 125), 200, 201, 202]
    assert warehouse.written_days("events") == {DAY1: "mine", DAY2: "theirs"}


def test_two_writers_may_make_the_table_or_add_columns_at_once(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    warehouse, other = Warehouse(WarehouseConfig(), home), Warehouse(WarehouseConfig(), home)
    looks = {"has_table": rows(DAY2, 3, a=[1, 2, 3]), "table": rows(DAY3, 3, b=[1, 2, 3])}

    def then_theirs(method: str) -> Callable[[str], Any]:
        """Returns stale state, because the other writer commits in between, once."""
        look = getattr(Warehouse, method)

        def seen(name: str) -> Any:
            found = look(warehouse, name)
            if method in looks:
                write(other, looks.pop(method))
            return found

        return seen

    for method in ("has_table", "table"):
        monkeypatch.setattr(warehouse, method, then_theirs(method))
    snapshot = write(warehouse, rows(DAY1, 2, c=[1, 2]))
    assert warehouse.day_rows(snapshot) == {DAY1: 2, DAY2: 3, DAY3: 3}
    assert warehouse.schema(snapshot).names == ["day", "id", "a", "b", "c"]


KILLED = """
import datetime, os, pathlib, signal, sys
import pyarrow as pa
import pyiceberg.catalog.sql, pyiceberg.io.pyarrow  # once, not in every child
from storage.config import WarehouseConfig
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAY = datetime.date(2024, 1, 1)

def write(point):
    warehouse = Warehouse(WarehouseConfig(row_group_rows=4, file_rows=10), pathlib.Path(sys.argv[1]))
    die = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    table = pa.table({"day": pa.array([DAY] * 40, pa.date32()), "id": range(100, 140)})
    def batches():
        for number, batch in enumerate(table.to_batches(max_chunksize=5)):
            if number == point:
                die()
            yield batch
    commit = warehouse.catalog.commit_table
    if point == "before commit":
        warehouse.catalog.commit_table = die
    if point == "after commit":
        warehouse.catalog.commit_table = lambda *arguments: (commit(*arguments), die())
    replace_days(warehouse, "events", {DAY: "new"}, table.schema, batches(), 40)

for point in [int(text) if text.isdigit() else text for text in sys.argv[2:]]:
    child = os.fork()
    if child == 0:
        write(point)
        os._exit(1)
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
"""


def kill_writers(home: Path, *points: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", KILLED, str(home), *points], check=True, env=environment, timeout=300)


@pytest.mark.slow
def test_a_killed_writer_leaves_the_whole_old_day_or_the_whole_new_one(warehouse: Warehouse, home: Path) -> None:
    write(warehouse, rows(DAY1, 5), rows(DAY2, 2, 50), identity="old")
    kill_writers(home, *map(str, range(8)), "before commit")
    assert ids(warehouse) == [0, 1, 2, 3, 4, 50, 51]
    assert warehouse.written_days("events")[DAY1] == "old"
    kill_writers(home, "after commit")
    assert ids(warehouse) == [*range(100, 140), 50, 51]
    assert warehouse.written_days("events")[DAY1] == "new"
    assert ids(warehouse, write(warehouse, rows(DAY1, 3, 7))) == [7, 8, 9, 50, 51]


def test_files_are_laid_out_as_configured(home: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(codec="lz4", row_group_rows=6, file_rows=12), home)
    write(warehouse, rows(DAY1, 30))
    files = [pq.ParquetFile(path).metadata for path in sorted(home.rglob("*.parquet"))]
    assert sorted(file.num_rows for file in files) == [15, 15]  # a batch that fills a chunk ends it
    assert {file.row_group(0).column(0).compression for file in files} == {"LZ4"}
    assert {file.row_group(0).num_rows for file in files} == {6}


def test_a_catalog_of_pyicebergs_own_configuration_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The config may give access to a store alone. The embedded catalog is taken only if nothing names another."""
    access = WarehouseConfig(catalog={"s3.region": "us-east-1"})
    assert Warehouse(access, tmp_path / "home").catalog.properties["uri"] == f"sqlite:///{tmp_path}/home/catalog.db"
    for name, value in {"TYPE": "sql", "URI": f"sqlite:///{tmp_path}/theirs.db", "WAREHOUSE": "/nowhere"}.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__DLRM__{name}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())
    assert Warehouse(access, tmp_path / "home").catalog.properties["uri"] == f"sqlite:///{tmp_path}/theirs.db"

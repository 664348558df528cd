"""Dead writers leave only orphans. Maintenance keeps what a tag names and removes what nothing names."""

import datetime
import itertools
import json
import os
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyiceberg.expressions.visitors import _ManifestEvalVisitor
from pyiceberg.io.pyarrow import PyArrowFileIO

from storage.config import WarehouseConfig
from storage.errors import CorruptFileError, StorageError
from storage.reader import SnapshotRef
from storage.snapshot.commit import ReplacedDays
from storage.snapshot.days import EARLIER, identities, notes
from storage.snapshot.maintenance import ExpireResult, drop_tags, expire, vacuum
from storage.warehouse import Warehouse
from tests.homes import rows_of, write_days

ROOT = Path(__file__).resolve().parents[2]
DAY1, DAY2 = datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)
NOW = datetime.timedelta(0)


def rows(day: datetime.date, count: int, first: int = 0) -> pa.Table:
    return rows_of(day, count, id=pa.array(range(first, first + count)))


write = partial(write_days, chunk_rows=5)


def ids(warehouse: Warehouse, snapshot: SnapshotRef | None = None) -> list[int]:
    reader = warehouse.reader(snapshot or warehouse.current("events"), ["id"])
    return [i for fragment in reader.fragments() for i in reader.read(fragment)["id"].to_pylist()]


def on_disk(home: Path) -> set[str]:
    return {str(path) for path in home.rglob("*") if path.is_file() and "catalog.db" not in path.name}


# A writer that is killed at a call of its storage or catalog: each run counts its calls, and dies at a given one


KILLED = """
import datetime, os, pathlib, signal, sys
import pyarrow as pa
import pyiceberg.catalog.sql
from pyiceberg.io.pyarrow import PyArrowFile, PyArrowFileIO
from storage.config import WarehouseConfig
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAY = datetime.date(2024, 1, 1)
calls = 0

def counted(owner, name, point):
    plain = getattr(owner, name)
    def call(*arguments, **named):
        global calls
        calls += 1
        if calls == point:
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(*arguments, **named)
    setattr(owner, name, call)

def write(point):
    warehouse = Warehouse(WarehouseConfig(row_group_rows=4, file_rows=10), pathlib.Path(sys.argv[1]))
    for owner, name in ((PyArrowFile, "create"), (PyArrowFile, "__len__"), (PyArrowFileIO, "new_output"),
                        (PyArrowFileIO, "delete"), (type(warehouse.catalog), "commit_table"),
                        (type(warehouse.catalog), "load_table")):
        counted(owner, name, point)
    table = pa.table({"day": pa.array([DAY] * 40, pa.date32()), "id": pa.array(range(100, 140))})
    replace_days(warehouse, "events", {DAY: "new"}, table.schema, table.to_batches(max_chunksize=5), 40)

for line in sys.stdin:
    child = os.fork()
    if child == 0:
        write(int(line))
        print(calls, flush=True)
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    print("killed" if os.WIFSIGNALED(status) else "whole", flush=True)
"""


@pytest.fixture
def write_until(home: Path) -> Iterator[Callable[[int], list[str]]]:
    """(call) -> what a writer says that is killed in that call; 0: in none. It is a fork: the imports are paid once."""
    command = [sys.executable, "-c", KILLED, str(home)]
    with subprocess.Popen(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        given, said = process.stdin, process.stdout

        def write(point: int) -> list[str]:
            print(point, file=given, flush=True)
            words: list[str] = []
            while not {"killed", "whole"} & {*words}:
                line = said.readline()
                assert line, "the writer ended"
                words.append(line.strip())
            return words

        yield write
        given.close()


@pytest.mark.slow
def test_a_killed_writer_leaves_a_whole_day_and_its_orphans_are_removed(
    warehouse: Warehouse, home: Path, write_until: Callable[[int], list[str]]
) -> None:
    write(warehouse, rows(DAY1, 5), rows(DAY2, 2, 50), identity="old")
    write_until(0)
    write(warehouse, rows(DAY1, 5), identity="old")
    calls, *ends = write_until(0) + write_until(0)  # over old rows, and over new ones
    assert (ends[0], ends[2]) == ("whole", "whole")
    write(warehouse, rows(DAY1, 5), identity="old")
    seen = set()
    for point in sorted(random.Random(1).sample(range(1, min(int(calls), int(ends[1])) + 1), 10)):
        assert write_until(point) == ["killed"]
        first = ids(warehouse)
        assert first in ([0, 1, 2, 3, 4, 50, 51], [*range(100, 140), 50, 51])
        assert warehouse.written_days("events")[DAY1] == ("old" if len(first) == 7 else "new")
        seen.add(len(first))
    assert 7 in seen
    last = write(warehouse, rows(DAY1, 3, 7))
    assert ids(warehouse) == [7, 8, 9, 50, 51]
    before = on_disk(home)
    counted = vacuum(warehouse, "events", NOW)
    assert (counted.dry_run, on_disk(home)) == (True, before)
    removed = vacuum(warehouse, "events", NOW, dry_run=False)
    assert removed.files == counted.files == len(before) - len(on_disk(home)) > 0
    assert vacuum(warehouse, "events", NOW).files == 0
    assert ids(warehouse, last) == [7, 8, 9, 50, 51]
    for snapshot in warehouse.table("events").snapshots():  # history reads as before
        assert ids(warehouse, SnapshotRef(table="events", snapshot_id=snapshot.snapshot_id))


def test_rows_in_a_wrong_partition_are_noticed_after_the_commit(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `add_files` did: it left NULL as the partition of a file without metrics."""
    from pyiceberg.manifest import DataFile
    from pyiceberg.typedef import Record

    write(warehouse, rows(DAY1, 3), rows(DAY2, 4))
    made = DataFile.from_args
    day2 = (DAY2 - datetime.date(1970, 1, 1)).days

    def misplaced(**arguments: Any) -> DataFile:
        return made(**{**arguments, "partition": Record(day2)} if arguments["record_count"] == 9 else arguments)

    with monkeypatch.context() as patch:
        patch.setattr(DataFile, "from_args", misplaced)
        with pytest.raises(StorageError, match="rows of 2024-01-01 only, got rows of 2024-01-02"):
            write(warehouse, rows(DAY1, 9))
        patch.setattr("storage.snapshot.writing.day_of", lambda file: DAY1)  # past the check before the commit
        patch.setattr(Warehouse, "day_rows", lambda *_: {DAY2: 13})
        with pytest.raises(StorageError) as error:
            write(warehouse, rows(DAY1, 9))
    assert str(error.value) == (
        "table 'events': expected 9 rows in 1 days after the commit, got 0. "
        "Do not train on this snapshot. Ingest the days again."
    )


def test_a_tag_keeps_a_snapshot_and_its_files(warehouse: Warehouse, home: Path) -> None:
    pinned = write(warehouse, rows(DAY1, 23), rows(DAY2, 3, 100), identity="old")
    warehouse.tag(pinned, "train-a")
    between = write(warehouse, rows(DAY1, 4, 200), identity="between")
    newest = write(warehouse, rows(DAY1, 2, 500), identity="new")
    assert expire(warehouse, "events", NOW, dry_run=True) == ExpireResult(snapshots=1, kept=2, tagged=1)
    assert len(warehouse.table("events").snapshots()) == 3
    assert expire(warehouse, "events", NOW) == ExpireResult(snapshots=1, kept=2, tagged=1)
    assert vacuum(warehouse, "events", NOW, dry_run=False).files > 0
    assert ids(warehouse, pinned) == [*range(23), 100, 101, 102]
    assert ids(warehouse, newest) == [500, 501, 100, 101, 102]
    assert warehouse.written_days("events") == {DAY1: "new", DAY2: "old"}
    with pytest.raises(StorageError) as error:
        warehouse.reader(between, ["id"])
    assert str(error.value) == (
        f"snapshot {between.snapshot_id} of table 'events': expected a snapshot of the table, got none of that id. "
        "It may have expired. Use the current snapshot."
    )


def test_what_was_written_stays_known_when_another_tool_expires_snapshots(warehouse: Warehouse) -> None:
    """pyiceberg's own maintenance knows nothing of our records."""
    for day, identity in ((DAY1, "first"), (DAY2, "second"), (DAY1, "third")):
        write(warehouse, rows(day, 3), identity=identity, notes={day: identity})
    before = warehouse.day_contents(warehouse.current("events"))
    kept = warehouse.current("events").snapshot_id
    their = warehouse.table("events")
    gone = [snapshot.snapshot_id for snapshot in their.snapshots() if snapshot.snapshot_id != kept]
    their.maintenance.expire_snapshots().by_ids(gone).commit()
    assert len(warehouse.table("events").snapshots()) == 1
    assert warehouse.written_days("events") == {DAY1: "third", DAY2: "second"}
    assert warehouse.day_notes("events") == {DAY1: "third", DAY2: "second"}
    assert warehouse.day_contents(warehouse.current("events")) == before


def test_records_of_another_writer_stay_when_a_commit_is_tried_again(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pyiceberg commits again on top of the other writer's snapshot."""
    write(warehouse, rows(DAY1, 3), identity="first")
    replaced, came = ReplacedDays._process_manifests, list[bool]()

    def overtaken(self: ReplacedDays, manifests: list[Any]) -> list[Any]:
        if not came:
            came.append(True)
            write(Warehouse(warehouse.config, warehouse.home), rows(DAY2, 3), identity="second")
        return replaced(self, manifests)

    monkeypatch.setattr(ReplacedDays, "_process_manifests", overtaken)
    write(warehouse, rows(DAY1, 4), identity="third")
    assert warehouse.written_days("events") == {DAY1: "third", DAY2: "second"}
    kept = warehouse.current("events").snapshot_id
    table = warehouse.table("events")
    table.maintenance.expire_snapshots().by_ids(
        [one.snapshot_id for one in table.snapshots() if one.snapshot_id != kept]
    ).commit()
    assert warehouse.written_days("events") == {DAY1: "third", DAY2: "second"}


def test_a_reader_names_its_expired_snapshot(warehouse: Warehouse) -> None:
    pinned = write(warehouse, rows(DAY1, 23))
    reader = warehouse.reader(pinned, ["id"])
    fragments = reader.fragments()
    write(warehouse, rows(DAY1, 2, 500))
    expire(warehouse, "events", NOW)
    assert reader.read(fragments[0]).num_rows == 4  # its files are there until the vacuum
    vacuum(warehouse, "events", NOW, dry_run=False)
    with pytest.raises(StorageError, match=r"It may have expired\. Use the current snapshot") as error:
        reader.read(fragments[1])
    assert not isinstance(error.value, CorruptFileError)  # not one that a quarantine would skip


def test_identities_of_days_survive_expiry_in_any_order(warehouse: Warehouse) -> None:
    first = write(warehouse, rows(DAY1, 3), rows(DAY2, 3), identity="a")
    warehouse.tag(first, "kept")  # older than the expired ones, and with another identity of the day
    write(warehouse, rows(DAY1, 4), identity="b")
    write(warehouse, rows(DAY2, 5), identity="c")
    expire(warehouse, "events", NOW)
    assert warehouse.written_days("events") == {DAY1: "b", DAY2: "c"}
    write(warehouse, rows(DAY1, 2), identity="d")
    assert warehouse.written_days("events") == {DAY1: "d", DAY2: "c"}
    expire(warehouse, "events", NOW)
    assert warehouse.written_days("events") == {DAY1: "d", DAY2: "c"}


@pytest.mark.parametrize("expired", [False, True])
def test_a_tagged_snapshot_keeps_what_is_known_of_its_days(warehouse: Warehouse, expired: bool) -> None:
    """Although its days are written again, and the snapshot that wrote them expires."""

    def write_day(note: str, same: dict[datetime.date, str]) -> SnapshotRef:
        return write(warehouse, rows(DAY1, 3), notes={DAY1: note}, same=same)

    def known(snapshot: SnapshotRef) -> list[Any]:
        table, names = warehouse.table("events"), warehouse.day_names(snapshot)
        return [identities(table, names), notes(table, names), warehouse.day_contents(snapshot)]

    write_day("open", {DAY1: "content"})
    other = write(warehouse, rows(DAY2, 3))
    warehouse.tag(other, "train-a")
    if expired:  # so that only properties have the record
        write(warehouse, rows(DAY2, 3))
        expire(warehouse, "events", NOW)
    before = known(other)
    assert before[1:] == [{DAY1: "open"}, before[2] | {DAY1: "content"}]
    for number in range(3):
        write_day(f"closed {number}", {})
        expire(warehouse, "events", NOW)
        assert known(other) == before
    assert known(warehouse.current("events"))[1] == {DAY1: "closed 2"}
    assert len(json.loads(warehouse.table("events").properties[EARLIER])) == 1
    drop_tags(warehouse, "events", ["train-a"])
    expire(warehouse, "events", NOW)
    assert json.loads(warehouse.table("events").properties[EARLIER]) == []


def test_young_snapshots_and_files_stay(warehouse: Warehouse, home: Path) -> None:
    write(warehouse, rows(DAY1, 3))
    write(warehouse, rows(DAY1, 4))
    hour = datetime.timedelta(hours=1)
    assert expire(warehouse, "events", hour).snapshots == 0
    expire(warehouse, "events", NOW)
    left = vacuum(warehouse, "events", hour, dry_run=False)
    assert (left.files, left.young_files > 0) == (0, True)
    for path in on_disk(home):
        os.utime(path, (0, 0))
    assert vacuum(warehouse, "events", hour, dry_run=False).files == left.young_files
    assert ids(warehouse) == [0, 1, 2, 3]


def test_a_table_that_cannot_be_loaded_is_named_before_anything_is_deleted(warehouse: Warehouse, home: Path) -> None:
    write(warehouse, rows(DAY1, 3))
    write(warehouse, rows(DAY1, 4))
    expire(warehouse, "events", NOW)
    write(warehouse, rows(DAY1, 1), name="other")
    metadata = Path(warehouse.table("other").metadata_location.removeprefix("file://"))
    metadata.write_text(metadata.read_text().replace('"long"', '"variant"'))
    before = on_disk(home)
    warehouse = Warehouse(warehouse.config, home)
    with pytest.raises(StorageError) as error:
        vacuum(warehouse, "events", NOW, dry_run=False)
    assert str(error.value) == (
        "table 'dlrm.other': expected to be readable, since its files may be below the location to clean, "
        "got ValidationError: 1 validation error for TableMetadataWrapper. "
        "Move it to another catalog, or repair it with the engine that made it."
    )
    assert on_disk(home) == before
    metadata.unlink()
    with pytest.raises(StorageError, match=r"table 'dlrm\.other': expected to be readable"):
        vacuum(warehouse, "events", NOW, dry_run=False)


def test_a_table_that_is_dropped_meanwhile_does_not_stop_a_vacuum(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(warehouse, rows(DAY1, 3))
    write(warehouse, rows(DAY1, 3), name="other")
    listed = warehouse.catalog.list_tables("dlrm")
    monkeypatch.setattr(warehouse.catalog, "list_tables", lambda _: listed)
    warehouse.catalog.drop_table(("dlrm", "other"))
    assert vacuum(warehouse, "events", NOW, dry_run=False).files == 0


def test_an_unreachable_store_of_another_table_is_not_taken_for_a_damaged_table(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(warehouse, rows(DAY1, 3))
    write(warehouse, rows(DAY1, 3), name="other")
    load = warehouse.catalog.load_table

    def refuse(identifier: tuple[str, ...]) -> Any:
        if identifier[-1] == "other":
            raise PermissionError("Access denied")
        return load(identifier)

    monkeypatch.setattr(warehouse.catalog, "load_table", refuse)
    with pytest.raises(PermissionError, match="Access denied"):
        vacuum(warehouse, "events", NOW, dry_run=False)


def test_a_link_out_of_the_table_is_refused(warehouse: Warehouse, home: Path, tmp_path: Path) -> None:
    write(warehouse, rows(DAY1, 3))
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious.txt").write_text("mine")
    root = Path(warehouse.table("events").location().removeprefix("file://"))
    (root / "data" / "link").symlink_to(outside)
    with pytest.raises(
        StorageError, match=r"expected a path below .*, got a link that leads outside\. Remove the link\.$"
    ):
        vacuum(warehouse, "events", NOW, dry_run=False)
    assert (outside / "precious.txt").exists()


def test_expiry_does_not_expire_what_another_writer_just_committed(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(warehouse, rows(DAY1, 3))
    write(warehouse, rows(DAY1, 4))
    catalog = type(warehouse.catalog)
    commit, late = catalog.commit_table, [rows(DAY1, 5)]

    def then_theirs(*arguments: Any) -> Any:
        if late:
            write(Warehouse(WarehouseConfig(), warehouse.home), late.pop())
        return commit(*arguments)

    monkeypatch.setattr(catalog, "commit_table", then_theirs)
    expire(warehouse, "events", NOW)
    assert ids(warehouse) == [0, 1, 2, 3, 4]
    assert len(warehouse.table("events").snapshots()) == 1


def test_a_tag_set_during_expiry_keeps_its_snapshot(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    old = write(warehouse, rows(DAY1, 3))
    write(warehouse, rows(DAY1, 4))
    catalog = type(warehouse.catalog)
    commit, late = catalog.commit_table, ["mine"]

    def then_theirs(*arguments: Any) -> Any:
        if late:
            Warehouse(WarehouseConfig(), warehouse.home).tag(old, late.pop())
        return commit(*arguments)

    monkeypatch.setattr(catalog, "commit_table", then_theirs)
    expire(warehouse, "events", NOW)
    assert ids(warehouse, old) == [0, 1, 2]
    assert set(warehouse.table("events").refs()) == {"main", "mine"}


def test_a_location_shared_by_two_tables_is_left_alone(warehouse: Warehouse, home: Path) -> None:
    write(warehouse, rows(DAY1, 3))
    warehouse.catalog.rename_table(("dlrm", "events"), ("dlrm", "old"))
    write(warehouse, rows(DAY1, 4))
    before = on_disk(home)
    with pytest.raises(
        StorageError, match=r"^location of table 'events': expected no files of other tables, got those"
    ):
        vacuum(warehouse, "events", NOW, dry_run=False)
    assert on_disk(home) == before


def test_another_file_io_is_refused(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    write(warehouse, rows(DAY1, 3))
    monkeypatch.setattr("storage.snapshot.files.PyArrowFileIO", type("Other", (PyArrowFileIO,), {}))
    with pytest.raises(StorageError, match="expected pyiceberg's PyArrowFileIO, got DurableFileIO"):
        vacuum(warehouse, "events", NOW)


def test_concurrent_manifest_readers_do_not_miss_a_file_to_replace(
    warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyIceberg reads manifests on several threads. Here one reads another day's manifest before the first is done."""
    write(warehouse, rows(DAY1, 3))
    write(warehouse, rows(DAY2, 4))
    first, both, looks = threading.Event(), threading.Barrier(2), itertools.count()

    def look(self: Any, fields: Any) -> None:
        together = threading.current_thread() is not threading.main_thread() and next(looks) < 2
        if together and int.from_bytes(fields[0].lower_bound, "little") != (DAY1 - datetime.date(1970, 1, 1)).days:
            first.wait(30)
        self.__dict__["looked at"] = fields
        if together:
            first.set()
            both.wait(30)

    watched = property(lambda self: self.__dict__["looked at"], look)
    monkeypatch.setattr(_ManifestEvalVisitor, "partition_fields", watched, raising=False)
    write(warehouse, rows(DAY1, 5))
    assert next(looks) >= 2
    assert len(ids(warehouse)) == 9


def manifests(warehouse: Warehouse) -> int:
    table = warehouse.table("events")
    snapshot = table.current_snapshot()
    assert snapshot is not None
    return len(snapshot.manifests(table.io))


def test_manifests_stay_few(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    first = write(warehouse, rows(DAY1, 3))
    for number in range(6):
        write(warehouse, rows(DAY1, 2, 10 * number))
    assert manifests(warehouse) == 2  # live files, and files deleted by this snapshot
    monkeypatch.setattr("storage.snapshot.commit.MOST_MANIFESTS", 5)
    days = [DAY1 + datetime.timedelta(days=number) for number in range(1, 13)]
    for number, day in enumerate(days):
        write(warehouse, rows(day, 1, 100 + number), identity=str(day))
        assert manifests(warehouse) <= 5
    assert ids(warehouse) == [50, 51, *range(100, 112)]
    write(warehouse, rows(days[3], 2, 200), identity="new")
    assert ids(warehouse) == [50, 51, 100, 101, 102, 200, 201, *range(104, 112)]
    assert warehouse.written_days("events") == {DAY1: "i"} | {day: str(day) for day in days} | {days[3]: "new"}
    assert ids(warehouse, first) == [0, 1, 2]
    expire(warehouse, "events", NOW)
    assert vacuum(warehouse, "events", NOW, dry_run=False).files > 0
    assert ids(warehouse) == [50, 51, 100, 101, 102, 200, 201, *range(104, 112)]


def test_two_expiries_at_once_both_end_well(warehouse: Warehouse, monkeypatch: pytest.MonkeyPatch) -> None:
    write(warehouse, rows(DAY1, 3))
    write(warehouse, rows(DAY1, 4))
    catalog = type(warehouse.catalog)
    commit, late = catalog.commit_table, [NOW]

    def then_theirs(*arguments: Any) -> Any:
        if late:
            expire(Warehouse(WarehouseConfig(), warehouse.home), "events", late.pop())
        return commit(*arguments)

    monkeypatch.setattr(catalog, "commit_table", then_theirs)
    assert expire(warehouse, "events", NOW) == ExpireResult(snapshots=0, kept=1, tagged=0)
    assert len(warehouse.table("events").snapshots()) == 1

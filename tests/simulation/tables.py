"""A table's commits under faults: every committed row is there once, and nothing that is needed is removed.

The real warehouse and its maintenance run on pyiceberg's real catalog in SQLite. Disk, clock and the catalog's answers
are simulated. What took effect is known from the commits that the catalog made, beside the code under test.
"""

import datetime
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pyarrow as pa
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.exceptions import CommitFailedException, CommitStateUnknownException, ValidationError
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.table.update import AddSnapshotUpdate
from pyiceberg.utils.concurrent import ExecutorFactory

from pipeline.errors import ContractError
from storage import warehouse, writer
from storage.config import WarehouseConfig
from storage.durable import DurableFileIO
from storage.errors import ConflictError, UnknownCommitError
from storage.layout.rewrite import rewrite_days
from storage.reader import SnapshotReader, SnapshotRef
from storage.snapshot import maintenance
from storage.snapshot.maintenance import drop_tags, expire, list_tags, vacuum
from storage.snapshot.writing import append_rows, replace_days, stage_days
from storage.warehouse import Warehouse
from tests.simulation import disk
from tests.simulation.disk import KILLED, Disk, Killed
from tests.simulation.outcome import Outcome, scratch
from tests.simulation.world import BrokenPromise, World, require

LOST, LATE, NEVER = "the answer to a commit is lost", "a commit takes effect late", "a commit never arrives"
REFUSED, OTHER, JUMP = "a commit is refused", "another writer is first", "the clock jumps"
FAULTS = (*disk.FAULTS, LOST, LATE, NEVER, REFUSED, OTHER, JUMP)
TABLE, EVENTS = "ads", "ads_events"
SCHEMA = pa.schema([("day", pa.date32()), ("row", pa.int64())])
BEGIN = datetime.datetime(2025, 6, 1, tzinfo=datetime.UTC)
DAYS = tuple(datetime.date(2025, 5, number) for number in (1, 2, 3))
WRITE_DAYS = 2.0
"""Longest write, in days."""
UNREADABLE = (ContractError, ValidationError, ValueError)
"""What readers raise about damaged files: our sentences, and what pyiceberg and Arrow say of bytes that make no sense."""


class Serial:
    """An executor without threads, so that a seed repeats."""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Serial":
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, work: Callable[..., Any], *items: Any) -> Iterator[Any]:
        return iter([work(*one) for one in zip(*items, strict=True)])

    def submit(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> "Future[Any]":
        done: Future[Any] = Future()
        done.set_result(work(*args, **kwargs))
        return done

    def shutdown(self, **_: object) -> None: ...


class Clock:
    """The machine's clock, which can be wrong."""

    def __init__(self, world: World) -> None:
        self.world, self.skew = world, 0.0

    def now(self) -> datetime.datetime:
        return BEGIN + datetime.timedelta(seconds=self.world.now + self.skew)

    def module(self) -> Any:
        """Returns what stands for the module `datetime`."""
        clock = SimpleNamespace(now=lambda zone=None: self.now(), fromtimestamp=datetime.datetime.fromtimestamp)
        return SimpleNamespace(datetime=clock, timedelta=datetime.timedelta, UTC=datetime.UTC)


class Run:
    """Some work on a table, each piece repeated until it succeeds."""

    def __init__(self, seed: int, root: Path) -> None:
        draw = self.draw = random.Random(seed)
        faults = {kind: (draw.choice([0, 1, 2]), draw.choice([0.003, 0.01, 0.05])) for kind in disk.FAULTS}
        faults |= {kind: (draw.choice([0, 0, 1, 2]), 0.3) for kind in (LOST, LATE, NEVER, REFUSED, OTHER)}
        faults |= {JUMP: (draw.choice([0, 1, 3]), 0.3)}
        self.world = World(draw.randrange(2**60), faults)
        self.clock, self.disk = Clock(self.world), Disk(self.world, root / "disk")
        place = {"type": "sql", "uri": f"sqlite:///{root}/catalog.db", "warehouse": f"file://{self.disk.root}"}
        self.config = WarehouseConfig(catalog=place, row_group_rows=4, file_rows=draw.choice([3, 100]))
        self.commit_table = SqlCatalog.commit_table
        self.rows: dict[str, list[int]] = {}
        """Identity -> rows."""
        self.now: dict[str, str] = {}
        """Day -> identity of its rows, by the commits that took effect."""
        self.states: dict[int, dict[str, str]] = {}
        """Snapshot -> the same."""
        self.events: Counter[int] = Counter()
        self.tags: set[str] = set()
        self.late: Callable[[], Any] | None = None
        self.house: Warehouse | None = None
        self.count = self.commands = self.effects = 0
        self.seen: set[Any] = set()

    # -- the catalog --------------------------------------------------------------------------------------------------

    def commit(self, catalog: SqlCatalog, table: Any, requirements: Any, updates: Any) -> Any:
        """Stands between the code and its catalog."""
        work = partial(self.make_commit, catalog, table, requirements, updates)
        if self.disk.quiet:
            return work()
        if self.world.strikes(OTHER):
            with self.disk.calm():
                self.write(self.open(), [self.draw.choice(DAYS)], self.new_version())
        if self.world.strikes(REFUSED):
            raise CommitFailedException("another commit")
        if self.world.strikes(NEVER):
            raise CommitStateUnknownException("no answer")
        if self.world.strikes(LATE):
            self.late = work
            raise CommitStateUnknownException("no answer")
        found = work()
        if self.world.strikes(LOST):
            raise CommitStateUnknownException("no answer")
        self.disk.after("commit", str(self.disk.root / "catalog"))
        return found

    def make_commit(self, catalog: SqlCatalog, table: Any, requirements: Any, updates: Any) -> Any:
        found = self.commit_table(catalog, table, requirements, updates)
        self.disk.sync_names()  # SQLite syncs, too
        self.effects += 1
        for update in updates:
            if isinstance(update, AddSnapshotUpdate) and table.name()[-1] == TABLE:
                summary = update.snapshot.summary
                assert summary is not None
                self.now |= json.loads(summary.additional_properties["dlrm.days"])
                self.states[update.snapshot.snapshot_id] = dict(self.now)
                self.world.note(f"commit of {sorted(self.now.items())}")
        return found

    def arrive(self) -> None:
        """Lets a commit take effect whose answer was given up. The catalog may refuse it by now."""
        late, self.late = self.late, None
        if late is not None:
            with self.disk.calm():
                try:
                    late()
                except (CommitFailedException, FileNotFoundError, ValueError) as error:
                    self.world.note(f"too late: {type(error).__name__}")

    # -- what people and schedules do ---------------------------------------------------------------------------------

    def open(self) -> Warehouse:
        return Warehouse(self.config, self.disk.root)

    def new_version(self) -> str:
        self.count += 1
        return f"v{self.count}"

    def write(self, house: Warehouse, days: list[datetime.date], version: str) -> None:
        """Writes days unless they are written, as an ingest does."""
        identities = {day: f"{version} {day}" for day in days}
        for day, identity in identities.items():
            size = random.Random(identity).randint(1, 9)
            self.rows[identity] = [int(version[1:]) * 10_000 + day.day * 100 + row for row in range(size)]
        known = house.written_days(TABLE)
        todo = {day: identity for day, identity in identities.items() if known.get(day) != identity}
        if not todo:
            return
        rows = [{"day": day, "row": row} for day, identity in todo.items() for row in self.rows[identity]]
        batches = pa.Table.from_pylist(rows, SCHEMA).to_batches(4)
        if int(version[1:]) % 2:
            replace_days(house, TABLE, todo, SCHEMA, batches, len(rows))
            return
        with stage_days(house, TABLE, SCHEMA) as staged:  # as an ingest of one commit does
            require(staged is not None, "the table can have its own columns")
            staged.write(batches, todo, len(rows))
            staged.commit(todo, {})

    def ingest(self) -> None:
        version, days = self.new_version(), self.draw.sample(DAYS, self.draw.randint(1, 3))
        self.repeat(f"ingest {version}", lambda house: self.write(house, sorted(days), version))
        for day in days:
            require(self.now[f"{day}"].startswith(f"{version} "), f"{day} is said to be written as {version}")

    def append(self) -> None:
        """Adds an event. It may be lost with its command, but does not come twice."""
        number = self.count = self.count + 1
        self.events[number] = 0

        def add(house: Warehouse) -> None:
            if self.events[number] == 0:
                self.events[number] = -1  # unknown
                try:
                    append_rows(house, EVENTS, SCHEMA, [{"day": DAYS[0], "row": number}])
                except ConflictError:
                    self.events[number] = 0
                    raise
                self.events[number] = 1

        self.repeat("append", add)

    def compact(self) -> None:
        day, place = self.draw.choice(sorted(self.now)), self.disk.root.parent / "duckdb"
        self.repeat("compact", lambda house: rewrite_days(house, TABLE, [datetime.date.fromisoformat(day)], place))

    def tag(self) -> None:
        name = f"tag-{self.new_version()}"
        with self.disk.calm():
            reference = self.open().current(TABLE)
        self.repeat("tag", lambda house: house.tag(reference, name))
        self.tags.add(name)

    def drop(self) -> None:
        gone = set(self.draw.sample(sorted(self.tags), min(len(self.tags), 1)))
        self.repeat("drop tags", lambda house: drop_tags(house, TABLE, gone))
        self.tags -= gone

    def expire(self) -> None:
        age = datetime.timedelta(days=self.draw.choice([0, 1, 10]))
        self.repeat("expire", lambda house: expire(house, TABLE, age))

    def vacuum(self) -> None:
        self.arrive()
        self.repeat("vacuum", lambda house: vacuum(house, TABLE, datetime.timedelta(days=WRITE_DAYS), dry_run=False))

    def repeat(self, what: str, work: Callable[[Warehouse], Any]) -> None:
        """Runs a command until it succeeds."""
        for _ in range(40):
            self.commands += 1
            self.world.note(what)
            error: BaseException | None = None
            try:
                self.house = self.house or self.open()
                work(self.house)
            except BaseException as found:
                error = found
            if self.disk.dead:
                self.disk.restart()
            elif error is not None:
                self.judge(error)
            if self.world.random.random() < 0.5:
                self.arrive()
            if error is None:
                self.arrive()
                return
            self.world.note(f"{what} ends: {type(error).__name__}")
            self.house = None
            if self.world.random.random() < 0.5:
                self.look()
        require(False, f"{what} never comes to its end")

    def judge(self, error: BaseException) -> None:
        """Errors have a cause, and what they say about the table is so."""
        known = (ConflictError, UnknownCommitError, CommitFailedException, CommitStateUnknownException, OSError)
        if isinstance(error, known):
            return
        if isinstance(error, UNREADABLE):
            raise BrokenPromise(f"a command finds the table unreadable: {error}") from error
        raise error

    def play(self) -> None:
        """Works on the table, and looks at it in between."""
        self.repeat("ingest", lambda house: self.write(house, list(DAYS), "v0"))
        kinds = [self.ingest] * 4 + [self.append, self.tag, self.drop, self.expire, self.vacuum, self.vacuum]
        kinds += [self.compact] * (self.draw.random() < 0.3)
        for _ in range(self.draw.randint(2, 6)):
            if self.world.strikes(JUMP):
                self.clock.skew += self.world.between(-40, 40) * 86_400
            self.world.now += self.world.between(0, 2) * 86_400
            self.draw.choice(kinds)()
            self.look()
        self.tidy()

    # -- what must hold -----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """A reader sees the days as they were last committed, each row once."""
        with self.disk.calm(), readable():
            house = self.house = self.house or self.open()
            if not house.has_table(TABLE) or house.table(TABLE).current_snapshot() is None:
                require(not self.now, "the table is empty")
                return
            reference = house.current(TABLE)
            self.compare(house, reference, self.now)
            written = {f"{day}": identity for day, identity in house.written_days(TABLE).items()}
            require(written == self.now, f"days are said to be {written}, and are {self.now}")
            self.seen.add((len(house.table(TABLE).snapshots()), len(self.tags), len(self.now), self.late is not None))

    def compare(self, house: Warehouse, reference: SnapshotRef, expected: dict[str, str]) -> None:
        rows = read(house, reference)
        for day, identity in expected.items():
            found = sorted(row for one, row in rows if one == day)
            require(found == sorted(self.rows[identity]), f"{day} has rows {found}, and {identity} was committed")
        require({day for day, _ in rows} == set(expected), "there are other days")

    def tidy(self) -> None:
        """Kept snapshots are whole. After a clean nothing else is left."""
        with self.disk.calm(), readable():
            house = self.open()
            table = house.table(TABLE)
            for snapshot in table.snapshots():
                self.compare(
                    house, SnapshotRef(table=TABLE, snapshot_id=snapshot.snapshot_id), self.states[snapshot.snapshot_id]
                )
            require(set(list_tags(house, TABLE)) >= self.tags, "a tag is gone")
            if house.has_table(EVENTS):
                current = house.table(EVENTS).current_snapshot()
                found = Counter(row for _, row in read(house, house.current(EVENTS))) if current else Counter[int]()
                for number, times in self.events.items():
                    require(found[number] in ((0, 1) if times < 0 else (times,)), f"event {number}: {found[number]}")
            self.clock.skew += 10_000 * 86_400
            expire(house, TABLE, datetime.timedelta())
            vacuum(house, TABLE, datetime.timedelta(days=WRITE_DAYS), dry_run=False)
            living = {snapshot.snapshot_id for snapshot in house.table(TABLE).snapshots()}
            named = {
                file.file_path.removeprefix("file://")
                for number in living
                for files in house.day_files(SnapshotRef(table=TABLE, snapshot_id=number)).values()
                for file in files
            }
            place = Path(house.table(TABLE).location().removeprefix("file://"))
            there = {str(path) for path in (place / "data").rglob("*") if path.is_file()}
            require(there == named, f"{len(there - named)} files are left over, {len(named - there)} are gone")
            most = 25 + 110 * len(living)
            require(len(list((place / "metadata").iterdir())) <= most, "metadata grows")
            self.look()


@contextmanager
def readable() -> Iterator[None]:
    """On a calm disk, an error of a reader is a broken promise: committed files are whole."""
    try:
        yield
    except (*UNREADABLE, FileNotFoundError) as error:
        raise BrokenPromise(f"the table is unreadable: {error}") from error


def read(house: Warehouse, reference: SnapshotRef) -> list[tuple[str, int]]:
    """Reads (day, row) of a snapshot."""
    reader = SnapshotReader(house.table(reference.table), reference, ["day", "row"], None)
    parts = [reader.read(fragment) for fragment in reader.fragments()]
    return [(f"{row['day']}", row["row"]) for part in parts for row in part.to_pylist()]


@contextmanager
def simulated(run: Run) -> Iterator[None]:
    """pyiceberg meets the run's disk, clock and catalog in this block."""
    delete = PyArrowFileIO.delete

    def remove(io: Any, location: Any) -> None:
        run.disk.strike("delete", location.removeprefix("file://"))
        delete(io, location)

    def forget(table: Any, path: str) -> None:
        run.disk.strike("delete", path)
        remove_file(table, path)

    remove_file = maintenance._delete
    clock = SimpleNamespace(time=lambda: run.clock.now().timestamp())
    with ExitStack() as stack:
        for owner, name, own in (
            (SqlCatalog, "commit_table", lambda catalog, *args: run.commit(catalog, *args)),
            (ExecutorFactory, "get_or_create", Serial),
            (warehouse, "ThreadPoolExecutor", Serial),
            (writer, "ThreadPoolExecutor", Serial),
            (maintenance, "datetime", run.clock.module()),
            (maintenance, "_delete", forget),
            (DurableFileIO, "delete", remove),
            (__import__("pyiceberg.table.snapshots", fromlist=["time"]), "time", clock),
            (__import__("pyiceberg.table", fromlist=["time"]).time, "sleep", lambda seconds: None),
        ):
            stack.enter_context(patch.object(owner, name, own))
        stack.enter_context(run.disk.mounted())
        yield


def play(seed: int) -> Outcome:
    """Runs the schedule of a seed.

    Raises:
        BrokenPromise: If something happens that must never happen. Its note holds the trace.
    """
    with scratch() as root:
        run = Run(seed, root)
        run.disk.stamp = lambda: run.clock.now().timestamp()
        try:
            with simulated(run):
                run.play()
        except BaseException as error:
            error.add_note("\n".join(["", *run.world.trace]))
            raise
    sums = Counter({"commands": run.commands, "commits": run.effects, "disk changes": run.disk.steps})
    return Outcome(run.world.struck, run.seen, sums, run.world.trace)


__all__ = ["FAULTS", "KILLED", "ContractError", "Killed", "play"]

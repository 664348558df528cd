"""The bookkeeping of an epoch: any order of completion, quarantine and release ends, in bounded memory."""

import datetime
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.data.position import Position
from pipeline.errors import DataError
from pipeline.preprocessing.epoch import stream as module
from pipeline.preprocessing.epoch.batches import BatchWork
from pipeline.preprocessing.epoch.blocks import FIRST_ROW_BYTES
from pipeline.preprocessing.epoch.budget import READY_SHARE
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.epoch.stream import Stream, WorkItem
from storage.reader import Fragment

ROW_BYTES = 100
GROUP_ROWS = 40
UNREADABLE = DataError("row group", "to be readable", "nothing", "Restore it.")


@dataclass(eq=False)
class Piece:
    """A result, its work, and how often it was freed."""

    work: Split | BatchWork
    rows: int
    size: int
    freed: int = 0


@dataclass
class Drive:
    """A stream with workers and ranks that act at random, from a seed."""

    sizes: Sequence[int]
    seed: int
    memory_bytes: int = 10**9
    workers: int = 3
    world_size: int = 1
    batch_rows: int = 10
    window_rows: int | None = 25
    split_rows: int = 12
    position: Position = field(default_factory=Position)
    selectivity: float = 1.0
    faults: float = 0.0
    losses: float = 0.0
    keeps: bool = False
    """Whether results stay with workers, so that each works on windows of its own."""

    def __post_init__(self) -> None:
        fragments = [
            Fragment(path=f"file-{i}", row_group=0, rows=n, day=datetime.date(2025, 1, 1))
            for i, n in enumerate(self.sizes)
        ]
        request = Request(
            data="rows", number=0, position=self.position, batch_rows=self.batch_rows, seed=7,
            window_rows=self.window_rows, world_size=self.world_size, ranks=tuple(range(self.world_size)),
        )  # fmt: skip
        self.random = random.Random(self.seed)
        self.made: list[Piece] = []
        with patch.object(module, "GROUP_ROWS", GROUP_ROWS):
            self.stream = Stream(request, fragments, self.split_rows, self.memory_bytes, self.free)
        self.spare: list[int | None] = []
        """Workers that are to end, all but one. They get no splits any more."""
        self.busy: list[WorkItem] = []
        """One entry for each busy worker. A straggler's item is there twice."""
        self.wanted = dict.fromkeys(range(self.world_size), 0)
        self.notes: list[list[Any]] = [[] for _ in range(self.world_size)]
        self.ended: set[int] = set()
        self.largest_group = 0
        self.delivered: list[BatchWork] = []
        self.alarms: list[int] = []

    def free(self, memory: Piece) -> None:
        memory.freed += 1
        assert memory.freed == 1

    def rows_of(self, split: Split) -> int:
        """Returns the selected rows, a function of the split as it is for a worker."""
        return sum(
            round(one.rows * min(1.0, random.Random(one.path).random() * 2 * self.selectivity))
            if self.selectivity < 1
            else one.rows
            for one in split.fragments
        )

    def kept(self, number: int) -> list[Fragment]:
        """Returns the row groups of a window that were not given up."""
        lost = [one for split in self.stream.quarantined for one in split.fragments]
        return [one for split in self.stream.reader.plan[number] for one in split.fragments if one not in lost]

    def run(self) -> bool:
        """Returns whether all ranks reached the end. Otherwise nothing can continue."""
        while len(self.ended) < self.world_size:
            actions = [self.finish] * bool(self.busy) + [self.give] * (len(self.busy) < self.workers)
            actions += [self.take] * (len(self.ended) < self.world_size)
            self.random.shuffle(actions)
            done = [action() for action in actions[: self.random.randint(1, len(actions))]]
            if not any(done):
                idle = [action() for action in (self.finish, *[self.take] * 20 * self.world_size, self.give)]
                unread = len(self.stream.reader.reads)
                self.check()
                if not any(idle) and not self.busy and len(self.stream.reader.reads) == unread:  # nor were rows dropped
                    return False
                continue
            self.check()
        return True

    def check(self) -> None:
        held = sum(piece.size for piece in self.made if not piece.freed)
        assert held == self.stream.budget.used
        if self.selectivity == 1.0:  # then the size of every result is known in advance
            several = 2 if self.keeps else 1  # workers do not make groups in order
            assert held <= self.memory_bytes + several * self.largest_group
        for rank, number in self.wanted.items():
            if rank not in self.ended and self.stream.groups.get(number) is None and self.stream.is_stuck(number):
                self.alarms.append(number)

    # -- workers --

    def give(self) -> bool:
        if len(self.busy) >= self.workers:
            return False
        asking: list[int | None] = self.random.sample(range(self.workers), self.workers) if self.keeps else [None]
        if self.keeps and not self.spare and self.random.random() < 0.02:
            self.spare = asking[1:]
        item = next(filter(None, (self.stream.next_item(worker, worker in self.spare) for worker in asking)), None)
        if item is None and self.busy and self.random.random() < self.faults:
            item = self.random.choice(self.busy)  # a straggler's work is given to a second worker
        if item is None:
            return False
        assert all(not piece.freed for piece in item.inputs if item in self.stream.running)
        self.busy.append(item)
        return True

    def finish(self) -> bool:
        if not self.busy:
            return False
        item = self.busy.pop(self.random.randrange(len(self.busy)))
        chance = self.random.random()
        if chance < self.losses and isinstance(item.work, Split) and item in self.stream.running:
            if item.several:
                self.stream.divide(item)
            else:
                self.stream.quarantine(item, UNREADABLE)
        elif chance < self.losses + self.faults:
            if item not in self.busy:  # otherwise the other worker continues with it
                self.stream.retry(item)
        else:
            self.done(item)
        return True

    def done(self, item: WorkItem) -> None:
        expected = item in self.stream.running
        if isinstance(item.work, Split):
            rows = self.rows_of(item.work)
            piece = Piece(item.work, rows, rows * ROW_BYTES)
        else:
            rows = sum(w.stop - w.start for windows in item.work.batches for w in windows)
            piece = Piece(item.work, rows, int(rows * ROW_BYTES * (1.0 + self.random.random())))
            self.largest_group = max(self.largest_group, piece.size)
            if expected:
                self.check_inputs(item)
        self.made.append(piece)
        taken = self.stream.complete(item, piece, piece.size, rows if isinstance(item.work, Split) else 0, Costs())
        assert taken == expected
        assert taken or piece.freed == 1

    def check_inputs(self, item: WorkItem) -> None:
        assert isinstance(item.work, BatchWork)
        assert all(not piece.freed for piece in item.inputs)
        for windows in item.work.batches:
            for window in windows:
                parts = [one for i in window.splits for one in item.inputs[i].work.fragments]
                assert parts == self.kept(window.number)
                assert 0 <= window.start < window.stop <= sum(item.inputs[i].rows for i in window.splits)

    # -- ranks --

    def take(self) -> bool:
        left = [rank for rank in self.wanted if rank not in self.ended]
        if not left:
            return False
        rank = self.random.choice(left)
        number = self.wanted[rank]
        self.stream.groups.release(rank, number - 2)
        group = self.stream.groups.get(number)
        if group is None:
            if self.stream.ended(number):
                self.ended.add(rank)
                return True
            return False
        assert isinstance(group.memory, Piece)
        assert not group.memory.freed
        self.stream.groups.take(number)
        if rank == min(self.wanted):
            assert isinstance(group.memory.work, BatchWork)
            self.delivered.append(group.memory.work)
        self.notes[rank] += group.notes
        self.wanted[rank] += 1
        return True

    def close(self) -> None:
        """Ends the stream while some work still runs. Its results come later."""
        self.stream.close()
        for item in self.busy:
            self.done(item)
        assert Counter(piece.freed for piece in self.made) in (Counter(), Counter({1: len(self.made)}))


def cut(drive: Drive) -> list[tuple[int, int, int]]:
    """Returns the delivered rows as (window, start, stop), in order."""
    return [(w.number, w.start, w.stop) for work in drive.delivered for batch in work.batches for w in batch]


TIGHT = [
    8, 21, 16, 21, 11, 4, 12, 0, 11, 15, 8, 20, 25, 14, 22, 27, 19, 7, 17, 0, 21, 19, 4, 14, 11, 5, 10, 28, 6, 1, 18,
    26, 6, 2, 16,
]  # fmt: skip
"""Row groups. With two seeds memory is full when the last open window has no rows yet (83), and when the worker of the
next window ends (0)."""
SIZES = st.lists(st.integers(0, 30), max_size=25)


@settings(max_examples=150, deadline=None)
@given(
    sizes=SIZES,
    seed=st.integers(0, 10**6),
    workers=st.integers(1, 6),
    world_size=st.integers(1, 3),
    batch_rows=st.sampled_from([1, 7, 10, 64, 1000]),
    window_rows=st.sampled_from([None, 1, 25, 10**6]),
    faults=st.sampled_from([0.0, 0.2]),
    losses=st.sampled_from([0.0, 0.1]),
    selectivity=st.sampled_from([1.0, 0.5]),
)
def test_any_order_of_completion_delivers_the_epoch(
    sizes: list[int],
    seed: int,
    workers: int,
    world_size: int,
    batch_rows: int,
    window_rows: int | None,
    faults: float,
    losses: float,
    selectivity: float,
) -> None:
    drive = Drive(
        sizes, seed, workers=workers, world_size=world_size, batch_rows=batch_rows, window_rows=window_rows,
        faults=faults, losses=losses, selectivity=selectivity,
    )  # fmt: skip
    assert drive.run()
    assert drive.alarms == []
    stream = drive.stream
    totals = [
        sum(drive.rows_of(Split(fragments=(one,))) for one in drive.kept(number))
        for number in range(len(stream.reader.plan))
    ]
    expected = [
        (number, row) for number, total in enumerate(totals) for row in range(total)
    ]  # every row once, windows in order
    assert [(number, row) for number, start, stop in cut(drive) for row in range(start, stop)] == expected
    rows = sum(totals)
    sizes_found = [note.rows for note in drive.notes[0]]
    assert sizes_found == [batch_rows] * (rows // batch_rows) + [rows % batch_rows] * (rows % batch_rows > 0)
    assert all(notes == drive.notes[0] for notes in drive.notes)
    assert [note.position.batches for note in drive.notes[0]] == list(range(1, len(sizes_found) + 1))
    given_up = {one.path for split in stream.quarantined for one in split.fragments}
    assert {one.path for one in stream.cutter.lost} == given_up
    assert len(stream.cutter.lost) == len(given_up)
    drive.close()


@settings(max_examples=100, deadline=None)
@given(sizes=SIZES.filter(sum), seed=st.integers(0, 10**6), stop=st.integers(0, 10**6), data=st.data())
def test_any_position_resumes_with_the_rest(sizes: list[int], seed: int, stop: int, data: st.DataObject) -> None:
    settings = {"batch_rows": data.draw(st.sampled_from([1, 7, 64])), "window_rows": data.draw(st.sampled_from([None, 1, 25]))}  # fmt: skip
    whole = Drive(sizes, seed, **settings)
    assert whole.run()
    stop %= len(whole.notes[0])
    position = whole.notes[0][stop].position
    rest = Drive(sizes, seed + 1, position=position, **settings)
    assert rest.run()
    assert [(n.position, n.rows) for n in rest.notes[0]] == [(n.position, n.rows) for n in whole.notes[0][stop + 1 :]]
    rows = [(number, row) for number, start, stop_ in cut(rest) for row in range(start, stop_)]
    every = [(number, row) for number, start, stop_ in cut(whole) for row in range(start, stop_)]
    assert rows == every[len(every) - len(rows) :]
    needed = {i for i in range(len(rest.stream.reader.plan)) if i >= position.window}
    assert {i for i, window in enumerate(rest.stream.reader.plan) for p in rest.made if p.work in window} <= needed


@settings(max_examples=200, deadline=None)
@given(
    sizes=SIZES,
    seed=st.integers(0, 10**6),
    memory_rows=st.integers(30, 400),
    workers=st.integers(1, 6),
    world_size=st.integers(1, 3),
    faults=st.sampled_from([0.0, 0.2]),
    keeps=st.booleans(),
)
@example(sizes=TIGHT, seed=0, memory_rows=350, workers=6, world_size=1, faults=0.2, keeps=True)
@example(sizes=TIGHT, seed=83, memory_rows=350, workers=6, world_size=1, faults=0.2, keeps=True)
def test_the_memory_bound_is_kept_or_reported_as_too_small(
    sizes: list[int], seed: int, memory_rows: int, workers: int, world_size: int, faults: float, keeps: bool
) -> None:
    """Memory exceeds it only by the group that a rank waits for, and a later one. No endless wait, no false alarm."""
    drive = Drive(
        sizes, seed, memory_bytes=memory_rows * ROW_BYTES, workers=workers, world_size=world_size, faults=faults,
        keeps=keeps,
    )  # fmt: skip
    ended = drive.run()
    assert ended == (not drive.alarms)
    if not ended:
        assert any(drive.stream.is_stuck(number) for number in drive.wanted.values())
    if memory_rows >= 2 * (25 + 30) + 3 * 2 * GROUP_ROWS:  # two windows, and three groups
        assert ended
    drive.close()


@settings(max_examples=50, deadline=None)
@given(sizes=SIZES, seed=st.integers(0, 10**6), steps=st.integers(0, 60), faults=st.sampled_from([0.0, 0.3]))
def test_a_stream_may_be_closed_at_any_moment(sizes: list[int], seed: int, steps: int, faults: float) -> None:
    drive = Drive(sizes, seed, faults=faults, workers=4)
    for _ in range(steps):
        drive.random.choice([drive.give, drive.give, drive.finish, drive.take])()
    drive.close()


def test_a_late_result_is_freed_and_the_first_one_counts() -> None:
    drive = Drive([10, 10], 0)
    item = drive.stream.next_item()
    assert item is not None
    drive.done(item)
    drive.done(item)
    assert [piece.freed for piece in drive.made] == [0, 1]
    drive.stream.retry(item)
    assert drive.stream.retries == type(drive.stream.retries)()


@pytest.mark.parametrize("splits", [1, 2, 5])
def test_splits_are_read_at_once_at_first_if_there_is_much_room(splits: int) -> None:
    """Before the size of a row is known."""
    drive = Drive([10] * 8, 0, window_rows=None, split_rows=10, memory_bytes=10 * splits * FIRST_ROW_BYTES)
    assert [drive.stream.next_item() is not None for _ in range(6)] == [True] * splits + [False] * (6 - splits)


def test_failed_work_is_retried_before_new_work() -> None:
    drive = Drive([10] * 8, 0, window_rows=None, split_rows=10)
    first = drive.stream.next_item()
    assert first is not None
    drive.done(first)
    items = [drive.stream.next_item() for _ in range(3)]
    for item in items[:2]:
        assert item is not None
        drive.stream.retry(item)
    assert [drive.stream.next_item() for _ in range(2)] == items[:2]


def test_a_rank_that_leaves_is_not_waited_for() -> None:
    """It is removed from existing groups and from later ones."""
    drive = Drive([30] * 20, 0, world_size=2, memory_bytes=300 * ROW_BYTES)
    drive.wanted.pop(1)
    while any([drive.give(), drive.finish(), drive.take()]):
        pass
    taken = len(drive.notes[0])
    assert 0 < taken < 60  # the other rank has not joined yet
    assert not drive.stream.is_stuck(drive.wanted[0])
    drive.stream.leave(1)
    while 0 not in drive.ended:
        assert any([drive.give(), drive.finish(), drive.take()])
    assert len(drive.notes[0]) == 60
    drive.close()


def test_empty_row_groups_are_read_like_others() -> None:
    drive = Drive([0, 0, 0], 0, window_rows=None, split_rows=1)
    assert drive.run()
    assert drive.notes == [[]]
    drive.close()


def test_ready_batches_leave_room_for_rows() -> None:
    """No rank takes batches: they are made only up to their share, and reading stops at the bound."""
    drive = Drive([30] * 100, 0, memory_bytes=1000 * ROW_BYTES, workers=4)
    while any([drive.give(), drive.finish()]):
        drive.check()
    budget = drive.stream.budget
    assert not drive.stream.running
    assert budget.ready <= READY_SHARE * budget.limit + drive.largest_group
    assert 0.5 * budget.limit < budget.used <= budget.limit
    assert budget.peak <= budget.limit + drive.largest_group
    assert drive.run()
    assert budget.used == 0 or len(drive.stream.groups.groups) <= 2
    drive.close()


def test_a_position_at_the_end_has_nothing_left() -> None:
    drive = Drive([30] * 4, 0, position=Position(batches=7, window=4))
    assert len(drive.stream.reader.plan) == 4
    assert drive.run()
    assert drive.notes == [[]]


def test_a_position_in_other_data_is_refused() -> None:
    """A rank would wait for ever for a window that is never read, and miss rows that seem to be delivered."""
    with pytest.raises(
        DataError, match=r"^position in dataset '.*': expected one in its rows, got shuffle block 99 of 4\. The"
    ):
        Drive([30] * 4, 0, position=Position(epoch=1, batches=3, window=99))
    drive = Drive([30] * 4, 0, position=Position(window=3, row=31))
    with pytest.raises(DataError, match=r"got row 31 of 30 in shuffle block 3\. The checkpoint is of other data"):
        drive.run()


def read_pass(pinned: int | None, position: Position) -> None:
    """Reads four row groups of 10 rows to the end of the epoch."""
    fragments = [Fragment(path="file", row_group=i, rows=10, day=datetime.date(2025, 1, 1)) for i in range(4)]
    request = Request(
        data="train", number=0, position=position, batch_rows=10, seed=7, window_rows=None, world_size=1, ranks=(0,)
    )
    stream = Stream(request, fragments, 10, 10**9, lambda memory: None, rows=pinned)
    while not stream.ended(stream.groups.count):
        item = stream.next_item()
        assert item is not None
        stream.complete(item, "memory", 80, item.work.rows if isinstance(item.work, Split) else 0, Costs())


def test_a_pass_over_other_rows_than_were_pinned_ends_with_an_error() -> None:
    for pinned in (40, None):
        read_pass(pinned, Position())
    read_pass(41, Position(batches=1, window=1))  # a resumed pass has not read all of them
    with pytest.raises(DataError) as error:
        read_pass(41, Position())
    assert str(error.value) == (
        "rows of dataset 'train': expected the 41 rows that were pinned, got 40 in a pass over all of them. "
        "Do not use this result. Write the days to the table again, and report this as a bug."
    )

"""The bookkeeping of one epoch: what to read, what to batch and what is ready. Knows no clock and no processes."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Any

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt

from pipeline.data.position import LostRows, Position
from pipeline.errors import ContractError, DataError
from pipeline.preprocessing.batches import BatchWork, Window
from pipeline.preprocessing.dataset import hold_rows
from pipeline.preprocessing.splits import Split, cut_epoch
from pipeline.preprocessing.worker import Costs
from storage.reader import Fragment

GROUP_ROWS = 32_768
"""Batches are made and delivered in groups of about this many rows, at least one batch."""
FIRST_ROW_BYTES = 16_384
"""What a row is taken to need before any was read. 300 lists of ten ids take 12,000 bytes, and their lengths 1,200."""
READY_SHARE = 0.25
"""Share of the memory that batches may fill before a rank asks for them."""
BATCH_GROWTH = 2.0
"""A row of a batch takes at most this many times its bytes in a split, because ids are twice as wide."""

Memory = Any
"""Arrays in the form that the executor keeps them."""


class Request(BaseModel, frozen=True):
    """A rank's request for an epoch. All ranks send equal requests."""

    data: str
    """Name of the dataset, such as `train`."""
    number: NonNegativeInt
    """Number of streams of this dataset that the rank requested before."""
    position: Position
    batch_rows: PositiveInt
    """Rows of the GLOBAL batch."""
    seed: NonNegativeInt
    window_rows: PositiveInt | None
    """None keeps the order of the table."""
    world_size: PositiveInt
    ranks: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)]
    """Ranks that take batches."""
    attempt: NonNegativeInt = 0
    """Number of earlier starts of the ranks. Ranks of different attempts never share a stream."""


@dataclass(eq=False)
class WorkItem:
    """Work for one worker. Doing it again gives the same result."""

    stream: "Stream"
    work: Split | BatchWork
    parts: "Sequence[WindowPart]"
    """Splits whose rows the work takes."""
    expected_bytes: int
    on_result: Callable[[Memory, int, int, Costs], None]
    """Takes the result: (memory, bytes, rows, costs)."""
    place: "tuple[OpenWindow, WindowPart] | None" = None
    """Where a split belongs. None for batches."""
    failures: int = 0
    doubled: bool = False
    """Whether a second worker was given it since it was last queued."""

    @property
    def inputs(self) -> list[Memory]:
        """The rows that the work takes."""
        return [part.memory for part in self.parts]

    @property
    def is_ready(self) -> bool:
        """Whether all rows are there that the work takes."""
        return all(part.memory is not None for part in self.parts)

    @property
    def is_expendable(self) -> bool:
        """Whether its rows may be given up: those of a split, before batches are cut from its window."""
        return self.place is not None and not self.place[0].cut

    @property
    def several(self) -> bool:
        """Whether it is a split of several row groups."""
        return isinstance(self.work, Split) and len(self.work.fragments) > 1


@dataclass(eq=False)
class WindowPart:
    """A split of a window with its rows."""

    split: Split
    memory: Memory | None = None
    """The rows. None: not read yet, given up, lost with their worker, or not needed any more."""
    size: int = 0
    """Bytes."""
    rows: int = 0
    """Selected rows."""


@dataclass(eq=False)
class OpenWindow:
    """A shuffle window that is being read or batched."""

    number: int
    parts: list[WindowPart]
    """In the order of the window's rows. Without those that were given up, once batches are cut."""
    missing: int
    """Splits still to read."""
    costs: Costs = field(default_factory=Costs)
    uses: int = 0
    """Groups that take rows from it and are not made yet."""
    cut: bool = False
    home: int | None = None
    """The worker that keeps its rows and makes its batches, where results stay with workers. None: not chosen yet."""

    @property
    def stored_rows(self) -> int:
        """Rows before any filter."""
        return sum(part.split.rows for part in self.parts)

    @property
    def total(self) -> int:
        """Selected rows."""
        return sum(part.rows for part in self.parts)


Piece = tuple[OpenWindow, int, int]
"""Rows [start, stop) of a window, in its order."""


@dataclass
class BatchNote:
    """Metadata of a global batch."""

    position: Position
    rows: int
    extract_seconds: float
    """Worker time spent on reading and decoding its rows."""
    transform_seconds: float
    """Worker time spent on transforming, shuffling and batching them."""


@dataclass(eq=False)
class BatchGroup:
    """Batches that are made and delivered together."""

    number: int
    notes: list[BatchNote]
    pieces: list[list[Piece]]
    waiting: set[int]
    """Ranks that have not released it yet."""
    memory: Memory | None = None
    size: int = 0
    made: bool = False


class Stream:
    """Tracks one epoch from a position to its end.

    Args:
        fragments: All row groups of the selection in table order.
        split_rows: See `cut_epoch`.
        memory_bytes: Upper bound of the rows and batches in memory. A group of batches that a rank waits for is made
            even beyond it. Where results stay with workers, which do not make groups in order, a later one may be too.
        free: Called with memory that is no longer needed.
        ahead_rows: No window is opened beyond this many rows in windows that are being read or batched.
        rows: Selected rows of the epoch as they were pinned. None: unknown.
    Raises:
        DataError: If the epoch has no row groups and rows were pinned, or the position is not in it.
    Attributes:
        quarantined: Splits that were given up, in that order.
        lost: Row groups that the batches cut so far lack, with those that the position names already.
        missing: Ranks that have not joined yet.
        left: Ranks that take no more groups.
    """

    def __init__(
        self,
        request: Request,
        fragments: Sequence[Fragment],
        split_rows: int,
        memory_bytes: int,
        free: Callable[[Memory], None],
        ahead_rows: int | None = None,
        rows: int | None = None,
    ) -> None:
        self.request, self.memory_bytes, self.free = request, memory_bytes, free
        self.ahead_rows = ahead_rows
        position = request.position
        self.windows = cut_epoch(fragments, request.seed, position.epoch, request.window_rows, split_rows)
        if position.window > len(self.windows):
            raise self._misplaced(f"window {position.window} of {len(self.windows)}")
        self.to_read = range(position.window, len(self.windows))
        self.to_cut = position.window
        self.skip = position.row
        self.batches = position.batches
        self.open: dict[int, OpenWindow] = {}
        self.open_rows = 0  # stored rows of the open windows
        self.reads: deque[WorkItem] = deque()
        self.batchings: deque[tuple[BatchGroup, WorkItem]] = deque()
        self.retries: deque[WorkItem] = deque()
        self.running: set[WorkItem] = set()
        self.underway_bytes = 0  # expected of `running` and `retries`
        self.groups: dict[int, BatchGroup] = {}
        self.groups_cut = 0
        self.cutting: list[Piece] = []
        self.grouping: tuple[list[BatchNote], list[list[Piece]]] = ([], [])
        self.row_bytes = 0.0
        self.bytes = self.ready_bytes = self.peak_bytes = 0
        self.taken = 0
        self.quarantined: list[Split] = []
        self.lost = position.lost
        self.missing, self.left = set(request.ranks), set[int]()
        self.rows, self.rows_read = rows, 0
        if not self.windows:
            self._hold_rows()

    # -- work ---------------------------------------------------------------------------------------------------

    def next_item(self, worker: int | None = None, spare: bool = False) -> WorkItem | None:
        """Returns work for an idle worker, or None if something else has to happen first.

        Args:
            worker: Its number, if results stay with workers. It gets splits and batches of the same windows, because
                other workers would have to fetch the rows from it.
            spare: Whether it is to end soon, and gets no splits.
        """
        item = self._next_retry()
        if item is None:
            item = self._next_batching(worker) or (None if spare else self._next_read(worker))
            self.underway_bytes += 0 if item is None else item.expected_bytes
        if item is not None:
            self.running.add(item)
        return item

    def _next_retry(self) -> WorkItem | None:
        item = next((item for item in self.retries if item.is_ready), None)
        if item is not None:
            self.retries.remove(item)
        return item

    def complete(self, item: WorkItem, memory: Memory, size: int, rows: int, costs: Costs) -> bool:
        """Takes a result. Returns False if another worker's result came first.

        Raises:
            DataError: If a pass over the whole epoch ends with more or fewer rows than were pinned.
        """
        if item not in self.running:
            self.free(memory)
            return False
        self._end_item(item)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        item.on_result(memory, size, rows, costs)
        if isinstance(item.work, Split) and self.to_cut == len(self.windows):
            self._hold_rows()
        return True

    def _hold_rows(self) -> None:
        position = self.request.position
        if not (position.window or position.row or self.quarantined):
            hold_rows(self.rows_read, self.rows, f"dataset '{self.request.data}'")

    def retry(self, item: WorkItem) -> None:
        """Queues an item again after its worker died or failed."""
        if item in self.running:
            self.running.remove(item)
            self.retries.append(item)
            item.doubled = False

    def divide(self, item: WorkItem) -> None:
        """Replaces a split by its row groups, to find the unreadable ones. They keep the split's number of failures."""
        assert isinstance(item.work, Split)
        assert item.place is not None
        window, part = item.place
        parts = [WindowPart(Split(fragments=(fragment,))) for fragment in item.work.fragments]
        at = window.parts.index(part)
        window.parts[at : at + 1] = parts
        window.missing += len(parts) - 1
        self._end_item(item)
        for part in parts:
            row_group = self._read_item(window, part)
            row_group.expected_bytes, row_group.failures = self._read_bytes(row_group), item.failures
            self.retries.append(row_group)
            self.underway_bytes += row_group.expected_bytes

    def quarantine(self, item: WorkItem, error: ContractError) -> None:
        """Gives up a split. Its rows are missing from the epoch.

        Args:
            error: Why it cannot be read.
        Raises:
            DataError: If rows of the split were delivered before the stream's position. Nothing tells which.
        """
        assert isinstance(item.work, Split)
        assert item.place is not None
        if self.request.position.row and item.place[0].number == self.request.position.window:
            raise DataError(
                f"{item.work}", "to be readable, because the checkpoint ends among the rows that it is shuffled with",
                f"{error}".rstrip("."), "Restore the file, or delete the run's checkpoints to train from the start.",
            ) from error  # fmt: skip
        self._end_item(item)
        self.quarantined.append(item.work)
        item.on_result(None, 0, 0, Costs())

    def keeps(self, kept: Callable[[Memory], bool]) -> bool:
        """Returns whether a result is needed of which `kept` is true."""
        parts = (part.memory for window in self.open.values() for part in window.parts)
        groups = (group.memory for group in self.groups.values())
        return any(memory is not None and kept(memory) for memory in (*parts, *groups))

    def lose(self, worker: int, gone: Callable[[Memory], bool]) -> None:
        """Queues the work again whose results are gone with their worker. It gives the same results.

        Args:
            gone: Tells whether a result is gone.
        """
        for window in self.open.values():
            window.home = None if window.home == worker else window.home
            for part in window.parts:
                if part.memory is not None and gone(part.memory):
                    self.bytes -= part.size
                    part.memory = None
                    self._read_again(window, part)
        for group in self.groups.values():
            if group.made and gone(group.memory):
                self._make_again(group)
        for item in [item for item in self.running if not item.is_ready]:
            self.retry(item)

    def _read_again(self, window: OpenWindow, part: WindowPart) -> None:
        window.missing += 1
        item = self._read_item(window, part)
        item.expected_bytes = part.size
        self.retries.append(item)
        self.underway_bytes += item.expected_bytes

    def _make_again(self, group: BatchGroup) -> None:
        self.bytes -= group.size
        if group.number >= self.taken:
            self.ready_bytes -= group.size
        group.memory, group.made = None, False
        for window in _windows(group.pieces):
            window.uses += 1
            if window.number not in self.open:
                self.open[window.number] = window
                self.open_rows += window.stored_rows
                window.home = None
                for part in window.parts:
                    self._read_again(window, part)
        self.batchings = deque(sorted([*self.batchings, (group, self._batch_item(group))], key=_number))

    def _end_item(self, item: WorkItem) -> None:
        self.running.remove(item)
        self.underway_bytes -= item.expected_bytes

    # -- delivery -----------------------------------------------------------------------------------------------

    def group(self, number: int) -> BatchGroup | None:
        """Returns the group with this number, or None until it is made."""
        group = self.groups.get(number)
        return group if group is not None and group.made else None

    def ended(self, number: int) -> bool:
        """Returns whether the epoch ended before this number."""
        return self.to_cut == len(self.windows) and number >= self.groups_cut

    def take(self, number: int) -> None:
        """Notes that a rank received the group."""
        if number >= self.taken:
            self.taken = number + 1
            self.ready_bytes -= self.groups[number].size

    def release(self, rank: int, number: int) -> None:
        """Notes that a rank no longer needs the groups up to this number."""
        for group in list(takewhile(lambda group: group.number <= number, self.groups.values())):
            group.waiting.discard(rank)
            self._free_group(group)

    def join(self, rank: int) -> None:
        """Notes that a rank starts to take groups."""
        self.missing.discard(rank)

    def leave(self, rank: int) -> None:
        """Notes that a rank takes no more groups. The others no longer wait for it to release any."""
        self.missing.discard(rank)
        self.left.add(rank)
        self.release(rank, self.groups_cut)

    def is_stuck(self, number: int) -> bool:
        """Returns whether the memory bound prevents a group that a rank waits for from ever being made.

        Drops rows that were read too early if that makes room.

        This is so when only the rows of the group are missing and there is no room to read them. No rank can release
        anything first, because a rank keeps the previous group until it has this one.
        """
        if self.running or self.retries or self.batchings or not self.reads:
            return False
        if self.row_bytes == 0.0 or any(i < number - 1 for i in self.groups) or self._may_read():
            return False
        return not self._drop_last_window()

    def _drop_last_window(self) -> bool:
        """Drops the rows of the last window in memory, to read them again later. Returns False if there is none.

        Workers that work on different windows may read later ones first.
        """
        for number in sorted(self.open, reverse=True):
            window = self.open[number]
            dropped = [part for part in window.parts if part.memory is not None]
            if number > self.to_cut and dropped:
                self._drop_window(window)
                window.missing += len(dropped)
                reads = [*self.reads, *(self._read_item(window, part) for part in dropped)]
                self.reads = deque(sorted(reads, key=_window_number))  # earlier windows are needed first
                return True
        return False

    def close(self) -> None:
        """Frees everything."""
        for window in self.open.values():
            self._drop_window(window)
        for group in self.groups.values():
            self._drop(group.memory, group.size)
        self.open.clear()
        self.groups.clear()
        self.running.clear()

    # -- reading ------------------------------------------------------------------------------------------------

    def _next_read(self, worker: int | None) -> WorkItem | None:
        place = self._find_read(worker)
        if place is None and self.to_read and self._may_open():
            place = len(self.reads)
            number, self.to_read = self.to_read[0], self.to_read[1:]
            self._open_window(number)
        if not self.reads:
            return None
        if place is None or place >= len(self.reads) or not self._may_read(place):
            place = 0  # help with the window of another worker, which may get no splits any more
            if not self._may_read():
                return None
        item = self.reads[place]
        del self.reads[place]
        item.expected_bytes = self._read_bytes(item)
        assert item.place is not None
        if item.place[0].home is None:
            item.place[0].home = worker
        return item

    def _find_read(self, worker: int | None) -> int | None:
        """Returns the place of the first read that this worker should do. None: there is none."""
        for place, item in enumerate(self.reads):
            assert item.place is not None
            if worker is None or item.place[0].home in (None, worker):
                return place
        return None

    def _may_open(self) -> bool:
        """Returns whether another window may be opened.

        `ahead_rows` limits the rows in open windows, unless all of them are cut: a batch may need many windows.
        """
        if self.ahead_rows is None or self.to_cut == self.to_read[0]:  # windows are cut in order
            return True
        return self.open_rows + sum(split.rows for split in self.windows[self.to_read[0]]) <= self.ahead_rows

    def _may_read(self, place: int = 0) -> bool:
        """Returns whether a read fits into memory together with those before it and a group of batches.

        The first split gives the estimate for the others. Until it is read, others are only read with much room.
        """
        if self.row_bytes == 0.0:
            reads = [*self.running, *(self.reads[i] for i in range(place + 1))]
            rows = sum(item.work.rows for item in reads if isinstance(item.work, Split))
            return not self.running or rows * FIRST_ROW_BYTES <= self.memory_bytes
        reserve = int(self.row_bytes * BATCH_GROWTH * max(GROUP_ROWS, self.request.batch_rows))
        return self._fits(sum(self._read_bytes(self.reads[i]) for i in range(place + 1)) + reserve)

    def _read_bytes(self, item: WorkItem) -> int:
        assert isinstance(item.work, Split)
        return int(item.work.rows * self.row_bytes)

    def _open_window(self, number: int) -> None:
        splits, position = self.windows[number], self.request.position
        if position.row and number == position.window:
            splits = _leave_out(position.lost, position.epoch, splits)
        parts = [WindowPart(split) for split in splits]
        window = self.open[number] = OpenWindow(number, parts, missing=len(parts))
        self.open_rows += window.stored_rows
        self.reads += [self._read_item(window, part) for part in parts]
        self._cut_complete()  # a window may have no row groups left

    def _read_item(self, window: OpenWindow, part: WindowPart) -> WorkItem:
        def finish(memory: Memory, size: int, rows: int, costs: Costs) -> None:
            if window.cut and rows != part.rows:
                raise DataError(
                    f"{part.split}", f"the {part.rows} rows that were read before", f"{rows}",
                    "The file has changed. Run the command again to resume from the last checkpoint.",
                )  # fmt: skip
            part.memory, part.size, part.rows = memory, size, rows
            window.missing -= 1
            window.costs.add(costs)
            if memory is not None:
                self.row_bytes = max(self.row_bytes, size / max(part.split.rows, 1))
            self._cut_complete()

        return WorkItem(self, part.split, (), 0, finish, (window, part))

    # -- cutting batches ----------------------------------------------------------------------------------------

    def _cut_complete(self) -> None:
        """Cuts the next windows, as far as they are read completely."""
        while self.to_cut in self.open and not self.open[self.to_cut].missing:
            self.to_cut += 1
            self._cut(self.open[self.to_cut - 1])

    def _cut(self, window: OpenWindow) -> None:
        """Cuts a window into batches. The last one of the epoch may be short.

        Raises:
            DataError: If the stream's position is behind its last row.
        """
        self._note_lost(window)
        self.open_rows -= window.stored_rows
        window.parts = [part for part in window.parts if part.memory is not None]
        self.open_rows += window.stored_rows
        self.rows_read += window.total
        start, total = self.skip, window.total
        self.skip = 0
        if start > total:
            raise self._misplaced(f"row {start} of {total} in window {window.number}")
        rows = sum(stop - start for _, start, stop in self.cutting)
        while start < total:
            stop = min(start + self.request.batch_rows - rows, total)
            self.cutting.append((window, start, stop))
            rows, start = rows + stop - start, stop
            if rows == self.request.batch_rows:
                self._end_batch(window, stop)
                rows = 0
        if self.to_cut == len(self.windows) and self.cutting:
            self._end_batch(window, total)
        self._end_group()
        window.cut = True
        self._free_windows([window])  # it may have no rows; groups need those cut before

    def _misplaced(self, actual: str) -> DataError:
        return DataError(
            f"position in dataset '{self.request.data}'", "one in its rows", actual,
            "The checkpoint is of other data. Delete the run's checkpoints to train from the start.",
        )  # fmt: skip

    def _note_lost(self, window: OpenWindow) -> None:
        epoch = self.request.position.epoch
        fragments = (one for part in window.parts if part.memory is None for one in part.split.fragments)
        self.lost += tuple(
            LostRows(epoch=epoch, path=one.path, row_group=one.row_group, rows=one.rows) for one in fragments
        )

    def _end_batch(self, window: OpenWindow, stop: int) -> None:
        self.batches += 1
        whole = stop == window.total
        position = Position(
            epoch=self.request.position.epoch,
            batches=self.batches,
            window=window.number + 1 if whole else window.number,
            row=0 if whole else stop,
            lost=self.lost,
        )
        shares = [(part.costs, (stop - start) / part.total) for part, start, stop in self.cutting]
        note = BatchNote(
            position,
            sum(stop - start for _, start, stop in self.cutting),
            sum(costs.read_seconds * share for costs, share in shares),
            sum((costs.transform_seconds + costs.batch_seconds) * share for costs, share in shares),
        )
        notes, pieces = self.grouping
        notes.append(note)
        pieces.append(self.cutting)
        self.cutting = []
        if sum(note.rows for note in notes) + self.request.batch_rows > GROUP_ROWS:
            self._end_group()

    def _end_group(self) -> None:
        notes, pieces = self.grouping
        self.grouping = ([], [])
        if not notes:
            return
        group = BatchGroup(self.groups_cut, notes, pieces, set(self.request.ranks) - self.left)
        self.groups_cut += 1
        self.groups[group.number] = group
        for window in _windows(pieces):
            window.uses += 1
        self.batchings.append((group, self._batch_item(group)))

    def _batch_item(self, group: BatchGroup) -> WorkItem:
        parts: list[WindowPart] = []
        places: dict[int, tuple[int, ...]] = {}
        for window in _windows(group.pieces):
            places[window.number] = tuple(range(len(parts), len(parts) + len(window.parts)))
            parts += window.parts
        work = BatchWork(
            seed=self.request.seed,
            epoch=self.request.position.epoch,
            shuffled=self.request.window_rows is not None,
            world_size=self.request.world_size,
            ranks=self.request.ranks,
            batches=tuple(
                tuple(
                    Window(number=window.number, splits=places[window.number], start=start, stop=stop)
                    for window, start, stop in pieces
                )
                for pieces in group.pieces
            ),
        )
        size = int(sum(note.rows for note in group.notes) * self.row_bytes * BATCH_GROWTH)

        def finish(memory: Memory, size: int, rows: int, costs: Costs) -> None:
            group.memory, group.size, group.made = memory, size, True
            if group.number >= self.taken:
                self.ready_bytes += size
            for note in group.notes:
                note.transform_seconds += costs.batch_seconds / len(group.notes)
            windows = _windows(group.pieces)
            for window in windows:
                window.uses -= 1
            self._free_windows(windows)
            self._free_group(group)  # ranks may have released it while it was made again

        return WorkItem(self, work, parts, size, finish)

    def _next_batching(self, worker: int | None) -> WorkItem | None:
        for pair in self.batchings:
            group, item = pair
            home = group.pieces[-1][-1][0].home
            if not item.is_ready or (worker is not None and home not in (None, worker)):
                continue
            urgent = group.number <= self.taken  # a rank asks for this one next
            room = self.ready_bytes + item.expected_bytes <= READY_SHARE * self.memory_bytes
            if not urgent and not (room and self._fits(item.expected_bytes)):
                return None
            self.batchings.remove(pair)
            return item
        return None

    # -- memory -------------------------------------------------------------------------------------------------

    def _fits(self, size: int) -> bool:
        return self.bytes + self.underway_bytes + size <= self.memory_bytes

    def _free_windows(self, windows: Sequence[OpenWindow]) -> None:
        busy = {id(window) for window, _, _ in self.cutting}
        for window in windows:
            if window.cut and not window.uses and id(window) not in busy:
                del self.open[window.number]
                self.open_rows -= window.stored_rows
                self._drop_window(window)

    def _free_group(self, group: BatchGroup) -> None:
        if group.made and not group.waiting:
            del self.groups[group.number]
            self._drop(group.memory, group.size)

    def _drop_window(self, window: OpenWindow) -> None:
        for part in window.parts:
            self._drop(part.memory, part.size)
            part.memory = None

    def _drop(self, memory: Memory | None, size: int) -> None:
        if memory is not None:
            self.bytes -= size
            self.free(memory)


def _leave_out(lost: Sequence[LostRows], epoch: int, splits: Sequence[Split]) -> list[Split]:
    """Returns the splits of a window without the row groups that were lost in this epoch."""
    gone = {(one.path, one.row_group) for one in lost if one.epoch == epoch}
    kept = [[one for one in split.fragments if (one.path, one.row_group) not in gone] for split in splits]
    return [Split(fragments=tuple(fragments)) for fragments in kept if fragments]


def _window_number(item: WorkItem) -> int:
    assert item.place is not None
    return item.place[0].number


def _number(batching: tuple[BatchGroup, WorkItem]) -> int:
    return batching[0].number


def _windows(pieces: Sequence[Sequence[Piece]]) -> list[OpenWindow]:
    """Returns the windows that batches take rows from, each once, in order."""
    return list(dict.fromkeys(window for batch in pieces for window, _, _ in batch))

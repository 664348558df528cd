"""One epoch on its way to the ranks: what is to be read, what can be batched, what is ready. No clock, no processes."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel

from pipeline.data.batch import Position
from pipeline.preprocessing.batches import BatchWork, Window
from pipeline.preprocessing.splits import Split, cut_epoch
from pipeline.preprocessing.worker import Costs
from storage.reader import Fragment

GROUP_ROWS = 32_768
"""Batches are made and handed over in groups of about so many rows, at least one batch."""
READY_SHARE = 0.25
"""Share of the memory that batches may fill before anyone has asked for them."""
BATCH_GROWTH = 2.0
"""A row in a batch takes at most this much more than among the rows of a split: ids are twice as wide."""

Memory = Any
"""Arrays, wherever the executor keeps them."""


class Request(BaseModel, frozen=True):
    """An epoch as a rank asks for it; all ranks ask alike."""

    data: str
    """Name of the rows, such as `train`."""
    number: int
    """How many streams of these rows the rank has asked for before."""
    position: Position
    batch_rows: int
    """Rows of the GLOBAL batch."""
    seed: int
    window_rows: int | None
    """None keeps the order of the table."""
    world_size: int
    ranks: tuple[int, ...]
    """Ranks that take batches."""
    attempt: int = 0
    """How often the group of ranks was started before: ranks of different attempts never share a stream."""


@dataclass(eq=False)
class WorkItem:
    """Work for one worker at a time; the same item done again gives the same result."""

    stream: "Stream"
    work: Split | BatchWork
    inputs: list[Memory]
    expected_bytes: int
    on_result: Callable[[Memory, int, int, Costs], None]
    """What becomes of the result: (memory, bytes, rows, costs)."""
    failures: int = 0


@dataclass(eq=False)
class OpenWindow:
    """A window whose rows are being read or batched."""

    number: int
    splits: list[Split]
    parts: list[Memory | None]
    rows: list[int]
    sizes: list[int]
    missing: int
    """Splits not yet read."""
    costs: Costs = field(default_factory=Costs)
    uses: int = 0
    """Groups not yet made that take rows from it, and the batch that is being cut."""
    cut: bool = False

    @property
    def total(self) -> int:
        """Selected rows."""
        return sum(self.rows)


Piece = tuple[OpenWindow, int, int]
"""Rows [start, stop) of a window's order."""


@dataclass
class BatchNote:
    """What goes along with the tensors of a global batch."""

    position: Position
    rows: int
    extract_seconds: float
    """Worker time for reading and decoding its rows."""
    transform_seconds: float
    """Worker time for transforming, shuffling and batching them."""


@dataclass(eq=False)
class BatchGroup:
    """Batches that are made and handed over together."""

    number: int
    notes: list[BatchNote]
    pieces: list[list[Piece]]
    waiting: set[int]
    """Ranks that have not yet let go of it."""
    memory: Memory | None = None
    size: int = 0
    made: bool = False


class Stream:
    """The bookkeeping of one epoch, from a position to its end.

    Args:
        fragments: All row groups of the selection in table order.
        split_rows: See `cut_epoch`.
        memory_bytes: Bound for what is read or batched and not yet let go of; a group of batches that a rank
            waits for is made in any case.
        free: Called with memory that is not needed any more.
        ahead_rows: Rows of windows that are read or waiting to be batched, beyond which no other is begun.
    Attributes:
        quarantined: Splits that were given up, in order of their loss.
        missing: Ranks that have not joined yet.
    """

    def __init__(
        self,
        request: Request,
        fragments: Sequence[Fragment],
        split_rows: int,
        memory_bytes: int,
        free: Callable[[Memory], None],
        ahead_rows: int | None = None,
    ) -> None:
        self.request, self.memory_bytes, self.free = request, memory_bytes, free
        self.ahead_rows = ahead_rows
        position = request.position
        self.windows = cut_epoch(fragments, request.seed, position.epoch, request.window_rows, split_rows)
        self.to_read = deque(range(position.window, len(self.windows)))
        self.to_cut = position.window
        self.skip = position.row
        self.batches = position.batches
        self.open: dict[int, OpenWindow] = {}
        self.reads: deque[WorkItem] = deque()
        self.batchings: deque[tuple[BatchGroup, WorkItem]] = deque()
        self.retries: deque[WorkItem] = deque()
        self.running: set[WorkItem] = set()
        self.groups: dict[int, BatchGroup] = {}
        self.groups_cut = 0
        self.cutting: list[Piece] = []
        self.grouping: tuple[list[BatchNote], list[list[Piece]]] = ([], [])
        self.row_bytes = 0.0
        self.bytes = self.ready_bytes = self.peak_bytes = 0
        self.taken = 0
        self.quarantined: list[Split] = []
        self.missing, self.left = set(request.ranks), set[int]()

    # -- work ---------------------------------------------------------------------------------------------------

    def next_item(self) -> WorkItem | None:
        """What an idle worker should do now; None where something else has to happen first."""
        item = self._again() or self._next_batching() or self._next_read()
        if item is not None:
            self.running.add(item)
        return item

    def complete(self, item: WorkItem, memory: Memory, size: int, rows: int, costs: Costs) -> bool:
        """Takes a result; False for one that came late, after another worker's."""
        if item not in self.running:
            self.free(memory)
            return False
        self.running.remove(item)
        self.bytes += size
        self.peak_bytes = max(self.peak_bytes, self.bytes)
        item.on_result(memory, size, rows, costs)
        return True

    def retry(self, item: WorkItem) -> None:
        """Puts a item back whose worker is gone or has failed."""
        if item in self.running:
            self.running.remove(item)
            self.retries.append(item)

    def quarantine(self, item: WorkItem) -> None:
        """Gives a split up: its rows are missing from the epoch."""
        assert isinstance(item.work, Split)
        self.running.remove(item)
        self.quarantined.append(item.work)
        item.on_result(None, 0, 0, Costs())

    # -- delivery -----------------------------------------------------------------------------------------------

    def group(self, number: int) -> BatchGroup | None:
        """The group of that number once it is made."""
        group = self.groups.get(number)
        return group if group is not None and group.made else None

    def ended(self, number: int) -> bool:
        """Whether there is no group of that number."""
        return self.to_cut == len(self.windows) and number >= self.groups_cut

    def take(self, number: int) -> None:
        """Notes that a rank was given the group."""
        if number >= self.taken:
            self.taken = number + 1
            self.ready_bytes -= self.groups[number].size

    def release(self, rank: int, number: int) -> None:
        """Notes that a rank needs no group up to this number any more."""
        for group in [group for group in self.groups.values() if group.number <= number]:
            group.waiting.discard(rank)
            if not group.waiting and group.made:
                del self.groups[group.number]
                self._drop(group.memory, group.size)

    def join(self, rank: int) -> None:
        """Notes that a rank has begun to take groups."""
        self.missing.discard(rank)

    def leave(self, rank: int) -> None:
        """Notes that a rank takes no groups any more, so that the others need not wait for it to let go."""
        self.missing.discard(rank)
        self.left.add(rank)
        self.release(rank, self.groups_cut)

    def is_stuck(self, number: int) -> bool:
        """Whether the memory bound keeps a group that a rank waits for from ever being made.

        Nothing but its own rows is missing, and no rank can let go of anything before it has got this group:
        the group before it stays with a rank until then.
        """
        if self.running or self.retries or self.batchings or not self.reads:
            return False
        return self.row_bytes > 0.0 and not any(i < number - 1 for i in self.groups) and not self._may_read()

    def close(self) -> None:
        """Lets go of everything."""
        for window in self.open.values():
            for memory, size in zip(window.parts, window.sizes, strict=True):
                self._drop(memory, size)
        for group in self.groups.values():
            self._drop(group.memory, group.size)
        self.open.clear()
        self.groups.clear()
        self.running.clear()

    # -- reading ------------------------------------------------------------------------------------------------

    def _again(self) -> WorkItem | None:
        return self.retries.popleft() if self.retries else None

    def _next_read(self) -> WorkItem | None:
        if not self.reads and self.to_read and self._may_open():
            self._open_window(self.to_read.popleft())
        if not self.reads:
            return None
        if not self._may_read():
            return None
        item = self.reads.popleft()
        item.expected_bytes = self._read_bytes(item)
        return item

    def _may_open(self) -> bool:
        """Whether another window may be begun: so many rows ahead are enough, but a batch may need many windows."""
        if self.ahead_rows is None or all(window.cut for window in self.open.values()):
            return True
        held = sum(split.rows for window in self.open.values() for split in window.splits)
        return held + sum(split.rows for split in self.windows[self.to_read[0]]) <= self.ahead_rows

    def _may_read(self) -> bool:
        """Whether the next read fits beside a group of batches; the first one's size says what others will take."""
        if self.row_bytes == 0.0:
            return not self.running
        reserve = int(self.row_bytes * BATCH_GROWTH * max(GROUP_ROWS, self.request.batch_rows))
        return self._fits(self._read_bytes(self.reads[0]) + reserve)

    def _read_bytes(self, item: WorkItem) -> int:
        assert isinstance(item.work, Split)
        return int(item.work.rows * self.row_bytes)

    def _open_window(self, number: int) -> None:
        splits = self.windows[number]
        count = len(splits)
        window = OpenWindow(number, splits, [None] * count, [0] * count, [0] * count, missing=count)
        self.open[number] = window
        for i, split in enumerate(splits):
            self.reads.append(WorkItem(self, split, [], 0, self._read_finisher(window, i)))

    def _read_finisher(self, window: OpenWindow, i: int) -> Callable[[Memory, int, int, Costs], None]:
        def finish(memory: Memory, size: int, rows: int, costs: Costs) -> None:
            window.parts[i], window.sizes[i], window.rows[i] = memory, size, rows
            window.missing -= 1
            window.costs.add(costs)
            if memory is not None:
                self.row_bytes = max(self.row_bytes, size / max(window.splits[i].rows, 1))
            while self.to_cut in self.open and not self.open[self.to_cut].missing:
                self.to_cut += 1
                self._cut(self.open[self.to_cut - 1])

        return finish

    # -- cutting batches ----------------------------------------------------------------------------------------

    def _cut(self, window: OpenWindow) -> None:
        """Deals the rows of a window out to batches; the last one of the epoch may be short."""
        start, total = min(self.skip, window.total), window.total
        self.skip = 0
        held = sum(stop - start for _, start, stop in self.cutting)
        while start < total:
            stop = min(start + self.request.batch_rows - held, total)
            self.cutting.append((window, start, stop))
            held, start = held + stop - start, stop
            if held == self.request.batch_rows:
                self._end_batch(window, stop)
                held = 0
        if self.to_cut == len(self.windows) and self.cutting:
            self._end_batch(window, total)
        self._end_group()
        window.cut = True
        self._free_windows()

    def _end_batch(self, window: OpenWindow, stop: int) -> None:
        self.batches += 1
        whole = stop == window.total
        position = Position(
            epoch=self.request.position.epoch,
            batches=self.batches,
            window=window.number + 1 if whole else window.number,
            row=0 if whole else stop,
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
        inputs: list[Memory] = []
        places: dict[int, tuple[int, ...]] = {}
        for window in _windows(group.pieces):
            parts = [part for part in window.parts if part is not None]
            places[window.number] = tuple(range(len(inputs), len(inputs) + len(parts)))
            inputs += parts
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
            self.ready_bytes += size
            for note in group.notes:
                note.transform_seconds += costs.batch_seconds / len(group.notes)
            for window in _windows(group.pieces):
                window.uses -= 1
            group.pieces = []
            self._free_windows()

        return WorkItem(self, work, inputs, size, finish)

    def _next_batching(self) -> WorkItem | None:
        if not self.batchings:
            return None
        group, item = self.batchings[0]
        urgent = group.number <= self.taken  # the next one that a rank will ask for
        room = self.ready_bytes + item.expected_bytes <= READY_SHARE * self.memory_bytes
        if not urgent and not (room and self._fits(item.expected_bytes)):
            return None
        self.batchings.popleft()
        return item

    # -- memory -------------------------------------------------------------------------------------------------

    def _fits(self, size: int) -> bool:
        underway = sum(item.expected_bytes for item in (*self.running, *self.retries))
        return self.bytes + underway + size <= self.memory_bytes

    def _free_windows(self) -> None:
        busy = {id(window) for window, _, _ in self.cutting}
        for window in list(self.open.values()):
            if window.cut and not window.uses and id(window) not in busy:
                del self.open[window.number]
                for memory, size in zip(window.parts, window.sizes, strict=True):
                    self._drop(memory, size)

    def _drop(self, memory: Memory | None, size: int) -> None:
        if memory is not None:
            self.bytes -= size
            self.free(memory)


def _windows(pieces: Sequence[Sequence[Piece]]) -> list[OpenWindow]:
    """The windows that batches take rows from, each once, in order."""
    return list(dict.fromkeys(window for batch in pieces for window, _, _ in batch))

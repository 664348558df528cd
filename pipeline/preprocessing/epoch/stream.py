"""Stream: the bookkeeping of one epoch, from row groups to batches that ranks have released. No clock, no processes."""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from pipeline.data.selection import require_row_count
from pipeline.errors import ContractError, DataError
from pipeline.preprocessing.epoch.batches import BatchWork
from pipeline.preprocessing.epoch.blocks import BlockPart, BlockReader, ShuffleBlock
from pipeline.preprocessing.epoch.budget import MemoryBudget, ResultHandle
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.cutter import BatchCutter
from pipeline.preprocessing.epoch.groups import BatchGroup, GroupBuffer
from pipeline.preprocessing.epoch.request import GROUP_ROWS, Request
from pipeline.preprocessing.epoch.splits import Split
from storage.reader import Fragment


@dataclass(eq=False)
class WorkItem:
    """Work for one worker: a split to read, or a group of batches to make. Doing it again gives the same result."""

    stream: "Stream"
    work: Split | BatchWork
    target: BlockPart | BatchGroup
    """What gets the result."""
    expected_bytes: int
    failures: int = 0
    doubled: bool = False
    """Whether a second worker was given it since it was last queued."""

    @property
    def inputs(self) -> list[ResultHandle]:
        """The rows that the work takes."""
        return [part.memory for part in self.target.parts] if isinstance(self.target, BatchGroup) else []

    @property
    def is_ready(self) -> bool:
        """Whether all rows are there that the work takes."""
        return isinstance(self.target, BlockPart) or self.target.is_ready

    @property
    def is_expendable(self) -> bool:
        """Whether its rows may be given up: those of a split, before batches are cut from its block."""
        return isinstance(self.target, BlockPart) and not self.target.block.cut

    @property
    def several(self) -> bool:
        """Whether it is a split of several row groups."""
        return isinstance(self.work, Split) and len(self.work.fragments) > 1


class Stream:
    """Tracks one epoch from a position to its end.

    Reads blocks (`reader`), cuts them into groups of batches (`cutter`) and delivers these (`groups`), all of it in
    bounded memory (`budget`). The stream itself knows the work that is being done or has to be done again.

    Args:
        fragments: All row groups of the selection in table order.
        split_rows: See `cut_epoch`.
        memory_bytes: Upper bound of the rows and batches in memory. A group of batches that a rank waits for is made
            even beyond it. Where results stay with workers, which do not make groups in order, a later one may be too.
        free: Called with a result that is no longer needed.
        ahead_rows: See `BlockReader`.
        rows: Selected rows of the epoch as they were pinned. None: unknown.
    Raises:
        DataError: If the epoch has no row groups and rows were pinned, or the position is not in it.
    Attributes:
        quarantined: Splits that were given up, in that order.
        missing: Ranks that have not joined yet.
        left: Ranks that take no more groups.
    """

    def __init__(
        self,
        request: Request,
        fragments: Sequence[Fragment],
        split_rows: int,
        memory_bytes: int,
        free: Callable[[ResultHandle], None],
        ahead_rows: int | None = None,
        rows: int | None = None,
    ) -> None:
        self.request, self.pinned_rows = request, rows
        self.budget = MemoryBudget(memory_bytes, free)
        self.reader = BlockReader(request, fragments, split_rows, self.budget, GROUP_ROWS, ahead_rows)
        self.cutter = BatchCutter(request, GROUP_ROWS)
        self.groups = GroupBuffer(self.budget)
        self.running: set[WorkItem] = set()
        self.retries: deque[WorkItem] = deque()
        self.quarantined: list[Split] = []
        self.missing, self.left = set(request.ranks), set[int]()
        if not self.reader.plan:
            self._require_row_count()

    # -- work ---------------------------------------------------------------------------------------------------

    def next_item(self, maker: int | None = None, spare: bool = False, makes: bool = True) -> WorkItem | None:
        """Returns work for an idle worker, or None if something else has to happen first.

        Args:
            maker: Number of the worker that makes its rows into batches, if results stay with workers. It gets splits
                and batches of the same blocks, because other workers would have to fetch the rows from it.
            spare: Whether it is to end soon, and gets no splits.
            makes: Whether it may make batches: whether it is the maker itself.
        """
        ready = (item for item in self.retries if item.is_ready)
        item = next((item for item in ready if makes or isinstance(item.target, BlockPart)), None)
        if item is not None:
            self.retries.remove(item)
        else:
            item = self._new_item(maker, spare, makes)
            if item is None:
                return None
            self.budget.expect(item.expected_bytes)
        self.running.add(item)
        return item

    def _new_item(self, maker: int | None, spare: bool, makes: bool) -> WorkItem | None:
        group = self.groups.next_group(maker) if makes else None
        if group is not None:
            return WorkItem(self, group.describe(self.request), group, group.expected_bytes)
        if spare:
            return None
        part = self.reader.next_part(maker)
        self._cut_complete()  # a block that was opened may have no row groups left
        return None if part is None else WorkItem(self, part.split, part, self.budget.split_bytes(part.split.rows))

    def complete(self, item: WorkItem, memory: ResultHandle, size: int, rows: int, costs: Costs) -> bool:
        """Takes a result. Returns False if another worker's result came first.

        Raises:
            DataError: If a pass over the whole epoch ends with more or fewer rows than were pinned.
        """
        if item not in self.running:
            self.budget.free(memory)
            return False
        self._end(item)
        self.budget.hold(size)
        if isinstance(item.target, BatchGroup):
            self.groups.finish(item.target, memory, size, costs)
            self._close_unused(item.target.blocks)
        else:
            self.reader.finish(item.target, memory, size, rows, costs)
            self._cut_complete()
            if self.reader.ended:
                self._require_row_count()
        return True

    def _end(self, item: WorkItem) -> None:
        self.running.remove(item)
        self.budget.expect(-item.expected_bytes)

    def _cut_complete(self) -> None:
        """Cuts the next blocks, as far as they are read completely."""
        while (block := self.reader.next_complete()) is not None:
            for batches in self.cutter.cut(block, self.reader.ended):
                self.groups.add(batches, set(self.request.ranks) - self.left)
            block.cut = True
            self._close_unused([block])  # it may have no rows

    def _close_unused(self, blocks: Sequence[ShuffleBlock]) -> None:
        self.reader.close_unused(blocks, {block for block, _, _ in self.cutter.pieces})

    def _require_row_count(self) -> None:
        position = self.request.position
        if not (position.window or position.row or self.quarantined):
            require_row_count(self.cutter.rows, self.pinned_rows, f"dataset '{self.request.data}'")

    # -- faults -------------------------------------------------------------------------------------------------

    def retry(self, item: WorkItem) -> None:
        """Queues an item again after its worker died or failed."""
        if item in self.running:
            self.running.remove(item)
            self.retries.append(item)
            item.doubled = False

    def divide(self, item: WorkItem) -> None:
        """Replaces a split by its row groups, to find the unreadable ones. They keep the split's number of failures."""
        assert isinstance(item.target, BlockPart)
        self._end(item)
        for part in self.reader.divide(item.target):
            self._read_again(part, self.budget.split_bytes(part.split.rows), item.failures)

    def quarantine(self, item: WorkItem, error: ContractError) -> None:
        """Gives up a split. Its rows are missing from the epoch.

        Args:
            error: Why it cannot be read.
        Raises:
            DataError: If rows of the split were delivered before the stream's position. Nothing tells which.
        """
        assert isinstance(item.target, BlockPart)
        if self.request.position.row and item.target.block.number == self.request.position.window:
            raise DataError(
                f"{item.work}", "to be readable, because the checkpoint ends among the rows that it is shuffled with",
                f"{error}".rstrip("."), "Restore the file, or delete the run's checkpoints to train from the start.",
            ) from error  # fmt: skip
        self._end(item)
        self.quarantined.append(item.target.split)
        self.reader.finish(item.target, None, 0, 0, Costs())
        self._cut_complete()

    def keeps(self, kept: Callable[[ResultHandle], bool]) -> bool:
        """Returns whether a result is needed of which `kept` is true."""
        parts = (part.memory for block in self.reader.open.values() for part in block.parts)
        groups = (group.memory for group in self.groups.groups.values())
        return any(memory is not None and kept(memory) for memory in (*parts, *groups))

    def lose(self, worker: int, gone: Callable[[ResultHandle], bool]) -> None:
        """Queues the work again whose results are gone with their worker. It gives the same results.

        Args:
            gone: Tells whether a result is gone.
        """
        parts = self.reader.lose(worker, gone)
        for group in self.groups.lose(gone):
            parts += self.reader.reopen(group.blocks)
        for part in parts:
            self._read_again(part, part.size)
        groups = [(item.target, item) for item in self.running if isinstance(item.target, BatchGroup)]
        for _, item in sorted((group.number, item) for group, item in groups if not group.is_ready):
            self.retry(item)

    def _read_again(self, part: BlockPart, expected: int, failures: int = 0) -> None:
        self.retries.append(WorkItem(self, part.split, part, expected, failures))
        self.budget.expect(expected)

    # -- delivery -----------------------------------------------------------------------------------------------

    def ended(self, number: int) -> bool:
        """Returns whether the epoch ended before this number."""
        return self.reader.ended and number >= self.groups.count

    def join(self, rank: int) -> None:
        """Notes that a rank starts to take groups."""
        self.missing.discard(rank)

    def leave(self, rank: int) -> None:
        """Notes that a rank takes no more groups. The others no longer wait for it to release any."""
        self.missing.discard(rank)
        self.left.add(rank)
        self.groups.release(rank, self.groups.count)

    def is_stuck(self, number: int) -> bool:
        """Returns whether the memory bound prevents a group that a rank waits for from ever being made.

        Drops rows that were read too early if that makes room.

        This is so when only the rows of the group are missing and there is no room to read them. No rank can release
        anything first, because a rank keeps the previous group until it has this one.
        """
        if self.running or self.retries or self.groups.to_make or not self.reader.reads:
            return False
        if self.budget.row_bytes == 0.0 or any(i < number - 1 for i in self.groups.groups) or self.reader.may_read():
            return False
        return not self.reader.drop_last()

    def close(self) -> None:
        """Frees everything."""
        self.reader.close()
        self.groups.close()
        self.running.clear()

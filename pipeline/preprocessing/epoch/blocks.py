"""BlockReader: which shuffle blocks of an epoch are open, and which of their splits are read."""

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice

from pipeline.data.position import LostRows
from pipeline.errors import DataError
from pipeline.preprocessing.epoch.budget import MemoryBudget, ResultHandle
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split, cut_epoch
from storage.reader import Fragment

FIRST_ROW_BYTES = 16_384
"""What a row is taken to need before any was read. 300 lists of ten ids take 12,000 bytes, and their lengths 1,200."""


@dataclass(eq=False)
class BlockPart:
    """A split of a shuffle block with its rows."""

    block: "ShuffleBlock"
    split: Split
    memory: ResultHandle | None = None
    """The rows. None: not read yet, given up, lost with their worker, or not needed any more."""
    size: int = 0
    """Bytes."""
    rows: int = 0
    """Selected rows."""


@dataclass(eq=False)
class ShuffleBlock:
    """Rows that are shuffled together, the window of a position. It is being read or batched."""

    number: int
    parts: list[BlockPart] = field(default_factory=list)
    """In the order of the block's rows. Without those that were given up, once it is complete."""
    given_up: list[Fragment] = field(default_factory=list)
    """Row groups that it lacks, once it is complete."""
    missing: int = 0
    """Splits still to read."""
    costs: Costs = field(default_factory=Costs)
    uses: int = 0
    """Groups of batches that take rows from it and are not made yet."""
    cut: bool = False
    """Whether its rows are cut into batches."""
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


class BlockReader:
    """Opens the blocks of an epoch in order, and names the splits to read.

    A split of an open block is in `reads`, in `underway`, in memory or given up.

    Args:
        group_rows: Rows of the batches for which a read leaves room.
        ahead_rows: No block is opened beyond this many stored rows in open blocks. None: no such limit.
    Attributes:
        plan: The splits of each block; see `cut_epoch`.
        to_open: Number of the next block to open.
        to_cut: Number of the next block to cut into batches.
        open_rows: Stored rows of the open blocks.
    """

    def __init__(
        self,
        request: Request,
        fragments: Sequence[Fragment],
        split_rows: int,
        budget: MemoryBudget,
        group_rows: int,
        ahead_rows: int | None,
    ) -> None:
        self.request, self.budget, self.ahead_rows = request, budget, ahead_rows
        self.batch_rows = max(group_rows, request.batch_rows)
        position = request.position
        self.plan = cut_epoch(fragments, request.seed, position.epoch, request.window_rows, split_rows)
        if position.window > len(self.plan):
            raise misplaced(request, f"shuffle block {position.window} of {len(self.plan)}")
        self.to_open = self.to_cut = position.window
        self.open: dict[int, ShuffleBlock] = {}
        self.open_rows = 0
        self.reads: deque[BlockPart] = deque()
        self.underway: set[BlockPart] = set()

    @property
    def ended(self) -> bool:
        """Whether all blocks were complete."""
        return self.to_cut == len(self.plan)

    def next_part(self, worker: int | None) -> BlockPart | None:
        """Returns the split that a worker should read, or None. Opens a block if there is no split for this worker."""
        places = (i for i, part in enumerate(self.reads) if worker is None or part.block.home in (None, worker))
        place = next(places, None)
        if place is None and self._may_open():
            place = len(self.reads)
            self._open()
        if place is None or place >= len(self.reads) or not self.may_read(place):
            place = 0  # help with the block of another worker, which may get no splits any more
            if not self.reads or not self.may_read():
                return None
        part = self.reads[place]
        del self.reads[place]
        if part.block.home is None:
            part.block.home = worker
        self.underway.add(part)
        return part

    def _may_open(self) -> bool:
        """Returns whether another block may be opened.

        `ahead_rows` limits the rows in open blocks, unless all of them are cut: a batch may need many blocks.
        """
        if self.to_open == len(self.plan):
            return False
        if self.ahead_rows is None or self.to_cut == self.to_open:  # blocks are cut in order
            return True
        return self.open_rows + sum(split.rows for split in self.plan[self.to_open]) <= self.ahead_rows

    def _open(self) -> None:
        position, block, splits = self.request.position, ShuffleBlock(self.to_open), self.plan[self.to_open]
        if position.row and block.number == position.window:
            splits = _leave_out(position.lost, position.epoch, splits)
        block.parts = [BlockPart(block, split) for split in splits]
        block.missing = len(block.parts)
        self.to_open += 1
        self.open[block.number] = block
        self.open_rows += block.stored_rows
        self.reads += block.parts

    def may_read(self, place: int = 0) -> bool:
        """Returns whether a read fits into memory together with those before it and a group of batches.

        The first split gives the estimate for the others. Until it is read, others are only read with much room.
        """
        rows = [part.split.rows for part in islice(self.reads, place + 1)]
        if self.budget.row_bytes == 0.0:
            reading = sum(part.split.rows for part in self.underway)
            return not self.underway or (reading + sum(rows)) * FIRST_ROW_BYTES <= self.budget.limit
        return self.budget.fits(sum(map(self.budget.split_bytes, rows)) + self.budget.batch_bytes(self.batch_rows))

    def finish(self, part: BlockPart, memory: ResultHandle | None, size: int, rows: int, costs: Costs) -> None:
        """Takes the rows of a split. None: it is given up.

        Raises:
            DataError: If batches were cut of it before, and it has other rows now.
        """
        if part.block.cut and rows != part.rows:
            raise DataError(
                f"{part.split}", f"the {part.rows} rows that were read before", f"{rows}",
                "The file has changed. Run the command again to resume from the last checkpoint.",
            )  # fmt: skip
        self.underway.remove(part)
        part.memory, part.size, part.rows = memory, size, rows
        part.block.missing -= 1
        part.block.costs.add(costs)
        if memory is not None:
            self.budget.learn(size, part.split.rows)

    def divide(self, part: BlockPart) -> list[BlockPart]:
        """Replaces a split that is being read by its row groups, which are to be read now."""
        block = part.block
        parts = [BlockPart(block, Split(fragments=(fragment,))) for fragment in part.split.fragments]
        at = block.parts.index(part)
        block.parts[at : at + 1] = parts
        block.missing += len(parts) - 1
        self.underway.remove(part)
        self.underway.update(parts)
        return parts

    def next_complete(self) -> ShuffleBlock | None:
        """Returns the next block to cut, without what was given up. None: it is not complete yet."""
        block = self.open.get(self.to_cut)
        if block is None or block.missing:
            return None
        self.to_cut += 1
        self.open_rows -= block.stored_rows
        block.given_up = [one for part in block.parts if part.memory is None for one in part.split.fragments]
        block.parts = [part for part in block.parts if part.memory is not None]
        self.open_rows += block.stored_rows
        return block

    def close_unused(self, blocks: Iterable[ShuffleBlock], busy: Collection[ShuffleBlock]) -> None:
        """Closes those of some blocks that no batch needs any more.

        Args:
            busy: Blocks with rows of a batch that is not full yet.
        """
        for block in blocks:
            if block.cut and not block.uses and block not in busy:
                del self.open[block.number]
                self.open_rows -= block.stored_rows
                self._drop(block)

    def lose(self, worker: int, gone: Callable[[ResultHandle], bool]) -> list[BlockPart]:
        """Returns the splits whose rows are gone with their worker. They are to be read again now."""
        lost = []
        for block in self.open.values():
            block.home = None if block.home == worker else block.home
            for part in block.parts:
                if part.memory is not None and gone(part.memory):
                    self.budget.hold(-part.size)
                    part.memory = None
                    lost.append(part)
        self._read_again(lost)
        return lost

    def reopen(self, blocks: Iterable[ShuffleBlock]) -> list[BlockPart]:
        """Opens those of some blocks that were closed. Returns their splits, which are to be read again now."""
        closed = [block for block in blocks if block.number not in self.open]
        for block in closed:
            self.open[block.number] = block
            self.open_rows += block.stored_rows
            block.home = None
        again = [part for block in closed for part in block.parts]
        self._read_again(again)
        return again

    def _read_again(self, parts: Iterable[BlockPart]) -> None:
        for part in parts:
            part.block.missing += 1
            self.underway.add(part)

    def drop_last(self) -> bool:
        """Drops the rows of the last block in memory, to read them again later. Returns False if there is none.

        Workers that work on different blocks may read later ones first.
        """
        for number in sorted(self.open, reverse=True):
            block = self.open[number]
            dropped = [part for part in block.parts if part.memory is not None]
            if number > self.to_cut and dropped:
                self._drop(block)
                block.missing += len(dropped)
                reads = sorted([*self.reads, *dropped], key=lambda part: part.block.number)
                self.reads = deque(reads)  # earlier blocks are needed first
                return True
        return False

    def close(self) -> None:
        """Frees all rows."""
        for block in self.open.values():
            self._drop(block)
        self.open.clear()

    def _drop(self, block: ShuffleBlock) -> None:
        for part in block.parts:
            self.budget.drop(part.memory, part.size)
            part.memory = None


def misplaced(request: Request, actual: str) -> DataError:
    """Returns the error of a position that is not in the data."""
    return DataError(
        f"position in dataset '{request.data}'", "one in its rows", actual,
        "The checkpoint is of other data. Delete the run's checkpoints to train from the start.",
    )  # fmt: skip


def _leave_out(lost: Sequence[LostRows], epoch: int, splits: Sequence[Split]) -> list[Split]:
    """Returns the splits of a block without the row groups that were lost in this epoch."""
    gone = {(one.path, one.row_group) for one in lost if one.epoch == epoch}
    kept = [[one for one in split.fragments if (one.path, one.row_group) not in gone] for split in splits]
    return [Split(fragments=tuple(fragments)) for fragments in kept if fragments]

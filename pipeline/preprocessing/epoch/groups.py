"""GroupBuffer: the groups of batches of a stream, from their cut until all ranks have released them."""

from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import takewhile

from pipeline.preprocessing.epoch.batches import BatchWork, BlockSlice
from pipeline.preprocessing.epoch.blocks import BlockPart, ShuffleBlock
from pipeline.preprocessing.epoch.budget import MemoryBudget, ResultHandle
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.cutter import Batches, Piece
from pipeline.preprocessing.epoch.request import BatchNote, Request


@dataclass(eq=False)
class BatchGroup:
    """Batches that are made and delivered together."""

    number: int
    notes: list[BatchNote]
    pieces: list[list[Piece]]
    blocks: list[ShuffleBlock]
    """Blocks that they take rows from, each once, in order."""
    parts: list[BlockPart]
    """Splits of these blocks."""
    waiting: set[int]
    """Ranks that have not released it yet."""
    expected_bytes: int
    memory: ResultHandle | None = None
    size: int = 0
    made: bool = False

    @property
    def rows(self) -> int:
        """Rows of all batches."""
        return sum(note.rows for note in self.notes)

    @property
    def is_ready(self) -> bool:
        """Whether all rows are there that it takes."""
        return all(part.memory is not None for part in self.parts)

    def describe(self, request: Request) -> BatchWork:
        """Returns the work that makes it of the rows of `parts`."""
        places: dict[int, tuple[int, ...]] = {}
        first = 0
        for block in self.blocks:
            places[block.number] = tuple(range(first, first + len(block.parts)))
            first += len(block.parts)
        return BatchWork(
            seed=request.seed,
            epoch=request.position.epoch,
            shuffled=request.window_rows is not None,
            world_size=request.world_size,
            ranks=request.ranks,
            batches=tuple(
                tuple(
                    BlockSlice(number=block.number, splits=places[block.number], start=start, stop=stop)
                    for block, start, stop in pieces
                )
                for pieces in self.pieces
            ),
        )


class GroupBuffer:
    """Knows which groups are to be made, which are ready and who still needs them.

    A group in `groups` is in `to_make`, is being made, or is made. It is `ready` in the budget until a rank takes it.

    Attributes:
        count: Groups cut so far.
        taken: Number of the group that ranks ask for next.
    """

    def __init__(self, budget: MemoryBudget) -> None:
        self.budget = budget
        self.groups: dict[int, BatchGroup] = {}
        self.to_make: deque[BatchGroup] = deque()
        self.count = self.taken = 0

    def add(self, batches: Batches, ranks: Iterable[int]) -> None:
        """Adds a group of batches that these ranks will take."""
        notes, pieces = [note for note, _ in batches], [pieces for _, pieces in batches]
        blocks = list(dict.fromkeys(block for batch in pieces for block, _, _ in batch))
        parts = [part for block in blocks for part in block.parts]
        size = self.budget.batch_bytes(sum(note.rows for note in notes))
        group = BatchGroup(self.count, notes, pieces, blocks, parts, set(ranks), size)
        for block in blocks:
            block.uses += 1
        self.count += 1
        self.groups[group.number] = group
        self.to_make.append(group)

    def next_group(self, worker: int | None) -> BatchGroup | None:
        """Returns the group that a worker should make, or None."""
        for group in self.to_make:
            if not group.is_ready or (worker is not None and group.blocks[-1].home not in (None, worker)):
                continue
            urgent = group.number <= self.taken  # a rank asks for this one next
            if not urgent and not self.budget.fits_early(group.expected_bytes):
                return None
            self.to_make.remove(group)
            return group
        return None

    def finish(self, group: BatchGroup, memory: ResultHandle, size: int, costs: Costs) -> None:
        """Takes the batches of a group."""
        group.memory, group.size, group.made = memory, size, True
        if group.number >= self.taken:
            self.budget.offer(size)
        for note in group.notes:
            note.transform_seconds += costs.batch_seconds / len(group.notes)
        for block in group.blocks:
            block.uses -= 1
        self._free(group)  # ranks may have released it while it was made again

    def get(self, number: int) -> BatchGroup | None:
        """Returns the group with this number, or None until it is made."""
        group = self.groups.get(number)
        return group if group is not None and group.made else None

    def take(self, number: int) -> None:
        """Notes that a rank received the group."""
        if number >= self.taken:
            self.taken = number + 1
            self.budget.offer(-self.groups[number].size)

    def release(self, rank: int, number: int) -> None:
        """Notes that a rank no longer needs the groups up to this number."""
        for group in list(takewhile(lambda group: group.number <= number, self.groups.values())):
            group.waiting.discard(rank)
            self._free(group)

    def lose(self, gone: Callable[[ResultHandle], bool]) -> list[BatchGroup]:
        """Returns the groups that are gone with their worker. They are to be made again of the same rows."""
        lost = [group for group in self.groups.values() if group.made and gone(group.memory)]
        for group in lost:
            self.budget.hold(-group.size)
            if group.number >= self.taken:
                self.budget.offer(-group.size)
            group.memory, group.made = None, False
            group.expected_bytes = self.budget.batch_bytes(group.rows)
            for block in group.blocks:
                block.uses += 1
        self.to_make = deque(sorted([*self.to_make, *lost], key=lambda group: group.number))
        return lost

    def close(self) -> None:
        """Frees all batches."""
        for group in self.groups.values():
            self.budget.drop(group.memory, group.size)
        self.groups.clear()

    def _free(self, group: BatchGroup) -> None:
        if group.made and not group.waiting:
            del self.groups[group.number]
            self.budget.drop(group.memory, group.size)

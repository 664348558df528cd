"""BatchCutter: cuts the rows of shuffle blocks into global batches. A function of the blocks and the position alone."""

from pipeline.data.position import LostRows, Position
from pipeline.preprocessing.epoch.blocks import ShuffleBlock, misplaced
from pipeline.preprocessing.epoch.request import BatchNote, Request

Piece = tuple[ShuffleBlock, int, int]
"""Rows [start, stop) of a block, in its shuffled order."""
Batches = list[tuple[BatchNote, list[Piece]]]
"""Batches that are made and delivered together, each with the rows that it takes."""


class BatchCutter:
    """Cuts blocks in order. `pieces` are the rows of the batch that is not full yet, and all earlier rows are cut.

    Args:
        group_rows: Rows of batches that are made together. One batch may have more.
    Attributes:
        lost: Row groups that the batches cut so far lack, with those that the position names already.
        rows: Selected rows of the blocks cut so far.
    """

    def __init__(self, request: Request, group_rows: int) -> None:
        self.request, self.group_rows = request, group_rows
        position = request.position
        self.skip, self.batches, self.lost = position.row, position.batches, position.lost
        self.pieces: list[Piece] = []
        self.rows = 0

    def cut(self, block: ShuffleBlock, last: bool) -> list[Batches]:
        """Cuts a complete block. Returns the groups of batches that end in it.

        Args:
            last: Whether it is the last one of the epoch. Then its last batch may be short.
        Raises:
            DataError: If the stream's position is behind its last row.
        """
        epoch, size, total = self.request.position.epoch, self.request.batch_rows, block.total
        self.lost += tuple(
            LostRows(epoch=epoch, path=one.path, row_group=one.row_group, rows=one.rows) for one in block.given_up
        )
        self.rows += total
        start, self.skip = self.skip, 0
        if start > total:
            raise misplaced(self.request, f"row {start} of {total} in shuffle block {block.number}")
        batches: Batches = []
        rows = sum(stop - start for _, start, stop in self.pieces)
        while start < total:
            stop = min(start + size - rows, total)
            self.pieces.append((block, start, stop))
            rows, start = rows + stop - start, stop
            if rows == size:
                batches.append(self._end_batch(block, stop))
                rows = 0
        if last and self.pieces:
            batches.append(self._end_batch(block, total))
        return self._group(batches)

    def _end_batch(self, block: ShuffleBlock, stop: int) -> tuple[BatchNote, list[Piece]]:
        pieces, self.pieces = self.pieces, []
        self.batches += 1
        whole = stop == block.total
        position = Position(
            epoch=self.request.position.epoch,
            batches=self.batches,
            window=block.number + 1 if whole else block.number,
            row=0 if whole else stop,
            lost=self.lost,
        )
        shares = [(one.costs, (stop - start) / one.total) for one, start, stop in pieces]
        note = BatchNote(
            position,
            sum(stop - start for _, start, stop in pieces),
            sum(costs.read_seconds * share for costs, share in shares),
            sum((costs.transform_seconds + costs.batch_seconds) * share for costs, share in shares),
        )
        return note, pieces

    def _group(self, batches: Batches) -> list[Batches]:
        groups: list[Batches] = []
        rows = 0
        for batch in batches:
            if not groups or rows + self.request.batch_rows > self.group_rows:
                groups.append([])
                rows = 0
            groups[-1].append(batch)
            rows += batch[0].rows
        return groups

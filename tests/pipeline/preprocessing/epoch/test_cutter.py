"""The cutter cuts blocks into batches in order, a whole group at a time, and resumes at any position."""

from itertools import accumulate

import pytest

from pipeline.data.position import Position
from pipeline.errors import DataError
from pipeline.preprocessing.epoch.blocks import BlockPart, ShuffleBlock
from pipeline.preprocessing.epoch.cutter import BatchCutter, Batches
from pipeline.preprocessing.epoch.request import Request
from pipeline.preprocessing.epoch.splits import Split

ROWS = (25, 0, 38, 7)


def cut(position: Position, batch_rows: int = 10, group_rows: int = 20) -> list[Batches]:
    """Cuts the rest of an epoch."""
    request = Request(
        data="rows", number=0, position=position, batch_rows=batch_rows, seed=7, window_rows=25, world_size=1, ranks=(0,)
    )  # fmt: skip
    cutter = BatchCutter(request, group_rows)
    groups = []
    for number in range(position.window, len(ROWS)):
        block = ShuffleBlock(number)
        block.parts = [BlockPart(block, Split(fragments=()), rows=ROWS[number])]
        groups += cutter.cut(block, number == len(ROWS) - 1)
    assert cutter.pieces == []
    return groups


def slices(groups: list[Batches]) -> list[list[tuple[int, int, int]]]:
    return [[(block.number, start, stop) for block, start, stop in pieces] for group in groups for _, pieces in group]


def test_a_group_ends_with_its_rows_or_its_block() -> None:
    groups = cut(Position())
    assert [[note.rows for note, _ in group] for group in groups] == [[10, 10], [10, 10], [10, 10], [10]]
    assert slices(groups)[2] == [(0, 20, 25), (2, 0, 5)]
    assert [[note.rows for note, _ in group] for group in cut(Position(), 64)] == [[64], [6]]


@pytest.mark.parametrize("batch_rows", [1, 7, 10, 64, 1000])
def test_every_position_has_the_rest(batch_rows: int) -> None:
    whole = [batch for group in cut(Position(), batch_rows) for batch in group]
    assert list(accumulate(note.rows for note, _ in whole))[-1] == sum(ROWS)
    for at, (note, _) in enumerate(whole):
        rest = cut(note.position, batch_rows)
        assert slices(rest) == slices([whole[at + 1 :]])
        assert [note.position for group in rest for note, _ in group] == [note.position for note, _ in whole[at + 1 :]]


def test_a_position_behind_the_last_row() -> None:
    with pytest.raises(DataError, match=r"got row 26 of 25 in shuffle block 0\. The checkpoint is of other data"):
        cut(Position(window=0, row=26))

"""The order of splits is complete, a function of seed and epoch alone, and equal to golden values."""

import datetime
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.preprocessing.epoch.splits import Split, cut_epoch, make_generator, permute_rows
from storage.reader import Fragment

SIZES = (5, 0, 3, 9, 1, 2)
FRAGMENTS = [
    Fragment(path=f"file-{i}", row_group=0, rows=n, day=datetime.date(2025, 1, 1)) for i, n in enumerate(SIZES)
]


def places(windows: list[list[Split]]) -> list[list[list[int]]]:
    return [[[FRAGMENTS.index(f) for f in split.fragments] for split in window] for window in windows]


def flat(windows: list[list[Split]]) -> list[int]:
    return [i for window in places(windows) for split in window for i in split]


def test_golden_order() -> None:
    assert flat(cut_epoch(FRAGMENTS, seed=7, epoch=0, window_rows=4, split_rows=1)) == [1, 0, 4, 2, 3, 5]
    assert permute_rows(seed=7, epoch=0, block=0, rows=6).tolist() == [1, 5, 3, 4, 0, 2]


def test_unshuffled_keeps_the_order_of_the_table() -> None:
    assert flat(cut_epoch(FRAGMENTS, seed=7, epoch=3, window_rows=None, split_rows=4)) == list(range(6))


def test_every_seed_epoch_and_stream_is_another_permutation() -> None:
    keys = [(seed, epoch, stream) for seed in range(3) for epoch in range(3) for stream in range(3)]
    orders = [make_generator(*key).permutation(50).tolist() for key in keys]
    assert len({tuple(order) for order in orders}) == len(keys)
    assert all(sorted(order) == list(range(50)) for order in orders)
    assert [make_generator(*key).permutation(50).tolist() for key in keys] == orders


def test_rows_and_fragments_are_not_shuffled_alike() -> None:
    fragments = flat(cut_epoch(FRAGMENTS, 7, 0, 1, 1))
    assert not np.array_equal(fragments, permute_rows(7, 0, 0, len(FRAGMENTS)))


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, [[1, 0], [4], [2], [3], [5]]),
        (8, [[1, 0, 4, 2], [3], [5]]),
        (20, [[1, 0, 4, 2, 3, 5]]),
        (10**9, [[1, 0, 4, 2, 3, 5]]),
    ],
)
def test_windows_close_as_soon_as_they_are_full(rows: int, expected: list[list[int]]) -> None:
    windows = cut_epoch(FRAGMENTS, 7, 0, rows, 10**9)
    assert [[i for split in window for i in split] for window in places(windows)] == expected


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        (1, [[0], [1], [2], [3], [4], [5]]),
        (5, [[0, 1], [2], [3], [4, 5]]),
        (8, [[0, 1, 2], [3], [4, 5]]),
        (10**9, [[0, 1, 2, 3, 4, 5]]),
    ],
)
def test_small_fragments_are_read_together_and_a_large_one_alone(rows: int, expected: list[list[int]]) -> None:
    assert places(cut_epoch(FRAGMENTS, 0, 0, None, rows)) == [[split] for split in expected]


def test_no_fragments_no_windows() -> None:
    assert cut_epoch([], 7, 0, 5, 5) == cut_epoch([], 7, 0, None, 5) == []


@given(
    sizes=st.lists(st.integers(0, 30), max_size=40),
    window_rows=st.none() | st.integers(1, 60),
    split_rows=st.integers(1, 60),
    epoch=st.integers(0, 3),
)
def test_every_fragment_once_in_windows_and_splits_of_the_size(
    sizes: list[int], window_rows: int | None, split_rows: int, epoch: int
) -> None:
    fragments = [
        Fragment(path=f"file-{i}", row_group=0, rows=n, day=datetime.date(2025, 1, 1)) for i, n in enumerate(sizes)
    ]
    windows = cut_epoch(fragments, 7, epoch, window_rows, split_rows)
    found = [fragment for window in windows for split in window for fragment in split.fragments]
    assert sorted(found, key=fragments.index) == fragments
    for window in windows:
        assert all(split.rows <= split_rows or len(split.fragments) == 1 for split in window)
        for left, right in pairwise(window):
            assert left.rows + right.fragments[0].rows > split_rows
    if window_rows is not None:
        assert all(sum(split.rows for split in window) >= window_rows for window in windows[:-1])
        for window in windows:
            assert sum(split.rows for split in window) - window[-1].fragments[-1].rows < window_rows


def test_a_split_says_where_it_is() -> None:
    group = FRAGMENTS[0].model_copy(update={"row_group": 3})
    assert str(Split(fragments=(group,))) == "row group 3 of file 'file-0'"
    assert str(Split(fragments=(group, FRAGMENTS[2]))) == (
        "row group 3 of file 'file-0' to row group 0 of file 'file-2'"
    )

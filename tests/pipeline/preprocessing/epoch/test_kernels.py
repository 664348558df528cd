"""The loops of a worker against plain Python lists."""

import itertools

import numpy as np
import pytest

from pipeline.preprocessing.epoch import kernels
from pipeline.transforms.kernels.hashing import offsets_of

LISTS = [list(range(100 * n, 101 * n)) for n in (3, 0, 4, 5, 1, 8, 0, 9, 2, 7, 40, 6, 0)]
"""Lists of every length around four, which are copied differently, and of none at the end."""


@pytest.mark.parametrize("kind", [np.int32, np.int64])
@pytest.mark.parametrize(("first", "stop"), [(0, 13), (2, 11), (5, 5), (12, 13)])
def test_lists_are_appended_with_their_places(kind: type[np.integer], first: int, stop: int) -> None:
    """Offsets of a part of a column begin above 0. Nothing else is written."""
    values = np.array([i for ids in LISTS for i in ids])
    offsets = offsets_of(np.array([len(ids) for ids in LISTS]))[first : stop + 1]
    expected = [i for ids in LISTS[first:stop] for i in ids]
    out, starts = np.full(100, -1, kind), np.full(20, -1)
    end = kernels.append_lists(values, offsets, out, starts, 3, 7)
    assert end == 7 + len(expected)
    assert out.tolist() == [-1] * 7 + expected + [-1] * (93 - len(expected))
    begins = list(itertools.accumulate([7, *map(len, LISTS[first:stop])]))[:-1]
    assert starts.tolist() == [-1] * 3 + begins + [-1] * (17 - len(begins))


@pytest.mark.parametrize("kind", [np.uint8, np.uint16, np.uint32])
def test_places_follow_from_lengths(kind: type[np.integer]) -> None:
    """Lengths at the end of their type, whose sum it cannot hold."""
    most = int(np.iinfo(kind).max)
    lengths, starts = np.array([3, 0, most, most, 1], kind), np.full(9, -1)
    kernels.write_starts(lengths, starts, 2, 7)
    assert starts.tolist() == [-1, -1, 7, 10, 10, 10 + most, 10 + 2 * most, -1, -1]


def test_more_lists_are_copied_than_are_prefetched():
    random = np.random.default_rng(0)
    lists = [list(range(n)) for n in random.integers(0, 9, 100)]
    starts, ids = offsets_of(np.array([len(one) for one in lists])), np.array([i for one in lists for i in one])
    places = random.permutation(100)  # of each row
    out_starts = offsets_of(np.array([len(lists[row]) for row in np.argsort(places)]))
    out = np.full(len(ids), -1)
    kernels.scatter_ids(np.arange(100), places, np.full(100, 100), starts, ids, 0, 0, out_starts, out)
    assert out.tolist() == [i for row in np.argsort(places) for i in lists[row]]


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_lists_are_copied_to_their_slots(kind: type[np.integer]) -> None:
    """Two features of 13 rows. Some rows go to two batches of different sizes, the lists of others are kept out."""
    features = [LISTS, [[-i for i in ids] for ids in reversed(LISTS)]]
    starts = offsets_of(np.array([len(ids) for lists in features for ids in lists]))
    ids = np.array([i for lists in features for one in lists for i in one], kind)
    batches, slots, strides = [[10, 0, 7], [2, 12, 5, 4]], {}, {}
    lengths, expected, at = [], [], 0
    for rows in batches:
        for place, row in enumerate(rows):
            slots[row], strides[row] = at + place, len(rows)
        for lists in features:
            expected += [i for row in rows for i in lists[row]]
            lengths += [len(lists[row]) for row in rows]
        at += 2 * len(rows)
    rows_ = np.array(sorted(slots))
    places = np.array([slots[row] for row in rows_]), np.array([strides[row] for row in rows_])
    found = np.zeros(len(lengths), np.int32)
    kernels.scatter_lengths(rows_, *places, starts, np.arange(2), found)
    assert found.tolist() == lengths
    out, out_starts = np.full(len(expected), 10**6), offsets_of(found)
    for feature in range(2):
        kernels.scatter_ids(rows_, *places, starts, ids, 13 * feature, feature, out_starts, out)
    assert out.tolist() == expected

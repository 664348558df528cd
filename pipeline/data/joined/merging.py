"""Merges sorted rows of some parts of a feature source with those of others, in one pass."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.joined.index import TimedIndex
from pipeline.transforms.kernels.histories import EventOrder, Places, merge_events


class SortedRows(NamedTuple):
    """Rows in the order of key, time and part."""

    timed: TimedIndex
    parts: npt.NDArray[np.uint32]
    """uint32 [N], the number of the part that each row is from."""


def may_merge(rows: SortedRows, others: SortedRows) -> bool:
    """Tells whether all keys of both have a hash of their own. Only then do hashes give the order of keys."""
    keys, more = rows.timed.keys, others.timed.keys
    if keys.most > 1 or more.most > 1:
        return False
    if not len(keys.hashes):
        return True
    places = np.minimum(np.searchsorted(keys.hashes, more.hashes), len(keys.hashes) - 1)
    same = np.flatnonzero(keys.hashes[places] == more.hashes)
    ours, theirs = pa.array(places[same]), pa.array(same)
    pairs = zip(keys.keys, more.keys, strict=True)
    return all(pc.all(pc.equal(one.take(ours), other.take(theirs))).as_py() for one, other in pairs)


def merge(
    rows: SortedRows, numbers: Places, others: SortedRows, schema: pa.Schema, size: int
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of both in their common order.

    Args:
        numbers: int64 [parts], the number of each part of `rows` in the result; -1: its rows are left out. `others` has
            the numbers of the result.
        schema: Of the batches: hash, time and part, then keys and values.
        size: Number of rows of each side that a batch is made of at most.
    """
    at, ends = np.zeros(4, np.int64), [len(rows.parts), len(others.parts)]
    places, keys = np.empty(2 * size, np.int64), np.empty(2 * size, np.int64)
    sides = [EventOrder(one.timed.keys.hashes, *one.timed[1:3], one.parts) for one in (rows, others)]
    while at[0] < ends[0] or at[1] < ends[1]:
        begin = at.tolist()
        count = merge_events(sides[0], sides[1], numbers, size, at, places, keys)
        ours, theirs, our_keys, their_keys = (slice(begin[i], int(at[i]) + (i > 1)) for i in range(4))
        of_ours = _columns(rows, numbers[rows.parts[ours]], ours, our_keys)
        of_theirs = _columns(others, others.parts[theirs], theirs, their_keys)
        found = []
        for mine, other, place in zip(of_ours, of_theirs, (keys[:count], places[:count]), strict=True):
            taken = pa.array(np.where(place < 0, len(mine[0]) - 1 - place, place))
            found.append([pa.concat_arrays(both).take(taken) for both in zip(mine, other, strict=True)])
        (hashes, *columns), (times, parts, *values) = found
        yield pa.RecordBatch.from_arrays([hashes, times, parts, *columns, *values], schema=schema)


def _columns(side: SortedRows, parts: npt.NDArray[np.generic], rows: slice, keys: slice) -> list[list[pa.Array]]:
    """Returns what a span of keys has once, and what each row of a span has."""
    index = side.timed
    by_key = [pa.array(index.keys.hashes[keys]), *(one[keys] for one in index.keys.keys)]
    by_row = [pa.array(index.times[rows]), pa.array(parts.astype(np.uint32)), *(one[rows] for one in index.values)]
    return [by_key, by_row]

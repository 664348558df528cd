"""Finds rows of a feature source by key, and by key and time."""

from collections.abc import Sequence
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.errors import DataError
from pipeline.transforms.column import sparse_from_arrow
from pipeline.transforms.kernels.histories import Places, find_events
from pipeline.transforms.kernels.row_hashes import row_hashes


class KeyIndex:
    """Rows of a feature source, found by key.

    Args:
        where: The source as an error names it.
    Raises:
        DataError: If a key occurs twice.
    """

    def __init__(self, keys: Sequence[pa.Array], values: Sequence[pa.Array], where: str) -> None:
        there = present(keys)  # a row without a key matches no row
        if not pc.all(there).as_py():
            keys, values = [key.filter(there) for key in keys], [value.filter(there) for value in values]
        hashes = hash_keys(keys)
        self.order: Places | None = np.argsort(hashes, kind="stable")
        self.hashes, self.keys, self.values = hashes[self.order], list(keys), list(values)
        starts = np.flatnonzero(np.diff(self.hashes, prepend=~self.hashes[:1]) != 0) if len(hashes) else np.zeros(0)
        self.most = int(np.diff(starts, append=len(hashes)).max(initial=0))
        if self.most > 1:
            self._refuse_repeated(self.order, where)

    @classmethod
    def of_sorted(cls, hashes: npt.NDArray[np.uint64], keys: Sequence[pa.Array], most: int) -> Self:
        """Returns an index of distinct keys that are in the order of their hashes, without values.

        Args:
            most: At least the number of keys that share a hash.
        """
        index = cls.__new__(cls)
        index.order, index.hashes, index.keys, index.values, index.most = None, hashes, list(keys), [], most
        return index

    @property
    def nbytes(self) -> int:
        """Approximate memory in bytes."""
        order = [] if self.order is None else [self.order]
        return sum(int(array.nbytes) for array in [*self.keys, *self.values, *order, self.hashes])

    def find(self, keys: Sequence[pa.Array]) -> pa.Array:
        """Returns the position of each key's row, or null where there is none."""
        found, missing = np.zeros(len(keys[0]), np.int64), np.ones(len(keys[0]), bool)
        if len(self.hashes):
            first = np.searchsorted(self.hashes, hash_keys(keys))
            for step in range(self.most):  # one step, unless different keys have equal hashes
                at = np.minimum(first + step, len(self.hashes) - 1)
                at = at if self.order is None else self.order[at]
                same = np.ones(len(at), bool)
                for own, wanted in zip(self.keys, keys, strict=True):
                    equal = pc.fill_null(pc.equal(own.take(pa.array(at)), wanted), False)
                    same &= equal.to_numpy(zero_copy_only=False)
                found[same & missing] = at[same & missing]
                missing &= ~same
        return pa.array(found, mask=missing)

    def _refuse_repeated(self, order: Places, where: str) -> None:
        equal = self.hashes[1:] == self.hashes[:-1]
        rows = np.flatnonzero(np.append(equal, False) | np.insert(equal, 0, False))
        seen: set[tuple[object, ...]] = set()
        for place in order[rows]:
            key = tuple(column[int(place)].as_py() for column in self.keys)
            if key in seen:
                shown = ", ".join(f"{value}" for value in key)
                raise DataError(where, "each key once", f"key {shown} more than once", "Remove duplicate keys.")
            seen.add(key)


class TimedRows(NamedTuple):
    """Rows and what a source has for them. Each is int64 [N]."""

    numbers: Places
    """Number of the key; -1: the source does not have it, or the row has no time."""
    borders: Places
    """Time to which the row sees the source, in microseconds since 1970."""
    first: Places
    """First place of the key."""
    end: Places
    """Place after the last one that the row sees. Equal to `first`: it sees none."""


class TimedIndex(NamedTuple):
    """Rows of a feature source in the order of key and time, found by these."""

    keys: KeyIndex
    """Their keys, each once."""
    times: Places
    """int64 [N], microseconds since 1970 in UTC."""
    starts: Places
    """int64 [keys + 1], the place of each key's first row."""
    values: list[pa.Array]

    @property
    def nbytes(self) -> int:
        """Approximate size in bytes."""
        return self.keys.nbytes + int(self.times.nbytes + self.starts.nbytes) + sum(one.nbytes for one in self.values)

    def find(self, keys: Sequence[pa.Array], times: pa.Array, delay: int, until: bool) -> TimedRows:
        """Returns where each row's key begins, and the place after the last one before the row's time.

        Args:
            times: int64 [N], microseconds since 1970 in UTC.
            delay: Microseconds to go back from the times.
            until: Also counts rows of the source at exactly that time.
        """
        numbers = self.keys.find(keys)
        known = pc.and_(numbers.is_valid(), times.is_valid())
        own = pc.if_else(known, numbers, pa.scalar(-1, pa.int64())).to_numpy(zero_copy_only=False)
        borders = times.fill_null(0).to_numpy() - delay
        first = np.where(own < 0, 0, self.starts[own])
        rows = TimedRows(own, borders, first, first)
        return rows._replace(end=self.places(rows, 0, until))

    def places(self, rows: TimedRows, back: int, until: bool) -> Places:
        """Returns the place after the last event of each row's key before its border, int64 [N].

        Args:
            back: Microseconds to go back from the borders.
            until: As in `find`.
        """
        end = np.empty(len(rows.numbers), np.int64)
        find_events(self.times, self.starts, rows.numbers, rows.borders, back, until, end)
        return end


def cut_lists(values: Sequence[pa.Array], first: Places, end: Places) -> list[pa.Array]:
    """Returns the values from `first` to `end` of each row as lists, the last one first.

    Example:
        >>> cut_lists([pa.array([1, 2, 3])], np.array([0, 2]), np.array([2, 2]))[0].to_pylist()
        [[2, 1], []]
    """
    lengths = end - first
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    places = pa.array(np.repeat(end + offsets[:-1] - 1, lengths) - np.arange(offsets[-1]))
    return [pa.LargeListArray.from_arrays(pa.array(offsets), one.take(places)) for one in values]


def hash_keys(keys: Sequence[pa.Array]) -> npt.NDArray[np.uint64]:
    """Returns a hash of each row's key."""
    return row_hashes([sparse_from_arrow("key", key) for key in keys], 0)


def present(columns: Sequence[pa.Array]) -> pa.Array:
    """Tells of each row whether all of its columns have a value."""
    there = pc.is_valid(columns[0])
    for column in columns[1:]:
        there = pc.and_(there, pc.is_valid(column))
    return there

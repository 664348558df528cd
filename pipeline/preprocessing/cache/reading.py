"""Gives the finished columns of row groups: those that are kept, and the others made and then kept."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy.typing as npt
import pyarrow as pa

from pipeline.data.joined.reader import Reader
from pipeline.preprocessing.cache.columns import OTHERS, ColumnParts
from pipeline.preprocessing.cache.entries import RowColumn
from pipeline.preprocessing.cache.keys import LABEL, CacheKeys
from pipeline.preprocessing.cache.store import ColumnStore
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.transforms.plan.plan import Plan
from storage.reader import Fragment

ReadChunks = Callable[[Fragment, Reader], Iterator[pa.RecordBatch | pa.Table]]
"""Reads the selected rows of a fragment, without empty chunks."""
ReadOthers = Callable[[pa.RecordBatch | pa.Table, Sequence[str]], Mapping[str, npt.NDArray[Any]]]
"""Returns columns of some rows that are no features, by their names in OTHERS."""
READERS = 2
"""Sets of missing columns whose readers and memory are kept."""


class _Part(NamedTuple):
    """What makes some of the columns."""

    reader: Reader
    plan: Plan
    others: tuple[str, ...]
    parts: ColumnParts


class ColumnCache:
    """The cache as a worker uses it.

    Args:
        keys: Those of the dataset's columns.
        key_columns: Columns that decide which rows are selected.
        read_chunks: Reads with one reader or another.
        store: Where columns are kept.
    """

    def __init__(
        self, keys: CacheKeys, key_columns: Sequence[str], read_chunks: ReadChunks, store: ColumnStore
    ) -> None:
        self.keys, self.key_columns, self.read_chunks, self.store = keys, key_columns, read_chunks, store
        self._parts: dict[tuple[str, ...], _Part] = {}

    def columns(self, fragment: Fragment, others: ReadOthers, costs: Costs) -> dict[str, RowColumn]:
        """Returns all columns of the selected rows of a fragment, by name. They are valid until the next call.

        Args:
            others: Makes columns that are no features.
            costs: Gets the costs, and the counts of all ops, whether they ran or not.
        """
        began = time.perf_counter()
        rows, keys = self.keys.rows(fragment), self.keys.columns
        kept = {} if rows is None else self.store.load(rows, keys.values())
        found = {name: kept[key] for name, key in keys.items() if key in kept}
        if len({column.rows for column in found.values()}) > 1:
            found = {}
        costs.read_seconds += time.perf_counter() - began
        missing = tuple(name for name in keys if name not in found)
        costs.cache.update(hits=len(found), misses=len(missing))
        if missing:
            made = self._make(fragment, missing, others, costs)
            began = time.perf_counter()
            if rows is not None:
                self.store.save(rows, {keys[name]: column for name, column in made.items()})
            costs.read_seconds += time.perf_counter() - began
            found |= made
        counts: dict[str, int] = {}
        for column in found.values():  # two features may share an op, which counts once
            counts |= column.counts
        costs.counts.update(counts)
        costs.cache.update(self.store.take_stats())
        return found

    def _make(
        self, fragment: Fragment, names: tuple[str, ...], others: ReadOthers, costs: Costs
    ) -> dict[str, RowColumn]:
        part, counts = self._part(names), Counter[str]()
        part.parts.clear()
        with costs.reading(part.reader):
            began = time.perf_counter()
            for rows in self.read_chunks(fragment, part.reader):
                read = time.perf_counter()
                costs.read_seconds += read - began
                part.parts.add(part.plan.apply(rows, counts, costs.op_seconds), others(rows, part.others))
                began = time.perf_counter()
                costs.transform_seconds += began - read
            costs.read_seconds += time.perf_counter() - began
        began = time.perf_counter()
        made = part.parts.finish({name: _choose(counts, self.keys.counters[name]) for name in part.plan.features})
        costs.transform_seconds += time.perf_counter() - began
        return made

    def _part(self, names: tuple[str, ...]) -> _Part:
        """Returns what makes some columns, and reads no others."""
        if names not in self._parts:
            while len(self._parts) >= READERS:
                self._parts.pop(next(iter(self._parts)))
            whole, reader, chosen = self.keys.plan, self.keys.reader, set(names)
            plan = whole.model_copy(
                update={
                    "dense": tuple(name for name in whole.dense if name in chosen),
                    "sparse": tuple(feature for feature in whole.sparse if feature.name in chosen),
                }
            )
            others = tuple(name for name in OTHERS if name in chosen)
            read = {column for name in plan.features for column in plan.columns_of(name)}
            read |= {*(self.keys.sources[name] for name in others), *self.key_columns}
            columns = [name for name in reader.columns if name in read] or [self.keys.sources[LABEL]]
            self._parts[names] = _Part(reader.narrow(columns), plan, others, ColumnParts(plan, others))
        return self._parts[names]


def _choose(counts: Mapping[str, int], names: frozenset[str]) -> dict[str, int]:
    return {name: count for name, count in counts.items() if name in names}

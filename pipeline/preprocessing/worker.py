"""A worker transforms splits of the warehouse and makes batches of the rows. Repeating its work gives equal results."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.joined.reader import Reader, open_reader
from pipeline.errors import DataError
from pipeline.preprocessing.cache.columns import write_columns
from pipeline.preprocessing.cache.keys import LABEL, SESSION, WEIGHT, CacheKeys
from pipeline.preprocessing.cache.reading import ColumnCache
from pipeline.preprocessing.cache.store import COLUMNS, ColumnStore
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch import kernels
from pipeline.preprocessing.epoch.batches import (
    BatchWork,
    BlockSlice,
    FeatureIndices,
    Ids,
    iterate_chunks,
    write_batches,
)
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.epoch.memory import Arrays, PrivateWriter, Writer
from pipeline.preprocessing.epoch.splits import Split, permute_rows, permute_sessions
from pipeline.transforms.column import Column, concatenate, sparse_from_arrow
from pipeline.transforms.plan.dedup import DedupedFeatures, DedupPlan
from pipeline.transforms.plan.plan import TransformedRows
from pipeline.transforms.plan.schedule import single_array
from storage.errors import CorruptFileError
from storage.names import LEAST_WEIGHT, MOST_WEIGHT
from storage.pages.columns import load_loops
from storage.reader import Fragment
from storage.warehouse import Warehouse

Floats = npt.NDArray[np.float32]


class Worker:
    """Reads, transforms and batches the rows of one DataSpec."""

    def __init__(self, spec: DataSpec, warehouse: Warehouse | None = None) -> None:
        self.spec = spec
        warehouse = Warehouse(spec.warehouse, Path(spec.home)) if warehouse is None else warehouse
        self.reader = open_reader(warehouse, spec.snapshot, spec.columns, spec.selection.expression(), spec.joined)
        packed = any(feature.weighted for feature in spec.plan.sparse)
        rows = max((feature.rows for feature in spec.plan.sparse), default=0)
        self.deduplication = DedupPlan(spec.plan, spec.deduplicate) if spec.deduplicate else None
        self.id_type = "int32" if rows <= np.iinfo(np.int32).max and not packed else "int64"
        self.orders: dict[tuple[int, int, int, int], npt.NDArray[np.int64]] = {}

    @cached_property
    def cache(self) -> ColumnCache | None:
        """The kept columns. None: nothing is kept. Deduplicated features depend on their neighbours, so none are."""
        spec = self.spec
        if spec.cache_bytes is None or self.deduplication is not None:
            return None
        names = {LABEL: spec.label, WEIGHT: spec.weight, SESSION: spec.session}
        sources = {kind: name for kind, name in names.items() if name is not None}
        keys = CacheKeys(spec.plan, spec.selection, sources, self.reader)
        store = ColumnStore(Path(spec.home) / COLUMNS, spec.cache_bytes)
        return ColumnCache(keys, spec.selection.key_columns(), self._read_chunks, store)

    def warm_up(self) -> None:
        """Loads the compiled loops. Otherwise the first split would take longer than others."""
        load_loops()
        writer, none = PrivateWriter(), np.empty(0, np.int64)
        rows = self.reader.empty()
        transformed, runs = self._transform(rows, none, Costs())
        self._write_chunk(0, transformed, np.empty(0, np.float32), None, writer)
        self._write_sessions(0, none, runs, writer)
        chunk, lengths = writer.finish(), np.empty(0, np.int32)
        starts, dense = chunk["0.starts"], chunk["0.dense"]
        kernels.scatter_rows(none, none, dense, chunk["0.labels"], dense, chunk["0.labels"])
        kernels.scatter_lengths(none, none, none, starts, none, lengths)
        kernels.scatter_ids(none, none, none, starts, chunk["0.ids"], 0, 0, none, none)
        kernels.number_bags(none, none.reshape(0, 2))
        kernels.write_starts(np.empty(0, np.uint8), starts, 0, 0)

    def fragments(self) -> list[Fragment]:
        """Returns all fragments of the selection in table order."""
        return self.reader.fragments(self.spec.selection.days)

    def read_selected(self, fragment: Fragment) -> pa.Table:
        """Reads the selected rows of a fragment as they are stored."""
        return self.reader.read(fragment, self.spec.selection.choice(fragment))

    def sample(self, rows: int) -> list[Column]:
        """Returns the ids of each sparse feature in the first selected rows, in table order.

        Skips files that cannot be read. The training that follows fails at them or quarantines them.
        """
        parts: list[tuple[Column, ...]] = [self.spec.plan.apply(self.reader.empty()).sparse]
        for fragment in self.fragments():
            with contextlib.suppress(CorruptFileError):
                for chunk in self._read_chunks(fragment, self.reader):
                    transformed = self.spec.plan.apply(chunk.slice(0, rows))
                    parts.append(transformed.sparse)
                    rows -= len(transformed)
                    if rows <= 0:
                        break
            if rows <= 0:
                break
        return [concatenate(list(columns)) for columns in zip(*map(self.spec.plan.ids, parts), strict=True)]

    def transform_split(self, split: Split, writer: Writer) -> tuple[int, Costs]:
        """Transforms the selected rows of a split and returns their number and the costs.

        Reads, transforms and writes the rows in chunks that stay in the processor's cache. With a cache of columns, a
        chunk has the rows of a row group.

        Shapes:
            Chunk c of n rows has 'c.dense' float32 [n, D], 'c.labels' float32 [n], 'c.ids' int32 or int64 [V] (the
            lists of one feature after another) and 'c.starts' int64 [F * n + 1] (where each list begins). Features
            that are made once for each of U runs of rows are separate: 'c.shared_ids', 'c.shared_starts' int64
            [F * U + 1] and 'c.runs' int64 [n], the run of each row. With a session column there is 'c.sessions'
            int64 [n], with a weight column 'c.weights' float32 [n].
        Raises:
            DataError: If a label is neither 0 nor 1, or a weight is out of bounds.
        """
        if self.cache is not None:
            return self._transform_with_cache(self.cache, split, writer)
        costs, count, clock = Costs(), 0, _Clock()
        with costs.reading(self.reader):
            chunks = (part for fragment in split.fragments for part in self._read_chunks(fragment, self.reader))
            for chunk, rows in enumerate(chunks):
                costs.read_seconds += clock.lap()
                sessions = self.sessions(rows)
                transformed, runs = self._transform(rows, sessions, costs)
                labels, weights = self.labels(rows, f"{split}"), self.weights(rows, f"{split}")
                costs.transform_seconds += clock.lap()
                self._write_chunk(chunk, transformed, labels, weights, writer)
                self._write_sessions(chunk, sessions, runs, writer)
                count += len(labels)
                costs.batch_seconds += clock.lap()
            costs.read_seconds += clock.lap()
        return count, costs

    def _transform_with_cache(self, cache: ColumnCache, split: Split, writer: Writer) -> tuple[int, Costs]:
        """Does the same with a chunk for each row group. Makes only those columns that are not kept."""
        costs, count, chunk, clock = Costs(), 0, 0, _Clock()
        for fragment in split.fragments:
            columns = cache.columns(fragment, partial(self._others, f"{split}"), costs)
            clock.lap()
            if columns[LABEL].rows:
                count += len(write_columns(chunk, self.spec.plan, columns, self.id_type, writer))
                chunk += 1
            costs.batch_seconds += clock.lap()
        return count, costs

    def _others(self, where: str, rows: pa.RecordBatch | pa.Table, names: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        """Returns columns that are no features, by their names in the cache."""
        made: dict[str, Callable[[], npt.NDArray[Any] | None]] = {
            LABEL: lambda: self.labels(rows, where),
            WEIGHT: lambda: self.weights(rows, where),
            SESSION: lambda: self.sessions(rows),
        }
        return {name: values for name in names if (values := made[name]()) is not None}

    def _read_chunks(self, fragment: Fragment, reader: Reader) -> Iterator[pa.RecordBatch]:
        """Yields the selected rows of a fragment, without empty chunks."""
        for rows in reader.batches(fragment, self.spec.selection.choice(fragment)):
            if rows.num_rows:
                yield rows

    def _transform(
        self, rows: pa.RecordBatch | pa.Table, sessions: Ids | None, costs: Costs
    ) -> tuple[TransformedRows, DedupedFeatures | None]:
        """Returns the features of each row, and those that are made once for a run of rows."""
        if self.deduplication is None or sessions is None:
            return self.spec.plan.apply(rows, costs.counts, costs.op_seconds), None
        return self.deduplication.apply(rows, sessions, costs.counts, costs.op_seconds)

    def _write_chunk(
        self, chunk: int, rows: TransformedRows, labels: Floats, weights: Floats | None, writer: Writer
    ) -> None:
        out = writer.add(
            {f"{chunk}.dense": ("float32", rows.dense.shape), f"{chunk}.labels": ("float32", labels.shape)}
            | self._list_shapes(f"{chunk}.", rows.sparse, len(labels))
        )
        out[f"{chunk}.dense"][...], out[f"{chunk}.labels"][...] = rows.dense, labels
        if weights is not None:
            writer.add({f"{chunk}.weights": ("float32", weights.shape)})[f"{chunk}.weights"][...] = weights
        _append_lists(rows.sparse, out[f"{chunk}.starts"], out[f"{chunk}.ids"])

    def _write_sessions(self, chunk: int, sessions: Ids | None, runs: DedupedFeatures | None, writer: Writer) -> None:
        if sessions is not None:
            name = f"{chunk}.sessions"
            writer.add({name: ("int64", sessions.shape)})[name][...] = sessions
        if runs is not None:
            count = len(runs.columns[0])
            shapes = self._list_shapes(f"{chunk}.shared_", runs.columns, count)
            out = writer.add({f"{chunk}.runs": ("int64", runs.inverse.shape)} | shapes)
            out[f"{chunk}.runs"][...] = runs.inverse
            _append_lists(runs.columns, out[f"{chunk}.shared_starts"], out[f"{chunk}.shared_ids"])

    def _list_shapes(self, prefix: str, columns: Sequence[Column], rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        ids = sum(len(column.values) for column in columns)
        return {f"{prefix}starts": ("int64", (len(columns) * rows + 1,)), f"{prefix}ids": (self.id_type, (ids,))}

    def make_batches(self, work: BatchWork, splits: Sequence[Arrays], writer: Writer) -> Costs:
        """Makes each rank's share of some global batches and returns the costs.

        TorchRec's row-wise sharding needs equally many rows on every rank. A rank with one row less is padded with a
        row of weight 0 and no ids.

        Shapes:
            shares: int64 [batches, ranks, 4], first row, number of rows, first id and number of ids of each share.
            All shares together have dense: float32 [R, D], labels, weights: float32 [R], values: int64 [V] and
            lengths: int32 [R * F]. The F * B lengths of a share of B rows begin at F times its first row, feature by
            feature. With a weight column, totals: float64 [batches], the sum of the weights of each global batch.
            With shared features, inverse: int64 [R], the bag of each row among the bags of its share. These bags come
            first and the remaining ones are empty.
        """
        clock = _Clock()
        plan, shared = self.spec.plan, self.spec.shared
        own = [number for number in range(len(plan.sparse)) if number not in shared]
        features = FeatureIndices(np.array(own, np.int64), np.array(shared, np.int64))
        write_batches(work, splits, lambda w: self.order(work, w, splits), features, len(plan.dense), writer)
        return Costs(batch_seconds=clock.lap())

    def order(self, work: BatchWork, block: BlockSlice, splits: Sequence[Arrays]) -> npt.NDArray[np.int64]:
        """Returns the order of the rows of a block. Keeps the orders of the last two blocks."""
        rows = sum(len(chunk["labels"]) for i in block.splits for chunk in iterate_chunks(splits[i]))
        if not work.shuffled:
            return np.arange(rows)
        key = (work.seed, work.epoch, block.number, rows)
        if key not in self.orders:
            while len(self.orders) > 1:
                self.orders.pop(next(iter(self.orders)))
            chunks = [chunk for i in block.splits for chunk in iterate_chunks(splits[i])]
            if chunks and "sessions" in chunks[0]:
                sessions = np.concatenate([chunk["sessions"] for chunk in chunks])
                self.orders[key] = permute_sessions(*key[:3], sessions)
            else:
                self.orders[key] = permute_rows(*key)
        return self.orders[key]

    def sessions(self, rows: pa.RecordBatch | pa.Table) -> Ids | None:
        """Returns the session of each row, int64 [N], or None without a session column.

        A row without a session is a session of its own.

        Raises:
            DataError: If the column holds neither integers nor text.
        """
        name = self.spec.session
        if name is None:
            return None
        column = sparse_from_arrow(name, single_array(rows.column(name)))
        assert column.offsets is not None
        sessions = -1 - np.arange(len(column))
        sessions[np.diff(column.offsets) > 0] = column.values
        return sessions

    def labels(self, rows: pa.RecordBatch | pa.Table, where: str) -> Floats:
        """Returns the labels of rows, 0 or 1, float32 [N].

        Args:
            where: Names the rows in an error.
        Raises:
            DataError: If a label is neither 0 nor 1.
        """
        labels: Floats = rows.column(self.spec.label).cast(pa.float32()).to_numpy(zero_copy_only=False)
        bad = labels[(labels != 0.0) & (labels != 1.0)]
        if len(bad):
            actual = "null" if np.isnan(bad[0]) else f"{bad[0]:g}"
            own = "Correct the source and ingest the day with force=true."
            remedy = self._remedy_for(own, f"{self.spec.label} in (0, 1)")
            raise DataError(f"label '{self.spec.label}' in {where}", "0 or 1", actual, remedy)
        return labels

    def weights(self, rows: pa.RecordBatch | pa.Table, where: str) -> Floats | None:
        """Returns the weights of rows, float32 [N], or None without a weight column.

        Args:
            where: Names the rows in an error.
        Raises:
            DataError: If a weight is not a number within the bounds.
        """
        if self.spec.weight is None:
            return None
        column = rows.column(self.spec.weight).cast(pa.float64(), safe=False)
        weights: npt.NDArray[np.float64] = column.to_numpy(zero_copy_only=False)
        bad = weights[~((weights >= LEAST_WEIGHT) & (weights <= MOST_WEIGHT))]
        if len(bad):
            actual = "null or NaN" if np.isnan(bad[0]) else f"{bad[0]:g}"
            raise DataError(
                f"weight '{self.spec.weight}' in {where}", f"a number from {LEAST_WEIGHT:g} to {MOST_WEIGHT:,.0f}",
                actual, self._remedy_for(
                    "Scale the weights and ingest the day with force=true.",
                    f"{self.spec.weight} >= {LEAST_WEIGHT:g} and {self.spec.weight} <= {MOST_WEIGHT:.0f}",
                ),
            )  # fmt: skip
        return weights.astype(np.float32)

    def _remedy_for(self, own: str, fitting: str) -> str:
        """Returns the remedy for bad rows of a table of ours, or for those of another engine's."""
        foreign = self.spec.warehouse.tables.get(self.spec.snapshot.table)
        if foreign is None:
            return own
        return f"Leave such rows out with filter=\"{fitting}\", or correct them in '{foreign.table}' with its engine."


class _Clock:
    """Measures the seconds between calls."""

    def __init__(self) -> None:
        self.last = time.perf_counter()

    def lap(self) -> float:
        """Returns the seconds since the last call."""
        before, self.last = self.last, time.perf_counter()
        return self.last - before


def _append_lists(columns: Sequence[Column], starts: npt.NDArray[Any], ids: npt.NDArray[Any]) -> None:
    """Writes the lists of one feature after another."""
    at = 0
    for f, column in enumerate(columns):
        assert column.offsets is not None
        at = kernels.append_lists(column.values, column.offsets, ids, starts, f * len(column), at)
    starts[-1] = at

"""Several ways to do the same work on one thread: cut 26 lists to 20 ids and hash them, and prepare 13 numbers.

A contestant turns a table into units of work, which are the timed calls. It opens files and plans before that.
Decoders stop at Arrow columns. Workers end in the same arrays, those of `Whole`. Only the hashes differ: Polars and
DuckDB use their own, which cost no more. `ours_batched` also shuffles the rows of each block and cuts them into
batches, which no other contestant does.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import duckdb
import numpy as np
import numpy.typing as npt
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.wide_table import LABEL, LIMIT, LIST_COLUMNS, MEAN, NUMBER_COLUMNS, READ, SIZE, STD, WideTable
from pipeline.preprocessing.epoch.batches import BatchWork, BlockSlice
from pipeline.preprocessing.epoch.memory import Arrays, Segment, Slabs
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.worker import Worker
from storage.reader import Fragment

WINDOW_SPLITS = 4
"""Row groups that are shuffled together: 262,144 rows."""
BATCH_ROWS, GROUP_BATCHES = 4_096, 8
"""Rows of a batch, and batches made at a time."""

Ints = npt.NDArray[np.int64]
Lists = list[tuple[npt.NDArray[Any], npt.NDArray[Any]]]
"""Ids [V] and offsets [N + 1] of each list column, in order."""


class Whole(NamedTuple):
    """Rows ready for batching, column by column.

    Shapes:
        dense: float32 [N, 13]. labels: float32 [N].
    """

    dense: npt.NDArray[np.float32]
    labels: npt.NDArray[np.float32]
    lists: Lists


@dataclass(frozen=True, eq=False)
class Made:
    """The result of a unit of work: numbers of rows and of kept ids."""

    rows: int
    ids: int = 0
    whole: Callable[[], Whole] | None = None
    """Returns the rows, whatever the contestant's layout. Only tests call it. None if the rows are not kept."""


Unit = Callable[[], Made]


def decode_default(table: WideTable) -> list[Unit]:
    """Reads row groups with pyarrow's defaults."""
    return [partial(_decode, file, i) for file, i in _row_groups(table)]


def decode_memory_map(table: WideTable) -> list[Unit]:
    """Reads row groups from memory-mapped files."""
    return [partial(_decode, file, i) for file, i in _row_groups(table, memory_map=True)]


def decode_batches(table: WideTable) -> list[Unit]:
    """Reads batches of 4,096 rows from memory-mapped files and drops each one at the next."""
    return [partial(_decode_batches, file, i) for file, i in _row_groups(table, memory_map=True)]


def _row_groups(table: WideTable, **options: Any) -> list[tuple[pq.ParquetFile, int]]:
    files = [pq.ParquetFile(path, **options) for path in table.files]
    return [(file, i) for file in files for i in range(file.metadata.num_row_groups)]


def _decode(file: pq.ParquetFile, row_group: int) -> Made:
    return Made(file.read_row_group(row_group, columns=list(READ), use_threads=False).num_rows)


def _decode_batches(file: pq.ParquetFile, row_group: int) -> Made:
    batches = file.iter_batches(4096, row_groups=[row_group], columns=list(READ), use_threads=False)
    return Made(sum(batch.num_rows for batch in batches))


def ours(table: WideTable) -> list[Unit]:
    """Our worker up to the rows of a split in shared memory. As in the product, the memory is reused."""
    worker, slabs = Worker(table.spec, table.warehouse), Slabs()
    return [partial(_ours, worker, slabs, Split(fragments=(fragment,))) for fragment in worker.fragments()]


def _ours(worker: Worker, slabs: Slabs, split: Split) -> Made:
    segment, rows = _rows(worker, slabs, split)
    arrays = segment.arrays()
    segment.close()
    ids = sum(len(array) for name, array in arrays.items() if name.endswith(".ids"))
    return Made(rows, ids, partial(_by_column, arrays, len(worker.spec.plan.sparse)))


def _rows(worker: Worker, slabs: Slabs, split: Split) -> tuple[Segment, int]:
    writer = slabs.writer()
    rows, _ = worker.transform_split(split, writer)
    return writer.finish(), rows


def _by_column(arrays: Arrays, features: int) -> Whole:
    """Joins the chunks of each feature's lists."""
    chunks = range(sum(name.endswith(".labels") for name in arrays))
    dense = np.concatenate([arrays[f"{chunk}.dense"] for chunk in chunks])
    labels = np.concatenate([arrays[f"{chunk}.labels"] for chunk in chunks])
    lists: Lists = []
    for feature in range(features):
        pieces, lengths = [], [np.zeros(1, np.int64)]
        for chunk in chunks:
            rows, starts = len(arrays[f"{chunk}.labels"]), arrays[f"{chunk}.starts"]
            mine = starts[feature * rows : (feature + 1) * rows + 1]
            pieces.append(arrays[f"{chunk}.ids"][mine[0] : mine[-1]])
            lengths.append(np.diff(mine))
        lists.append((np.concatenate(pieces), np.cumsum(np.concatenate(lengths))))
    return Whole(dense, labels, lists)


def ours_batched(table: WideTable) -> list[Unit]:
    """All the work of our worker: the rows of a shuffle block's splits, then its shuffled batches."""
    worker, slabs = Worker(table.spec, table.warehouse), (Slabs(), Slabs())
    fragments = worker.fragments()
    windows = [fragments[i : i + WINDOW_SPLITS] for i in range(0, len(fragments), WINDOW_SPLITS)]
    return [partial(_ours_batched, worker, slabs, window) for window in windows]


def _ours_batched(worker: Worker, slabs: tuple[Slabs, Slabs], window: Sequence[Fragment]) -> Made:
    rows = ids = 0
    for arrays in shuffled_batches(worker, slabs, window):
        rows, ids = rows + len(arrays["labels"]), ids + len(arrays["values"])
        del arrays  # passed on before the next ones are made
    return Made(rows, ids)


def shuffled_batches(worker: Worker, slabs: tuple[Slabs, Slabs], window: Sequence[Fragment]) -> Iterator[Arrays]:
    """Yields the global batches of a shuffle block, as many at a time as the preprocessing service requests.

    Args:
        slabs: Memory for rows and for batches.
    """
    splits = [_rows(worker, slabs[0], Split(fragments=(fragment,))) for fragment in window]
    worker.orders.clear()  # every block gets its own order
    total, numbers = sum(rows for _, rows in splits), tuple(range(len(splits)))
    cuts = [
        BlockSlice(number=0, splits=numbers, start=start, stop=min(start + BATCH_ROWS, total))
        for start in range(0, total, BATCH_ROWS)
    ]
    for first in range(0, len(cuts), GROUP_BATCHES):
        batches = tuple((cut,) for cut in cuts[first : first + GROUP_BATCHES])
        work = BatchWork(seed=1, epoch=0, shuffled=True, world_size=1, ranks=(0,), batches=batches)
        writer = slabs[1].writer()
        worker.make_batches(work, slabs[0].read([segment for segment, _ in splits]), writer)
        made = writer.finish()
        arrays = made.arrays()
        made.close()
        yield arrays
        del arrays
    for segment, _ in splits:
        segment.close()


def numpy(table: WideTable) -> list[Unit]:
    """NumPy on Arrow's buffers. Hashes in blocks that fit the processor's cache."""
    return [partial(_numpy, file, i) for file, i in _row_groups(table, memory_map=True)]


def _numpy(file: pq.ParquetFile, row_group: int) -> Made:
    rows = file.read_row_group(row_group, columns=list(READ), use_threads=False)
    dense = np.empty((len(rows), len(NUMBER_COLUMNS)), np.float32)
    for i, name in enumerate(NUMBER_COLUMNS):
        values = rows.column(name).to_numpy()  # null as NaN
        dense[:, i] = np.nan_to_num((np.log1p(np.maximum(values, 0.0)) - MEAN) / STD, copy=False, nan=0.0)
    cut = [_first_ids(rows.column(name).combine_chunks()) for name in LIST_COLUMNS]
    lists = [(_hashed(ids), offsets) for ids, offsets in cut]
    labels = rows.column(LABEL).to_numpy().astype(np.float32)
    return Made(len(rows), _count(lists), lambda: Whole(dense, labels, lists))


def _count(lists: Lists) -> int:
    return sum(int(offsets[-1] - offsets[0]) for _, offsets in lists)


def _first_ids(lists: pa.ListArray) -> tuple[Ints, Ints]:
    """Returns ids and offsets of the cut lists. Null lists are empty here, as Parquet's reader makes them."""
    starts = lists.offsets.to_numpy()
    lengths = np.minimum(np.diff(starts), LIMIT)
    offsets = np.zeros(len(starts), np.int64)
    np.cumsum(lengths, out=offsets[1:])
    places = np.arange(offsets[-1]) + np.repeat(starts[:-1] - offsets[:-1], lengths)
    return lists.values.to_numpy().take(places), offsets


def _hashed(ids: Ints, block: int = 1 << 14) -> Ints:
    out = np.empty(len(ids), np.int64)
    for start in range(0, len(ids), block):
        out[start : start + block] = _sigrid(ids[start : start + block])
    return out


def _sigrid(ids: Ints) -> Ints:
    """SigridHash with salt 0, vectorised with as few passes over the block as NumPy allows."""
    key, old = ids.view(np.uint64).copy(), np.empty(len(ids), np.uint64)

    def shifted(operation: Any, shift: Any, bits: int) -> None:
        shift(key, np.uint64(bits), out=old)
        operation(key, old, out=key)

    np.left_shift(key, np.uint64(21), out=old)
    np.invert(key, out=key)
    np.add(key, old, out=key)
    shifted(np.bitwise_xor, np.right_shift, 24)
    np.multiply(key, np.uint64(265), out=key)  # key + (key << 3) + (key << 8)
    shifted(np.bitwise_xor, np.right_shift, 14)
    np.multiply(key, np.uint64(21), out=key)  # key + (key << 2) + (key << 4)
    shifted(np.bitwise_xor, np.right_shift, 28)
    shifted(np.add, np.left_shift, 31)
    for _ in range(2):  # with salt 0 both halves of CityHash's step are the same
        np.multiply(key, np.uint64(0x9DDFEA08EB382D69), out=key)
        shifted(np.bitwise_xor, np.right_shift, 47)
    np.multiply(key, np.uint64(0x9DDFEA08EB382D69), out=key)
    return np.remainder(key.view(np.int64), SIZE)


def polars(table: WideTable) -> list[Unit]:
    """Lazy Polars, row group by row group, with its own hash."""
    units: list[Unit] = []
    for path in table.files:
        metadata, start = pq.read_metadata(path), 0
        for i in range(metadata.num_row_groups):
            units.append(partial(_polars, path, start, metadata.row_group(i).num_rows))
            start += metadata.row_group(i).num_rows
    return units


def _polars(path: str, start: int, count: int) -> Made:
    lists = [
        pl.col(name).list.head(LIMIT).list.eval((pl.element().hash() % SIZE).cast(pl.Int64)) for name in LIST_COLUMNS
    ]
    numbers = [
        ((pl.col(name).clip(0.0).log1p() - MEAN) / STD).fill_null(0.0).cast(pl.Float32) for name in NUMBER_COLUMNS
    ]
    scan = pl.scan_parquet(path, glob=False, hive_partitioning=False).slice(start, count)
    frame = scan.select(*lists, *numbers, pl.col(LABEL).cast(pl.Float32)).collect()
    arrays = [frame[name].to_arrow() for name in LIST_COLUMNS]
    made = [(array.values.to_numpy(), array.offsets.to_numpy()) for array in arrays]
    dense, labels = frame.select(NUMBER_COLUMNS).to_numpy(), frame[LABEL].to_numpy()
    return Made(len(labels), _count(made), lambda: Whole(dense, labels, made))


def duck(table: WideTable) -> list[Unit]:
    """DuckDB with its own hash, one file at a time, because it has no smaller unit."""
    connection = duckdb.connect(config={"threads": 1})
    return [partial(_duck, connection, path) for path in table.files]


def _duck(connection: duckdb.DuckDBPyConnection, path: str) -> Made:
    lists = [
        f"list_transform(list_slice({name}, 1, {LIMIT}), lambda id: (hash(id) % {SIZE})::BIGINT) AS {name}"
        for name in LIST_COLUMNS
    ]
    numbers = [
        f"coalesce((ln(CASE WHEN {name} < 0.0 THEN 1.0 ELSE 1.0 + {name} END) - {MEAN}) / {STD}, 0.0)::FLOAT AS {name}"
        for name in NUMBER_COLUMNS
    ]
    query = f"SELECT {', '.join([*lists, *numbers])}, {LABEL}::FLOAT AS {LABEL} FROM read_parquet(?)"
    rows = connection.sql(query, params=[path]).to_arrow_table()
    arrays = [rows.column(name).combine_chunks() for name in LIST_COLUMNS]
    made = [(array.values.to_numpy(), array.offsets.to_numpy()) for array in arrays]
    dense = np.stack([rows.column(name).to_numpy() for name in NUMBER_COLUMNS], axis=1)
    labels = rows.column(LABEL).to_numpy()
    return Made(len(labels), _count(made), lambda: Whole(dense, labels, made))


CONTESTANTS: dict[str, Callable[[WideTable], list[Unit]]] = {
    "decode_default": decode_default,
    "decode_memory_map": decode_memory_map,
    "decode_batches": decode_batches,
    "ours": ours,
    "ours_batched": ours_batched,
    "numpy": numpy,
    "polars": polars,
    "duckdb": duck,
}

"""What each step of storing and reading features gains, measured on a sample of a table's rows.

Source:
    Zhao et al. 2022, arXiv:2108.09373, table 12: from maps of features, read whole, to columns in popular order.
"""

import datetime
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel
from pyiceberg.io import FileIO

from pipeline.data.present import newest_day
from storage.keys import SCORES
from storage.layout.reads import read_percentiles
from storage.layout.spec import Layout
from storage.pages.footer import read_footer
from storage.pages.ranges import Range, RangeFile, find_chunks, merge_ranges
from storage.reader import READ_OPTIONS, READ_ROWS, SnapshotReader, SnapshotRef
from storage.snapshot.maps import MapEntries, find_keys, map_fields
from storage.snapshot.parquet import local_path
from storage.warehouse import Warehouse
from storage.writer import write_parquet

ROUNDS = 5
SMALL_GROUPS = 8
"""Row groups of the sample before the last step, which has one."""
SAMPLE_ROWS, SAMPLE_BYTES = 32_768, 256_000_000
"""Most rows of a sample, and about its most bytes in memory."""
DISK_SECONDS, DISK_BYTES = 0.008, 150e6
"""A hard disk, as those of the paper: seconds until a read starts, then bytes per second."""

Transform = Callable[[pa.RecordBatch, bool], object]
"""Transforms rows: each op alone, or as a worker does."""


class LadderStep(NamedTuple):
    """A step of the ladder. Each differs from the one before in one thing."""

    adds: str
    published: tuple[float, float]
    """Throughput of a worker and of the storage in the paper, relative to the first step."""
    maps: bool = False
    """Whether the features are entries of maps in the files, or columns."""
    by_row: bool = False
    """Whether the features of a row stand together in memory, or the values of a feature."""
    fused: bool = True
    coalesced: bool = True
    popular: bool = True
    groups: int = SMALL_GROUPS


STEPS = (
    LadderStep("maps of features", (1.0, 1.0), True, True, False, False, False),
    LadderStep("a column for each feature", (2.0, 0.03), False, True, False, False, False),
    LadderStep("columns in memory", (2.3, 0.03), False, False, False, False, False),
    LadderStep("local optimisations", (2.94, 0.03), False, False, True, False, False),
    LadderStep("coalesced reads", (2.94, 0.99), False, False, True, True, False),
    LadderStep("popular columns first", (2.94, 1.84), False, False, True, True, True),
    LadderStep("large row groups", (2.94, 2.41), False, False, True, True, True, 1),
)


class StepStats(BaseModel, frozen=True):
    """What reading the wanted features costs at a step. Footers are read once before, and do not count."""

    adds: str
    bytes_stored: int
    bytes_read: int
    reads: int
    read_percentiles: dict[str, int]
    """As in `ReadRecord`."""
    request_milliseconds: dict[str, float]
    """`50` and `99` -> percentile of the time of a read."""
    fetch_seconds: float
    """All reads of the sample, one after the other."""
    worker_seconds: float
    """Decoding and transforming the sample on one thread, from memory."""
    worker: float
    """Rows per second of a worker, relative to the first step."""
    storage: float
    """Rows per second of the storage at one read at a time, relative to the first step."""
    disk: float
    """The same of the model of a disk."""
    worker_rows_per_second: float
    storage_rows_per_second: float
    published: tuple[float, float]
    """`worker` and `storage` in the paper."""


def take_sample(warehouse: Warehouse, reference: SnapshotRef, wanted: Sequence[str]) -> pa.Table:
    """Reads the first rows of the newest day: the wanted columns and all others, and all keys of maps of features."""
    schema, names = warehouse.table(reference.table).schema(), warehouse.schema(reference).names
    days = warehouse.day_rows(reference)
    day = newest_day(days) or max(days)
    maps = [name for name in map_fields(schema) if name in names]
    usable = [name for name in maps if find_keys(schema, [f"{name}_0"])]
    held = _read_first_rows(warehouse.reader(reference, usable), day)
    keys = {name: np.unique(MapEntries(pa.concat_arrays(held[name].chunks)).keys()).tolist() for name in usable}
    columns = [f"{name}_{key}" for name, found in keys.items() for key in found]
    columns += list(find_keys(schema, [name + SCORES for name in columns]))
    flat = [name for name in names if name not in maps]
    return _read_first_rows(warehouse.reader(reference, list(dict.fromkeys([*flat, *columns, *wanted]))), day)


def _read_first_rows(reader: SnapshotReader, day: datetime.date) -> pa.Table:
    parts = [reader.empty()]
    batches = (batch for fragment in reader.fragments([day]) for batch in reader.batches(fragment))
    for batch in batches if reader.columns else ():
        parts.append(pa.Table.from_batches([batch]))
        rows, size = sum(part.num_rows for part in parts), sum(part.nbytes for part in parts)
        if rows >= SAMPLE_ROWS or size >= SAMPLE_BYTES:
            fitting = max(min(SAMPLE_ROWS, rows * SAMPLE_BYTES // max(size, 1)), 1)
            return pa.concat_tables(parts).slice(0, fitting).combine_chunks()
    return pa.concat_tables(parts).combine_chunks()


def measure_ladder(
    sample: pa.Table,
    wanted: Sequence[str],
    popular: Sequence[str],
    layout: Layout,
    store: tuple[FileIO, str],
    transform: Transform,
    report: Callable[[int, int], object] = lambda done, total: None,
) -> list[StepStats]:
    """Writes a sample in the layout of each step, reads it back and removes it.

    Args:
        sample: A column for each feature.
        wanted: The columns that are read.
        popular: The columns that any run read, those of most runs first.
        layout: Codecs and sizes of the files. Its order of columns and its row groups do not count.
        store: Where to write: a folder that does not exist yet.
        transform: See `Transform`.
        report: Called with finished reads of a step, and how many there will be.
    """
    io, folder = store
    written: dict[tuple[bool, bool, int], str] = {}
    runs: list[_StepRun] = []
    try:
        for step in STEPS:
            kind = (step.maps, step.popular, step.groups)
            if kind not in written:
                written[kind] = f"{folder}/{len(written)}.parquet"
                changes = {"first": tuple(popular) if step.popular else (), "order_by": ()}
                rows = -(-sample.num_rows // step.groups)
                own = layout.model_copy(update={**changes, "row_group_rows": max(rows, 1)})
                _write(io, written[kind], as_maps(sample) if step.maps else sample, own)
            gap_bytes = layout.gap_bytes if step.coalesced else 0
            runs.append(_StepRun(step, io, written[kind], sample.schema, wanted, gap_bytes))
        total = (ROUNDS + 1) * len(runs)
        for done in range(total):  # in turn: whatever else this machine does meets all steps
            report(done, total)
            run, before = runs[done % len(runs)], runs[done % len(runs) - 1]
            if done % len(runs) == 0 or (run.path, run.ranges) != (before.path, before.ranges):
                fetched = run.fetch()
            run.work(fetched, transform, first=done < len(runs))
        report(total, total)
        return [run.stats(runs[0]) for run in runs]
    finally:
        for run in runs:
            run.file.close()
        for path in written.values():
            with suppress(OSError):  # it may not have been written, and an error of before counts more
                io.delete(path)
        local = local_path(folder)
        if local is not None:
            shutil.rmtree(local, ignore_errors=True)


def as_maps(rows: pa.Table) -> pa.Table:
    """Puts all columns into maps, one for each type of values. The key is the position of the column.

    Example:
        >>> as_maps(pa.table({"a": [1, None], "b": [2, 3]})).to_pylist()
        [{'map_0': [(0, 1), (1, 2)]}, {'map_0': [(1, 3)]}]
    """
    return pa.table({f"map_{i}": _pack(rows, places) for i, places in enumerate(_places_by_type(rows.schema))})


def _places_by_type(schema: pa.Schema) -> list[list[int]]:
    """Returns the positions of the columns of each type."""
    places: dict[pa.DataType, list[int]] = {}
    for i, field in enumerate(schema):
        places.setdefault(field.type, []).append(i)
    return list(places.values())


def _pack(rows: pa.Table, places: Sequence[int]) -> pa.MapArray:
    arrays = [pa.concat_arrays(rows.column(i).chunks) for i in places]
    present = np.stack([array.is_valid().to_numpy(zero_copy_only=False) for array in arrays])
    offsets = np.concatenate([[0], np.cumsum(present.sum(axis=0))]).astype(np.int32)
    row, which = np.nonzero(present.T)
    items = pa.concat_arrays(arrays).take(pa.array(which * rows.num_rows + row))
    return pa.MapArray.from_arrays(pa.array(offsets), pa.array(np.asarray(places, np.int32)[which]), items)


def _unpack(maps: Iterable[pa.MapArray], schema: pa.Schema, wanted: Sequence[str]) -> pa.RecordBatch:
    """Returns columns of rows whose features stand in maps, as `as_maps` makes them of `schema`."""
    columns: dict[str, pa.Array] = {}
    names = frozenset(wanted)
    for entries, places in zip(map(MapEntries, maps), _places_by_type(schema), strict=True):
        chosen = {schema.names[i]: i for i in places if schema.names[i] in names}
        columns |= {name: entries.column(i, False) for name, i in chosen.items()}
    return pa.RecordBatch.from_arrays([columns[name] for name in wanted], list(wanted))


def _write(io: FileIO, path: str, rows: pa.Table, layout: Layout) -> None:
    with io.new_output(path).create(overwrite=True) as stream:
        write_parquet(stream, rows.select(layout.in_order(rows.column_names)), layout)


class _Fetched(NamedTuple):
    """The bytes of ranges, and the seconds of each read."""

    parts: dict[Range, bytes]
    seconds: list[float]


class _StepRun:
    """Reads the file of a step again and again."""

    def __init__(
        self, step: LadderStep, io: FileIO, path: str, schema: pa.Schema, wanted: Sequence[str], gap_bytes: int
    ) -> None:
        self.step, self.path, self.schema, self.wanted = step, path, schema, wanted
        self.file: Any = io.new_input(path).open()
        self.metadata = read_footer(self.file, checked=True)
        self.groups = [self.metadata.row_group(i) for i in range(self.metadata.num_row_groups)]
        names = set(wanted)
        self.columns = [name for name in self.metadata.schema.to_arrow_schema().names if step.maps or name in names]
        self.ranges = [merge_ranges(list(find_chunks(one, set(self.columns))), gap_bytes) for one in self.groups]
        self.requests: list[float] = []
        """Seconds of each read."""
        self.fetches: list[float] = []
        self.works: list[float] = []

    def fetch(self) -> _Fetched:
        """Reads all ranges, one after the other."""
        found = _Fetched({}, [])
        for part in (part for ranges in self.ranges for part in ranges):
            began = time.perf_counter()
            found.parts[part] = self.file.read_at(part.end - part.begin, part.begin)
            found.seconds.append(time.perf_counter() - began)
        return found

    def work(self, fetched: _Fetched, transform: Transform, first: bool) -> None:
        """Decodes and transforms what was fetched. The first time, which compiles and connects, does not count."""
        began = time.perf_counter()
        for group, ranges in enumerate(self.ranges):
            for rows in self._decode({part: fetched.parts[part] for part in ranges}, group):
                transform(self._in_memory(rows), self.step.fused)
        if not first:
            self.works.append(time.perf_counter() - began)
            self.fetches.append(sum(fetched.seconds))
            self.requests += fetched.seconds

    def stats(self, first: "_StepRun") -> StepStats:
        """Returns the figures, relative to those of the first step. Seconds are medians of the rounds that count."""
        sizes, rows = self.sizes, self.metadata.num_rows
        chunks = (one.column(i) for one in self.groups for i in range(one.num_columns))
        times = np.percentile(1e3 * np.array(self.requests), (50, 99))
        fetch, work = median(self.fetches), median(self.works)
        return StepStats(
            adds=self.step.adds,
            bytes_stored=sum(chunk.total_compressed_size for chunk in chunks),
            bytes_read=sum(sizes),
            reads=len(sizes),
            read_percentiles=read_percentiles(Counter(f"{1 << size.bit_length()}" for size in sizes)),
            request_milliseconds={"50": round(float(times[0]), 3), "99": round(float(times[1]), 3)},
            fetch_seconds=fetch,
            worker_seconds=work,
            worker=median(first.works) / work,
            storage=median(first.fetches) / fetch,
            disk=first.disk_seconds / self.disk_seconds,
            worker_rows_per_second=rows / work,
            storage_rows_per_second=rows / fetch,
            published=self.step.published,
        )

    @property
    def sizes(self) -> list[int]:
        """Bytes of each read."""
        return [part.end - part.begin for ranges in self.ranges for part in ranges]

    @property
    def disk_seconds(self) -> float:
        """By the model of a disk."""
        return len(self.sizes) * DISK_SECONDS + sum(self.sizes) / DISK_BYTES

    def _decode(self, parts: dict[Range, bytes], group: int) -> Iterator[pa.RecordBatch]:
        source = RangeFile(pa.BufferReader(b""), list(parts))  # nothing else is read: an error otherwise
        source.parts, source.length = parts, max(part.end for part in parts)
        stream = pa.PythonFile(source, "r")
        file = pq.ParquetFile(stream, metadata=self.metadata, pre_buffer=False, **READ_OPTIONS)
        yield from file.iter_batches(READ_ROWS, [group], self.columns, use_threads=False)

    def _in_memory(self, rows: pa.RecordBatch) -> pa.RecordBatch:
        """Returns decoded rows as columns, by way of maps if the step keeps the features of a row together."""
        if self.step.maps:
            return _unpack(rows.columns, self.schema, self.wanted)
        if not self.step.by_row:
            return rows
        table = pa.Table.from_batches([rows])
        return _unpack([_pack(table, places) for places in _places_by_type(table.schema)], table.schema, self.wanted)

"""Proposes a layout for a table from recorded reads, measured on a sample of its rows."""

import time
from collections import Counter
from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel

from storage.layout.reads import ReadRecord
from storage.layout.spec import Layout
from storage.pages.ranges import find_chunks, merge_ranges
from storage.reader import READ_OPTIONS, READ_ROWS, SnapshotRef
from storage.warehouse import Warehouse
from storage.writer import write_parquet

SAMPLE_ROWS = 32_768
CONTENDERS = ("zstd", "lz4", "snappy")
ROUNDS = 3
"""Times a sample is decoded. The fastest counts."""
CHUNK_BYTES = 65_536
"""Least size of a column chunk that is worth a read."""
GROUP_BYTES = 64 * 1024 * 1024
"""Most memory for the decoded columns of a row group."""
LEAST_ROWS, MOST_ROWS = 8_192, 262_144


class LayoutStats(BaseModel, frozen=True):
    """The cost of reading the wanted columns of some rows in one layout."""

    rows: int
    bytes_stored: int
    """Bytes of all columns."""
    bytes_read: int
    """Bytes of the wanted columns and of the gaps read with them."""
    reads: int
    mean_read_bytes: float
    seconds: float
    """Seconds to decode on one thread, from memory."""
    rows_per_second: float


class Proposal(BaseModel, frozen=True):
    """A layout, the reasons for it and its effect on a sample of the newest day."""

    layout: Layout
    reasons: dict[str, str]
    wanted: tuple[str, ...]
    """The columns that `before` and `after` read."""
    runs: int
    """Recorded runs that the proposal is based on."""
    before: LayoutStats
    after: LayoutStats


def propose(
    warehouse: Warehouse,
    reference: SnapshotRef,
    current: Layout,
    reads: Sequence[ReadRecord],
    wanted: Sequence[str],
    order_by: Sequence[str] = (),
    bytes_per_second: float = 200e6,
) -> Proposal:
    """Proposes a layout: popular columns adjacent, row groups of a good size, a codec for each column.

    Args:
        current: The table's layout.
        reads: Recorded reads of earlier runs.
        wanted: Columns of the most important model. They count as one more run, and the stats measure them.
        order_by: Columns to sort the rows of each file by. Empty: those of the table's layout.
        bytes_per_second: Speed of the storage, which weighs bytes against decoding time.
    """
    names = warehouse.schema(reference).names
    popular = popularity([*(read.columns for read in reads), wanted], names)
    sample = _sample(warehouse, reference, names)
    codecs, tried = _codecs(sample, popular, bytes_per_second)
    present = [name for name in wanted if name in names]
    rows = _group_rows(sample, present, current)
    layout = current.model_copy(
        update={
            "first": tuple(popular),
            "codecs": codecs,
            "row_group_rows": rows,
            "file_rows": max(rows, current.file_rows),
            "order_by": tuple(order_by) or current.order_by,
        }
    )
    reasons = {
        "first": f"{len(popular)} of {len(names)} columns were read by one of {len(reads)} runs or the config",
        "codecs": tried,
        "row_group_rows": f"column chunks of {CHUNK_BYTES:,} bytes where decoded columns stay below {GROUP_BYTES:,}",
    }
    return Proposal(
        layout=layout, reasons=reasons, wanted=tuple(present), runs=len(reads),
        before=measure_layout(sample, current, present), after=measure_layout(sample, layout, present),
    )  # fmt: skip


def popularity(runs: Iterable[Sequence[str]], names: Sequence[str]) -> list[str]:
    """Orders the columns that any run read by the number of runs, then by the order of the table."""
    counts = Counter(name for columns in runs for name in set(columns))
    place = {name: i for i, name in enumerate(names)}
    return sorted((name for name in counts if name in place), key=lambda name: (-counts[name], place[name]))


def measure_layout(rows: pa.Table, layout: Layout, wanted: Sequence[str]) -> LayoutStats:
    """Writes rows to memory in a layout and reads the wanted columns back."""
    stored = _encode(rows.select(layout.in_order(rows.column_names)), layout)
    metadata = pq.read_metadata(pa.BufferReader(stored))
    groups = [metadata.row_group(i) for i in range(metadata.num_row_groups)]
    chunks = (list(find_chunks(group, set(wanted))) for group in groups)
    ranges = [part for found in chunks for part in merge_ranges(found, layout.gap_bytes)]
    seconds, read = _time_decoding(stored, wanted), sum(part.end - part.begin for part in ranges)
    return LayoutStats(
        rows=rows.num_rows,
        bytes_stored=sum(g.column(i).total_compressed_size for g in groups for i in range(g.num_columns)),
        bytes_read=read,
        reads=len(ranges),
        mean_read_bytes=read / max(1, len(ranges)),
        seconds=seconds,
        rows_per_second=rows.num_rows / max(seconds, 1e-9),
    )


def _sample(warehouse: Warehouse, reference: SnapshotRef, names: Sequence[str]) -> pa.Table:
    """Reads the first rows of the newest day."""
    reader = warehouse.reader(reference, list(names))
    days = list(warehouse.day_rows(reference))
    parts: list[pa.Table] = [reader.empty()]
    for fragment in reader.fragments(days[-1:]):
        parts.append(reader.read(fragment))
        if sum(part.num_rows for part in parts) >= SAMPLE_ROWS:
            break
    return pa.concat_tables(parts).slice(0, SAMPLE_ROWS).combine_chunks()


def _codecs(sample: pa.Table, columns: Sequence[str], bytes_per_second: float) -> tuple[dict[str, str], str]:
    """Chooses the codec of each column with the least time to fetch and decode, and describes the choice."""
    chosen: dict[str, str] = {}
    for name in columns:
        costs = {}
        for codec in CONTENDERS:
            stored = _encode(sample.select([name]), Layout(codec=codec))
            costs[codec] = _time_decoding(stored, [name]) + len(stored) / bytes_per_second
        chosen[name] = min(costs, key=lambda codec: costs[codec])
    counts = Counter(chosen.values())
    tried = ", ".join(f"{codec} for {count} columns" for codec, count in counts.most_common()) or "no column is read"
    return chosen, f"{tried}: least time to fetch at {bytes_per_second / 1e6:,.0f} MB/s and to decode"


def _group_rows(sample: pa.Table, wanted: Sequence[str], current: Layout) -> int:
    """Chooses the rows of a row group, a power of two: chunks worth a read, decoded columns that fit into memory."""
    if not wanted or not sample.num_rows:
        return current.row_group_rows
    decoded = max(1.0, sample.select(list(wanted)).nbytes / sample.num_rows)
    compressed = len(_encode(sample.select(list(wanted)), current)) / sample.num_rows / len(wanted)
    rows = min(CHUNK_BYTES / max(compressed, 1e-3), GROUP_BYTES / decoded)
    bounded = min(max(rows, LEAST_ROWS), MOST_ROWS)
    return int(2 ** (int(bounded).bit_length() - 1))


def _encode(rows: pa.Table, layout: Layout) -> pa.Buffer:
    sink = pa.BufferOutputStream()
    write_parquet(sink, rows, layout)
    return sink.getvalue()


def _time_decoding(stored: pa.Buffer, names: Sequence[str]) -> float:
    """Returns the seconds to decode some columns, the fastest of several rounds."""
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        file = pq.ParquetFile(pa.BufferReader(stored), **READ_OPTIONS)
        for _batch in file.iter_batches(READ_ROWS, columns=list(names), use_threads=False):
            pass
        best = min(best, time.perf_counter() - began)
    return best

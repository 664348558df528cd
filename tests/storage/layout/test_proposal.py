"""Columns that are often read are adjacent, and the proposal's numbers are those of the files it would write."""

import datetime
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from storage.config import WarehouseConfig
from storage.layout.proposal import CHUNK_BYTES, LEAST_ROWS, MOST_ROWS, measure_layout, popularity, propose
from storage.layout.reads import ReadRecord
from storage.layout.spec import Layout
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse
from storage.writer import write_parquet

DAY = datetime.date(2024, 1, 1)


def table(count: int = 3_000) -> pa.Table:
    draw = np.random.default_rng(1)
    columns = {f"c{i}": pa.array(draw.integers(0, 1_000, count)) for i in range(30)}
    return pa.table({"day": pa.array([DAY] * count, pa.date32()), **columns})


def read(*columns: str) -> ReadRecord:
    at = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
    return ReadRecord(
        table="t", by="train", at=at, columns=columns, rows=1, bytes_read=1, bytes_stored=1, reads=1, seconds=1
    )


def test_columns_come_by_runs_then_by_place() -> None:
    runs = [["b", "a", "z"], ["b", "c"], ["c", "b", "b"]]
    assert popularity(runs, ["a", "c", "b", "d"]) == ["b", "c", "a"]
    assert popularity([], ["a"]) == []


def test_the_numbers_are_those_of_a_file() -> None:
    layout = Layout(row_group_rows=1_000, gap_bytes=0)
    sink = pa.BufferOutputStream()
    write_parquet(sink, table(), layout)
    metadata = pq.read_metadata(pa.BufferReader(sink.getvalue()))
    wanted = ("c3", "c4", "c9")
    chunks = [metadata.row_group(g).column(i) for g in range(3) for i in range(31)]
    found = measure_layout(table(), layout, wanted)
    assert found.bytes_read == sum(c.total_compressed_size for c in chunks if c.path_in_schema in wanted)
    assert found.bytes_stored == sum(c.total_compressed_size for c in chunks)
    assert (found.rows, found.reads) == (3_000, 3 * 2)
    assert found.mean_read_bytes == found.bytes_read / 6
    first = measure_layout(table(), layout.model_copy(update={"first": wanted}), wanted)
    assert (first.reads, first.bytes_read) == (3, found.bytes_read)


def test_a_proposal_puts_columns_that_are_read_first(home: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(row_group_rows=1_000), home)
    snapshot = replace_days(warehouse, "t", {DAY: "i"}, table().schema, table().to_batches(), 3_000)
    reads = [read("c20", "c5"), read("c20", "gone")]
    current = warehouse.default_layout
    found = propose(warehouse, snapshot, current, reads, ["c2", "c20"], order_by=["c2"])
    assert found.layout.first == ("c20", "c2", "c5")
    assert found.layout.order_by == ("c2",)
    assert set(found.layout.codecs) == {"c20", "c2", "c5"}
    assert LEAST_ROWS <= found.layout.row_group_rows <= MOST_ROWS
    assert found.layout.file_rows >= found.layout.row_group_rows
    assert found.wanted == ("c2", "c20")
    assert found.after.reads < found.before.reads
    assert found.after.bytes_read < found.before.bytes_read + CHUNK_BYTES

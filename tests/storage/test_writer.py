"""Table files are whole, in the table's layout, readable by other tools, and never read with a flipped bit."""

import datetime
import itertools
import random
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from storage import writer
from storage.config import WarehouseConfig
from storage.errors import CorruptFileError, StorageError
from storage.layout.spec import Layout, leaf_paths
from storage.reader import SnapshotRef
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse
from tests.homes import read_rows, write_days

DAY1, DAY2 = datetime.date(2024, 1, 1), datetime.date(2024, 1, 2)


def table(count: int = 40, day: datetime.date = DAY1) -> pa.Table:
    """Numbers, texts, lists and nulls."""
    return pa.table(
        {
            "day": pa.array([day] * count, pa.date32()),
            "id": pa.array(range(count), pa.int64()),
            "x": [i / 7 if i % 5 else None for i in range(count)],
            "text": [f"t{i % 3}" for i in range(count)],
            "tags": pa.array([list(range(i % 4)) for i in range(count)], pa.list_(pa.int64())),
            "at": pa.array(range(count), pa.timestamp("us")),
        }
    )


def read(warehouse: Warehouse, snapshot: SnapshotRef) -> pa.Table:
    return read_rows(warehouse, snapshot, table().column_names)


def same(got: pa.Table, expected: pa.Table) -> bool:
    return bool(got.cast(expected.schema).equals(expected))


def files(home: Path) -> list[Path]:
    return sorted(home.rglob("*.parquet"))


def set_properties(warehouse: Warehouse, properties: dict[str, str]) -> None:
    with warehouse.table("events").transaction() as transaction:
        transaction.set_properties(properties)


@pytest.mark.parametrize("part", ["pages", "footer"])
def test_a_flipped_bit_is_an_error_or_changes_nothing(home: Path, part: str) -> None:
    warehouse = Warehouse(WarehouseConfig(row_group_rows=16), home)
    snapshot = write_days(warehouse, table())
    [path] = files(home)
    whole = path.read_bytes()
    footer = len(whole) - 8 - struct.unpack("<I", whole[-8:-4])[0]
    place = range(8 * (footer - 12), 8 * len(whole)) if part == "footer" else range(8 * (footer - 12))
    noticed = 0
    for bit in random.Random(7).sample(place, 150):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        try:
            assert same(read(warehouse, snapshot), table()), f"bit {bit} goes unnoticed"
        except CorruptFileError as error:
            noticed += error.where == f"file 'file://{path}' of snapshot {snapshot.snapshot_id} of table 'events'"
    assert noticed == 150 if part == "footer" else noticed > 90  # some bits of a page's header have no meaning


def test_a_wide_page_with_any_bit_flipped_is_an_error(home: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(codec="uncompressed"), home)
    draw = random.Random(1)
    rows = pa.table({"day": [DAY1] * 4_096, "x": [draw.random() for _ in range(4_096)]})
    snapshot = write_days(warehouse, rows)
    [path] = files(home)
    whole, reader = path.read_bytes(), warehouse.reader(snapshot, ["x"])
    [fragment] = reader.fragments()
    begin = pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset
    for bit in draw.sample(range(8 * (begin + 64), 8 * (begin + 8 * 4_000)), 50):  # its header is short
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError):
            reader.read(fragment)


def test_files_of_another_writer_are_read(warehouse: Warehouse) -> None:
    write_days(warehouse, table(12))
    warehouse.table("events").append(table(9, DAY2))  # pyiceberg's own writer: no checksum, other names
    assert same(read(warehouse, warehouse.current("events")), pa.concat_tables([table(12), table(9, DAY2)]))


def test_other_tools_read_our_files(warehouse: Warehouse, home: Path) -> None:
    import duckdb

    write_days(warehouse, table(25), table(7, DAY2))
    expected = pa.concat_tables([table(25), table(7, DAY2)])
    assert same(
        warehouse.table("events").scan().to_arrow().sort_by([("day", "ascending"), ("id", "ascending")]), expected
    )
    names = [str(path) for path in files(home)]
    stored = duckdb.read_parquet(names).order("day, id").to_arrow_table()
    assert same(stored.select(expected.column_names), expected)
    assert same(pq.read_table(names[0], partitioning=None).slice(0, 3), table(3))


def test_the_manifest_describes_each_file(warehouse: Warehouse, home: Path) -> None:
    write_days(warehouse, table(25), table(7, DAY2))
    for task in warehouse.table("events").scan().plan_files():
        path = Path(task.file.file_path.removeprefix("file://"))
        metadata = pq.ParquetFile(path).metadata
        assert task.file.record_count == metadata.num_rows
        assert task.file.file_size_in_bytes == path.stat().st_size
        assert f"day={DAY1 if task.file.record_count != 7 else DAY2}" in task.file.file_path
        assert task.file.split_offsets == [
            metadata.row_group(i).column(0).dictionary_page_offset for i in range(metadata.num_row_groups)
        ]
    scan = warehouse.table("events").scan(row_filter="day = '2024-01-02'")
    assert sum(task.file.record_count for task in scan.plan_files()) == 7


def test_the_table_decides_the_layout_of_new_files(warehouse: Warehouse, home: Path) -> None:
    write_days(warehouse, table(6))
    first = set(files(home))
    layout = Layout(codec="snappy", codecs={"tags": "lz4", "x": "uncompressed"}, plain=("text",), row_group_rows=8)
    set_properties(warehouse, layout.properties())
    other = Warehouse(WarehouseConfig(codec="gzip", row_group_rows=99, file_rows=99), home)
    assert same(read(other, write_days(other, table(20))), table(20))
    [path] = set(files(home)) - first
    metadata = pq.ParquetFile(path).metadata
    group = metadata.row_group(0)
    chunks = {group.column(i).path_in_schema: group.column(i) for i in range(group.num_columns)}
    assert [metadata.row_group(i).num_rows for i in range(metadata.num_row_groups)] == [8, 8, 4]
    codecs = {name.split(".")[0]: chunk.compression for name, chunk in chunks.items()}
    assert codecs == {
        "day": "SNAPPY", "id": "SNAPPY", "x": "UNCOMPRESSED", "text": "SNAPPY", "tags": "LZ4", "at": "SNAPPY"
    }  # fmt: skip
    plain = [name for name, chunk in chunks.items() if not chunk.has_dictionary_page]
    assert plain == ["id", "x", "text", "at"], "text by the layout, the others because their values differ"
    assert [name for name, chunk in chunks.items() if chunk.is_stats_set] == ["day", "id", "x", "text", "at"]


def test_columns_whose_values_repeat_get_a_dictionary(warehouse: Warehouse, home: Path) -> None:
    """Numbers that all differ are smaller and faster without one, however many are null; nested values do not count."""
    draw = np.random.default_rng(1)
    kinds = pa.list_(pa.int64())
    rows = pa.table(
        {
            "day": [DAY1] * 5_000,
            "number": draw.random(5_000),
            "rare": [None if i % 3 else i / 7 for i in range(5_000)],
            "none": pa.nulls(5_000, pa.float64()),
            "times": pa.array(draw.permutation(5_000), pa.timestamp("us")),
            "price": pa.array([Decimal(i) for i in range(5_000)], pa.decimal128(9, 2)),
            "small": pa.array([i % 100 for i in range(5_000)], pa.int16()),
            "flag": [i % 2 == 0 if i % 3 else None for i in range(5_000)],
            "bytes": [f"{i}".encode() for i in range(5_000)],
            "uuid": pa.array([i.to_bytes(16) for i in range(5_000)], pa.uuid()),
            "few": draw.integers(0, 3_000, 5_000),
            "ids": pa.array([[4 * i, 4 * i + 1] if i % 3 else None for i in range(5_000)], kinds),
            "tags": pa.array([[i % 9, i % 7] for i in range(5_000)], kinds),
            "empty": pa.array([[]] * 5_000, kinds),
            "word": [f"{i}" for i in range(5_000)],
        }
    )
    snapshot = write_days(warehouse, rows)
    group = pq.ParquetFile(files(home)[0]).metadata.row_group(0)
    chunks = [group.column(i) for i in range(group.num_columns)]
    assert {chunk.path_in_schema.split(".")[0] for chunk in chunks if not chunk.has_dictionary_page} == {
        "number", "rare", "times", "price", "ids", "word", "bytes", "uuid", "flag"
    }  # fmt: skip
    assert read_rows(warehouse, snapshot, rows.column_names).cast(rows.schema).equals(rows)


@pytest.mark.parametrize("seed", range(40))
def test_rows_are_collected_into_tables_of_whole_days(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draw = random.Random(seed)
    monkeypatch.setattr(writer, "CHUNK_BYTES", draw.choice([1, 200, 10**9]))
    days = [DAY1 + datetime.timedelta(days=draw.randrange(6)) for _ in range(draw.randrange(1, 60))]
    ordered, least = seed % 4 > 0, draw.randrange(1, 30)
    rows = pa.table({"day": sorted(days) if ordered else days, "id": range(len(days))})
    cuts = sorted({0, len(days), *(draw.randrange(len(days)) for _ in range(draw.randrange(12)))})
    parts = [rows.slice(begin, end - begin) for begin, end in itertools.pairwise(cuts)]
    batches = [batch for part in parts for batch in (part.slice(0, 0).combine_chunks(), part.combine_chunks())]
    every = [one for table in batches for one in table.to_batches()]
    found = list(writer.collect_chunks(rows.schema, every, least, by_day=True))
    assert pa.concat_tables(found).equals(rows)
    assert all(len(one) for one in found)
    longest = max(end - begin for begin, end in itertools.pairwise(cuts))
    for before, after in itertools.pairwise(found):
        last, first = before["day"][-1].as_py(), after["day"][0].as_py()
        if ordered and last == first:  # the day has more rows than a table needs
            assert days.count(last) > least
            assert len(before) >= least
    assert all(len(one) < least + 2 * longest for one in found)


def test_a_layout_comes_back_from_properties() -> None:
    layout = Layout(codec="lz4", codecs={"a": "zstd", "b": "lz4"}, plain=("c",), order_by=("s", "t"), gap_bytes=0)
    back = Layout.of(layout.properties(), Layout(row_group_rows=7))
    assert back == layout.model_copy(update={"codecs": {"a": "zstd"}})  # b has the setting for all columns
    assert Layout.of({}, Layout(row_group_rows=7)) == Layout(row_group_rows=7)
    others = {"write.parquet.compression-codec": "ZSTD"}, {"write.parquet.compression-codec": "brotli"}
    assert [Layout.of(properties, Layout(codec="lz4")).codec for properties in others] == ["zstd", "lz4"]
    with pytest.raises(ValidationError, match="codec of 'a': expected one of zstd"):
        Layout(codecs={"a": "rar"})


@pytest.mark.parametrize(
    "properties",
    [
        {"write.parquet.row-group-limit": "many"},
        {"dlrm.layout.codecs": "{"},
        {"dlrm.layout.codecs": "[1]"},
        {"dlrm.layout.plain": "3"},
    ],
)
def test_invalid_properties_are_named(properties: dict[str, str]) -> None:
    with pytest.raises(StorageError, match=r"^layout in the table's properties: expected values that"):
        Layout.of(properties, Layout())


def test_a_row_without_a_day_is_refused(warehouse: Warehouse, home: Path) -> None:
    rows = pa.table({"day": pa.array([DAY1, None], pa.date32()), "id": [1, 2]})
    with pytest.raises(StorageError) as error:
        replace_days(warehouse, "events", {DAY1: "i"}, rows.schema, rows.to_batches(), 2)
    assert str(error.value) == (
        "column 'day': expected a day in each row, got rows without one. Give the source's rows a day."
    )
    assert files(home) == []


@pytest.mark.parametrize(
    "kind",
    [pa.int64(), pa.list_(pa.int64()), pa.map_(pa.string(), pa.list_(pa.float64())), pa.struct([("a", pa.int8())])],
)
def test_leaves_are_named_as_parquet_names_them(kind: Any) -> None:
    field = pa.field("column", kind)
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table([pa.array([], kind)], schema=pa.schema([field])), sink)
    schema = pq.ParquetFile(pa.BufferReader(sink.getvalue())).schema
    assert list(leaf_paths(field)) == [schema.column(i).path for i in range(len(schema))]

"""Lists that our decoder reads against the same lists as pyarrow reads them, from files of several writers."""

from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import duckdb
import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from storage.pages.columns import _open_lists, read_columns
from storage.pages.headers import read_pages
from storage.pages.lists import CODECS, ITEMS
from storage.snapshot.parquet import READ_OPTIONS
from tests.storage.pages.both import read_both

WRITERS: dict[str, dict[str, Any]] = {
    "default": {},
    "small pages": {"data_page_size": 64, "write_batch_size": 8},
    "second version": {"data_page_version": "2.0", "data_page_size": 200, "write_batch_size": 16},
    "plain": {"use_dictionary": False, "data_page_size": 300, "write_batch_size": 10},
    "plain, second version": {"use_dictionary": False, "data_page_version": "2.0", "compression": "zstd"},
    "dictionary, then plain": {"dictionary_pagesize_limit": 64, "data_page_size": 100, "write_batch_size": 4},
    "page index": {"write_page_index": True, "data_page_size": 128, "write_batch_size": 8},
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pages") / "lists.parquet"


def lists_of(rows: Any, nullable: bool = True, nullable_items: bool = True) -> pa.Table:
    kind = pa.list_(pa.field("element", pa.int64(), nullable_items))
    numbers = pa.array(range(len(rows)), pa.float64())
    fields = [pa.field("number", pa.float64()), pa.field("ids", kind, nullable)]
    return pa.table([numbers, pa.array(rows, kind)], schema=pa.schema(fields))


def assert_equal(path: Path, batch_rows: int) -> None:
    for one, other in read_both(path, batch_rows):
        one.validate(full=True)
        assert one.schema.equals(other.schema, check_metadata=True)
        assert one.column("ids").equals(other.column("ids"))
        assert one.column("number").equals(other.column("number"))


def decoded_here(path: Path) -> bool:
    with pa.memory_map(str(path)) as data, pq.ParquetFile(str(path), **READ_OPTIONS) as file:
        return "ids" in _open_lists(file, data, 0, ["ids"])


def skewed_ids() -> st.SearchStrategy[int]:
    """Ids of many sizes. Few of them are frequent, so that dictionaries have runs."""
    return st.one_of(st.integers(0, 3), st.integers(-(2**63), 2**63 - 1))


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_lists_are_read_as_pyarrow_reads_them(path: Path, writer: str, data: st.DataObject):
    nullable, nullable_items = data.draw(st.booleans()), data.draw(st.booleans())
    ids = st.one_of(st.none(), skewed_ids()) if nullable_items else skewed_ids()
    some = st.lists(ids, max_size=data.draw(st.sampled_from([1, 4, 60])))
    rows = data.draw(st.lists(st.one_of(st.none(), some) if nullable else some, min_size=1, max_size=50))
    rows *= data.draw(st.integers(1, 4))
    group = data.draw(st.integers(1, len(rows)))
    pq.write_table(lists_of(rows, nullable, nullable_items), path, row_group_size=group, **WRITERS[writer])
    assert decoded_here(path)
    assert_equal(path, data.draw(st.integers(1, 70)))


@pytest.mark.parametrize("codec", [*CODECS, "NONE"])
@pytest.mark.parametrize("version", ["1.0", "2.0"])
def test_all_compressions_are_read(path: Path, codec: str, version: str):
    random = np.random.default_rng(1)
    rows = [random.integers(0, 40, random.integers(0, 9)).tolist() for _ in range(500)]
    options = {"compression": codec.lower(), "data_page_version": version, "write_page_checksum": True}
    pq.write_table(lists_of(rows), path, data_page_size=1_000, **options)
    assert decoded_here(path)
    assert_equal(path, 64)


def test_a_list_may_be_longer_than_its_pages(path: Path):
    rows = [[1], list(range(5_000)), [], None, list(range(3_000)), [2]]
    pq.write_table(lists_of(rows), path, **WRITERS["small pages"], compression="none", use_dictionary=False)
    assert decoded_here(path)
    for batch_rows in (1, 2, 6):
        assert_equal(path, batch_rows)


@pytest.mark.parametrize("kind", ITEMS)
@pytest.mark.parametrize("dictionary", [True, False])
def test_all_kinds_of_numbers_keep_their_bits(path: Path, kind: pa.DataType, dictionary: bool):
    random = np.random.default_rng(4)
    bits = random.integers(0, 256, (300, kind.bit_width // 8), np.uint8).repeat(random.integers(1, 12, 300), 0)
    items = pa.Array.from_buffers(kind, len(bits), [None, pa.py_buffer(bits.tobytes())])
    offsets = np.sort(random.integers(0, len(bits) + 1, 201)).astype(np.int32)
    offsets[[0, -1]] = 0, len(bits)
    lists = pa.ListArray.from_arrays(pa.array(offsets), items)
    table = pa.table({"number": np.arange(200.0), "ids": lists})
    pq.write_table(table, path, use_dictionary=dictionary, data_page_size=500, write_batch_size=20)
    assert decoded_here(path)
    read = pa.chunked_array([one.column("ids") for one, _ in read_both(path, 17)])
    assert read.type == lists.type
    assert pc.list_value_length(read).equals(pc.list_value_length(pa.chunked_array([lists])))
    assert b"".join(bytes(part.values.buffers()[1]) for part in read.chunks) == bits.tobytes()


def test_dictionaries_of_all_sizes_are_read(path: Path):
    """An index into a dictionary has 0 to 17 bits here."""
    for bits in range(18):
        ids = np.random.default_rng(bits).permutation(1 << bits)
        rows = np.array_split(np.concatenate([ids, ids[:100].repeat(9)]) << 20, 50)
        pq.write_table(lists_of([row.tolist() for row in rows]), path, dictionary_pagesize_limit=1 << 30)
        assert decoded_here(path)
        assert_equal(path, 13)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (pa.list_(pa.int64()), {"use_dictionary": False, "column_encoding": "DELTA_BINARY_PACKED"}),
        (pa.list_(pa.int64()), {"use_dictionary": False, "column_encoding": "BYTE_STREAM_SPLIT"}),
        (pa.list_(pa.int16()), {}),
        (pa.list_(pa.timestamp("us")), {}),
        (pa.list_(pa.string()), {}),
        (pa.list_(pa.list_(pa.int64())), {}),
        (pa.list_(pa.struct({"id": pa.int64()})), {}),
        (pa.int64(), {}),
    ],
)
def test_other_columns_are_left_to_pyarrow(path: Path, kind: pa.DataType, options: dict[str, Any]):
    values: Any = [3, 2, 5]
    if pa.types.is_list(kind):
        inner = kind.value_type
        one: Any = "a" if inner == pa.string() else {"id": 1} if pa.types.is_struct(inner) else 1
        values = [[[one]] if pa.types.is_list(inner) else [one], [], None]
    table = pa.table({"ids": pa.array(values, kind), "number": [1.0, 2.0, 3.0]})
    pq.write_table(table, path, **options | {"column_encoding": None})
    if "column_encoding" in options:
        pq.write_table(table.select(["ids"]), path, **options)
        for one, other in read_both(path, 2, ("ids",)):
            assert one.equals(other)
    else:
        assert_equal(path, 2)
    assert not decoded_here(path)


def test_lists_in_small_pages_are_left_to_pyarrow(path: Path):
    pq.write_table(lists_of([[1, 2]] * 500), path, **WRITERS["small pages"])
    with patch("storage.pages.lists.LEAST", 16):
        assert not decoded_here(path)
    pq.write_table(lists_of([[1, 2]] * 3), path)
    with patch("storage.pages.lists.LEAST", 16):
        assert decoded_here(path)  # it has only one


def test_columns_whose_names_have_dots_are_not_mixed_up(path: Path):
    kind = pa.list_(pa.int64())
    table = pa.table({"a": pa.array([[1]], kind), "a.b": pa.array([[2]], kind), "number": [1.0]})
    pq.write_table(table, path)
    with pa.memory_map(str(path)) as data, pq.ParquetFile(str(path), **READ_OPTIONS) as file:
        assert _open_lists(file, data, 0, ["a", "a.b"]) == {}


def other_writers(path: Path, table: pa.Table) -> Iterator[str]:
    for version in ("V1", "V2"):
        with duckdb.connect() as db:
            db.register("lists", table)
            db.execute(f"COPY lists TO '{path}' (FORMAT parquet, PARQUET_VERSION {version}, ROW_GROUP_SIZE 2048)")
        yield f"DuckDB {version}"
    for compression in ("zstd", "lz4", "snappy", "uncompressed"):
        pl.from_arrow(table).write_parquet(path, compression=compression, data_page_size=2_000, row_group_size=2_000)  # type: ignore[union-attr]
        yield f"Polars {compression}"


def test_files_of_other_writers_are_read(path: Path):
    random = np.random.default_rng(2)
    rows: list[Any] = [random.zipf(1.3, random.integers(0, 30)).tolist() for _ in range(5_000)]
    rows[7::50] = [None] * len(rows[7::50])
    rows[9::40] = [[None, 5, None]] * len(rows[9::40])
    for writer in other_writers(path, lists_of(rows)):
        left = {"DuckDB V2", "Polars lz4"}  # deltas; a codec that needs checksums
        assert decoded_here(path) == (writer not in left), writer
        assert_equal(path, 777)


def damaged_files(path: Path, rows: pa.Table, **options: Any) -> Iterator[bytes]:
    """Yields copies of a file with another byte in its column of lists."""
    pq.write_table(rows, path, **options)
    whole = path.read_bytes()
    leaf = pq.read_metadata(path).row_group(0).column(1)
    begin = min(leaf.dictionary_page_offset or leaf.data_page_offset, leaf.data_page_offset)
    random = np.random.default_rng(3)
    for place in range(begin, begin + leaf.total_compressed_size):
        for value in {0, 255, whole[place] ^ 1, whole[place] ^ 128, int(random.integers(256))} - {whole[place]}:
            yield whole[:place] + bytes([value]) + whole[place + 1 :]


def read_or_fail(read: Callable[[pq.ParquetFile, pa.NativeFile], Iterator[pa.RecordBatch]], path: Path) -> Any:
    """Returns the rows of the first row group, or None if the file is damaged."""
    try:
        with pa.memory_map(str(path)) as data, pq.ParquetFile(str(path), **READ_OPTIONS) as file:
            batches = list(read(file, data))
    except (pa.ArrowException, OSError):
        return None
    if not batches:  # pyarrow stops at a page without levels
        return None
    rows = pa.Table.from_batches(batches)
    rows.validate(full=True)
    return rows


def ours(file: pq.ParquetFile, data: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    return read_columns(file, data, 0, ["number", "ids"], 5)


def theirs(file: pq.ParquetFile, data: pa.NativeFile) -> Iterator[pa.RecordBatch]:
    return file.iter_batches(5, [0], ["number", "ids"], use_threads=False)


@pytest.mark.nightly
@pytest.mark.parametrize("compression", ["none", "snappy", "zstd", "gzip"])
@pytest.mark.parametrize("options", [{}, {"data_page_version": "2.0"}, {"use_dictionary": False}])
def test_damage_is_an_error_or_what_pyarrow_makes_of_it(path: Path, compression: str, options: dict[str, Any]):
    rows = [[1, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2, 2], [], None, [7, None], [1] * 20, [3, 4, 5]] * 4
    outcomes, whole = Counter[bool](), pa.Table.from_batches(lists_of(rows).to_batches(5))
    for content in damaged_files(path, lists_of(rows), compression=compression, data_page_size=90, **options):
        path.write_bytes(content)
        found, expected = read_or_fail(ours, path), read_or_fail(theirs, path)
        outcomes[found is None] += 1
        if expected is not None:
            assert found is not None
            assert found.equals(expected)
        elif found is not None:  # pyarrow looks at more of the header
            assert found.equals(whole)
    assert outcomes[True] > 20
    assert outcomes[False] > 20  # minima and maxima in page headers do not matter


@pytest.mark.parametrize(
    "header",
    [
        bytes.fromhex("1500 19f3 ffffffffffffffff 01"),  # a list of 2^56 bytes
        bytes.fromhex("1500") + b"\x19" * 3_000,  # lists in lists
        b"\x1c" * 3_000,  # structs in structs
        b"\xff" * 30,
        b"",
    ],
)
def test_a_header_of_rubbish_is_an_error(header: bytes):
    with pytest.raises(pa.ArrowInvalid, match="damaged page header at byte 0"):
        list(read_pages(memoryview(header), 10))


def test_a_wrong_checksum_is_an_error(path: Path):
    pq.write_table(lists_of([[5, 6]] * 100), path, compression="none", use_dictionary=False, write_page_checksum=True)
    content = path.read_bytes()
    ids = np.array([5, 6] * 100, np.int64).tobytes()
    assert ids in content
    path.write_bytes(content.replace(ids, ids[:-1] + b"\x01"))
    with pytest.raises(OSError, match="CRC checksum"):
        list(read_both(path, 10))

"""Bodies that stand for more than they hold are refused before they are unpacked."""

import datetime
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.errors import InputError
from pipeline.serving.bodies import MOST_EMPTY_ROWS, read_arrow, read_tensors

LIMIT = 1 << 20
MANY = 1 << 22


def stream(rows: pa.Table | pa.RecordBatch, compression: str | None = None, **options: Any) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(
        sink, rows.schema, options=pa.ipc.IpcWriteOptions(compression=compression, **options)
    ) as out:
        out.write(rows)
    return sink.getvalue().to_pybytes()


def refuses(body: bytes) -> InputError:
    before = pa.total_allocated_bytes()
    tracemalloc.start()
    try:
        with pytest.raises(InputError) as caught:
            read_arrow(body, LIMIT)
        assert tracemalloc.get_traced_memory()[1] < 8 * LIMIT
    finally:
        tracemalloc.stop()
    assert pa.total_allocated_bytes() - before < 8 * LIMIT
    return caught.value


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
@pytest.mark.parametrize("rows", [1, MANY])
def test_compressed_buffers_are_refused_unread(compression: str, rows: int) -> None:
    body = stream(pa.table({"x": np.zeros(rows), "y": np.ones(rows, np.int8)}), compression)
    assert len(body) < LIMIT
    assert str(refuses(body)) == (
        "body: expected an uncompressed Arrow stream, got compressed buffers. Send it uncompressed."
    )


@pytest.mark.parametrize("compression", ["zstd", "lz4"])
def test_a_compressed_dictionary_is_refused(compression: str) -> None:
    text = pa.array(["a" * 50_000])
    rows = pa.table({"x": pa.DictionaryArray.from_arrays(pa.array([0], pa.int8()), text)})
    assert "compressed" in str(refuses(stream(rows, compression)))


def from_buffers(kind: pa.DataType, count: int, *buffers: pa.Buffer | None, children: Any = None) -> pa.Array:
    return pa.Array.from_buffers(kind, count, [None, *buffers], children=children)


BOMBS: dict[str, Callable[[], pa.Array]] = {
    "nulls": lambda: pa.nulls(MANY),
    "lists of nulls": lambda: pa.ListArray.from_arrays(pa.array([0, MANY], pa.int32()), pa.nulls(MANY)),
    "no bytes": lambda: from_buffers(pa.binary(0), MANY, pa.py_buffer(b"")),
    "texts of a dictionary": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0] * 4_096, pa.int8()), pa.array(["a" * 4_096])
    ),
    "lists of a dictionary": lambda: pa.ListArray.from_arrays(
        pa.array([0, 4_096], pa.int32()),
        pa.DictionaryArray.from_arrays(pa.array([0] * 4_096, pa.int8()), pa.array(["a" * 4_096])),
    ),
    "a dictionary of lists": lambda: pa.DictionaryArray.from_arrays(
        pa.array([0] * 4_096, pa.int8()), pa.array([[1] * 4_096])
    ),
    "runs": lambda: pa.RunEndEncodedArray.from_arrays(pa.array([MANY], pa.int32()), pa.array([7])),
}


@pytest.mark.parametrize("name", BOMBS)
def test_few_bytes_do_not_become_many(name: str) -> None:
    body = stream(pa.table({"x": BOMBS[name]()}))
    assert len(body) < LIMIT
    refuses(body)


def test_plain_columns_up_to_the_size_of_a_body_are_read() -> None:
    count = 500
    one = {
        "number": np.arange(count, dtype=np.float64), "small": np.arange(count, dtype=np.int8), "flag": [True] * count,
        "text": ["word"] * count, "ids": pa.array([[1, 2]] * count, pa.large_list(pa.int64())), "none": pa.nulls(count),
        "time": pa.array([datetime.datetime(2025, 1, 1)] * count), "extra": pa.array([{"a": 1}] * count),
        "vector": pa.array([[1.0, 2.0]] * count, pa.list_(pa.float32(), 2)), "tags": pa.array([[("a", 1)]] * count, pa.map_(pa.string(), pa.int64())),
    }  # fmt: skip
    rows = pa.table(one)
    assert read_arrow(stream(rows), LIMIT).equals(rows)
    for name in one:
        body = stream(rows.select([name]))
        assert read_arrow(body, len(body) + 8 * count).num_rows == count
    words = pa.table(
        {"x": pa.array(["a", "b", None, "a"]).dictionary_encode(), "n": pa.array([5, 5, None, 6]).dictionary_encode()}
    )
    assert read_arrow(stream(words), LIMIT).to_pydict() == {"x": ["a", "b", None, "a"], "n": [5, 5, None, 6]}
    with pytest.raises(InputError, match="at most 100 bytes of rows"):
        read_arrow(stream(rows), 100)


@pytest.mark.parametrize("rows", [MOST_EMPTY_ROWS + 1, 10**15])
def test_a_tensor_without_items_has_a_bound(rows: int) -> None:
    with pytest.raises(InputError, match="rows without items"):
        read_tensors(
            {"inputs": [{"name": "x", "shape": [rows, 0], "datatype": "INT64", "data": []}]}, {"x": "list<long>"}
        )
    few = {"inputs": [{"name": "x", "shape": [2, 0], "datatype": "INT64", "data": []}]}
    assert read_tensors(few, {"x": "list<long>"}) == {"x": [[], []]}

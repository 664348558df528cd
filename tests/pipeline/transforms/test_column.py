"""Columns hold Arrow's values, row by row, as numbers or ids."""

import datetime
import uuid
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import DataError
from pipeline.transforms.column import Column, concatenate, dense_from_arrow, scores_from_arrow, sparse_from_arrow

QUICK = settings(derandomize=True, max_examples=40, deadline=None, database=None)
INT64 = st.integers(-(2**63), 2**63 - 1)
UINT64 = st.integers(0, 2**64 - 1)
TEXT = st.text(max_size=12)
ID_LISTS = st.lists(st.lists(INT64, max_size=6), max_size=8)


def fnv1a(text: str) -> int:
    """Its authors' pseudocode, read as a signed number."""
    state = 0xCBF29CE484222325
    for byte in text.encode():
        state = (state ^ byte) * 0x100000001B3 % 2**64
    return signed(state)


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def lists_of(column: Column) -> list[list[int]]:
    assert column.offsets is not None
    assert column.offsets[0] == 0
    return [column.values[a:b].tolist() for a, b in zip(column.offsets[:-1], column.offsets[1:], strict=True)]


def sparse(rows: list[list[int]]) -> Column:
    return sparse_from_arrow("ids", pa.array(rows, pa.list_(pa.int64())))


def nested(items: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    """Rows of lists: null rows, empty lists and nulls inside lists."""
    return st.lists(st.none() | st.lists(st.none() | items, max_size=6), max_size=8)


@pytest.mark.parametrize(("text", "hashed"), [("", 0xCBF29CE484222325), ("a", 0xAF63DC4C8601EC8C)])
def test_text_hashes_to_published_fnv1a(text: str, hashed: int) -> None:
    assert sparse_from_arrow("x", pa.array([text])).values.tolist() == [signed(hashed)]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("items", "kind", "to_id"),
    [
        (INT64, pa.int64(), int),
        (UINT64, pa.uint64(), signed),
        (TEXT, pa.string(), fnv1a),
        (TEXT, pa.large_string(), fnv1a),
    ],
    ids=["int64", "uint64", "string", "large_string"],
)
@pytest.mark.parametrize("outer", [pa.list_, pa.large_list], ids=["list", "large_list"])
def test_lists_of_ids_row_by_row(items: st.SearchStrategy[Any], kind: pa.DataType, to_id: Any, outer: Any) -> None:
    @QUICK
    @given(nested(items), st.integers(0, 8))
    def check(rows: list[Any], start: int) -> None:
        expected = [[to_id(item) for item in row or [] if item is not None] for row in rows]
        array = pa.array(rows, outer(kind))
        assert lists_of(sparse_from_arrow("x", array)) == expected
        assert lists_of(sparse_from_arrow("x", array.slice(start))) == expected[start:]  # a view with an offset

    check()


@pytest.mark.parametrize(
    ("items", "kind", "to_id"),
    [
        (INT64, pa.int64(), int),
        (UINT64, pa.uint64(), signed),
        (TEXT, pa.string(), fnv1a),
        (st.booleans(), pa.bool_(), int),
        (st.dates(), pa.date32(), lambda day: (day - datetime.date(1970, 1, 1)).days),
    ],
    ids=["int64", "uint64", "string", "bool", "date32"],
)
def test_one_id_a_row(items: st.SearchStrategy[Any], kind: pa.DataType, to_id: Any) -> None:
    @QUICK
    @given(st.lists(st.none() | items, max_size=12), st.integers(0, 12))
    def check(rows: list[Any], start: int) -> None:
        expected = [[] if row is None else [to_id(row)] for row in rows]
        array = pa.array(rows, kind)
        assert lists_of(sparse_from_arrow("x", array.slice(start))) == expected[start:]
        if not pa.types.is_boolean(kind):
            assert lists_of(sparse_from_arrow("x", array.dictionary_encode())) == expected

    check()


def test_long_lists_and_lists_behind_null_rows() -> None:
    long = list(range(1_000_000))
    assert lists_of(sparse([long, [], [7]])) == [long, [], [7]]
    offsets, items = pa.array([0, 2, 4, 5], pa.int32()), pa.array([1, 2, 3, 4, 5])
    hidden = pa.ListArray.from_arrays(offsets, items, mask=pa.array([False, True, False]))  # 3 and 4 lie below a null
    assert lists_of(sparse_from_arrow("x", hidden)) == [[1, 2], [], [5]]


@pytest.mark.parametrize(
    ("array", "expected"),
    [
        (pa.array([1, None, -3]), [1.0, np.nan, -3.0]),
        (pa.array([2**64 - 1, None], pa.uint64()), [float(2**64 - 1), np.nan]),
        (pa.array([True, None, False]), [1.0, np.nan, 0.0]),
        (pa.array([Decimal("1.25"), None]), [1.25, np.nan]),
        (pa.array([1.5, None, np.nan, np.inf, -np.inf]), [1.5, np.nan, np.nan, np.inf, -np.inf]),
        (pa.array([0.5, None], pa.float32()), [0.5, np.nan]),
        (pa.array([None, None]), [np.nan, np.nan]),
        (pa.array([], pa.float64()), []),
        (pa.array([9, 1, None]).slice(1), [1.0, np.nan]),
        (pa.array([1_500, None, -1], pa.timestamp("ms")), [1.5, np.nan, -0.001]),
        (pa.array([7, 0], pa.timestamp("s", "Asia/Tokyo")), [7.0, 0.0]),
        (pa.array([1_700_000_000_000_001], pa.timestamp("us")), [1_700_000_000.000001]),
        (pa.array([1, None, -1], pa.date32()), [86_400.0, np.nan, -86_400.0]),
        (pa.array([86_400_000], pa.date64()), [86_400.0]),
    ],
)
def test_numbers_become_float64(array: pa.Array, expected: list[float]) -> None:
    column = dense_from_arrow("x", array)
    assert column.kind == "dense"
    assert column.values.dtype == np.float64
    np.testing.assert_array_equal(column.values, expected)


@pytest.mark.parametrize("outer", [pa.list_, pa.large_list], ids=["list", "large_list"])
def test_scores_keep_the_positions_of_their_ids(outer: Any) -> None:
    rows = [[0.5, None], None, [], [np.inf]]
    array = pa.array([[9.0], *rows], outer(pa.float32()))
    for part in (array.slice(1), pa.array(rows, outer(pa.float64()))):
        column = scores_from_arrow("x", part)
        assert (column.kind, column.offsets.tolist()) == ("scores", [0, 2, 2, 2, 3])
        np.testing.assert_array_equal(column.values, [0.5, np.nan, np.inf])
    assert scores_from_arrow("x", pa.array([[1, 2]])).values.tolist() == [1.0, 2.0]
    with pytest.raises(DataError) as error:
        scores_from_arrow("x", pa.array([1.0]))
    assert (
        str(error.value)
        == "column 'x': expected lists of numbers, got double. Name a column that holds lists of numbers."
    )


@pytest.mark.parametrize("kind", [pa.float64(), pa.float32()], ids=str)
def test_whole_floats_are_the_ids_of_their_integers(kind: pa.DataType) -> None:
    """As pandas writes integers of which one is missing."""
    floats = sparse_from_arrow("user", pa.array([7.0, None, float("nan"), -3.0], kind))
    whole = sparse_from_arrow("user", pa.array([7, None, None, -3]))
    assert lists_of(floats) == lists_of(whole) == [[7], [], [], [-3]]
    assert lists_of(sparse_from_arrow("user", pa.array([9.0, 8.0], kind).slice(1))) == [[8]]
    with pytest.raises(DataError, match="expected ids: whole numbers, got inf"):
        sparse_from_arrow("user", pa.array([1.0, float("inf")], kind))


def test_lists_without_nulls_share_memory_with_arrow() -> None:
    array = pa.array([[5], [1, 2], [3]]).slice(1)
    column = sparse_from_arrow("x", array)
    assert lists_of(column) == [[1, 2], [3]]
    assert np.shares_memory(column.values, array.values.to_numpy())
    numbers = pa.array([1.0, 2.0])
    assert np.shares_memory(dense_from_arrow("x", numbers).values, numbers.to_numpy())


@QUICK
@given(ID_LISTS, st.data())
def test_take_slice_and_concatenate_are_those_of_lists(rows: list[list[int]], data: st.DataObject) -> None:
    column = sparse(rows)
    assert len(column) == len(rows)
    order = data.draw(st.lists(st.integers(0, len(rows) - 1), max_size=10)) if rows else []
    assert lists_of(column.take(np.array(order, np.int64))) == [rows[i] for i in order]
    start, stop = sorted((data.draw(st.integers(0, len(rows))), data.draw(st.integers(0, len(rows)))))
    assert lists_of(column.slice(start, stop)) == rows[start:stop]
    parts = [column.slice(0, start), column.slice(start, stop), column.slice(stop, len(rows))]
    assert lists_of(concatenate(parts)) == rows


def test_take_slice_and_concatenate_of_numbers() -> None:
    column = Column(np.array([1.0, 2.0, 3.0]))
    assert column.take(np.array([2, 0])).values.tolist() == [3.0, 1.0]
    assert concatenate([column.slice(0, 1), column.slice(1, 3)]).values.tolist() == [1.0, 2.0, 3.0]
    assert len(column) == 3


@pytest.mark.parametrize(
    ("read", "array", "sentence"),
    [
        (
            dense_from_arrow,
            pa.array(["a"]),
            "column 'age': expected numbers, got string. Move it to features.sparse, or convert the column.",
        ),
        (
            dense_from_arrow,
            pa.array([[1.0]]),
            "column 'age': expected numbers, got list<item: double>. Move it to features.sparse, or convert the column.",
        ),
        (
            sparse_from_arrow,
            pa.array([1.0, None, 1.5]),
            "column 'age': expected ids: whole numbers, got 1.5. Add a bucketize op, or move it to features.dense.",
        ),
    ],
)
def test_other_kinds_are_refused(read: Any, array: pa.Array, sentence: str) -> None:
    with pytest.raises(DataError) as error:
        read("age", array)
    assert str(error.value).replace("element:", "item:") == sentence


UUIDS = [uuid.UUID(int=number << 96 | 77) for number in (1, 2**32 - 1)]
OTHERS: dict[str, tuple[pa.Array, list[Any]]] = {
    "UUID": (pa.array([one.bytes for one in UUIDS], pa.uuid()), [str(one) for one in UUIDS]),
    "bytes": (pa.array([b"abc", "\u00e9".encode()], pa.large_binary()), ["abc", "\u00e9"]),
    "bytes of one length": (pa.array([b"abcd", b"efgh"], pa.binary(4)), ["abcd", "efgh"]),
    "decimals": (pa.array([Decimal(2**53 + 1), Decimal(2**64 - 1)], pa.decimal128(38, 0)), [2**53 + 1, -1]),
    "whole decimals": (pa.array([Decimal(2**53), Decimal(2**53 + 1)], pa.decimal128(38, 9)), [2**53, 2**53 + 1]),
}


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("form", ["plain", "null", "list"])
def test_ids_of_other_types_are_those_of_their_text_or_integers(kind: str, form: str) -> None:
    array, plain = OTHERS[kind]
    given, expected = array.to_pylist(), plain
    if kind == "UUID":
        given = [one.bytes for one in UUIDS]
    if form == "null":
        given, expected = [given[0], None, given[1]], [plain[0], None, plain[1]]
    rows = pa.ListArray.from_arrays([0, 2], array) if form == "list" else pa.array(given, array.type)
    like = pa.array([expected]) if form == "list" else pa.array(expected)
    found, wanted = sparse_from_arrow("c", rows), sparse_from_arrow("c", like)
    assert found.values.tolist() == wanted.values.tolist()
    assert found.offsets.tolist() == wanted.offsets.tolist()


@pytest.mark.parametrize("value", [Decimal("1.5"), Decimal(2**64), Decimal(-(2**63) - 1)])
def test_a_decimal_that_is_no_id_is_refused(value: Decimal) -> None:
    with pytest.raises(DataError, match="column 'c': expected ids: whole numbers of 64 bits"):
        sparse_from_arrow("c", pa.array([Decimal(1), value], pa.decimal128(38, 2)))

"""Masks of filters equal Arrow's own filter, and choices narrow them."""

import duckdb
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyiceberg.schema import Schema
from pyiceberg.types import DoubleType, FloatType, LongType, NestedField, StringType

from storage.filters import check_filter, parse_filter
from storage.snapshot.row_filter import RowChoice, choose_rows, find_rows, keep_rows, make_mask

X, Y = pc.field("x"), pc.field("y")
EXPRESSIONS = {
    "some": X > 3, "none": X > 99, "all": Y.is_valid() | Y.is_null(), "null": X.is_null(), "true": pc.scalar(True),
    "false": pc.scalar(False), "list": ~Y.isin(["a", "b"]) & (X < 7), "prefix": pc.starts_with(Y, "c"),
}  # fmt: skip


@pytest.fixture
def rows() -> pa.RecordBatch:
    random = np.random.default_rng(2)
    x = pa.array(random.integers(0, 9, 500), mask=random.random(500) < 0.2)
    y = pa.array(random.choice(["a", "b", "cd"], 500).tolist(), mask=random.random(500) < 0.2)
    return pa.RecordBatch.from_arrays([x, y, pa.array(np.arange(500))], ["x", "y", "z"])


@pytest.mark.parametrize("kind", EXPRESSIONS)
@pytest.mark.parametrize("part", [slice(0, 500), slice(13, 77), slice(0, 0)], ids=["whole", "slice", "empty"])
def test_rows_are_those_of_arrows_filter(rows: pa.RecordBatch, kind: str, part: slice) -> None:
    some = rows.slice(part.start, part.stop - part.start)
    expected = pa.Table.from_batches([some]).filter(EXPRESSIONS[kind]).select(["z", "y"])
    assert keep_rows(some, EXPRESSIONS[kind], ["z", "y"]).to_pylist() == expected.to_pylist()
    assert (find_rows(some, EXPRESSIONS[kind]) is None) == (len(expected) == len(some))
    assert keep_rows(some, None, ["z"]) == some.select(["z"])


@pytest.mark.parametrize("kind", ["some", "none", "all"])
def test_a_choice_looks_at_the_rows_that_pass_the_filter(rows: pa.RecordBatch, kind: str) -> None:
    passing = pa.Table.from_batches([rows]).filter(EXPRESSIONS[kind])["z"].to_numpy()
    numbers = np.arange(len(passing)) + 40
    seen = []

    def choose(some: pa.RecordBatch, first: int) -> np.ndarray:
        seen.append((some.schema.names, some["z"].to_pylist()))
        return (np.arange(len(some)) + first) % 3 == 0

    mask, after = choose_rows(rows, find_rows(rows, EXPRESSIONS[kind]), RowChoice(["z"], choose), 40)
    assert seen == [(["z"], passing.tolist())]
    assert after == 40 + len(passing)
    found = rows if mask is None else rows.filter(mask)
    assert found["z"].to_pylist() == passing[numbers % 3 == 0].tolist()


@pytest.mark.parametrize(
    "text",
    [
        "x < 1e100", "x>=-1E100 and x<1.5e+3", "x in (1e3, 2e0)", "not (x = 25E-1)", "n < 1e100", "n >= 1e3", "n = 1.5E3",
        "f > 1e-3 or x = .5e1", "t = '1e3'", "t != 'it''s 1e3' and x > 1e-400",
    ],
)  # fmt: skip
def test_numbers_may_have_a_power_of_ten(text: str) -> None:
    """The rows of DuckDB, which knows such numbers."""
    values = [-1e300, -2.5, 0.0, 1e-9, 2.0, 2.5, 5.0, 1e3, 1500.0, 1e99, 1e100, 1e300]
    table = pa.table({
        "x": values, "n": [int(max(-9e18, min(9e18, value))) for value in values],
        "f": pa.array([max(-3e38, min(3e38, value)) for value in values], pa.float32()),
        "t": ["1e3", "1000", "it's 1e3", *"abcdefghi"],
    })  # fmt: skip
    schema = Schema(
        NestedField(1, "x", DoubleType()), NestedField(2, "n", LongType()), NestedField(3, "f", FloatType()),
        NestedField(4, "t", StringType()),
    )  # fmt: skip
    check_filter(text, schema)
    with duckdb.connect() as connection:
        connection.register("rows", table)
        expected = connection.sql(f"SELECT * FROM rows WHERE {text}").to_arrow_table()
    mask, _ = make_mask(parse_filter(text), schema)
    assert table.filter(mask).to_pydict() == expected.to_pydict()


def test_a_choice_of_all_leaves_the_mask(rows: pa.RecordBatch) -> None:
    every = RowChoice(["x"], lambda some, first: np.ones(len(some), bool))
    assert choose_rows(rows, None, every, 0) == (None, 500)
    mask = find_rows(rows, EXPRESSIONS["some"])
    assert mask is not None
    assert choose_rows(rows, mask, every, 0) == (mask, mask.true_count)

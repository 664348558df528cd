"""Masks of filters equal Arrow's own filter, and choices narrow them."""

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest

from storage.snapshot.row_filter import RowChoice, choose_rows, find_rows, keep_rows

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


def test_a_choice_of_all_leaves_the_mask(rows: pa.RecordBatch) -> None:
    every = RowChoice(["x"], lambda some, first: np.ones(len(some), bool))
    assert choose_rows(rows, None, every, 0) == (None, 500)
    mask = find_rows(rows, EXPRESSIONS["some"])
    assert mask is not None
    assert choose_rows(rows, mask, every, 0) == (mask, mask.true_count)

"""The contract of every op, checked against a few lines of Python that handle one row at a time."""

import math
import struct
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from pipeline.transforms.column import Column, concatenate
from pipeline.transforms.ops.op import ID_MAX, ID_MIN, Op

QUICK = settings(derandomize=True, max_examples=40, deadline=None, database=None)
MILLION = 1_000_000
MASK = 2**64 - 1

DENSE = st.floats()  # NaN, both infinities and denormal numbers among them
ID = st.integers(-3, 5) | st.sampled_from([ID_MIN, ID_MAX, 2**62 + 1, -(2**62) - 1]) | st.integers(ID_MIN, ID_MAX)
IDS = st.lists(ID, max_size=6) | st.lists(st.integers(0, 30), min_size=17, max_size=40)  # long enough to be sorted
SCORES = st.lists(st.floats(-9, 9) | st.floats(), max_size=6)
KINDS = {"dense": DENSE, "sparse": IDS, "scores": SCORES}
HARD: dict[str, list[Any]] = {
    "dense": [math.nan, math.inf, -math.inf, -0.0, 1e308, -3.5, 0.25, 1.0, 5.0],
    "sparse": [[], [ID_MIN, ID_MAX], [-1], [3, 3, 2**62 + 1], list(range(50)), [], [7, 3, 7], [1, 2], [2]],
    "scores": [[], [math.nan, 1.0], [math.inf], [1.0, -0.0, 2.5], [0.5] * 50, [2.0], [-1.0, 1e308, 1e308], [], [3.0]],
}


class Case(NamedTuple):
    """An op and its result for one row, a number or a list. `kinds` resolves "either" and "any number"."""

    op: Any
    row: Callable[..., Any]
    kinds: tuple[str, ...] = ()
    rows: Any = None
    """Strategy for a row's inputs, for ops that arbitrary values would rarely exercise."""

    @property
    def reads(self) -> tuple[str, ...]:
        return self.kinds or self.op.reads

    @property
    def strategy(self) -> Any:
        row = st.tuples(*(KINDS[kind] for kind in self.reads)) if self.rows is None else self.rows
        return st.lists(row, max_size=8)

    @property
    def hard_rows(self) -> list[tuple[Any, ...]]:
        """Rows of difficult values. Each additional input starts one row later, so that lists differ in length."""
        turned = [HARD[kind][i:] + HARD[kind][:i] for i, kind in enumerate(self.reads)]
        return list(zip(*turned, strict=True))


def column_of(kind: str, rows: list[Any]) -> Column:
    if kind == "dense":
        return Column(np.array(rows, np.float64))
    values = np.array([value for row in rows for value in row], np.int64 if kind == "sparse" else np.float64)
    return Column(values, np.cumsum([0, *map(len, rows)], dtype=np.int64))


def columns_of(case: Case, rows: list[tuple[Any, ...]]) -> list[Column]:
    return [column_of(kind, [row[i] for row in rows]) for i, kind in enumerate(case.reads)]


def rows_of(column: Column) -> list[Any]:
    if column.offsets is None:
        return column.values.tolist()
    assert column.offsets[0] == 0
    assert column.offsets[-1] == len(column.values)
    return [column.values[a:b].tolist() for a, b in zip(column.offsets[:-1], column.offsets[1:], strict=True)]


def lengths_of(column: Column) -> np.ndarray:
    """The length of each row's list."""
    assert column.offsets is not None
    return np.diff(column.offsets)


def apply(op: Op, *inputs: list[Any], counts: Counter[str] | None = None) -> list[Any]:
    """Applies an op to inputs given as rows. Numbers are dense, lists of integers are ids, other lists are scores."""
    columns = [column_of(_kind_of(rows), rows) for rows in inputs]
    return rows_of(op.apply(columns, Counter() if counts is None else counts))


def _kind_of(rows: list[Any]) -> str:
    if not any(isinstance(row, list) for row in rows):
        return "dense"
    return "scores" if any(isinstance(value, float) for row in rows for value in row) else "sparse"


def assert_same(made: list[Any], expected: list[Any]) -> None:
    if expected and isinstance(expected[0], list):
        assert [len(row) for row in made] == [len(row) for row in expected]
        made, expected = [v for row in made for v in row], [v for row in expected for v in row]
    if any(isinstance(value, float) for value in expected):
        np.testing.assert_allclose(made, expected, rtol=1e-12, atol=1e-12)
    else:
        assert made == expected


def assert_row_by_row(case: Case, rows: list[tuple[Any, ...]]) -> None:
    made = rows_of(case.op.apply(columns_of(case, rows), Counter()))
    assert_same(made, [case.row(*row) for row in rows])


def assert_contract(case: Case) -> None:
    """As many rows out as in, inputs unchanged and possibly read-only, same rows and counts in any chunks."""
    columns = columns_of(case, case.hard_rows)
    arrays = [array for column in columns for array in (column.values, column.offsets) if array is not None]
    before = [array.copy() for array in arrays]
    for array in arrays:
        array.flags.writeable = False
    counts, in_chunks = Counter[str](), Counter[str]()
    whole = case.op.apply(columns, counts)
    assert len(whole) == len(case.hard_rows)
    assert whole.kind == (columns[0].kind if case.op.makes == "same" else case.op.makes)
    assert whole.values.dtype == (np.int64 if whole.kind == "sparse" else np.float64)
    for chunk in (1, 2, 3, 7):
        in_chunks.clear()
        parts = [
            case.op.apply([column.slice(i, min(i + chunk, len(column))) for column in columns], in_chunks)
            for i in range(0, len(whole), chunk)
        ]
        np.testing.assert_equal(rows_of(concatenate(parts)), rows_of(whole))
        assert in_chunks == counts
    for old, new in zip(before, arrays, strict=True):
        np.testing.assert_array_equal(old, new)


def signed(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def mix(value: int) -> int:
    """folly's twang_mix64 on Python's unbounded integers."""
    key = value & MASK
    key = (~key + (key << 21)) & MASK
    key ^= key >> 24
    key = (key * 265) & MASK  # 1 + 8 + 256
    key ^= key >> 14
    key = (key * 21) & MASK  # 1 + 4 + 16
    key ^= key >> 28
    return (key + (key << 31)) & MASK


def chain(upper: int, lower: int) -> int:
    """folly's hash_128_to_64."""
    multiplier = 0x9DDFEA08EB382D69
    a = ((lower ^ upper) * multiplier) & MASK
    a ^= a >> 47
    b = ((upper ^ a) * multiplier) & MASK
    b ^= b >> 47
    return (b * multiplier) & MASK


def bits(value: float) -> int:
    """A number's 64 bits, with one form of NaN and one of zero."""
    return struct.unpack("<Q", struct.pack("<d", math.nan if math.isnan(value) else value + 0.0))[0]

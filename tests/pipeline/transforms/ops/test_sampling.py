"""Sampling against a hash on Python's integers."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.transforms.column import Column
from pipeline.transforms.ops.sampling import Sampling
from tests.pipeline.transforms.contract import DENSE, HARD, IDS, MASK, MILLION, QUICK, bits, chain, column_of, mix

KEYS = ("user", "score", "hour")
HARD_ROWS = list(zip(HARD["sparse"], HARD["scores"], HARD["dense"], strict=True))


def kept(row: tuple[Any, ...], rate: float, seed: int) -> bool:
    state = mix(seed & MASK)
    for key in row:
        for value in key if isinstance(key, list) else [key]:
            state = chain(state, mix(bits(value) if isinstance(value, float) else value))
        if isinstance(key, list):
            state = chain(state, mix(len(key)))
    return (state >> 11) / 2**53 < rate


def columns_of(rows: list[tuple[Any, ...]]) -> list[Column]:
    return [column_of(kind, [row[i] for row in rows]) for i, kind in enumerate(("sparse", "scores", "dense"))]


@QUICK
@given(
    rows=st.lists(st.tuples(IDS, st.lists(DENSE, max_size=3), DENSE), max_size=8),
    rate=st.floats(0, 1, exclude_min=True),
    seed=st.integers(-(2**63), 2**63 - 1),
)
@example(rows=HARD_ROWS, rate=0.5, seed=7)
def test_rows_one_by_one(rows: list[tuple[Any, ...]], rate: float, seed: int) -> None:
    made = Sampling(inputs=KEYS, rate=rate, seed=seed).keep(columns_of(rows))
    assert made.dtype == np.bool_
    assert made.tolist() == [kept(row, rate, seed) for row in rows]


def test_same_rows_in_any_chunks_from_read_only_columns() -> None:
    columns, sampling = columns_of(HARD_ROWS), Sampling(inputs=KEYS, rate=0.5, seed=3)
    for array in (array for column in columns for array in (column.values, column.offsets) if array is not None):
        array.flags.writeable = False
    counts, in_chunks = Counter[str](), Counter[str]()
    whole = sampling.keep(columns, counts)
    for chunk in (1, 2, 4):
        in_chunks.clear()
        starts = range(0, len(whole), chunk)
        parts = [
            sampling.keep([column.slice(i, min(i + chunk, len(whole))) for column in columns], in_chunks)
            for i in starts
        ]
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert in_chunks == counts == {"sampling rows": len(whole) - whole.sum()}


@pytest.mark.parametrize("rate", [0.001, 0.1, 0.5, 0.999, 1.0])
def test_the_rate_is_the_share_of_the_keys(rate: float) -> None:
    mask = Sampling(inputs=("user",), rate=rate, seed=11).keep([Column(np.arange(MILLION), np.arange(MILLION + 1))])
    assert abs(mask.mean() - rate) <= 5 * math.sqrt(rate * (1 - rate) / MILLION)


def test_seeds_choose_independently() -> None:
    users = Column(np.arange(100_000), np.arange(100_001))
    masks = [Sampling(inputs=("user",), rate=0.5, seed=seed).keep([users]) for seed in range(4)]
    assert np.abs(np.corrcoef(masks) - np.eye(4)).max() < 0.02


def test_choices_never_change() -> None:
    users = Column(np.arange(12), np.arange(13))
    assert np.flatnonzero(Sampling(inputs=("user",), rate=0.5, seed=1).keep([users])).tolist() == [7, 8, 9]


def test_equal_keys_are_kept_together() -> None:
    """Missing numbers are one key, and so are both zeros."""
    numbers = np.array([0.0, -0.0, np.nan, -np.nan])
    for seed in range(20):
        a, b, c, d = Sampling(inputs=("x",), rate=0.5, seed=seed).keep([Column(numbers)])
        assert (a, c) == (b, d)


def test_rows_without_a_key_are_drawn_one_by_one() -> None:
    """As one user they would all be kept, or all be dropped."""
    none = Column(np.empty(0, np.int64), np.zeros(100_001, np.int64))
    item = Column(np.arange(100_000), np.arange(100_001))
    for seed in range(3):
        sampling = Sampling(inputs=("user",), rate=0.1, seed=seed)
        whole = sampling.keep([none], place=10**12)
        assert abs(whole.mean() - 0.1) <= 5 * math.sqrt(0.09 / 100_000)
        parts = [sampling.keep([none.slice(i, i + 5_000)], place=10**12 + i) for i in range(0, 100_000, 5_000)]
        assert np.concatenate(parts).tolist() == whole.tolist()
        assert sampling.keep([item], place=7).tolist() == sampling.keep([item]).tolist()  # others keep their hash
        both = Sampling(inputs=("user", "item"), rate=0.1, seed=seed)
        assert both.keep([none, item], place=7).tolist() == both.keep([none, item]).tolist()


def test_a_key_of_a_million_ids() -> None:
    ids = Column(np.arange(MILLION), np.array([0, MILLION]))
    assert Sampling(inputs=("user",), rate=1.0).keep([ids]).tolist() == [True]


@pytest.mark.parametrize(
    "fields",
    [
        {"inputs": ("a",), "rate": 0.0},
        {"inputs": ("a",), "rate": 1.1},
        {"inputs": (), "rate": 0.5},
        {"inputs": ("a",), "rate": 0.5, "seed": 2**63},
        {"inputs": ("a",), "rate": 0.5, "output": "b"},
    ],
)
def test_fields_out_of_range_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Sampling(**fields)

"""Fitted values agree with NumPy and exact counts. The same rows give the same fit, bit for bit."""

import math
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.errors import DataError
from pipeline.transforms.ops import PlannedOp
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import FeatureSchema

QUICK = settings(derandomize=True, max_examples=15, deadline=None, database=None)
COLUMNS = pa.schema({"label": pa.int64(), "x": pa.float64(), "y": pa.float64(), "ids": pa.list_(pa.int64())})
MOMENTS = [{"columns": ["x"], "transforms": [{"kind": "standardise"}]}]
BUCKETS = {"columns": "x", "name": "bucket", "transforms": [{"kind": "bucketize", "quantiles": 8}]}
VOCABULARY = {"columns": "ids", "transforms": [{"kind": "map_id", "size": 5}]}
ODD = [math.nan, math.inf, -math.inf, 1e300, -3.5e38, None]


def plan(*sparse: Any, dense: Any = MOMENTS, derived: Any = ()) -> Plan:
    return build_plan(
        FeatureSchema.model_validate({"dense": dense, "sparse": sparse or [VOCABULARY], "derived": derived}), COLUMNS
    )


WHOLE = plan(BUCKETS, VOCABULARY)


def table(x: Any = None, ids: Any = None, y: Any = None) -> pa.Table:
    rows = len(next(values for values in (x, ids, y) if values is not None))
    columns = {"x": x, "y": y, "ids": ids}
    return pa.table({k: pa.array([None] * rows if v is None else v, COLUMNS.field(k).type) for k, v in columns.items()})


def fitted(made: Plan, *chunks: pa.Table) -> dict[str, PlannedOp]:
    return {op.output: op for op in made.fit(lambda: chunks).ops}


def spread(values: Any) -> tuple[float, float]:
    op: Any = fitted(plan(), table(x=values))["x"]
    return op.mean, op.std


@QUICK
@given(
    st.lists(st.lists(st.floats(-1e6, 1e6) | st.sampled_from(ODD), max_size=9), max_size=5),
    st.lists(st.lists(st.lists(st.integers(-3, 6), max_size=4) | st.none(), max_size=9), max_size=5),
)
def test_numbers_and_vocabularies_are_those_of_numpy_and_a_counter(xs: Any, ids: Any) -> None:
    chunks = [table(x=x) for x in xs] + [table(ids=i) for i in ids]
    ops: dict[str, Any] = fitted(WHOLE, *chunks)
    finite = np.array([v for x in xs for v in x if v is not None and abs(v) < 1e38])
    mean, std = (finite.mean(), finite.std()) if len(finite) else (0.0, 0.0)
    assert ops["x"].mean == pytest.approx(mean, rel=1e-9, abs=1e-6)
    assert ops["x"].std == pytest.approx(std if std > 0.0 else 1.0, rel=1e-9, abs=1e-6)
    counted = Counter(id_ for chunk in ids for row in chunk for id_ in row or [])
    assert ops["ids"].vocabulary == tuple(sorted(counted, key=lambda id_: (-counted[id_], id_))[:5])
    borders = ops["bucket"].borders
    assert list(borders) == sorted(set(borders))
    assert borders == (0.0,) if not len(finite) else finite.min() <= min(borders) <= max(borders) <= finite.max()


@pytest.mark.parametrize("value", [0.1, 1e-30, -123456.789, 3.4e38, 0.0])
def test_a_constant_column_has_no_spread(value: float) -> None:
    assert spread(np.full(70_001, value)) == (value, 1.0)  # rounding would give 1e-17, and a division by it is noise


def test_small_spread_on_a_large_mean() -> None:
    values = 1e9 + np.tile([0.0, 1e-3, 2e-3], 50_000)
    mean, std = spread(values)
    assert mean == pytest.approx(1e9 + 1e-3, rel=1e-15)
    assert std == pytest.approx(np.std(np.tile([0.0, 1e-3, 2e-3], 9)), rel=1e-4)  # 1e9 itself has steps of 1e-7


@pytest.mark.parametrize("rows", [0, 3])
def test_a_fit_without_values_is_harmless(rows: int) -> None:
    ops: dict[str, Any] = fitted(WHOLE, table(x=[None] * rows, ids=[None] * rows))
    assert (ops["x"].mean, ops["x"].std) == (0.0, 1.0)
    assert ops["bucket"].borders == (0.0,)
    assert ops["ids"].vocabulary == ()
    assert fitted(WHOLE) == ops  # not a single chunk


def test_quantiles_part_the_rows_evenly() -> None:
    random = np.random.default_rng(4)
    for values in (
        random.normal(size=40_000),
        random.lognormal(sigma=3.0, size=40_000),
        np.sort(random.random(40_000)),
    ):
        for quantiles in (2, 10, 100):
            sparse = {**BUCKETS, "transforms": [{"kind": "bucketize", "quantiles": quantiles}]}
            op: Any = fitted(plan(sparse, dense=()), table(x=np.concatenate([values, [np.inf, np.nan, -1e300]])))[
                "bucket"
            ]
            assert len(op.borders) == quantiles - 1
            ranks = np.searchsorted(np.sort(values), op.borders) / len(values)
            assert np.abs(ranks - np.arange(1, quantiles) / quantiles).max() < 0.01


def test_ties_leave_fewer_borders() -> None:
    op: Any = fitted(plan(BUCKETS, dense=()), table(x=[1.0] * 900 + [2.0] * 100))["bucket"]
    assert op.borders[0] == 1.0
    assert len(op.borders) <= 2
    assert op.ids_below(None) == 8


def test_vocabularies_leave_out_rare_ids_and_order_ties_by_id() -> None:
    big = 2**63 - 1
    ids = [[3, 3], [big, -5, 3], [big, -5, 7], None, []]
    rare = {"columns": "ids", "transforms": [{"kind": "map_id", "size": 9, "min_count": 2}]}
    op: Any = fitted(plan(rare, dense=()), table(ids=ids))["ids"]
    assert op.vocabulary == (3, -5, big)


def test_the_same_rows_give_the_same_bits_in_any_chunks() -> None:
    random = np.random.default_rng(2)
    rows = table(
        x=random.lognormal(sigma=2.0, size=50_000),
        y=random.normal(size=50_000),
        ids=[row.tolist() for row in random.zipf(1.2, (50_000, 3))],
    )
    two = [*MOMENTS, {"columns": "y", "transforms": [{"kind": "log"}, {"kind": "standardise"}]}]
    made = plan(BUCKETS, {**VOCABULARY, "transforms": [{"kind": "map_id", "size": 20_000}]}, dense=two)
    whole = made.fit(lambda: [rows])

    def cut(size: int) -> list[pa.Table]:
        return [rows.slice(i, size) for i in range(0, 50_000, size)]

    for size in (50_000, 7_001, 1_000):
        assert made.fit(partial(cut, size)).hash == whole.hash


def test_a_fit_after_a_fit_takes_a_second_pass() -> None:
    passes = []
    steps = [{"kind": "standardise"}, {"kind": "log"}, {"kind": "standardise"}]
    derived = [{"kind": "map_id", "size": 3, "inputs": ["ids"], "output": "known"}]
    known = {"columns": "known", "transforms": [{"kind": "map_id", "size": 2}]}
    made = plan(known, dense=[{"columns": "x", "transforms": steps}], derived=derived)
    values = [1.0, 2.0, 9.0]
    done = made.fit(lambda: passes.append(1) or [table(x=values, ids=[[8, 8, 8], [9, 9], [7, 8]])])
    z = np.log1p(np.maximum((values - np.mean(values)) / np.std(values), 0))
    ops: dict[str, Any] = {op.output: op for op in done.ops}
    assert (ops["x"].mean, ops["x"].std) == pytest.approx((z.mean(), z.std()))
    assert (ops["known:derived"].vocabulary, ops["known"].vocabulary) == ((8, 9, 7), (0, 1))
    assert len(passes) == 2
    assert made.fit_columns() == {"x", "ids"}


def test_equal_ops_are_fitted_once() -> None:
    twice = plan(
        dense=[*MOMENTS, {"columns": "x", "name": "again", "transforms": [{"kind": "standardise"}, {"kind": "log"}]}]
    )
    ops: dict[str, Any] = fitted(twice, table(x=[1.0, 3.0]))
    assert [(ops[name].mean, ops[name].std, ops[name].output) for name in ("x", "again:0")] == [(2.0, 1.0, "x"), (2.0, 1.0, "again:0")]  # fmt: skip


def test_an_error_while_rows_are_read_is_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(DataError) as error:
        plan().fit(lambda: [pa.table({"x": ["a"], "ids": [[1]]})], tmp_path)
    assert "column 'x': expected numbers" in str(error.value)
    assert list(tmp_path.iterdir()) == []

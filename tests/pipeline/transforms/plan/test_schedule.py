"""How ops are run: shared and fused, with the columns and counts of the same ops run one by one."""

from collections import Counter
from typing import Any

import numba
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.transforms.column import Column, from_arrow
from pipeline.transforms.kernels import fused
from pipeline.transforms.kernels.fused import first_hash_clamp, floor_all, floored, fusable, run_in_one_pass
from pipeline.transforms.kernels.hashing import sigrid_hash
from pipeline.transforms.ops import AnyOp
from pipeline.transforms.ops.dense import Clamp, FillNull
from pipeline.transforms.ops.discrete import Bucketize
from pipeline.transforms.ops.op import ID_MAX, ID_MIN
from pipeline.transforms.ops.sparse import FirstX, SigridHash
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.plan.schedule import Schedule
from pipeline.transforms.schema import FeatureSchema

QUICK = settings(derandomize=True, max_examples=60, deadline=None, database=None)
HASH = {"kind": "sigrid_hash", "size": 50}
FIRST = {"kind": "first_x", "limit": 2}
COLUMNS = pa.schema({"label": pa.int64(), "a": pa.list_(pa.int64()), "b": pa.list_(pa.int64()), "x": pa.float64()})
ID = st.integers(ID_MIN, ID_MAX) | st.integers(-3, 3)
LISTS = st.lists(st.lists(ID, max_size=6), max_size=12)
STEPS = st.sampled_from(
    [
        FIRST,
        {"kind": "first_x", "limit": 4},
        HASH,
        {"kind": "sigrid_hash", "size": 1, "salt": -7},
        {"kind": "sigrid_hash", "size": 2**63 - 1, "salt": 5},
        {"kind": "clamp", "low": -1, "high": 20},
        {"kind": "clamp", "low": 10, "high": 11},
        {"kind": "fill_null", "value": 3},
        {"kind": "enumerate"},
    ]
)


def one_by_one(ops: tuple[AnyOp, ...], rows: pa.Table) -> tuple[dict[str, Column], Counter[str]]:
    """Runs every op by itself, in order. A schedule must give the same."""
    counts = Counter[str]()
    columns: dict[str, Any] = {}
    for op in ops:
        for name in op.inputs:
            if name not in columns:
                column, _, kind = name.rpartition(":")
                columns[name] = from_arrow(column, rows.column(column).combine_chunks(), kind)
        columns[op.output] = op.apply([columns[name] for name in op.inputs], counts)
    return columns, counts


def plan(derived: list[Any], sparse: list[Any], dense: Any = ()) -> Plan:
    return build_plan(FeatureSchema.model_validate({"derived": derived, "dense": dense, "sparse": sparse}), COLUMNS)


def steps_of(made: Plan) -> list[str]:
    return [step.name for step in made.schedule.steps]


@QUICK
@given(LISTS, LISTS, st.lists(st.lists(STEPS, min_size=1, max_size=4), min_size=1, max_size=5), st.booleans())
def test_any_plan_makes_and_counts_what_its_ops_do_one_by_one(
    left: Any, right: Any, chains: list[Any], crossed: bool
) -> None:
    size = min(len(left), len(right))
    rows = pa.table({name: pa.array(v[:size], pa.list_(pa.int64())) for name, v in (("a", left), ("b", right))})
    derived = [{**step, "inputs": ["b"], "output": f"d{i}"} for i, (step, *_) in enumerate(chains)]
    derived.append({"kind": "cartesian", "inputs": ["d0", "a"], "output": "cross"})
    inputs = ["a" if i % 2 else "b" for i in range(len(chains))]
    groups = [
        {"columns": [column], "name": f"f{i}", "transforms": [*chain, {"kind": "clamp", "low": 0, "high": 40}]}
        for i, (column, chain) in enumerate(zip(inputs, chains, strict=True))
    ]
    groups += (
        [{"columns": ["d*", "cross"], "transforms": [FIRST, HASH]}]
        if crossed
        else [{"columns": ["d*", "cross"], "transforms": [HASH]}]
    )
    made = plan(derived, groups)
    expected, expected_counts = one_by_one(made.ops, rows)
    counts = Counter[str]()
    transformed = made.apply(rows, counts)
    assert counts == expected_counts
    for feature, column in zip(made.sparse, transformed.sparse, strict=True):
        np.testing.assert_array_equal(column.values, expected[feature.name].values)
        np.testing.assert_array_equal(column.offsets, expected[feature.name].offsets)


def test_equal_chains_run_once_and_count_for_each() -> None:
    made = plan(
        [{**FIRST, "inputs": ["a"], "output": "short"}],
        [
            {"columns": ["a"], "transforms": [FIRST, HASH]},
            {"columns": ["a"], "name": "again", "table": "other", "transforms": [FIRST, HASH]},
            {"columns": ["short"], "transforms": [HASH]},
        ],
    )
    assert steps_of(made) == ["first_x+sigrid_hash"]
    counts = Counter[str]()
    rows = made.apply(pa.table({"a": [[1, 2, 3], None]}), counts)
    assert [column.values.tolist() for column in rows.sparse] == [rows.sparse[0].values.tolist()] * 3
    assert counts == {"first_x a:0": 1, "first_x again:0": 1, "first_x short:derived": 1}
    assert len(made.ops) == 6  # the plan lists the requested ops


@pytest.mark.parametrize(
    ("transforms", "steps"),
    [
        ([FIRST, HASH], ["first_x+sigrid_hash"]),
        ([HASH, {"kind": "clamp", "low": 0, "high": 9}], ["sigrid_hash+clamp"]),
        ([FIRST, {"kind": "clamp", "low": 0, "high": 9}], ["first_x+clamp"]),
        ([FIRST, HASH, {"kind": "clamp", "low": 0, "high": 9}], ["first_x+sigrid_hash+clamp"]),
        ([HASH, FIRST], ["sigrid_hash", "first_x"]),
        ([HASH, HASH], ["sigrid_hash", "sigrid_hash"]),
        ([FIRST, {"kind": "fill_null"}, HASH], ["first_x", "fill_null", "sigrid_hash"]),
    ],
)
def test_neighbours_share_a_pass(transforms: list[Any], steps: list[str]) -> None:
    assert steps_of(plan([], [{"columns": "a", "transforms": transforms}])) == steps


def test_columns_that_others_read_are_kept() -> None:
    made = plan(
        [{**FIRST, "inputs": ["a"], "output": "short"}],
        [{"columns": ["short"], "transforms": [HASH]}, {"columns": "short", "name": "s", "transforms": [{"kind": "enumerate"}, HASH]}],
    )  # fmt: skip
    assert steps_of(made) == ["first_x", "sigrid_hash", "enumerate", "sigrid_hash"]
    direct = plan([{**HASH, "inputs": ["a"], "output": "h"}], [{"columns": "h"}, {"columns": "h", "name": "c", "transforms": [{"kind": "clamp", "low": 0, "high": 5}]}])  # fmt: skip
    assert steps_of(direct) == ["sigrid_hash", "clamp"]
    rows = direct.apply(pa.table({"a": [[3, 4, 5]]})).sparse
    assert rows[1].values.tolist() == [min(value, 5) for value in rows[0].values.tolist()]


def test_only_requested_ops_run() -> None:
    ops = (
        SigridHash(size=9, inputs=("a:sparse",), output="a"),
        Bucketize(borders=(1.0,), inputs=("x:dense",), output="x"),
    )
    assert [step.name for step in Schedule(ops, ["x"]).steps] == ["bucketize"]
    assert Schedule(ops, ["x:dense"]).run(pa.table({"x": [2.0]}), Counter(), Counter())["x:dense"].values.tolist() == [
        2.0
    ]


def test_costs_are_reported_by_kind_of_op() -> None:
    made = plan([], [{"columns": ["a", "b"], "transforms": [FIRST, HASH]}], dense=[{"columns": "x", "transforms": [{"kind": "log"}]}])  # fmt: skip
    seconds = Counter[str]()
    rows = pa.table({"a": [[1]] * 9, "b": [[2]] * 9, "x": [1.0] * 9})
    made.apply(rows, seconds=seconds)
    assert seconds.keys() == {"arrow", "log", "first_x+sigrid_hash"}
    assert all(value > 0.0 for value in seconds.values())
    before = dict(seconds)
    made.apply(rows, Counter(), seconds)
    assert all(seconds[name] > before[name] for name in before)


def test_running_does_not_change_the_plan() -> None:
    made = plan([], [{"columns": ["a"], "transforms": [FIRST, HASH]}])
    before = made.hash, made.model_dump_json()
    made.apply(pa.table({"a": [[1]]}))
    assert (made.hash, made.model_dump_json()) == before
    assert made == plan([], [{"columns": ["a"], "transforms": [FIRST, HASH]}])
    other = made.model_copy(update={"ops": (made.ops[0], SigridHash(size=3, inputs=made.ops[1].inputs, output="a"))})
    assert made.apply(pa.table({"a": [[1]]})).sparse[0].values.tolist() != [0]
    assert other.apply(pa.table({"a": [[1]]})).sparse[0].values.tolist() == SigridHash(size=3).apply([Column(np.array([1]), np.array([0, 1]))], Counter()).values.tolist()  # fmt: skip


def test_lists_longer_than_a_block_and_stretches_of_short_ones() -> None:
    random = np.random.default_rng(3)
    lengths = np.concatenate([random.integers(0, 4, 5_000), [9_000, 0, 1], random.integers(0, 40, 3_000)])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    values = random.integers(ID_MIN, ID_MAX, offsets[-1])
    for limit in (1, 3, 17, ID_MAX):
        ops = [FirstX(limit=limit), SigridHash(size=1_000, salt=9), Clamp(low=5, high=900)]
        column, counts = Column(values, offsets), Counter[str]()
        for op in ops:
            column = op.apply([column], counts)
        fused, changed = run_in_one_pass(ops, Column(values, offsets))
        np.testing.assert_array_equal(fused.values, column.values)
        np.testing.assert_array_equal(fused.offsets, column.offsets)
        assert changed == [counts["first_x value"], 0, counts["clamp value"]]


@pytest.mark.parametrize("size", [2, 3, 7, 97, 4_096, 99_991, 2**31 - 1, 2**40 + 1, 2**62 + 1, 2**63 - 1])
def test_the_remainder_without_a_division(size: int) -> None:
    random = np.random.default_rng(size % 1_000)
    near = [q * size + d for q in (-3, -1, 0, 1, 2, 2**62 // size) for d in (-2, -1, 0, 1)]
    values = [*random.integers(ID_MIN, ID_MAX, 3_000).tolist(), *near, ID_MIN, ID_MIN + 1, ID_MAX, ID_MAX - 1]
    values = [value for value in values if ID_MIN <= value <= ID_MAX]
    expected = [value % size for value in values]
    assert [floored(value, size, 1.0 / size) for value in values] == expected
    ids = np.array(values)
    floor_all(ids, size)
    assert ids.tolist() == expected


def test_the_hash_is_that_of_the_op() -> None:
    values = np.random.default_rng(1).integers(ID_MIN, ID_MAX, 5_000)
    for size, salt in ((1, 0), (2, -1), (100, 0), (2**63 - 1, ID_MIN)):
        ids, _, _ = first_hash_clamp(values, np.array([0, 5_000]), ID_MAX, size, salt, ID_MIN, ID_MAX)
        np.testing.assert_array_equal(ids, sigrid_hash(values, salt, size))


@pytest.mark.parametrize("converts", [True, False])
def test_both_ways_to_hash_give_the_same_bits(converts: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the one for other processors."""
    monkeypatch.setattr(fused, "CONVERTS", converts)
    hash_clamp: Any = numba.njit(fused._hash_clamp.py_func)  # type: ignore[attr-defined]
    values = np.random.default_rng(1).integers(ID_MIN, ID_MAX, 300)
    for size, salt in ((2, 1), (100, 0), (2**63 - 1, 5)):
        ids = values.copy()
        hash_clamp(ids, size, salt, ID_MIN, ID_MAX)
        np.testing.assert_array_equal(ids, sigrid_hash(values, salt, size))


def test_fusable_in_one_order_only() -> None:
    first, hashed, clamp, fill = FirstX(limit=1), SigridHash(size=2), Clamp(low=0, high=1), FillNull()
    assert fusable(first, hashed)
    assert fusable(first, clamp)
    assert fusable(hashed, clamp)
    assert not any(map(fusable, (hashed, clamp, clamp, first, fill), (first, hashed, clamp, fill, clamp)))

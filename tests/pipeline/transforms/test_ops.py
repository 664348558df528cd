"""All ops, each against a few lines of Python that handle one row at a time, and the contract of every op."""

import pickle
from collections import Counter
from typing import Any, get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from pipeline.transforms.ops import AnyOp, known_kinds
from pipeline.transforms.ops.dense import Clamp, FillNull, Log
from pipeline.transforms.ops.op import Op
from pipeline.transforms.ops.sparse import FirstX, SigridHash
from tests.pipeline.transforms.contract import (
    QUICK,
    Case,
    apply,
    assert_contract,
    assert_row_by_row,
    columns_of,
    rows_of,
)
from tests.pipeline.transforms.ops import test_dense, test_discrete, test_lists, test_score, test_sparse

EXAMPLES: dict[str, Case] = {
    **test_dense.EXAMPLES,
    **test_discrete.EXAMPLES,
    **test_lists.EXAMPLES,
    **test_score.EXAMPLES,
    **test_sparse.EXAMPLES,
}
MAKING_IDS = {name: case for name, case in EXAMPLES.items() if "sparse" in (case.op.makes, *case.kinds)}


def test_every_op_has_an_example() -> None:
    kinds = {cls.model_fields["kind"].default for cls in get_args(get_args(AnyOp)[0])}
    assert kinds == known_kinds().keys() == {case.op.kind for case in EXAMPLES.values()}


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_row_by_row(name: str) -> None:
    case = EXAMPLES[name]

    @QUICK
    @given(case.strategy)
    @example(case.hard_rows)
    def check(rows: list[tuple[Any, ...]]) -> None:
        assert_row_by_row(case, rows)

    check()


@pytest.mark.nightly
@pytest.mark.parametrize("name", EXAMPLES)
def test_op_keeps_its_contract(name: str) -> None:
    assert_contract(EXAMPLES[name])


@pytest.mark.parametrize("name", MAKING_IDS)
def test_ids_stay_below_the_declared_bound(name: str) -> None:
    case = MAKING_IDS[name]
    bound = case.op.ids_below(*(50 if kind == "sparse" else None for kind in case.reads))
    ids = st.lists(st.integers(0, 49), max_size=4)

    @QUICK
    @given(st.lists(st.tuples(*(ids if kind == "sparse" else st.floats() for kind in case.reads)), max_size=6))
    def check(rows: list[tuple[Any, ...]]) -> None:
        made = rows_of(case.op.apply(columns_of(case, rows), Counter()))
        assert bound is None or all(0 <= i < bound for row in made for i in row)

    check()


@QUICK
@given(
    rows=st.lists(st.lists(st.integers(0, 49), max_size=4), min_size=1, max_size=6),
    op=st.one_of(
        st.builds(lambda a, b: Clamp(low=min(a, b), high=max(a, b)), st.floats(-9, 99), st.floats(-9, 99)),
        st.builds(FillNull, value=st.floats(-3, 99)),
        st.builds(SigridHash, size=st.integers(1, 99)),
        st.builds(FirstX, limit=st.integers(1, 3)),
    ),
)
@example(rows=[[3]], op=Clamp(low=60, high=100))
@example(rows=[[0]], op=Clamp(low=-0.5, high=-0.5))
def test_bounds_hold_whatever_the_fields(rows: list[list[int]], op: Op) -> None:
    bound = op.ids_below(50)
    assert bound is None or all(0 <= i < bound for ids in apply(op, rows) for i in ids)


@pytest.mark.parametrize("name", EXAMPLES)
def test_ops_can_be_saved(name: str) -> None:
    """As JSON and as a pickle, also after they were applied."""
    case = EXAMPLES[name]
    case.op.apply(columns_of(case, case.hard_rows), Counter())
    assert TypeAdapter(AnyOp).validate_json(case.op.model_dump_json()) == case.op
    assert pickle.loads(pickle.dumps(case.op)) == case.op
    assert case.op.bound(("a", "b"), "c").output == "c"


def test_only_learning_ops_can_be_unfinished() -> None:
    learning = {kind for kind, cls in known_kinds().items() if cls.learns}
    assert learning == {"bucketize", "map_id", "standardise"}
    assert all(case.op.fitted for case in EXAMPLES.values())


def test_ops_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        Log().output = "other"  # type: ignore[misc]


def test_unknown_kinds_are_refused_with_the_known_ones() -> None:
    with pytest.raises(ValidationError, match="'box_cox', 'bucketize', 'cartesian'"):
        TypeAdapter(AnyOp).validate_python({"kind": "sigridhash"})

"""Fits that a plan carries over from the plan before it."""

from typing import Any

import pyarrow as pa

from pipeline.transforms.ops.dense import Clamp, FillNull, Standardise
from pipeline.transforms.ops.discrete import Bucketize
from pipeline.transforms.ops.sparse import MapId, SigridHash
from pipeline.transforms.plan.carry_over import carry_over_fit, unchanged_features
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import DenseGroup, FeatureSchema, SparseGroup

OLD = pa.table({"a": [1.0, 3.0, 5.0, 7.0], "b": [0.0, 0.0, 1.0, 1.0], "u": [7, 7, 8, 9], "v": [1, 2, 3, 4]})
NEW = pa.table({"a": [100.0, 300.0], "b": [5.0, 6.0], "u": [50, 51], "v": [9, 9]})


def plan(fit_on: pa.Table | None, dense: list[tuple[str, tuple[Any, ...]]], sparse: dict[str, tuple[Any, ...]]) -> Plan:
    schema = FeatureSchema(
        dense=tuple(DenseGroup(columns=(name,), transforms=ops) for name, ops in dense),
        sparse=tuple(SparseGroup(columns=(name,), transforms=ops) for name, ops in sparse.items()),
    )
    built = build_plan(schema, OLD.append_column("label", pa.array([0, 1, 0, 1])).schema)
    return built if fit_on is None else built.fit(lambda: [fit_on])


SCALED = (Standardise(), FillNull())
USERS = {"u": (MapId(size=4),)}


def test_the_same_ops_keep_their_fit():
    old = plan(OLD, [("a", SCALED)], USERS)
    assert carry_over_fit(plan(None, [("a", SCALED)], USERS), old) == old
    assert old != plan(NEW, [("a", SCALED)], USERS)


def test_new_ops_are_fitted_on_new_rows():
    old = plan(OLD, [("a", SCALED)], USERS)
    wanted = plan(None, [("a", SCALED), ("b", SCALED)], USERS | {"v": (MapId(size=2),)})
    half = carry_over_fit(wanted, old)
    assert {op.output for op in half.unfitted()} == {op.output for op in wanted.unfitted()} - {
        op.output for op in plan(None, [("a", SCALED)], USERS).unfitted()
    }
    whole = half.fit(lambda: [NEW])
    fresh = {op.output: op for op in plan(NEW, [("b", SCALED)], {"v": (MapId(size=2),)}).ops}
    known = {op.output: op for op in old.ops}
    for op in whole.ops:
        assert op == known.get(op.output, fresh.get(op.output))
    assert unchanged_features(whole, old) == {"a", "u"}


def test_a_changed_op_is_not_carried_over():
    """Nor is an op after it, because it was fitted on other values."""
    old = plan(OLD, [("a", (Clamp(low=0, high=4), *SCALED))], {"u": (MapId(size=4, min_count=2),)})
    new = carry_over_fit(plan(None, [("a", (Clamp(low=0, high=5), *SCALED))], USERS), old)
    assert len(new.unfitted()) == 2
    assert unchanged_features(new.fit(lambda: [OLD]), old) == set()


def test_weights_of_ids_leave_tables_and_fits_as_they_are():
    """Where one feature gets weights, a mean becomes one, too. Neither changes what a row of a table means."""
    table = OLD.append_column("label", pa.array([0, 1, 0, 1])).append_column("u_scores", pa.array([[1.0]] * 4))

    def groups(weights: str | None) -> Plan:
        users = SparseGroup(columns=("u",), transforms=(SigridHash(size=8),), weights=weights)
        others = SparseGroup(
            columns=("v",), pooling="mean", transforms=(MapId(size=4, unknown=4), Clamp(low=0, high=3))
        )
        return build_plan(FeatureSchema(sparse=(users, others)), table.schema)

    plain, weighted = groups(None).fit(lambda: [OLD]), groups("u_scores")
    taught = carry_over_fit(weighted, plain)
    assert taught.unfitted() == []
    assert [op.kind for op in taught.ops] == [op.kind for op in weighted.ops]
    assert taught == weighted.fit(lambda: [table])
    assert unchanged_features(taught, plain) == unchanged_features(plain, taught) == {"u", "v"}
    assert carry_over_fit(groups(None), taught) == plain


def test_a_hash_of_another_size_means_something_else():
    old, new = (plan(None, [], {"u": (SigridHash(size=size),), "v": (SigridHash(size=8),)}) for size in (8, 16))
    assert unchanged_features(new, old) == {"v"}


def test_a_vocabulary_may_be_added_to():
    old = plan(None, [], {"u": (MapId(vocabulary=(7, 8)),)})
    assert unchanged_features(plan(None, [], {"u": (MapId(vocabulary=(7, 8, 9)),)}), old) == {"u"}
    assert unchanged_features(plan(None, [], {"u": (MapId(vocabulary=(8, 7, 9)),)}), old) == set()
    assert unchanged_features(plan(None, [], {"u": (MapId(vocabulary=(7, 8, 9), unknown=3),)}), old) == set()


def test_quantiles_are_carried_over():
    ops = {"a": (Bucketize(quantiles=3),)}
    old = plan(OLD, [], ops)
    assert carry_over_fit(plan(None, [], ops), old) == old


def test_a_fit_on_an_absent_column_is_not_carried_over():
    """The older plan fitted a mean of 0 on nulls. The new table has the column."""
    schema = FeatureSchema.model_validate(
        {
            "dense": [{"columns": "a"}, {"columns": "new", "on_missing": "default"}],
            "sparse": [{"columns": "u", "transforms": [{"kind": "clamp", "low": 0, "high": 9}]}],
        }
    )
    before = pa.table({"a": [1.0, 2.0, 3.0], "u": [1, 2, 3], "label": [0, 1, 0]})
    after = before.append_column("new", pa.array([1e6, 1.1e6, 1.2e6]))
    old = build_plan(schema, before.schema).fit(lambda: [before])
    assert old.absent == ("new",)
    half = carry_over_fit(build_plan(schema, after.schema), old)
    assert unchanged_features(half, old) == {"a", "u"}
    fresh = build_plan(schema, after.schema)
    assert half.fit(lambda: [after]) == fresh.fit(lambda: [after])  # `a` has the same fit from the same rows
    assert carry_over_fit(build_plan(schema, before.schema), old) == old
    assert unchanged_features(old, old) == {"a", "u", "new"}

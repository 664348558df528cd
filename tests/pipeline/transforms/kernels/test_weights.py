"""Ids come with their weights, row by row, whatever the lists look like; and what a config may not ask for."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.transforms.kernels.weights import unpack
from pipeline.transforms.plan.dedup import DedupPlan
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import FeatureSchema
from tests.pipeline.bags import sparse_tensor

QUICK = settings(derandomize=True, max_examples=80, deadline=None, database=None)
SIZE, LIMIT = 97, 3
HASH = {"kind": "sigrid_hash", "size": SIZE}
COLUMNS = pa.schema(
    {
        "label": pa.int64(), "ids": pa.list_(pa.int64()), "ids_scores": pa.list_(pa.float64()),
        "other": pa.list_(pa.int64()), "user": pa.int64(),
    }
)  # fmt: skip
WEIGHTED = {"columns": "ids", "weights": "{column}_scores", "transforms": [{"kind": "first_x", "limit": LIMIT}, HASH]}
OTHER = {"columns": "other", "pooling": "mean", "transforms": [HASH]}
USER = {"columns": "user", "transforms": [HASH]}


def plan(*sparse: dict[str, Any], **more: Any) -> Plan:
    return build_plan(FeatureSchema.model_validate({"sparse": sparse, **more}), COLUMNS)


def table(rows: list[tuple[Any, Any, Any]]) -> pa.Table:
    columns = dict(zip(("ids", "ids_scores", "other"), zip(*rows, strict=True), strict=True)) if rows else {}
    return pa.table({one.name: pa.array(columns.get(one.name, [None] * len(rows)), one.type) for one in COLUMNS})


def as_float32(number: float | None) -> float:
    if number is None or math.isnan(number) or abs(number) > float(np.finfo(np.float32).max):
        return 0.0
    return float(np.float32(number))


def expected_weights(ids: Any, scores: Any, mean: bool) -> list[float]:
    ids, scores = ids or [], scores or []
    if len(ids) != len(scores):
        return [0.0] * min(len(ids), LIMIT)
    kept = [as_float32(score) for score in scores[:LIMIT]]
    if not mean:
        return kept
    total = math.fsum(map(abs, kept))
    return [weight / total if total else 0.0 for weight in kept]


SCORES = st.sampled_from([0.25, -1.5, 3.0, 0.0, 1e300, -math.inf, math.nan, None])
ROWS = st.lists(
    st.tuples(
        st.none() | st.lists(st.integers(-5, 2**62), max_size=5), st.none() | st.lists(SCORES, max_size=5),
        st.none() | st.lists(st.integers(0, 9), max_size=4),
    ),
    max_size=6,
)  # fmt: skip


@pytest.mark.parametrize("mean", [False, True])
def test_each_id_has_its_weight(mean: bool) -> None:
    group = WEIGHTED | {"pooling": "mean" if mean else "sum"}
    weighted, plain = plan(group, OTHER, USER), plan({**WEIGHTED, "weights": None}, {**OTHER, "pooling": "sum"}, USER)

    @QUICK
    @given(ROWS)
    @example([([7, 8, 9, 10], [1.0, -1.0, 0.0, 5.0], [1, 2]), ([7], [2.0, 3.0], None), ([7], [0.5], [1, 2, 3, 4])])
    def check(rows: list[tuple[Any, Any, Any]]) -> None:
        counts: Counter[str] = Counter()
        made = weighted.apply(table(rows), counts).sparse
        ids = plain.apply(table(rows)).sparse
        for column, without in zip(weighted.ids(made), ids, strict=True):
            assert column.values.tolist() == without.values.tolist()
            assert column.offsets.tolist() == without.offsets.tolist()  # type: ignore[union-attr]
        expected = [weight for ids, scores, _ in rows for weight in expected_weights(ids, scores, mean)]
        np.testing.assert_allclose(unpack(made[0].values)[1], expected, rtol=1e-6)
        shares = [1 / len(other) for *_, other in rows for _ in other or []]
        np.testing.assert_allclose(unpack(made[1].values)[1], shares, rtol=1e-6)
        sparse = sparse_tensor(["ids", "other", "user"], made, [0, 1])
        np.testing.assert_allclose(sparse.weights(), [*expected, *shares, *[1.0] * len(ids[2].values)], rtol=1e-6)
        assert sparse.values().tolist() == [id_ for column in ids for id_ in column.values.tolist()]
        if not mean:
            lost = sum(
                len(kept) if len(ids or []) != len(scores or []) else sum(not math.isfinite(s if s is not None else math.nan) or abs(s) > 1e299 for s in (scores or [])[:LIMIT])
                for ids, scores, _ in rows if (kept := (ids or [])[:LIMIT]) is not None
            )  # fmt: skip
            assert counts["weigh ids"] == lost

    check()


@QUICK
@given(ROWS)
def test_runs_of_equal_rows_end_with_a_changed_weight(drawn: list[tuple[Any, Any, Any]]) -> None:
    rows = [row for row in drawn for _ in range(2)]
    whole, sessions = plan(WEIGHTED, OTHER), np.zeros(len(rows), np.int64)
    own, runs = DedupPlan(whole, ["ids"]).apply(table(rows), sessions, Counter(), Counter())
    made, other = whole.apply(table(rows)).sparse
    again = runs.columns[0].take(runs.inverse)
    assert again.values.tolist() == made.values.tolist()
    assert own.sparse[0].values.tolist() == other.values.tolist()


def test_features_say_whether_their_ids_have_weights() -> None:
    assert [feature.weighted for feature in plan(OTHER, USER).sparse] == [False, False]
    assert [feature.weighted for feature in plan(WEIGHTED, OTHER, USER).sparse] == [True, True, False]


def test_scores_may_be_derived() -> None:
    doubled = {
        "kind": "compute_score", "function": "add", "output": "twice",
        "inputs": ["ids", "ids_scores", "ids", "ids_scores"],
    }  # fmt: skip
    made = plan(WEIGHTED | {"weights": "twice"}, derived=[doubled]).apply(table([([4, 5], [0.5, 2.0], None)])).sparse
    assert unpack(made[0].values)[1].tolist() == [1.0, 4.0]


def test_a_column_that_may_be_missing_takes_its_weights_with_it() -> None:
    made = plan(WEIGHTED | {"columns": "late", "on_missing": "default"}, USER)
    assert set(made.absent) == {"late", "late_scores"}
    assert len(made.apply(table([([1], [1.0], None)])).sparse[0].values) == 0


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        ({"weights": "ids_score"}, r"weights of 'ids', input 'ids_score': expected a column .*Closest: ids_scores"),
        ({"weights": "other_ids"}, r"weights of 'ids', input 'other_ids': expected a column"),
        ({"weights": "user"}, r"column 'user': expected lists of numbers for scores, got int64"),
        ({"weights": "label"}, r"weights of 'ids': expected inputs other than the label, got 'label'"),
        ({"weights": "ids"}, r"column 'ids': expected ids or scores, got both"),
        (
            {"transforms": [{"kind": "map_id", "vocabulary": [1, 2]}]},
            r"map_id on 'ids': expected transforms that keep the places of ids, which have weights, got one that may not",
        ),
        ({"transforms": [{"kind": "fill_null", "value": 1}, HASH]}, r"fill_null on 'ids': expected transforms that keep"),
        ({"transforms": [{"kind": "sigrid_hash", "size": 2**33}]}, r"'ids': expected at most 4294967296 ids with weights"),
    ],
)  # fmt: skip
def test_what_is_refused(group: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence):
        plan(WEIGHTED | group, USER)

"""Features made once for a run of equal rows match the features of each row bit for bit, in as few runs as possible."""

from collections import Counter
from itertools import groupby
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.transforms.column import Column
from pipeline.transforms.plan.dedup import DedupPlan, run_starts
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import FeatureSchema

QUICK = settings(derandomize=True, max_examples=60, deadline=None, database=None)
HASH = {"kind": "sigrid_hash", "size": 50}
SCHEMA = pa.schema(
    {
        "label": pa.int64(), "items": pa.list_(pa.int64()), "words": pa.list_(pa.string()), "user": pa.string(),
        "age": pa.float64(), "scores": pa.list_(pa.float64()),
    }
)  # fmt: skip
GROUP = ("words", "pairs", "best", "age_bucket")
"""They also read `items`, which is a feature itself."""
IDS = st.none() | st.lists(st.none() | st.integers(0, 3), max_size=3)
ROWS = st.lists(
    st.tuples(
        st.integers(0, 2), IDS, st.none() | st.lists(st.sampled_from(["a", "b"]), max_size=2),
        st.sampled_from(["u", "v", None]), st.sampled_from([1.0, float("nan"), None]), st.integers(1, 3),
    ),
    max_size=10,
)  # fmt: skip
"""Session, columns, and how often the row occurs."""


def plan() -> Plan:
    schema = {
        "derived": [
            {"kind": "cartesian", "inputs": ["items", "words"], "output": "pairs"},
            {"kind": "bucketize", "inputs": ["age"], "output": "age_bucket", "borders": [0.5, 1.5]},
            {"kind": "first_x", "inputs": ["items"], "output": "best", "limit": 1},
        ],
        "dense": [{"columns": ["age"], "transforms": [{"kind": "fill_null"}]}],
        "sparse": [
            {"columns": ["items", "words", "user", "pairs", "best"], "transforms": [HASH]},
            {"columns": ["age_bucket"], "transforms": []},
        ],
    }
    return build_plan(FeatureSchema.model_validate(schema), SCHEMA)


def table(rows: list[tuple[object, ...]]) -> pa.Table:
    return pa.table(
        {
            "label": pa.array([0] * len(rows), pa.int64()),
            "items": pa.array([row[1] for row in rows], SCHEMA.field("items").type),
            "words": pa.array([row[2] for row in rows], SCHEMA.field("words").type),
            "user": pa.array([row[3] for row in rows], pa.string()),
            "age": pa.array([row[4] for row in rows], pa.float64()),
            "scores": pa.array([[]] * len(rows), SCHEMA.field("scores").type),
        }
    )


@QUICK
@given(drawn=ROWS)
def test_features_made_once_equal_those_made_for_every_row(drawn: list[tuple[Any, ...]]) -> None:
    rows = [row for row in drawn for _ in range(row[5])]
    whole = plan().apply(table(rows))
    sessions = np.array([row[0] for row in rows], np.int64)
    own, runs = DedupPlan(plan(), GROUP).apply(table(rows), sessions, Counter(), Counter())
    np.testing.assert_array_equal(own.dense, whole.dense)
    shared = [column.take(runs.inverse) for column in runs.columns]
    names = [feature.name for feature in plan().sparse]
    made = dict(zip([name for name in names if name not in GROUP], own.sparse, strict=True))
    made |= dict(zip([name for name in names if name in GROUP], shared, strict=True))
    for name, column in zip(names, whole.sparse, strict=True):
        np.testing.assert_array_equal(made[name].values, column.values)
        np.testing.assert_array_equal(made[name].offsets, column.offsets)
    expected = [list(group) for _, group in groupby(rows, key=content_key)]
    assert [len(column) for column in runs.columns] == [len(expected)] * len(GROUP)
    assert np.bincount(runs.inverse, minlength=len(expected)).tolist() == [len(group) for group in expected]


def content_key(row: tuple[object, ...]) -> tuple[object, ...]:
    """Returns what the ops see of a row: no nulls inside lists, and an empty list for a null one."""
    session, items, words, _, age, _ = row
    known = tuple(item for item in items or () if item is not None)  # type: ignore[attr-defined]
    return session, known, tuple(words or ()), "none" if age is None or age != age else age  # type: ignore[arg-type]


def test_scores_and_numbers_are_compared_by_their_bits() -> None:
    scores = Column(np.array([np.nan, 1.0, np.nan, 1.0, np.nan, 2.0]), np.array([0, 2, 4, 6]))
    numbers = Column(np.array([np.nan, np.nan, 0.0]))
    assert run_starts(np.zeros(3, np.int64), {"scores": scores}).tolist() == [True, False, True]
    assert run_starts(np.zeros(3, np.int64), {"numbers": numbers}).tolist() == [True, False, True]
    assert run_starts(np.array([5, 6, 6]), {}).tolist() == [True, True, False]
    assert run_starts(np.zeros(0, np.int64), {"scores": Column(np.zeros(0), np.zeros(1, np.int64))}).tolist() == []

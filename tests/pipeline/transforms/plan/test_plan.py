"""Plans: raw rows to tensors, fitted numbers, and what they refuse before the first row is read."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from pipeline.errors import ConfigError
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import FeatureSchema
from tests.pipeline.transforms.contract import lengths_of

HASH = {"kind": "sigrid_hash", "size": 97}
COLUMNS = pa.schema(
    {
        "label": pa.int64(),
        "age": pa.int64(),
        "price": pa.float64(),
        "country": pa.string(),
        "items": pa.list_(pa.int64()),
        "user": pa.int64(),
        "when": pa.timestamp("us"),
        "user id": pa.int64(),
    }
)


def schema(dense: Any = (), sparse: Any = ({"columns": "user", "transforms": [HASH]},)) -> FeatureSchema:
    return FeatureSchema.model_validate({"dense": dense, "sparse": sparse})


def plan(dense: Any = (), sparse: Any = ({"columns": "user", "transforms": [HASH]},)) -> Plan:
    return build_plan(schema(dense, sparse), COLUMNS)


def table(**columns: list[Any]) -> pa.Table:
    rows = max(map(len, columns.values()))
    return pa.table({f.name: pa.array(columns.get(f.name, [None] * rows), f.type) for f in COLUMNS})


FULL = plan(
    dense=[
        {"columns": ["age"], "transforms": [{"kind": "log"}, {"kind": "standardise"}, {"kind": "fill_null"}]},
        {"columns": ["price"]},
    ],
    sparse=[
        {"columns": ["items"], "transforms": [{"kind": "first_x", "limit": 2}, HASH], "pooling": "mean"},
        {"columns": ["country"], "transforms": [HASH]},
        {"columns": ["age"], "name": "{column}_bucket", "transforms": [{"kind": "bucketize", "borders": [18, 65]}]},
        {"columns": ["age"], "name": "age_id", "transforms": [{"kind": "clamp", "low": 0, "high": 99}]},
    ],
)
AGES, PRICES = [3, None, 70, -5, 18, 40], [1.5, math.nan, math.inf, None, -1e300, 4.0]
ROWS = table(
    age=AGES,
    price=PRICES,
    country=["DE", "", None, "日本", "DE", "ü"],
    items=[[5, 6, 7], [], None, [None, 2**62 + 1], [-1], [0]],
)


def test_a_plan_names_what_it_reads_and_makes() -> None:
    assert FULL.raw == {
        "age": ("dense", "sparse"),
        "price": ("dense",),
        "items": ("sparse",),
        "country": ("sparse",),
    }
    assert FULL.columns == ["age", "price", "items", "country"]
    assert FULL.dense == ("age", "price")
    made = [(feature.name, feature.table, feature.rows, feature.pooling) for feature in FULL.sparse]
    assert made == [
        ("items", "items", 97, "mean"),
        ("country", "country", 97, "sum"),
        ("age_bucket", "age_bucket", 3, "sum"),
        ("age_id", "age_id", 100, "sum"),
    ]
    assert (len(FULL.unfitted()), FULL.fit_columns()) == (2, frozenset({"age", "price"}))


def test_fitted_numbers_are_those_of_pandas_and_numpy() -> None:
    fitted = FULL.fit(lambda: [ROWS])
    age, price = (op for op in fitted.ops if op.kind == "standardise")
    logs = pd.Series([math.log1p(max(value, 0)) for value in AGES if value is not None])  # the op's input
    prices = np.array([1.5, 4.0])  # without infinite and missing values and those that float32 cannot hold
    assert (age.mean, age.std) == pytest.approx((logs.mean(), logs.std(ddof=0)), rel=1e-12)
    assert (price.mean, price.std) == pytest.approx((prices.mean(), prices.std()), rel=1e-12)
    assert fitted.unfitted() == []
    assert len(FULL.unfitted()) == 2  # fitting returns a new plan


@pytest.mark.parametrize("chunk", [1, 2, 4])
def test_fitting_in_chunks(chunk: int) -> None:
    chunks = [ROWS.slice(start, chunk) for start in range(0, len(ROWS), chunk)]
    whole, parts = FULL.fit(lambda: [ROWS]), FULL.fit(lambda: chunks)
    for one, other in zip(whole.unfitted() or whole.ops, parts.ops, strict=True):
        if one.kind == "standardise":
            assert (one.mean, one.std) == pytest.approx((other.mean, other.std), rel=1e-12)


def test_a_fit_after_a_fit_takes_a_second_pass() -> None:
    twice = plan(
        [{"columns": "price", "transforms": [{"kind": "standardise"}, {"kind": "log"}, {"kind": "standardise"}]}]
    )
    values, passes = [1.0, 2.0, 9.0], []
    fitted = twice.fit(lambda: passes.append(1) or [table(price=values)])
    z = np.log1p(np.maximum((values - np.mean(values)) / np.std(values), 0))
    assert (fitted.ops[2].mean, fitted.ops[2].std) == pytest.approx((z.mean(), z.std()))
    assert len(passes) == 2
    np.testing.assert_allclose(fitted.apply(table(price=values)).dense[:, 0], (z - z.mean()) / z.std(), rtol=1e-6)


def test_rows_without_values_leave_numbers_alone() -> None:
    fitted = FULL.fit(lambda: [table(age=[None], price=[None])])
    assert [(op.mean, op.std) for op in fitted.ops if op.kind == "standardise"] == [(0.0, 1.0)] * 2


def test_transformed_rows() -> None:
    counts = Counter[str]()
    made = FULL.fit(lambda: [ROWS]).apply(ROWS, counts)
    assert (made.dense.dtype, made.dense.shape, len(made)) == (np.dtype(np.float32), (6, 2), 6)
    assert np.isfinite(made.dense).all()
    assert made.dense[1, 0] == 0.0  # a missing age, filled after standardising
    lengths = {f.name: lengths_of(c).tolist() for f, c in zip(FULL.sparse, made.sparse, strict=True)}
    assert lengths == {
        "items": [2, 0, 0, 1, 1, 1],
        "country": [1, 1, 0, 1, 1, 1],
        "age_bucket": [1, 0, 1, 1, 1, 1],
        "age_id": [1, 0, 1, 1, 1, 1],
    }
    assert made.sparse[2].values.tolist() == [0, 2, 0, 0, 1]
    assert made.sparse[3].values.tolist() == [3, 70, 0, 18, 40]
    assert made.sparse[1].values[0] == made.sparse[1].values[3]  # DE and DE
    assert counts == {
        "log age:0": 1,
        "fill_null age": 1,
        "fill_null price": 2,
        "not_finite price": 2,
        "first_x items:0": 1,
        "clamp age_id": 1,
    }


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_chunks_record_batches_and_a_saved_plan_make_the_same_rows(chunk: int) -> None:
    fitted = FULL.fit(lambda: [ROWS])
    saved = Plan.model_validate_json(fitted.model_dump_json())
    assert saved == fitted
    assert saved.hash == fitted.hash != FULL.hash
    whole = fitted.apply(ROWS)
    split = pa.concat_tables([ROWS.slice(start, chunk) for start in range(0, 6, chunk)])
    assert split.column("age").num_chunks > 1
    parts = [saved.apply(batch) for batch in split.to_batches()]
    for made in (saved.apply(split), *([parts[0]] if len(parts) == 1 else [])):
        np.testing.assert_array_equal(made.dense, whole.dense)
    np.testing.assert_array_equal(np.concatenate([part.dense for part in parts]), whole.dense)
    for i, column in enumerate(whole.sparse):
        np.testing.assert_array_equal(np.concatenate([part.sparse[i].values for part in parts]), column.values)
        np.testing.assert_array_equal(
            np.concatenate([lengths_of(part.sparse[i]) for part in parts]), lengths_of(column)
        )


def test_no_rows_make_no_rows() -> None:
    made = FULL.fit(lambda: [ROWS]).apply(ROWS.slice(0, 0))
    assert made.dense.shape == (0, 2)
    assert [len(column) for column in made.sparse] == [0, 0, 0, 0]


def test_the_hash_distinguishes_plans() -> None:
    assert plan().hash == plan().hash
    other = plan(sparse=[{"columns": "user", "transforms": [HASH | {"salt": 1}]}])
    assert other.hash != plan().hash


def test_a_number_may_be_filled_and_clamped_before_it_is_bucketized() -> None:
    steps = [
        {"kind": "fill_null", "value": 30},
        {"kind": "clamp", "low": 0, "high": 50},
        {"kind": "bucketize", "borders": [18, 40]},
    ]
    made = plan(sparse=[{"columns": "price", "transforms": steps}]).apply(table(price=[None, 1e9, 3.0]))
    assert made.sparse[0].values.tolist() == [1, 2, 0]


def test_features_may_share_a_table() -> None:
    shared = plan(sparse=[{"columns": ["user", "items"], "table": "people", "transforms": [HASH]}])
    assert [(feature.name, feature.table) for feature in shared.sparse] == [("user", "people"), ("items", "people")]


@pytest.mark.parametrize("pattern", ["*"])
def test_a_pattern_takes_the_columns_in_their_order(pattern: str) -> None:
    small = pa.schema({"b": pa.int64(), "a": pa.int64(), "label_": pa.int64()})
    made = build_plan(schema(sparse=[{"columns": pattern, "transforms": [HASH]}]), small)
    assert [feature.name for feature in made.sparse] == ["b", "a", "label_"]


def refused(dense: Any = (), sparse: Any = ({"columns": "user", "transforms": [HASH]},)) -> str:
    with pytest.raises(ConfigError) as error:
        plan(dense, sparse)
    return str(error.value).replace("element:", "item:")


@pytest.mark.parametrize(
    ("columns", "transforms", "sentence"),
    [
        (
            "usr",
            [HASH],
            "features.sparse column 'usr': expected a column of the table, got none of that name. "
            "Closest: user, user id. Correct the name.",
        ),
        (
            "user",
            [{"kind": "first_x", "limit": 3}],
            "features.sparse 'user': expected bounded ids, got ids of any size. "
            "End its transforms with sigrid_hash, bucketize or clamp.",
        ),
        (
            "when",
            [HASH],
            "column 'when': expected integers or strings for a sparse feature, got timestamp[us]. "
            "Add a bucketize op, or convert the column.",
        ),
        (
            "age",
            [HASH, {"kind": "bucketize", "borders": [1]}],
            "bucketize on 'age': expected a dense input, got a sparse input. Change the order of its transforms.",
        ),
        (
            "age",
            [{"kind": "log"}],
            "feature 'age': expected sparse values after the last op, got dense values. Move it to features.dense.",
        ),
        (
            "age",
            [HASH | {"inputs": ["user"]}],
            "sigrid_hash on 'age': expected an op without `inputs` and `output`, got one of them. "
            "Remove them: each op of a group reads the output of the previous one.",
        ),
        (
            ["user", "user"],
            [HASH, HASH | {"output": "x"}],
            "sigrid_hash on 'user': expected an op without `inputs` and `output`, got one of them. "
            "Remove them: each op of a group reads the output of the previous one.",
        ),
        (
            "user id",
            [HASH],
            "feature 'user id': expected a name of letters, digits and _, got another. Set the group's `name`.",
        ),
        (
            "label",
            [HASH],
            "features: expected features other than the label, got 'label'. Remove the label from the patterns.",
        ),
    ],
)
def test_sparse_features_are_checked_early(columns: Any, transforms: Any, sentence: str) -> None:
    assert refused(sparse=[{"columns": columns, "transforms": transforms}]) == sentence


@pytest.mark.parametrize(
    ("group", "sentence"),
    [
        (
            {"columns": "country"},
            "column 'country': expected numbers for a dense feature, got string. "
            "Move it to features.sparse, or convert the column.",
        ),
        (
            {"columns": "items"},
            "column 'items': expected numbers for a dense feature, got list<item: int64>. "
            "Move it to features.sparse, or convert the column.",
        ),
        (
            {"columns": "num_*"},
            "features.dense column 'num_*': expected a column of the table, got none of that name. "
            "Closest: when, user, items, user id, country, price, label, age. Correct the name.",
        ),
        (
            {"columns": "age", "transforms": [{"kind": "bucketize", "borders": [1]}]},
            "feature 'age': expected dense values after the last op, got sparse values. Move it to features.sparse.",
        ),
        (
            {"columns": "label"},
            "features: expected features other than the label, got 'label'. Remove the label from the patterns.",
        ),
    ],
)
def test_dense_features_are_checked_early(group: Any, sentence: str) -> None:
    assert refused(dense=[group]) == sentence


@pytest.mark.parametrize(
    ("sparse", "sentence"),
    [
        (
            [{"columns": "user", "transforms": [HASH]}, {"columns": "user", "transforms": [HASH]}],
            "features: expected each feature name once, got twice: user. Set the group's `name`, such as "
            "'{column}_bucket'.",
        ),
        (
            [
                {"columns": "user", "table": "ids", "transforms": [HASH]},
                {"columns": "items", "table": "ids", "transforms": [HASH | {"size": 5}]},
            ],
            "table 'ids': expected one size for all its features, got sizes [5, 97]. Give them the same bound.",
        ),
        (
            [{"columns": "user", "table": "a.b", "transforms": [HASH]}],
            "table 'a.b': expected a name of letters, digits and _, got another. Set the group's `table`.",
        ),
    ],
)
def test_groups_are_checked_against_each_other(sparse: Any, sentence: str) -> None:
    assert refused(sparse=sparse) == sentence


def test_features_of_one_table_are_pooled_alike() -> None:
    hashed = [{"kind": "sigrid_hash", "size": 10}]
    groups = [
        {"columns": [name], "table": "ids", "pooling": kind, "transforms": hashed}
        for name, kind in (("a", "sum"), ("b", "mean"))
    ]
    with pytest.raises(ConfigError) as caught:
        build_plan(FeatureSchema.model_validate({"sparse": groups}), pa.schema([("a", pa.int64()), ("b", pa.int64())]))
    assert (
        str(caught.value)
        == "table 'ids': expected one pooling for all its features, got mean and sum. Give them the same."
    )

"""Absent columns act like nulls, and requests need not send them."""

from collections import Counter
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from pipeline.errors import ColumnError
from pipeline.inference.request import columns_of
from pipeline.transforms.plan.dedup import DedupPlan
from pipeline.transforms.plan.plan import Plan, build_plan
from pipeline.transforms.schema import FeatureSchema

HASH = {"kind": "sigrid_hash", "size": 97}
TABLE = pa.schema({"label": pa.int64(), "age": pa.float64(), "user": pa.int64(), "items": pa.list_(pa.int64())})
FILL = [{"kind": "fill_null", "value": 7}]
BUCKET = [{"kind": "fill_null", "value": -1}, {"kind": "bucketize", "borders": [0.0, 1.0]}]


def features(on_missing: str = "default") -> FeatureSchema:
    more: dict[str, Any] = {"on_missing": on_missing}
    return FeatureSchema.model_validate(
        {
            "dense": [{"columns": ["age"]}, {"columns": ["height"], "transforms": FILL, **more}, {"columns": ["width"], **more}],
            "sparse": [
                {"columns": ["user", "item*", "tags"], "transforms": [HASH], "pooling": "mean", **more},
                {"columns": ["height"], "name": "bucket", "transforms": BUCKET, **more},
                {"columns": ["height"], "name": "hashed", "transforms": [HASH], **more},
            ],
        }
    )  # fmt: skip


ROWS = pa.table({"label": [0, 1], "age": [1.0, 3.0], "user": [5, 5], "items": [[1, 2], None]}, TABLE)


def plan() -> Plan:
    return build_plan(features(), TABLE).fit(lambda: [ROWS])


def test_absent_columns_act_like_nulls() -> None:
    made = plan()
    assert set(made.absent) == {"height", "width", "tags"}
    assert made.columns == ["age", "user", "items"]
    wide = TABLE.append(pa.field("height", pa.int64())).append(pa.field("width", pa.float64()))
    wide = wide.append(pa.field("tags", pa.list_(pa.string())))
    nulls = pa.Table.from_pylist(ROWS.to_pylist(), wide)
    whole = build_plan(features("fail"), wide).fit(lambda: [nulls])
    one, other = made.apply(ROWS), whole.apply(nulls)
    assert np.array_equal(one.dense, other.dense)
    assert one.dense[:, 1].tolist() == [7.0, 7.0]
    assert one.dense[:, 2].tolist() == [0.0, 0.0]
    for ours, theirs in zip(one.sparse, other.sparse, strict=True):
        assert np.array_equal(ours.values, theirs.values)
        assert np.array_equal(ours.offsets, theirs.offsets)
    assert made.hash != whole.hash


def test_a_later_column_of_the_name_is_ignored() -> None:
    made = Plan.model_validate_json(plan().model_dump_json())
    later = ROWS.append_column("height", pa.array([1.0, 2.0])).append_column("tags", pa.array([[1], [2]]))
    assert np.array_equal(made.apply(later).dense, made.apply(ROWS).dense)
    assert made.apply(later.to_batches()[0]).sparse[2].values.tolist() == []
    assert columns_of(made, TABLE) == {"age": "double", "user": "long", "items": "list<long>"}


def test_dedup_accepts_absent_columns() -> None:
    made = plan()
    rows, runs = DedupPlan(made, ("tags", "user")).apply(ROWS, np.zeros(2, np.int64), Counter(), Counter())
    assert runs.inverse.tolist() == [0, 0]
    assert [len(column) for column in runs.columns] == [1, 1]
    assert np.array_equal(rows.dense, made.apply(ROWS).dense)


def test_a_missing_column_is_refused_without_default_and_for_patterns() -> None:
    with pytest.raises(ColumnError, match=r"^features\.dense column 'height': expected a column of the table"):
        build_plan(features("fail"), TABLE)
    pattern = {"sparse": [{"columns": ["tag*"], "transforms": [HASH], "on_missing": "default"}]}
    with pytest.raises(ColumnError, match=r"^features\.sparse column 'tag\*': expected a column of the table"):
        build_plan(FeatureSchema.model_validate(pattern), TABLE)


def test_plans_without_absent_columns_keep_their_hash() -> None:
    whole = build_plan(FeatureSchema.model_validate({"sparse": [{"columns": "user", "transforms": [HASH]}]}), TABLE)
    before = {key: value for key, value in whole.model_dump(mode="json").items() if key != "absent"}
    assert Plan.model_validate(before).hash == whole.hash
    assert whole.hash != whole.model_copy(update={"absent": ("user",)}).hash

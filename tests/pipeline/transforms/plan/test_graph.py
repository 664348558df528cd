"""Derived columns: what they may read, the order they are made in, and what is refused before the first row."""

from collections import Counter
from typing import Any

import pyarrow as pa
import pytest

from pipeline.errors import ColumnError, ConfigError
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
        "weights": pa.list_(pa.float64()),
        "counts": pa.list_(pa.int32()),
        "user": pa.int64(),
        "when": pa.timestamp("us"),
    }
)
CROSS = {"kind": "cartesian", "inputs": ["country", "items"], "output": "country_x_items"}
SHORT = {"kind": "first_x", "limit": 1, "inputs": ["items"], "output": "first_item"}
PAIR = {"kind": "cartesian", "inputs": ["first_item", "user"], "output": "item_x_user"}
HOUR = {"kind": "get_local_hour", "inputs": ["when"], "output": "hour"}
SCORE = {"kind": "compute_score", "function": "mean", "inputs": ["weights"], "output": "mean_weight"}
ANY = {"columns": "user", "transforms": [HASH]}


def plan(derived: list[Any], dense: Any = (), sparse: Any = (ANY,)) -> Plan:
    return build_plan(FeatureSchema.model_validate({"derived": derived, "dense": dense, "sparse": sparse}), COLUMNS)


def hashed(*names: str) -> list[Any]:
    return [{"columns": list(names), "transforms": [HASH]}]


ROWS = pa.table(
    {
        "age": pa.array([30, None, 50]),
        "price": [1.0, None, 3.0],
        "country": ["DE", None, "FR"],
        "items": [[7, 8], [9], None],
        "weights": [[0.5, 1.5], [], None],
        "counts": pa.array([[1], [2, 3], None], pa.list_(pa.int32())),
        "user": [1, 2, 3],
        "when": pa.array([0, 3_600_000_000 * 25, None], pa.timestamp("us")),
    }
)


def test_derived_columns_become_features_like_any_column() -> None:
    made = plan(
        [PAIR, HOUR, SCORE, SHORT],  # declared before its input
        dense=[{"columns": "mean_weight", "transforms": [{"kind": "fill_null", "value": -1.0}]}],
        sparse=[*hashed("item_x_user"), {"columns": "hour", "pooling": "mean"}],
    )
    assert made.dense == ("mean_weight",)
    assert [(f.name, f.table, f.rows) for f in made.sparse] == [
        ("item_x_user", "item_x_user", 97),
        ("hour", "hour", 24),
    ]
    assert made.raw == {"weights": ("scores",), "items": ("sparse",), "user": ("sparse",), "when": ("dense",)}
    assert [op.output for op in made.ops] == [
        "mean_weight:derived", "mean_weight", "first_item:derived", "item_x_user:derived", "item_x_user", "hour:derived",
    ]  # fmt: skip
    assert Plan.model_validate_json(made.model_dump_json()) == made
    counts = Counter[str]()
    rows = made.apply(ROWS, counts)
    assert rows.dense[:, 0].tolist() == [1.0, 0.0, 0.0]  # the mean of nothing is 0, and it is counted
    assert counts == {"compute_score mean_weight:derived": 2, "first_x first_item:derived": 1}
    assert [lengths_of(column).tolist() for column in rows.sparse] == [[1, 1, 0], [1, 1, 0]]
    assert rows.sparse[1].values.tolist() == [0, 1]


def test_patterns_take_derived_columns_after_those_of_the_table() -> None:
    made = plan([{**CROSS, "output": "cat_x"}, {**SHORT, "output": "cat_y"}], sparse=hashed("user", "cat_?"))
    assert [feature.name for feature in made.sparse] == ["user", "cat_x", "cat_y"]


def test_ops_of_any_kind_read_numbers_as_numbers_and_lists_and_text_as_ids() -> None:
    fill = {"kind": "fill_null", "value": 3}
    derived = [{**fill, "inputs": [name], "output": f"{name}_"} for name in ("age", "country", "items")]
    made = plan(derived, dense=[{"columns": "age_"}], sparse=hashed("country_", "items_"))
    assert made.raw == {"age": ("dense",), "country": ("sparse",), "items": ("sparse",)}


def test_a_feature_may_be_an_unchanged_column() -> None:
    made = plan([HOUR], dense=[{"columns": "price", "name": "p", "transforms": []}], sparse=[{"columns": "hour"}])
    assert (made.dense, made.direct) == (("p",), {"p": "price:dense", "hour": "hour:derived"})
    counts = Counter[str]()
    assert made.apply(ROWS, counts).dense[:, 0].tolist() == [1.0, 0.0, 3.0]
    assert counts == {"not_finite p": 1}


def test_a_group_may_start_with_scores_or_times() -> None:
    mean = {"kind": "compute_score", "function": "mean"}
    made = plan([], [{"columns": "weights", "transforms": [mean]}], [{"columns": "when", "transforms": [{"kind": "get_local_hour"}]}])  # fmt: skip
    assert made.raw == {"weights": ("scores",), "when": ("dense",)}
    rows = made.apply(ROWS)
    assert (rows.dense[:, 0].tolist(), rows.sparse[0].values.tolist()) == ([1.0, 0.0, 0.0], [0, 1])


def test_integers_may_be_scores() -> None:
    made = plan([{**SCORE, "inputs": ["counts"]}], dense=[{"columns": "mean_weight", "transforms": []}])
    assert made.apply(ROWS).dense[:, 0].tolist() == [1.0, 2.5, 0.0]


@pytest.mark.parametrize(
    ("derived", "sparse", "sentence"),
    [
        (
            [{**CROSS, "inputs": ["countri", "items"]}],
            hashed("country_x_items"),
            "cartesian of 'country_x_items', input 'countri': expected a column of the table, got none of that name. "
            "Closest: country, counts, country_x_items. Correct the name.",
        ),
        (
            [{**SHORT, "inputs": ["b"], "output": "a"}, {**SHORT, "inputs": ["c"], "output": "b"}, {**SHORT, "inputs": ["a"], "output": "c"}],
            hashed("a"),
            "features.derived: expected ops without a cycle, got a -> b -> c -> a. "
            "Remove one of its inputs.",
        ),
        (
            [{**SHORT, "inputs": ["a"], "output": "a"}],
            hashed("a"),
            "features.derived: expected ops without a cycle, got a -> a. Remove one of its inputs.",
        ),
        (
            [SHORT, {**CROSS, "output": "first_item"}],
            hashed("first_item"),
            "features.derived: expected each output once, got twice: first_item. Rename one of them.",
        ),
        (
            [{**SHORT, "output": "age"}],
            hashed("age"),
            "features.derived 'age': expected a name of its own, got that of a column of the table. Rename the output.",
        ),
        (
            [{**SHORT, "output": "a b"}],
            hashed("a b"),
            "features.derived 'a b': expected a name of letters, digits and _, got another. Rename the output.",
        ),
        (
            [{"kind": "first_x", "limit": 1, "inputs": ["items"]}],
            hashed("user"),
            "first_x of features.derived: expected an `output`, got none. Name the column it makes.",
        ),
        (
            [{**CROSS, "inputs": ["country"]}],
            hashed("country_x_items"),
            "cartesian of 'country_x_items': expected 2 inputs, got 1: country. Name them in `inputs`.",
        ),
        (
            [{**SHORT, "inputs": ["items", "user"]}],
            hashed("first_item"),
            "first_x of 'first_item': expected 1 input, got 2: items, user. Name them in `inputs`.",
        ),
        (
            [{"kind": "ngram", "n": 2, "inputs": [], "output": "grams"}],
            hashed("grams"),
            "ngram of 'grams': expected at least 1 input, got none. Name them in `inputs`.",
        ),
        (
            [SCORE, {**CROSS, "inputs": ["country", "mean_weight"]}],
            hashed("country_x_items"),
            "cartesian of 'country_x_items': expected sparse values, got 'mean_weight' with dense values. "
            "Name another input, or insert an op.",
        ),
        (
            [{**CROSS, "inputs": ["country", "when"]}],
            hashed("country_x_items"),
            "column 'when': expected integers or strings for a sparse feature, got timestamp[us]. "
            "Add a bucketize op, or convert the column.",
        ),
        (
            [{**SCORE, "inputs": ["age"]}],
            hashed("user"),
            "features.derived 'mean_weight': expected a feature that reads it, got none. "
            "Name it in a group of features.dense or features.sparse, or remove it.",
        ),
        (
            [{"kind": "compute_score", "function": "has_id_overlap", "inputs": ["items", "label"], "output": "leak"}],
            [{"columns": "leak", "transforms": [{"kind": "onehot", "size": 2}]}],
            "compute_score of 'leak': expected inputs other than the label, got 'label'. Name another column.",
        ),
        (
            [CROSS],
            [{"columns": "country_x_items"}],
            "features.sparse 'country_x_items': expected bounded ids, got ids of any size. "
            "End its transforms with sigrid_hash, bucketize or clamp.",
        ),
        (
            [],
            [{"columns": "items", "transforms": [{"kind": "cartesian"}]}],
            "cartesian on 'items': expected an op of one input, got one of 2. Move it to features.derived.",
        ),
        (
            [HOUR],
            [{"columns": "hour", "transforms": [{"kind": "bucketize", "borders": [5]}]}],
            "bucketize on 'hour': expected a dense input, got a sparse input. Change the order of its transforms.",
        ),
        (
            [{"kind": "cartesian", "inputs": ["country", "counts"], "output": "a"}, {**SCORE, "inputs": ["counts"]}],
            [*hashed("a"), {"columns": "mean_weight", "transforms": [{"kind": "bucketize", "borders": [5]}]}],
            "column 'counts': expected ids or scores, got both. "
            "Read it as one of them. A null is dropped from ids but kept in scores.",
        ),
    ],
)  # fmt: skip
def test_derived_columns_are_checked_early(derived: Any, sparse: Any, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(derived, sparse=sparse)
    assert str(error.value) == sentence


@pytest.mark.parametrize(
    ("derived", "columns", "sentence"),
    [
        (
            [{**SCORE, "inputs": ["age"]}],
            "mean_weight",
            "column 'age': expected lists of numbers for scores, got int64. Name another column.",
        ),
        (
            [{"kind": "compute_score", "function": "add", "inputs": ["items", "weights"] * 2, "output": "sums"}],
            "sums",
            "feature 'sums': expected dense values after the last op, got scores values. Aggregate them with compute_score.",
        ),
        (
            [HOUR],
            "hour",
            "feature 'hour': expected dense values after the last op, got sparse values. Move it to features.sparse.",
        ),
    ],
)
def test_derived_numbers_are_checked_early(derived: Any, columns: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as error:
        plan(derived, dense=[{"columns": columns, "transforms": []}])
    assert str(error.value) == sentence


@pytest.mark.parametrize("kind", [pa.timestamp("ms"), pa.timestamp("us", "UTC"), pa.date32()])
def test_a_timestamp_has_its_own_unit(kind: pa.DataType) -> None:
    table = pa.schema([*(field for field in COLUMNS if field.name != "when"), ("when", kind)])
    wrong = HOUR | {"time_unit": "milliseconds"}
    derived = FeatureSchema.model_validate({"derived": [wrong], "sparse": hashed("hour")})
    in_group = {"columns": "when", "transforms": [{"kind": "get_local_hour", "time_unit": "milliseconds"}]}
    for schema, name in ((derived, "hour"), (FeatureSchema.model_validate({"sparse": [in_group]}), "when")):
        with pytest.raises(ConfigError) as error:
            build_plan(schema, table)
        assert str(error.value) == (
            f"get_local_hour of '{name}': expected no time_unit for 'when' of type {kind}, got milliseconds. "
            "Remove time_unit: timestamps have a unit of their own."
        )
    numbers = pa.schema([*(field for field in COLUMNS if field.name != "when"), ("when", pa.int64())])
    plain = FeatureSchema.model_validate({"derived": [wrong], "sparse": [{"columns": "hour"}]})
    rows = build_plan(plain, numbers).apply(pa.table({"when": [0, 3_600_000 * 25, None]}))
    assert rows.sparse[0].values.tolist() == [0, 1]


@pytest.mark.parametrize(
    "kind", [pa.uuid(), pa.binary(), pa.large_binary(), pa.binary(16), pa.decimal128(38, 0), pa.decimal128(38, 9)]
)
@pytest.mark.parametrize("listed", [False, True])
def test_ids_of_another_engine_may_be_of_any_type(kind: pa.DataType, listed: bool) -> None:
    table = pa.schema([("key", pa.large_list(kind) if listed else kind)])
    hashed = [{"columns": "key", "transforms": [{"kind": "sigrid_hash", "size": 7}]}]
    assert build_plan(FeatureSchema.model_validate({"sparse": hashed}), table).sparse
    if not pa.types.is_decimal(kind) or listed:
        with pytest.raises(ColumnError, match="expected numbers for a dense feature"):
            build_plan(FeatureSchema.model_validate({"dense": [{"columns": "key"}], "sparse": hashed}), table)

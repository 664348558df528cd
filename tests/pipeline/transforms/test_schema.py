"""Feature groups and the columns that their patterns name."""

import subprocess
import sys

import pytest
from pydantic import ValidationError

from pipeline.errors import ConfigError
from pipeline.transforms.schema import DenseGroup, FeatureSchema, SparseGroup, input_kinds, resolve

COLUMNS = ["label", "int_2", "int_1", "cat_1", "cat_10", "Cat_2"]


@pytest.mark.parametrize(
    ("patterns", "names"),
    [
        (["int_*"], ["int_2", "int_1"]),  # the table's order
        (["int_1", "int_*"], ["int_1", "int_2"]),  # the patterns' order first, each once
        (["cat_?"], ["cat_1"]),
        (["*"], COLUMNS),
        (["[Cc]at_2"], ["Cat_2"]),
    ],
)
def test_patterns(patterns: list[str], names: list[str]) -> None:
    assert resolve(patterns, COLUMNS, "features") == names


@pytest.mark.parametrize(
    ("pattern", "close"),
    [("int_3", "int_2, int_1"), ("CAT_*", "Cat_2, int_2, int_1, cat_1, cat_10, label"), ("labels", "label")],
)
def test_an_unknown_column_names_the_closest(pattern: str, close: str) -> None:
    with pytest.raises(ConfigError) as error:
        resolve([pattern], COLUMNS, "features.dense column")
    assert str(error.value) == (
        f"features.dense column '{pattern}': expected a column of the table, got none of that name. "
        f"Closest: {close}. Correct the name."
    )


NAMED = {"dense": {"user_age": 17, "user_size": 18, "price": 3}, "ids": {"pages": 42}}


def test_names_of_keys_become_keys() -> None:
    """What is left is the config without names, so a training does not depend on them."""
    hashed = [{"kind": "sigrid_hash", "size": 9}]
    schema = FeatureSchema.model_validate(
        {
            "map_keys": NAMED,
            "dense": [
                {"columns": ["dense[user_*, 5..7]", "dense[price]", "int_[12]", "other[price]"]},
                {"columns": "age"},
            ],
            "sparse": [{"columns": "ids[pages]", "transforms": hashed}],
        }
    )
    assert schema.dense[0].columns == ("dense[17, 18, 5..7]", "dense[3]", "int_[12]", "other[price]")
    assert (schema.dense[1].columns, schema.sparse[0].columns) == (("age",), ("ids[42]",))
    assert FeatureSchema.model_validate(schema.model_dump()) == schema


def test_an_unknown_name_of_a_key_names_the_closest() -> None:
    with pytest.raises(ConfigError, match=r"features\.map_keys 'user_aga': .* Closest: user_age"):
        FeatureSchema.model_validate({"map_keys": NAMED, "sparse": [{"columns": ["dense[user_aga]"]}]})


def test_one_column_needs_no_list() -> None:
    assert DenseGroup.model_validate({"columns": "age"}).columns == ("age",)


def test_dense_columns_are_standardised_and_filled_by_default() -> None:
    assert [op.kind for op in DenseGroup(columns=("age",)).transforms] == ["standardise", "fill_null"]


@pytest.mark.parametrize("columns", [[], ()])
def test_groups_name_columns(columns: list[str]) -> None:
    with pytest.raises(ValidationError):
        DenseGroup.model_validate({"columns": columns})


@pytest.mark.parametrize(
    ("transforms", "kind"),
    [
        ([], "sparse"),
        ([{"kind": "sigrid_hash", "size": 9}], "sparse"),
        ([{"kind": "fill_null"}, {"kind": "bucketize", "borders": [1]}], "dense"),
    ],
)
def test_columns_are_read_in_the_first_ops_kind(transforms: list[dict[str, object]], kind: str) -> None:
    group = SparseGroup.model_validate({"columns": ["a"], "transforms": transforms})
    assert group.read_kind("sparse") == kind


def test_inputs_of_an_op_of_any_number() -> None:
    schema = FeatureSchema.model_validate(
        {
            "derived": [
                {"kind": "ngram", "n": 2, "inputs": ["a", "b", "c"], "output": "x"},
                {"kind": "compute_score", "function": "get_score_max", "inputs": ["a", "b", "s"], "output": "y"},
            ],
            "sparse": [{"columns": "x"}],
        }
    )
    assert [input_kinds(op) for op in schema.derived] == [("sparse",) * 3, ("sparse", "sparse", "scores")]


@pytest.mark.parametrize("fields", [{}, {"sparse": []}])
def test_a_model_needs_an_embedding_table(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match="sparse"):
        FeatureSchema.model_validate(fields)


def test_the_schema_and_the_models_config_load_no_arrays_and_no_compiler() -> None:
    modules = "pipeline.transforms.schema, pipeline.transforms.ops.sampling, models.config"
    code = f"import sys, {modules}; print(sys.modules.keys() & {{'numpy', 'pyarrow', 'numba', 'torch'}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"

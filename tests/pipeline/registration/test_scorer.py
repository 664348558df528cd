"""Raw rows in, probabilities out: compared with the arithmetic written by hand; and what is refused."""

import datetime
import json
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import torch
from mlflow.exceptions import MlflowException
from mlflow.models import Model, ModelSignature
from mlflow.models.utils import _enforce_schema
from mlflow.pyfunc import PyFuncModel
from mlflow.pyfunc.model import _PythonModelPyfuncWrapper

from models.config import DLRMConfig
from pipeline.errors import InputError
from pipeline.inference.mlflow_bodies import signature_of
from pipeline.inference.model import LoadedModel
from pipeline.inference.request import column_type
from pipeline.registration.register import pack, raw_frame
from pipeline.registration.scorer import Scorer
from pipeline.transforms.kinds import Kind
from pipeline.transforms.schema import FeatureSchema

SCHEMA = FeatureSchema.model_validate(
    {
        "dense": [{"columns": ["age"], "transforms": [{"kind": "standardise", "mean": 30, "std": 10}, {"kind": "fill_null"}]}],
        "sparse": [
            {"columns": ["user", "country"], "transforms": [{"kind": "sigrid_hash", "size": 50}]},
            {"columns": ["tags"], "pooling": "mean", "transforms": [{"kind": "first_x", "limit": 2}, {"kind": "sigrid_hash", "size": 50}]},
        ],
    }
)  # fmt: skip
SUMS = SCHEMA.model_copy(
    update={"sparse": tuple(group.model_copy(update={"pooling": "sum"}) for group in SCHEMA.sparse)}
)
BIG = 2**62 + 1
ROWS = pa.table(
    {
        "age": [25, None, 61],
        "user": pa.array([BIG, -3, None], pa.int64()),
        "country": ["DE", None, "Åland"],
        "tags": pa.array([[1, 2, 3], [], None], pa.list_(pa.int64())),
    }
)


CONFIG = DLRMConfig(embedding_width=4, bottom_mlp=(4,), top_mlp=(8,))


@pytest.fixture
def loaded(tmp_path, exported):
    weights, plan = exported(SCHEMA, ROWS.schema, CONFIG)
    return LoadedModel(pack(tmp_path / "model", weights, plan, CONFIG, ROWS.schema))


def by_hand(loaded: LoadedModel, row: dict) -> float:
    """Scores one row without the project's code, except the hash."""
    weights = {name: value.double() for name, value in loaded.model.state_dict().items()}
    columns = loaded.plan.apply(pa.Table.from_pylist([row], ROWS.schema)).sparse
    age = 0.0 if row["age"] is None else (row["age"] - 30) / 10
    dense = torch.tensor([age], dtype=torch.float64)
    for layer in ("bottom.0", "bottom.2"):
        dense = torch.relu(weights[f"{layer}.weight"] @ dense + weights[f"{layer}.bias"])
    vectors = [dense]
    for name, column in zip(("user", "country", "tags"), columns, strict=True):
        found = weights[f"embeddings.embedding_bags.{name}.weight"][column.values].sum(0)
        vectors.append(found / max(len(column.values), 1) if name == "tags" else found)
    pairs = [vectors[i] @ vectors[j] for i in range(4) for j in range(i + 1, 4)]
    hidden = torch.relu(weights["top.0.weight"] @ torch.cat([dense, torch.stack(pairs)]) + weights["top.0.bias"])
    return float(torch.sigmoid(weights["logit.weight"] @ hidden + weights["logit.bias"]))


WEIGHTED = FeatureSchema.model_validate(
    {
        "dense": SCHEMA.dense,
        "sparse": [
            {"columns": ["user", "country"], "transforms": [{"kind": "sigrid_hash", "size": 50}]},
            {
                "columns": ["tags"], "weights": "{column}_scores",
                "transforms": [{"kind": "first_x", "limit": 2}, {"kind": "sigrid_hash", "size": 50}],
            },
        ],
    }
)  # fmt: skip
SCORED = ROWS.append_column("tags_scores", pa.array([[0.5, -3.0, 9.0], [], None], pa.list_(pa.float64())))


@pytest.mark.parametrize("form", ["fp32", "int8"])
def test_weights_of_ids_scale_their_vectors(tmp_path, exported, form):
    """The same rows, but with the weight of an id in its row's table entry."""
    weights, plan = exported(WEIGHTED, SCORED.schema, CONFIG)
    loaded = LoadedModel(pack(tmp_path / "model", weights, plan, CONFIG, SCORED.schema, form))
    assert set(loaded.columns) == set(SCORED.column_names)
    plain = LoadedModel(pack(tmp_path / "plain", weights, exported(SUMS, ROWS.schema, CONFIG)[1], CONFIG, ROWS.schema))
    table = plain.model.state_dict()["embeddings.embedding_bags.tags.weight"]
    first, second = plain.plan.apply(ROWS.slice(0, 1)).sparse[2].values.tolist()
    assert first != second
    table[first] *= 0.5
    table[second] *= -3.0
    np.testing.assert_allclose(loaded.score(SCORED), plain.score(ROWS), atol=1e-7 if form == "fp32" else 1e-2)
    assert abs(loaded.score(SCORED)[0] - LoadedModel(tmp_path / "plain").score(ROWS)[0]) > 1e-4
    uneven = SCORED.set_column(4, "tags_scores", pa.array([[0.5, -3.0], [], None], pa.list_(pa.float64())))
    table[[first, second]] = 0.0
    np.testing.assert_allclose(loaded.score(uneven), plain.score(ROWS), atol=1e-7 if form == "fp32" else 1e-2)


def test_scores_by_hand(loaded):
    expected = [by_hand(loaded, row) for row in ROWS.to_pylist()]
    assert loaded.score(ROWS) == pytest.approx(expected, abs=1e-6)


def test_a_data_frame_scores_like_the_warehouse_rows(loaded):
    frame = raw_frame(ROWS, loaded.columns)
    assert loaded.score(loaded.table_of(frame)).tolist() == loaded.score(ROWS).tolist()
    assert loaded.score(loaded.table_of(frame.assign(unused="x"))).tolist() == loaded.score(ROWS).tolist()


def test_no_rows(loaded):
    assert loaded.score(ROWS.slice(0, 0)).tolist() == []


def test_a_row_scores_the_same_in_any_company(loaded):
    many = pa.concat_tables([ROWS] * 5_000)
    assert np.abs(loaded.score(many)[:3] - loaded.score(ROWS)).max() < 1e-7


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame(
        {"age": [1.0], "user": [1], "country": ["DE"], "tags": [[1]]} | {k: [v] for k, v in columns.items()}
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"country": 5}, "row 0, column 'country': expected string, got 5. Correct the value, or leave it null."),
        ({"tags": ["a"]}, "row 0, column 'tags': expected list<long>, got ['a']. Correct the value, or leave it null."),
        ({"age": "old"}, "row 0, column 'age': expected double, got 'old'. Correct the value, or leave it null."),
        ({"user": 2**64}, "row 0, column 'user': expected long, got 18446744073709551616. Correct the value, or leave it null."),
        ({"user": float(2**60)}, "row 0, column 'user': expected long, got 1.152921504606847e+18. A null in the column made it a float; send ids as [id]."),
    ],
)  # fmt: skip
def test_a_bad_value_names_row_and_column(loaded, change, sentence):
    with pytest.raises(InputError) as caught:
        loaded.table_of(frame(**change))
    assert str(caught.value) == sentence


def test_a_missing_column_is_named(loaded):
    with pytest.raises(InputError) as caught:
        loaded.table_of(frame().drop(columns="tags"))
    assert str(caught.value) == "input: expected columns age, country, tags, user, got none named tags. Add them."


@pytest.mark.parametrize("missing", [None, float("nan"), pd.NA])
def test_missing_values_are_null(loaded, missing):
    rows = loaded.table_of(frame(age=missing, user=missing, country=missing, tags=None))
    assert rows.to_pylist() == [{"age": None, "country": None, "tags": None, "user": None}]


def test_ids_may_be_lists_of_one(loaded):
    assert loaded.table_of(frame(user=[BIG])).column("user").to_pylist() == [BIG]
    assert loaded.table_of(frame(user=[])).column("user").to_pylist() == [None]


def test_column_types():
    kinds: dict[Kind, list[pa.DataType]] = {
        "dense": [pa.int32(), pa.float32()],
        "sparse": [pa.int32(), pa.string(), pa.large_list(pa.int64()), pa.list_(pa.string())],
    }
    kinds["scores"] = [pa.list_(pa.float64()), pa.large_list(pa.float32()), pa.list_(pa.int64())]
    kinds["dense"] += [pa.timestamp("us"), pa.timestamp("us", "UTC"), pa.date32(), pa.bool_()]
    found = {use: [column_type(kind, [use]) for kind in types] for use, types in kinds.items()}
    times = ["timestamp"] * 3
    assert found.pop("scores") == ["list<double>"] * 3
    assert column_type(pa.int64(), ["dense", "sparse"]) == "long"
    assert found == {
        "dense": ["double", "double", *times, "double"],
        "sparse": ["long", "string", "list<long>", "list<string>"],
    }


def logged(loaded: LoadedModel) -> Any:
    """The model from `mlflow.pyfunc.load_model`, with MLflow's signature before the scorer."""
    python_model = Scorer()
    python_model.loaded = loaded
    meta = Model(signature=ModelSignature.from_dict(signature_of(loaded.columns).to_dict()))
    return PyFuncModel(meta, _PythonModelPyfuncWrapper(python_model, None, meta.signature))


AGES, TAGS = [25.0, None, 61.0], [[1, 2, 3], [], None]
SENT = {"age": AGES, "user": [[BIG], [-3], None], "country": ["DE", None, "Åland"], "tags": TAGS}


@pytest.mark.parametrize("direct", [False, True])
@pytest.mark.parametrize(
    "rows",
    [
        pd.DataFrame(SENT),
        SENT,
        json.dumps(SENT),
        json.dumps([dict(zip(SENT, row, strict=True)) for row in zip(*SENT.values(), strict=True)]),
        SENT | {"unused": [object()] * 3, "age": np.array([25, np.nan, 61])},
    ],
    ids=["frame", "dict", "text", "text of rows", "more"],
)
def test_frame_dict_and_text_score_alike(loaded, rows, direct):
    found = loaded.probabilities(rows) if direct else logged(loaded).predict(rows)["probability"]
    assert found.tolist() == loaded.score(ROWS).tolist()


def test_mlflow_does_not_make_one_row_of_columns_of_text(loaded):
    columns = {"country": ["DE", "FR"]}
    loaded.defaults = {"age": 1, "user": 2, "tags": [3], "country": "DE"}
    expected = loaded.probabilities(columns)
    model = logged(loaded)
    assert model.predict(columns)["probability"].tolist() == expected.tolist()
    assert len(expected) == 2
    assert len(model.predict({"age": [], "user": [], "country": [], "tags": []})) == 0
    assert len(model.predict(pd.DataFrame({"user": [None], "tags": [[]]}))) == 1
    assert len(model.predict(pd.DataFrame(columns=["user"]))) == 0
    with pytest.raises(MlflowException) as caught:
        model.predict({"user": [], "tags": []})
    assert caught.value.message == (
        "input: expected one row or none, got empty lists, which may be either. "
        "Send null in place of one empty list, or no rows."
    )


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"age": [1.0, "old", 3.0]}, "row 1, column 'age': expected double, got 'old'. Correct the value, or leave it null."),
        ({"tags": [[1], 5, None]}, "row 1, column 'tags': expected list<long>, got 5. Correct the value, or leave it null."),
    ],
)  # fmt: skip
def test_a_bad_row_is_the_callers_fault_in_mlflows_eyes(loaded, change, sentence):
    with pytest.raises(MlflowException) as caught:
        logged(loaded).predict(SENT | change)
    assert (caught.value.message, caught.value.get_http_status_code()) == (sentence, 400)


def test_a_probability_that_is_not_finite_names_its_row(loaded):
    with torch.no_grad():
        loaded.model.embeddings.embedding_bags["country"].weight[:] = float("nan")
    with pytest.raises(InputError) as caught:
        loaded.probabilities(SENT | {"country": [None, "FR", None]})
    assert str(caught.value) == (
        "row 1: expected a finite probability, got nan. Send numbers of the size that the model was trained on."
    )


def test_defaults_travel_with_the_model(loaded, tmp_path):
    folder = tmp_path / "model"
    record = json.loads((folder / "model.json").read_text())
    assert record["defaults"] == {}
    schema, config = ROWS.schema, DLRMConfig.model_validate(record["model"])
    pack(folder, tmp_path / "weights.safetensors", loaded.plan, config, schema, defaults={"tags": (1, 2), "age": None})
    rows = {"user": [7], "country": ["DE"]}
    expected = loaded.probabilities(rows | {"age": [None], "tags": [[1, 2]]})
    assert LoadedModel(folder).probabilities(rows).tolist() == expected.tolist()


def test_nulls_inside_lists_are_left_out_of_what_is_sent():
    rows = pa.table({"a": pa.array([[1, None, 2], None]), "b": [["abc", None], ["abc"]], "c": pa.array([True, None])})
    sent = raw_frame(rows, {"a": "list<long>", "b": "list<string>", "c": "long"})
    assert sent["a"].tolist() == [[1, 2], None]
    assert sent["b"].tolist() == [["abc"], ["abc"]]
    assert sent["c"].tolist() == [[1], []]


DERIVED = FeatureSchema.model_validate(
    {
        "derived": [
            {"kind": "get_local_hour", "inputs": ["at"], "output": "hour"},
            {"kind": "compute_score", "function": "mean", "inputs": ["weights"], "output": "weight"},
        ],
        "dense": [{"columns": ["weight"], "transforms": [{"kind": "fill_null"}]}, {"columns": "since", "transforms": [{"kind": "standardise", "mean": 0, "std": 1e9}]}],
        "sparse": [{"columns": ["hour"]}],
    }
)  # fmt: skip
TIMES = pa.table(
    {
        "at": pa.array([datetime.datetime(2025, 1, 2, 23, 59, 59, 999_999), None, datetime.datetime(1969, 7, 20, 20, 17)], pa.timestamp("us", "UTC")),
        "since": pa.array([datetime.date(2020, 2, 29), datetime.date(1960, 1, 1), None]),
        "weights": pa.array([[0.5, None, 2.0], [], None], pa.large_list(pa.float64())),
    }
)  # fmt: skip


TIME_REMEDY = "Send ISO 8601 such as 2025-03-04T12:00:00Z, or a type with a unit such as Arrow's timestamp, or null."


@pytest.fixture
def timed(tmp_path, exported):
    weights, plan = exported(DERIVED, TIMES.schema, CONFIG)
    return LoadedModel(pack(tmp_path / "model", weights, plan, CONFIG, TIMES.schema))


def test_times_and_scores_are_sent_as_they_are_stored(timed):
    assert timed.columns == {"weights": "list<double>", "since": "timestamp", "at": "timestamp"}
    sent = _enforce_schema(raw_frame(TIMES, timed.columns), signature_of(timed.columns).inputs)
    assert timed.score(timed.table_of(sent)).tolist() == timed.score(TIMES).tolist()
    assert timed.plan.apply(timed.table_of(sent)).sparse[0].values.tolist() == [23, 20]


@pytest.mark.parametrize(
    "value",
    ["2025-01-02T12:30:00+09:00", pd.Timestamp("2025-01-02 03:30"), np.datetime64("2025-01-02T03:30"), datetime.datetime(2025, 1, 2, 3, 30)],
)  # fmt: skip
def test_times_may_be_text_and_have_a_zone(timed, value):
    row = pd.DataFrame({"at": pd.Series([value], dtype="object"), "since": [pd.NaT], "weights": [None]})
    assert timed.table_of(row).to_pylist() == [
        {"weights": None, "since": None, "at": datetime.datetime(2025, 1, 2, 3, 30)}
    ]


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"at": 5}, f"row 0, column 'at': expected timestamp, got 5. {TIME_REMEDY}"),
        ({"at": "soon"}, f"row 0, column 'at': expected timestamp, got 'soon'. {TIME_REMEDY}"),
        ({"weights": ["a"]}, "row 0, column 'weights': expected list<double>, got ['a']. Correct the value, or leave it null."),
    ],
)  # fmt: skip
def test_a_bad_time_or_score_names_row_and_column(timed, change, sentence):
    row = pd.DataFrame({k: [v] for k, v in ({"at": None, "since": None, "weights": None} | change).items()})
    with pytest.raises(InputError) as caught:
        timed.table_of(row)
    assert str(caught.value) == sentence

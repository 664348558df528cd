"""One user's candidates score as rows that repeat the user's columns, and the user's side is made once."""

from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from models.config import DLRMConfig
from pipeline.errors import InputError
from pipeline.inference.candidate_scorer import CandidateScorer
from pipeline.inference.model import LoadedModel
from pipeline.registration.register import pack
from pipeline.transforms.plan.plan import Plan
from pipeline.transforms.schema import FeatureSchema

SCHEMA = FeatureSchema.model_validate(
    {
        "derived": [{"kind": "cartesian", "inputs": ["country", "category"], "output": "pair"}],
        "dense": [
            {"columns": ["price", "age"], "transforms": [{"kind": "fill_null"}]},
        ],
        "sparse": [
            {"columns": ["user", "item", "country", "category", "pair"], "transforms": [{"kind": "sigrid_hash", "size": 90}]},
            {"columns": ["seen"], "pooling": "mean", "transforms": [{"kind": "sigrid_hash", "size": 90}]},
        ],
    }
)  # fmt: skip
COLUMNS = pa.schema(
    {
        "price": pa.float64(), "age": pa.float64(), "user": pa.int64(), "item": pa.int64(), "country": pa.string(),
        "category": pa.string(), "seen": pa.list_(pa.int64()),
    }
)  # fmt: skip
USER = {"age": 31, "user": 2**61 + 1, "country": "NO", "seen": [4, 4, 9]}
ITEMS: list[dict[str, Any]] = [
    {"price": 1.5, "item": 7, "category": "books"},
    {"price": None, "item": 8, "category": None},
    {"price": 9.0, "item": 7, "category": "shoes"},
]
CONFIG = DLRMConfig(embedding_width=4, bottom_mlp=(4,), top_mlp=(8,))


@pytest.fixture(params=["fp32", "int8"])
def loaded(request, tmp_path, exported) -> LoadedModel:
    weights, plan = exported(SCHEMA, COLUMNS, CONFIG, spread=1.0)
    folder = pack(tmp_path / "model", weights, plan, CONFIG, COLUMNS, request.param, {"age": 40.0})
    return LoadedModel(folder)


def whole(user: dict, items: list[dict]) -> dict[str, list]:
    rows = [user | item for item in items]
    return {name: [row[name] for row in rows] for name in rows[0]}


def test_candidates_score_like_whole_rows(loaded):
    expected = loaded.probabilities(whole(USER, ITEMS))
    ranking = CandidateScorer(loaded).rank(USER, ITEMS)
    assert np.abs(ranking.probabilities - expected).max() < 1e-7
    assert expected.std() > 1e-3
    assert ranking.rows.select(loaded.columns).equals(loaded.table_of(whole(USER, ITEMS)))
    columns = {name: [item[name] for item in ITEMS] for name in ITEMS[0]}
    assert CandidateScorer(loaded).rank(USER, columns).probabilities.tolist() == ranking.probabilities.tolist()


def test_many_candidates_score_like_whole_rows(loaded):
    items = ITEMS * 3_000
    assert (
        np.abs(CandidateScorer(loaded).rank(USER, items).probabilities - loaded.probabilities(whole(USER, items))).max()
        < 1e-7
    )


def test_the_users_features_are_made_of_one_row(loaded, monkeypatch):
    made: dict[str, int] = {}
    apply = Plan.apply

    def noting(plan, rows, *rest):
        made.update(dict.fromkeys(plan.features, rows.num_rows))
        return apply(plan, rows, *rest)

    monkeypatch.setattr(Plan, "apply", noting)
    CandidateScorer(loaded).rank(USER, ITEMS)
    assert {name for name, rows in made.items() if rows == 1} == {"age", "user", "country", "seen"}
    assert {name for name, rows in made.items() if rows == 3} == {"price", "item", "category", "pair"}


def test_defaults_and_columns_on_either_side(loaded):
    user = {name: value for name, value in USER.items() if name != "age"}
    scorer = CandidateScorer(loaded)
    expected = loaded.probabilities(whole(user | {"age": 40.0}, ITEMS))
    assert np.abs(scorer.rank(user | {"unused": 1}, ITEMS).probabilities - expected).max() < 1e-7
    rows = [user | item for item in ITEMS]
    assert scorer.rank({}, rows).probabilities.tolist() == loaded.probabilities(whole(user, ITEMS)).tolist()
    assert scorer.rank(USER, []).probabilities.tolist() == []


@pytest.mark.parametrize(
    ("user", "items", "sentence"),
    [
        (USER | {"price": 1}, ITEMS, "input: expected a column of the user or of candidates, got price in both. Leave each out of one of them."),
        ({"user": 1}, ITEMS, "input: expected columns age, category, country, item, price, seen, user, got none named country, seen. Add them."),
        (USER, [ITEMS[0], ITEMS[1] | {"item": "x"}], "row 1, column 'item': expected long, got 'x'. Correct the value, or leave it null."),
        (USER | {"user": "x"}, ITEMS, "row 0, column 'user': expected long, got 'x'. Correct the value, or leave it null."),
        ([], ITEMS, "user: expected columns and their values, got []. Send"),
        (USER, 5, "candidates: expected rows with at least one column, got 5. Send"),
        (USER, [5], "candidates: expected rows with at least one column, got [5]. Send"),
    ],
)  # fmt: skip
def test_what_is_refused(loaded, user, items, sentence):
    with pytest.raises(InputError) as caught:
        CandidateScorer(loaded).rank(user, items)
    assert str(caught.value).startswith(sentence)

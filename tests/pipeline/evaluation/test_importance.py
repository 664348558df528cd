"""Feature importance of a model with known use of its features, and feature facts against plain counts."""

import numpy as np
import pyarrow as pa
import pytest
import torch

from pipeline.evaluation.importance import ImportanceEstimator
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import FeatureSchema
from tests.pipeline.bags import sparse_tensor
from tests.quality import quality

ROWS = 3_000
SCHEMA = {
    "label": "label",
    "dense": [{"columns": ["strong", "weak", "unused"], "transforms": [{"kind": "fill_null"}]}],
    "sparse": [
        {"columns": ["items"], "transforms": [{"kind": "first_x", "limit": 3}, {"kind": "sigrid_hash", "size": 40}]},
        {"columns": ["hour"], "transforms": [{"kind": "clamp", "low": 0, "high": 23}]},
    ],
}


@pytest.fixture(scope="module")
def rows():
    random = np.random.default_rng(2)
    items = [None if i % 10 == 0 else random.integers(0, 100, i % 7).tolist() for i in range(ROWS)]
    numbers = {name: random.normal(size=ROWS) for name in ("strong", "weak", "unused")}
    strong = pa.array(numbers["strong"], mask=np.arange(ROWS) % 4 == 0)
    labels = random.random(ROWS) < 1 / (1 + np.exp(-np.where(np.arange(ROWS) % 4 == 0, 0.0, 2 * numbers["strong"])))
    return pa.table({
        "strong": strong, "weak": numbers["weak"], "unused": numbers["unused"],
        "items": pa.array(items, pa.list_(pa.int64())), "hour": np.arange(ROWS) % 24, "label": labels.astype(np.int64),
    })  # fmt: skip


def score(dense, vectors):
    return torch.sigmoid(2.0 * dense[:, 0] + 0.3 * dense[:, 1] + 0.0 * vectors[:, 0, 0]).double().numpy()


@pytest.fixture(scope="module")
def importances(rows):
    plan = build_plan(FeatureSchema.model_validate(SCHEMA), rows.schema)
    estimator = ImportanceEstimator(plan, score, 1, 0.05, 0.0005)
    for start in range(0, ROWS, 500):
        estimator.add(*batch(plan, rows.slice(start, 500)))
    return {feature.name: feature for feature in estimator.estimate()}


def batch(plan, rows):
    made = plan.apply(rows)
    vectors = torch.stack([torch.from_numpy(np.diff(column.offsets)).float() for column in made.sparse], dim=1)[
        ..., None
    ]
    assert sparse_tensor([feature.name for feature in plan.sparse], made.sparse).lengths().shape == (2 * len(rows),)
    return rows, rows.column("label").to_numpy().astype(float), torch.from_numpy(made.dense), vectors


def test_the_loss_agrees_with_a_permuted_column(rows, importances):
    """Shuffles the column by hand, twenty times, within the same batches."""
    plan = build_plan(FeatureSchema.model_validate(SCHEMA), rows.schema)
    _, labels, dense, vectors = batch(plan, rows)
    before, random, losses = quality(labels, score(dense, vectors)).ne, np.random.default_rng(9), []
    for _ in range(20):
        order = np.concatenate([start + random.permutation(500) for start in range(0, ROWS, 500)])
        changed = dense.clone()
        changed[:, 0] = dense[order, 0]
        losses.append(quality(labels, score(changed, vectors)).ne - before)
    strong = importances["strong"]
    assert strong.low < np.mean(losses) < strong.high
    assert strong.low > 0.2


def test_features_are_ranked_and_unused_ones_could_be_dropped(importances):
    assert next(iter(importances)) == "strong"
    assert {name for name, feature in importances.items() if feature.droppable} >= {"unused", "items", "hour"}
    assert not importances["strong"].droppable
    assert (importances["unused"].ne_loss, importances["unused"].low, importances["unused"].high) == (0.0, 0.0, 0.0)


def test_the_facts_of_a_feature_against_plain_counts(rows, importances):
    lists = [value or [] for value in rows.column("items").to_pylist()]
    ids = sum(len(value) for value in lists)
    items, hour, strong = importances["items"], importances["hour"], importances["strong"]
    assert items.coverage == pytest.approx(sum(bool(value) for value in lists) / ROWS)
    assert items.mean_length == pytest.approx(ids / ROWS)
    assert items.truncated == pytest.approx(1 - sum(min(len(value), 3) for value in lists) / ids)
    kept = {item for value in lists for item in value[:3]}
    assert 0 < 1 - 40 / len(kept) <= items.collisions < 1
    assert (strong.coverage, strong.mean_length, strong.truncated, strong.collisions) == (0.75, None, None, None)
    assert (hour.coverage, hour.mean_length, hour.truncated, hour.collisions) == (1.0, 1.0, 0.0, None)
    assert (items.kind, strong.kind) == ("sparse", "dense")

"""Metrics against scikit-learn and torchrec, and where they are undefined."""

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score
from torchrec.metrics.ne import NEMetricComputation

from pipeline.evaluation.metrics import EPS, auc, base_entropy, bins, ece, quality


@pytest.fixture
def rows():
    random = np.random.default_rng(7)
    probabilities = random.beta(2, 5, 4_000)
    return (random.random(4_000) < probabilities).astype(float), probabilities


def test_against_scikit_learn(rows):
    labels, probabilities = rows
    rate = labels.mean()
    found = quality(labels, probabilities)
    assert found.logloss == pytest.approx(log_loss(labels, probabilities), abs=1e-12)
    assert found.auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-12)
    entropy = log_loss(labels, np.full(len(labels), rate))
    assert found.ne == pytest.approx(log_loss(labels, probabilities) / entropy, abs=1e-12)
    assert found.calibration == pytest.approx(probabilities.sum() / labels.sum())


def test_ne_against_torchrec(rows):
    labels, probabilities = rows
    metric = NEMetricComputation(my_rank=0, batch_size=len(labels), n_tasks=1, window_size=len(labels))
    as_tensor = [torch.tensor(values, dtype=torch.float64)[None] for values in (probabilities.copy(), labels)]
    metric.update(predictions=as_tensor[0], labels=as_tensor[1], weights=torch.ones_like(as_tensor[1]))
    theirs = metric._compute()[0].value.item()
    assert quality(labels, probabilities).ne == pytest.approx(theirs, rel=1e-6)


def test_auc_counts_ties_half(rows):
    labels, probabilities = rows
    coarse = np.round(probabilities, 1)
    assert auc(labels, coarse) == pytest.approx(roc_auc_score(labels, coarse), abs=1e-12)


def test_ece_against_a_loop(rows):
    labels, probabilities = rows
    expected = 0.0
    for low in range(15):
        inside = [(p, y) for p, y in zip(probabilities, labels, strict=True) if low / 15 <= p < (low + 1) / 15]
        if inside:
            expected += abs(sum(p for p, _ in inside) - sum(y for _, y in inside)) / len(labels)
    assert ece(labels, probabilities) == pytest.approx(expected)


def test_bins_of_equal_rows(rows):
    found = bins(*rows, equal_rows=True, count=20)
    assert [part.rows for part in found] == [200] * 20
    assert [part.predicted for part in found] == sorted(part.predicted for part in found)


@pytest.mark.parametrize(
    ("labels", "undefined"),
    [
        ([], {"label_rate", "ne", "logloss", "auc", "calibration", "ece"}),
        ([1, 1], {"ne", "auc"}),
        ([0, 0], {"ne", "auc", "calibration"}),
    ],
)
def test_undefined_is_none_with_a_reason(labels, undefined):
    found = quality(labels, [0.3] * len(labels))
    assert set(found.undefined) == undefined
    assert {name for name, value in found.model_dump().items() if value is None} == undefined


def test_certain_and_wrong_is_finite():
    found = quality([0, 1], [1.0, 0.0])
    assert found.logloss == pytest.approx(-math.log(EPS), rel=1e-6)
    assert base_entropy(0.5) == pytest.approx(math.log(2))


def test_the_callers_predictions_are_not_changed():
    probabilities = np.array([0.0, 1.0, 0.5])
    quality([0, 1, 1], probabilities)
    assert probabilities.tolist() == [0.0, 1.0, 0.5]

"""Metrics against scikit-learn, torchrec and plain loops, and where they are undefined."""

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score
from torchrec.metrics.ne import NEMetricComputation

from pipeline.evaluation.metrics import EPS, base_entropy, equal_bins
from pipeline.evaluation.sums import COARSE_BINS, MetricSums
from tests.quality import quality


@pytest.fixture
def rows():
    random = np.random.default_rng(7)
    probabilities = random.beta(2, 5, 4_000)
    return (random.random(4_000) < probabilities).astype(float), probabilities


def test_against_scikit_learn(rows):
    labels, probabilities = rows
    rate = labels.mean()
    found = quality(labels, probabilities)
    assert found.logloss == pytest.approx(log_loss(labels, probabilities), abs=1e-9)
    assert found.auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-5)
    assert found.pr_auc == pytest.approx(average_precision_score(labels, probabilities), abs=1e-4)
    entropy = log_loss(labels, np.full(len(labels), rate))
    assert found.ne == pytest.approx(log_loss(labels, probabilities) / entropy, abs=1e-9)
    assert found.calibration == pytest.approx(probabilities.sum() / labels.sum())


def test_ne_against_torchrec(rows):
    labels, probabilities = rows
    metric = NEMetricComputation(my_rank=0, batch_size=len(labels), n_tasks=1, window_size=len(labels))
    as_tensor = [torch.tensor(values, dtype=torch.float64)[None] for values in (probabilities.copy(), labels)]
    metric.update(predictions=as_tensor[0], labels=as_tensor[1], weights=torch.ones_like(as_tensor[1]))
    theirs = metric._compute()[0].value.item()
    assert quality(labels, probabilities).ne == pytest.approx(theirs, rel=1e-6)


def test_ranks_count_ties_half(rows):
    labels, probabilities = rows
    coarse = np.round(probabilities, 1)
    assert quality(labels, coarse).auc == pytest.approx(roc_auc_score(labels, coarse), abs=1e-12)
    assert quality(labels, coarse).pr_auc == pytest.approx(average_precision_score(labels, coarse), abs=1e-12)


def test_coarse_bins_are_fine_enough_for_a_slice(rows):
    labels, probabilities = rows
    sums = MetricSums(1, COARSE_BINS)
    sums.add(labels, probabilities)
    assert sums.quality().auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-4)


def test_recalibration_against_a_fitted_intercept(rows):
    """A logistic regression with fixed log-odds would fit this intercept."""
    labels, probabilities = rows
    odds = np.log(probabilities) - np.log1p(-probabilities)
    off = 1.0 / (1.0 + np.exp(-(odds + 0.7)))
    low, high = -3.0, 3.0
    for _ in range(80):
        shift = (low + high) / 2
        low, high = (low, shift) if (1 / (1 + np.exp(-(odds + shift)))).mean() > labels.mean() else (shift, high)
    best = log_loss(labels, 1 / (1 + np.exp(-(odds + shift)))) / base_entropy(labels.mean())
    found = quality(labels, off)
    assert found.ne > found.ne_recalibrated
    assert found.ne_recalibrated == pytest.approx(best, abs=1e-6)
    fitted = LogisticRegression(C=np.inf).fit(odds[:, None], labels)
    free = log_loss(labels, fitted.predict_proba(odds[:, None])) / base_entropy(labels.mean())
    assert free <= found.ne_recalibrated + 1e-6


def test_ece_against_a_loop(rows):
    labels, probabilities = rows
    expected = 0.0
    for low in range(15):
        inside = [(p, y) for p, y in zip(probabilities, labels, strict=True) if low / 15 <= p < (low + 1) / 15]
        if inside:
            expected += abs(sum(p for p, _ in inside) - sum(y for _, y in inside)) / len(labels)
    assert quality(labels, probabilities).ece == pytest.approx(expected)


def test_bins_of_equal_rows(rows):
    sums = MetricSums()
    sums.add(*rows)
    found = equal_bins(sums.by_log_odds[0], sums.predicted[0], 20)
    assert [part.rows for part in found] == pytest.approx([200] * 20, abs=5)
    assert sum(part.rows for part in found) == 4_000
    assert [part.predicted for part in found] == sorted(part.predicted for part in found)
    assert sum(part.rows * part.predicted for part in found) == pytest.approx(rows[1].sum())


EVERY = {"label_rate", "ne", "ne_recalibrated", "logloss", "auc", "pr_auc", "calibration", "ece"}


@pytest.mark.parametrize(
    ("labels", "undefined"),
    [
        ([], EVERY),
        ([1, 1], {"ne", "ne_recalibrated", "auc", "pr_auc"}),
        ([0, 0], {"ne", "ne_recalibrated", "auc", "pr_auc", "calibration"}),
    ],
)
def test_undefined_is_none_with_a_reason(labels, undefined):
    found = quality(labels, [0.3] * len(labels))
    assert set(found.undefined) == undefined
    assert {name for name, value in found.model_dump().items() if value is None} == undefined


def test_predictions_that_are_not_probabilities():
    found = quality([0, 1, 1, 0], [0.5, float("nan"), float("inf"), -0.1])
    assert found.rows == 4
    assert found.undefined == dict.fromkeys(EVERY, "3 predictions are not probabilities")


def test_certain_and_wrong_is_finite():
    found = quality([0, 1], [1.0, 0.0])
    assert found.logloss == pytest.approx(-math.log(EPS), rel=1e-6)
    assert base_entropy(0.5) == pytest.approx(math.log(2))


def test_the_callers_predictions_are_not_changed():
    probabilities = np.array([0.0, 1.0, 0.5])
    quality([0, 1, 1], probabilities)
    assert probabilities.tolist() == [0.0, 1.0, 0.5]

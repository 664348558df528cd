"""A row of weight 3 counts as three such rows, and weighted metrics agree with scikit-learn's."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from scipy.stats import t as student
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from pipeline.evaluation.config import EvaluationConfig, GateConfig
from pipeline.evaluation.evaluate import Evaluation, ScoredRows
from pipeline.evaluation.gate import compare, ne_difference, sum_pairs
from pipeline.evaluation.metrics import Quality, base_entropy, equal_bins, losses
from pipeline.evaluation.sums import MetricSums

ROWS = 2_000
CONFIG = EvaluationConfig(slices=("country",), group_by="user", true_probability="truth", small_slice_rows=0)


@pytest.fixture
def rows() -> dict[str, Any]:
    random = np.random.default_rng(5)
    truth = random.beta(2, 6, ROWS)
    columns = pa.table(
        {"country": ["AB"[i % 2] for i in range(ROWS)], "user": [i % 97 for i in range(ROWS)], "truth": truth}
    )
    return {
        "labels": (random.random(ROWS) < truth).astype(float),
        "ours": np.clip(truth + random.normal(0, 0.1, ROWS), 0.01, 0.99),
        "theirs": np.clip(truth + random.normal(0, 0.15, ROWS), 0.01, 0.99),
        "extra": columns,
        "times": random.integers(1, 5, ROWS),
    }


def scored(rows: dict[str, Any], at: np.ndarray, weights: np.ndarray | None) -> ScoredRows:
    return ScoredRows(
        rows["labels"][at], rows["ours"][at], rows["extra"].take(pa.array(at)), rows["theirs"][at], weights=weights
    )


def evaluation(part: ScoredRows, folder: Path) -> Evaluation:
    found = Evaluation(CONFIG, "user", folder)
    found.add(part)
    return found


def close(a: Quality, b: Quality) -> bool:
    names = [name for name in Quality.model_fields if name not in ("rows", "undefined")]
    assert all(getattr(b, name) is not None for name in names)
    return all(getattr(a, name) == pytest.approx(getattr(b, name), rel=1e-7) for name in names)


def test_a_weight_counts_as_that_many_rows(rows: dict[str, Any], tmp_path: Path) -> None:
    every = np.arange(ROWS)
    ours = evaluation(scored(rows, every, rows["times"].astype(float)), tmp_path / "a")
    theirs = evaluation(scored(rows, np.repeat(every, rows["times"]), None), tmp_path / "b")
    report, other = ours.report(), theirs.report()
    assert close(report.overall, other.overall)
    assert report.overall.rows == ROWS
    assert report.ne_floor == pytest.approx(other.ne_floor, rel=1e-7)
    assert [(part.value, part.quality.rows) for part in report.slices] == [("A", ROWS // 2), ("B", ROWS // 2)]
    repeated = {part.value: part.quality for part in other.slices}
    assert all(close(part.quality, repeated[part.value]) for part in report.slices)
    bins = [[one.model_dump() for one in found.calibration] for found in (report, other)]
    assert bins[0] == [pytest.approx(one) for one in bins[1]]
    assert [point[0] for point in report.roc] == sorted(point[0] for point in report.roc)
    assert report.grouped is not None
    assert other.grouped is not None
    assert report.grouped.gauc == pytest.approx(other.grouped.gauc, abs=1e-8)
    mine, repeats = (
        ne_difference(found.pairs, False, 0.05) for found in (ours, theirs)
    )  # resampled by user, so nothing else differs
    assert mine is not None
    assert repeats is not None
    assert mine.model_dump() == pytest.approx(repeats.model_dump(), rel=1e-6)
    assert compare(ours, report, GateConfig(resample_by="user"), 1).decision == "promote"


def test_metrics_are_sklearns_with_weights(rows: dict[str, Any]) -> None:
    weights = np.random.default_rng(1).uniform(0.3, 20.0, ROWS)
    labels, ours = rows["labels"], rows["ours"]
    sums = MetricSums()
    sums.add(labels, ours, weights=weights)
    found = sums.quality()
    rate = np.average(labels, weights=weights)
    expected = log_loss(labels, ours, sample_weight=weights)
    assert found.logloss == pytest.approx(expected, rel=1e-9)
    assert found.ne == pytest.approx(expected / base_entropy(rate), rel=1e-9)
    assert found.label_rate == pytest.approx(rate, rel=1e-9)
    assert found.calibration == pytest.approx((ours * weights).sum() / (labels * weights).sum(), rel=1e-9)
    assert found.auc == pytest.approx(roc_auc_score(labels, ours, sample_weight=weights), abs=1e-4)
    assert found.pr_auc == pytest.approx(average_precision_score(labels, ours, sample_weight=weights), abs=2e-4)


def test_the_interval_over_rows_is_that_of_a_weighted_mean(rows: dict[str, Any]) -> None:
    """Compares with the sum in NumPy. The error of an NE is that of its difference to a model of loss 0."""
    weights = np.random.default_rng(2).uniform(0.5, 50.0, ROWS)
    labels = rows["labels"]
    difference = losses(labels, rows["ours"]) - losses(labels, rows["theirs"])
    rate, mean = np.average(labels, weights=weights), np.average(difference, weights=weights)
    entropy = base_entropy(rate)
    slope = mean / entropy * np.log((1 - rate) / rate)
    parts = weights * (difference - mean - slope * (labels - rate))
    error = np.sqrt(ROWS / (ROWS - 1) * np.square(parts).sum()) / weights.sum() / entropy
    found = ne_difference(sum_pairs(labels, rows["ours"], rows["theirs"], weights=weights), True, 0.05)
    assert found is not None
    assert found.units == ROWS
    assert found.ne == pytest.approx(mean / entropy, rel=1e-7)
    assert found.high - found.ne == pytest.approx(student.ppf(0.975, ROWS - 1) * error, rel=1e-6)
    one, plain = MetricSums(), MetricSums()
    one.add(labels, rows["ours"], weights=np.ones(ROWS))
    plain.add(labels, rows["ours"])
    assert one.ne_error() == pytest.approx(plain.ne_error(), rel=1e-6)
    assert close(one.quality(), plain.quality())


def test_weights_that_sum_to_little_fill_all_bins(rows: dict[str, Any]) -> None:
    small, plain = MetricSums(), MetricSums()
    small.add(rows["labels"], rows["ours"], weights=np.full(ROWS, 2.0**-14))
    plain.add(rows["labels"], rows["ours"])
    found, expected = (equal_bins(one.by_log_odds[0], one.predicted[0]) for one in (small, plain))
    assert [one.predicted for one in found] == pytest.approx([one.predicted for one in expected], rel=1e-3)


@pytest.mark.parametrize(
    ("labels", "probabilities", "reason"),
    [
        ([1, 1], [0.4, 0.5], "all labels are alike"),
        ([0, 1], [0.4, float("nan")], "1 predictions are not probabilities"),
    ],
)
def test_undefined_with_a_reason(labels: list[int], probabilities: list[float], reason: str) -> None:
    """With and without weights."""
    adds: list[Callable[[], Quality]] = []
    for weights in (None, np.array([3.0, 0.5])):
        sums = MetricSums()
        sums.add(np.array(labels, float), np.array(probabilities), weights=weights)
        adds.append(sums.quality)
    assert [add().undefined["ne"] for add in adds] == [reason, reason]
    assert [add().ne for add in adds] == [None, None]

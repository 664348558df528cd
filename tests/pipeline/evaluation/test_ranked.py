"""AUC is that of the predictions themselves, however close they are, in any portions and in fixed memory."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import average_precision_score, roc_auc_score

from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.evaluate import Evaluation, ScoredRows
from pipeline.evaluation.ranked import RankedSums, rank_keys
from pipeline.evaluation.sums import COARSE_BINS, MetricSums

KINDS = {
    "close": lambda z: 1 / (1 + np.exp(2.0 - 1e-6 * z)),
    "closer": lambda z: np.nextafter(0.3, 1.0) + np.round(50 * z) * np.spacing(0.3),
    "near 1": lambda z: 1.0 - 1e-9 * np.exp(z),
    "near 0": lambda z: 1e-20 * np.exp(z),
    "float32": lambda z: (0.05 + 1e-4 * z).astype(np.float32).astype(np.float64),
    "ends": lambda z: np.clip(np.round(z, 1), 0.0, 1.0),
    "usual": lambda z: 1 / (1 + np.exp(2.0 - z)),
}


def drawn(kind: str, rows: int, seed: int = 3) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    z = random.normal(size=rows)
    return (random.random(rows) < 1 / (1 + np.exp(1.0 - 2.0 * z))).astype(float), KINDS[kind](z)


@pytest.mark.parametrize("kind", KINDS)
def test_auc_is_exact_for_all_rows_and_for_slices(kind: str) -> None:
    labels, probabilities = drawn(kind, 6_000)
    members = np.arange(6_000) % 3
    weights = np.random.default_rng(4).uniform(0.5, 9.0, 6_000)
    whole, sliced = MetricSums(), MetricSums(3, COARSE_BINS)
    for at in range(0, 6_000, 700):
        rows = slice(at, at + 700)
        part, of_slices = MetricSums(), MetricSums(3, COARSE_BINS)
        part.add(labels[rows], probabilities[rows], weights=weights[rows])
        of_slices.add(labels[rows], probabilities[rows], members[rows], weights[rows])
        whole.merge(part)
        sliced.merge(of_slices, [0, 1, 2])
    for sums, member, own in [(whole, 0, members >= 0), *((sliced, one, members == one) for one in range(3))]:
        found, given = sums.quality(member), {"sample_weight": weights[own]}
        assert found.auc == pytest.approx(roc_auc_score(labels[own], probabilities[own], **given), abs=1e-12)
        assert found.pr_auc == pytest.approx(average_precision_score(labels[own], probabilities[own], **given), abs=1e-12)  # fmt: skip


@pytest.mark.parametrize("kind", ["close", "near 1", "usual", "float32"])
def test_with_more_predictions_than_cells_auc_is_close_and_memory_fixed(kind: str) -> None:
    labels, probabilities = drawn(kind, 60_000)
    ranked = RankedSums(1_000)
    for at in range(0, 60_000, 1_024):
        part = RankedSums(1_000)
        rows = slice(at, at + 1_024)
        ones = np.ones(len(labels[rows]))
        part.add(np.zeros(len(ones), np.int64), probabilities[rows], ones, labels[rows])
        ranked.merge(part)
        assert len(ranked.cells) <= 2_000
    weight, positive = ranked.of(0).T
    assert (weight.sum(), positive.sum()) == (60_000, labels.sum())
    below = np.cumsum(weight - positive) - 0.5 * (weight - positive)
    auc = (positive * below).sum() / (positive.sum() * (weight - positive).sum())
    assert auc == pytest.approx(roc_auc_score(labels, probabilities), abs=2e-4)
    starts, ends = ranked.cells[:, 1], ranked.cells[:, 1] + (1 << ranked.cells[:, 2])
    assert (starts[1:] >= ends[:-1]).all()


def test_members_get_other_numbers_and_keep_their_rows() -> None:
    one, other = RankedSums(10), RankedSums(10)
    for ranked, members in ((one, [0, 1, 1]), (other, [0, 0, 1])):
        ranked.add(np.array(members), np.array([0.2, 0.4, 0.3]), np.ones(3), np.array([1.0, 0.0, 1.0]))
    one.merge(other, [2, 1])
    assert [one.of(member).tolist() for member in range(4)] == [
        [[1, 1]], [[2, 2], [1, 0]], [[1, 1], [1, 0]], [],
    ]  # fmt: skip


def test_keys_are_in_the_order_of_the_numbers() -> None:
    random = np.random.default_rng(5)
    values = np.concatenate([random.random(500), 10.0 ** random.uniform(-300, 0, 500), 1 - 10.0 ** random.uniform(-16, 0, 500)])  # fmt: skip
    values = np.unique(np.concatenate([values, np.nextafter(values, 0.0), [0.0, 1.0, 0.5]]))
    keys = rank_keys(values)
    assert (np.diff(keys) > 0).all()
    assert rank_keys(np.array([-0.0]))[0] == rank_keys(np.array([0.0]))[0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, -math.inf, 1.5, -0.1])
@pytest.mark.parametrize("weights", [None, np.full(200, 2.0)], ids=["plain", "weighted"])
def test_a_prediction_that_is_no_probability_is_counted_everywhere(
    broken: float, weights: np.ndarray | None, tmp_path: Path
) -> None:
    labels, probabilities = drawn("usual", 200)
    probabilities[7] = broken
    extra = pa.table({"user": np.arange(200) % 5, "country": np.arange(200) % 2})
    config = EvaluationConfig(slices=("country",), group_by="user", small_slice_rows=0)
    evaluation = Evaluation(config, folder=tmp_path / "groups")
    evaluation.add(ScoredRows(labels, probabilities, extra, weights=weights))
    report = evaluation.report()
    assert report.overall.auc is report.overall.ne is None
    assert report.overall.undefined["auc"] == "1 predictions are not probabilities"
    assert {part.value: part.quality.auc is None for part in report.slices} == {"0": False, "1": True}
    assert report.grouped is not None
    assert (report.grouped.gauc, report.grouped.broken) == (None, 1)

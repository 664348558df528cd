"""Simple models on rows of a known rule, and the sentence that compares a model with them."""

import math
import warnings

import numpy as np
import pytest

from pipeline.errors import ConfigError
from pipeline.evaluation import baselines
from pipeline.evaluation.baselines import Baseline, Examples, compare_baselines, describe_comparison, loses
from pipeline.evaluation.config import require_installed
from pipeline.evaluation.metrics import Quality
from pipeline.transforms.column import Column


def examples(rows: int, seed: int) -> tuple[Examples, float]:
    """Rows whose log-odds are a number, an effect of each of 20 ids and a product of both. Also their true log loss."""
    draw = np.random.default_rng(seed)
    number, ids = draw.normal(size=rows).astype(np.float32), draw.integers(0, 20, rows)
    effect = np.random.default_rng(0).normal(size=20)
    logits = number + effect[ids] + 1.5 * number * np.sign(effect[ids])
    p = 1.0 / (1.0 + np.exp(-logits))
    labels = (draw.random(rows) < p).astype(float)
    offsets = np.arange(rows + 1)
    made = Examples.of(number[:, None], [Column(ids.astype(np.int64), offsets)], labels, None)
    return made, float(-np.mean(labels * np.log(p) + (1 - labels) * np.log(1 - p)))


def test_each_baseline_learns_what_it_can() -> None:
    train, test = examples(8_000, 1)[0], examples(4_000, 2)
    parts = [Examples(test[0].dense[at], test[0].ids[at], test[0].labels[at]) for at in (slice(0, 999), slice(0, 0), slice(999, None))]  # fmt: skip
    found = {one.name: one for one in compare_baselines(("rate", "logistic", "boosting"), train, lambda: parts, 1)}
    rate = train.labels.mean()
    entropy = -np.mean(test[0].labels * math.log(rate) + (1 - test[0].labels) * math.log(1 - rate))
    assert found["rate"].logloss == pytest.approx(entropy, rel=1e-6)
    assert found["rate"].ne == pytest.approx(1.0, abs=0.01)
    assert test[1] < found["boosting"].logloss < test[1] + 0.04
    assert found["boosting"].logloss < found["logistic"].logloss - 0.02 < found["rate"].logloss - 0.05
    assert {one.rows for one in found.values()} == {8_000}


def test_ids_that_no_training_row_has_are_scored() -> None:
    train, _ = examples(1_000, 1)
    empty = Column(np.empty(0, np.int64), np.zeros(6, np.int64))
    rows = [Examples.of(np.zeros((5, 1), np.float32), [empty], np.array([0.0, 1, 0, 1, 0]), None)]
    rows.append(Examples(rows[0].dense, np.full((5, 1), 77), rows[0].labels))
    assert rows[0].ids.tolist() == [[-1]] * 5
    for one in compare_baselines(("rate", "logistic", "boosting"), train, lambda: rows, 1):
        assert one.ne is not None


def test_rows_with_weight_count_so_often() -> None:
    train, _ = examples(600, 1)
    twice = np.where(train.labels == 1, 3.0, 1.0)
    weighted = Examples(train.dense, train.ids, train.labels, twice)
    (rate,) = compare_baselines(("rate",), weighted, lambda: [weighted], 1)
    share = twice[train.labels == 1].sum() / twice.sum()
    entropy = -(share * math.log(share) + (1 - share) * math.log(1 - share))
    assert rate.logloss == pytest.approx(entropy, rel=1e-6)


@pytest.mark.parametrize(("most", "converged"), [(200, True), (1, False)])
def test_a_fit_that_reaches_its_limit_is_noted_without_a_page_of_advice(
    monkeypatch: pytest.MonkeyPatch, most: int, converged: bool
) -> None:
    monkeypatch.setattr(baselines, "MOST_ITERATIONS", most)
    train, _ = examples(3_000, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = {one.name: one.converged for one in compare_baselines(("rate", "logistic"), train, lambda: [train], 1)}
    assert found == {"rate": True, "logistic": converged}


def test_a_model_that_loses_is_told() -> None:
    known = [Baseline(name="rate", ne=1.0, auc=0.5, logloss=0.6, rows=9, seconds=0.0)]
    known.append(known[0].model_copy(update={"name": "boosting", "ne": 0.88, "auc": 0.73}))
    worse = Quality.model_construct(ne=0.924, auc=0.7)
    assert loses(worse, known)
    assert describe_comparison(worse, known) == (
        "Worse than gradient boosting: NE 0.9240 against 0.8800, 5.0 % higher; AUC 0.7000 against 0.7300."
    )
    assert not loses(Quality.model_construct(ne=0.87, auc=0.74), known)
    assert describe_comparison(worse, []) is None


def test_without_scikit_learn_the_rate_remains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.evaluation.config.find_spec", lambda name: None)
    require_installed(("rate",))
    with pytest.raises(ConfigError) as error:
        require_installed(("rate", "boosting"))
    assert str(error.value) == (
        "evaluation.baselines: expected rate alone without scikit-learn, got rate, boosting. "
        "Install scikit-learn, or leave out logistic and boosting."
    )


def test_the_rows_in_memory_are_bounded() -> None:
    for rows, features in ((10**9, 10), (10**7, 5_000), (50, 3)):
        kept = -(-rows // baselines.sample_step(rows, features))
        assert kept <= baselines.MOST_ROWS
        assert kept * features <= baselines.MOST_CELLS


def test_two_zeros_are_not_compared_as_shares() -> None:
    """What a leak gives: the smaller one may be a thousandth of the other."""

    def said(ours: float, theirs: float) -> str | None:
        boosting = Baseline(name="boosting", ne=theirs, auc=1.0, logloss=0.0, rows=10, seconds=1.0)
        return describe_comparison(Quality.model_construct(ne=ours, auc=1.0), [boosting])

    same = "As good as gradient boosting: NE 0.0000 both; AUC 1.0000 against 1.0000."
    assert (said(3e-6, 2e-7), said(0.0, 0.0)) == (same, same)
    assert said(0.02, 0.0) == "Worse than gradient boosting: NE 0.0200 against 0.0000; AUC 1.0000 against 1.0000."
    assert said(0.0, 0.02) == "Better than gradient boosting: NE 0.0000 against 0.0200; AUC 1.0000 against 1.0000."

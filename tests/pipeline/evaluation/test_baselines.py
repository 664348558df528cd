"""Simple models on rows of a known rule, and the sentence that compares a model with them."""

import math
import warnings

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from pipeline.errors import ConfigError
from pipeline.evaluation import baselines
from pipeline.evaluation.baselines import Baseline, Examples, KnownIds, compare_baselines, describe_comparison, loses
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


def noisy(rows: int, ids: int, seed: int) -> Examples:
    """Rows of twelve days, with ids that say nothing of the label."""
    draw = np.random.default_rng(seed)
    made = draw.integers(0, ids, (rows, 1)), (draw.random(rows) < 0.3).astype(float)
    return Examples(np.zeros((rows, 1), np.float32), *made, None, np.sort(draw.integers(0, 12, rows)))


@pytest.mark.parametrize("past", [False, True])
def test_what_is_known_of_an_id_leaves_the_own_row_out(past: bool) -> None:
    """Against a loop over the rows. An id of noise has no hold on the rows it was counted in."""
    train, draw = noisy(300, 40, 3), np.random.default_rng(4)
    weights = draw.integers(1, 4, 300).astype(float)
    folds = train.days if past else draw.integers(0, 5, 300)
    assert folds is not None
    counted = KnownIds.count(train.ids[:, 0], train.labels, weights)
    rate = float(np.average(train.labels, weights=weights))
    for row, (_, rows, mean) in enumerate(counted.others(train.labels, weights, folds, past)):
        others = [
            at for at in range(300)
            if train.ids[at] == train.ids[row] and (folds[at] < folds[row] if past else folds[at] != folds[row])
        ]  # fmt: skip
        hits = sum(weights[at] * train.labels[at] for at in others)
        assert rows == sum(weights[at] for at in others)
        assert mean == pytest.approx((hits + 10.0 * rate) / (rows + 10.0))
    unseen, known = counted.of(np.array([77, train.ids[0, 0]]))
    assert (np.isnan(unseen[0]), unseen[1], unseen[2]) == (True, 0.0, pytest.approx(rate))
    same = train.ids[:, 0] == train.ids[0, 0]
    assert known[1] == weights[same].sum()
    many = noisy(20_000, 4_000, 5)
    counted = KnownIds.count(many.ids[:, 0], many.labels, None)
    folds = many.days if past else draw.integers(0, 5, 20_000)
    assert folds is not None
    honest = counted.others(many.labels, None, folds, past)[:, 2]
    assert roc_auc_score(many.labels, counted.of(many.ids[:, 0])[:, 2]) > 0.75, "with the own row it would"
    assert roc_auc_score(many.labels, honest) == pytest.approx(0.5, abs=0.015)
    (boosting,) = compare_baselines(("boosting",), many, lambda: [noisy(5_000, 4_000, 6)], 1, noisy(5_000, 4_000, 7))
    assert boosting.ne == pytest.approx(1.0, abs=0.005)


def test_ids_that_matter_are_learned_as_well_as_their_rates_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 users: the rate of each in the training rows is what there is to know. Time and trees are bounded."""
    effect = np.random.default_rng(0).normal(size=2_000)

    def rows(count: int, seed: int) -> Examples:
        draw = np.random.default_rng(seed)
        ids = draw.integers(0, 2_000, count)
        labels = (draw.random(count) < 1.0 / (1.0 + np.exp(-effect[ids]))).astype(float)
        return Examples(np.zeros((count, 1), np.float32), ids[:, None], labels)

    train, test = rows(40_000, 1), rows(20_000, 2)
    (found,) = compare_baselines(("boosting",), train, lambda: [test], 1, rows(5_000, 3))
    shrunk = [(train.labels[train.ids[:, 0] == id].sum() + 2.0) / ((train.ids[:, 0] == id).sum() + 4.0) for id in range(2_000)]  # fmt: skip
    best = log_loss(test.labels, np.array(shrunk)[test.ids[:, 0]])
    assert found.logloss == pytest.approx(best, rel=0.01)
    monkeypatch.setattr(baselines, "MOST_SECONDS", 0.0)
    (bounded,) = compare_baselines(("boosting",), train, lambda: [test], 1)
    assert not bounded.converged

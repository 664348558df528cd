"""The gate on simulated pairs of known quality and against a plain bootstrap, and each of its rules."""

import re

import numpy as np
import pyarrow as pa
import pytest

from benchmarks.gate import called_different, false_alarms, judged_days, pair, promoted, sigmoid, truth
from pipeline.errors import ConfigError
from pipeline.evaluation.config import EvaluationConfig, GateConfig
from pipeline.evaluation.evaluate import ScoredRows
from pipeline.evaluation.gate import compare, judge_first, log_calibration, ne_difference, sum_pairs
from pipeline.evaluation.metrics import base_entropy, losses
from pipeline.evaluation.sums import unit_groups
from tests.quality import evaluate, quality

LEVEL = 0.05


def test_pairs_of_equal_quality_are_rarely_called_different():
    assert false_alarms(200, 20_000) <= 18


@pytest.mark.nightly
def test_half_a_percent_is_found_on_200000_rows():
    assert promoted(40, 200_000, 0.005) >= 36


def test_the_difference_is_that_of_the_two_nes():
    labels, ours, theirs = pair(5_000, 0.005, np.random.default_rng(1))
    found = ne_difference(sum_pairs(labels, ours, theirs), True, LEVEL)
    assert found.ne == pytest.approx(quality(labels, ours).ne - quality(labels, theirs).ne, abs=1e-9)
    swapped = ne_difference(sum_pairs(labels, theirs, ours), True, LEVEL)
    assert (swapped.low, swapped.high) == pytest.approx((-found.high, -found.low))


@pytest.mark.slow
@pytest.mark.parametrize("clustered", [False, True])
def test_the_interval_is_that_of_a_bootstrap(clustered):
    """Returns the NE of both models for each of two thousand resamples of the units."""
    random = np.random.default_rng(5)
    labels, ours, theirs = pair(4_000, 0.01, random)
    units = random.integers(0, 80, 4_000) if clustered else np.arange(4_000)
    if clustered:  # rows of a unit have errors in common
        shift = random.normal(0.0, 0.4, 80)[units]
        ours = sigmoid(np.log(ours / (1.0 - ours)) + shift)
    found = ne_difference(sum_pairs(labels, ours, theirs, units if clustered else None), not clustered, LEVEL)
    rows_of = [np.flatnonzero(units == unit) for unit in range(units.max() + 1)]
    drawn = []
    for _ in range(2_000):
        rows = np.concatenate([rows_of[unit] for unit in random.integers(0, len(rows_of), len(rows_of))])
        difference = (losses(labels[rows], ours[rows]) - losses(labels[rows], theirs[rows])).mean()
        drawn.append(difference / base_entropy(labels[rows].mean()))
    low, high = np.quantile(drawn, [LEVEL / 2, 1 - LEVEL / 2])
    width = found.high - found.low
    assert (found.low, found.high) == pytest.approx((low, high), abs=0.1 * width)
    assert found.units == len(rows_of)


def days_apart(random, days=25, rows=400):
    """Two models of equal quality. Each one is off on some days."""
    day = np.repeat(np.arange(days), rows)
    logits = truth(days * rows, random)
    labels = (random.random(len(logits)) < sigmoid(logits)).astype(float)
    ours, theirs = (sigmoid(logits + random.normal(0.0, 0.5, days)[day]) for _ in range(2))
    return labels, ours, theirs, day


def test_errors_of_a_days_rows_are_correlated():
    """Resampled by rows, equal models are always called different. Resampled by days, they are not."""
    called = {"row": 0, "day": 0}
    for number in range(100):
        labels, ours, theirs, day = days_apart(np.random.default_rng([3, number]))
        for by, units in (("row", None), ("day", day)):
            found = ne_difference(sum_pairs(labels, ours, theirs, units), units is None, LEVEL)
            called[by] += not found.low <= 0.0 <= found.high
    assert called["row"] > 30
    assert called["day"] <= 11


@pytest.mark.one_in(3)
@pytest.mark.parametrize("days", [5, 7, 19])
def test_equal_models_are_rarely_called_different_over_few_days(days):
    """Resampled by rows, a quarter of these pairs is. `benchmarks.gate --days` measures the share over more pairs."""
    assert called_different(60, days, 1_000) <= 7


@pytest.mark.parametrize(("days", "said"), [(1, "rows of one day only)"), (4, "rows of 4 days only)"), (5, "5 days)")])
def test_an_interval_over_few_days_is_said_to_be_of_those_days_only(days, said):
    part = judged_days(days, 200, np.random.default_rng(1))
    evaluation = evaluate([part], EvaluationConfig())
    verdict = compare(evaluation, evaluation.report(), GateConfig(), 3)
    assert said in verdict.reason


@pytest.mark.parametrize("labels", [np.zeros(100), np.ones(100), np.array([0.0, 1.0]), np.empty(0)])
def test_what_cannot_be_compared_is_none(labels):
    half = np.full(len(labels), 0.5)
    assert ne_difference(sum_pairs(labels, half, half), True, LEVEL) is None


def gate(labels, ours, theirs, config=None, slices=(), small=1_000, **extra):
    config, columns = config or GateConfig(), {"day": np.zeros(len(labels), np.int32)} | extra
    part = ScoredRows(labels, ours, pa.table(columns), theirs)
    units = "day" if config.resample_by in (None, "row") else config.resample_by
    evaluation = evaluate([part], EvaluationConfig(slices=slices, small_slice_rows=small), units)
    return compare(evaluation, evaluation.report(), config, 3)


def test_a_better_challenger_is_promoted_and_a_worse_one_rejected():
    labels, better, worse = pair(200_000, 0.02, np.random.default_rng(1))
    up, down = gate(labels, better, worse), gate(labels, worse, better)
    assert (up.decision, down.decision) == ("promote", "reject")
    assert up.reason.startswith("NE is lower than that of version 3, ")
    assert down.reason.startswith("NE is higher than that of version 3, ")
    assert up.champion == 3
    assert up.champion_ne == quality(labels, worse).ne
    assert gate(labels, better, worse, GateConfig(least_gain=0.05)).decision == "hold"


def test_size_and_interval_of_a_sure_difference_have_one_sign():
    labels, better, worse = pair(200_000, 0.02, np.random.default_rng(1))
    for ours, theirs in ((better, worse), (worse, better)):
        verdict = gate(labels, ours, theirs)
        shown = re.fullmatch(r".*, by ([0-9.]+)% \(([0-9.]+)% to ([0-9.]+)% over .*\)\.", verdict.reason)
        assert shown is not None, verdict.reason
        size, low, high = map(float, shown.groups())
        assert low < size < high
        assert size == pytest.approx(100 * abs(verdict.difference.ne) / verdict.champion_ne, abs=0.01)


def test_what_may_be_chance_is_held():
    labels, ours, theirs = pair(5_000, 0.0, np.random.default_rng(1))
    verdict = gate(labels, ours, theirs)
    assert verdict.decision == "hold"
    assert verdict.reason.endswith("over 5,000 rows of one day only), which may be chance.")
    assert re.search(r", by [+-][0-9.]+% \(-[0-9.]+% to \+[0-9.]+% over", verdict.reason), "either sign"


def test_models_of_each_day_need_not_be_better():
    """`not_worse` promotes a difference that may be chance. It rejects a clearly worse or miscalibrated model."""
    config = GateConfig(rule="not_worse")
    labels, ours, theirs = pair(5_000, 0.0, np.random.default_rng(1))
    verdict = gate(labels, ours, theirs, config)
    assert verdict.decision == "promote"
    assert verdict.reason.startswith("NE is not higher for sure than that of version 3, ")
    assert gate(labels, np.full(len(labels), labels.mean()), theirs, config).decision == "reject"
    off = sigmoid(np.log(ours / (1.0 - ours)) + 0.5)
    assert gate(labels, off, np.clip(theirs + random_noise(labels), 0.01, 0.99), config).decision == "reject"
    with pytest.raises(ConfigError, match=r"gate\.least_gain with rule=not_worse"):
        GateConfig(rule="not_worse", least_gain=0.001)


def first(labels, ours, config=None):
    part = ScoredRows(labels, ours, pa.table({"day": np.zeros(len(labels), np.int32)}))
    evaluation = evaluate([part], EvaluationConfig())
    return judge_first(evaluation, evaluation.report(), config or GateConfig())


def test_a_first_model_must_be_better_than_the_mean_rate():
    labels, ours, _ = pair(20_000, 0.0, np.random.default_rng(1))
    good = first(labels, ours)
    assert good.decision == "promote"
    found = quality(labels, ours).ne
    assert good.reason.startswith(f"There is no champion yet, and NE {found:.4f} (")
    shuffled = first(labels, np.random.default_rng(2).permutation(ours))
    assert (shuffled.decision, shuffled.champion) == ("hold", None)
    assert "is not below 1 for sure" in shuffled.reason
    constant = first(labels, np.full(len(labels), labels.mean()))
    assert constant.decision == "hold"


def test_a_first_model_must_be_calibrated():
    labels, ours, _ = pair(20_000, 0.0, np.random.default_rng(1))
    off = first(labels, sigmoid(np.log(ours / (1.0 - ours)) + 0.6))
    assert off.decision == "hold"
    assert off.reason.startswith("There is no champion. Calibration 1.")
    assert off.reason.endswith("lies outside 0.8 to 1.25.")


def test_a_first_model_on_a_handful_of_rows_is_held():
    assert "fewer than 5 rows" in first(np.array([0.0, 1.0, 1.0]), np.array([0.1, 0.9, 0.9])).reason
    assert first(np.zeros(50), np.full(50, 0.1)).reason == "NE is undefined: all labels are alike."


def test_the_same_predictions_are_held():
    labels, ours, _ = pair(1_000, 0.0, np.random.default_rng(1))
    verdict = gate(labels, ours, ours)
    assert (verdict.decision, verdict.difference.low, verdict.difference.high) == ("hold", 0.0, 0.0)


def test_labels_that_are_all_alike_are_held():
    verdict = gate(np.zeros(50), np.full(50, 0.1), np.full(50, 0.2))
    assert verdict.decision == "hold"
    assert verdict.reason == "NE of this model is undefined: all labels are alike."


def test_a_challenger_that_is_off_is_rejected_unless_the_champion_is_further_off():
    labels, ours, theirs = pair(50_000, 0.0, np.random.default_rng(1))
    off = sigmoid(np.log(ours / (1.0 - ours)) + 0.5)
    assert gate(labels, off, np.clip(theirs + random_noise(labels), 0.01, 0.99)).reason.startswith("Calibration 1.")
    further = sigmoid(np.log(theirs / (1.0 - theirs)) + 1.0)
    assert gate(labels, off, further).decision == "promote"


@pytest.mark.one_in(3)
@pytest.mark.parametrize("positives", [5, 20, 80])
def test_equal_models_are_rarely_rejected_for_their_calibration(positives):
    """Few positive labels make the calibration of the best model look bad."""
    rejected = 0
    for number in range(100):
        random = np.random.default_rng([6, number])
        labels, ours, theirs = pair(round(positives / 0.3), 0.0, random)
        rejected += gate(labels, ours, theirs).reason.startswith("Calibration ")
    assert rejected <= 5


def test_a_day_with_another_label_rate_says_nothing_about_a_models_calibration():
    """Both models are off by as much: the better one is not rejected for it."""
    rejected = 0
    for number in range(30):
        random = np.random.default_rng([7, number])
        labels, ours, theirs = pair(20_000, 0.005, random)
        moved = (sigmoid(np.log(p / (1.0 - p)) - 0.5) for p in (ours, theirs))
        rejected += gate(labels, *moved).reason.startswith("Calibration ")
    assert rejected <= 3


def test_the_interval_of_a_calibration_is_that_of_a_bootstrap():
    random = np.random.default_rng(5)
    labels, ours, theirs = pair(4_000, 0.01, random)
    part = ScoredRows(labels, ours, pa.table({"user": np.arange(4_000) % 80}), theirs)
    sums = evaluate([part], EvaluationConfig(), "user").calibrations
    for weights in ((1.0, 0.0), (0.0, 1.0), (1.0, -1.0), (-1.0, -1.0)):
        values = []
        for rows in random.integers(0, 4_000, (1_000, 4_000)):
            logs = [np.log(model[rows].sum() / labels[rows].sum()) for model in (ours, theirs)]
            values.append(np.dot(weights, logs))
        low, high = np.quantile(values, [LEVEL / 2, 1 - LEVEL / 2])
        for by_rows, units in ((True, 4_000), (False, 80)):  # rows are independent, also within a user
            found = log_calibration(sums, units, by_rows, LEVEL, *weights)
            within = 0.1 if by_rows else 0.25  # the error of 80 units is itself uncertain
            assert (found.low, found.high) == pytest.approx((low, high), abs=within * (high - low))


def random_noise(labels):
    """Noise that makes the champion worse by NE and leaves its calibration."""
    return np.random.default_rng(2).normal(0.0, 0.2, len(labels))


def test_a_slice_that_loses_much_rejects_a_challenger_that_is_better_as_a_whole():
    labels, ours, theirs = pair(100_000, 0.02, np.random.default_rng(1))
    country = np.where(np.arange(100_000) % 20 == 0, "small", "large")
    ours = np.where(country == "small", np.clip(1.0 - ours, 0.2, 0.4), ours)
    verdict = gate(
        labels, ours, np.clip(theirs + random_noise(labels), 0.05, 0.95), slices=("country",), country=country
    )
    assert verdict.decision == "reject"
    assert verdict.reason.startswith("Where country = small, NE is higher than that of version 3, ")
    others = np.clip(theirs + random_noise(labels), 0.05, 0.95)
    assert gate(labels, ours, others, slices=("country",), small=5_001, country=country).decision == "promote"


def test_a_large_slice_without_a_positive_label_is_named():
    labels, ours, theirs = pair(100_000, 0.02, np.random.default_rng(1))
    country = np.where((np.arange(100_000) % 4 == 0) & (labels == 0.0), "none", "some")
    others = np.clip(theirs + random_noise(labels), 0.05, 0.95)
    verdict = gate(labels, ours, others, slices=("country",), country=country)
    assert verdict.decision == "promote"
    assert verdict.reason.endswith(" Not compared, because NE is undefined: country = none.")


def test_equal_models_are_rarely_called_different_in_one_of_many_slices():
    """Each of 20 slices at the level of the whole would reject two of five challengers."""
    rejected = 0
    for number in range(40):
        country = np.arange(10_000) % 20
        labels, ours, theirs = pair(10_000, 0.0, np.random.default_rng([7, number]))
        config = GateConfig(slice_loss=0.0, resample_by="row")
        verdict = gate(labels, ours, theirs, config, slices=("country",), small=100, country=country.astype(str))
        rejected += verdict.reason.startswith("Where country = ")
    assert rejected <= 5


@pytest.mark.parametrize(
    ("days", "by", "expected"),
    [(4, None, "row"), (5, None, "day"), (19, "day", "day"), (20, "row", "row"), (20, "user", "user")],
)
def test_the_configured_unit_is_resampled(days, by, expected):
    labels, ours, theirs = pair(1_000, 0.0, np.random.default_rng(1))
    number = np.arange(1_000)
    verdict = gate(labels, ours, theirs, GateConfig(resample_by=by), day=number % days, user=number % 50)
    assert verdict.resampled_by == expected
    assert verdict.difference.units == {"row": 1_000, "day": days, "user": 50}[expected]


def test_more_users_than_groups_are_put_together_and_the_interval_stays():
    """Each user has two equal rows, so there are half as many independent units as rows."""
    labels, ours, theirs = (np.repeat(values, 2) for values in pair(20_000, 0.0, np.random.default_rng(1)))
    users = np.array([f"user {number}" for number in np.repeat(np.arange(20_000), 2)])
    by_user = gate(labels, ours, theirs, GateConfig(resample_by="user"), user=users).difference
    by_row = gate(labels, ours, theirs, GateConfig(resample_by="row")).difference
    assert by_user.units == 1_024
    assert (by_user.high - by_user.low) / (by_row.high - by_row.low) == pytest.approx(2**0.5, rel=0.06)


@pytest.mark.parametrize(("bad", "model"), [(0, "this model"), (1, "version 3")])
def test_predictions_that_are_not_probabilities_are_held(bad, model):
    labels, *both = pair(1_000, 0.0, np.random.default_rng(1))
    both[bad][[3, 4]] = np.nan
    verdict = gate(labels, *both)
    assert (verdict.decision, verdict.reason) == (
        "hold",
        f"NE of {model} is undefined: 2 predictions are not probabilities.",
    )


@pytest.mark.parametrize("noise", [1e-4, 1e-5, 1e-6])
def test_models_that_hardly_differ_are_not_called_different(noise):
    """Squares of such small differences must not vanish next to the losses."""
    called = 0
    for number in range(40):
        random = np.random.default_rng([4, number])
        logits = truth(5_000, random)
        labels = (random.random(5_000) < sigmoid(logits)).astype(float)
        ours, theirs = (sigmoid(logits + random.normal(0.0, noise, 5_000)) for _ in range(2))
        found = ne_difference(sum_pairs(labels, ours, theirs), True, LEVEL)
        called += not found.low <= 0.0 <= found.high
    assert called <= 6


@pytest.mark.parametrize("ids", [np.arange(50), np.arange(10_000) << 22, np.arange(10_000) * 1_024, -np.arange(900)])
def test_ids_of_any_stride_are_spread_over_the_groups(ids):
    groups = unit_groups(pa.chunked_array([pa.array(ids)]))
    counts = np.bincount(groups, minlength=1_024)
    assert (counts > 0).sum() >= min(len(ids), 1_024) * 0.6
    assert counts.max() <= 5 * max(len(ids) / 1_024, 1.0)


@pytest.mark.parametrize("kind", [pa.int64(), pa.string(), pa.float64(), pa.date32()], ids=str)
def test_rows_without_a_unit_are_units_of_their_own(kind):
    known = pa.array([1, 1, 2]).cast(pa.int32()).cast(kind)
    groups = unit_groups(pa.chunked_array([pa.nulls(3_000, kind), known]))
    assert groups[-3] == groups[-2] != groups[-1]
    counts = np.bincount(groups[:-3], minlength=1_024)
    assert (counts > 0).all()
    assert counts.max() <= 6
    assert (unit_groups(pa.chunked_array([known])) == groups[-3:]).all()


def test_numbers_that_are_none_are_units_of_their_own():
    assert len(set(unit_groups(pa.chunked_array([pa.array([float("nan")] * 100)])))) == 100


def test_contradicting_bounds_are_refused():
    with pytest.raises(ConfigError, match=r"gate\.calibration_low"):
        GateConfig(calibration_low=1.2, calibration_high=1.1)


def test_a_model_that_is_too_good_is_held_unless_its_champion_is():
    """A person promoted that champion, knowing why it is so good. Shares of an NE of zero are not told."""
    labels, _, usual = pair(5_000, 0.0, np.random.default_rng(1))
    sure = np.where(labels == 1.0, 1.0 - 1e-9, 1e-9)
    for verdict in (first(labels, sure), gate(labels, sure, usual)):
        assert verdict.decision == "hold"
        assert "NE 0.0000 is below 0.05: most likely a feature is known only after the label." in verdict.reason
        assert verdict.reason.endswith("python -m flows.promote CONFIG version=N.")
    good = np.where(labels == 1.0, 0.999, 0.001)
    assert gate(labels, sure, good).decision == "promote"
    worse = gate(labels, good, sure)
    assert (worse.decision, "%" in worse.reason.split("by", 1)[1]) == ("reject", False), worse.reason

"""The report: slices, floor, ROC, and what is refused."""

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import auc as area
from sklearn.metrics import log_loss

from pipeline.errors import EmptyDatasetError
from pipeline.evaluation import plots
from pipeline.evaluation.evaluate import EvaluationConfig, Scored, evaluate
from pipeline.evaluation.metrics import quality


@pytest.fixture
def parts():
    random = np.random.default_rng(3)
    truth = random.beta(2, 5, 3_000)
    labels = (random.random(3_000) < truth).astype(float)
    probabilities = np.clip(truth + random.normal(0, 0.1, 3_000), 0.01, 0.99)
    country = pa.array([None if i % 50 == 0 else "ABC"[i % 3] for i in range(3_000)])
    extra = pa.table({"country": country, "truth": truth})
    return [Scored(labels[i : i + 700], probabilities[i : i + 700], extra.slice(i, 700)) for i in range(0, 3_000, 700)]


def whole(parts):
    labels = np.concatenate([part.labels for part in parts])
    return (
        labels,
        np.concatenate([part.probabilities for part in parts]),
        pa.concat_tables([part.extra for part in parts]),
    )


def test_parts_are_judged_together(parts):
    report = evaluate(parts, EvaluationConfig())
    labels, probabilities, _ = whole(parts)
    assert report.overall == quality(labels, probabilities)
    assert report.ne_floor is None
    assert report.learned_share is None


def test_the_floor_is_the_ne_of_the_truth(parts):
    report = evaluate(parts, EvaluationConfig(true_probability="truth"))
    labels, _, extra = whole(parts)
    truth = extra.column("truth").to_numpy()
    assert report.ne_floor == pytest.approx(log_loss(labels, truth) / log_loss(labels, np.full(3_000, labels.mean())))
    assert report.learned_share == pytest.approx((1 - report.overall.ne) / (1 - report.ne_floor))


def test_slices_against_a_filter(parts):
    report = evaluate(parts, EvaluationConfig(slices=("country",)))
    labels, probabilities, extra = whole(parts)
    values = np.array(extra.column("country").to_pylist(), dtype=object)
    assert sum(part.quality.rows for part in report.slices) == 3_000
    for part in report.slices:
        chosen = np.array([str(value) == part.value for value in values])
        assert part.quality == quality(labels[chosen], probabilities[chosen])


def test_only_the_most_frequent_values_are_shown(parts):
    report = evaluate(parts, EvaluationConfig(slices=("country",), slice_values=2))
    assert len(report.slices) == 2
    assert "None" not in {part.value for part in report.slices}


def test_roc_encloses_the_auc(parts):
    report = evaluate(parts, EvaluationConfig())
    assert area(*zip(*report.roc, strict=True)) == pytest.approx(report.overall.auc, abs=2e-3)


def test_no_rows():
    with pytest.raises(EmptyDatasetError) as caught:
        evaluate([], EvaluationConfig())
    assert str(caught.value) == "evaluation rows: expected at least one, got none. Check split and filter."


def test_figures_show_what_they_are_given(parts):
    report = evaluate(parts, EvaluationConfig(slices=("country",), true_probability="truth"))
    curve = plots.learning_curve(
        {"valid_ne": [(10, 0.9), (20, 0.8)], "train_ne_window": []}, 20, report.overall.ne, report.ne_floor
    )
    lines = curve.axes[0].get_lines()
    assert lines[0].get_xydata().tolist() == [[10.0, 0.9], [20.0, 0.8]]
    assert len(plots.slices(report).axes[0].collections[0].get_offsets()) == len(report.slices)
    assert len(plots.calibration(report).axes[0].get_lines()[1].get_xdata()) == 20
    assert len(plots.roc(report).axes[0].get_lines()[1].get_xdata()) == len(report.roc)

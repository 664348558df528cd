"""The report: slices with intervals, GAUC, floor, curves, rows in any order, and refusals."""

import io
import pickle
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import auc as area
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from pipeline.errors import EmptyDatasetError
from pipeline.evaluation import plots
from pipeline.evaluation.config import EvaluationConfig
from pipeline.evaluation.evaluate import Evaluation, OrderedMerge, ScoredRows
from pipeline.evaluation.metrics import base_entropy
from pipeline.evaluation.ranked import RankedSums
from pipeline.evaluation.sums import MOST_VALUES
from tests.quality import evaluate, quality


@pytest.fixture
def parts():
    random = np.random.default_rng(3)
    truth = random.beta(2, 5, 3_000)
    labels = (random.random(3_000) < truth).astype(float)
    probabilities = np.clip(truth + random.normal(0, 0.1, 3_000), 0.01, 0.99)
    country = pa.array([None if i % 50 == 0 else "ABC"[i % 3] for i in range(3_000)])
    user = pa.array([None if i % 7 == 0 else i % 211 for i in range(3_000)])
    extra = pa.table({"country": country, "truth": truth, "user": user})
    champion = np.clip(truth + random.normal(0, 0.2, 3_000), 0.01, 0.99)
    return [
        ScoredRows(labels[i : i + 700], probabilities[i : i + 700], extra.slice(i, 700), champion[i : i + 700])
        for i in range(0, 3_000, 700)
    ]


def whole(parts):
    labels = np.concatenate([part.labels for part in parts])
    return (
        labels,
        np.concatenate([part.probabilities for part in parts]),
        pa.concat_tables([part.extra for part in parts]),
    )


def reported(parts, config):
    return evaluate(parts, config).report()


def test_parts_are_evaluated_together(parts):
    report = reported(parts, EvaluationConfig())
    labels, probabilities, _ = whole(parts)
    assert report.overall == quality(labels, probabilities)
    assert report.ne_floor is None
    assert report.learned_share is None


EVERYTHING = EvaluationConfig(slices=("country",), group_by="user", true_probability="truth")


ARRIVALS = [[0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [2, 0, 4, 1, 3], [1, 0, 3, 2, 4], [3, 4, 0, 2, 1]]


def arrays(evaluation):
    sliced = evaluation.slices["country"]
    sums = [evaluation.model, evaluation.champion, evaluation.truth, evaluation.pairs, sliced.metrics, sliced.pairs]
    parts = [one for each in sums for one in vars(each).values()]
    ranked = [array for one in parts if isinstance(one, RankedSums) for array in (one.cells, one.sums)]
    others = [one for one in parts if not isinstance(one, RankedSums)]
    return [array.tolist() for array in [*others, *ranked]], sliced.members.codes


@pytest.mark.slow
@pytest.mark.parametrize("weighted", [False, True])
def test_the_order_of_arrival_changes_no_bit(parts, tmp_path, weighted):
    """Portions from several processes arrive in any order. Five orders are tried."""
    if weighted:
        random = np.random.default_rng(3)
        parts = [replace(part, weights=random.uniform(1e-3, 5e3, len(part.labels))) for part in parts]
    found, reports = [], []
    for arrival in ARRIVALS:
        merged = OrderedMerge(Evaluation(EVERYTHING, "user", tmp_path / "groups"))
        for number in arrival:
            portion = Evaluation(EVERYTHING, "user", tmp_path / "groups")
            portion.add(parts[number])
            portion.close()
            merged.add(number, portion)
        assert not merged.waiting
        found.append(arrays(merged.whole))
        reports.append(merged.whole.report())
    assert all(other == found[0] for other in found[1:])
    assert all(other == reports[0] for other in reports[1:])
    assert reports[0].overall.rows == 3_000
    assert reports[0].grouped is not None
    assert not list(tmp_path.iterdir())


def test_portions_are_merged_as_soon_as_all_before_them_are(parts):
    merged = OrderedMerge(Evaluation(EvaluationConfig()))
    rows = []
    for number in (1, 0, 3, 4, 2):
        merged.add(number, evaluate([parts[number]], EvaluationConfig()))
        rows.append(int(merged.whole.model.rows[0]))
    assert rows == [0, 1_400, 1_400, 1_400, 3_000]


def test_memory_does_not_grow_with_rows(parts):
    """The pickled sums keep their size."""
    evaluation = evaluate(parts, EvaluationConfig(slices=("country",)))
    before = len(pickle.dumps(evaluation))
    for part in parts * 3:
        evaluation.add(part)
    assert len(pickle.dumps(evaluation)) == before
    assert evaluation.report().overall.rows == 12_000


def test_the_floor_is_the_ne_of_the_truth(parts):
    report = reported(parts, EvaluationConfig(true_probability="truth"))
    labels, _, extra = whole(parts)
    truth = extra.column("truth").to_numpy()
    assert report.ne_floor == pytest.approx(log_loss(labels, truth) / log_loss(labels, np.full(3_000, labels.mean())))
    assert report.learned_share == pytest.approx((1 - report.overall.ne) / (1 - report.ne_floor))


def test_slices_against_a_filter(parts):
    report = reported(parts, EvaluationConfig(slices=("country",), small_slice_rows=100))
    labels, probabilities, extra = whole(parts)
    values = np.array(extra.column("country").to_pylist(), dtype=object)
    assert sum(part.quality.rows for part in report.slices) == 3_000
    for part in report.slices:
        chosen = np.array([("(null)" if value is None else value) == part.value for value in values])
        exact = quality(labels[chosen], probabilities[chosen])
        assert part.quality.model_dump(exclude={"auc", "pr_auc", "ne_recalibrated", "undefined"}) == exact.model_dump(
            exclude={"auc", "pr_auc", "ne_recalibrated", "undefined"}
        )
        assert part.quality.auc == pytest.approx(roc_auc_score(labels[chosen], probabilities[chosen]), abs=5e-3)
        assert part.small == (part.value == "(null)")


@pytest.mark.nightly
def test_the_interval_of_a_slice_is_that_of_a_bootstrap(parts):
    report = reported(parts, EvaluationConfig(slices=("country",)))
    labels, probabilities, extra = whole(parts)
    part = next(part for part in report.slices if part.value == "A")
    rows = np.flatnonzero(np.array([value == "A" for value in extra.column("country").to_pylist()]))
    random, drawn = np.random.default_rng(1), []
    for _ in range(2_000):
        some = random.choice(rows, len(rows))
        drawn.append(log_loss(labels[some], probabilities[some]) / base_entropy(labels[some].mean()))
    width = part.ne_high - part.ne_low
    assert (part.ne_low, part.ne_high) == pytest.approx(tuple(np.quantile(drawn, [0.025, 0.975])), abs=0.1 * width)


def test_only_the_most_frequent_values_are_shown(parts):
    report = reported(parts, EvaluationConfig(slices=("country",), slice_values=2))
    assert len(report.slices) == 2
    assert "(null)" not in {part.value for part in report.slices}


def test_a_column_of_too_many_values_has_no_slices():
    rows = MOST_VALUES + 1
    part = ScoredRows(np.zeros(rows), np.full(rows, 0.5), pa.table({"id": np.arange(rows)}))
    config = EvaluationConfig(slices=("id",))
    report = reported([part], config)
    assert (report.slices, report.notes) == ((), {"id": "more than 1,000 values"})
    halves = [
        evaluate([ScoredRows(part.labels[s], part.probabilities[s], part.extra[s])], config)
        for s in (slice(600), slice(600, None))
    ]
    halves[0].merge(halves[1])
    merged = halves[0].report()
    assert (merged.slices, merged.notes, merged.overall.rows) == (report.slices, report.notes, rows)


def test_gauc_against_a_loop_over_the_groups(parts, tmp_path):
    evaluation = Evaluation(EvaluationConfig(group_by="user"), folder=tmp_path / "groups")
    coarse = [ScoredRows(part.labels, np.round(part.probabilities, 1), part.extra) for part in parts]
    for part in coarse:
        evaluation.add(part)
    labels, probabilities, extra = whole(coarse)
    users = np.array(extra.column("user").to_pylist(), dtype=object)
    found = [(len(labels[own]), roc_auc_score(labels[own], probabilities[own])) for user in set(users) - {None}
             if 0 < labels[own := users == user].mean() < 1]  # fmt: skip
    grouped = evaluation.report().grouped
    assert grouped.gauc == pytest.approx(sum(n * auc for n, auc in found) / sum(n for n, _ in found), abs=1e-8)
    assert (grouped.groups, grouped.rows) == (len(found), sum(n for n, _ in found))


def test_gauc_is_undefined_where_no_group_has_both_labels(tmp_path):
    evaluation = Evaluation(EvaluationConfig(group_by="user"), folder=tmp_path / "groups")
    evaluation.add(ScoredRows(np.array([0.0, 1.0]), np.array([0.2, 0.3]), pa.table({"user": ["a", "b"]})))
    grouped = evaluation.report().grouped
    assert (grouped.gauc, grouped.groups, grouped.rows) == (None, 0, 0)


def test_curves_enclose_the_areas(parts):
    report = reported(parts, EvaluationConfig())
    labels, probabilities, _ = whole(parts)
    assert area(*zip(*report.roc, strict=True)) == pytest.approx(report.overall.auc, abs=2e-3)
    expected = average_precision_score(labels, probabilities)
    assert area(*zip(*report.precision_recall, strict=True)) == pytest.approx(expected, abs=0.02)


def test_no_rows():
    with pytest.raises(EmptyDatasetError) as caught:
        reported([], EvaluationConfig())
    assert str(caught.value) == "evaluation rows: expected at least one, got none. Check split and filter."


def test_plots_show_the_values_they_are_given(parts):
    report = reported(parts, EvaluationConfig(slices=("country",), true_probability="truth"))
    curve = plots.learning_curve(
        {"valid_ne": [(10, 0.9), (20, 0.8)], "train_ne_window": []}, 20, report.overall.ne, report.ne_floor
    )
    lines = curve.axes[0].get_lines()
    assert lines[0].get_xydata().tolist() == [[10.0, 0.9], [20.0, 0.8]]
    assert len(plots.slices(report).axes[0].collections[0].get_offsets()) == len(report.slices)
    assert len(plots.calibration(report).axes[0].get_lines()[1].get_xdata()) == 20
    assert len(plots.roc(report).axes[0].get_lines()[1].get_xdata()) == len(report.roc)


@pytest.mark.nightly
def test_any_report_can_be_drawn():
    """Missing predictions, and slice values that look like formulas."""
    labels, odd = np.array([0.0, 1.0] * 40), pa.array(["$10_$20", "$\\x$", "a\nb", None] * 20)
    for probabilities in (np.full(80, np.nan), np.append(np.nan, np.full(79, 0.5)), np.full(80, 0.5)):
        report = reported(
            [ScoredRows(labels, probabilities, pa.table({"price": odd}))], EvaluationConfig(slices=("price",))
        )
        for draw in (plots.roc, plots.precision_recall, plots.calibration, plots.slices):
            with io.BytesIO() as file:
                draw(report).savefig(file, format="svg")
                assert file.getvalue().rstrip().endswith(b"</svg>")
    assert {part.value for part in report.slices} == {"$10_$20", "$\\x$", "a\nb", "(null)"}


@pytest.mark.parametrize("kind", [pa.float32(), pa.float64()])
def test_true_probabilities_may_be_certain_or_unknown(kind):
    labels = np.array([0.0, 1.0] * 10)
    truth = pa.array([0.0, 1.0] * 10, kind)
    parts = [ScoredRows(labels, np.full(20, 0.5), pa.table({"truth": truth}))]
    assert reported(parts, EvaluationConfig(true_probability="truth")).ne_floor == pytest.approx(0.0, abs=1e-9)
    parts = [ScoredRows(labels, np.full(20, 0.5), pa.table({"truth": pa.nulls(20, kind)}))]
    assert reported(parts, EvaluationConfig(true_probability="truth")).ne_floor is None

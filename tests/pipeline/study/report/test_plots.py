"""Figures of studies, also where there is little to draw."""

import io
import itertools

import numpy as np
import pytest

from pipeline.study.measure.results import PointResult
from pipeline.study.points.points import StudyPoint
from pipeline.study.report.plots import draw_figures
from tests.pipeline.study.report.studies import measured, quality_point, study

BATCH, SPARSE, DENSE = "training.batch_rows", "workload.sparse_features", "workload.dense_features"
GRID = [
    measured({BATCH: b, DENSE: d, SPARSE: s}, 1e5 * b / (d * s), 0.1)
    for b, d, s in itertools.product((200, 1_600), (64, 512, 4_096), (4, 32, 128))
]


def test_a_study_without_results_has_no_figures():
    gone = PointResult(point=StudyPoint(values={SPARSE: 4}, settings={}), state="failed", reason="no memory")
    assert draw_figures(study("E1", [])) == draw_figures(study("E1", [gone])) == {}


NAMED = [measured({"placement": name}, 1e4) for name in ("one rank", "row_wise")]
LISTS = [measured({SPARSE: 4, "model.bottom_mlp": units}, 1e4) for units in ([8], [8, 8])]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("experiment", "results"), [("E1", GRID), ("E5", NAMED), (None, LISTS), (None, GRID[:1])], ids=range(4)
)
def test_figures_are_drawn(experiment, results):
    drawn = draw_figures(study(experiment, results))
    assert drawn.keys() == {"throughput", "split", "roofline"}
    for figure in drawn.values():
        figure.savefig(io.BytesIO(), dpi=30)


def test_a_panel_for_each_batch_and_a_line_for_each_other_value():
    figure = draw_figures(study("E1", GRID))["throughput"]
    assert [axes.get_title() for axes in figure.axes] == ["batch_rows 200", "batch_rows 1600"]
    small, _ = figure.axes
    assert [text.get_text() for text in small.get_legend().get_texts()] == [
        f"dense_features {n}" for n in (64, 512, 4_096)
    ]
    assert (small.get_xscale(), small.get_yscale()) == ("log", "log")
    curve = small.containers[0].lines[0]  # type: ignore[attr-defined]
    assert list(curve.get_xdata()) == [4, 32, 128]
    assert list(curve.get_ydata()) == pytest.approx([1e5 * 200 / (64 * n) for n in (4, 32, 128)])


def test_the_caption_says_what_the_paper_reports_and_what_was_found():
    caption = draw_figures(study("E1", GRID))["throughput"].get_supxlabel()
    assert "Paper, figure 10: throughput falls with the number of sparse features." in caption
    assert "Here: agrees." in caption
    assert draw_figures(study(None, GRID))["throughput"].get_supxlabel() == ""


def test_bars_of_the_split_add_up():
    axes = draw_figures(study("E1", GRID[:2]))["split"].axes[0]
    ends = [patch.get_x() + patch.get_width() for patch in axes.patches]  # type: ignore[attr-defined]
    assert max(ends) == pytest.approx(1.0)
    assert [label.get_text() for label in axes.get_yticklabels()] == [one.point.name for one in GRID[:2]]


def test_the_roof_is_the_lower_of_the_ceilings():
    axes = draw_figures(study("E1", GRID))["roofline"].axes[0]
    read, random = (line for line in axes.lines if line.get_label().endswith(("in a row", "at random")))  # type: ignore[attr-defined]
    assert max(np.asarray(read.get_ydata())) == max(np.asarray(random.get_ydata())) == 100.0
    assert np.asarray(read.get_ydata())[0] == pytest.approx(20.0 * np.asarray(read.get_xdata())[0])
    [dots] = axes.collections
    assert np.asarray(dots.get_offsets())[0].tolist() == pytest.approx(
        [(1.1e9 + 2e4) / 5e7, 1e-6 * (1.1e9 + 2e4) / 5.0]
    )


def test_lines_of_quality():
    drawn = draw_figures(study("E6", [quality_point(16_384, 0.81, 0.765), quality_point(1_024, 0.75, 0.74)]))
    assert drawn.keys() == {"quality"}
    same, tuned = drawn["quality"].axes[0].lines
    assert (list(same.get_xdata()), list(same.get_ydata())) == ([1_024, 16_384], [0.75, 0.81])
    assert list(tuned.get_ydata()) == [0.74, 0.765]

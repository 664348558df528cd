"""The stall timeline draws the values it is given."""

import io

import numpy as np
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch

from pipeline.evaluation import plots

STALLS = [(5, 0.5), (10, 0.25), (12, 0.0), (20, 1.0)]
LABELS = {"extract": "read and decode", "transform": "transform and batch", "wait": "training waits"}
SECONDS = {kind: [(5, 0.1 * i), (10, 0.25), (12, 0.5 * i), (20, 0.001)] for i, kind in enumerate(LABELS, start=1)}


def drawn(figure: Figure) -> bytes:
    """The figure after rendering, which finds errors that setting it up does not."""
    with io.BytesIO() as file:
        figure.savefig(file, format="png")
        return file.getvalue()


def test_the_stall_timeline_shows_each_window_and_each_cost():
    curves = {"stall_fraction_window": STALLS} | {f"batch_{kind}_seconds": SECONDS[kind] for kind in LABELS}
    figure = plots.stall_timeline(curves)
    above, below = figure.axes
    [stairs] = [patch for patch in above.patches if isinstance(patch, StepPatch)]
    values, edges, _ = stairs.get_data()
    np.testing.assert_allclose(values, [50.0, 25.0, 0.0, 100.0])
    assert list(edges) == [0, 5, 10, 12, 20]  # a window reaches from the point before it to its own
    lines = {line.get_label(): line for line in below.lines}
    assert lines.keys() == set(LABELS.values())
    for kind, label in LABELS.items():
        assert list(lines[label].get_xdata()) == [5, 10, 12, 20]
        np.testing.assert_allclose(lines[label].get_ydata(), [1_000 * seconds for _, seconds in SECONDS[kind]])
    assert (above.get_ylabel(), below.get_ylabel(), below.get_xlabel()) == (
        "stalled, % of the time", "ms a batch", "step",
    )  # fmt: skip
    assert [text.get_text() for text in below.get_legend().get_texts()] == list(LABELS.values())
    assert drawn(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize("curves", [{}, {"stall_fraction_window": [], "batch_wait_seconds": []}])
def test_a_run_without_points_has_an_empty_timeline(curves):
    figure = plots.stall_timeline(curves)
    assert not any(axes.lines or axes.patches or axes.get_legend() for axes in figure.axes)
    assert drawn(figure).startswith(b"\x89PNG")


def test_a_timeline_of_some_curves_shows_those():
    figure = plots.stall_timeline({"stall_fraction_window": [], "batch_wait_seconds": [(3, 0.002)]})
    above, below = figure.axes
    assert not above.patches
    assert [(line.get_label(), *np.asarray(line.get_ydata())) for line in below.lines] == [("training waits", 2.0)]


def test_the_stall_timeline_names_the_use_of_the_cache():
    curves = {"stall_fraction_window": [(5, 0.5)], "batch_wait_seconds": [(5, 0.002)]}
    used = {"hits": 30, "misses": 10, "bytes_read": 2_500_000, "evicted": 3}
    titles = [plots.stall_timeline(curves, cache).axes[1].get_title() for cache in ({}, {"hits": 0, "misses": 0}, used)]
    assert titles == ["", "", "cache of columns: 75.0% hits, 2 MB read, 3 entries evicted"]

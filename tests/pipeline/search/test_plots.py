"""Figures of a sweep and of a release, also where there is little to draw."""

import io

import numpy as np
import pytest

from pipeline.search import plots
from pipeline.search.config import PruneConfig, SweepConfig
from pipeline.search.study import SearchStudy

SPACE = {
    "training.table_learning_rate": {"low": 0.01, "high": 1.0, "log": True},
    "model.bottom_mlp": {"choices": [[16], [32, 16]]},
    "features.name": {"choices": ["$a^$", None]},
    "model.embedding_width": {"low": 8, "high": 32, "step": 8},
}


def search(path, nes: list[float | None]) -> SearchStudy:
    """A sweep with these final NEs. Of the trials without an NE, every second is pruned and the others failed."""
    config = SweepConfig(strategy="random", trials=max(len(nes), 1), space=SPACE, prune=PruneConfig(every_rows=10))
    found = SearchStudy(path / "study.db", config, {})
    for number, ne in enumerate(nes):
        draw = found.next()
        if ne is not None:
            found.finish(draw.number, ne)
        elif number % 2:
            found.report(draw.number, 10, 0.9)
            found.prune(draw.number)
        else:
            found.fail(draw.number, "broken")
    return found


@pytest.mark.nightly
@pytest.mark.parametrize(
    "nes",
    [[], [None], [0.9], [0.9, None, None, 0.8, 0.85, 0.95], [0.9] * 6],
    ids=["empty", "failed", "one", "mixed", "equal"],
)
def test_figures_are_drawn(nes, tmp_path):
    figures = plots.draw_sweep(search(tmp_path, nes))
    assert list(figures) == ["history", "parallel_coordinates", "importance"]
    for figure in figures.values():
        figure.savefig(io.BytesIO())


def test_the_history_shows_the_best_so_far(tmp_path):
    points, best = plots.draw_sweep(search(tmp_path, [0.9, None, 0.95, 0.8]))["history"].axes[0].lines
    assert list(points.get_xdata()) == list(best.get_xdata()) == [0, 2, 3]
    assert list(points.get_ydata()) == [0.9, 0.95, 0.8]
    assert list(best.get_ydata()) == [0.9, 0.9, 0.8]


def test_a_trial_is_a_line_from_its_ne_through_its_values(tmp_path):
    found = search(tmp_path, [0.9, 0.8, 0.85])
    axes = plots.draw_sweep(found)["parallel_coordinates"].axes[0]
    names = [label.get_text().replace("\n", "") for label in axes.get_xticklabels()]
    assert names == ["NE", *sorted(SPACE)]
    lines = [np.asarray(line.get_ydata()) for line in axes.lines]
    assert [line[0] for line in lines] == pytest.approx([1.0, 0.5, 0.0])  # the best is drawn last
    rates = np.log([found.records()[number].params["training.table_learning_rate"] for number in (0, 2, 1)])
    place = 1 + sorted(SPACE).index("training.table_learning_rate")
    assert [line[place] for line in lines] == pytest.approx((rates - rates.min()) / (rates.max() - rates.min()))
    assert {"0.8", "0.9"} <= {text.get_text() for text in axes.texts}


def test_lines_of_a_release_end_where_their_candidate_did():
    figure = plots.draw_stages({"explore": {"a": 0.8, "b": 0.9}, "compare": {"b": 0.7}})
    figure.savefig(io.BytesIO())
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}
    assert lines == {"a": ([0], [0.8]), "b": ([0, 1], [0.9, 0.7])}

"""Figures of a sweep and of a release, also where there is little to draw."""

import io
import threading

import matplotlib
import matplotlib.pyplot as plt
import pytest

from pipeline.search import plots
from pipeline.search.config import PruneConfig, SweepConfig
from pipeline.search.release import CandidateStanding
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


@pytest.mark.parametrize(
    "nes",
    [[], [None], [0.9], [0.9, None, None, 0.8, 0.85, 0.95], [0.9] * 6],
    ids=["empty", "failed", "one", "mixed", "equal"],
)
def test_figures_are_drawn_and_leave_no_trace_in_pyplot(nes, tmp_path):
    style = dict(matplotlib.rcParams)
    figures = plots.draw_sweep(search(tmp_path, nes))
    assert list(figures) == ["history", "parallel_coordinates", "importance"]
    for figure in figures.values():
        figure.savefig(io.BytesIO())
    assert plt.get_fignums() == []
    assert dict(matplotlib.rcParams) == style


def test_threads_can_draw_at_the_same_time(tmp_path):
    found, drawn = search(tmp_path, [0.9, 0.8, 0.85, 0.95]), []
    threads = [threading.Thread(target=lambda: drawn.append(plots.draw_sweep(found))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(drawn) == 3
    assert plt.get_fignums() == []


def test_the_axes_of_parallel_coordinates_have_the_whole_keys(tmp_path):
    axes = plots.draw_parallel_coordinates(search(tmp_path, [0.9, 0.8])).axes[0]
    names = [label.get_text().replace("\n", "") for label in axes.get_xticklabels()]
    assert names == ["NE", *sorted(SPACE)]


def test_lines_of_a_release_end_where_their_candidate_did():
    found = {
        "explore": [
            CandidateStanding(name="a", valid_ne=0.8),
            CandidateStanding(name="b", valid_ne=0.9),
            CandidateStanding(name="c", failed="x"),
        ],
        "compare": [CandidateStanding(name="b", valid_ne=0.7), CandidateStanding(name="a", stopped=True)],
    }
    figure = plots.draw_stages(found)
    figure.savefig(io.BytesIO())
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}
    assert lines == {"a": ([0], [0.8]), "b": ([0, 1], [0.9, 0.7])}

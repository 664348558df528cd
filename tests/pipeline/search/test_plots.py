"""Figures of a sweep: drawn for what there is, also where that is little."""

import io

import pytest

from pipeline.search import plots
from pipeline.search.config import Dimension
from pipeline.search.release import CandidateStanding
from pipeline.search.study import TrialRecord

SPACE = {
    "training.table_learning_rate": Dimension(low=0.01, high=1.0, log=True),
    "model.bottom_mlp": Dimension(choices=([16], [32, 16])),
    "model.embedding_width": Dimension(low=8, high=32, step=8),
}


def record(number: int, state: str, rate: float, mlp: list[int], width: int, ne: float | None = None) -> TrialRecord:
    params = dict(zip(SPACE, (rate, mlp, width), strict=True))
    return TrialRecord(number=number, state=state, params=params, valid_ne=ne, seconds=1.0, notes={})


RECORDS = [
    record(0, "complete", 0.01, [16], 8, 0.9),
    record(1, "pruned", 0.1, [16], 16),
    record(2, "complete", 0.1, [32, 16], 32, 0.8),
    record(3, "failed", 1.0, [16], 16),
]


@pytest.mark.parametrize("records", [[], RECORDS[:1], RECORDS], ids=len)
def test_figures_are_drawn(records):
    for figure in (plots.history(records), plots.parallel_coordinates(records, SPACE), plots.importance({})):
        figure.savefig(io.BytesIO())


def test_lines_go_through_the_values():
    axes = plots.parallel_coordinates(RECORDS, SPACE).axes[0]
    lines = [list(line.get_ydata()) for line in axes.lines if len(line.get_xdata()) == 4]
    assert lines == [[0.0, 0.0, 0.0, pytest.approx(1.0)], [pytest.approx(0.5), 1.0, 1.0, 0.0]]


def test_choices_of_mappings_have_their_places_whatever_the_order_of_their_keys():
    space = {"features.derived": Dimension(choices=([], [{"name": "a", "from": "b"}]))}
    trial = TrialRecord(number=0, state="complete", params={"features.derived": [{"from": "b", "name": "a"}]}, valid_ne=0.9, seconds=1.0, notes={})  # fmt: skip
    [line] = [line for line in plots.parallel_coordinates([trial], space).axes[0].lines if len(line.get_xdata()) == 2 and line.get_alpha()]  # fmt: skip
    assert list(line.get_ydata()) == [1.0, 0.0]


def test_the_best_so_far_falls():
    [best] = [line for line in plots.history(RECORDS).axes[0].lines if line.get_label() == "best"]
    assert list(best.get_ydata()) == [0.9, 0.8]


def test_bars_of_importance():
    axes = plots.importance({"a": 0.75, "b": 0.25}).axes[0]
    assert [patch.get_width() for patch in axes.patches] == [0.75, 0.25]


def test_lines_of_a_release_end_where_their_candidate_did():
    found = {
        "explore": [
            CandidateStanding(name="a", valid_ne=0.8),
            CandidateStanding(name="b", valid_ne=0.9),
            CandidateStanding(name="c", failed="x"),
        ],
        "compare": [CandidateStanding(name="b", valid_ne=0.7), CandidateStanding(name="a", stopped=True)],
    }
    figure = plots.stages(found)
    figure.savefig(io.BytesIO())
    lines = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines}
    assert lines == {"a": ([0], [0.8]), "b": ([0, 1], [0.9, 0.7])}

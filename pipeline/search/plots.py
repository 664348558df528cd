"""The figures of a sweep, which Optuna draws, and of a release."""

import threading
import warnings
from collections.abc import Callable, Mapping, Sequence

import matplotlib
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from optuna.visualization.matplotlib import (
    plot_optimization_history,
    plot_parallel_coordinate,
    plot_param_importances,
)

from pipeline.figure import plain_figure
from pipeline.search.release import CandidateStanding, Stage
from pipeline.search.study import SearchStudy, make_evaluator

NE = "NE on the validation rows"
PYPLOT = threading.Lock()
"""Optuna draws with pyplot, which keeps its style and open figures per process."""


def draw_sweep(search: SearchStudy) -> dict[str, Figure]:
    """Draws the figures of a sweep, by name. Failed and pruned trials are not in them."""
    return {
        "history": draw_history(search),
        "parallel_coordinates": draw_parallel_coordinates(search),
        "importance": draw_importance(search),
    }


def draw_history(search: SearchStudy) -> Figure:
    """Draws the NE of each complete trial, and the best so far."""

    def plot() -> Axes:
        axes = plot_optimization_history(search.study, target_name=NE)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return axes

    return _draw(plot, width=8.0)


def draw_parallel_coordinates(search: SearchStudy) -> Figure:
    """Draws a line per complete trial through its values, dark where the NE is low."""
    keys = sorted(search.distributions)

    def plot() -> Axes:
        axes = plot_parallel_coordinate(search.study, target_name="NE")
        if len(axes.get_xticks()) == len(keys) + 1:  # else no trial is complete
            names = ["NE", *(key.replace(".", ".\n", 1) for key in keys)]  # Optuna cuts long ones
            axes.set_xticks(range(len(names)), names, rotation=0, fontsize=8)
        return axes

    return _draw(plot, width=2.0 * len(keys) + 4.0)


def draw_importance(search: SearchStudy) -> Figure:
    """Draws the share of each key in what makes trials good."""
    if search.importances():
        return _draw(lambda: plot_param_importances(search.study, make_evaluator(), target_name=NE), width=8.0)
    figure, axes = plain_figure("Hyperparameter Importances", "", "")
    axes.text(0.5, 0.5, "too few trials, or all have the same NE", ha="center", transform=axes.transAxes)
    axes.set_axis_off()
    return figure


def _draw(plot: Callable[[], Axes], width: float, height: float = 4.8) -> Figure:
    """Runs a plot of Optuna's. Closes its figure in pyplot and takes back its style."""
    with PYPLOT, matplotlib.rc_context(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the plots are experimental, and few or equal trials make narrow axes
        open_before = set(plt.get_fignums())
        try:
            figure = plot().get_figure(root=True)
            assert figure is not None
            figure.set_size_inches(width, height)
            figure.set_layout_engine("tight")
            for axes in figure.axes:
                if axes.get_yscale() == "linear":  # a choice may hold dollar signs, which are no formula
                    for label in axes.get_yticklabels():
                        label.set_parse_math(False)
            figure.canvas.draw()
        finally:
            for number in set(plt.get_fignums()) - open_before:
                plt.close(number)
    return figure


def draw_stages(found: Mapping[Stage, Sequence[CandidateStanding]]) -> Figure:
    """Draws the NE of each candidate from stage to stage. A line ends where its candidate did."""
    figure, axes = plain_figure("Candidates from stage to stage", "", NE)
    names = dict.fromkeys(one.name for standings in found.values() for one in standings)
    for name in names:
        points = [
            (place, one.valid_ne)
            for place, standings in enumerate(found.values())
            for one in standings
            if one.name == name and one.valid_ne is not None
        ]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", linewidth=1.3, label=name)
    axes.set_xticks(range(len(found)), list(found))
    axes.set_xlim(-0.3, len(found) - 0.7)
    if axes.lines:
        axes.legend(fontsize=8)
    return figure

"""The figures of a sweep and of a release."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.figure import plain_figure
from pipeline.search.config import Dimension
from pipeline.search.study import SearchStudy, TrialRecord

NE = "NE on the validation rows"


def draw_sweep(study: SearchStudy) -> dict[str, Figure]:
    """Draws the figures of a sweep, by name. Failed and pruned trials are not in them."""
    done = [one for one in study.records() if one.valid_ne is not None]
    return {
        "history": draw_history(done),
        "parallel_coordinates": draw_parallel_coordinates(done, study.config.space),
        "importance": draw_importance(study.importances()),
    }


def draw_history(done: Sequence[TrialRecord]) -> Figure:
    """Draws the NE of each complete trial, and the best so far."""
    figure, axes = plain_figure("Trials, and the best so far", "trial", NE)
    numbers, nes = [one.number for one in done], np.array([one.valid_ne for one in done], np.float64)
    axes.plot(numbers, nes, "o")
    axes.step(numbers, np.minimum.accumulate(nes), where="post")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def draw_parallel_coordinates(done: Sequence[TrialRecord], space: Mapping[str, Dimension]) -> Figure:
    """Draws a line per complete trial through its values, dark where the NE is low."""
    figure, axes = plain_figure("Values of the trials, dark where the NE is low", "", "")
    figure.set_size_inches(2.0 * len(space) + 4.0, 4.8)
    columns: dict[str, list[Any]] = {"NE": [one.valid_ne for one in done]}
    columns |= {key: [one.params[key] for one in done] for key in sorted(space)}
    heights = [_place(values, space.get(key)) for key, values in columns.items()]
    for place, (key, values) in enumerate(columns.items()):
        chosen = key in space and space[key].choices is not None
        for height, value in dict(zip(heights[place].tolist(), values, strict=True)).items():
            text = f"{value:.4g}" if isinstance(value, float) else f"{value}"
            if chosen or height in (0.0, 0.5, 1.0):  # of numbers, the ends
                axes.text(place, height, text, fontsize=7, parse_math=False)  # a choice may hold dollar signs
    for i in np.argsort([-one.valid_ne for one in done if one.valid_ne is not None]):
        axes.plot([column[i] for column in heights], color=colormaps["Blues_r"](0.8 * heights[0][i]))
    names = [key.replace(".", ".\n", 1) for key in columns]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_yticks([])
    return figure


def _place(values: Sequence[Any], dimension: Dimension | None) -> npt.NDArray[np.float64]:
    """Returns where values lie between the lowest, 0, and the highest, 1."""
    if dimension is not None and dimension.choices is not None:
        values = [dimension.choices.index(value) for value in values]
    numbers = np.array(values, np.float64)
    if dimension is not None and dimension.log:
        numbers = np.log(numbers)
    low, high = numbers.min(initial=np.inf), numbers.max(initial=-np.inf)
    return (numbers - low) / (high - low) if high > low else np.full(len(numbers), 0.5)


def draw_importance(shares: Mapping[str, float]) -> Figure:
    """Draws the share of each key in what makes trials good."""
    figure, axes = plain_figure("Importance of the keys", "share", "")
    axes.barh([*shares][::-1], [*shares.values()][::-1])
    if not shares:
        axes.text(0.5, 0.5, "too few trials, or all have the same NE", ha="center", transform=axes.transAxes)
    return figure


def draw_stages(stages: Mapping[str, Mapping[str, float]]) -> Figure:
    """Draws the NE of each candidate from stage to stage. A line ends where its candidate did.

    Args:
        stages: Stage -> candidate -> NE, of those that have one.
    """
    figure, axes = plain_figure("Candidates from stage to stage", "", NE)
    for name in dict.fromkeys(name for nes in stages.values() for name in nes):
        points = [(place, nes[name]) for place, nes in enumerate(stages.values()) if name in nes]
        axes.plot(*zip(*points, strict=True), marker="o", linewidth=1.3, label=name)
    axes.set_xticks(range(len(stages)), list(stages))
    axes.set_xlim(-0.3, len(stages) - 0.7)
    if axes.lines:
        axes.legend(fontsize=8)
    return figure

"""The figures of a sweep and of a release."""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no screen is needed, and none is looked for

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from pipeline.figure import plain_figure
from pipeline.search.config import Dimension
from pipeline.search.release import CandidateStanding, Stage
from pipeline.search.study import TrialRecord

LINES = "viridis"
"""Colours of lines: dark is a low NE."""


def history(trials: Sequence[TrialRecord]) -> Figure:
    """NE of each trial, and the best so far."""
    figure, axes = plain_figure("Trials", "trial", "NE on the validation rows")
    done = [(trial.number, trial.valid_ne) for trial in trials if trial.valid_ne is not None]
    if done:
        numbers, values = zip(*done, strict=True)
        axes.scatter(numbers, values, s=24, label="trial", zorder=3)
        axes.step(numbers, np.minimum.accumulate(values), where="post", color="tab:red", linewidth=1.3, label="best")
    for state, colour in (("pruned", "grey"), ("failed", "black")):
        for number in (trial.number for trial in trials if trial.state == state):
            axes.axvline(number, color=colour, linestyle=":", linewidth=1, label=state)
    handles, labels = axes.get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    axes.legend(once.values(), once.keys(), fontsize=8)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def parallel_coordinates(trials: Sequence[TrialRecord], space: Mapping[str, Dimension]) -> Figure:
    """A line a complete trial through its values, dark where NE is low; each axis from the lowest to the highest."""
    done = sorted((trial for trial in trials if trial.valid_ne is not None), key=lambda trial: -(trial.valid_ne or 0.0))
    keys = list(space)
    figure = Figure(figsize=(max(6.4, 1.7 * len(keys) + 2.0), 4.2), layout="constrained", dpi=110)
    axes = figure.add_subplot()
    axes.set_title("Values of the trials and their NE", fontsize=11)
    scales = [_heights(space[key], [trial.params[key] for trial in done]) for key in keys]
    values = [trial.valid_ne or 0.0 for trial in done]
    low, high = min(values, default=0.0), max(values, default=1.0)
    span = high - low or 1.0
    heights = np.array([[*places] for places, _ in scales] + [[(value - low) / span for value in values]])
    colours = matplotlib.colormaps[LINES]
    for column, value in zip(heights.T, values, strict=True):
        axes.plot(range(len(keys) + 1), column, color=colours((value - low) / span), linewidth=1.3, alpha=0.85)
    ticks = [marks for _, marks in scales] + [[(0.0, f"{low:.4f}"), (1.0, f"{high:.4f}")]]
    for place, marks in enumerate(ticks):
        _axis(axes, place, marks)
    names = [key.replace(".", ".\n", 1) for key in keys] + ["NE"]
    axes.set_xticks(range(len(names)), names, fontsize=8)
    axes.set_yticks([])
    axes.set_ylim(-0.06, 1.06)
    for side in ("left", "right", "top", "bottom"):
        axes.spines[side].set_visible(False)
    return figure


def stages(found: Mapping[Stage, Sequence[CandidateStanding]]) -> Figure:
    """NE of each candidate from stage to stage; a line ends where its candidate did."""
    figure, axes = plain_figure("Candidates from stage to stage", "", "NE on the validation rows")
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


def importance(shares: Mapping[str, float]) -> Figure:
    """What each key contributes to a low NE."""
    figure, axes = plain_figure("Importance of the keys", "share", "", height=max(2.2, 0.35 * len(shares) + 1.2))
    if shares:
        axes.barh(list(shares), list(shares.values()), color="tab:blue")
        axes.invert_yaxis()
    else:
        axes.text(0.5, 0.5, "too few trials, or all alike", ha="center", transform=axes.transAxes)
        axes.set_yticks([])
    axes.set_xlim(0, 1)
    axes.tick_params(axis="y", labelsize=8)
    return figure


def _heights(dimension: Dimension, values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Places of values on an axis from 0 to 1, and (place, text) of its marks."""
    if dimension.choices is not None:
        texts = [json.dumps(choice, sort_keys=True) for choice in dimension.choices]
        places = {text: number / max(len(texts) - 1, 1) for number, text in enumerate(texts)}
        heights = [places[json.dumps(value, sort_keys=True)] for value in values]
        return heights, [(place, text) for text, place in places.items()]
    marks = [(0.0, f"{dimension.low:g}"), (1.0, f"{dimension.high:g}")]
    bounds_and_values = (dimension.low, dimension.high, *values)
    low, high, *scaled = (math.log(value) if dimension.log else value for value in bounds_and_values)
    return [(value - low) / (high - low) for value in scaled], marks


def _axis(axes: Axes, place: int, marks: Sequence[tuple[float, str]]) -> None:
    axes.axvline(place, color="grey", linewidth=0.8)
    for height, text in marks:
        box = {"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1}
        axes.text(place, height, text.replace("$", r"\$"), fontsize=7, ha="center", va="center", bbox=box)

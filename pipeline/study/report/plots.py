"""Plots of a study: throughput along its axes, time of a step by phase, distance from the ceilings, quality."""

import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from pipeline.figure import plain_figure
from pipeline.study.measure.results import PHASES, StudyResults
from pipeline.study.report.claims import list_qualities
from pipeline.study.report.curves import Curve, build_curves, format_value, is_number, list_axes, shorten_key
from pipeline.study.report.findings import evaluate_claims

ACROSS = {
    "E1": "workload.sparse_features",
    "E2": "training.batch_rows",
    "E3": "workload.hash_size",
    "E4": "mlp width",
    "E8": "workload.lookups",
}
"""Experiment -> the horizontal axis in the paper's figure."""
PANELS = ("training.batch_rows", "workload.lengths")
"""Axes with one panel per value. The paper has one for CPU and one for GPU, each with its batch size."""
LINES, STACKED = "viridis", "tab10"
"""Colours of curves and of phases."""


def draw_figures(study: StudyResults) -> dict[str, Figure]:
    """Draws the figures by name. Skips those without measurements."""
    found: dict[str, Figure] = {}
    if any(result.quality is not None for result in study.results):
        found["quality"] = plot_quality(study)
    if study.measured:
        found |= {"throughput": plot_throughput(study), "split": plot_split(study), "roofline": plot_roofline(study)}
    return found


def plot_throughput(study: StudyResults) -> Figure:
    """Plots samples per second along the main axis, one line per combination of the others. Uses bars for names."""
    axes_found = {axis: values for axis, values in list_axes(study.measured).items() if len(values) > 1}
    axis = _across(study.experiment, axes_found)
    panel = next((one for one in PANELS if one in axes_found and one != axis), None)
    values = axes_found[panel] if panel is not None else [None]
    figure = Figure(figsize=(4.1 * max(len(values), 1.6), 4.6), layout="constrained", dpi=110)
    parts = figure.subplots(1, len(values), sharey=True, squeeze=False)[0]
    for part, value in zip(parts, values, strict=True):
        curves = build_curves(study.measured, axis)
        shown = [
            Curve({key: one for key, one in curve.others.items() if key in axes_found and key != panel}, curve.spots)
            for curve in curves
            if panel is None or curve.others[panel] == value
        ]
        _lines(part, shown) if _numeric(shown) else _bars(part, shown)
        part.set_title("" if panel is None else f"{shorten_key(panel)} {format_value(value)}", fontsize=10)
        part.set_xlabel(shorten_key(axis))
        part.grid(alpha=0.25)
    parts[0].set_ylabel("samples per second")
    figure.suptitle(f"{study.experiment or study.name}: throughput", fontsize=11)
    _caption(figure, study)
    return figure


def plot_split(study: StudyResults) -> Figure:
    """Plots the share of each phase in a step, one bar per point."""
    names, found = [result.point.name for result in study.measured], study.measurements
    height = max(2.4, 0.2 * len(found) + 1.3)
    figure, axes = plain_figure("Where the time of a step goes", "share of the step", "", height=height)
    left = np.zeros(len(found))
    colours = matplotlib.colormaps[STACKED]
    for number, phase in enumerate(PHASES):
        widths = np.array([one.share(phase) for one in found])
        axes.barh(range(len(found)), widths, left=left, color=colours(number), label=phase, height=0.8)
        left += widths
    axes.set_yticks(range(len(found)), names, fontsize=6.5)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    figure.legend(loc="outside lower center", ncols=len(PHASES), fontsize=7, handlelength=1, columnspacing=1)
    return figure


def plot_roofline(study: StudyResults) -> Figure:
    """Plots GFLOP/s of each point against its work per byte, with the ceilings of the machine.

    Source:
        Williams et al. 2009, Roofline, Communications of the ACM 52(4).
    """
    figure, axes = plain_figure("Against the ceilings of the machine", "FLOP per byte of memory traffic", "GFLOP/s")
    at: dict[str, list[tuple[float, float]]] = {phase: [] for phase in PHASES}
    for one in study.measurements:
        at[max(PHASES, key=one.share)].append((one.load.flop / max(one.load.bytes, 1.0), one.gflop_per_second))
    colours = matplotlib.colormaps[STACKED]
    for number, (phase, points) in enumerate(at.items()):
        if points:
            x, y = zip(*points, strict=True)
            axes.scatter(x, y, s=22, color=colours(number), label=f"mostly {phase}", zorder=3)
    intensities = [x for points in at.values() for x, _ in points]
    xs = np.geomspace(min(0.05, *intensities), max(200.0, *(2 * x for x in intensities)), 200)
    peak = study.machine.get("fp32_gflops")
    for key, name, style in (("read_gb_per_second", "in a row", "-"), ("random_gb_per_second", "rows at random", "--")):
        speed = study.machine.get(key)
        if peak and speed:
            label = f"{speed:.3g} GB/s {name}"
            axes.plot(xs, np.minimum(peak, speed * xs), style, color="black", linewidth=1.2, label=label)
    if peak:
        axes.text(xs[-1], peak * 1.08, f"{peak:,.0f} GFLOP/s", fontsize=8, ha="right")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=7, loc="lower right")
    return figure


def plot_quality(study: StudyResults) -> Figure:
    """Plots NE against batch rows, with the learning rates of the config and with tuned ones."""
    title = f"{study.experiment or study.name}: quality"
    figure, axes = plain_figure(title, "rows of a batch", "NE on the validation rows", height=4.8)
    found = list_qualities(study)
    for place, label in ((1, "the same learning rates"), (2, "tuned")):
        axes.plot([one[0] for one in found], [one[place] for one in found], marker="o", linewidth=1.3, label=label)
    _log_axis(axes, sorted({rows for rows, _, _ in found}))
    axes.legend(fontsize=8)
    _caption(figure, study)
    return figure


def _across(experiment: str | None, axes_found: dict[str, list[Any]]) -> str:
    """Returns the horizontal axis: the paper's, else the numeric one with most values, else the named one with most."""
    wanted = ACROSS.get(experiment or "")
    if wanted in axes_found:
        return str(wanted)
    named = {"placement", "model"} & axes_found.keys() if experiment in ("E5", "E7") else set()
    if named:
        return named.pop()
    by_size = sorted(axes_found, key=lambda axis: (all(map(is_number, axes_found[axis])), len(axes_found[axis])))
    return by_size[-1] if by_size else ""


def _numeric(found: Sequence[Curve]) -> bool:
    return all(is_number(spot.x) and spot.x > 0 for curve in found for spot in curve.spots)


def _lines(axes: Axes, found: Sequence[Curve]) -> None:
    for number, curve in enumerate(found):
        colour = matplotlib.colormaps[LINES](0.9 * number / max(len(found) - 1, 1))
        style: dict[str, Any] = {"marker": "o", "markersize": 4, "linewidth": 1.3, "capsize": 2, "color": colour}
        axes.errorbar([spot.x for spot in curve.spots], *_speeds(curve), label=curve.label or None, **style)
    _log_axis(axes, sorted({spot.x for curve in found for spot in curve.spots}))
    axes.set_yscale("log")
    spreads = [spot.rows_per_second for curve in found for spot in curve.spots]
    low = min((one.low for one in spreads), default=1.0)
    axes.set_ylim(low / 1.5, max((one.high for one in spreads), default=1.0) * 1.5)  # a flat curve shall look flat
    for part in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        part(FuncFormatter(_format_speed))
    axes.tick_params(axis="y", which="both", labelsize=8)
    if any(curve.label for curve in found):
        axes.legend(fontsize=7)


def _speeds(curve: Curve) -> tuple[list[float], tuple[list[float], list[float]]]:
    """Returns the medians, and how far the ranges reach below and above them."""
    spreads = [spot.rows_per_second for spot in curve.spots]
    reach = [one.median - one.low for one in spreads], [one.high - one.median for one in spreads]
    return [one.median for one in spreads], reach


def _format_speed(value: float, _: object) -> str:
    return format_value(round(value)) if value >= 1 and f"{value:e}"[0] in "125" else ""


def _bars(axes: Axes, found: Sequence[Curve]) -> None:
    names = list(dict.fromkeys(str(spot.x) for curve in found for spot in curve.spots))
    width = 0.8 / max(len(found), 1)
    for number, curve in enumerate(found):
        places = [names.index(str(spot.x)) + (number - (len(found) - 1) / 2) * width for spot in curve.spots]
        middle, reach = _speeds(curve)
        axes.bar(places, middle, width, yerr=reach, capsize=2, label=curve.label or None)
    axes.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=8)
    if any(curve.label for curve in found):
        axes.legend(fontsize=7)


def _log_axis(axes: Axes, values: Sequence[float]) -> None:
    """Puts a tick at each value instead of at powers of ten."""
    axes.set_xscale("log")
    axes.set_xticks(values, [format_value(value) for value in values])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.tick_params(axis="x", labelsize=8, rotation=40 if len(values) > 6 else 0)


def _caption(figure: Figure, study: StudyResults) -> None:
    """Adds the claims of the paper and their verdicts below the figure."""
    lines = [f"Paper, {one.source}: {one.claim}. Here: {one.verdict}." for one in evaluate_claims(study)]
    width = int(15 * figure.get_figwidth())
    text = "\n".join(part for line in lines for part in textwrap.wrap(line, width))
    figure.supxlabel(text, fontsize=8, x=0.02, ha="left")

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
from pipeline.study.measure.results import PHASES, Measurement, StudyResults
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
        chosen = [
            curve for curve in build_curves(study.measured, axis) if panel is None or curve.others[panel] == value
        ]
        others = [
            Curve({key: one for key, one in curve.others.items() if key in axes_found and key != panel}, curve.spots)
            for curve in chosen
        ]
        _lines(part, others) if _numeric(chosen) else _bars(part, others)
        part.set_title("" if panel is None else f"{shorten_key(panel)} {format_value(value)}", fontsize=10)
        part.set_xlabel(shorten_key(axis))
        part.grid(alpha=0.25)
    parts[0].set_ylabel("samples per second")
    figure.suptitle(f"{study.experiment or study.name}: throughput", fontsize=11)
    _caption(figure, study)
    return figure


def plot_split(study: StudyResults) -> Figure:
    """Plots the share of each phase in a step, one bar per point."""
    shown_results = study.measured
    figure, axes = plain_figure(
        "Where the time of a step goes", "share of the step", "", height=max(2.4, 0.2 * len(shown_results) + 1.3)
    )
    left = np.zeros(len(shown_results))
    colours = matplotlib.colormaps[STACKED]
    for number, phase in enumerate(PHASES):
        widths = np.array([_share(result.measurement, phase) for result in shown_results])
        axes.barh(range(len(shown_results)), widths, left=left, color=colours(number), label=phase, height=0.8)
        left += widths
    axes.set_yticks(range(len(shown_results)), [result.point.name for result in shown_results], fontsize=6.5)
    axes.set_ylim(len(shown_results) - 0.5, -0.5)
    axes.set_xlim(0, 1)
    figure.legend(loc="outside lower center", ncols=len(PHASES), fontsize=7, handlelength=1, columnspacing=1)
    return figure


def plot_roofline(study: StudyResults) -> Figure:
    """Plots GFLOP/s of each point against its work per byte, with the ceilings of the machine.

    Source:
        Williams et al. 2009, Roofline, Communications of the ACM 52(4).
    """
    figure, axes = plain_figure("Against the ceilings of the machine", "FLOP per byte of memory traffic", "GFLOP/s")
    at = [
        (one.load.flop / max(one.load.bytes, 1.0), one.gflop_per_second, _largest(one)) for one in _measurements(study)
    ]
    colours = matplotlib.colormaps[STACKED]
    for number, phase in enumerate(PHASES):
        points = [(x, y) for x, y, name in at if name == phase]
        if points:
            axes.scatter(
                [x for x, _ in points],
                [y for _, y in points],
                s=22,
                color=colours(number),
                label=f"mostly {phase}",
                zorder=3,
            )
    xs = np.geomspace(min(0.05, *(x for x, _, _ in at)), max(200.0, *(2 * x for x, _, _ in at)), 200)
    peak = study.machine.get("fp32_gflops")
    for key, name, style in (("read_gb_per_second", "in a row", "-"), ("random_gb_per_second", "rows at random", "--")):
        speed = study.machine.get(key)
        if peak and speed:
            axes.plot(
                xs, np.minimum(peak, speed * xs), style, color="black", linewidth=1.2, label=f"{speed:.3g} GB/s {name}"
            )
    if peak:
        axes.text(xs[-1], peak * 1.08, f"{peak:,.0f} GFLOP/s", fontsize=8, ha="right")
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.legend(fontsize=7, loc="lower right")
    return figure


def plot_quality(study: StudyResults) -> Figure:
    """Plots NE against batch rows, with the learning rates of the config and with tuned ones."""
    figure, axes = plain_figure(
        f"{study.experiment or study.name}: quality", "rows of a batch", "NE on the validation rows", height=4.8
    )
    points_found = [
        one for one in study.results if one.quality is not None and "training.batch_rows" in one.point.values
    ]
    for name, label in (("ne", "the same learning rates"), ("tuned_ne", "tuned")):
        points: Any = sorted(
            (one.point.values["training.batch_rows"], one.quality[name]) for one in points_found if one.quality
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", linewidth=1.3, label=label)
    _log_axis(axes, sorted({one.point.values["training.batch_rows"] for one in points_found}))
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
    colours = matplotlib.colormaps[LINES]
    for number, curve in enumerate(found):
        middle = np.array([spot.rows_per_second.median for spot in curve.spots])
        below = middle - [spot.rows_per_second.low for spot in curve.spots]
        above = np.array([spot.rows_per_second.high for spot in curve.spots]) - middle
        colour = colours(0.9 * number / max(len(found) - 1, 1))
        axes.errorbar(
            [spot.x for spot in curve.spots],
            middle,
            (below, above),
            marker="o",
            markersize=4,
            linewidth=1.3,
            capsize=2,
            color=colour,
            label=curve.label or None,
        )
    _log_axis(axes, sorted({spot.x for curve in found for spot in curve.spots}))
    axes.set_yscale("log")
    speeds = [
        speed
        for curve in found
        for spot in curve.spots
        for speed in (spot.rows_per_second.low, spot.rows_per_second.high)
    ]
    axes.set_ylim(min(speeds, default=1.0) / 1.5, max(speeds, default=1.0) * 1.5)  # a flat curve shall look flat
    for part in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        part(
            FuncFormatter(
                lambda value, _: format_value(round(value)) if value >= 1 and f"{value:e}"[0] in "125" else ""
            )
        )
    axes.tick_params(axis="y", which="both", labelsize=8)
    if any(curve.label for curve in found):
        axes.legend(fontsize=7)


def _bars(axes: Axes, found: Sequence[Curve]) -> None:
    names = list(dict.fromkeys(str(spot.x) for curve in found for spot in curve.spots))
    width = 0.8 / max(len(found), 1)
    for number, curve in enumerate(found):
        places = [names.index(str(spot.x)) + (number - (len(found) - 1) / 2) * width for spot in curve.spots]
        middle = np.array([spot.rows_per_second.median for spot in curve.spots])
        below = middle - [spot.rows_per_second.low for spot in curve.spots]
        above = np.array([spot.rows_per_second.high for spot in curve.spots]) - middle
        axes.bar(places, middle, width, yerr=(below, above), capsize=2, label=curve.label or None)
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
    figure.supxlabel(
        "\n".join(part for line in lines for part in textwrap.wrap(line, width)), fontsize=8, x=0.02, ha="left"
    )


def _share(found: Measurement | None, phase: str) -> float:
    whole = sum(found.split_ms.values()) if found is not None else 0.0
    return found.split_ms.get(phase, 0.0) / whole if found is not None and whole else 0.0


def _measurements(study: StudyResults) -> list[Measurement]:
    return [one.measurement for one in study.results if one.measurement is not None]


def _largest(found: Measurement) -> str:
    """Returns the longest phase of a step."""
    return max(PHASES, key=lambda phase: found.split_ms.get(phase, 0.0))

"""The plots of a run."""

import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.record import FLOOR, PLOTS, Curve, FeatureImportance, name_slice
from pipeline.evaluation.series import BacktestResult, trailing
from pipeline.figure import plain_figure

SHOWN_SHARE = 0.95
"""Share of a curve's points, from the lowest, that sets its scale."""
COLOURS = ("tab:blue", "tab:orange")
"""Of runs on the same axes."""
LABELS = {
    "train_ne_window": "training, rows since the last point",
    "train_ne_progressive": "training, all rows on first sight",
    "valid_ne": "validation",
}


def draw_run(
    curves: Mapping[str, Curve],
    best_step: int | None,
    report: EvalReport,
    features: Sequence[FeatureImportance],
    plan: Sequence[Mapping[str, Any]],
    world_size: int,
    cache: Mapping[str, int] = MappingProxyType({}),
) -> dict[str, Figure]:
    """Draws all plots of a run that have something to show: name -> plot. See `record.PLOTS`.

    Args:
        plan: Rows of the sharding plan.
        cache: See `stall_timeline`.
    """
    found = {
        "learning_curve": learning_curve(curves, best_step, report.overall.ne, report.ne_floor),
        "calibration": calibration(report),
    }
    if curves.get("stall_fraction_window"):
        found["stall_timeline"] = stall_timeline(curves, cache)
    if report.roc:
        found["roc"] = roc(report)
    if report.precision_recall:
        found["precision_recall"] = precision_recall(report)
    if report.slices:
        found["slices"] = slices(report)
    if features:
        found["importance"] = importance(features)
    if plan:
        found["placement"] = sharding_plan(plan, world_size)
    return found


def learning_curve(
    curves: Mapping[str, Curve], best_step: int | None, final_ne: float | None, floor: float | None
) -> Figure:
    """Plots NE against the training step."""
    figure, axes = plain_figure(PLOTS["learning_curve"], "step", "normalized entropy")
    for name, label in LABELS.items():
        if points := curves.get(name):
            marker = "o" if name == "valid_ne" else None
            axes.plot(*zip(*points, strict=True), label=label, marker=marker, linewidth=1.3)
    if best_step is not None:
        axes.axvline(best_step, color="grey", linestyle=":", linewidth=1, label="best checkpoint")
    for value, label, color in ((final_ne, "evaluation rows", "tab:red"), (floor, FLOOR, "black")):
        if value is not None:
            axes.axhline(value, color=color, linestyle="--", linewidth=1, label=f"{label}: {value:.4f}")
    _limit(axes, [point for name in LABELS for point in curves.get(name, ())], [final_ne, floor])
    figure.legend(loc="outside lower center", fontsize=8, ncols=2)
    return figure


def _limit(axes: Axes, points: Sequence[tuple[int, float]], others: Sequence[float | None]) -> None:
    """Cuts the first points off, if they are so high that the rest of a curve would be flat."""
    values = sorted(value for _, value in points)
    shown = [value for value in (*values[: math.ceil(SHOWN_SHARE * len(values))], *others) if value is not None]
    if values and max(shown) > min(shown):
        margin = 0.08 * (max(shown) - min(shown))
        axes.set_ylim(min(shown) - margin, max(shown) + margin)


def compare_curves(curves: Mapping[str, Mapping[str, Curve]]) -> Figure:
    """Plots the learning curves of several runs on the same axes.

    Args:
        curves: Run -> name of a metric -> points.
    """
    figure, axes = plain_figure(PLOTS["learning_curve"], "step", "normalized entropy")
    for (run, found), colour in zip(curves.items(), COLOURS, strict=False):
        for name, style in (("train_ne_window", "--"), ("valid_ne", "o-")):
            if points := found.get(name):
                label = f"{run}, {LABELS[name]}"
                axes.plot(*zip(*points, strict=True), style, color=colour, label=label, linewidth=1.3, markersize=4)
    shown = [point for found in curves.values() for name in LABELS for point in found.get(name, ())]
    _limit(axes, shown, [])
    figure.legend(loc="outside lower center", fontsize=8, ncols=1)
    return figure


def compare_reports(reports: Mapping[str, EvalReport]) -> dict[str, Figure]:
    """Plots calibration, ROC and precision of several runs, each on the same axes: name -> plot."""
    points: dict[str, Mapping[str, Sequence[tuple[float, float]]]] = {
        "calibration": {
            run: [(one.predicted, one.observed) for one in report.calibration] for run, report in reports.items()
        },
        "roc": {run: report.roc for run, report in reports.items()},
        "precision_recall": {run: report.precision_recall for run, report in reports.items()},
    }
    axis_names = {
        "calibration": ("predicted probability", "observed rate"),
        "roc": ("false positive rate", "true positive rate"),
        "precision_recall": ("recall", "precision"),
    }
    found = {}
    for name, by_run in points.items():
        if not all(by_run.values()):
            continue
        figure, axes = plain_figure(PLOTS[name], *axis_names[name])
        for (run, line), colour in zip(by_run.items(), COLOURS, strict=False):
            axes.plot(*zip(*line, strict=True), color=colour, label=run, linewidth=1.3)
        limit = (
            1.0 if name != "calibration" else 1.05 * max(max(*one, 1e-3) for line in by_run.values() for one in line)
        )
        if name != "precision_recall":
            axes.plot([0, limit], [0, limit], color="grey", linestyle=":", linewidth=1)
        axes.set_xlim(0, limit)
        axes.set_ylim(0, limit)
        axes.legend(fontsize=8)
        found[name] = figure
    return found


def stall_timeline(curves: Mapping[str, Curve], cache: Mapping[str, int] = MappingProxyType({})) -> Figure:
    """Plots the share of time that training waited for batches, and the seconds per stage of a batch, by step.

    Args:
        cache: What the workers counted of the cache of columns. Empty: there was none.
    """
    figure = Figure(figsize=(6.4, 4.8), layout="constrained", dpi=110)
    above, below = figure.subplots(2, sharex=True)
    above.set_title(PLOTS["stall_timeline"], fontsize=11)
    stalls = curves.get("stall_fraction_window", ())
    if stalls:
        steps, shares = zip(*stalls, strict=True)
        above.stairs([100.0 * share for share in shares], [0, *steps], fill=True, color="tab:red")
    above.set_ylim(0, 100)
    above.set_ylabel("stalled, % of the time")
    for name, label in (
        ("extract", "read and decode"),
        ("transform", "transform and batch"),
        ("wait", "training waits"),
    ):
        points = curves.get(f"batch_{name}_seconds", ())
        if points:
            steps, seconds = zip(*points, strict=True)
            below.plot(steps, [1e3 * value for value in seconds], label=label, linewidth=1.3)
    looked_up = cache.get("hits", 0) + cache.get("misses", 0)
    if looked_up:
        share, size = cache.get("hits", 0) / looked_up, cache.get("bytes_read", 0) / 1e6
        text = f"cache of columns: {share:.1%} hits, {size:,.0f} MB read, {cache.get('evicted', 0):,} entries evicted"
        below.set_title(text, fontsize=9)
    below.set_xlabel("step")
    below.set_ylabel("ms a batch")
    if below.lines:
        below.legend(fontsize=8)
    for axes in (above, below):
        axes.grid(alpha=0.25)
    return figure


def backtest(policies: Sequence[BacktestResult], span: int) -> Figure:
    """Plots next-day NE and calibration of retraining policies over `span` days, and the rows trained so far."""
    figure = Figure(figsize=(7.6, 7.2), layout="constrained", dpi=110)
    quality, balance, cost = figure.subplots(3, sharex=True, height_ratios=(3, 2, 2))
    for policy in policies:
        points = trailing(policy.days, span)
        if points:
            days, nes, calibrations = zip(*points, strict=True)
            quality.plot(days, nes, label=policy.name, linewidth=1.4)
            balance.plot(days, calibrations, label=policy.name, linewidth=1.4)
        trained, total = [], 0.0
        for sums in policy.days:
            total += policy.rows_trained.get(sums.day, 0.0)
            trained.append(total)
        cost.step([sums.day for sums in policy.days], trained, where="post", label=policy.name, linewidth=1.4)
    over = "each day" if span == 1 else f"last {span} days"
    quality.set_title(f"Days that the model has not seen yet ({over})", fontsize=11)
    quality.set_ylabel("normalized entropy")
    balance.set_ylabel("calibration")
    balance.axhline(1.0, color="black", linestyle="--", linewidth=1)
    cost.set_ylabel("rows trained")
    cost.yaxis.set_major_formatter(EngFormatter())
    if policies:
        quality.legend(fontsize=8)
    for axes in (quality, balance, cost):
        axes.grid(alpha=0.25)
    figure.autofmt_xdate(rotation=30)
    return figure


def calibration(report: EvalReport) -> Figure:
    """Plots the observed rate against the predicted probability, in bins of equally many rows."""
    figure, axes = plain_figure(PLOTS["calibration"], "predicted probability", "observed rate")
    predicted = [bin_.predicted for bin_ in report.calibration]
    observed = [bin_.observed for bin_ in report.calibration]
    limit = 1.05 * max([*predicted, *observed, 1e-3])
    axes.plot([0, limit], [0, limit], color="grey", linestyle=":", linewidth=1, label="perfect")
    value = report.overall.calibration
    axes.plot(predicted, observed, marker="o", linewidth=1.3, label="model" if value is None else f"model: {value:.4f}")
    axes.set_xlim(0, limit)
    axes.set_ylim(0, limit)
    axes.legend(fontsize=8)
    return figure


def roc(report: EvalReport) -> Figure:
    """Plots the true against the false positive rate."""
    figure, axes = plain_figure(PLOTS["roc"], "false positive rate", "true positive rate")
    axes.plot([0, 1], [0, 1], color="grey", linestyle=":", linewidth=1)
    if report.roc:
        axes.plot(*zip(*report.roc, strict=True), linewidth=1.3, label=f"AUC {report.overall.auc:.4f}")
        axes.legend(fontsize=8)
    return figure


def precision_recall(report: EvalReport) -> Figure:
    """Plots precision against recall."""
    figure, axes = plain_figure(PLOTS["precision_recall"], "recall", "precision")
    if report.precision_recall:
        label = f"PR-AUC {report.overall.pr_auc:.4f}"
        axes.plot(*zip(*report.precision_recall, strict=True), linewidth=1.3, label=label)
        rate = report.overall.label_rate
        if rate is not None:
            axes.axhline(rate, color="grey", linestyle=":", linewidth=1, label=f"label rate: {rate:.4f}")
        axes.legend(fontsize=8)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return figure


def slices(report: EvalReport) -> Figure:
    """Plots NE of each slice with its interval, and the overall NE. Slices with few rows are pale."""
    shown = [part for part in report.slices if part.quality.ne is not None]
    figure, axes = plain_figure(PLOTS["slices"], "normalized entropy", "", height=max(2.5, 0.25 * len(shown) + 1.0))
    names = [name_slice(part).replace("$", r"\$") for part in shown]  # no formula
    middles = [part.quality.ne or 0.0 for part in shown]
    bounds = [(part.ne_low or ne, part.ne_high or ne) for part, ne in zip(shown, middles, strict=True)]
    colours = ["lightsteelblue" if part.small else "tab:blue" for part in shown]
    for name, (low, high), colour in zip(names, bounds, colours, strict=True):
        axes.plot([low, high], [name, name], color=colour, linewidth=1.3)
    axes.scatter(middles, names, color=colours, s=30, zorder=3)
    if report.overall.ne is not None:
        axes.axvline(report.overall.ne, color="tab:red", linestyle="--", linewidth=1, label="all rows")
        axes.legend(fontsize=8)
    axes.invert_yaxis()
    return figure


MOST_BARS = 30
"""Features in the importance plot."""


def importance(features: Sequence[FeatureImportance]) -> Figure:
    """Plots the NE loss of the most important features, with its interval."""
    largest = [feature for feature in features if feature.ne_loss is not None][:MOST_BARS]
    title = PLOTS["importance"] + (f", the first {MOST_BARS} of {len(features)}" if len(features) > MOST_BARS else "")
    figure, axes = plain_figure(title, "NE lost without the feature", "", height=max(2.5, 0.22 * len(largest) + 1.0))
    names = [feature.name for feature in largest]
    colours = ["lightsteelblue" if feature.droppable else "tab:blue" for feature in largest]
    axes.barh(names, [feature.ne_loss or 0.0 for feature in largest], color=colours)
    for feature in largest:
        axes.plot([feature.low or 0.0, feature.high or 0.0], [feature.name, feature.name], color="black", linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=8)
    return figure


MOST_TABLES = 12
"""Tables with a colour of their own in the plot of a sharding plan. The others are added up."""


def sharding_plan(rows: Sequence[Mapping[str, Any]], world_size: int) -> Figure:
    """Plots memory and time per step that the planner expects on each rank, by table."""
    figure = Figure(figsize=(6.4, 4.2), layout="constrained", dpi=110)
    largest = sorted(rows, key=lambda row: -sum(row["milliseconds"]))
    groups = [(row["table"], [row]) for row in largest[:MOST_TABLES]]
    groups += [(f"{len(largest) - MOST_TABLES} more", largest[MOST_TABLES:])] if len(largest) > MOST_TABLES else []
    colours = matplotlib.colormaps["tab20"]
    for axes, key, unit, label in zip(
        figure.subplots(1, 2), ("bytes", "milliseconds"), (1 / 2**20, 1.0), ("MiB", "ms a step"), strict=True
    ):
        height = [0.0] * world_size
        for number, (name, members) in enumerate(groups):
            share = [0.0] * world_size
            for row in members:
                for rank, value in zip(row["ranks"], row[key], strict=True):
                    share[rank] += value * unit
            axes.bar(range(world_size), share, bottom=height, label=name, color=colours(number), edgecolor="white")
            height = [low + part for low, part in zip(height, share, strict=True)]
        axes.set_xticks(range(world_size))
        axes.set_xlabel("rank")
        axes.set_ylabel(label)
    figure.suptitle(PLOTS["placement"], fontsize=11)
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right upper", fontsize=7)
    return figure

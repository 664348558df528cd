"""Plot of an ingest: new days compared with those before them."""

import datetime
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, PercentFormatter

from pipeline.extraction.checks import CheckFinding, CheckResult, DayCheck

COLOURS = ("tab:orange", "tab:green", "tab:purple", "tab:brown", "tab:cyan")
"""Colours of the columns with a finding that are named in the legend. Further ones are grey."""
PALE = 60
"""How many columns without a finding are drawn."""


def day_figure(title: str, checked: CheckResult) -> Figure:
    """Draws rows, label rate and coverage by day, with the accepted band of the new days. Findings are red."""
    figure = Figure(figsize=(7.6, 7.2), layout="constrained", dpi=110)
    rows, rate, coverage = figure.subplots(3, sharex=True, height_ratios=(2, 2, 3))
    rows.set_title(title, fontsize=11)
    days = checked.days
    _plot_series(
        rows,
        [(one.day, float(one.rows), one.rows_band) for one in days],
        _days_with_finding(checked, "rows", "duplicates"),
    )
    rates = [(one.day, one.label_rate, one.label_rate_band) for one in days if one.label_rate is not None]
    _plot_series(rate, rates, _days_with_finding(checked, "label_rate"))
    _plot_coverage(coverage, days, checked.findings)
    rows.set_ylabel("rows")
    rows.yaxis.set_major_formatter(EngFormatter())
    rate.set_ylabel("label rate")
    coverage.set_ylabel("coverage, % of rows")
    coverage.yaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    for axes in (rows, rate, coverage):
        axes.grid(alpha=0.25)
    figure.autofmt_xdate(rotation=30)
    return figure


DayValue = tuple[datetime.date, float, tuple[float, float] | None]


def _plot_series(axes: Axes, points: Sequence[DayValue], marked: set[datetime.date]) -> None:
    days: Any = [day for day, _, _ in points]
    axes.plot(days, [value for _, value, _ in points], marker="o", markersize=4, linewidth=1.3, color="tab:blue")
    banded = [(day, *band) for day, _, band in points if band is not None]
    for date, low, high in banded:  # one bar a day: a day may have no neighbour
        day: Any = date
        axes.plot([day, day], [low, high], color="tab:green", alpha=0.35, linewidth=7, solid_capstyle="butt", zorder=1)
    bad: Any = [(day, value) for day, value, _ in points if day in marked]
    if bad:
        axes.plot(*zip(*bad, strict=True), "o", color="tab:red", markersize=7, label="finding")
    if banded:
        axes.plot([], [], color="tab:green", alpha=0.35, linewidth=7, label="accepted")
    if bad or banded:
        axes.legend(fontsize=8)
    values = [value for _, value, _ in points] + [bound for _, *band in banded for bound in band]
    axes.set_ylim(0, 1.08 * max([*values, 1e-9]))


def _plot_coverage(axes: Axes, days: Sequence[DayCheck], findings: Sequence[CheckFinding]) -> None:
    names = sorted({name for one in days for name in one.coverage})
    found = list(dict.fromkeys(finding.column for finding in findings if finding.column in names))
    others = [name for name in names if name not in found]
    for number, name in enumerate(others[:PALE]):
        label = f"{len(others)} columns without a finding" if number == 0 else None
        axes.plot(*_line(days, name), color="lightsteelblue", linewidth=0.9, label=label)
    for number, name in enumerate(found):
        named = number < len(COLOURS)
        more = f"{len(found) - len(COLOURS)} more with a finding" if number == len(COLOURS) else None
        colour = COLOURS[number] if named else "grey"
        axes.plot(*_line(days, str(name)), color=colour, linewidth=1.3, label=str(name) if named else more)
    at = {one.day: one.coverage for one in days}
    bad: Any = [(one.day, at[one.day].get(one.column, 0.0)) for one in findings if one.column in names]
    if bad:
        axes.plot(*zip(*bad, strict=True), "o", color="tab:red", markersize=5)
    axes.set_ylim(-0.03, 1.05)
    if names:
        axes.legend(fontsize=7, loc="lower left")


def _line(days: Sequence[DayCheck], name: str) -> tuple[Any, list[float]]:
    """Days and coverage of a column. A missing column has coverage 0."""
    return [one.day for one in days], [one.coverage.get(name, 0.0) for one in days]


def _days_with_finding(checked: CheckResult, *rules: str) -> set[datetime.date]:
    return {finding.day for finding in checked.findings if finding.rule in rules}

"""The report of a run, or of two side by side, as one self-contained HTML file."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.evaluation.metrics import format_interval, format_metric
from pipeline.evaluation.record import FLOOR, IN_MARKDOWN, METRICS, PLOTS, RunRecord, slice_cells

LESS_IS_BETTER = {"NE", "NE, recalibrated", "log loss", "ECE"}
MORE_IS_BETTER = {"AUC", "PR-AUC", "GAUC"}
MOST_FEATURES = 40
"""Features in the table of a report. The rest is only counted."""


def render_report(records: Sequence[RunRecord]) -> str:
    """Renders the report as HTML. For two runs, tables have a column for each and plots stand side by side."""
    folder = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    return environment.get_template("report.html").render(
        title=" and ".join(record.title for record in records),
        records=records,
        better=_say_which_is_better(records),
        quality=_quality(records),
        notes=list(_notes(records)),
        sections=[section for section in _sections(records) if section["tables"] or section["figures"]],
    )


def _quality(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Builds the table of metrics by run, with the difference of the first to the one it is compared with."""
    reports = [record.report for record in records]
    compared = {name: [getattr(report.overall, key) for report in reports] for key, name in METRICS.items()}
    if any(report.ne_floor is not None for report in reports):
        compared[FLOOR] = [report.ne_floor for report in reports]
    if any(report.grouped for report in reports):
        compared["GAUC"] = [report.grouped.gauc if report.grouped else None for report in reports]
    two = len(records) == 2
    rows = [
        _row(name, *map(format_metric, values), *([_difference(*values)] if two else []), tone=_tone(name, *values))
        for name, values in compared.items()
    ]
    if any(report.ne_low is not None for report in reports):
        intervals = [format_interval(report.ne_low, report.ne_high) for report in reports]
        rows.insert(1, _row("interval of NE", *intervals, *([_interval_between(records)] if two else [])))
    blank = [""] if two else []
    rows.append(_row("rows", *(f"{report.overall.rows:,}" for report in reports), *blank))
    for name, cells in _list_judged(records).items():
        if any(cell is not None for cell in cells):
            rows.append(_row(name, *("–" if cell is None else cell for cell in cells), *blank))
    return {"header": ["", *(record.title for record in records), *(["difference"] if two else [])], "rows": rows}


def _list_judged(records: Sequence[RunRecord]) -> dict[str, list[str | None]]:
    """Returns the rows about the gate's comparison. That of a daily model is on all rows of another day."""
    found: dict[str, list[str | None]] = {}
    for number, record in enumerate(records):
        day, judged = record.result.get("judged_on"), record.result.get("judged_eval")
        champion = record.result["gate"].get("champion_ne")
        cells = {"NE of the champion at the time": None if champion is None else format_metric(champion)}
        if judged is not None:
            cells = {"judged on all rows of": f"{day}", "rows of that day": f"{judged['rows']:,}"}
            cells |= {
                f"{name} on that day": format_metric(judged[key]) for key, name in METRICS.items() if key in IN_MARKDOWN
            }
            cells["NE of the champion on that day"] = None if champion is None else format_metric(champion)
        for name, cell in cells.items():
            found.setdefault(name, [None] * len(records))[number] = cell
    return found


def _interval_between(records: Sequence[RunRecord]) -> str:
    """Returns the interval of the difference between two runs, if the gate has compared just these. Else nothing."""
    first, second = records
    for one, other, sign in ((first, second, 1.0), (second, first, -1.0)):
        gate, model = one.result["gate"] or {}, other.result.get("model") or {}
        if gate.get("difference") and gate.get("champion") == model.get("version"):
            low, high = sorted(sign * gate["difference"][bound] for bound in ("low", "high"))
            return f"{low:+.4f} to {high:+.4f}"
    return ""


def _say_which_is_better(records: Sequence[RunRecord]) -> str:
    """Returns a sentence on two runs."""
    if len(records) != 2:
        return ""
    nes = [record.report.overall.ne for record in records]
    if nes[0] is None or nes[1] is None:
        return "NE of one of the runs is undefined."
    if _difference(*nes).strip("+-0.") == "":
        return "Both have the same NE."
    better, worse = sorted(records, key=lambda record: record.report.overall.ne or 0.0)
    interval = _interval_between(records)
    size = f"by {abs(nes[0] - nes[1]):.4f}"
    chance = f", difference {interval}" if interval else ""
    return f"{better.title} has the lower NE, which is better: {size} below {worse.title}{chance}."


def _notes(records: Sequence[RunRecord]) -> Iterable[str]:
    for record in records:
        for name, reason in record.report.overall.undefined.items():
            yield f"{record.title}: {METRICS.get(name, name)} is undefined: {reason}."
        for column, reason in record.report.notes.items():
            yield f"{record.title}: no slices of {column}: {reason}."


def _sections(records: Sequence[RunRecord]) -> Iterable[dict[str, Any]]:
    def drawn(*names: str) -> list[dict[str, str]]:
        return [
            _image(f"{PLOTS[name]}, {record.title}", record.plots[name], record.title if len(records) > 1 else "")
            for name in names for record in records if name in record.plots
        ]  # fmt: skip

    if len(records) > 1:  # what a reader of two asks first
        yield _section(
            "Features, where they differ", tables=_differing([record.columns for record in records], records)
        )
        yield _section(
            "Config, where it differs", tables=_differing([record.parameters for record in records], records)
        )
    together = _overlay(records)

    def overlaid(*names: str) -> list[dict[str, str]]:
        return [
            figure for name in names
            for figure in ([_image(PLOTS[name], together[name], "")] if name in together else drawn(name))
        ]  # fmt: skip

    yield _section("Learning", figures=overlaid("learning_curve", "stall_timeline"))
    yield _section("Calibration and ranking", figures=overlaid("calibration", "roc", "precision_recall"))
    yield _section(
        "Slices", "Intervals treat rows as independent. Slices with few rows are pale.",
        [_slices(record) for record in records if record.report.slices], drawn("slices"),
    )  # fmt: skip
    yield _section(
        "Features",
        "NE lost when a feature's values are permuted among the rows of a batch, on a sample of the rows.",
        [_features(record) for record in records if record.features],
        drawn("importance"),
    )
    yield _section("Sharding plan", figures=drawn("placement"))
    yield _section("Data", tables=[_across(records, [record.data for record in records])])
    if len(records) > 1:
        return
    config = _across(records, [records[0].parameters])
    if records[0].chosen is None:
        yield _section("Config", tables=[config])
        return
    usual = [row for row in config["rows"] if row["cells"][0] not in records[0].chosen]
    config["rows"] = [row for row in config["rows"] if row["cells"][0] in records[0].chosen]
    folded = {"header": config["header"], "rows": usual, "title": f"{len(usual)} settings with their defaults"}
    yield _section("Config", tables=[config, folded | {"folded": True}] if usual else [config])


def _overlay(records: Sequence[RunRecord]) -> dict[str, str]:
    """Returns the plots of two runs on the same axes as SVG. Of runs without what they need, none."""
    if len(records) != 2:
        return {}
    from pipeline.evaluation.plots import compare_curves, compare_reports  # imports matplotlib
    from pipeline.figure import to_svg

    figures = compare_reports({record.title: record.report for record in records})
    if all(record.curves for record in records):
        figures["learning_curve"] = compare_curves({record.title: record.curves for record in records})
    return {name: to_svg(figure) for name, figure in figures.items()}


def _image(name: str, svg: str, caption: str) -> dict[str, str]:
    return {"name": name, "data": b64encode(svg.encode()).decode(), "caption": caption}


def _section(
    title: str, note: str = "", tables: Sequence[dict[str, Any]] = (), figures: Sequence[dict[str, str]] = ()
) -> dict[str, Any]:
    return {"title": title, "note": note, "tables": list(tables), "figures": list(figures)}


def _differing(values: Sequence[Mapping[str, str]], records: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Builds a table of the keys whose values differ. No table if there are none, or if a run's are unknown."""
    shared = set(values[0].items()).intersection(*(one.items() for one in values[1:]))
    table = _across(records, [dict(one.items() - shared) for one in values])
    return [table] if table["rows"] and all(values) else []


def _across(records: Sequence[RunRecord], values: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Builds a table with a row per key and a column per run."""
    keys = sorted({key for one in values for key in one})
    rows = [_row(key, *(one.get(key, "–") for one in values)) for key in keys]
    return {"header": ["", *(record.title for record in records)], "rows": rows, "title": ""}


def _slices(record: RunRecord) -> dict[str, Any]:
    cells = [slice_cells(part) for part in record.report.slices]
    rows = [_row(*one.values(), few=part.small) for one, part in zip(cells, record.report.slices, strict=True)]
    return {"header": list(cells[0]), "rows": rows, "title": record.title}


def _features(record: RunRecord) -> dict[str, Any]:
    rows = [
        _row(
            feature.name, format_metric(feature.ne_loss), format_interval(feature.low, feature.high),
            f"{feature.coverage:.1%}", "–" if feature.mean_length is None else f"{feature.mean_length:.2f}",
            _percent(feature.truncated), _percent(feature.collisions), "yes" if feature.droppable else "",
            few=feature.droppable,
        )
        for feature in record.features[:MOST_FEATURES]
    ]  # fmt: skip
    more = len(record.features) - len(rows)
    header = ["feature", "NE loss", "interval", "coverage", "mean length", "cut off", "collisions", "could be dropped"]
    return {
        "header": header, "rows": rows, "title": record.title + (f" ({more} more features)" if more > 0 else "")
    }  # fmt: skip


def _row(*cells: str, few: bool = False, tone: str = "") -> dict[str, Any]:
    return {"cells": cells, "few": few, "tone": tone}


def _tone(name: str, *values: float | None) -> str:
    """Says whether the first of two runs is better or worse. Empty: neither, or there is only one."""
    if name not in LESS_IS_BETTER | MORE_IS_BETTER or len(values) != 2:
        return ""
    shown = _difference(*values)
    if not shown.strip("+-–0."):
        return ""
    return "better" if shown.startswith("-") == (name in LESS_IS_BETTER) else "worse"


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _difference(first: float | None, second: float | None) -> str:
    return "–" if first is None or second is None else f"{first - second:+.4f}"

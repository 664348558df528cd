"""The report of a run, or of two side by side, as one self-contained HTML file."""

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from pipeline.evaluation.metrics import format_interval, format_metric
from pipeline.evaluation.record import METRICS, PLOTS, RunRecord, slice_cells

LESS_IS_BETTER = {"NE", "NE, recalibrated", "log loss", "ECE"}
MORE_IS_BETTER = {"AUC", "PR-AUC", "GAUC"}
MOST_FEATURES = 40
"""Features in the table of a report. The rest is only counted."""


def render_report(records: Sequence[RunRecord]) -> str:
    """Renders the report as HTML. For two runs, tables have a column for each and plots stand side by side."""
    folder = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    commits = (f"commit {one.result['git_commit']}, snapshot {one.result['snapshot_id']}" for one in records)
    return environment.get_template("report.html").render(
        title=" and ".join(record.title for record in records),
        subtitle="; ".join(dict.fromkeys(commits)),
        records=records,
        quality=_quality(records),
        notes=list(_notes(records)),
        sections=[section for section in _sections(records) if section["tables"] or section["figures"]],
    )


def _quality(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Builds the table of metrics by run, with the difference of the first to the one it is compared with."""
    reports = [record.report for record in records]
    compared = {name: [getattr(report.overall, key) for report in reports] for key, name in METRICS.items()}
    if any(report.ne_floor is not None for report in reports):
        compared["NE of the true probabilities"] = [report.ne_floor for report in reports]
    if any(report.grouped for report in reports):
        compared["GAUC"] = [report.grouped.gauc if report.grouped else None for report in reports]
    two = len(records) == 2
    rows = [
        _row(name, *map(format_metric, values), *([_difference(*values)] if two else []), tone=_tone(name, *values))
        for name, values in compared.items()
    ]
    champions = [record.result["gate"].get("champion_ne") for record in records]
    if any(champion is not None for champion in champions):
        rows.append(_row("NE of the champion at the time", *map(format_metric, champions), *([""] if two else [])))
    rows.append(_row("rows", *(f"{report.overall.rows:,}" for report in reports), *([""] if two else [])))
    return {"header": ["", *(record.title for record in records), *(["difference"] if two else [])], "rows": rows}


def _notes(records: Sequence[RunRecord]) -> Iterable[str]:
    for record in records:
        for name, reason in record.report.overall.undefined.items():
            yield f"{record.title}: {METRICS.get(name, name)} is undefined: {reason}."
        for column, reason in record.report.notes.items():
            yield f"{record.title}: no slices of {column}: {reason}."


def _sections(records: Sequence[RunRecord]) -> Iterable[dict[str, Any]]:
    def drawn(*names: str) -> list[dict[str, str]]:
        return [
            {"name": f"{PLOTS[name]}, {record.title}", "data": b64encode(record.plots[name].encode()).decode(),
             "caption": record.title if len(records) > 1 else ""}
            for name in names for record in records if name in record.plots
        ]  # fmt: skip

    yield _section("Learning", figures=drawn("learning_curve", "stall_timeline"))
    yield _section("Calibration and ranking", figures=drawn("calibration", "roc", "precision_recall"))
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
    yield _section("Data", tables=[_across(records, lambda record: record.data)])
    parameters = [record.parameters.items() for record in records]
    shared = set(parameters[0]).intersection(*parameters[1:]) if len(records) > 1 else set()
    config = _across(records, lambda record: dict(record.parameters.items() - shared))
    title = "Config, where it differs" if len(records) > 1 else "Config"
    yield _section(title, tables=[config] if config["rows"] else [])


def _section(
    title: str, note: str = "", tables: Sequence[dict[str, Any]] = (), figures: Sequence[dict[str, str]] = ()
) -> dict[str, Any]:
    return {"title": title, "note": note, "tables": list(tables), "figures": list(figures)}


def _across(records: Sequence[RunRecord], of: Callable[[RunRecord], Mapping[str, str]]) -> dict[str, Any]:
    """Builds a table with a row per key and a column per run."""
    values = [of(record) for record in records]
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

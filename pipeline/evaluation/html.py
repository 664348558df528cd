"""The report of a run, or of two side by side, as one self-contained HTML file."""

import base64
import io
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from matplotlib import rc_context
from matplotlib.figure import Figure
from pydantic import BaseModel

from pipeline.evaluation import plots
from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.importance import FeatureImportance
from pipeline.evaluation.metrics import format_interval, format_metric
from pipeline.evaluation.plots import Curve

METRICS = {
    "ne": "NE",
    "ne_recalibrated": "NE, recalibrated",
    "logloss": "log loss",
    "auc": "AUC",
    "pr_auc": "PR-AUC",
    "calibration": "calibration",
    "ece": "ECE",
    "label_rate": "label rate",
}
MOST_FEATURES = 40
"""Features in the table of a report. The rest is only counted."""


class RunRecord(BaseModel, frozen=True):
    """The facts of a finished run that the report shows."""

    title: str
    result: Mapping[str, Any]
    """The run's result line."""
    report: EvalReport
    features: tuple[FeatureImportance, ...]
    curves: Mapping[str, Curve]
    sharding_plan: tuple[Mapping[str, Any], ...]
    parameters: Mapping[str, str]
    data: Mapping[str, str]
    """Description of the training data."""


def render_report(records: Sequence[RunRecord]) -> str:
    """Renders the report as HTML. For two runs, tables have a column for each and plots stand side by side."""
    folder = Path(__file__).parent
    environment = Environment(loader=FileSystemLoader(folder), autoescape=True, undefined=StrictUndefined)
    titles = " and ".join(record.title for record in records)
    results = [record.result for record in records]
    return environment.get_template("report.html").render(
        title=titles,
        subtitle="; ".join(
            dict.fromkeys(f"commit {one['git_commit']}, snapshot {one['snapshot_id']}" for one in results)
        ),
        runs=[_head(record) for record in records],
        quality=_quality(records),
        notes=list(_notes(records)),
        sections=[section for section in _sections(records) if section["tables"] or section["figures"]],
    )


def _head(record: RunRecord) -> dict[str, str]:
    gate, train = record.result["gate"], record.result["train"]
    return {
        "title": record.title,
        "decision": gate["decision"],
        "reason": gate["reason"],
        "summary": (
            f"Trained on {train['rows']:,} rows in {train['steps']:,} steps on {train['world_size']} ranks, "
            f"{train['rows_per_second']:,.0f} rows/s, {train['stall_fraction']:.1%} of the time waiting for data."
        ),
    }


def _quality(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Builds the table of metrics by run, with the difference of the second to the first."""
    two = len(records) == 2
    rows = []
    for key, name in METRICS.items():
        values = [getattr(record.report.overall, key) for record in records]
        rows.append(_row(name, *map(format_metric, values), *([_difference(*values)] if two else [])))
    floors = [record.report.ne_floor for record in records]
    if any(floor is not None for floor in floors):
        rows.append(
            _row("NE of the true probabilities", *map(format_metric, floors), *([_difference(*floors)] if two else []))
        )
    grouped = [record.report.grouped for record in records]
    if any(grouped):
        values = [None if one is None else one.gauc for one in grouped]
        rows.append(_row("GAUC", *map(format_metric, values), *([_difference(*values)] if two else [])))
    champions = [record.result["gate"].get("champion_ne") for record in records]
    if any(champion is not None for champion in champions):
        rows.append(_row("NE of the champion at the time", *map(format_metric, champions), *([""] if two else [])))
    rows.append(_row("rows", *(f"{record.report.overall.rows:,}" for record in records), *([""] if two else [])))
    return {"header": ["", *(record.title for record in records), *(["difference"] if two else [])], "rows": rows}


def _notes(records: Sequence[RunRecord]) -> Iterable[str]:
    for record in records:
        for name, reason in record.report.overall.undefined.items():
            yield f"{record.title}: {METRICS.get(name, name)} is undefined: {reason}."
        for column, reason in record.report.notes.items():
            yield f"{record.title}: no slices of {column}: {reason}."


def _sections(records: Sequence[RunRecord]) -> Iterable[dict[str, Any]]:
    def drawn(
        name: str, draw: Callable[[RunRecord], Figure], wanted: Callable[[RunRecord], Any]
    ) -> list[dict[str, str]]:
        return [
            {"name": f"{name}, {record.title}", "data": _svg(draw(record)),
             "caption": record.title if len(records) > 1 else ""}
            for record in records if wanted(record)
        ]  # fmt: skip

    yield _section("Learning", figures=[
        *drawn("Learning curve", lambda r: plots.learning_curve(
            r.curves, r.result["train"]["best_step"], r.report.overall.ne, r.report.ne_floor), lambda r: True),
        *drawn("Waiting for batches", lambda r: plots.stall_timeline(r.curves),
               lambda r: r.curves.get("stall_fraction_window")),
    ])  # fmt: skip
    yield _section("Calibration and ranking", figures=[
        *drawn("Calibration", lambda r: plots.calibration(r.report), lambda r: True),
        *drawn("ROC", lambda r: plots.roc(r.report), lambda r: r.report.roc),
        *drawn("Precision and recall", lambda r: plots.precision_recall(r.report), lambda r: r.report.precision_recall),
    ])  # fmt: skip
    yield _section(
        "Slices", "Intervals treat rows as independent. Slices with few rows are pale.",
        [_slices(record) for record in records if record.report.slices],
        drawn("NE by slice", lambda r: plots.slices(r.report), lambda r: r.report.slices),
    )  # fmt: skip
    yield _section(
        "Features",
        "NE lost when a feature's values are permuted among the rows of a batch, on a sample of the rows.",
        [_features(record) for record in records if record.features],
        drawn("Feature importance", lambda r: plots.importance(r.features), lambda r: r.features),
    )  # fmt: skip
    yield _section("Sharding plan", figures=drawn(
        "Tables by rank", lambda r: plots.sharding_plan(r.sharding_plan, r.result["train"]["world_size"]),
        lambda r: r.sharding_plan,
    ))  # fmt: skip
    yield _section("Data", tables=[_across(records, lambda record: record.data)])
    parameters = [record.parameters for record in records]
    shared = set(parameters[0].items()).intersection(*(set(one.items()) for one in parameters[1:]))
    if len(records) == 1:
        yield _section("Config", tables=[_across(records, lambda record: record.parameters)])
    else:
        different = _across(records, lambda r: {k: v for k, v in r.parameters.items() if (k, v) not in shared})
        yield _section("Config, where it differs", tables=[different] if different["rows"] else [])


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
    rows = [
        _row(
            f"{part.column} = {part.value}", f"{part.quality.rows:,}", format_metric(part.quality.label_rate),
            format_metric(part.quality.ne), format_interval(part.ne_low, part.ne_high), format_metric(part.quality.auc),
            format_metric(part.quality.calibration), few=part.small,
        )
        for part in record.report.slices
    ]  # fmt: skip
    header = ["slice", "rows", "label rate", "NE", "interval", "AUC", "calibration"]
    return {"header": header, "rows": rows, "title": record.title}


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


def _row(*cells: str, few: bool = False) -> dict[str, Any]:
    return {"cells": cells, "few": few}


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _difference(first: float | None, second: float | None) -> str:
    return "–" if first is None or second is None else f"{second - first:+.4f}"


def _svg(figure: Figure) -> str:
    """Encodes a plot as SVG for the page. Text stays text."""
    with io.BytesIO() as file, rc_context({"svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(file, format="svg", metadata={"Date": None})
        return base64.b64encode(file.getvalue()).decode("ascii")

"""What a run says of itself: its name, the code it ran, and the page that sums it up."""

import hashlib
import os
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from prefect.runtime import flow_run

from pipeline.config import RunConfig
from pipeline.config.files import ROOT
from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.metrics import format_interval, format_metric
from pipeline.registration.tracking import Tracker

QUALITY = ("ne", "logloss", "auc", "calibration", "ece")


def flow_run_name() -> str:
    """Name of a Prefect run: the flow and its config."""
    config = flow_run.parameters.get("config", "")
    name = config.name if isinstance(config, RunConfig) else str(config)
    return f"{flow_run.flow_name} {name.removeprefix('configs/').removesuffix('.yaml')}"


def artifact_key(kind: str, name: str) -> str:
    """Key of a Prefect artifact, which takes small letters, digits and dashes.

    Example:
        >>> artifact_key("report", "flights_daily")
        'report-flights-daily'
    """
    return f"{kind}-{re.sub('[^a-z0-9]+', '-', name.lower())}"


def run_name(config: RunConfig) -> str:
    """Name of an MLflow run: what tells runs apart in a list."""
    model, training = config.model, config.training
    return (
        f"{model.interaction} E{model.embedding_width} B{training.batch_rows} W{training.world_size} seed {config.seed}"
    )


def commit() -> str:
    """The code's commit; `+` where the working tree differs, docs apart, which no run reads; `unknown` outside git."""
    try:
        return _git("rev-parse", "HEAD")[:12] + ("+" if _git("status", "--porcelain", ":!docs") else "")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def lock_hash() -> str:
    """Hash of the dependency lock."""
    path = ROOT / "requirements" / "cpu.lock"
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.exists() else "unknown"


def page(config: RunConfig, result: Mapping[str, Any], report: EvalReport, tracker: Tracker) -> str:
    """The run report as markdown: quality, slices, speed, and where the rest is."""
    evaluation, training = result["eval"], result["train"]
    quality = " | ".join(format_metric(evaluation[key]) for key in QUALITY)
    blocks = [
        "| | NE | log loss | AUC | calibration | ECE | rows |\n|---|---|---|---|---|---|---|\n"
        f"| evaluation | {quality} | {evaluation['rows']:,} |"
        + (
            f"\n| floor | {format_metric(evaluation['ne_floor'])} | | | | | |"
            if evaluation["ne_floor"] is not None
            else ""
        ),
        f"**{result['gate']['decision']}**: {result['gate']['reason']}",
        f"Trained on {training['rows']:,} rows in {training['steps']:,} steps on {training['world_size']} ranks, "
        f"{training['rows_per_second']:,.0f} rows/s, {training['stall_fraction']:.1%} of the time waiting for data.",
        f"Snapshot `{result['snapshot_id']}` of table `{config.name}`; "
        f"[MLflow run {result['mlflow_run_id'][:8]}]({run_address(result['mlflow_run_id'], tracker)}).",
    ]
    if report.slices:
        rows = [
            f"| {part.column} = {part.value} | {part.quality.rows:,}{' (few)' if part.small else ''} "
            f"| {format_metric(part.quality.label_rate)} | {format_metric(part.quality.ne)} "
            f"| {format_interval(part.ne_low, part.ne_high)} | {format_metric(part.quality.calibration)} |"
            for part in report.slices
        ]
        head = ["| slice | rows | label rate | NE | interval | calibration |", "|---|---|---|---|---|---|"]
        blocks.append("\n".join([*head, *rows]))
    return "\n\n".join(blocks)


def in_words(report: EvalReport) -> str:
    """The quality as one line, beside the floor where it is known."""
    overall = report.overall
    line = f"NE {format_metric(overall.ne)}, AUC {format_metric(overall.auc)}"
    line += f", calibration {format_metric(overall.calibration)}, {overall.rows:,} rows"
    if report.learned_share is not None:
        line += f"; floor {format_metric(report.ne_floor)}, {report.learned_share:.1%} of what can be learned"
    undefined = "; ".join(f"{name} undefined: {reason}" for name, reason in overall.undefined.items())
    return f"{line}; {undefined}" if undefined else line


def run_address(run_id: str, tracker: Tracker) -> str:
    """Where a browser finds an MLflow run."""
    address = os.environ.get("DLRM_MLFLOW_UI") or (tracker.uri if tracker.uri.startswith("http") else UI)
    return f"{address}/#/experiments/{tracker.experiment_id}/runs/{run_id}"


UI = "http://127.0.0.1:5000"
"""Where `make ui` shows MLflow."""


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

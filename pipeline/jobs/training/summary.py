"""What a run says of itself: its name, the code it ran, its result in words, and its report."""

import os
from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from pipeline.errors import ConfigError, RegistryError
from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.html import RunRecord, render_report
from pipeline.evaluation.importance import FeatureImportance
from pipeline.evaluation.metrics import format_interval, format_metric
from pipeline.jobs.training.job import TrainingJob
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHAMPION, find_holder
from pipeline.registration.tracking import RESULT, Tracker
from storage.artifacts import inside, write_text

CURVES = ("train_ne_window", "train_ne_progressive", "valid_ne")
STALL_CURVES = ("stall_fraction_window", "batch_extract_seconds", "batch_transform_seconds", "batch_wait_seconds")
REPORT, FEATURES, DATA, PLAN = "report.json", "features.json", "data.json", "sharding_plan.json"
"""Artifacts of a run."""
PAGE = "report.html"


def load_record(tracker: Tracker, run_id: str) -> RunRecord:
    """All that the report of a run says.

    Raises:
        RegistryError: If the run has none of it, or was made when reports held other things.
    """
    try:
        return _read(tracker, run_id)
    except ValidationError as error:
        missing = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors()[:3])
        raise RegistryError(
            f"MLflow run '{run_id}'", "a report of this version of the code", f"one without {missing}", "Train anew."
        ) from None


def _read(tracker: Tracker, run_id: str) -> RunRecord:
    result = tracker.read_json(run_id, RESULT)
    run = tracker.client.get_run(run_id)
    model = result["model"]
    return RunRecord(
        title=f"{model['name']} version {model['version']}",
        result=result,
        report=EvalReport.model_validate(tracker.read_json(run_id, REPORT)),
        features=tuple(FeatureImportance.model_validate(one) for one in tracker.read_json(run_id, FEATURES)),
        curves=tracker.load_curves(run_id, [*CURVES, *STALL_CURVES]),
        sharding_plan=tuple(tracker.read_json(run_id, PLAN)),
        parameters=dict(run.data.params),
        data=tracker.read_json(run_id, DATA),
    )


def render_page(tracker: Tracker, *run_ids: str) -> str:
    """The report of a run, or of two, as one HTML file that needs nothing else."""
    return render_report([load_record(tracker, run_id) for run_id in run_ids])


def describe_data(job: TrainingJob) -> dict[str, str]:
    """What a training reads."""
    found = {"table": job.snapshot.table, "snapshot": str(job.snapshot.snapshot_id)}
    for part, rows in job.rows.items():
        days = job.data[part].selection.days
        span = f"{min(days)} to {max(days)}" if len(days) > 1 else f"{days[0]}"
        found[f"{part} rows"] = f"{rows:,} of {len(days)} days, {span}"
    tables = {feature.table: feature.rows for feature in job.plan.sparse}
    found["features"] = f"{len(job.plan.dense)} dense, {len(job.plan.sparse)} sparse"
    found["embedding tables"] = f"{len(tables)}, {sum(tables.values()):,} rows"
    return found


QUALITY = ("ne", "logloss", "auc", "calibration", "ece")


def render_markdown(workspace: Workspace, result: Mapping[str, Any], report: EvalReport, tracker: Tracker) -> str:
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
        f"Snapshot `{result['snapshot_id']}` of table `{workspace.config.name}`; "
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


def describe_quality(report: EvalReport) -> str:
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


def write_report(workspace: Workspace, run: str | int | None, against: str | int | None) -> dict[str, Any]:
    """Writes the report of a run below `home/reports`; of two runs, side by side.

    Args:
        run: Version of the model, or id of an MLflow run; None: the champion.
        against: Another one to compare it with.
    """
    tracker, name = workspace.tracking, workspace.config.model_name
    asked = [run or find_holder(tracker, name), *([against] if against else [])]
    runs = [_run_id(tracker, name, one) for one in asked]
    path = inside(workspace.home / "reports", f"{name}-{'-'.join(str(one) for one in asked)}.html")
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, render_page(tracker, *runs))
    workspace.console.log.info("%s: %s", PAGE, path)
    return {"status": "ok", "path": str(path), "runs": runs}


def _run_id(tracker: Tracker, name: str, asked: str | int | None) -> str:
    """The MLflow run that is meant by its id, or by the number of the version that it made."""
    version = None if asked is None else tracker.get_version(name, str(asked))
    if version is not None:
        return str(version.run_id)
    if asked is None or str(asked).isdigit():
        given = f"no {CHAMPION}" if asked is None else f"{asked}"
        raise ConfigError("argument 'run'", f"a version of model '{name}'", given, "Name one.")
    return str(asked)

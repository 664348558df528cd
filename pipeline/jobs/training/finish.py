"""Finishes a training: evaluation, registry and report, at once or later by `flows.register`."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa

from pipeline.evaluation.baselines import Baseline
from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.gate import Verdict
from pipeline.evaluation.html import render_report
from pipeline.evaluation.metrics import format_metric
from pipeline.evaluation.record import FeatureImportance, describe_quality
from pipeline.inference.files import FILES, WEIGHTS, hash_files
from pipeline.inference.model import LoadedModel, plan_of
from pipeline.jobs.code_version import noted_code, trained_by
from pipeline.jobs.console import step
from pipeline.jobs.outcome import DECIDED, run_address
from pipeline.jobs.training.evaluate import (
    EvaluationResult,
    apply_verdict,
    estimate_importance,
    evaluate,
    evaluate_model,
    pack_model,
    report_baselines,
    train_baselines,
)
from pipeline.jobs.training.identity import name_test_rows
from pipeline.jobs.training.job import ABOUT, TrainingJob, count_parts, note_registered
from pipeline.jobs.training.provenance import RECORD
from pipeline.jobs.training.summary import (
    DATA,
    PAGE,
    REPORT,
    describe_data,
    draw_figures,
    load_record,
)
from pipeline.jobs.training.train import PREPROCESSING, TrainingResult
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.worker import Worker
from pipeline.processes.process import PACKAGES
from pipeline.registration.aliases import CHAMPION, find_holder
from pipeline.registration.journal import Journal
from pipeline.registration.register import ROUGH_TOLERANCE, TOLERANCE, check_probabilities
from pipeline.registration.register import register as put_into_registry
from pipeline.registration.sections import find_metric
from pipeline.registration.tracking import CONFIG, FEATURES, RESULT, SHARDING_PLAN, reporting_unreachable
from pipeline.registration.versions import IDENTITY, SIZE, ModelVersion, download_packed, find_registered
from storage.artifacts import read_note, write_text
from storage.scratch import ScratchFolder

MOST_CHARACTERS = 5_000
"""Longest description of a version that MLflow's databases take."""
EVALUATED = "judged.json"
"""File in a run's folder with the `EvaluationResult`."""
AT_ONCE: Mapping[str, Any] = MappingProxyType({})
WHEN_IT_ANSWERS = "Once MLflow answers, the same command finishes it."


def finish(workspace: Workspace, job: TrainingJob, trained: TrainingResult, run_id: str) -> dict[str, Any]:
    """Evaluates, registers and publishes a trained model. Each step can be repeated after a failure.

    Raises:
        TrackingError: If MLflow does not answer. Names the command that resumes.
    """
    folder = Path(job.folder)
    command = f"python -m flows.register CONFIG run={folder.name}"
    with reporting_unreachable(f"The trained model is safe in '{folder}'; once MLflow answers, finish it by {command}"):
        tracker = workspace.tracking
        Journal(tracker, run_id, folder, workspace.console.log.warning).deliver()
        for path in (folder / RECORD, folder / PREPROCESSING):
            if path.exists():
                tracker.log_file(run_id, path)
        if known := noted_code(folder):
            changed = {"dlrm.code_changed": "true"} if len(known) > 1 else {}
            tracker.tag(run_id, {"git_commit": trained_by(folder).commit} | changed)
        evaluation = load_evaluation(folder, trained)
        if evaluation is None:
            evaluation = evaluate(workspace, job, trained)
            write_text(folder / EVALUATED, evaluation.model_dump_json())
        log_quality(workspace, job, trained, evaluation, run_id)
        model = register(workspace, job, trained, evaluation, run_id)
        return publish(workspace, job, trained, evaluation, model, run_id)


def load_evaluation(folder: Path, trained: TrainingResult) -> EvaluationResult | None:
    """Returns the evaluation of the same weights by an interrupted attempt, else None.

    Another evaluation could differ: the version of the first attempt may be champion by now.
    """
    path = folder / EVALUATED
    evaluation = read_note(path, EvaluationResult) if path.exists() else None
    return evaluation if evaluation and evaluation.weights_sha256 == trained.summary["weights_sha256"] else None


@step("note")
@reporting_unreachable(WHEN_IT_ANSWERS)
def log_quality(
    workspace: Workspace, job: TrainingJob, trained: TrainingResult, evaluation: EvaluationResult, run_id: str
) -> None:
    """Quality and plots -> the MLflow run. Safe to repeat: it replaces itself."""
    tracker, report = workspace.tracking, evaluation.report
    values = {f"eval_{name}": value for name, value in report.numbers.items()}
    values |= baseline_metrics(evaluation.baselines)
    values["rows_trained"] = trained.summary["rows"]
    tracker.log(run_id, int(trained.summary["steps"]), values)
    tracker.log_json(run_id, describe_data(job), DATA)
    tracker.log_json(run_id, trained.placement, SHARDING_PLAN)
    _log_report(workspace, report, evaluation.features, trained.summary, run_id)


def baseline_metrics(baselines: Sequence[Baseline]) -> dict[str, float | None]:
    """Returns the metrics of baselines by name."""
    return {f"eval_{one.name}_{key}": getattr(one, key) for one in baselines for key in ("ne", "auc")}


def _log_report(
    workspace: Workspace,
    report: EvalReport,
    features: Sequence[FeatureImportance],
    train: Mapping[str, Any],
    run_id: str,
) -> None:
    tracker = workspace.tracking
    tracker.log_json(run_id, report.model_dump(mode="json"), REPORT)
    tracker.log_json(run_id, [one.model_dump() for one in features], FEATURES)
    with workspace.best_effort("figures"):
        tracker.log_figures(run_id, draw_figures(tracker, run_id, train, report, features))


@step("register", makes="model", reads="table")
@reporting_unreachable(WHEN_IT_ANSWERS)
def register(
    workspace: Workspace, job: TrainingJob, trained: TrainingResult, evaluation: EvaluationResult, run_id: str
) -> ModelVersion:
    """Weights + plan -> a version in the registry. Safe to repeat up to its last call, which makes the version."""
    config = workspace.config
    report = evaluation.report
    tracker = workspace.tracking
    made = find_registered(tracker, config.model_name, run_id)
    if made is not None:  # by an attempt that was interrupted later
        return made
    probe = _read_first_rows(Worker(job.data["test"], workspace.warehouse), len(trained.probe))
    folder, expected, tolerance = _choose_form(workspace, job, trained, probe, run_id)
    code = trained_by(Path(job.folder))
    tags = {  # pages list them in this order
        "ne": format_metric(report.overall.ne),
        "auc": format_metric(report.overall.auc),
        "rows": f"{report.overall.rows}",
        "snapshot_id": str(job.snapshot.snapshot_id),
        "plan_hash": job.plan.hash,
        "git_commit": code.commit,
        "lock_hash": code.lock_hash,
        "seed": str(config.seed),
        "weights_sha256": trained.summary["weights_sha256"],
        FILES: json.dumps(hash_files(folder)),
        "weights": config.registration.weights,
        SIZE: str((folder / WEIGHTS).stat().st_size),
        "record": f"runs:/{run_id}/{RECORD}",
        "run_folder": Path(job.folder).name,
        "trained_to": f"{job.trained_to}",
        "scratch_day": f"{job.trained_to}",
    } | dict(job.tags)
    if report.rounding_cost is not None:
        tags["ne_int8_cost"] = f"{report.rounding_cost:+.6f}"
    return put_into_registry(tracker, run_id, config.model_name, folder, probe, expected, tags, PACKAGES, tolerance)


def _choose_form(
    workspace: Workspace, job: TrainingJob, trained: TrainingResult, probe: pa.Table, run_id: str
) -> tuple[Path, list[float], float]:
    """Returns the folder to register, the probabilities expected on the probe, and their tolerance.

    The trainer has no probabilities for rounded weights. So the exact weights are compared with the trainer first.
    """
    config = workspace.config
    folder, expected = pack_model(workspace, job, trained), list(trained.probe)
    tolerance = TOLERANCE if config.training.vector_communication == "fp32" else ROUGH_TOLERANCE
    if config.registration.weights == "fp32":
        return folder, expected, tolerance
    check_probabilities(run_id, LoadedModel(folder).score(probe), expected, tolerance)
    folder = pack_model(workspace, job, trained, config.registration.weights)
    return folder, LoadedModel(folder).score(probe).tolist(), TOLERANCE


@step("publish")
def publish(
    workspace: Workspace,
    job: TrainingJob,
    trained: TrainingResult,
    evaluation: EvaluationResult,
    model: ModelVersion,
    run_id: str,
) -> dict[str, Any]:
    """Moves the alias, and writes the result of the run to MLflow, the version and the run's page.

    Safe to repeat: it replaces itself.
    """
    tracker = workspace.tracking
    summary, report = trained.summary, evaluation.report
    done = find_holder(tracker, model.name) == model.version  # by an attempt that was interrupted later
    gate, alias = (evaluation.gate, CHAMPION) if done else apply_verdict(workspace, model.version, evaluation.gate)
    log_verdict(workspace, model.version, run_id, gate, int(summary["steps"]))
    result = {
        "status": "ok",
        "snapshot_id": job.snapshot.snapshot_id,
        "train": {key: value for key, value in summary.items() if key != "event"},
        "eval": report.numbers | {"undefined": dict(report.overall.undefined)},
        "baselines": [one.model_dump() for one in evaluation.baselines],
        "droppable_features": evaluation.droppable,
        "gate": gate.model_dump(),
        "model": model.model_dump() | {"alias": alias},
        "mlflow_run_id": run_id,
        "identity": job.identity,
        "test_rows": name_test_rows(workspace.warehouse, job.data),
        "git_commit": trained_by(Path(job.folder)).commit,
    } | dict(job.notes)
    tracker.log_json(run_id, result, RESULT)
    text = write_pages(workspace, model.version, run_id)
    # Last: a version is found by its identity only once everything else is in place.
    tracker.client.set_model_version_tag(model.name, str(model.version), IDENTITY, job.identity)
    note_registered(workspace, job, model.version)
    place = f"{PAGE} of MLflow run {run_id[:8]}, or python -m flows.report CONFIG run={model.version}"
    workspace.console.log.info("%s version %s (%s); report: %s", model.name, model.version, alias or "rejected", place)
    with workspace.best_effort("artifacts on the run's page"):
        show_result(workspace, f"{model.name} version {model.version} ({alias or 'rejected'})", text, run_id)
    return result


def log_verdict(
    workspace: Workspace, version: int, run_id: str, gate: Verdict, at: int, judged: Mapping[str, Any] = AT_ONCE
) -> None:
    """Writes the gate's verdict to a version and its MLflow run, and names the run after it. Safe to repeat.

    Args:
        at: Step of the metrics.
        judged: The entries of the result on a day that judged it later: `judged_on` and `judged_eval`.
    """
    tracker, name = workspace.tracking, workspace.config.model_name
    run = tracker.client.get_run(run_id)
    about, ne = run.data.tags.get(ABOUT, run.info.run_name), find_metric(run.data.metrics, "eval_ne")
    tags = {"gate": gate.decision, "gate_reason": gate.reason}
    if quality := judged.get("judged_eval"):
        tracker.log(run_id, at, {f"judged_{key}": one for key, one in quality.items() if key != "undefined"})
        tags |= {"judged_on": judged["judged_on"], "rows": f"{quality['rows']}"}
        tags |= {key: format_metric(quality[key]) for key in ("ne", "auc")}
        scored = f", NE {tags['ne']} on {judged['judged_on']} ({quality['rows']:,} rows)"
    else:
        scored = "" if ne is None or gate.pending else f", NE {ne:.4f}"
    shown = f"v{version} {'to be judged' if gate.pending else DECIDED[gate.decision]}{scored}, {about}"
    if gate.difference is not None:
        values = {f"gate_ne_{name}": getattr(gate.difference, name) for name in ("low", "high")}
        values |= {"gate_ne_difference": gate.difference.ne, "gate_champion_ne": gate.champion_ne}
        tracker.log(run_id, at, values)
    tracker.tag(run_id, {"mlflow.runName": shown, ABOUT: about, "version": str(version)} | tags)
    for key, value in tags.items():
        tracker.client.set_model_version_tag(name, str(version), key, value)


def write_pages(workspace: Workspace, version: int, run_id: str) -> str:
    """Writes the version's description and the HTML report from the run's record. Returns the page in markdown."""
    tracker = workspace.tracking
    address = run_address(workspace, run_id)
    record = load_record(tracker, run_id).model_copy(update={"address": address})
    text = record.render_markdown(address)
    short = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS].rpartition("\n")[0]
    tracker.client.update_model_version(workspace.config.model_name, str(version), description=short)
    tracker.tag(run_id, {"mlflow.note.content": short})
    with workspace.best_effort(PAGE):
        tracker.client.log_text(run_id, render_report([record]), PAGE)
    return text


@step("evaluate again")
def evaluate_again(workspace: Workspace, job: TrainingJob) -> dict[str, Any]:
    """Evaluates a registered version with new settings and writes its report again. Verdict and alias stay.

    Safe to repeat: it replaces itself, and the new settings are stored last.
    """
    assert job.done is not None
    version, run_id = job.done
    job = job.model_copy(update={"data": count_parts(job.data, workspace.warehouse)})
    tracker, name, log = workspace.tracking, workspace.config.model_name, workspace.console.log
    log.info("%s version %s is the same training; its evaluation has other settings or rows now", name, version)
    features: tuple[FeatureImportance, ...] = ()
    place = workspace.home / "tmp"  # near the registry: its weights are linked
    with ScratchFolder("dlrm-model-", place) as temporary, workspace.console.progress() as progress:
        model = download_packed(tracker, name, version, Path(temporary))
        test = job.data["test"].model_copy(update={"plan": plan_of(model)})
        report = evaluate_model(workspace, test, job.rows["test"], model, progress)
        with workspace.best_effort("importance of the features"):
            fitted = job.model_copy(update={"data": {**job.data, "test": test}})
            features = estimate_importance(workspace, fitted, model, progress)
        baselines: tuple[Baseline, ...] = ()
        with workspace.best_effort("baselines"):
            baselines = train_baselines(workspace, job, model, progress)
    report_baselines(workspace, report, baselines)
    before = tracker.read_record(run_id, REPORT, EvalReport)
    report = report.model_copy(update={"ne_exact": before.ne_exact})  # the exact weights are not in the registry
    result = tracker.load_result(run_id)
    values = {f"eval_{key}": value for key, value in report.numbers.items()}
    tracker.log(run_id, int(result["train"]["steps"]), values | baseline_metrics(baselines))
    _log_report(workspace, report, features, result["train"], run_id)
    result["eval"] = report.numbers | {"undefined": dict(report.overall.undefined)}
    result["baselines"] = [one.model_dump() for one in baselines]
    result["test_rows"] = name_test_rows(workspace.warehouse, job.data)
    result["droppable_features"] = [one.name for one in features if one.droppable]
    tracker.log_json(run_id, result, RESULT)
    text = write_pages(workspace, version, run_id)
    config = tracker.read_json(run_id, CONFIG) | {"evaluation": workspace.config.evaluation.model_dump(mode="json")}
    tracker.log_json(run_id, config, CONFIG)
    log.info("evaluation: %s; verdict and alias of %s version %s stay", describe_quality(report), name, version)
    with workspace.best_effort("artifacts on the run's page"):
        show_result(workspace, f"{name} version {version}, evaluated again", text, run_id)
    return result


def _read_first_rows(worker: Worker, rows: int) -> pa.Table:
    parts: list[pa.Table] = []
    for fragment in worker.fragments():
        parts.append(worker.read_selected(fragment))
        if sum(part.num_rows for part in parts) >= rows:
            break
    return pa.concat_tables(parts).slice(0, rows)


def show_result(workspace: Workspace, version: str, text: str, run_id: str) -> None:
    """Shows quality and verdict on the run's page, with links to the MLflow run and its report.

    Args:
        version: The version in words.
        text: The page in markdown.
    """
    console, name = workspace.console, workspace.config.model_key
    console.show_text("report", name, f"# {version}\n\n{text}", version)
    address = run_address(workspace, run_id)
    console.show_link("mlflow", name, address, f"MLflow run {run_id[:8]}", f"{version} in MLflow")
    console.show_link("html-report", name, f"{address}/artifacts/{PAGE}", PAGE, f"{version}: the full report")

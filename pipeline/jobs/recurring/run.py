"""One day of recurring training: judges the model of the day before, evaluates the champion, trains it if due."""

import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow.entities import Run

from pipeline.errors import EmptyDatasetError, keep_if_failed
from pipeline.evaluation import plots
from pipeline.evaluation.policy import Decision, decide
from pipeline.evaluation.record import describe_numbers
from pipeline.evaluation.series import BacktestResult, DaySums
from pipeline.inference.model import plan_of
from pipeline.jobs.columns import warn_of_columns
from pipeline.jobs.console import step
from pipeline.jobs.evaluation.trained import read_as_trained
from pipeline.jobs.recurring.day import (
    DAY_TAG,
    TRAINING_TAG,
    Today,
    clear_old_runs,
    find_next_days,
    is_changed,
    list_aliased_folders,
    list_untested,
    make_day_job,
    pin_day,
    require_champion,
    select_day_rows,
)
from pipeline.jobs.recurring.judge import (
    DayVerdict,
    Numbers,
    choose_reference,
    evaluate_reference,
    judge_challenger,
    list_numbers,
)
from pipeline.jobs.recurring.pending import PendingDays, list_days
from pipeline.jobs.training.evaluate import evaluate_model
from pipeline.jobs.training.finish import finish
from pipeline.jobs.training.job import JOB, REGISTERED, TrainingJob, note_registered, open_training_run
from pipeline.jobs.training.provenance import trained_sources
from pipeline.jobs.training.register import register_run
from pipeline.jobs.training.train import TRAINED, train
from pipeline.jobs.workspace import Workspace
from pipeline.registration.sections import find_metric
from pipeline.registration.tracking import RESULT
from pipeline.registration.versions import download_packed
from storage.artifacts import write_text
from storage.scratch import ScratchFolder

SHOWN_DAYS = 400
"""Most days in the figure of the next-day NE."""


def train_new_days(workspace: Workspace, scratch: bool, force: bool) -> dict[str, Any]:
    """Does the work of each closed day after the champion's last one, in order.

    Args:
        scratch: Trains from scratch on the last of these days.
        force: Does the work of the last of these days once more.
    Raises:
        EmptyDatasetError: If no day of the table is closed.
    """
    name, log = workspace.config.name, workspace.console.log
    settle_runs(workspace)
    pending = find_next_days(workspace)
    if pending.newest is None:
        raise EmptyDatasetError(f"table '{name}'", "a closed day", "open ones only", "Wait, or name one: day=DAY.")
    if pending.open:
        log.info("open days are not trained on yet: %s", list_days(pending.open))
    if pending.waiting:
        log.warning("closed days wait for an open one before them: %s", list_days(pending.waiting))
    if pending.changed:
        log.warning(
            "the champion has learned other rows of %s; the next training %s",
            list_days(pending.changed),
            "is from scratch" if pending.rewritten else "uses these days again",
        )
    untested = list_untested(workspace, pending.closed)
    if untested:
        log.warning("no row is in the test part of %s; the next day trains on them, too", list_days(untested))
    closed = [day for day in pending.closed if day not in untested]
    if not closed and not force:
        return describe_idle(workspace, pending)
    chosen = closed or [pending.newest]
    days: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    with keep_if_failed(verdicts=verdicts):
        for day in chosen:
            last = day == chosen[-1]
            days.append(train_day(workspace, day, scratch and last, force and last))
            verdicts.append(shorten_day(days[-1]))
    return days[-1] | {
        "status": "ok" if pending.changed or any(one["status"] == "ok" for one in days) else "skipped",
        "days": [{"day": one["day"], "status": one["status"], "model": one["model"]} for one in days],
        "verdicts": verdicts,
    }


def shorten_day(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns what people are told of a day, for the result of several days."""
    keys = ("day", "status", "model", "gate", "judged", "champion", "champion_eval")
    return {key: result.get(key) for key in keys}


@step("report the days")
def describe_idle(workspace: Workspace, pending: PendingDays) -> dict[str, Any]:
    """Returns the result if the champion has learned all closed days. Safe to repeat: it only reads.

    The status is `ok`, not `skipped`, while learned days have changed.
    """
    champion = require_champion(workspace)
    if not pending.closed and not pending.waiting:
        workspace.console.log.info("the champion has learned all days up to %s, the newest closed day", pending.newest)
    return {
        "status": "ok" if pending.changed else "skipped",
        "model": {"name": workspace.config.model_name, "version": champion.version, "alias": "champion"},
        "trained_to": f"{champion.trained_to}",
        "days": [],
        "open_days": [f"{day}" for day in pending.open],
        "waiting_days": [f"{day}" for day in pending.waiting],
        "changed_days": [f"{day}" for day in pending.changed],
    }


def train_day(workspace: Workspace, day: datetime.date, scratch: bool, force: bool) -> dict[str, Any]:
    """Does a day's work once, while no other training of the model runs.

    Args:
        scratch: Trains from scratch, whatever the policy says.
        force: Does the work of a finished day once more.
    """
    with workspace.lock(workspace.training_lock):
        settle_runs(workspace)
        today = pin_today(workspace, day, force)
        if today.done is not None:
            return load_result(workspace, today, *today.done)
        verdict = None
        with ScratchFolder("champion-", workspace.home / "tmp") as scratch_folder:
            folder = Path(scratch_folder)
            reference = choose_reference(workspace, today)
            if workspace.config.recurring.judge == "next_day":
                verdict = judge_challenger(workspace, today, folder / "judged")
            if verdict is not None:  # by the gate or by a person, the champion may be another one now
                today = pin_today(workspace, today.day, force)
            qualities, decision, job = prepare_day(workspace, today, verdict, reference, scratch, folder / "champion")
        return _train_or_keep(workspace, today, qualities, decision.training, job)


def _train_or_keep(
    workspace: Workspace, today: Today, qualities: Mapping[str, Numbers], training: str, job: TrainingJob
) -> dict[str, Any]:
    config, version = workspace.config, today.champion.version
    if training != "scratch":
        workspace = workspace.with_config(config.model_copy(update={"training": config.incremental}))
    words = {"incremental": f"incremental from version {version}", "scratch": "from scratch", "none": "evaluated only"}
    tags = {DAY_TAG: f"{today.day}", TRAINING_TAG: training, "mlflow.source.name": "flows.recurring"}
    with open_training_run(workspace, job, f"{today.day} {words[training]}", tags) as run_id:
        record_day(workspace, qualities, run_id)
        if training == "none":
            return keep_champion(workspace, today, job, run_id)
        trained = train(workspace, job, run_id)
        result = finish(workspace, job, trained, run_id)
    with workspace.best_effort("removing old checkpoints"):
        clear_old_runs(workspace, today.day)
    return result


def settle_runs(workspace: Workspace) -> None:
    """Completes the registration of champion and challenger if it was interrupted after the alias moved."""
    for folder in list_aliased_folders(workspace):
        if (folder / TRAINED).exists() and not (folder / REGISTERED).exists():
            register_run(workspace, folder.name)


@step("pin")
def pin_today(workspace: Workspace, day: datetime.date, force: bool) -> Today:
    """Pins the day and logs its champion. Safe to repeat: it only reads."""
    today = pin_day(workspace, day, force)
    champion = today.champion
    workspace.console.log.info(
        "%s has %s rows; the champion is version %s, trained to %s; %s rows of %s days are new to it",
        today.day, f"{today.rows:,}", champion.version, champion.trained_to, f"{today.new_rows:,}", len(today.new_days),
    )  # fmt: skip
    return today


@step("evaluate the champion")
def prepare_day(
    workspace: Workspace, today: Today, verdict: DayVerdict | None, reference: int, scratch: bool, folder: Path
) -> tuple[dict[str, Numbers], Decision, TrainingJob]:
    """Evaluates the champion on the day, asks the policy, and pins the training it asks for.

    Safe to repeat: it only reads, and fits the plan once.

    Args:
        verdict: On the model of an earlier day. The versions in it have scored the day already.
        reference: Version to compare the line of champions with.
        folder: Takes the models.
    Returns:
        The quality on the day by role, what to do, and the training.
    """
    config, log, version = workspace.config, workspace.console.log, today.champion.version
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that failed
    model = download_packed(workspace.tracking, config.model_name, version, folder)
    known = dict(verdict.quality if verdict else {})
    if version not in known:
        trained = trained_sources(workspace, version)
        read = read_as_trained(workspace, version, today.snapshot, trained, plan_of(model).columns)
        with workspace.console.progress() as progress:
            report = evaluate_model(workspace, select_day_rows(workspace, today), today.rows, model, progress, read)
        known[version] = list_numbers(report)
    if reference not in known and (found := evaluate_reference(workspace, today, reference, folder)) is not None:
        known[reference] = found
    roles = {"champion": version if verdict is None else verdict.champion, "reference": reference}
    roles |= {} if verdict is None else {"challenger": verdict.challenger}
    qualities = {role: known[number] for role, number in roles.items() if number in known}
    for role, values in qualities.items():
        log.info("%s, version %s, on %s: %s", role, roles[role], today.day, describe_numbers(values))
    decision = decide(
        config.recurring, today.make_standing(known[version]["ne"], known[version]["calibration"]), today.day
    )
    if scratch:
        decision = Decision(training="scratch", reason="scratch=true")
    log.info("training: %s, %s", decision.training, decision.reason)
    notes = {
        "day": f"{today.day}",
        "champion": roles["champion"],
        "champion_eval": qualities.get("champion"),
        "reference": {"version": reference, "eval": qualities.get("reference")},
        "judged": verdict and {
            "version": verdict.challenger, "eval": qualities.get("challenger"), "gate": verdict.gate.model_dump()
        },
        "decision": decision.model_dump(),
    }  # fmt: skip
    training = config.training if decision.training == "scratch" else config.incremental
    chosen = workspace.with_config(config.model_copy(update={"training": training}))
    job = make_day_job(chosen, today, decision, plan_of(model), notes)
    if decision.training != "none":
        warn_of_columns(job.data["train"], workspace.warehouse, log)
    write_text(Path(job.folder) / JOB, job.model_dump_json(), mode=0o600)  # it holds the catalog's credentials
    return qualities, decision, job


@step("record the day")
def record_day(workspace: Workspace, qualities: Mapping[str, Numbers], run_id: str) -> None:
    """Quality of the versions on the day, and a plot of all days so far -> the MLflow run. Safe to repeat."""
    tracker = workspace.tracking
    for role, values in qualities.items():
        tracker.log(run_id, 0, {f"{role}_{name}": value for name, value in values.items() if name != "undefined"})
    with workspace.best_effort("figure of the next-day NE"):
        series = [load_series(workspace, role) for role in ("champion", "reference")]
        tracker.log_figures(run_id, {"next_day": plots.backtest([one for one in series if one.days], 7)})


def load_series(workspace: Workspace, role: str) -> BacktestResult:
    """Returns the quality of the champions, or of the reference, on each day. Reads the days' runs."""
    days: dict[datetime.date, DaySums] = {}
    trained: dict[datetime.date, float] = {}
    for run in reversed(_list_day_runs(workspace)):
        metrics, day = run.data.metrics, datetime.date.fromisoformat(run.data.tags[DAY_TAG])
        if role == "champion":
            trained[day] = trained.get(day, 0.0) + (find_metric(metrics, "rows_trained") or 0.0)
        if find_metric(metrics, f"{role}_ne") is not None:
            rows, rate, loss, calibration = (
                find_metric(metrics, f"{role}_{name}") or 0.0
                for name in ("rows", "label_rate", "logloss", "calibration")
            )
            days[day] = DaySums(
                day=day, rows=rows, loss=loss * rows, labels=rate * rows, predictions=calibration * rate * rows
            )
    ordered = tuple(days[day] for day in sorted(days))
    return BacktestResult(name=role, days=ordered, rows_trained=trained, seconds=0.0, trainings={})


def _list_day_runs(workspace: Workspace) -> list[Run]:
    """Returns the runs of the model's last days, the newest first. Other models may share the experiment."""
    tracker, config = workspace.tracking, workspace.config
    found: list[Run] = []
    token: str | None = None
    while len(found) < SHOWN_DAYS and token != "":
        query, order = f"tags.`{DAY_TAG}` LIKE '%'", [f"tags.`{DAY_TAG}` DESC"]
        page = tracker.client.search_runs([tracker.experiment_id], query, order_by=order, page_token=token)
        models = (run.data.params.get("registration.model_name", config.name) for run in page)
        found += [run for run, model in zip(page, models, strict=True) if model == config.model_name]
        token = page.token or ""
    return found[:SHOWN_DAYS]


@step("keep the champion")
def keep_champion(workspace: Workspace, today: Today, job: TrainingJob, run_id: str) -> dict[str, Any]:
    """Writes the result of a day without training. Safe to repeat: it replaces itself."""
    name, version = workspace.config.model_name, today.champion.version
    result = {
        "status": "ok",
        "snapshot_id": today.snapshot.snapshot_id,
        "model": {"name": name, "version": version, "alias": "champion"},
        "gate": None,
        "mlflow_run_id": run_id,
        "identity": today.identity,
    } | dict(job.notes)
    workspace.tracking.log_json(run_id, result, RESULT)
    note_registered(workspace, job, version)
    return result


@step("load the result")
def load_result(workspace: Workspace, today: Today, version: int | None, run_id: str) -> dict[str, Any]:
    """Returns the result of a day that is already done. Safe to repeat: it only reads.

    It is not `skipped` if the day has changed since a version learned it.
    """
    what = "no training was due" if version is None else f"version {version} was trained"
    result = workspace.tracking.load_result(run_id)
    if version is not None and is_changed(workspace, today, version):
        workspace.console.log.warning(
            "%s changed after version %s was trained on it; the next training takes it again", today.day, version
        )
        return result | {"status": "ok", "changed_days": [f"{today.day}"]}
    workspace.console.log.info("skipped: %s is done, %s; force=true does it again", today.day, what)
    return result | {"status": "skipped"}

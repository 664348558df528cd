"""Flow: a complete day -> the champion judged on it, trained further on it, and replaced if that is no worse."""

import datetime
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.ingest import ingest
from flows.register import register
from flows.train import train
from pipeline.config import RunConfig, load
from pipeline.evaluation import plots
from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.policy import Decision, decide
from pipeline.evaluation.series import BacktestResult, DaySums
from pipeline.jobs.console import Progress
from pipeline.jobs.recurring.day import (
    DAY_TAG,
    TRAINING_TAG,
    Today,
    champion_folder,
    clear,
    fetched,
    has_champion,
    job_of_day,
    judged_rows,
    pinned_day,
    require_hash_split,
)
from pipeline.jobs.tables.catalog import warn_of_columns
from pipeline.jobs.training import tasks
from pipeline.jobs.training.evaluate import quality
from pipeline.jobs.training.finish import finish
from pipeline.jobs.training.job import JOB, REGISTERED, TrainingJob, alone, tracked_run, tracker_of, warehouse_of
from pipeline.jobs.training.summary import flow_run_name, in_words
from pipeline.jobs.training.tasks import TRAINED
from pipeline.registration.scorer import plan_of
from pipeline.registration.tracking import RESULT
from storage.artifacts import write_text

SHOWN_DAYS = 400
"""Days that the figure of the next-day NE goes back."""


@flow(name="recurring", flow_run_name=flow_run_name)
def recurring(
    config: RunConfig | str = "configs/flights_daily.yaml",
    overrides: Mapping[str, Any] | None = None,
    day: datetime.date | None = None,
    scratch: bool = False,
    again: bool = False,
) -> dict[str, Any]:
    """A day in; the champion's quality on it before it was trained on, and a model version trained on it, out.

    The day is ingested if the table does not have it. Where there is no champion, the first one is trained on the
    config's own split. The champion is trained on all days since its last one, but for the rows of the split's test
    part, on which the gate compares the two. A day that is done already is skipped.

    Args:
        config: The run's config, or the path of its YAML file; its split must be `hash`.
        overrides: Dotted key -> value, put over the config.
        day: The day; None: the last one of the table, after all new days of the source are ingested.
        scratch: Trains another model on all days, whatever the policy says.
        again: Does the work of a finished day once more; one that the champion has seen needs a rollback first.
    """
    settings = load(config, overrides)
    require_hash_split(settings)
    complete(settings, day)
    if not has_champion(settings):
        train(settings)
    with alone(settings, f"training of model '{settings.model_name}'", get_run_logger()):
        settle(settings)
        return _work_of(settings, day, scratch, again)


def _work_of(config: RunConfig, day: datetime.date | None, scratch: bool, again: bool) -> dict[str, Any]:
    """The day's work, while no other training of the model is."""
    today = pin(config, day, again)
    if today.done is not None:
        return done_before(config, today, *today.done)
    folder = config.home_path / "tmp" / f"champion-{today.identity}"
    try:
        report, decision, job = prepare(config, today, scratch, folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    training, version = decision.training, today.champion.version
    config = config if training == "scratch" else config.model_copy(update={"training": config.further})
    words = {"further": f"further from version {version}", "scratch": "from scratch", "none": "judged only"}
    tags = {DAY_TAG: f"{today.day}", TRAINING_TAG: training, "mlflow.source.name": "flows.recurring"}
    with tracked_run(config, job, f"{today.day} {words[training]}", tags) as run_id:
        note_champion(config, report, run_id)
        if training == "none":
            return kept(config, today, job, run_id)
        trained = tasks.train(config, job, run_id)
        result = finish(config, job, trained, run_id)
    with tasks.cosmetic("room made"):
        clear(config, today.day)
    return result


def settle(config: RunConfig) -> None:
    """Ends the registration of the champion if that was cut short once it was champion: its day is done, then."""
    folder = champion_folder(config)
    if folder is not None and (folder / TRAINED).exists() and not (folder / REGISTERED).exists():
        register(config, run=folder.name)


def complete(config: RunConfig, day: datetime.date | None) -> None:
    """Sees to it that the table has the day; a day is written as a whole, so one that is there is complete."""
    if day is None or not has_champion(config):
        ingest(config)
    elif day not in warehouse_of(config).whole_days(config.name):
        ingest(config, day=day)


@task(cache_policy=NO_CACHE, task_run_name="pin")
def pin(config: RunConfig, day: datetime.date | None, again: bool) -> Today:
    """The day, and how the champion stands. Safe to repeat: it only reads."""
    today = pinned_day(config, day, again)
    champion = today.champion
    get_run_logger().info(
        "%s, %s rows; champion: version %s, trained to %s; new to it: %s rows, days: %s",
        today.day, f"{today.rows:,}", champion.version, champion.trained_to, f"{today.new_rows:,}", len(today.new_days),
    )  # fmt: skip
    return today


@task(cache_policy=NO_CACHE, task_run_name="judge the champion")
def prepare(config: RunConfig, today: Today, scratch: bool, folder: Path) -> tuple[EvalReport, Decision, TrainingJob]:
    """The champion's quality on the day, what the policy makes of it, and the training that it asks for.

    Safe to repeat: it only reads, and fits the plan once.

    Args:
        folder: Takes the champion's model.
    """
    logger = get_run_logger()
    shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was killed
    model = fetched(config, today.champion, folder)
    with Progress(logger) as progress:
        report = quality(config, judged_rows(config, today), today.rows, model, progress)
    logger.info("champion on %s: %s", today.day, in_words(report))
    decision = decide(config.recurring, today.standing(report.overall.ne, report.overall.calibration), today.day)
    if scratch:
        decision = Decision(training="scratch", reason="it was asked for")
    logger.info("training: %s, %s", decision.training, decision.reason)
    notes = {
        "day": f"{today.day}",
        "champion": today.champion.version,
        "champion_eval": report.numbers | {"undefined": dict(report.overall.undefined)},
        "decision": decision.model_dump(),
    }
    training = config.training if decision.training == "scratch" else config.further
    job = job_of_day(config.model_copy(update={"training": training}), today, decision, plan_of(model), notes)
    if decision.training != "none":
        warn_of_columns(job.data["train"], warehouse_of(config), logger)
    write_text(Path(job.folder) / JOB, job.model_dump_json(), mode=0o600)  # it holds the catalog's credentials
    return report, decision, job


@task(cache_policy=NO_CACHE, task_run_name="note the champion")
def note_champion(config: RunConfig, report: EvalReport, run_id: str) -> None:
    """The champion's quality on the day, and the series of all days so far -> the MLflow run. Safe to repeat."""
    tracker = tracker_of(config)
    tracker.log(run_id, 0, {f"champion_{name}": value for name, value in report.numbers.items()})
    with tasks.cosmetic("figure of the next-day NE"):
        tracker.log_figures(run_id, {"next_day": plots.backtest([_course_so_far(config)], 7)})


def _course_so_far(config: RunConfig) -> BacktestResult:
    """Next-day quality of the champions, as the runs of the days have it."""
    tracker = tracker_of(config)
    runs = tracker.client.search_runs(
        [tracker.experiment_id],
        f"tags.`{DAY_TAG}` LIKE '%'",
        max_results=SHOWN_DAYS,
        order_by=[f"tags.`{DAY_TAG}` DESC"],
    )
    days: dict[datetime.date, DaySums] = {}
    trained: dict[datetime.date, float] = {}
    for run in reversed(runs):
        metrics, day = run.data.metrics, datetime.date.fromisoformat(run.data.tags[DAY_TAG])
        trained[day] = trained.get(day, 0.0) + metrics.get("rows_trained", 0.0)
        if metrics.get("champion_ne") is not None:
            rows, rate = metrics["champion_rows"], metrics["champion_label_rate"]
            days[day] = DaySums(
                day=day, rows=rows, loss=metrics["champion_logloss"] * rows, labels=rate * rows,
                predictions=metrics.get("champion_calibration", 0.0) * rate * rows,
            )  # fmt: skip
    ordered = tuple(days[day] for day in sorted(days))
    return BacktestResult(name="champion", days=ordered, rows_trained=trained, seconds=0.0, trainings={})


@task(cache_policy=NO_CACHE, task_run_name="keep the champion")
def kept(config: RunConfig, today: Today, job: TrainingJob, run_id: str) -> dict[str, Any]:
    """The result of a day without training. Safe to repeat: it replaces itself."""
    name, version = config.model_name, today.champion.version
    result = {
        "status": "ok",
        "snapshot_id": today.snapshot.snapshot_id,
        "model": {"name": name, "version": version, "alias": "champion"},
        "gate": None,
        "mlflow_run_id": run_id,
        "identity": today.identity,
    } | dict(job.notes)
    tracker_of(config).log_json(run_id, result, RESULT)
    write_text(Path(job.folder) / REGISTERED, f"{name} {version}\n")
    return result


@task(cache_policy=NO_CACHE, task_run_name="finished before")
def done_before(config: RunConfig, today: Today, version: int | None, run_id: str) -> dict[str, Any]:
    """The result of a day that was done before. Safe to repeat: it only reads."""
    what = "no training was due" if version is None else f"version {version} was trained on it"
    get_run_logger().info("skipped: %s is done, %s; again=true does it once more", today.day, what)
    return tracker_of(config).load_result(run_id) | {"status": "skipped"}


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(recurring)

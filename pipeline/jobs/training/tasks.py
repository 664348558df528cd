"""One @task per stage: open resources, call the stage, return its handle."""

import datetime
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow as pa
from prefect import get_run_logger, task
from prefect.assets import materialize
from prefect.cache_policies import NO_CACHE
from pydantic import BaseModel

from flows.runtime.pages import show_result
from pipeline.config import RunConfig
from pipeline.config.files import ROOT
from pipeline.evaluation import plots
from pipeline.evaluation.metrics import format_metric
from pipeline.extraction.enrich import EnrichResult
from pipeline.extraction.enrich import enrich as write_columns
from pipeline.extraction.extract import IngestResult, extract
from pipeline.extraction.opening import SourceContext
from pipeline.jobs.console import Logger, Progress
from pipeline.jobs.tables.catalog import warn_of_columns
from pipeline.jobs.tables.checks import show_checks
from pipeline.jobs.tables.layout import keep_read
from pipeline.jobs.tables.score_days import Scores, score_days
from pipeline.jobs.training.evaluate import Judged, in_a_line, judge, moved, worths
from pipeline.jobs.training.job import (
    REGISTERED,
    TrainingJob,
    alone,
    columns_at,
    keep_inputs,
    own_folder,
    pinned,
    prepared,
    tracker_of,
    warehouse_of,
)
from pipeline.jobs.training.provenance import RECORD, recorded
from pipeline.jobs.training.rank import RankSpec
from pipeline.jobs.training.reporting import (
    CURVES,
    DATA,
    FEATURES,
    PAGE,
    PLAN,
    REPORT,
    STALL_CURVES,
    data_in_words,
    page_of,
)
from pipeline.jobs.training.sharding_plans import place_tables
from pipeline.jobs.training.summary import commit, in_words, lock_hash, page
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.drain import drain
from pipeline.preprocessing.master import WORKERS_FILE, Totals
from pipeline.preprocessing.service import Service
from pipeline.preprocessing.worker import Costs, Worker
from pipeline.registration.aliases import CHAMPION, find_holder
from pipeline.registration.config import Weights
from pipeline.registration.journal import Journal
from pipeline.registration.register import (
    FILES,
    IDENTITY,
    ROUGH_TOLERANCE,
    TOLERANCE,
    ModelVersion,
    check_probabilities,
    find_registered,
    hash_files,
    pack,
)
from pipeline.registration.register import register as put_into_registry
from pipeline.registration.scorer import WEIGHTS, LoadedModel
from pipeline.registration.tracking import RESULT, is_unreachable
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.training.launch.ray_train import run_ranks_on_ray
from pipeline.training.tables.sharding import ShardingPlan
from storage.artifacts import write_json, write_text

MOST_CHARACTERS = 5_000
"""MLflow's databases take no longer description of a version."""
TRAINED, PREPROCESSING = "trained.json", "preprocessing.json"
"""Files in a run's folder: what the ranks left behind, and what preprocessing took."""


class Trained(BaseModel, frozen=True):
    """What the ranks left behind."""

    weights: str
    probe: tuple[float, ...]
    summary: Mapping[str, Any]
    placement: tuple[Mapping[str, Any], ...]


@materialize("iceberg://dlrm/table", by="dlrm-pipeline", cache_policy=NO_CACHE, task_run_name="ingest")
def ingest(config: RunConfig, days: tuple[datetime.date, ...] = (), again: bool = False) -> IngestResult:
    """Source rows -> warehouse days. Safe to repeat: a day is replaced as a whole or not at all."""
    logger = get_run_logger()
    with alone(config, ingest_of(config), logger), Progress(logger) as progress:
        return write_days(config, days, again, progress)


@materialize("iceberg://dlrm/table", by="dlrm-pipeline", cache_policy=NO_CACHE, task_run_name="enrich")
def enrich(config: RunConfig, start: datetime.date | None, end: datetime.date | None, again: bool) -> EnrichResult:
    """Columns of side sources -> days of the warehouse. Safe to repeat: days that are done are skipped."""
    logger, joined = get_run_logger(), config.features.joined
    with alone(config, ingest_of(config), logger), Progress(logger) as progress:
        show = partial(progress, "enrich")
        return write_columns(joined, warehouse_of(config), config.name, ROOT, start, end, again, show)


def ingest_of(config: RunConfig) -> str:
    """What only one at a time may do to a table, in words."""
    return f"ingest of table '{config.name}'"


def source_context(config: RunConfig) -> SourceContext:
    """The run's source, with all that is needed to read it."""
    logs = config.home_path / "logs"
    return SourceContext(config.source, config.features, warehouse_of(config), config.name, ROOT, logs)


def write_days(
    config: RunConfig, days: Sequence[datetime.date], again: bool, report: Callable[[str, int, int], None]
) -> IngestResult:
    """The days of the source, none named: all of them, as days of the warehouse."""
    return extract(
        source_context(config),
        config.ingest,
        days,
        again,
        report,
        partial(show_checks, config),
        get_run_logger().warning,
    )


@task(cache_policy=NO_CACHE, task_run_name="pin")
def pin(config: RunConfig, snapshot_id: int | None, again: bool) -> TrainingJob:
    """Snapshot, split and fitted plan of a training. Safe to repeat: it only reads, and writes the plan once."""
    job = pinned(config, snapshot_id, again)
    parts = (f"{part} {rows:,} rows of {len(job.data[part].selection.days)} days" for part, rows in job.rows.items())
    get_run_logger().info("snapshot %s: %s", job.snapshot.snapshot_id, ", ".join(parts))
    warn_of_columns(job.data["train"], warehouse_of(config), get_run_logger())
    return job


@task(cache_policy=NO_CACHE, task_run_name="preprocess")
def preprocess(config: RunConfig, snapshot_id: int | None, epoch: int) -> dict[str, Any]:
    """One epoch of training batches, drained. Safe to repeat: it only reads."""
    snapshot, data, rows = prepared(config, snapshot_id)
    logger = get_run_logger()
    with own_folder(config.home_path / "preprocessing" / config.name) as folder, Progress(logger) as progress:
        logger.info("snapshot %s, %s rows", snapshot.snapshot_id, f"{rows:,}")
        warn_of_columns(data, warehouse_of(config), logger)
        if config.preprocessing.executor != "inline":
            logger.info("preprocessing workers: process ids in %s", folder / WORKERS_FILE)

        def show(done: int, totals: Totals) -> None:
            progress("preprocess", done, rows, f"{len(totals.peak_rss_mb)} workers")

        drained = drain(
            data, config.preprocessing, config.training.batch_rows, config.seed, folder, epoch, logger.warning, show
        )
    costs = {name: getattr(drained, name) for name in ("read_seconds", "bytes_read", "bytes_stored", "reads")}
    keep_read(config, "preprocess", data, drained.rows, Costs(**costs))
    return {"status": "ok", "snapshot_id": snapshot.snapshot_id, "plan_hash": data.plan.hash} | drained.model_dump()


@task(cache_policy=NO_CACHE, task_run_name="train")
def train(
    config: RunConfig,
    job: TrainingJob,
    run_id: str,
    given: ShardingPlan | None = None,
    watch: Callable[[Event | None], object] | None = None,
) -> Trained:
    """Warehouse rows -> weights. Safe to repeat: it goes on from the last checkpoint.

    All that later stages need is in the job's folder when this returns; MLflow may be away until then.

    Args:
        given: Placement of the tables; None: as it is planned.
        watch: Sees each event of the ranks, and None several times a second; what it raises ends them.
    """
    tracker, folder = tracker_of(config), Path(job.folder)
    keep_inputs(warehouse_of(config), job.identity, job.snapshot, job.data["train"].joined)
    spec = rank_spec(config, job)
    placement: list[dict[str, Any]] = []
    total = job.rows["train"] * config.training.epochs
    if config.training.max_steps is not None:
        total = min(total, config.training.max_steps * config.training.batch_rows)
    logger = get_run_logger()
    spec = place_tables(spec, tracker, run_id, logger, given)
    journal = Journal(tracker, run_id, folder, logger.warning)
    with Progress(logger) as progress, journal, served(config, job, logger) as service:
        on_event = _event_handler(journal, placement, progress, total, logger)
        training = config.training
        limits = Limits(training.deadline_seconds, training.hang_seconds, training.restart_limit)
        if watch is not None:
            on_event = _both(on_event, watch)
            limits = replace(limits, check=partial(watch, None))
        if service is not None:
            limits = replace(limits, progress=service.totals.progress)
        launch = run_ranks
        if training.launcher == "ray":
            launch = partial(run_ranks_on_ray, address=config.preprocessing.ray_address)
        summary = launch(
            "pipeline.jobs.training.rank",
            spec if service is None else spec.model_copy(update={"service": service.address}),
            folder,
            config.training.world_size,
            config.training.threads_per_rank,
            limits,
            on_event,
            ROOT,
        )
    if service is not None:
        summary = summary | {"preprocessing": _account(folder, config, service.totals)}
        with cosmetic("record of what was read"):
            keep_read(config, "train", job.data["train"], service.totals.rows, service.totals.costs)
    probe = json.loads((folder / "probe.json").read_text(encoding="utf-8"))
    trained = Trained(
        weights=f"{job.folder}/weights.safetensors", probe=tuple(probe), summary=summary, placement=tuple(placement)
    )
    assert spec.placement is not None
    write_text(folder / RECORD, recorded(config, job, spec.placement, summary).model_dump_json(indent=2))
    write_text(folder / TRAINED, trained.model_dump_json())
    return trained


def rank_spec(config: RunConfig, job: TrainingJob) -> RankSpec:
    """What the ranks of a training are told, but for the placement of the tables."""
    return RankSpec(
        train=job.data["train"],
        valid=job.data.get("valid"),
        valid_rows=job.rows.get("valid", 0),
        probe=job.data["test"] if "test" in job.data else job.data["valid"],  # a candidate has no test rows
        model=config.model,
        training=config.training,
        preprocessing=config.preprocessing,
        seed=config.seed,
        folder=job.folder,
        start=job.start,
    )


@contextmanager
def served(config: RunConfig, job: TrainingJob, logger: Logger) -> Iterator[Service | None]:
    """The preprocessing service of a training; None where each rank reads for itself."""
    if config.preprocessing.executor == "inline":
        yield None
        return
    data: dict[str, DataSpec] = {part: spec for part, spec in job.data.items() if part != "test"}
    folder = Path(job.folder) / "preprocessing"
    with Service(data, config.preprocessing, folder, logger.warning) as service:
        logger.info("preprocessing workers: process ids in %s", folder / WORKERS_FILE)
        yield service


def _account(folder: Path, config: RunConfig, totals: Totals) -> dict[str, Any]:
    """What the preprocessing of a training took, for its result; the details are left in its folder."""
    summary = {
        "executor": config.preprocessing.executor,
        "workers": totals.most_workers,
        "restarts": totals.restarts,
        "quarantined_rows": totals.quarantined_rows,
    }
    details = {
        "costs": vars(totals.costs),
        "peak_rss_mb": totals.peak_rss_mb,
        "late_results": totals.late_results,
        "quarantined": totals.quarantined,
    }
    write_json(folder / PREPROCESSING, summary | details)
    return summary


def _both(first: Callable[[Event], object], second: Callable[[Event], object]) -> Callable[[Event], None]:
    def handle(event: Event) -> None:
        first(event)
        second(event)

    return handle


def _event_handler(
    journal: Journal,
    placement: list[dict[str, Any]],
    progress: Progress,
    total: int,
    logger: Logger,
) -> Callable[[Event], None]:
    notes: dict[str, str] = {}

    def handle(event: Event) -> None:
        if event["event"] == "start":
            placement[:] = event["plan"]
            kinds = sorted({row["sharding"] for row in event["plan"]})
            logger.info("%s tables placed %s on %s", len(event["plan"]), ", ".join(kinds), event["device"])
        elif event["event"] == "resumed":
            logger.info("resumed at step %s, %s rows", event["step"], f"{event['rows']:,}")
        elif event["event"] == "grown":
            new, larger = (", ".join(event[key]) or "none" for key in ("new", "larger"))
            logger.info("the model has grown: new tables %s; tables with more rows %s", new, larger)
        elif event["event"] == "damaged":
            logger.warning("passed over: %s", event["error"])
        elif event["event"] == "restart":
            reason, number, limit = event["reason"], event["number"], event["limit"]
            logger.warning("%s; ranks go on from step %s, restart %s of %s", reason, event["step"], number, limit)
        elif event["event"] == "metrics":
            journal.log(event["step"], event["metrics"])
            for key, label in (("train_ne_window", "NE"), ("valid_ne", "valid NE")):
                if event["metrics"].get(key) is not None:
                    notes[label] = f"{event['metrics'][key]:.4f}"
            progress("train", event["rows"], total, ", ".join(f"{label} {value}" for label, value in notes.items()))

    return handle


@task(cache_policy=NO_CACHE, task_run_name="evaluate")
def evaluate(config: RunConfig, job: TrainingJob, trained: Trained) -> Judged:
    """Weights -> quality on the evaluation rows and the gate's verdict. Safe to repeat: it only reads."""
    logger = get_run_logger()
    model = _packed(config, job, trained, config.registration.weights)
    exact = None if config.registration.weights == "fp32" else _packed(config, job, trained)
    with Progress(logger) as progress:
        judged = judge(config, job, model, progress, exact)
        with cosmetic("worth of the features"):
            judged = judged.model_copy(update={"features": worths(config, job, model, progress)})
    judged = judged.model_copy(update={"weights_sha256": trained.summary["weights_sha256"]})
    logger.info("evaluation: %s", in_words(judged.report))
    logger.info("gate: %s. %s", judged.gate.decision, judged.gate.reason)
    if judged.features:
        logger.info("features worth most: %s", ", ".join(worth.name for worth in judged.features[:5]))
        logger.info("features that could be dropped: %s", ", ".join(judged.droppable) or "none")
    return judged


@task(cache_policy=NO_CACHE, task_run_name="note")
def note(config: RunConfig, job: TrainingJob, trained: Trained, judged: Judged, run_id: str) -> None:
    """Quality and figures -> the MLflow run. Safe to repeat: it replaces itself."""
    tracker, report, gate = tracker_of(config), judged.report, judged.gate
    values = {f"eval_{name}": value for name, value in report.numbers.items()}
    values["rows_trained"] = trained.summary["rows"]
    if gate.difference is not None:
        values |= {f"gate_ne_{name}": getattr(gate.difference, name) for name in ("low", "high")}
        values |= {"gate_ne_difference": gate.difference.ne, "gate_champion_ne": gate.champion_ne}
    tracker.log(run_id, int(trained.summary["steps"]), values)
    tracker.log_json(run_id, report.model_dump(mode="json"), REPORT)
    tracker.log_json(run_id, [worth.model_dump() for worth in judged.features], FEATURES)
    tracker.log_json(run_id, data_in_words(job), DATA)
    tracker.log_json(run_id, trained.placement, PLAN)
    with cosmetic("figures"):
        curves, best = tracker.load_curves(run_id, [*CURVES, *STALL_CURVES]), trained.summary["best_step"]
        figures = {
            "learning_curve": plots.learning_curve(curves, best, report.overall.ne, report.ne_floor),
            "stall_timeline": plots.stall_timeline(curves),
            "calibration": plots.calibration(report),
            "roc": plots.roc(report),
            "precision_recall": plots.precision_recall(report),
        }
        if report.slices:
            figures["slices"] = plots.slices(report)
        if judged.features:
            figures["importance"] = plots.importance(judged.features)
        tracker.log_figures(run_id, figures)


@contextmanager
def cosmetic(what: str) -> Iterator[None]:
    """What can be done without: if it cannot be had, the log says so, and hours of training are not lost for it."""
    try:
        yield
    except Exception as error:
        if is_unreachable(error):  # that can be finished later
            raise
        get_run_logger().warning("the run has no %s: %s", what, in_a_line(error))


@materialize("mlflow://models/model", by="dlrm-pipeline", cache_policy=NO_CACHE, task_run_name="register")
def register(config: RunConfig, job: TrainingJob, trained: Trained, judged: Judged, run_id: str) -> ModelVersion:
    """Weights + plan -> a version in the registry. Safe to repeat up to its last call, which makes the version."""
    report = judged.report
    tracker = tracker_of(config)
    made = find_registered(tracker, config.model_name, run_id)
    if made is not None:  # by an attempt that was cut short later
        return made
    probe = _first_rows(Worker(job.data["test"], warehouse_of(config)), len(trained.probe))
    folder, expected, tolerance = _chosen_form(config, job, trained, probe, run_id)
    tags = {
        "snapshot_id": str(job.snapshot.snapshot_id),
        "plan_hash": job.plan.hash,
        "git_commit": commit(),
        "lock_hash": lock_hash(),
        "seed": str(config.seed),
        "weights_sha256": trained.summary["weights_sha256"],
        FILES: json.dumps(hash_files(folder)),
        "weights": config.registration.weights,
        "size_bytes": str((folder / WEIGHTS).stat().st_size),
        "record": f"runs:/{run_id}/{RECORD}",
        "run_folder": Path(job.folder).name,
        "trained_to": f"{job.trained_to}",
        "scratch_day": f"{job.trained_to}",
        "ne": format_metric(report.overall.ne),
        "auc": format_metric(report.overall.auc),
    } | dict(job.tags)
    if report.rounding_cost is not None:
        tags["ne_int8_cost"] = f"{report.rounding_cost:+.6f}"
    return put_into_registry(tracker, run_id, config.model_name, folder, probe, expected, tags, ROOT, tolerance)


def _chosen_form(
    config: RunConfig, job: TrainingJob, trained: Trained, probe: pa.Table, run_id: str
) -> tuple[Path, list[float], float]:
    """The folder to register, and the probabilities of the probe that it has to give within a tolerance.

    Rounded weights have no trainer's probabilities to be held against: those that they are made of are, first.
    """
    folder, expected = _packed(config, job, trained), list(trained.probe)
    tolerance = TOLERANCE if config.training.vector_communication == "fp32" else ROUGH_TOLERANCE
    if config.registration.weights == "fp32":
        return folder, expected, tolerance
    check_probabilities(run_id, LoadedModel(folder).score(probe), expected, tolerance)
    folder = _packed(config, job, trained, config.registration.weights)
    return folder, LoadedModel(folder).score(probe).tolist(), TOLERANCE


@task(cache_policy=NO_CACHE, task_run_name="publish")
def publish(
    config: RunConfig, job: TrainingJob, trained: Trained, judged: Judged, model: ModelVersion, run_id: str
) -> dict[str, Any]:
    """The verdict carried out, and the result of the run: kept beside the model, shown on Prefect's page.

    Safe to repeat: it replaces itself.
    """
    tracker = tracker_of(config)
    summary, report = trained.summary, judged.report
    done = find_holder(tracker, model.name) == model.version  # by an attempt that was cut short later
    gate, alias = (judged.gate, CHAMPION) if done else moved(config, model.version, judged.gate)
    tags = {"gate": gate.decision, "gate_reason": gate.reason}
    tracker.tag(run_id, tags)
    for key, value in tags.items():
        tracker.client.set_model_version_tag(model.name, str(model.version), key, value)
    result = {
        "status": "ok",
        "snapshot_id": job.snapshot.snapshot_id,
        "train": {key: value for key, value in summary.items() if key != "event"},
        "eval": report.numbers | {"undefined": dict(report.overall.undefined)},
        "droppable_features": judged.droppable,
        "gate": gate.model_dump(),
        "model": model.model_dump() | {"alias": alias},
        "mlflow_run_id": run_id,
        "identity": job.identity,
        "git_commit": commit(),
    } | dict(job.notes)
    tracker.log_json(run_id, result, RESULT)
    text = page(config, result, report, tracker)
    short = text if len(text) <= MOST_CHARACTERS else text[:MOST_CHARACTERS].rpartition("\n")[0]
    tracker.client.update_model_version(model.name, str(model.version), description=short)
    with cosmetic(PAGE):
        tracker.client.log_text(run_id, page_of(tracker, run_id), PAGE)
    # The last act: a version is found by its identity only once everything about it is in place.
    tracker.client.set_model_version_tag(model.name, str(model.version), IDENTITY, job.identity)
    write_text(Path(job.folder) / REGISTERED, f"{model.name} {model.version}\n")
    place = f"{PAGE} of MLflow run {run_id[:8]}, or python -m flows.report CONFIG run={model.version}"
    get_run_logger().info("%s version %s (%s); report: %s", model.name, model.version, alias or "rejected", place)
    with cosmetic("artifacts on Prefect's page"):
        show_result(config, f"{model.name} version {model.version} ({alias or 'rejected'})", text, tracker, run_id)
    return result


@task(cache_policy=NO_CACHE, task_run_name="score")
def score(
    config: RunConfig, start: datetime.date | None, end: datetime.date | None, version: int | None, again: bool
) -> Scores:
    """Warehouse days -> their scores. Safe to repeat: a day is replaced as a whole, finished ones are left."""
    with Progress(get_run_logger()) as progress:
        return score_days(config, start, end, version, again, progress)


def finished(config: RunConfig, job: TrainingJob) -> dict[str, Any]:
    """The result of a training that was done before."""
    assert job.done is not None
    version, run_id = job.done
    result = tracker_of(config).load_result(run_id) | {"status": "skipped"}
    logger = get_run_logger()
    logger.info(
        "skipped: %s version %s was made from the same snapshot and config; again=true trains anew",
        config.model_name,
        version,
    )
    if result.get("git_commit") != commit():
        logger.warning("the code has changed since: that model is of commit %s", result.get("git_commit"))
    return result


def _packed(config: RunConfig, job: TrainingJob, trained: Trained, form: Weights = "fp32") -> Path:
    folder = Path(job.folder) / ("model" if form == "fp32" else f"{form}/model")  # MLflow keeps the last part as a name
    schema, defaults = columns_at(config, job.snapshot), config.registration.defaults
    return pack(folder, Path(trained.weights), job.plan, config.model, schema, form, defaults)


def _first_rows(worker: Worker, rows: int) -> pa.Table:
    parts: list[pa.Table] = []
    for fragment in worker.fragments():
        parts.append(worker.read_selected(fragment))
        if sum(part.num_rows for part in parts) >= rows:
            break
    return pa.concat_tables(parts).slice(0, rows)

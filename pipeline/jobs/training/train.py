"""Trains a pinned job: starts the preprocessing service and the ranks, and writes what they leave."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

from pydantic import BaseModel, TypeAdapter

from pipeline.config.files import ROOT
from pipeline.data.profile import find_outlier, profiles
from pipeline.errors import NotFiniteError
from pipeline.jobs.code_version import CODE, UNKNOWN, CodeVersion, note_code, noted_code, read_code
from pipeline.jobs.console import format_rows, step
from pipeline.jobs.reads import save_read
from pipeline.jobs.training.events import EventReport, SummaryValues
from pipeline.jobs.training.job import TrainingJob, begin, tag_inputs
from pipeline.jobs.training.provenance import RECORD, make_record
from pipeline.jobs.training.rank.spec import PROBE, SERVICE_FOLDER, WEIGHTS, RankSpec
from pipeline.jobs.warm_up import kernels_are_compiled, start_fork_servers
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.master import Totals
from pipeline.preprocessing.pool import WORKERS_FILE
from pipeline.preprocessing.quarantine import read_quarantine
from pipeline.preprocessing.service import Service
from pipeline.processes.build import read_build
from pipeline.processes.process import Importing
from pipeline.registration.journal import Journal
from pipeline.registration.tracking import SHARDING_PLAN
from pipeline.training.config import TrainConfig
from pipeline.training.launch.external import follow_ranks
from pipeline.training.launch.processes import Event, Limits, resolve_threads, run_alone, run_ranks
from pipeline.training.launch.ray_train import run_ranks_on_ray
from pipeline.training.state.checkpoint_index import CheckpointIndex
from pipeline.training.tables.plan import PlanRows, ShardingPlan, describe_plan
from storage.artifacts import atomic_file, read_note, write_json, write_text

TRAINED, PREPROCESSING = "trained.json", "preprocessing.json"
"""Files in a run's folder: the result of the ranks, and the cost of preprocessing."""

COMPILING = "; their first step on this machine compiles kernels, which takes about half a minute once"
FINISH = "pipeline.jobs.training.finish"
"""What evaluates and registers. It is imported while the ranks train, which takes seconds."""
LOAD_AFTER_SECONDS = 10.0
"""In a shorter training, imports beside it would delay what it reports."""


class TrainingResult(BaseModel, frozen=True):
    """The result of the ranks."""

    weights: str
    probe: tuple[float, ...]
    summary: SummaryValues
    placement: PlanRows


@step("train")
def train(workspace: Workspace, job: TrainingJob, run_id: str, given: ShardingPlan | None = None) -> TrainingResult:
    """Warehouse rows -> weights. Safe to repeat: it resumes from the last checkpoint. See `train_ranks`."""
    return train_ranks(workspace, job, run_id, given)


def train_ranks(
    workspace: Workspace,
    job: TrainingJob,
    run_id: str,
    given: ShardingPlan | None = None,
    watch: Callable[[Event | None], object] | None = None,
) -> TrainingResult:
    """Trains the ranks and writes all that later stages need into the job's folder. Does not need MLflow to answer.

    Args:
        given: Sharding plan of the tables; None: it is planned.
        watch: Receives each event of the ranks, and None several times a second. If it raises, the ranks end.
    """
    config, tracker, folder, log = workspace.config, workspace.tracking, Path(job.folder), workspace.console.log
    start_fork_servers(config)  # unless the command has
    tag_inputs(workspace.warehouse, job.identity, job.snapshot, job.data["train"].joined)
    if workspace.warehouse.is_foreign(job.snapshot.table):
        log.info("the owner of %s decides how long snapshot %s stays", config.source.table, job.snapshot.snapshot_id)
    begin(workspace, job)
    spec = make_rank_spec(workspace, job)
    plan = plan_tables(spec) if given is None else given
    rows = describe_plan(plan)
    log.info("sharding plan:\n%s", format_rows(rows))
    tracker.log_json(run_id, rows, SHARDING_PLAN)
    spec = spec.model_copy(update={"placement": plan, "claim": claim_checkpoints(workspace, folder)})
    journal = Journal(tracker, run_id, folder, log.warning)
    with (
        workspace.console.progress() as progress,
        journal,
        open_service(workspace, job) as service,
        Importing(FINISH) as finish,
    ):
        began = time.monotonic()
        report = EventReport(journal, progress, _count_rows(config.training, job), log)

        def on_event(event: Event) -> None:
            report(event)  # checks it
            if event["event"] == "start":
                note_changes(workspace, folder, CodeVersion.model_validate(event["code"]))
            if event["event"] == "metrics" and time.monotonic() - began > LOAD_AFTER_SECONDS:
                finish.start()
            if watch is not None:
                watch(event)

        log.info("starting %s ranks%s", config.training.world_size, "" if kernels_are_compiled() else COMPILING)
        with naming_outliers(workspace, job.data["train"]):
            summary = _launch(workspace, spec, folder, service, on_event, watch)
    if (note := describe_end(config.training, summary)) is not None:
        log.warning("%s", note)
    totals = None if service is None else service.totals
    lost = summary.pop("lost")
    summary = summary | {"preprocessing": summarize_preprocessing(folder, config.preprocessing.executor, totals, lost)}
    if service is not None:
        with workspace.best_effort("record of what was read"):
            save_read(workspace, "train", job.data["train"], service.totals.rows, service.totals.costs)
    fetch_results(workspace, folder)
    probe = read_note(folder / PROBE, tuple[float, ...])
    trained = TrainingResult(weights=str(folder / WEIGHTS), probe=probe, summary=summary, placement=tuple(report.plan))
    write_text(folder / RECORD, make_record(workspace, job, plan, summary).model_dump_json(indent=2))
    write_text(folder / TRAINED, trained.model_dump_json())
    return trained


def describe_end(training: TrainConfig, summary: Mapping[str, Any]) -> str | None:
    """Says that the validation NE was best at the last step, where `patience` was to end the training. None: it did."""
    steps = summary["steps"]
    if training.patience is None or summary.get("valid_ne") is None or summary["best_step"] != steps:
        return None
    limit = "training.epochs" if training.max_steps is None else "training.epochs or training.max_steps"
    ne = f"valid NE was still improving at the last step, {steps}: {summary['valid_ne']:.4f}"
    return f"{ne}. Raise {limit}, and training.patience ends the training once it no longer improves"


def claim_checkpoints(workspace: Workspace, folder: Path) -> str | None:
    """Makes this training the only writer of its checkpoints in `storage.path`. Returns the token that its ranks need.

    A training that wrote them before, and still runs because its machine stood still until its lock had ended, fails
    at its next save. The restarts of its ranks do not take them back.
    """
    store = workspace.stored(folder)
    if store is None:
        return None
    claim = uuid4().hex
    CheckpointIndex(store.child("checkpoints"), claim).claim()
    return claim


def fetch_results(workspace: Workspace, folder: Path) -> None:
    """Copies what the ranks have put into `storage.path` to this machine: weights, last and best checkpoint."""
    store = workspace.stored(folder)
    if store is None:
        return
    if workspace.config.ranks_are_elsewhere:
        for name in (WEIGHTS, PROBE):
            with atomic_file(folder / name) as temporary:
                store.fetch(name, temporary)
    fetch_served(workspace, folder / "checkpoints")


def fetch_served(workspace: Workspace, root: Path) -> None:
    """Copies the last and the best checkpoint of a training from `storage.path`, unless they are there.

    Args:
        root: Folder of its checkpoints on this machine.
    """
    store = workspace.stored(root)
    if store is not None:
        from pipeline.training.state.checkpoints import StoredCheckpoints  # PyTorch takes seconds to import

        StoredCheckpoints(root, store).fetch_served()


def note_changes(workspace: Workspace, folder: Path, code: CodeVersion) -> None:
    """Notes the code that the ranks run, and warns if it has changed.

    Machines of a Ray cluster get the sources alone. If these are the ones here, so are commit and lock file.
    """
    if code.commit == UNKNOWN and code.sources == read_code().sources:
        code = read_code()
    workspace.fetch_note(folder / CODE)
    before, known = noted_code(folder), note_code(folder, code)
    workspace.share_note(folder / CODE)
    if before and before != known:
        names = [f"{one.commit} (sources {one.sources})" for one in (before[-1], known[-1])]
        workspace.console.log.warning("the code has changed: the training began under %s and now uses %s", *names)


def _count_rows(training: TrainConfig, job: TrainingJob) -> int:
    total = job.rows["train"] * training.epochs
    return total if training.max_steps is None else min(total, training.max_steps * training.batch_rows)


def plan_tables(spec: RankSpec) -> ShardingPlan:
    """Plans the sharding of the tables in a separate process, before the ranks start. All ranks use the same plan.

    Raises:
        ContractError: If the tables cannot be sharded as the config says.
    """
    threads = resolve_threads(spec.training.threads_per_rank, spec.training.world_size)
    answer = run_alone("pipeline.jobs.training.rank.main", "plan", spec, Path(spec.folder), threads, ROOT)
    return TypeAdapter(ShardingPlan).validate_python(answer["placement"])


@contextmanager
def naming_outliers(workspace: Workspace, data: DataSpec) -> Iterator[None]:
    """Names the largest outlier of the dense columns, if there is one, in the error of numbers that are not finite."""
    try:
        yield
    except NotFiniteError as error:
        found = None
        clamped = {name for op in data.plan.ops if op.kind == "clamp" for name in data.plan.columns_of_op(op)}
        columns = {name for one in data.plan.dense for name in data.plan.columns_of(one)} - clamped
        with workspace.best_effort("the statistics of the dense columns"):
            found = find_outlier(profiles(workspace.warehouse, data.snapshot.table, data.selection.days), columns)
        if found is None:
            raise
        column, day, value = found
        raise NotFiniteError(
            error.where, error.expected, f"{error.actual}; column '{column}' holds {value:g} on {day}",
            f"Clamp '{column}' (kind: clamp), or mend the rows of {day}; the last good checkpoint is kept.",
        ) from None  # fmt: skip


def _launch(
    workspace: Workspace,
    spec: RankSpec,
    folder: Path,
    service: Service | None,
    on_event: Callable[[Event], None],
    watch: Callable[[Event | None], object] | None,
) -> dict[str, Any]:
    """Starts the ranks and waits for their summary."""
    training = workspace.config.training
    limits = Limits(training.deadline_seconds, training.hang_seconds, training.restart_limit)
    if watch is not None:
        limits = replace(limits, check=partial(watch, None))
    if service is not None:
        limits = replace(limits, progress=service.totals.progress)
        spec = spec.model_copy(update={"service": service.address})
    launch = run_ranks
    if training.launcher == "external":
        launch = partial(follow_ranks, hosts=training.hosts)
    if training.launcher == "ray":
        address = workspace.config.preprocessing.ray_address
        launch = partial(
            run_ranks_on_ray, address=address, resources=training.ray_resources, labels=training.labels,
            fewer=training.rank_numbers[1:],
        )  # fmt: skip
    world, threads = training.world_size, training.threads_per_rank
    return launch("pipeline.jobs.training.rank.main", spec, folder, world, threads, limits, on_event, ROOT)


def make_rank_spec(workspace: Workspace, job: TrainingJob) -> RankSpec:
    """Returns the specification of the ranks, without the sharding plan."""
    config, store = workspace.config, workspace.stored(Path(job.folder))
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
        store=None if store is None else store.address,
        start=job.start,
        build=read_build() if config.ranks_are_elsewhere or config.training.launcher == "external" else None,
    )


@contextmanager
def open_service(workspace: Workspace, job: TrainingJob) -> Iterator[Service | None]:
    """Starts the preprocessing service of a training. Yields None if each rank reads for itself."""
    preprocessing, log = workspace.config.preprocessing, workspace.console.log
    if preprocessing.executor == "inline":
        yield None
        return
    if workspace.config.ranks_are_elsewhere:
        preprocessing = preprocessing.model_copy(update={"transport": "network"})
    data: dict[str, DataSpec] = {part: spec for part, spec in job.data.items() if part != "test"}
    folder = Path(job.folder) / SERVICE_FOLDER
    training, on_cluster = workspace.config.training, preprocessing.ray_address is not None
    shared = on_cluster and training.launcher == preprocessing.executor == "ray"
    reserved = training.world_size * (training.threads_per_rank or 1) if shared else 0
    with Service(data, preprocessing, folder, log.warning, reserved) as service:
        log.info("preprocessing workers: process ids in %s", folder / WORKERS_FILE)
        yield service


def summarize_preprocessing(
    folder: Path, executor: str, totals: Totals | None, lost: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Returns the cost of preprocessing for the result. Writes the details into the run's folder.

    Args:
        totals: Of the service. None: each rank read for itself.
        lost: Row groups that the training has lost, over all attempts.
    """
    quarantined = _list_quarantined(folder / SERVICE_FOLDER, lost)
    summary: dict[str, Any] = {"executor": executor, "quarantined_rows": sum(entry["rows"] for entry in quarantined)}
    details: dict[str, Any] = {"quarantined": quarantined}
    if totals is not None:
        summary |= {"workers": totals.most_workers, "restarts": totals.restarts}
        summary |= {"cache": dict(totals.costs.cache)} if totals.costs.cache else {}
        costs = {"costs": vars(totals.costs), "peak_rss_mb": totals.peak_rss_mb}
        details |= costs | {"late_results": totals.late_results}
    write_json(folder / PREPROCESSING, summary | details)
    return summary


def _list_quarantined(folder: Path, lost: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Returns the row groups that the training or any validation has lost, with their reasons.

    The folder's list also has row groups that an attempt lost after its last checkpoint. A later attempt may read them.
    """
    listed = read_quarantine(folder)
    keys = ("epoch", "path", "row_group")
    reasons = {tuple(entry[key] for key in keys): entry for entry in listed if entry["data"] == "train"}
    found = [reasons.get(tuple(one[key] for key in keys), {**one, "data": "train"}) for one in lost]
    return found + [entry for entry in listed if entry["data"] != "train"]

"""Compares the sharding plans that a run's tables can have."""

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from pydantic import BaseModel
from safetensors.numpy import load_file

from pipeline.config.files import ROOT
from pipeline.errors import ContractError
from pipeline.jobs.code_version import read_commit
from pipeline.jobs.console import Progress, format_rows, step
from pipeline.jobs.training.events import Measured
from pipeline.jobs.training.job import prepare_rows
from pipeline.jobs.training.rank.model import add_sharding_plan, measure_uses
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.training.config import COLUMN_SHARDING, TrainConfig
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.training.tables.plan import ShardingPlan, describe_plan, sum_per_rank

TOLERANCE = 1e-4
"""Largest difference of a loss that the order of float32 sums explains. A wrong plan differs by 1e-2 and more."""
WEIGHT_TOLERANCE = 5e-3
"""The same of a weight. A gradient that is 0 but for rounding may move it by a part of the rate in each update."""
KINDS = (
    "table_wise",
    "auto",
    "row_wise",
    "data_parallel",
    "table_row_wise",
    "column_wise",
    "table_column_wise",
    "grid_shard",
)
PARTITIONERS = ("largest_differencing", "memory_balanced")


class Timed(BaseModel, frozen=True):
    """What the comparison reads of the result of the ranks."""

    table_bytes: tuple[int, ...]
    step_milliseconds: tuple[float, ...]


class PlanCandidate(BaseModel, frozen=True):
    """A sharding plan to compare, or the reason why there is none."""

    kind: str
    partitioner: str
    table_optimizer: str
    world_size: int
    placement: ShardingPlan | None = None
    refused: str | None = None
    same_as: str | None = None
    """Name of an earlier candidate with the same plan."""

    @property
    def name(self) -> str:
        """Unique name."""
        partitioner = "" if self.partitioner == "greedy" else f" by {self.partitioner}"
        return f"{self.kind}{partitioner} on {self.world_size}, {self.table_optimizer}"


@step("compare sharding plans")
def compare_plans(
    workspace: Workspace, world_sizes: Sequence[int], steps: int, snapshot_id: int | None
) -> dict[str, Any]:
    """Runs the same training with every sharding plan. Safe to repeat: it only reads, and empties its folder."""
    config = workspace.config
    snapshot, data, rows = prepare_rows(workspace, snapshot_id)
    logger, tracker = workspace.console.log, workspace.tracking
    batch = config.training.batch_rows
    training = config.training.model_copy(
        update={
            "max_steps": steps, "epochs": math.ceil(steps * batch / rows) + 1, "log_every_steps": 1, "patience": None,
            "checkpoint_every_steps": None, "average_from_step": None, "average_from": None,
            "launcher": "processes", "hosts": 1, "least_ranks": None,
        }
    )  # fmt: skip
    window = min(config.preprocessing.shuffle_window_rows, steps * batch)
    with exclusive_dir(workspace.home / "placement" / config.name) as folder, workspace.console.progress() as progress:
        tracker.reap()
        spec = RankSpec(
            train=data, valid=None, probe=data, model=config.model, training=training, seed=config.seed,
            preprocessing=config.preprocessing.model_copy(update={"shuffle_window_rows": window}), folder=str(folder),
        )  # fmt: skip
        candidates = list(list_candidates(spec, world_sizes))
        tags = {"snapshot_id": str(snapshot.snapshot_id), "git_commit": read_commit()}
        tags["mlflow.source.name"] = "flows.sharding"
        run_id = tracker.start(f"placements of {config.name}", config.flat() | {"steps": steps}, tags, None)
        with tracker.ending(run_id):
            plans = measure_candidates(spec, candidates, progress, steps)
            result = {
                "status": "ok", "snapshot_id": snapshot.snapshot_id, "mlflow_run_id": run_id, "steps": steps,
                "tolerance": TOLERANCE, "weight_tolerance": WEIGHT_TOLERANCE,
                "recommended": recommend(plans, config.training.table_optimizer), "plans": plans,
                "refused": [
                    {"kind": c.kind, "partitioner": c.partitioner, "world_size": c.world_size, "reason": c.refused}
                    for c in candidates if c.refused
                ],
            }  # fmt: skip
            table = [{key: value for key, value in plan.items() if key != "losses"} for plan in plans]
            logger.info("sharding plans:\n%s", format_rows(table))
            for plan in plans:
                if not trains_alike(plan):
                    text = "%s on %s ranks trains another model: its losses differ by %.1e and its weights by %.1e"
                    found = plan["loss_difference"], plan["weight_difference"]
                    logger.warning(text, plan["kind"], plan["world_size"], *found)
            tracker.log_json(run_id, result, "placements.json")
            tracker.log_figures(run_id, {"placements": plot_plans(plans)})
    return result


def list_candidates(spec: RankSpec, world_sizes: Sequence[int]) -> Iterator[PlanCandidate]:
    """Yields the candidates, also refused ones with the reason. The first ones are the reference of the others."""
    uses = measure_uses(spec)
    own = spec.training.table_optimizer
    by_numbers = "adagrad" if own == "rowwise_adagrad" else own
    wanted = [(1, "table_wise", "greedy", optimizer) for optimizer in dict.fromkeys((own, by_numbers))]
    for world_size in world_sizes:
        wanted += [(world_size, kind, "greedy", by_numbers if kind in COLUMN_SHARDING else own) for kind in KINDS]
        wanted += [(world_size, kind, way, own) for kind in ("table_wise", "auto") for way in PARTITIONERS]
    seen: dict[tuple[Any, ...], PlanCandidate] = {}
    for world_size, kind, partitioner, optimizer in dict.fromkeys(wanted):
        fields = {"kind": kind, "partitioner": partitioner, "table_optimizer": optimizer, "world_size": world_size}
        try:
            settings = {key: value for key, value in fields.items() if key != "kind"} | {"sharding": kind}
            training = TrainConfig.model_validate(spec.training.model_dump() | settings)
            placement = add_sharding_plan(spec.model_copy(update={"training": training}), uses).placement
        except ContractError as error:
            yield PlanCandidate(**fields, refused=str(error))
            continue
        key = (placement, world_size, optimizer)
        twin = seen.get(key)
        if twin is not None and partitioner != "greedy":
            continue  # the partitioner changes nothing
        candidate = PlanCandidate(**fields, placement=placement, same_as=twin.name if twin else None)
        seen.setdefault(key, candidate)
        yield candidate


def measure_candidates(
    spec: RankSpec, candidates: Sequence[PlanCandidate], progress: Progress, steps: int
) -> list[dict[str, Any]]:
    """Trains with each sharding plan. A candidate with the plan of an earlier one takes its results."""
    plans: dict[str, dict[str, Any]] = {}
    weights: dict[str, dict[str, Any]] = {}
    losses: dict[str, list[float]] = {}
    todo = [candidate for candidate in candidates if candidate.placement is not None]
    total = steps * spec.training.batch_rows * sum(candidate.same_as is None for candidate in todo)
    done = 0
    for candidate in todo:
        head = candidate.model_dump(exclude={"placement", "refused"})
        if candidate.same_as is not None:
            plans[candidate.name] = plans[candidate.same_as] | head
            continue

        def show(event: Event, before: int = done, name: str = candidate.name) -> None:
            if event["event"] == "metrics":
                progress("train", before + event["rows"], total, name)

        result, found = train_plan(spec, candidate, show)
        done += steps * spec.training.batch_rows
        own = result["losses"]
        reference = losses.setdefault(candidate.table_optimizer, own)
        base = weights.setdefault(candidate.table_optimizer, found)
        plans[candidate.name] = head | {
            "loss_difference": max(abs(a - b) for a, b in zip(own, reference, strict=True)),
            "weight_difference": max(float(np.abs(found[name] - base[name]).max(initial=0.0)) for name in base),
        } | result  # fmt: skip
    return list(plans.values())


def train_plan(spec: RankSpec, candidate: PlanCandidate, show: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Trains once from the common initial state. Returns the results and the full weights."""
    folder = Path(spec.folder) / "run"
    shutil.rmtree(folder, ignore_errors=True)
    settings = {"world_size": candidate.world_size, "table_optimizer": candidate.table_optimizer}
    training = spec.training.model_copy(update=settings | {"sharding": candidate.kind})
    losses: dict[int, float] = {}

    def handle(event: Event) -> None:
        losses.update(read_loss(event))
        show(event)

    result = run_ranks(
        "pipeline.jobs.training.rank.main",
        spec.model_copy(update={"training": training, "placement": candidate.placement, "folder": str(folder)}),
        folder, candidate.world_size, training.threads_per_rank, Limits(training.deadline_seconds), handle, ROOT,
    )  # fmt: skip
    weights = load_file(folder / "weights.safetensors")
    shutil.rmtree(folder)
    rows = describe_plan(candidate.placement or ())
    return {
        "predicted_bytes": sum_per_rank(rows, "bytes", candidate.world_size),
        "measured_bytes": result["table_bytes"],
        "predicted_ms": sum_per_rank(rows, "milliseconds", candidate.world_size),
        "measured_ms": result["step_milliseconds"],
        "losses": [losses[step] for step in sorted(losses)],
    }, weights


def read_loss(event: Event) -> dict[int, float]:
    """Returns step -> loss, if the event has one. Checks the result of the ranks."""
    if event["event"] == "result":
        Timed.model_validate(event)
    if event["event"] != "metrics":
        return {}
    measured = Measured.model_validate(event)
    loss = measured.metrics.get("train_loss_window")
    return {} if loss is None else {measured.step: loss}


def trains_alike(plan: Mapping[str, Any]) -> bool:
    """Whether a plan trains like a single process, as far as rounding tells."""
    return bool(plan["loss_difference"] <= TOLERANCE and plan["weight_difference"] <= WEIGHT_TOLERANCE)


def recommend(plans: Sequence[Mapping[str, Any]], table_optimizer: str) -> dict[str, Any] | None:
    """Returns the fastest plan that trains like a single process with the config's optimizer, or None.

    Losses alone do not tell: rows that are seldom read hardly change them.

    Example:
        >>> plan = {"kind": "row_wise", "world_size": 2, "partitioner": "greedy", "table_optimizer": "sgd"}
        >>> recommend([plan | {"loss_difference": 0.5, "weight_difference": 0.0, "measured_ms": [1.0]},
        ...            plan | {"loss_difference": 0.0, "weight_difference": 0.5, "measured_ms": [1.0]},
        ...            plan | {"kind": "auto", "loss_difference": 0.0, "weight_difference": 0.0,
        ...                    "measured_ms": [2.0, 3.0]}], "sgd")
        {'kind': 'auto', 'partitioner': 'greedy', 'world_size': 2, 'measured_ms': 3.0}
    """
    fit = [plan for plan in plans if trains_alike(plan) and plan["table_optimizer"] == table_optimizer]
    if not fit:
        return None
    best = min(fit, key=lambda plan: max(plan["measured_ms"]))
    return {key: best[key] for key in ("kind", "partitioner", "world_size")} | {"measured_ms": max(best["measured_ms"])}


def plot_plans(plans: Sequence[Mapping[str, Any]]) -> Figure:
    """Plots the loss curves of several sharding plans, and the time per step of each."""
    figure = Figure(figsize=(8.0, 2.8 + 0.22 * len(plans)), layout="constrained", dpi=110)
    above, below = figure.subplots(2, gridspec_kw={"height_ratios": [2.4, 0.22 * len(plans)]})
    names = [f"{p['kind']}, {p['partitioner']}, {p['table_optimizer']}, {p['world_size']} ranks" for p in plans]
    for plan in plans:
        above.plot(range(1, len(plan["losses"]) + 1), plan["losses"], linewidth=1.0, alpha=0.6)
    above.set_title(f"Loss under {len(plans)} sharding plans", fontsize=11)
    above.set_xlabel("step")
    above.xaxis.set_major_locator(MaxNLocator(integer=True))
    above.set_ylabel("log loss")
    below.barh(names, [max(plan["measured_ms"]) for plan in plans], color="tab:blue")
    below.invert_yaxis()
    below.tick_params(axis="y", labelsize=7)
    below.set_xlabel("ms a step, slowest rank")
    for axes in (above, below):
        axes.grid(alpha=0.25)
    return figure

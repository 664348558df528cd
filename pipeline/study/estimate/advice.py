"""The advice on a config: memory and speed of each number of ranks, its reliability, and its report."""

import math
import shutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from pydantic import BaseModel

from pipeline.errors import ContractError
from pipeline.jobs.code_version import read_commit
from pipeline.jobs.console import format_rows, step
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.study.estimate.calibration import Calibration, Speed, list_world_sizes
from pipeline.study.estimate.footprint import (
    ModelFootprint,
    PlacedModel,
    estimate_service_bytes,
    estimate_single_rank,
    place_on_ranks,
)
from pipeline.study.estimate.memory import DescribedMachine, RankMachine, count_machines, estimate_checkpoint_bytes
from pipeline.study.measure.group import measure_points
from pipeline.study.measure.machine import Ceilings
from pipeline.study.measure.results import Load
from pipeline.study.points.config import CharacterizeConfig
from pipeline.study.points.points import StudyPoint

MOST_RANKS = 64
"""Most ranks in the advice."""
FURTHEST = 5
"""Points with the largest errors that are logged. MLflow has all."""
Predict = Callable[[Load, int], float]
"""(load, ranks) -> milliseconds of a step."""


class Option(BaseModel, frozen=True):
    """A number of ranks on a machine."""

    ranks: int
    fits: bool
    rank_bytes: int | None = None
    """Of the largest rank."""
    memory: Mapping[str, int] = {}
    """Of the largest rank, by purpose."""
    table_bytes: tuple[int, ...] = ()
    """Of each rank: tables and their optimizer."""
    step_ms: float | None = None
    rows_per_second: float | None = None
    """If batches arrive in time."""
    workers: int | None = None
    """Preprocessing workers that keep up with this speed."""
    fed_rows_per_second: float | None = None
    """If the workers use the same cores."""
    epoch_seconds: float | None = None
    """At the speed of `fed_rows_per_second`."""
    reason: str | None = None
    """Why this number of ranks is not possible."""


@step("advise")
def advise(
    workspace: Workspace,
    footprint: ModelFootprint,
    calibration: Calibration,
    described: DescribedMachine | None,
    study: CharacterizeConfig | None,
) -> dict[str, Any]:
    """Predictions for this machine and another -> the log, MLflow and the run's page. Safe to repeat.

    Args:
        study: How to measure the config itself, to compare it with the prediction. None: it is not measured.
    """
    speed, shape = Speed(calibration), footprint.shape
    here, process = calibration.machine, calibration.process_bytes
    room = RankMachine(memory_bytes=here.memory_bytes, most_ranks=here.cores)
    if here.device_memory_bytes is not None:
        room = RankMachine(memory_bytes=here.device_memory_bytes, most_ranks=torch.cuda.device_count(), shared=False)
    own = advise_machine(workspace, footprint, (here, room, process), speed.predict_step_ms)
    other = None
    if described is not None:
        facts = (described, described.room, process)
        other = advise_machine(workspace, footprint, facts, speed.scale_to(described)) | {"measured": False}
    result: dict[str, Any] = {
        "status": "ok",
        "snapshot_id": footprint.snapshot_id,
        "train_rows": footprint.rows,
        "tables": len(shape.tables),
        "table_rows": sum(rows for rows, _ in shape.tables.values()),
        "dense_parameters": shape.dense_parameters,
        "checkpoint_bytes": estimate_checkpoint_bytes(shape, workspace.config.training),
        "worker_rows_per_second": footprint.worker_rows_per_second,
        "machine": own,
        "described": other,
        "prediction": {
            "points": len(speed.samples),
            "fitted": speed.fit.fitted,
            "commit": calibration.commit,
            "errors": None if speed.fit.errors is None else speed.fit.errors.model_dump(),
        },
        "warnings": list_warnings(workspace, footprint, speed, own),
        "measurement": measure_config(workspace, study, own, footprint.snapshot_id) if study else None,
    }
    return log_advice(workspace, result, speed)


def advise_machine(
    workspace: Workspace, footprint: ModelFootprint, facts: tuple[Ceilings, RankMachine, int], predict: Predict
) -> dict[str, Any]:
    """Returns the advice for a machine.

    Args:
        facts: The machine, its limits, and the bytes of a rank without a model.
    """
    machine, room, process = facts
    options: list[Option] = []
    most = min(room.most_ranks, MOST_RANKS)
    for world_size in sorted({*list_world_sizes(most), min(workspace.config.training.world_size, most)}):
        try:
            placed = place_on_ranks(workspace, footprint, world_size, room, process)
        except ContractError as error:
            options.append(Option(ranks=world_size, fits=False, reason=str(error)))
            continue
        step_ms = predict(placed.load, world_size)
        options.append(estimate_option(workspace, footprint, placed, step_ms, machine.cores, not room.shared))
    fitting = [option for option in options if option.fits]
    fastest = max(fitting, key=lambda option: option.rows_per_second or 0.0, default=None)
    memory, load = estimate_single_rank(workspace, footprint, process)
    service = estimate_service_bytes(workspace, load)
    return {
        "name": machine.cpu,
        "cores": machine.cores,
        "devices": None if room.shared else room.most_ranks,
        "memory_bytes": room.memory_bytes,
        "fewest_ranks": min((option.ranks for option in fitting), default=None),
        "fastest_ranks": fastest and fastest.ranks,
        "machines_needed": count_machines(memory, room, service),
        "service_bytes": service,
        "options": [option.model_dump(mode="json") for option in options],
    }


def estimate_option(
    workspace: Workspace, footprint: ModelFootprint, placed: PlacedModel, step_ms: float, cores: int, devices: bool
) -> Option:
    """Returns the advice for a number of ranks.

    Args:
        devices: Whether ranks run on devices, and leave the cores to the preprocessing workers.
    """
    batch, worker = workspace.config.training.batch_rows, footprint.worker_rows_per_second
    speed = fed = 1e3 * batch / step_ms
    if worker is not None:
        fed = min(speed, cores * worker) if devices else 1 / (1 / speed + 1 / (cores * worker))
    largest = max(placed.memory, key=lambda one: one.total)
    return Option(
        ranks=len(placed.memory), fits=placed.fits, rank_bytes=largest.total, memory=largest.model_dump(),
        table_bytes=tuple(one.tables for one in placed.memory), step_ms=step_ms, rows_per_second=speed,
        workers=None if worker is None else math.ceil(speed / worker), fed_rows_per_second=fed,
        epoch_seconds=None if footprint.rows is None else math.ceil(footprint.rows / batch) * batch / fed,
        reason=None if placed.fits else "not enough memory",
    )  # fmt: skip


def measure_config(
    workspace: Workspace, study: CharacterizeConfig, own: Mapping[str, Any], snapshot_id: int | None
) -> dict[str, Any]:
    """Measures some steps of the config itself and compares them with the prediction.

    Raises:
        ContractError: If they cannot be measured.
    """
    config = workspace.config
    with exclusive_dir(workspace.home / "characterize" / f"size-{config.name}") as folder:
        shutil.rmtree(folder / "points", ignore_errors=True)
        alone = [StudyPoint(values={"config": config.name}, settings={})]
        found = measure_points(workspace, study, alone, folder, snapshot_id=snapshot_id)[0]
    if found.measurement is None:
        return {"state": found.state, "reason": found.reason}
    step = found.measurement.step_ms
    option: Mapping[str, Any] = next((one for one in own["options"] if one["ranks"] == config.training.world_size), {})
    predicted = option.get("step_ms")
    return {
        "state": found.state,
        "ranks": config.training.world_size,
        "step_ms": step.model_dump(),
        "rows_per_second": found.measurement.rows_per_second.median,
        "model_bytes": found.measurement.model_bytes,
        "predicted_step_ms": predicted,
        "predicted_over_measured": predicted and predicted / step.median,
    }


def list_warnings(workspace: Workspace, footprint: ModelFootprint, speed: Speed, own: Mapping[str, Any]) -> list[str]:
    """Returns reasons not to trust the advice."""
    _, load = estimate_single_rank(workspace, footprint, 0)
    found = [
        f"{term}: {times:.0f} times as much work as in any measured model; its time is an extrapolation"
        for term, times in speed.find_extrapolations(load, 1)
    ]
    if speed.fit.errors is None:
        found.append("too few points to estimate the error of the prediction; raise points")
    if own["fewest_ranks"] is None:
        needed = own["machines_needed"] or "more than any number"
        found.append(f"the model does not fit on this machine; it needs {needed} of them")
    return found


def log_advice(workspace: Workspace, result: dict[str, Any], speed: Speed) -> dict[str, Any]:
    """Writes the advice to the log, MLflow and the run's page. Returns the result of the flow."""
    config = workspace.config
    logger, tracker = workspace.console.log, workspace.tracking
    for warning in result["warnings"]:
        logger.warning("%s", warning)
    furthest = sorted(speed.table, key=lambda row: -abs(math.log(row["predicted / measured"])))[:FURTHEST]
    logger.info("points with the largest errors, each predicted from the others:\n%s", format_rows(furthest))
    text = describe_advice(result)
    logger.info("%s", text)
    params = config.flat() | {"model.dense_parameters": result["dense_parameters"]}
    tags = {"git_commit": read_commit(), "mlflow.source.name": "flows.estimate"}
    run_id = tracker.start(f"estimate of {config.name}", params, tags, None)
    with tracker.ending(run_id):
        tracker.log(run_id, 0, list_metrics(result))
        tracker.log_json(run_id, result | {"mlflow_run_id": run_id}, "advice.json")
        tracker.log_json(run_id, speed.table, "unseen_points.json")
    workspace.console.show_text("estimate", config.name, f"```\n{text}\n```", "What the training needs")
    return {"status": "ok", "mlflow_run_id": run_id} | result


def list_metrics(result: Mapping[str, Any]) -> dict[str, float | None]:
    """Returns the MLflow metrics: of each number of ranks on this machine, and of the prediction itself."""
    found: dict[str, float | None] = {"checkpoint_bytes": result["checkpoint_bytes"]}
    errors = result["prediction"]["errors"] or {}
    found |= {f"unseen_{key}": value for key, value in errors.items()}
    for option in result["machine"]["options"]:
        for key in ("rank_bytes", "step_ms", "rows_per_second", "workers", "epoch_seconds"):
            found[f"{key}_on_{option['ranks']}"] = option[key]
    return found


def describe_advice(result: Mapping[str, Any]) -> str:
    """Returns the advice in words."""
    errors = result["prediction"]["errors"]
    trust = "learned from other models on this machine" + (
        f"; of {errors['points']}, each predicted from the others, half were within {errors['median']:.0%}, "
        f"nine of ten within {errors['ninth_decile']:.0%}"
        if errors
        else ""
    )
    lines = [
        f"{result['tables']} tables, {result['table_rows']:,} rows; {result['dense_parameters']:,} other weights; "
        f"a checkpoint takes {_format_bytes(result['checkpoint_bytes'])}",
        *_describe_machine(result["machine"], trust),
    ]
    if result["described"] is not None:
        lines += _describe_machine(
            result["described"], "not measured: scaled from this machine by the ratio of ceilings"
        )
    if result["measurement"] is not None and result["measurement"]["state"] == "measured":
        one = result["measurement"]
        lines.append(
            f"measured on {one['ranks']} ranks: {one['step_ms']['median']:.1f} ms a step, "
            f"{one['rows_per_second']:,.0f} rows/s; predicted {one['predicted_step_ms'] or float('nan'):.1f} ms"
        )
    return "\n".join(lines)


def _describe_machine(advice: Mapping[str, Any], trust: str) -> list[str]:
    rows = [
        {
            "ranks": option["ranks"],
            "fits": "yes" if option["fits"] else "no",
            "memory of a rank": _format_bytes(option["rank_bytes"]),
            "tables of it": _format_bytes(max(option["table_bytes"], default=None)),
            "ms a step": option["step_ms"],
            "rows/s": _format_count(option["rows_per_second"]),
            "workers": option["workers"] or "-",
            "rows/s with workers": _format_count(option["fed_rows_per_second"]),
            "s an epoch": option["epoch_seconds"] or "-",
        }
        for option in advice["options"]
    ]
    where = f"{advice['cores']} cores" if advice["devices"] is None else f"{advice['devices']} devices"
    best = f"fits on {advice['fewest_ranks']} rank(s), fastest on {advice['fastest_ranks']}"
    if advice["fewest_ranks"] is None:
        best = f"does not fit; needs {advice['machines_needed'] or 'more than any number'} of them"
    head = f"{advice['name']}, {where}, {_format_bytes(advice['memory_bytes'])} ({trust}): {best}"
    return [head, format_rows(rows)]


def _format_bytes(value: int | None) -> str:
    return "-" if value is None else f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.1f} MiB"


def _format_count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"

"""A backtest: each retraining policy replays the same past days with real ranks, and the results are compared."""

import datetime
import math
import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, NonNegativeInt

from pipeline.config.files import ROOT
from pipeline.errors import ConfigError, EmptyDatasetError
from pipeline.evaluation import plots
from pipeline.evaluation.metrics import format_interval
from pipeline.evaluation.policy import Decision, Policy
from pipeline.evaluation.record import markdown_table
from pipeline.evaluation.series import BacktestResult, DaySums, Interval, pooled_ne, pooled_ne_difference
from pipeline.jobs.code_version import read_commit
from pipeline.jobs.console import step
from pipeline.jobs.recurring.backtest_rank import BacktestSpec
from pipeline.jobs.recurring.day import exclude_test_rows, require_hash_split
from pipeline.jobs.search.trials import AGAIN, Search, SearchJob, open_search, pin_search
from pipeline.jobs.training.identity import describe_joined, digest, semantics
from pipeline.jobs.training.job import TrainingJob, count_parts, open_run, resolve_dataset
from pipeline.jobs.training.train import make_rank_spec
from pipeline.jobs.workspace import Workspace
from pipeline.training.launch.processes import Event, Limits, run_ranks
from pipeline.training.state.progress import LossSums
from storage.artifacts import MADE_AGAIN, read_note, write_text

FIGURE, TABLE, POLICIES = "policies.png", "policies.md", "policies"
"""Files in a backtest's folder, and the folder with the results of policies."""
TRAILING_DAYS = 14
"""Most days of the figure's moving mean. Single days vary more than models do."""


class _Cost(BaseModel, frozen=True):
    """What a day's training took."""

    rows: NonNegativeInt
    seconds: float


class _Day(BaseModel, frozen=True):
    """The ranks have finished a day."""

    day: datetime.date
    sums: LossSums | None
    """None: of the first model."""
    decision: Decision
    cost: _Cost


def read_day(event: Event) -> _Day | None:
    """Returns the day that an event reports. None: it reports something else."""
    return _Day.model_validate(event) if event["event"] == "day" else None


@step("pin")
def pin_backtest(
    workspace: Workspace, start: datetime.date | None, end: datetime.date | None
) -> tuple[SearchJob, BacktestSpec]:
    """Pins the days of the newest snapshot from `start` to `end`, and the earlier days of the first model.

    Returns:
        The backtest, and the specification of its ranks. Each policy fills in itself and a folder of its own.
    Raises:
        ConfigError: If the split is not `hash`, or its own days overlap with those of the backtest.
        EmptyDatasetError: If there is no day to replay.
    """
    config = workspace.config
    require_hash_split(config.split)
    if config.training.sync != "synchronous":
        raise ConfigError("training.sync", "synchronous in a backtest", config.training.sync, "Change it.")
    snapshot, data = resolve_dataset(workspace, None)
    rows = workspace.warehouse.day_rows(snapshot)
    first_days = data["train"].selection.days
    days = [day for day in rows if day > first_days[-1] and (end is None or day <= end)]
    if start is not None:
        if start <= first_days[-1]:
            raise ConfigError(
                "argument 'start'", f"a day after split.hash.days, which end on {first_days[-1]}", f"{start}",
                "Name a later day, or let the days of the first model end earlier.",
            )  # fmt: skip
        days = [day for day in days if day >= start]
    if not days:
        raise EmptyDatasetError("days to replay", f"some after {first_days[-1]}", "none", "Ingest more days.")
    whole = data["test"].selection.model_copy(update={"hash_keys": ()})
    new = exclude_test_rows(data)
    settings = {
        "snapshot": snapshot.snapshot_id, "config": semantics(workspace, evaluation=True),
        **describe_joined(workspace.warehouse, workspace.feature_joins(), snapshot, [*first_days, *days]),
        "days": [str(day) for day in days],
        "incremental": config.incremental.model_dump(mode="json"), "new": new.selection.hash_range,
        "judge": config.recurring.judge,
    }  # fmt: skip
    job = pin_search(workspace, "backtest", snapshot, {}, settings, force=False)
    counted = count_parts(data, workspace.warehouse, ["valid"])
    ranks = make_rank_spec(
        workspace, TrainingJob(identity=job.identity, snapshot=snapshot, folder=job.folder, data=counted, done=None)
    )
    whole_rows = ranks.preprocessing.model_copy(update={"on_corrupt": "fail"})  # nobody would hear of lost rows
    spec = BacktestSpec(
        scratch=ranks.model_copy(update={"preprocessing": whole_rows, "training": config.training.on_one_host}),
        incremental=config.incremental.on_one_host,
        new=new,
        evaluated=data["test"].model_copy(update={"selection": whole}),
        rows={day: rows[day] for day in rows if day <= days[-1]},
        first_days=first_days,
        days=tuple(days),
        judged_later=config.recurring.judge == "next_day",
    )
    return job, spec


@step("backtest {name}")
def run_policy(backtest: Search, spec: BacktestSpec, name: str) -> BacktestResult:
    """Replays all days under one policy, in a child of the backtest's MLflow run.

    Safe to repeat: a finished policy is read from its file.
    """
    workspace, logger = backtest.workspace, backtest.console.log
    training, policy = workspace.config.training, workspace.config.recurring.policies[name]
    values = policy.model_dump(mode="json")
    folder = backtest.folder / POLICIES / digest(values)[:8]
    path = folder.with_suffix(".json")
    if path.exists():
        logger.info("skipped: policy %s has a result in %s", name, path)
        return read_note(path, BacktestResult, MADE_AGAIN).model_copy(update={"name": name})
    folder.mkdir(parents=True, exist_ok=True)
    found: list[_Day] = []
    tags = backtest.child_tags | {"git_commit": read_commit()}
    with (
        open_run(folder, workspace, name, values, tags, AGAIN) as (run_id, _),
        backtest.console.progress("days") as progress,
    ):

        def on_event(event: Event) -> None:
            if (day := read_day(event)) is not None:
                found.append(day)
                progress(name, len(found) - 1, len(spec.days), f"{day.day} {day.decision.training}")

        scratch = spec.scratch.model_copy(update={"folder": str(folder)})
        run_ranks(
            "pipeline.jobs.recurring.backtest_rank",
            spec.model_copy(update={"scratch": scratch, "policy": policy}),
            folder,
            training.world_size,
            training.threads_per_rank,
            Limits(training.deadline_seconds, training.hang_seconds, 0),
            on_event,
            ROOT,
        )
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # only the result is kept
        result = _collect_result(name, found)
        _log_result(workspace, run_id, result)
    write_text(path, result.model_dump_json(indent=1))
    return result


def _collect_result(name: str, found: Sequence[_Day]) -> BacktestResult:
    """Sums up the days of a backtest. That of the first model has no sums and does not count."""
    days = [day for day in found if day.sums is not None]
    kinds = [day.decision.training for day in days]
    return BacktestResult(
        name=name,
        days=tuple(DaySums(day=day.day, **day.sums.model_dump()) for day in days if day.sums is not None),
        rows_trained={day.day: day.cost.rows for day in days},
        seconds=sum(day.cost.seconds for day in days),
        trainings={kind: kinds.count(kind) for kind in ("incremental", "scratch")},
    )


def summarize(results: Sequence[BacktestResult], level: float) -> dict[str, Any]:
    """Returns quality and cost of each policy, and its difference from the first one, as JSON values."""
    found: dict[str, Any] = {}
    for result in results:
        labels = sum(day.labels for day in result.days)
        ne, difference = pooled_ne(result.days, level), pooled_ne_difference(result.days, results[0].days, level)
        found[result.name] = {
            "ne": _dump_interval(ne),
            "ne_difference": None if result is results[0] else _dump_interval(difference),
            "calibration": sum(day.predictions for day in result.days) / labels if labels else None,
            "rows_trained": int(sum(result.rows_trained.values())),
            "training_seconds": round(result.seconds, 1),
            "trainings": dict(result.trainings),
        }
    return found


def _dump_interval(interval: Interval | None) -> dict[str, float | None] | None:
    """Returns an interval as JSON values. Bounds that are not finite become None: JSON has no infinity."""
    if interval is None:
        return None
    return {name: value if math.isfinite(value) else None for name, value in interval.model_dump().items()}


def render_table(summary: Mapping[str, Any]) -> str:
    """Returns the summary as a markdown table."""
    first = next(iter(summary))
    header = ["policy", "next-day NE", "interval over days", f"difference from {first}", "calibration", "trainings"]
    rows = []
    for name, values in summary.items():
        ne, difference = values["ne"], values["ne_difference"]
        trained = ", ".join(f"{count} {kind}" for kind, count in values["trainings"].items() if count) or "none"
        quality = ("–", "–") if ne is None else (f"{ne['value']:.4f}", format_interval(ne["low"], ne["high"]))
        than = "" if difference is None else f"{difference['value']:+.4f}"
        if difference is not None and difference["low"] is not None:
            than += f" ({difference['low']:+.4f} to {difference['high']:+.4f})"
        calibration = "–" if values["calibration"] is None else f"{values['calibration']:.3f}"
        rows.append([name, *quality, than, calibration, trained, f"{values['rows_trained']:,}"])
    return markdown_table([*header, "rows trained"], rows)


@step("show")
def show_results(backtest: Search, spec: BacktestSpec, results: Sequence[BacktestResult]) -> dict[str, Any]:
    """Table and figure of the policies -> the backtest's folder and its MLflow run."""
    workspace, folder = backtest.workspace, backtest.folder
    summary = summarize(results, workspace.config.gate.level)
    text = render_table(summary)
    write_text(folder / TABLE, text + "\n")
    figure = plots.backtest(results, min(TRAILING_DAYS, max(len(spec.days) // 4, 1)))
    figure.savefig(folder / FIGURE)
    workspace.tracking.client.log_text(backtest.run_id, text, TABLE)
    workspace.tracking.log_figures(backtest.run_id, {"policies": figure})
    outcome = {
        "start": f"{spec.days[0]}",
        "end": f"{spec.days[-1]}",
        "days": len(spec.days),
        "rows": int(sum(day.rows for day in results[0].days)),
        "policies": summary,
        "figure": str(folder / FIGURE),
        "table": str(folder / TABLE),
        "git_commit": read_commit(),
    }
    return backtest.conclude(text, {}, outcome)


def _log_result(workspace: Workspace, run_id: str, result: BacktestResult) -> None:
    """Logs NE and calibration of each day, and the totals of the policy."""
    points = [
        (number, {"next_day_ne": day.ne, "next_day_calibration": day.calibration})
        for number, day in enumerate(result.days, 1)
    ]
    workspace.tracking.log_points(run_id, points)
    [values] = summarize([result], workspace.config.gate.level).values()
    whole = {name: values[name] for name in ("calibration", "rows_trained", "training_seconds")}
    workspace.tracking.log(run_id, len(result.days), {"pooled_ne": (values["ne"] or {}).get("value")} | whole)


def choose_policies(known: Mapping[str, Policy], names: Sequence[str] | None) -> list[str]:
    """Returns the names of the policies to compare.

    Args:
        names: None: all of them.
    Raises:
        ConfigError: If one is unknown, or there is none.
    """
    chosen = list(known) if names is None else list(names)
    unknown = [name for name in chosen if name not in known]
    if unknown or not chosen:
        expected = f"names in recurring.policies: {', '.join(known) or 'it has none'}"
        raise ConfigError("argument 'policies'", expected, ", ".join(unknown) or "none", "Add them there.")
    return chosen


def run_backtest(
    workspace: Workspace, start: datetime.date | None, end: datetime.date | None, names: Sequence[str]
) -> dict[str, Any]:
    """Replays the days under each policy and compares them.

    Args:
        names: Keys of `recurring.policies`.
    """
    job, spec = pin_backtest(workspace, start, end)
    with open_search(workspace, job, "backtest", f"policies {spec.days[0]} to {spec.days[-1]}") as backtest:
        return show_results(backtest, spec, [run_policy(backtest, spec, name) for name in names])

"""The record of a run, read from MLflow, and its report as a file."""

import datetime
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from mlflow.entities import Run
from pydantic import TypeAdapter, ValidationError

from pipeline.config.run import default_settings
from pipeline.errors import ConfigError, RegistryError
from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.html import render_report
from pipeline.evaluation.record import PLOTS, Curve, FeatureImportance, RunRecord
from pipeline.jobs.outcome import run_address
from pipeline.jobs.training.job import PLAN, describe_span
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHAMPION, find_holder
from pipeline.registration.tracking import FEATURES, RESULT, SHARDING_PLAN, Tracker
from pipeline.training.tables.plan import MOST_RANKS, PlanRows
from pipeline.transforms.plan.plan import Plan

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from pipeline.jobs.training.job import TrainingJob
from storage.artifacts import inside, write_text

CURVES = ("train_ne_window", "train_ne_progressive", "valid_ne")
STALL_CURVES = ("stall_fraction_window", "batch_extract_seconds", "batch_transform_seconds", "batch_wait_seconds")
REPORT, DATA = "report.json", "data.json"
"""Artifacts of a run."""
PAGE = "report.html"


def load_record(tracker: Tracker, run_id: str) -> RunRecord:
    """Loads the record of a finished run.

    Raises:
        RegistryError: If the run has none of it, or was made when reports held other things.
    """
    try:
        return _read(tracker, run_id)
    except ValidationError as error:
        missing = ", ".join(".".join(map(str, problem["loc"])) for problem in error.errors()[:3])
        raise RegistryError(
            f"MLflow run '{run_id}'", "a report of this version of the code", f"one without {missing}", "Train again."
        ) from None
    except (KeyError, TypeError, AttributeError, ValueError):
        raise RegistryError(
            f"MLflow run '{run_id}'", "what a training has logged", "other content", "Train again with force=true."
        ) from None


def _read(tracker: Tracker, run_id: str) -> RunRecord:
    result = tracker.read_json(run_id, RESULT)
    run = tracker.client.get_run(run_id)
    model = result["model"]
    report = EvalReport.model_validate(tracker.read_json(run_id, REPORT))
    curves = tracker.load_curves(run_id, [*CURVES, *STALL_CURVES])
    features = tuple(FeatureImportance.model_validate(one) for one in tracker.read_json(run_id, FEATURES))
    plots, usual = tracker.load_figures(run_id, PLOTS), default_settings()
    if not plots:
        from pipeline.figure import to_svg

        figures = draw_figures(tracker, run_id, result["train"], report, features, curves)
        plots = {name: to_svg(figure) for name, figure in figures.items()}
    columns = {}
    with suppress(RegistryError):  # of a plan with ops that this version does not know
        columns = describe_features(tracker.read_record(run_id, PLAN, Plan))
    return RunRecord(
        title=f"{model['name']} version {model['version']}",
        result=result,
        report=report,
        features=features,
        plots=plots,
        parameters=dict(run.data.params),
        columns=columns,
        data=tracker.read_json(run_id, DATA),
        curves=curves,
        chosen=tuple(key for key, value in run.data.params.items() if usual.get(key) != value),
        about=_describe_run(run, tracker.experiment),
    )


def describe_features(plan: Plan) -> dict[str, str]:
    """Returns feature -> how it is made, without the numbers that its ops learn from rows.

    Example:
        >>> from models.config import SparseFeature
        >>> from pipeline.transforms.ops.sparse import SigridHash
        >>> op = SigridHash(inputs=("user:sparse",), output="user", size=1_000)
        >>> user = SparseFeature(name="user", table="user", rows=1_000, pooling="sum")
        >>> describe_features(Plan(ops=(op,), dense=("age",), sparse=(user,), raw={}, direct={"age": "age:dense"}))
        {'age': 'dense, age', 'user': 'sparse, user, sigrid_hash size=1000, sum of 1,000 rows'}
    """
    made = {op.output: op for op in plan.ops}

    def steps(name: str) -> str:
        if (op := made.get(name)) is None:
            return name.partition(":")[0]
        given = op.model_dump(exclude_defaults=True, exclude={"kind", "inputs", "output"})
        chosen = {key: value for key, value in given.items() if not op.learns or isinstance(value, int)}
        words = [op.kind, *(f"{key}={value}" for key, value in chosen.items())]
        return f"{' and '.join(map(steps, op.inputs))}, {' '.join(words)}"

    dense = {name: f"dense, {steps(plan.direct.get(name, name))}" for name in plan.dense}
    sparse = {
        one.name: f"sparse, {steps(plan.direct.get(one.name, one.name))}, {one.pooling} of {one.rows:,} rows"
        + ("" if one.table == one.name else f" of table {one.table}")
        for one in plan.sparse
    }
    return dense | sparse


def _describe_run(run: Run, config: str) -> dict[str, str]:
    """Returns what a reader asks first: which config, when, for how long."""
    began = datetime.datetime.fromtimestamp(run.info.start_time / 1e3, datetime.UTC)
    found = {"config": config, "begun": f"{began:%Y-%m-%d %H:%M} UTC"}
    end = run.info.end_time or 1e3 * datetime.datetime.now(datetime.UTC).timestamp()  # it is about to end
    return found | {"duration": f"{datetime.timedelta(seconds=round((end - run.info.start_time) / 1e3))}"}


def draw_figures(
    tracker: Tracker,
    run_id: str,
    train: Mapping[str, Any],
    report: EvalReport,
    features: Sequence[FeatureImportance],
    curves: Mapping[str, Curve] | None = None,
) -> dict[str, "Figure"]:
    """Draws the plots of a run, by name.

    Args:
        train: What the ranks report.
        curves: Metrics of the training. None: they are read.
    Raises:
        ValueError: If the stored sharding plan is not of these ranks.
    """
    from pipeline.evaluation.plots import draw_run  # imports matplotlib, which reports of drawn runs do not need

    plan = TypeAdapter(PlanRows).validate_python(tracker.read_json(run_id, SHARDING_PLAN))
    world_size: int = train["world_size"]
    if not max((rank for row in plan for rank in row["ranks"]), default=0) < world_size <= MOST_RANKS:
        raise ValueError("a sharding plan of other ranks")
    found = curves if curves is not None else tracker.load_curves(run_id, [*CURVES, *STALL_CURVES])
    cache = train.get("preprocessing", {}).get("cache", {})
    return draw_run(found, train["best_step"], report, features, plan, world_size, cache)


def describe_data(job: "TrainingJob") -> dict[str, str]:
    """Describes what a training reads."""
    found = {"table": job.snapshot.table, "snapshot": str(job.snapshot.snapshot_id)}
    found |= {f"{part} rows": describe_span(job, part) for part in job.rows}
    tables = {feature.table: feature.rows for feature in job.plan.sparse}
    found["features"] = f"{len(job.plan.dense)} dense, {len(job.plan.sparse)} sparse"
    found["embedding tables"] = f"{len(tables)}, {sum(tables.values()):,} rows"
    return found


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
    records = [load_record(tracker, run) for run in runs]
    linked = [
        one.model_copy(update={"address": run_address(workspace, run)}) for one, run in zip(records, runs, strict=True)
    ]
    write_text(path, render_report(linked))
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

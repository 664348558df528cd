"""What MLflow holds of finished runs, made into one page."""

from pydantic import ValidationError

from pipeline.errors import RegistryError
from pipeline.evaluation.evaluate import EvalReport
from pipeline.evaluation.html import RunRecord, render_report
from pipeline.evaluation.importance import FeatureImportance
from pipeline.jobs.training.job import TrainingJob
from pipeline.registration.tracking import RESULT, Tracker

CURVES = ("train_ne_window", "train_ne_progressive", "valid_ne")
STALL_CURVES = ("stall_fraction_window", "batch_extract_seconds", "batch_transform_seconds", "batch_wait_seconds")
REPORT, FEATURES, DATA, PLAN = "report.json", "features.json", "data.json", "sharding_plan.json"
"""Artifacts of a run."""
PAGE = "report.html"


def record_of(tracker: Tracker, run_id: str) -> RunRecord:
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


def page_of(tracker: Tracker, *run_ids: str) -> str:
    """The report of a run, or of two, as one HTML file that needs nothing else."""
    return render_report([record_of(tracker, run_id) for run_id in run_ids])


def data_in_words(job: TrainingJob) -> dict[str, str]:
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

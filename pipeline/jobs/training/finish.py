"""What comes after a training, from what it left in the run's folder: at once, or later by `flows.register`."""

from pathlib import Path
from typing import Any

from prefect import get_run_logger

from flows.runtime.pages import model_asset, table_asset
from pipeline.config import RunConfig
from pipeline.jobs.training import tasks
from pipeline.jobs.training.evaluate import Judged
from pipeline.jobs.training.job import TrainingJob, tracker_of
from pipeline.jobs.training.provenance import RECORD
from pipeline.registration.journal import Journal
from pipeline.registration.tracking import reporting_unreachable
from storage.artifacts import write_text

JUDGED = "judged.json"


def finish(config: RunConfig, job: TrainingJob, trained: tasks.Trained, run_id: str) -> dict[str, Any]:
    """Judges, registers and publishes a trained model; each can be repeated after a failure.

    Raises:
        TrackingError: If MLflow does not answer; names the command that goes on from here.
    """
    folder = Path(job.folder)
    command = f"python -m flows.register CONFIG run={folder.name}"
    with reporting_unreachable(f"The trained model is safe in '{folder}'; once MLflow answers, finish it by {command}"):
        tracker = tracker_of(config)
        Journal(tracker, run_id, folder, get_run_logger().warning).deliver()
        for path in (folder / RECORD, folder / tasks.PREPROCESSING):
            if path.exists():
                tracker.log_file(run_id, path)
        judged = _judged(folder, trained)
        if judged is None:
            judged = tasks.evaluate(config, job, trained)
            write_text(folder / JUDGED, judged.model_dump_json())
        tasks.note(config, job, trained, judged, run_id)
        put = tasks.register.with_options(assets=[model_asset(config)], asset_deps=[table_asset(config)])
        model = put(config, job, trained, judged, run_id)
        return tasks.publish(config, job, trained, judged, model, run_id)


def _judged(folder: Path, trained: tasks.Trained) -> Judged | None:
    """What an attempt that was cut short made of the same weights: their version may even be champion by now."""
    path = folder / JUDGED
    judged = Judged.model_validate_json(path.read_text(encoding="utf-8")) if path.exists() else None
    return judged if judged and judged.weights_sha256 == trained.summary["weights_sha256"] else None

"""What comes after a training, from what it left in the run's folder: at once, or later by `flows.register`."""

from pathlib import Path
from typing import Any

from prefect import get_run_logger

from flows import tasks
from flows.config import RunConfig
from flows.job import TrainingJob, tracker_of
from flows.judging import Judged
from flows.recorded import RECORD
from pipeline.registration.journal import Journal
from pipeline.registration.register import registered
from pipeline.registration.tracking import answering
from storage.artifacts import write_text

JUDGED = "judged.json"


def read_judged(folder: Path) -> Judged:
    """The verdict that an earlier attempt came to."""
    return Judged.model_validate_json((folder / JUDGED).read_text(encoding="utf-8"))


def finish(
    config: RunConfig, job: TrainingJob, trained: tasks.Trained, run_id: str, judged: Judged | None = None
) -> dict[str, Any]:
    """Judges, registers and publishes a trained model; each can be repeated after a failure.

    Args:
        judged: The verdict, where an earlier attempt came to one.
    Raises:
        TrackingError: If MLflow does not answer; names the command that goes on from here.
    """
    folder = Path(job.folder)
    command = f"python -m flows.register CONFIG run={folder.name}"
    with answering(f"The trained model is safe in '{folder}'; once MLflow answers, finish it by {command}"):
        tracker = tracker_of(config)
        Journal(tracker, run_id, folder, get_run_logger().warning).deliver()
        for path in (folder / RECORD, folder / tasks.PREPROCESSING):
            if path.exists():
                tracker.log_file(run_id, path)
        if judged is None and registered(tracker, config.model_name, run_id) and (folder / JUDGED).exists():
            judged = read_judged(folder)  # by an attempt that was cut short later: its version may be champion by now
        if judged is None:
            judged = tasks.evaluate(config, job, trained)
            write_text(folder / JUDGED, judged.model_dump_json())
        tasks.note(config, job, trained, judged, run_id)
        model = tasks.register(config, job, trained, judged, run_id)
        return tasks.publish(config, job, trained, judged, model, run_id)

"""Flow: a model that was trained while MLflow was away -> registered model version."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.jobs.training.finish import finish
from pipeline.jobs.training.job import JOB, REGISTERED, RUN_ID, TrainingJob, job_in, selected, tracked_run, tracker_of
from pipeline.jobs.training.provenance import RECORD, Record, recorded_config
from pipeline.jobs.training.summary import flow_run_name
from pipeline.jobs.training.tasks import TRAINED, Trained
from pipeline.registration.tracking import reporting_unreachable


@flow(name="register", flow_run_name=flow_run_name)
def register(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    run: str | None = None,
) -> dict[str, Any]:
    """A finished training in, a registered model version out; nothing is trained, what was done is not done again.

    Args:
        config: Says where runs, warehouse and MLflow are; all else is taken from what the training left behind.
        overrides: Dotted key -> value, put over the config.
        run: Id of the MLflow run, or name of the run's folder.
    """
    settings = load(config, overrides)
    folder = _folder(settings, run)
    record = Record.model_validate_json((folder / RECORD).read_text(encoding="utf-8"))
    settings = recorded_config(record, settings)
    run_id = (folder / RUN_ID).read_text(encoding="utf-8").strip()
    if (folder / REGISTERED).exists():
        get_run_logger().info("skipped: run %s is registered", run_id)
        tracker = tracker_of(settings)
        with reporting_unreachable(f"Run it again once it answers: python -m flows.register CONFIG run={run}"):
            tracker.end(run_id, "FINISHED")  # MLflow may have missed the very end
            return tracker.load_result(run_id) | {"status": "skipped"}
    if (folder / JOB).exists():
        job = TrainingJob.model_validate_json((folder / JOB).read_text(encoding="utf-8"))
    else:
        trained_on = load(settings, {"features.allow_deprecated": True})  # what is trained is finished
        job = job_in(folder, settings, record.identity, selected(trained_on, record.snapshot.snapshot_id))
    trained = Trained.model_validate_json((folder / TRAINED).read_text(encoding="utf-8"))
    trained = trained.model_copy(update={"weights": str(folder / "weights.safetensors")})
    name = tracker_of(settings).client.get_run(run_id).info.run_name
    with tracked_run(settings, job, name) as run_id:
        return finish(settings, job, trained, run_id)


def _folder(config: RunConfig, run: str | None) -> Path:
    """The folder of a training that is done."""
    runs = config.home_path / "runs"
    done = [path.parent for path in sorted(runs.glob(f"*/{TRAINED}")) if (path.parent / RUN_ID).exists()]
    for folder in done:
        if run in (folder.name, (folder / RUN_ID).read_text(encoding="utf-8").strip()):
            return folder
    open_runs = [folder.name for folder in done if not (folder / REGISTERED).exists()]
    remedy = f"Not registered yet: {', '.join(open_runs) or 'none'}."
    raise ConfigError("argument 'run'", f"a finished training in '{runs}'", run or "none", remedy)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(register)

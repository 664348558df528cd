"""Flow: warehouse days -> registered model version."""

from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger

from flows import tasks
from flows.config import RunConfig, load
from flows.finishing import finish
from flows.job import alone, tracked_run
from flows.record import flow_run_name


@flow(name="train", flow_run_name=flow_run_name)
def train(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """A snapshot in, a registered model version out; it waits while another training of the model is at work.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        snapshot_id: Snapshot to read; None takes the newest.
        again: Trains even where the same training is in the registry.
    """
    settings = load(config, overrides)
    with alone(settings, f"training of model '{settings.model_name}'", get_run_logger()):
        job = tasks.pin(settings, snapshot_id, again)
        if job.done:
            return tasks.finished(settings, job)
        with tracked_run(settings, job) as run_id:
            trained = tasks.train(settings, job, run_id)
            return finish(settings, job, trained, run_id)


if __name__ == "__main__":
    from flows import cli

    cli.main(train)

"""Flow: warehouse days -> registered model version."""

from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger

from pipeline.config import RunConfig, load
from pipeline.jobs.training import tasks
from pipeline.jobs.training.finish import finish
from pipeline.jobs.training.job import alone, tracked_run
from pipeline.jobs.training.summary import flow_run_name


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
    return train_version(load(config, overrides), snapshot_id, again)


def train_version(
    config: RunConfig,
    snapshot_id: int | None,
    again: bool,
    name: str | None = None,
    tags: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """What the flow does with a checked config; other flows train as a part of theirs.

    Args:
        name: Of the MLflow run; None: what is special about the config.
        tags: Of the MLflow run, beside the usual ones.
    """
    with alone(config, f"training of model '{config.model_name}'", get_run_logger()):
        job = tasks.pin(config, snapshot_id, again)
        if job.done:
            return tasks.finished(config, job)
        with tracked_run(config, job, name, tags) as run_id:
            trained = tasks.train(config, job, run_id)
            return finish(config, job, trained, run_id)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(train)

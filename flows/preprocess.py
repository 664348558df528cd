"""Flow: warehouse days -> one epoch of batches, without a trainer."""

from collections.abc import Mapping
from typing import Any

from prefect import flow
from pydantic import NonNegativeInt

from pipeline.config import RunConfig, load
from pipeline.jobs.training import tasks
from pipeline.jobs.training.summary import flow_run_name


@flow(name="preprocess", flow_run_name=flow_run_name)
def preprocess(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    epoch: NonNegativeInt = 0,
) -> dict[str, Any]:
    """The training rows of a snapshot in, their order and what the workers took out.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        snapshot_id: Snapshot to read; None takes the newest.
        epoch: Number of the epoch, which decides the order of the rows.
    """
    settings = load(config, overrides)
    return tasks.preprocess(settings, snapshot_id, epoch)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(preprocess)

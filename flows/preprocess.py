"""Flow: makes one epoch of batches without a trainer."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("preprocess")

from collections.abc import Mapping
from typing import Any

from pydantic import NonNegativeInt

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.ingest.preprocess import preprocess_epoch


@flow("preprocess")
def preprocess(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    epoch: NonNegativeInt = 0,
) -> dict[str, Any]:
    """Makes one epoch of training batches and reports the order's hash, the speed and the cost by op.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        snapshot_id: Snapshot to read; None takes the newest.
        epoch: Number of the epoch, which decides the order of the rows.
    """
    return preprocess_epoch(open_workspace(load(config, overrides)), snapshot_id, epoch)

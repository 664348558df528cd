"""Flow: trains, evaluates and registers a model version."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("train")

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.run import train_version


@flow("train")
def train(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Trains, evaluates and registers a model version from a snapshot.

    Waits while another training of the same model runs.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        snapshot_id: Snapshot to read; None takes the newest.
        force: Trains even if the same training is in the registry.
    """
    return train_version(open_workspace(load(config, overrides)), snapshot_id, force)

"""Flow: restores the previous champion."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("rollback")

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.champion import roll_back


@flow("rollback")
def rollback(
    config: RunConfig | str = "configs/demo.yaml", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Moves the alias `champion` back to the previous champion and records the move. Repeated calls go further back.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
    """
    return roll_back(open_workspace(load(config, overrides)))

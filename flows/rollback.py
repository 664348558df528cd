"""Flow: restores the previous champion."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.champion import roll_back


@flow(name="rollback", flow_run_name=flow_run_name)
def rollback(
    config: RunConfig | str = "configs/demo.yaml", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Moves the alias `champion` back to the previous champion and records the move.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
    """
    return roll_back(open_workspace(load(config, overrides)))


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(rollback)

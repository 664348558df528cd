"""Flow: a config and the values that its keys may take -> the best of many trainings, as a config."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.search.sweep_run import run_sweep


@flow(name="sweep", flow_run_name=flow_run_name)
def sweep(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Searches values for keys of the config and writes the best config by the validation rows to a file.

    Registers nothing. The same command resumes an interrupted sweep, and one with a higher `sweep.trials`.

    Args:
        config: The run's config with its section `sweep`, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        snapshot_id: Snapshot to read; None takes the newest. Give an interrupted sweep its own snapshot if days were
            ingested meanwhile.
        force: Starts a new sweep where the same one is done.
    """
    return run_sweep(open_workspace(load(config, overrides)), snapshot_id, force)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(sweep)

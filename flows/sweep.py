"""Flow: searches values for config keys and writes the best config."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("sweep")

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.search.sweep import run_sweep


@flow("sweep")
def sweep(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Searches values for config keys and writes the config that does best on the validation rows.

    Registers nothing. The same command resumes an interrupted sweep. A higher `sweep.trials` extends a finished one.

    Args:
        config: The run's config with its section `sweep`, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        snapshot_id: Snapshot to read; None takes the newest. If days were ingested since, resume an
            interrupted sweep with its own snapshot.
        force: Starts a new sweep even if the same one is done.
    """
    return run_sweep(open_workspace(load(config, overrides)), snapshot_id, force)

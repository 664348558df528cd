"""Flow: compares candidates on a sample, then on all rows; trains, gates and registers the winner."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("release")

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.search.release import run_release


@flow("release")
def release(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Trains candidates, registers the best one, and makes it champion if the gate promotes it (`gate.rule`).

    The same command resumes an interrupted release and does not retrain candidates that finished a stage.

    Args:
        config: The run's config with its section `release`, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        snapshot_id: Snapshot to read; None takes the newest. If days were ingested since, resume an
            interrupted release with its own snapshot.
        force: Starts a new release even if the same one is done or has failed.
    """
    return run_release(open_workspace(load(config, overrides)), snapshot_id, force)

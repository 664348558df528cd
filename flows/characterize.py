"""Flow: measures what each configuration of a grid costs on this machine, and why."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("characterize")

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.study.run import run_study


@flow("characterize")
def characterize(
    config: RunConfig | str = "configs/paper/e2_batch.yaml",
    overrides: Mapping[str, Any] | None = None,
    snapshot_id: int | None = None,
    force: bool = False,
    report: str | None = None,
) -> dict[str, Any]:
    """Measures each point of the section `characterize`: speed, time by part, memory and machine use.

    The same command resumes an interrupted study.

    Args:
        config: The run's config with its section `characterize`, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        snapshot_id: Snapshot to read if the study has no workload of its own; None takes the newest.
        force: Starts a new study even if the same one is done.
        report: Folder for the text, table and plots, which also go to MLflow; None: the study's own folder.
    """
    return run_study(open_workspace(load(config, overrides)), snapshot_id, force, report)

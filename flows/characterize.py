"""Flow: measures what each configuration of a grid costs on this machine, and why."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.study.run import run_study


@flow(name="characterize", flow_run_name=flow_run_name)
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


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(characterize)

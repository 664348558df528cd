"""Flow: measures what each configuration of a grid costs on this machine, and why."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command
    from pipeline.study.points.load import load_study

    command("characterize", load_study)

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig
from pipeline.study.points.load import StudyConfig, load_study
from pipeline.study.run import run_study


@flow("characterize", load_study)
def characterize(
    config: StudyConfig | RunConfig | str = "configs/paper/e2_batch.yaml",
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
    study = load_study(config, overrides)
    return run_study(open_workspace(study.run), study.characterize, snapshot_id, force, report)

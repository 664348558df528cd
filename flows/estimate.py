"""Flow: predicts what a training will take, on this machine or a described one."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command
    from pipeline.study.points.load import load_study

    command("estimate", load_study)

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig
from pipeline.study.estimate.run import POINTS, estimate_training
from pipeline.study.points.load import StudyConfig, load_study


@flow("estimate", load_study)
def estimate(
    config: StudyConfig | RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    machine: str | None = None,
    measure: bool = False,
    points: PositiveInt = POINTS,
    snapshot_id: int | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Predicts a training's memory, speed, ranks, workers, checkpoint size and epoch time before it runs.

    The first run on a machine trains small models of many shapes for some steps and fits the predictions to them.

    Args:
        config: The run's config, or the path of its YAML file; with a `characterize.workload` it needs no table.
        overrides: Dotted key -> value; overrides the config.
        machine: YAML file that describes another machine, such as configs/machines/epyc_9654.yaml.
        measure: Also trains the config itself for some steps and compares them with the prediction.
        points: Number of small models to measure the machine with.
        snapshot_id: Snapshot to read; None takes the newest.
        force: Measures the machine again.
    """
    study = load_study(config, overrides)
    workspace = open_workspace(study.run)
    return estimate_training(workspace, study.characterize, machine, measure, points, snapshot_id, force)

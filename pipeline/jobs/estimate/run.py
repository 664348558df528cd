"""What a training will take, before it runs."""

from typing import Any

from pipeline.jobs.estimate.advice import advised
from pipeline.jobs.estimate.calibration import calibrated
from pipeline.jobs.estimate.footprint import looked_at, machine_at
from pipeline.jobs.workspace import Workspace

POINTS = 48
"""Models measured by default: two or three minutes."""


def estimate_training(
    workspace: Workspace, machine: str | None, measure: bool, points: int, snapshot_id: int | None, force: bool
) -> dict[str, Any]:
    """Predicts memory, speed, ranks, workers, checkpoint size and epoch time.

    Args:
        machine: YAML file that describes another machine.
        measure: Also trains the config itself for some steps.
        points: Models that the machine's speed is learned from.
        snapshot_id: Snapshot to look at; None takes the newest.
        force: Measures the machine again.
    """
    described = None if machine is None else machine_at(machine)
    asked = looked_at(workspace, snapshot_id)
    return advised(workspace, asked, calibrated(workspace, points, force), described, measure)

"""Estimates what a training will need, before it runs."""

from typing import Any

from pipeline.jobs.workspace import Workspace
from pipeline.study.estimate.advice import advise
from pipeline.study.estimate.calibration import calibrate
from pipeline.study.estimate.footprint import load_machine, measure_footprint
from pipeline.study.points.config import CharacterizeConfig

POINTS = 48
"""Models measured by default. Takes two or three minutes."""


def estimate_training(
    workspace: Workspace,
    study: CharacterizeConfig,
    machine: str | None,
    measure: bool,
    points: int,
    snapshot_id: int | None,
    force: bool,
) -> dict[str, Any]:
    """Predicts memory, speed, ranks, workers, checkpoint size and epoch time.

    Args:
        machine: YAML file that describes another machine.
        measure: Also trains the config itself for some steps.
        points: Models that the machine's speed is learned from.
        snapshot_id: Snapshot to read. None takes the newest.
        force: Measures the machine again.
    """
    described = None if machine is None else load_machine(machine)
    footprint = measure_footprint(workspace, study.workload, snapshot_id)
    return advise(workspace, footprint, calibrate(workspace, points, force), described, study if measure else None)

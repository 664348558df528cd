"""Flow: a config and its table's statistics -> what its training will take on this machine, or on a described one."""

from collections.abc import Mapping
from typing import Any

from prefect import flow
from pydantic import PositiveInt

from pipeline.config import RunConfig, load
from pipeline.jobs.estimate import advice, footprint
from pipeline.jobs.estimate.calibration import POINTS, calibrated
from pipeline.jobs.training.summary import flow_run_name


@flow(name="estimate", flow_run_name=flow_run_name)
def estimate(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    machine: str | None = None,
    measure: bool = False,
    points: PositiveInt = POINTS,
    snapshot_id: int | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """A config in; memory, speed, ranks, workers, checkpoint and epoch of its training out, before it is trained.

    The first time on a machine, models of many shapes are trained for some steps: predictions are made from those.

    Args:
        config: The run's config, or the path of its YAML file; with a `characterize.workload` it needs no table.
        overrides: Dotted key -> value, put over the config.
        machine: YAML file that describes another machine, such as configs/machines/epyc_9654.yaml.
        measure: Trains the config itself for some steps, too, and holds the prediction against them.
        points: Models that the machine's speed is learned from.
        snapshot_id: Snapshot to look at; None takes the newest.
        again: Measures the machine anew.
    """
    settings = load(config, overrides)
    described = None if machine is None else footprint.machine_at(machine)
    asked = footprint.looked_at(settings, snapshot_id)
    return advice.advised(settings, asked, calibrated(settings, points, again), described, measure)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(estimate)

"""Flow: one model, every placement of its tables."""

from collections.abc import Mapping
from typing import Any

from prefect import flow
from pydantic import PositiveInt

from flows import placing
from flows.config import RunConfig, load
from flows.record import flow_run_name


@flow(name="placement", flow_run_name=flow_run_name)
def placement(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    world_sizes: list[PositiveInt] = [1, 2, 4],  # noqa: B006  Prefect shows it in its form
    steps: PositiveInt = 30,
    snapshot_id: int | None = None,
) -> dict[str, Any]:
    """Training rows in; which placements of the tables train alike, what they take and how fast they are out.

    All begin with the same weights: tables are drawn by seed, table and row, the rest by the seed.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        world_sizes: Numbers of ranks to compare.
        steps: Updates that each placement makes.
        snapshot_id: Snapshot to read; None takes the newest.
    """
    return placing.compare(load(config, overrides), world_sizes, steps, snapshot_id)


if __name__ == "__main__":
    from flows import cli

    cli.main(placement)

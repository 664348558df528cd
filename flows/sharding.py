"""Flow: trains one model under every sharding plan and compares the plans."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("sharding")

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.study.plans import compare_plans


@flow("sharding")
def sharding(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    world_sizes: list[PositiveInt] = [1, 2, 4],  # noqa: B006  Prefect shows it in its form
    steps: PositiveInt = 30,
    snapshot_id: int | None = None,
) -> dict[str, Any]:
    """Trains the same model under every sharding plan and compares losses, memory and speed.

    All plans start from the same weights: tables are initialized by seed, table and row, the rest by the seed.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        world_sizes: Numbers of ranks to compare.
        steps: Updates to make under each plan.
        snapshot_id: Snapshot to read; None takes the newest.
    """
    return compare_plans(open_workspace(load(config, overrides)), world_sizes, steps, snapshot_id)

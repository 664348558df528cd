"""Flow: removes old runs, versions, snapshots and temporary files."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("clean")

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.upkeep.clean import clean as remove_old


@flow("clean")
def clean(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    dry_run: bool = True,
) -> dict[str, Any]:
    """Removes work of the config's table, model and experiment that is older than the section `retention` allows.

    Every version with an alias stays, and so do the two champions before the present one. Their run folders and
    snapshots stay with them.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        dry_run: Only lists what would be removed.
    """
    return remove_old(open_workspace(load(config, overrides)), dry_run)

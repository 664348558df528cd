"""Flow: makes a version the champion by hand."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("promote")

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import PositiveInt

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.champion import promote_version


@flow("promote")
def promote(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    version: PositiveInt | None = None,
    reason: str = "by hand",
    alias: Literal["champion", "reference"] = "champion",
) -> dict[str, Any]:
    """Makes a version the champion, whatever the gate says, and records the move. Skips it if it is champion already.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        version: The version to promote.
        reason: Recorded with the move.
        alias: `reference` pins the version that recurring training compares each day's champion with.
    """
    return promote_version(open_workspace(load(config, overrides)), version, reason, alias)

"""Flow: retrains a version from its record and compares the two."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("replay")

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.replay import replay_version


@flow("replay")
def replay(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    version: PositiveInt | None = None,
) -> dict[str, Any]:
    """Retrains a registered version and reports whether the weights are the same.

    Snapshot, config, sharding plan and thread counts come from the version's record. Registers nothing and moves no
    alias. `equal` is true if weights and fitted plan are the same bit for bit. `differences` lists everything that
    differs from the record.

    Args:
        config: Where home, warehouse and MLflow are, and the model's name. Everything else comes from the record.
        overrides: Dotted key -> value; only keys that do not change the result, such as preprocessing.workers.
        version: The version to retrain.
    """
    return replay_version(open_workspace(load(config, overrides)), version, overrides or {})

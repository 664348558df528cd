"""Flow: ingests logs, then trains and registers a model version."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("end_to_end")

from collections.abc import Mapping
from typing import Any

from flows.ingest import ingest
from flows.runtime.flow import flow, open_workspace
from flows.train import train
from pipeline.config import RunConfig, load
from pipeline.errors import keep_if_failed
from pipeline.jobs.ingest.ingest import require_one_config
from pipeline.jobs.outcome import show_outcome


@flow("end-to-end")
def end_to_end(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Ingests the logs, then trains and registers a model version. Skips finished steps.

    Trains on the table's versions of days that the ingest held back, and names them in `held`. Stops before the
    training if the table has days of an earlier config beside those of this one.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        force: Trains even if the same training is in the registry.
    """
    settings = load(config, overrides)
    days = ingest(settings, overrides)  # they name the runs inside this one
    with keep_if_failed(ingest=days):
        require_one_config(days)
        model = train(settings, overrides, snapshot_id=days["snapshot_id"], force=force)
    show_outcome(open_workspace(settings), model)
    return model | {"held": days["held"], "ingest": days}

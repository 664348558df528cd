"""Flow: the champion before the present one serves again."""

from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger

from pipeline.config import RunConfig, load
from pipeline.jobs.training.job import tracker_of
from pipeline.jobs.training.summary import flow_run_name
from pipeline.registration import aliases


@flow(name="rollback", flow_run_name=flow_run_name)
def rollback(
    config: RunConfig | str = "configs/demo.yaml", overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The alias `champion` one step back; the move is recorded.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
    """
    settings = load(config, overrides)
    done = aliases.rollback(tracker_of(settings), settings.model_name)
    get_run_logger().info("%s version %s is champion again", settings.model_name, done.version)
    return {"status": "ok", "model": settings.model_name} | done.model_dump()


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(rollback)

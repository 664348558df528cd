"""Flow: a version is made champion by a person."""

from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger
from pydantic import PositiveInt

from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError
from pipeline.jobs.training.job import tracker_of
from pipeline.jobs.training.summary import flow_run_name
from pipeline.registration.aliases import CHAMPION, move_alias


@flow(name="promote", flow_run_name=flow_run_name)
def promote(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    version: PositiveInt | None = None,
    reason: str = "by hand",
) -> dict[str, Any]:
    """The version that serves, whatever the gate says; the move is recorded.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        version: The version that becomes champion.
        reason: Kept with the move.
    """
    settings = load(config, overrides)
    if version is None:
        raise ConfigError("argument 'version'", "the version that becomes champion", "none", "Add version=N.")
    done = move_alias(tracker_of(settings), settings.model_name, CHAMPION, version, "person", reason)
    get_run_logger().info("%s version %s is champion, version %s was", settings.model_name, version, done.previous)
    return {"status": "ok", "model": settings.model_name} | done.model_dump()


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(promote)

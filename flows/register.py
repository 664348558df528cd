"""Flow: registers a model that was trained while MLflow was unreachable."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.register import register_run


@flow(name="register", flow_run_name=flow_run_name)
def register(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    run: str | None = None,
) -> dict[str, Any]:
    """Evaluates and registers the model of a finished training. Trains nothing and repeats no finished step.

    Args:
        config: Where runs, warehouse and MLflow are. Everything else comes from the training's own files.
        overrides: Dotted key -> value; overrides the config.
        run: MLflow run id, or name of the run's folder.
    """
    return register_run(open_workspace(load(config, overrides)), run)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(register)

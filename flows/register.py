"""Flow: registers a model that was trained while MLflow was unreachable."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("register")

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.register import register_run


@flow("register")
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

"""Flow: writes an HTML report of one run, or of two side by side."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("report")

from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.summary import write_report


@flow("report")
def report(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    run: str | int | None = None,
    against: str | int | None = None,
) -> dict[str, Any]:
    """Writes the report of one run, or of two side by side, below `home/reports`.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        run: Version of the model, or MLflow run id; None: the champion.
        against: Version or run to compare with.
    """
    return write_report(open_workspace(load(config, overrides)), run, against)

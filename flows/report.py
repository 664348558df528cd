"""Flow: writes an HTML report of one run, or of two side by side."""

from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.training.summary import write_report


@flow(name="report", flow_run_name=flow_run_name)
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


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(report)

"""Flow: a finished run, or two of them, as one HTML file."""

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
    """Writes the report of a run below `home/reports`; of two runs, side by side.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        run: Version of the model, or id of an MLflow run; None: the champion.
        against: Another one to compare it with.
    """
    return write_report(open_workspace(load(config, overrides)), run, against)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(report)

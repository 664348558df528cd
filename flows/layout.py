"""Flow: the files of a table arranged for those who read them; old snapshots and files removed."""

from collections.abc import Mapping
from typing import Any, Literal

from prefect import flow
from pydantic import NonNegativeFloat, PositiveFloat

from flows.runtime.console import flow_run_name, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.tables.layout import change_layout


@flow(name="layout", flow_run_name=flow_run_name)
def layout(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    action: Literal["propose", "apply", "measure", "compact", "expire", "vacuum"] = "propose",
    table: str | None = None,
    order_by: list[str] = [],  # noqa: B006  Prefect shows it in its form
    recent_days: PositiveFloat = 30,
    megabytes_per_second: PositiveFloat = 200,
    older_than_days: NonNegativeFloat = 30,
    older_than_hours: NonNegativeFloat = 24,
    dry_run: bool = True,
    force: bool = False,
) -> dict[str, Any]:
    """Proposes or applies a layout from what readers read, or removes files and snapshots. Rows stay as they are.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        action: propose: a layout with its figures; apply: rewrites the days in it, one commit each, and resumes where
            it was interrupted; measure: reads the config's columns; compact: days of small files; expire: old snapshots
            without tag or branch; vacuum: files that no snapshot names.
        table: Table of the warehouse; None: that of the config.
        order_by: Columns to sort the rows of each file by, such as a session; for propose and apply.
        recent_days: Runs no older than this count for the proposal.
        megabytes_per_second: Speed of the storage, which weighs bytes against time to decode.
        older_than_days: Age of the snapshots that expire.
        older_than_hours: Age of the files that a vacuum takes; longer than any writer takes to commit.
        dry_run: Vacuum and expire count what they would remove, and leave it.
        force: Applies a new proposal although the table has a layout.
    """
    workspace = open_workspace(load(config, overrides))
    options = {
        "order_by": order_by, "recent_days": recent_days, "megabytes_per_second": megabytes_per_second,
        "older_than_days": older_than_days, "older_than_hours": older_than_hours, "dry_run": dry_run, "force": force,
    }  # fmt: skip
    return change_layout(workspace, action, table or workspace.config.name, options)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(layout)

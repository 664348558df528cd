"""Flow: a table's files, laid out for those who read them; old snapshots and files removed."""

from collections.abc import Mapping
from typing import Any, Literal

from prefect import flow
from pydantic import NonNegativeFloat, PositiveFloat

from pipeline.config import RunConfig, load
from pipeline.jobs.tables import layout as laying
from pipeline.jobs.training.summary import flow_run_name


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
    again: bool = False,
) -> dict[str, Any]:
    """What readers read in; a layout, or fewer files and snapshots, out. Rows stay as they are.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        action: propose: a layout with its figures; apply: writes the days in it, one commit each, and goes on where it
            was cut short; measure: reads the config's columns; compact: days of small files; expire: old snapshots
            without tag or branch; vacuum: files that no snapshot names.
        table: Table of the warehouse; None: that of the config.
        order_by: Columns to sort the rows of each file by, such as a session; for propose and apply.
        recent_days: Runs as young as this count for the proposal.
        megabytes_per_second: Speed of the storage, which weighs bytes against time to decode.
        older_than_days: Age of the snapshots that expire.
        older_than_hours: Age of the files that a vacuum takes; longer than any writer takes to commit.
        dry_run: Vacuum and expire count what they would remove, and leave it.
        again: Applies a proposal made now, although the table has a layout.
    """
    settings = load(config, overrides)
    name = table or settings.name
    if action == "propose":
        return laying.proposed(settings, name, order_by, recent_days, megabytes_per_second)
    if action == "apply":
        return laying.applied(settings, name, order_by, recent_days, megabytes_per_second, again)
    if action == "measure":
        return laying.measured(settings, name)
    if action == "compact":
        return laying.compacted(settings, name)
    if action == "expire":
        return laying.expired(settings, name, older_than_days, dry_run)
    return laying.vacuumed(settings, name, older_than_hours, dry_run)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(layout)

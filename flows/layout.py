"""Flow: arranges a table's files for its readers, and removes old snapshots and files."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("layout")

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import NonNegativeFloat, PositiveFloat

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.upkeep.layout import change_layout, recent_reads
from pipeline.study.layout.run import measure_steps


@flow("layout")
def layout(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    action: Literal["propose", "apply", "measure", "ladder", "compact", "flatten", "expire", "vacuum"] = "propose",
    table: str | None = None,
    order_by: list[str] = [],  # noqa: B006  Prefect shows it in its form
    recent_days: PositiveFloat = 30,
    megabytes_per_second: PositiveFloat = 200,
    older_than_days: NonNegativeFloat = 30,
    older_than_hours: NonNegativeFloat = 24,
    dry_run: bool = True,
    force: bool = False,
) -> dict[str, Any]:
    """Proposes or applies a layout based on what readers read, or removes files and snapshots. Never changes a row.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        action: propose prints a layout and its expected gain; apply rewrites the days in that layout,
            and resumes after an interruption; measure times a read of the config's columns; ladder measures on a
            sample what each step gains, from maps of features to popular columns in large row groups; compact merges
            the small files of a day and drops deleted rows; flatten writes each key of the table's maps as a column;
            expire removes old snapshots without a tag or branch; vacuum removes files that no snapshot references.
        table: Table of the warehouse; None: the table of the config.
        order_by: Columns to sort the rows of each file by, such as a session; for propose and apply.
        recent_days: The proposal and the ladder count the runs of this many days.
        megabytes_per_second: Speed of the storage, to weigh bytes read against decode time.
        older_than_days: Minimum age of the snapshots that expire.
        older_than_hours: Minimum age of the files that vacuum removes; longer than any writer takes to commit.
        dry_run: Vacuum and expire only count what they would remove.
        force: Applies a new proposal even if the table has a layout.
    """
    workspace = open_workspace(load(config, overrides))
    name = table or workspace.config.name
    if action == "ladder":
        return measure_steps(workspace, name, recent_reads(workspace, name, recent_days))
    options = {
        "order_by": order_by, "recent_days": recent_days, "megabytes_per_second": megabytes_per_second,
        "older_than_days": older_than_days, "older_than_hours": older_than_hours, "dry_run": dry_run, "force": force,
    }  # fmt: skip
    return change_layout(workspace, action, name, options)

"""Flow: ingests logs or files into warehouse days."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("ingest")

import datetime
from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.ingest.ingest import ingest_days


@flow("ingest")
def ingest(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    day: datetime.date | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Writes the source's rows into days of the warehouse table. Each day is replaced as a whole.

    Holds a day back if it would lose files, rows, labels, columns or materialized features that the table has.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        day: The only day to write; None writes all days of the source.
        force: Also rewrites days that the warehouse already has from the same input, and days that lose something.
    """
    return ingest_days(open_workspace(load(config, overrides)), day, force)

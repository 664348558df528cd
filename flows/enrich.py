"""Flow: materializes columns of feature sources into days that the warehouse already has."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("enrich")

import datetime
from collections.abc import Mapping
from typing import Any

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.ingest.ingest import enrich_days


@flow("enrich")
def enrich(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Materializes the columns of `features.joined`, and of stored histories and windows, into days of the table.

    Commits each day by itself, so the same command resumes what was interrupted. Earlier trainings still read the old
    files. After a day is ingested again, materialize it again.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        start: First day; None: the first of the table.
        end: Last day; None: the last of the table.
        force: Also rewrites days that already have the columns from the same feature source.
    """
    return enrich_days(open_workspace(load(config, overrides)), start, end, force)

"""Flow: compares features as they were served, or as a training read them, with those computed now."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("consistency")

import datetime
from collections.abc import Mapping
from typing import Any

from pydantic import NonNegativeFloat, PositiveInt

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.features.consistency import check_consistency


@flow("consistency")
def consistency(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    served: str | None = None,
    on: list[str] = [],  # noqa: B006  Prefect shows it in its form
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    version: PositiveInt | None = None,
    tolerance: NonNegativeFloat = 1e-6,
) -> dict[str, Any]:
    """Compares features with the same features computed now, and reports the share and the reasons of differences.

    With `served`, it compares served rows with the rows of the table that have the same keys, joined with the feature
    sources as they are now. Without it, it compares the joined features of a version, with the sources as its training
    read them, with those that the sources give now: how often a value changes when it is computed again later.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        served: Rows as they were served: files of any format (a folder, path or glob), or a table of the warehouse;
            None: compares with the sources of a training.
        on: Columns that tell which row is which, such as user and time. `served` needs them. Otherwise they name the
            examples; none: keys and times of the sources.
        start: First day of the table; None: the first of the table, or of the training.
        end: Last day of the table; None: the last of the table, or of the training.
        version: Version whose training is compared; None: the newest one.
        tolerance: Largest difference of equal fractions, relative to the larger one.
    """
    return check_consistency(open_workspace(load(config, overrides)), served, on, start, end, version, tolerance)

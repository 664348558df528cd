"""Flow: scores warehouse days."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("score")

import datetime
from collections.abc import Mapping
from typing import Any

from pydantic import PositiveInt

from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.jobs.serving.score_days import score_days


@flow("score")
def score(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    version: PositiveInt | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Scores the rows of days and writes the probabilities to the table NAME_scores.

    Without `start` and `end`, these are the days that have no scores yet or whose rows have changed: those that an
    earlier champion has scored stay. A model with another name than the config has a table of its own, and so has each
    `version`: the result names it.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        start: First day to have scores of this version; None: the first of the table.
        end: Last day to have them; None: the last of the table.
        version: Version to score with; None: the champion.
        force: Also scores days that have their scores.
    """
    return score_days(open_workspace(load(config, overrides)), start, end, version, force)

"""Flow: a complete day -> the champion evaluated on it, trained on it, and replaced if that is no worse."""

import datetime
from collections.abc import Mapping
from typing import Any

from prefect import flow

from flows.ingest import ingest
from flows.runtime.console import flow_run_name, open_workspace
from flows.train import train
from pipeline.config import RunConfig, load
from pipeline.jobs.recurring.day import has_champion, require_hash_split
from pipeline.jobs.recurring.run import train_day


@flow(name="recurring", flow_run_name=flow_run_name)
def recurring(
    config: RunConfig | str = "configs/flights_daily.yaml",
    overrides: Mapping[str, Any] | None = None,
    day: datetime.date | None = None,
    scratch: bool = False,
    force: bool = False,
) -> dict[str, Any]:
    """Evaluates the champion on a day, trains it on that day, and registers the result.

    Ingests the day if the table lacks it. Where there is no champion, trains the first one on the config's own split.
    The champion is trained on all days since its last one, except for the rows of the split's test part, on which the
    gate compares the two. Skips a day that is done already.

    Args:
        config: The run's config, or the path of its YAML file; its split must be `hash`.
        overrides: Dotted key -> value, put over the config.
        day: The day; None: the last one of the table, after all new days of the source are ingested.
        scratch: Trains another model on all days, whatever the policy says.
        force: Does the work of a finished day once more. A day that the champion has seen needs a rollback first.
    """
    workspace = open_workspace(load(config, overrides))
    require_hash_split(workspace.config)
    champion = has_champion(workspace)
    if day is None or not champion:
        ingest(workspace.config)
    elif day not in workspace.warehouse.whole_days(workspace.config.name):  # a day is written whole or not at all
        ingest(workspace.config, day=day)
    if not champion:
        train(workspace.config)
    return train_day(workspace, day, scratch, force)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(recurring)

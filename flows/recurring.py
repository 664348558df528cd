"""Flow: judges the newest model on a new day, which no model has seen, and trains the champion on that day."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("recurring")

import datetime
from collections.abc import Mapping
from typing import Any

from flows.ingest import ingest
from flows.runtime.flow import flow, open_workspace
from flows.train import train
from pipeline.config import RunConfig, load
from pipeline.errors import EmptyDatasetError, keep_if_failed
from pipeline.jobs.ingest.ingest import require_one_config
from pipeline.jobs.recurring.day import has_champion, require_hash_split
from pipeline.jobs.recurring.run import train_day, train_new_days
from pipeline.jobs.upkeep.clean import clean
from pipeline.jobs.workspace import Workspace


@flow("recurring")
def recurring(
    config: RunConfig | str = "configs/flights_daily.yaml",
    overrides: Mapping[str, Any] | None = None,
    day: datetime.date | None = None,
    scratch: bool = False,
    force: bool = False,
    from_source: bool = True,
) -> dict[str, Any]:
    """Judges the model of the day before on a whole day, trains the champion on that day, and registers the result.

    Ingests the day if the table lacks it or has it from other input. Without a champion, trains the first model on the
    config's own split. The model of the day before and the champion score all rows of the day, which neither has seen.
    The gate decides whether that model becomes champion. Then trains the champion on all days since its last one,
    except for the test rows of the split. The new model is judged on the next day. Skips a finished day.

    Without `day`, does this for each closed day after the champion's last one, in order. On a table with many past days
    it trains one model after another. Afterwards it removes what `retention` does not keep.

    Args:
        config: The run's config, or the path of its YAML file; its split must be `hash`.
        overrides: Dotted key -> value; overrides the config.
        day: The day, which may be open; None ingests all new days of the source and takes each closed day. See
            `recurring.closed_after_hours`.
        scratch: Trains a new model on all days, whatever the policy says.
        force: Repeats a finished day. If the champion has seen that day, roll it back first.
        from_source: Compares the days with the source first and ingests what differs.
    """
    workspace = open_workspace(load(config, overrides))
    require_hash_split(workspace.config.split)
    champion = has_champion(workspace)
    ingested: Mapping[str, Any] = {}
    if not champion or (from_source and day is None):
        ingested = ingest(workspace.config, overrides)
    elif from_source and day is not None:
        ingested = ingest_day(workspace, overrides, day)
    held = {"held": ingested.get("held", []), "events": ingested.get("events", {})}
    with keep_if_failed(**held):
        if not champion:
            require_one_config(ingested)
            train(workspace.config, overrides)
        if day is not None:
            return train_day(workspace, day, scratch, force) | held
        result = train_new_days(workspace, scratch, force) | held
    with workspace.best_effort("removing what retention does not keep"):
        clean(workspace, dry_run=False)
    return result


def ingest_day(workspace: Workspace, overrides: Mapping[str, Any] | None, day: datetime.date) -> Mapping[str, Any]:
    """Ingests a day if its input has changed. A day that the source no longer has stays as the table has it."""
    try:
        return ingest(workspace.config, overrides, day=day)
    except EmptyDatasetError:
        if day not in workspace.warehouse.state_of_days(workspace.config.name).whole:
            raise
        workspace.console.log.info("the source no longer has %s: uses the table's rows", day)
        return {}

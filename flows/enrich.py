"""Flow: columns of side sources -> days that stand in the warehouse already."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Any

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE

from flows.runtime.pages import table_asset
from pipeline.catalog.events import Event, append_event, newest_events, read_events
from pipeline.config import RunConfig, load
from pipeline.jobs.training import tasks
from pipeline.jobs.training.job import warehouse_of
from pipeline.jobs.training.summary import flow_run_name


@task(cache_policy=NO_CACHE, task_run_name="declare")
def declare(config: RunConfig, columns: Sequence[str]) -> None:
    """Columns of which nothing was declared -> beta in the catalogue. Safe to repeat: what was declared stays."""
    warehouse, now = warehouse_of(config), datetime.datetime.now(datetime.UTC)
    known = newest_events(read_events(warehouse, config.name))
    for name in columns:
        if name not in known:
            event = Event(at=now, feature=name, state="beta", by="flows.enrich", reason="back-filled")
            append_event(warehouse, config.name, event)


@flow(name="enrich", flow_run_name=flow_run_name)
def enrich(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Days of the warehouse in, the same days with the columns of `features.joined` out.

    Each day is one commit, so a back-fill that is cut short goes on by the same command. What was trained before reads
    the old files; a day that is ingested anew has to be back-filled again.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        start: First day; None: the first of the table.
        end: Last day; None: the last of the table.
        again: Writes days that have the columns from the same side source, too.
    """
    settings = load(config, overrides)
    result = tasks.enrich.with_options(assets=[table_asset(settings)])(settings, start, end, again)
    declare(settings, result.columns)
    logger = get_run_logger()
    if result.days_skipped:
        logger.info("skipped: %s days have these columns from the same side source", len(result.days_skipped))
    if result.days_without:
        logger.info("%s days stay as they are: the side source has no row of them", len(result.days_without))
    if result.matched_share is not None:
        logger.info("%s of the keys were found", f"{result.matched_share:.1%}")
    return {
        "status": "ok" if result.days_written else "skipped",
        "table": result.snapshot.table,
        "snapshot_id": result.snapshot.snapshot_id,
        "columns": list(result.columns),
        "days_written": len(result.days_written),
        "days_skipped": len(result.days_skipped),
        "days_without": len(result.days_without),
        "rows": result.rows,
        "matched_share": result.matched_share,
        "bytes_written": result.bytes_written,
    }


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(enrich)

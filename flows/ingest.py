"""Flow: logs or files -> warehouse days."""

import datetime
from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger

from flows.runtime.pages import table_asset
from pipeline.config import RunConfig, load
from pipeline.extraction.intake import held_back_name
from pipeline.extraction.writing import quarantine_name
from pipeline.jobs.tables.checks import checks_result
from pipeline.jobs.training import tasks
from pipeline.jobs.training.summary import flow_run_name


@flow(name="ingest", flow_run_name=flow_run_name)
def ingest(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    day: datetime.date | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Source rows in, a snapshot with their days replaced out.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        day: The one day to write; None writes all days of the source.
        again: Writes days that stand in the warehouse already, too.
    """
    settings = load(config, overrides)
    ingested = tasks.ingest.with_options(assets=[table_asset(settings)])
    result = ingested(settings, () if day is None else (day,), again)
    logger = get_run_logger()
    if result.days_skipped:
        logger.info("skipped: %s days stand in the warehouse from the same input", len(result.days_skipped))
    if result.days_elsewhere:
        logger.info("%s other days stay in the table: this source does not have them", result.days_elsewhere)
    if result.days_held:
        logger.warning(
            "%s days broke a rule and are held in table %s", len(result.days_held), held_back_name(settings.name)
        )
    for reason, rows in result.quarantined.items():
        logger.warning("quarantined: %s rows, %s; see table %s", f"{rows:,}", reason, quarantine_name(settings.name))
    touched = sorted([*result.days_written, *result.days_skipped, *result.days_held])
    return {
        "status": "ok" if result.days_written else "skipped",
        "table": result.snapshot.table,
        "snapshot_id": result.snapshot.snapshot_id,
        "rows": result.rows,
        "days_written": len(result.days_written),
        "days_skipped": len(result.days_skipped),
        "days_held": len(result.days_held),
        "first_day": str(touched[0]),
        "last_day": str(touched[-1]),
        "quarantined": dict(result.quarantined),
        "quarantined_rows": sum(result.quarantined.values()),
        "unmatched_lookups": dict(result.unmatched),
        "left_out_rows": sum(rows.left_out for rows in result.by_day.values()),
        "by_day": {f"{day}": rows.model_dump() for day, rows in result.by_day.items()},
        "outcomes": {label: joined.model_dump() for label, joined in result.outcomes.items()},
        "checks": checks_result(settings, result.checked),
    }


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(ingest)

"""Flow: warehouse days -> their scores."""

import datetime
from collections.abc import Mapping
from typing import Any

from prefect import flow, get_run_logger
from pydantic import PositiveInt

from pipeline.config import RunConfig, load
from pipeline.jobs.training import tasks
from pipeline.jobs.training.summary import flow_run_name


@flow(name="score", flow_run_name=flow_run_name)
def score(
    config: RunConfig | str = "configs/demo.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    version: PositiveInt | None = None,
    again: bool = False,
) -> dict[str, Any]:
    """Days of the warehouse in, a probability for each of their rows in the table NAME_scores out.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        start: First day; None: the first of the table.
        end: Last day; None: the last of the table.
        version: Version that scores; None: the champion.
        again: Scores days that this version has scored already, too.
    """
    settings = load(config, overrides)
    result = tasks.score(settings, start, end, version, again)
    logger = get_run_logger()
    if result.days:
        logger.info("%s scores are in table %s of the warehouse", f"{result.rows:,}", result.written.table)
    if result.skipped:
        logger.info(
            "skipped: %s days have scores of version %s and the same rows; again=true scores them anew",
            len(result.skipped),
            result.version,
        )
    return {
        "status": "ok" if result.days else "skipped",
        "model": settings.model_name,
        "version": result.version,
        "days": [str(day) for day in result.days],
        "skipped_days": [str(day) for day in result.skipped],
        "rows": result.rows,
        "table": result.written.table,
        "snapshot_id": result.written.snapshot_id,
        "source_snapshot_id": result.source.snapshot_id,
        "rows_per_second": result.rows_per_second,
        "mean_probability": result.mean_probability,
    }


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(score)

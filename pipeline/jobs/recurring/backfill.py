"""A backfill: past days written side by side, and the summary of each."""

import contextvars
import datetime
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any

from pipeline.data.config import SplitConfig
from pipeline.errors import ConfigError, EmptyDatasetError, keep_if_failed
from pipeline.extraction.extract import IngestResult, source_days
from pipeline.jobs.console import step
from pipeline.jobs.ingest.ingest import make_source_context, write_days
from pipeline.jobs.workspace import Workspace

PORTIONS = 4
"""Portions per writer. Several keep the progress bar moving and the writers equally busy."""


@step("list the days")
def list_days(
    workspace: Workspace, start: datetime.date | None, end: datetime.date | None, work: str
) -> list[datetime.date]:
    """Returns the days of a range that exist: in the table if work is `train`, else in the source. Only reads."""
    config = workspace.config
    if start is not None and end is not None and start > end:
        raise ConfigError("argument 'start'", f"a day up to end={end}", f"{start}", "Swap the two.")
    warehouse = workspace.warehouse
    if work == "train" or config.source.table is not None:
        days = list(warehouse.day_rows(warehouse.current(config.name)))
    else:
        days = source_days(make_source_context(workspace))
    found = [day for day in days if (start is None or start <= day) and (end is None or day <= end)]
    if not found:
        known = f"{days[0]} to {days[-1]}" if days else "none at all"
        raise EmptyDatasetError("days to backfill", f"some between {start} and {end}", known, "Name other days.")
    return found


@step("write the days")
def write_days_side_by_side(
    workspace: Workspace, days: Sequence[datetime.date], side_by_side: int, force: bool
) -> dict[str, Any]:
    """Source days -> warehouse days. Safe to repeat: a day is written as a whole or not at all."""
    config = workspace.config
    size = max(len(days) // (side_by_side * PORTIONS), 1)
    portions = [tuple(days[first : first + size]) for first in range(0, len(days), size)]
    totals: dict[str, Any] = {"days_written": 0, "days_skipped": 0, "days_held": 0, "rows": 0, "quarantined_rows": 0}
    held: set[datetime.date] = set()
    with (
        keep_if_failed(held=held),
        workspace.lock(workspace.ingest_lock),
        workspace.console.progress("days") as progress,
    ):

        def done(found: IngestResult) -> None:
            totals["days_written"] += len(found.days_written)
            totals["days_skipped"] += len(found.days_skipped)
            totals["days_held"] += len(found.days_held)
            held.update(found.days_held)
            totals["rows"] += found.rows
            totals["quarantined_rows"] += sum(found.quarantined.values())
            finished = totals["days_written"] + totals["days_skipped"] + totals["days_held"]
            progress("ingest", finished, len(days))

        if not workspace.warehouse.has_table(config.name):  # otherwise two writers would create it
            done(write_days(workspace, portions.pop(0), force, _ignore_progress))
        with ThreadPoolExecutor(side_by_side, thread_name_prefix="ingest") as pool:
            running = [
                pool.submit(contextvars.copy_context().run, write_days, workspace, portion, force, _ignore_progress)
                for portion in portions
            ]
            try:
                for future in as_completed(running):
                    done(future.result())
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                ended = [one for one in running if not one.cancelled() and one.exception() is None]
                held.update(day for one in ended for day in one.result().days_held)
                raise
    if totals["days_held"]:
        workspace.console.log.warning("%s days broke a rule and are held back", totals["days_held"])
    return totals | {"held": [f"{day}" for day in sorted(held)]}


def _ignore_progress(what: str, done: int, total: int) -> None:
    """Drops the progress of single portions: the bar counts days."""


def list_days_after_first_model(split: SplitConfig, days: Sequence[datetime.date]) -> list[datetime.date]:
    """Returns the days after those of the first model.

    Raises:
        EmptyDatasetError: If there are none.
    """
    last = split.hash.last_day if split.hash else None
    found = [day for day in days if last is None or day > last]
    if not found:
        raise EmptyDatasetError(
            "days to train on", f"some after {last}, the last one of split.hash.days", "none", "Name a later end."
        )
    return found


def describe_day(result: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the summary's entry of a day."""
    champion, judged = result["champion_eval"] or {}, result.get("judged")
    gate = judged["gate"] if judged else result["gate"]
    return {
        "day": result["day"],
        "champion_ne": champion.get("ne"),
        "champion_calibration": champion.get("calibration"),
        "training": result["decision"]["training"],
        "gate": gate and gate["decision"],
        "model": result["model"],
        "mlflow_run_id": result["mlflow_run_id"],
    }


def describe_backfill(result: Mapping[str, Any]) -> str:
    """Returns the summary as one line."""
    parts = [f"{result['days']} days"]
    if "days_written" in result:
        parts.append(
            f"{result['days_written']} written ({result['rows']:,} rows), {result['days_skipped']} were there before"
        )
    if "days_trained" in result:
        parts.append(
            f"{result['days_trained']} trained, {result['days_judged']} evaluated only, "
            f"{result['trainings_skipped']} were done before"
        )
    return "; ".join(parts)

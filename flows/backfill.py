"""Flow: a range of past days -> each of them in the warehouse, and a champion trained on each in turn."""

import contextvars
import datetime
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Literal

from prefect import flow, get_run_logger, task
from prefect.cache_policies import NO_CACHE
from pydantic import PositiveInt

from flows.recurring import recurring
from pipeline.config import RunConfig, load
from pipeline.errors import ConfigError, EmptyDatasetError
from pipeline.extraction.extract import IngestResult
from pipeline.extraction.opening import source_days
from pipeline.jobs.console import Progress
from pipeline.jobs.recurring.day import require_hash_split
from pipeline.jobs.training import tasks
from pipeline.jobs.training.job import alone, warehouse_of
from pipeline.jobs.training.summary import flow_run_name

PORTIONS = 4
"""Parts that each writer's days are cut into, so that progress is seen and none waits long for another."""


@flow(name="backfill", flow_run_name=flow_run_name)
def backfill(
    config: RunConfig | str = "configs/flights_daily.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    work: Literal["both", "ingest", "train"] = "both",
    side_by_side: PositiveInt = 2,
    again: bool = False,
) -> dict[str, Any]:
    """A range of days in; one summary of what was written and trained, out.

    Days are written side by side, then trained in order, each as `flows.recurring` does it, but for those of the
    first model. What is done is skipped, so the same command goes on where it was killed. A day that fails ends the
    training: the next one builds on it. Where there is no champion, the whole source is written first.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value, put over the config.
        start: First day; None: the first one of the source.
        end: Last day; None: the last one of the source.
        work: Writes the days into the warehouse, trains on days that stand there, or both.
        side_by_side: Most days that are written at once.
        again: Writes finished days once more; days that the champion has seen are not trained again.
    """
    settings = load(config, overrides)
    if work != "ingest":
        require_hash_split(settings)
    days = named(settings, start, end, work)
    result: dict[str, Any] = {"status": "skipped", "start": f"{days[0]}", "end": f"{days[-1]}", "days": len(days)}
    if work != "train":
        result |= write(settings, days, side_by_side, again)
    if work != "ingest":
        result |= train(settings, behind_the_first(settings, days))
    done = sum(result.get(key, 0) for key in ("days_written", "days_trained", "days_judged"))
    get_run_logger().info("%s", in_words(result))
    return result | {"status": "ok" if done else "skipped"}


@task(cache_policy=NO_CACHE, task_run_name="name the days")
def named(config: RunConfig, start: datetime.date | None, end: datetime.date | None, work: str) -> list[datetime.date]:
    """The days of the range that there are, in the source or, for training alone, in the warehouse. It only reads."""
    if start is not None and end is not None and start > end:
        raise ConfigError("argument 'start'", f"a day up to end={end}", f"{start}", "Swap the two.")
    warehouse = warehouse_of(config)
    if work == "train":
        days = list(warehouse.day_rows(warehouse.current(config.name)))
    else:
        days = source_days(tasks.source_context(config))
    found = [day for day in days if (start is None or start <= day) and (end is None or day <= end)]
    if not found:
        known = f"{days[0]} to {days[-1]}" if days else "none at all"
        raise EmptyDatasetError("days to back-fill", f"some between {start} and {end}", known, "Name other days.")
    return found


@task(cache_policy=NO_CACHE, task_run_name="write the days")
def write(config: RunConfig, days: Sequence[datetime.date], side_by_side: int, again: bool) -> dict[str, Any]:
    """Days of the source -> days of the warehouse. Safe to repeat: each is written as a whole or not at all."""
    logger = get_run_logger()
    size = max(len(days) // (side_by_side * PORTIONS), 1)
    portions = [tuple(days[first : first + size]) for first in range(0, len(days), size)]
    totals = {"days_written": 0, "days_skipped": 0, "rows": 0, "quarantined_rows": 0}
    with alone(config, tasks.ingest_of(config), logger), Progress(logger, "days") as progress:

        def done(found: IngestResult) -> None:
            totals["days_written"] += len(found.days_written)
            totals["days_skipped"] += len(found.days_skipped)
            totals["rows"] += found.rows
            totals["quarantined_rows"] += sum(found.quarantined.values())
            progress("ingest", totals["days_written"] + totals["days_skipped"], len(days))

        if not warehouse_of(config).has_table(config.name):  # two writers would both make it
            done(tasks.write_days(config, portions.pop(0), again, _silent))
        with ThreadPoolExecutor(side_by_side, thread_name_prefix="ingest") as pool:
            running = [
                pool.submit(contextvars.copy_context().run, tasks.write_days, config, portion, again, _silent)
                for portion in portions
            ]
            try:
                for future in as_completed(running):
                    done(future.result())
            except BaseException:
                pool.shutdown(wait=True, cancel_futures=True)
                raise
    return totals


def _silent(what: str, done: int, total: int) -> None:
    """Takes the reports of single days."""


def behind_the_first(config: RunConfig, days: Sequence[datetime.date]) -> list[datetime.date]:
    """The days that come after those of the first model.

    Raises:
        EmptyDatasetError: If there are none.
    """
    last = config.split.hash.last_day if config.split.hash else None
    found = [day for day in days if last is None or day > last]
    if not found:
        raise EmptyDatasetError(
            "days to train on", f"some after {last}, the last one of split.hash.days", "none", "Name a later end."
        )
    return found


def train(config: RunConfig, days: Sequence[datetime.date]) -> dict[str, Any]:
    """One recurring run a day, in order, up to the first that fails."""
    counts = {"days_trained": 0, "days_judged": 0, "trainings_skipped": 0}
    series: list[dict[str, Any]] = []
    with Progress(get_run_logger(), "days") as progress:
        for number, day in enumerate(days, 1):
            try:
                result = recurring(config, day=day)
            except BaseException:
                get_run_logger().error("stopped at %s: %s", day, in_words({"days": len(days)} | counts))
                raise
            trained = result["decision"]["training"] != "none"
            key = "trainings_skipped" if result["status"] == "skipped" else "days_trained" if trained else "days_judged"
            counts[key] += 1
            series.append(_line(result))
            progress("train", number, len(days), f"{day}, version {result['model']['version']}")
    return counts | {"series": series, "model": series[-1]["model"]}


def _line(result: Mapping[str, Any]) -> dict[str, Any]:
    """What a summary says of a day."""
    champion = result["champion_eval"]
    return {
        "day": result["day"],
        "champion_ne": champion["ne"],
        "champion_calibration": champion["calibration"],
        "training": result["decision"]["training"],
        "gate": result["gate"] and result["gate"]["decision"],
        "model": result["model"],
        "mlflow_run_id": result["mlflow_run_id"],
    }


def in_words(result: Mapping[str, Any]) -> str:
    """The summary as one line."""
    parts = [f"{result['days']} days"]
    if "days_written" in result:
        parts.append(f"{result['days_written']} written ({result['rows']:,} rows), {result['days_skipped']} were there")
    if "days_trained" in result:
        parts.append(
            f"{result['days_trained']} trained, {result['days_judged']} judged only, "
            f"{result['trainings_skipped']} were done"
        )
    return "; ".join(parts)


if __name__ == "__main__":
    from flows.runtime import cli

    cli.main(backfill)

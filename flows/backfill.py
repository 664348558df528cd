"""Flow: writes a range of past days and trains a champion on each in turn."""

if __name__ == "__main__":  # before the imports: the command starts servers that load at the same time
    from flows.runtime.front import command

    command("backfill")

import datetime
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import PositiveInt

from flows.recurring import recurring
from flows.runtime.flow import flow, open_workspace
from pipeline.config import RunConfig, load
from pipeline.errors import keep_if_failed
from pipeline.jobs.ingest.ingest import ingest_event_tables
from pipeline.jobs.recurring.backfill import (
    describe_backfill,
    describe_day,
    list_days,
    list_days_after_first_model,
    write_days_side_by_side,
)
from pipeline.jobs.recurring.day import require_hash_split
from pipeline.jobs.recurring.run import shorten_day
from pipeline.jobs.workspace import Workspace


@flow("backfill")
def backfill(
    config: RunConfig | str = "configs/flights_daily.yaml",
    overrides: Mapping[str, Any] | None = None,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    work: Literal["both", "ingest", "train"] = "both",
    side_by_side: PositiveInt = 2,
    force: bool = False,
) -> dict[str, Any]:
    """Writes a range of past days and trains a champion on each in turn.

    Writes several days at once, then trains on them in order. Each day is trained as `flows.recurring` does it. Days
    that the first model was trained on are left out. The same command resumes an interrupted backfill and skips what
    is done. A failed day ends the training, because the next day builds on it. Without a champion, the whole source is
    written first.

    Args:
        config: The run's config, or the path of its YAML file.
        overrides: Dotted key -> value; overrides the config.
        start: First day; None: the first day of the source.
        end: Last day; None: the last day of the source.
        work: ingest only writes days, train only trains on days that the warehouse has, both does both.
        side_by_side: Maximum number of days written at once.
        force: Rewrites finished days. Days that the champion has seen are never trained again.
    """
    workspace = open_workspace(load(config, overrides))
    if work != "ingest":
        require_hash_split(workspace.config.split)
    days = list_days(workspace, start, end, work)
    result: dict[str, Any] = {"status": "skipped", "start": f"{days[0]}", "end": f"{days[-1]}", "days": len(days)}
    if work != "train":
        result["events"] = ingest_event_tables(workspace, force=False)
        with keep_if_failed(events=result["events"]):
            result |= write_days_side_by_side(workspace, days, side_by_side, force)
    if work != "ingest":
        with keep_if_failed(**result):
            result |= train_in_order(workspace, overrides, list_days_after_first_model(workspace.config.split, days))
    done = sum(result.get(key, 0) for key in ("days_written", "days_trained", "days_judged"))
    workspace.console.log.info("%s", describe_backfill(result))
    return result | {"status": "ok" if done else "skipped"}


def train_in_order(
    workspace: Workspace, overrides: Mapping[str, Any] | None, days: Sequence[datetime.date]
) -> dict[str, Any]:
    """Runs `recurring` for each day in order and stops at the first failure."""
    counts = {"days_trained": 0, "days_judged": 0, "trainings_skipped": 0}
    series: list[dict[str, Any]] = []
    verdicts: list[dict[str, Any]] = []
    with keep_if_failed(verdicts=verdicts), workspace.console.progress("days") as progress:
        for number, day in enumerate(days, 1):
            try:
                result = recurring(
                    workspace.config, overrides, day=day, from_source=False
                )  # the days have been written
            except BaseException:
                workspace.console.log.error("stopped at %s: %s", day, describe_backfill({"days": len(days)} | counts))
                raise
            trained = result["decision"]["training"] != "none"
            key = "trainings_skipped" if result["status"] == "skipped" else "days_trained" if trained else "days_judged"
            counts[key] += 1
            series.append(describe_day(result))
            verdicts.append(shorten_day(result))
            progress("train", number, len(days), f"{day}, version {result['model']['version']}")
    return counts | {"series": series, "verdicts": verdicts, "model": series[-1]["model"]}

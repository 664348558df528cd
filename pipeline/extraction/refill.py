"""Backfills the days that an ingest writes. Trainings read these columns from the table."""

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.extraction.enrich import EnrichResult, enrich, fillable_columns
from pipeline.transforms.schema import FeatureJoin
from storage.warehouse import Warehouse


@dataclass(frozen=True)
class Refill:
    """Columns that feature sources have for the days of an ingest."""

    columns: Mapping[FeatureJoin, Mapping[datetime.date, set[str]]]

    def columns_of(self, day: datetime.date) -> set[str]:
        """Returns the columns that can be backfilled into a day."""
        return {name for days in self.columns.values() for name in days.get(day, ())}


def plan_refill(
    joined: Sequence[FeatureJoin],
    warehouse: Warehouse,
    root: Path,
    backfilled: Mapping[datetime.date, Collection[str]],
    warn: Callable[[str], None],
) -> Refill:
    """Finds the columns to backfill: stored columns, and columns that a day would lose.

    Args:
        backfilled: Day of the ingest -> columns that a backfill has written into the table's version of it.
        warn: Called for a feature source that cannot be read.
    """
    there = {name for names in backfilled.values() for name in names}
    wanted = [source for source in joined if source.stored or any(source.may_add(name) for name in there)]
    found = fillable_columns(wanted, warehouse, root, backfilled, warn)
    added = {one: {name for names in days.values() for name in names} for one, days in found.items()}
    return Refill({one: days for one, days in found.items() if one.stored or there & added[one]})


def refill_days(
    refill: Refill,
    warehouse: Warehouse,
    table: str,
    root: Path,
    written: Collection[datetime.date],
    unchanged: Mapping[datetime.date, Collection[str]],
    report: Callable[[int, int], None],
) -> EnrichResult | None:
    """Backfills the days written, and other days that lack a column. Returns None if there are no such days.

    Args:
        unchanged: Day that the ingest did not write -> columns that a backfill has written into it.
    """
    days = {day for day in written if refill.columns_of(day)}
    days |= {day for day, names in unchanged.items() if refill.columns_of(day).difference(names)}
    if not days:
        return None
    return enrich(list(refill.columns), warehouse, table, root, report=report, only=days)

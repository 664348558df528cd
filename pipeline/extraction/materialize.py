"""Materializes the days that an ingest writes. Trainings read these columns from the table."""

import datetime
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.extraction.data_loss import StoredDay
from pipeline.extraction.enrich import EnrichResult, enrich, fillable_columns
from pipeline.transforms.joins import AnySource, FeatureJoin
from storage.warehouse import Warehouse


@dataclass(frozen=True)
class MaterializationPlan:
    """Columns that feature sources have for the days of an ingest."""

    columns: Mapping[AnySource, Mapping[datetime.date, set[str]]]

    def columns_of(self, day: datetime.date, sources: Collection[str] | None = None) -> set[str]:
        """Returns the columns that can be materialized in a day, from all feature sources or from those named."""
        of = [days for one, days in self.columns.items() if sources is None or name_of(one) in sources]
        return {name for days in of for name in days.get(day, ())}


def name_of(source: AnySource) -> str:
    """Returns a name for notes. Several histories and windows may read one table."""
    return source.name if isinstance(source, FeatureJoin) else f"{source.place} {', '.join(source.added_names())}"


def plan_materialization(
    joined: Sequence[AnySource],
    warehouse: Warehouse,
    root: Path,
    materialized: Mapping[datetime.date, Collection[str]],
    warn: Callable[[str], None],
) -> MaterializationPlan:
    """Finds the columns to materialize: stored columns, and columns that a day would lose.

    Args:
        materialized: Day of the ingest -> columns that a materialization has written into the table's version of it.
        warn: Called for a feature source that cannot be read.
    """
    there = {name for names in materialized.values() for name in names}
    wanted = [source for source in joined if source.stored or any(source.may_add(name) for name in there)]
    found = fillable_columns(wanted, warehouse, root, materialized, warn)
    added = {one: {name for names in days.values() for name in names} for one, days in found.items()}
    return MaterializationPlan({one: days for one, days in found.items() if one.stored or there & added[one]})


def materialize_days(
    plan: MaterializationPlan,
    warehouse: Warehouse,
    table: str,
    root: Path,
    written: Collection[datetime.date],
    unchanged: Mapping[datetime.date, StoredDay],
    report: Callable[[int, int], None],
) -> EnrichResult | None:
    """Materializes the days written, and others that an earlier ingest was to materialize but could not.

    Days from before a feature source was stored are left to `flows.enrich`. Returns None if nothing is to be done.

    Args:
        unchanged: Days that the ingest did not write.
    """
    days = {day for day in written if plan.columns_of(day)}
    for day, stored in unchanged.items():
        if stored.note is not None and plan.columns_of(day, stored.note.refill).difference(stored.materialized):
            days.add(day)
    if not days:
        return None
    return enrich(list(plan.columns), warehouse, table, root, report=report, only=days)

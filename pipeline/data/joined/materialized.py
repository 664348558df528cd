"""Lists the columns that were materialized in a table, and checks that days have them before they are read."""

import datetime
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path

from pipeline.data.day_notes import materialized_columns
from pipeline.data.joined.source import FeatureSource, pin_sources
from pipeline.errors import ConfigError, ContractError
from pipeline.transforms.joins import AnySource
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse

COLUMN = "dlrm.joined.column."
"""Prefix of a property for each materialized column. Two writers that add one each keep both."""


def written_columns(warehouse: Warehouse, table: str) -> set[str]:
    """Returns the columns that were materialized, in some days or all."""
    properties = warehouse.table(table).properties
    return {key.removeprefix(COLUMN) for key in properties if key.startswith(COLUMN)}


def note_columns(warehouse: Warehouse, table: str, names: Iterable[str]) -> None:
    """Notes columns as materialized, in one commit."""
    new = sorted(set(names) - written_columns(warehouse, table))
    if new:
        warehouse.set_properties(table, {f"{COLUMN}{name}": "1" for name in new})


def require_materialized(
    joined: Sequence[AnySource],
    warehouse: Warehouse,
    snapshot: SnapshotRef,
    columns: Collection[str],
    days: Collection[datetime.date],
    root: Path,
) -> None:
    """Refuses days in which the stored columns to read are not materialized.

    Their values would all be null. That is allowed only on a day without rows in a feature source that has later days.

    Args:
        columns: Columns to read.
        days: Days to read.
        root: Folder that relative paths start from.
    Raises:
        ConfigError: If a day lacks a column.
    """
    stored = [source for source in joined if source.stored]
    written = written_columns(warehouse, snapshot.table) if stored else set()
    noted = materialized_columns(warehouse, snapshot) if written else {}
    for source in stored:
        read = [name for name in columns if name in written and source.may_add(name)]
        missing = sorted(day for day in days if not noted.get(day, set()).issuperset(read))
        passed = _days_passed(source, warehouse, root, missing)
        missing = [day for day in missing if day not in passed]
        if missing:
            span = f"{missing[0]}" if len(missing) == 1 else f"{len(missing)} days, the first is {missing[0]}"
            raise ConfigError(
                f"{source.place} (stored)", f"{', '.join(read)} materialized in each day",
                f"no materialization of {span}", "Run `python -m flows.enrich` with this config.",
            )  # fmt: skip


def _days_passed(
    source: AnySource, warehouse: Warehouse, root: Path, days: Collection[datetime.date]
) -> set[datetime.date]:
    """Returns the days without rows in a feature source that has later days. Newer days may still get their rows."""
    if not days or source.day_column is None:
        return set()
    try:
        (pinned,) = pin_sources([source], root, warehouse)
        there = FeatureSource(pinned, warehouse).days()
    except ContractError:  # the source is gone
        return set()
    return {day for day in days if there and day not in there and day < max(there)}

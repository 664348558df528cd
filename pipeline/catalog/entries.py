"""The feature catalog: one entry for each feature of a table."""

import datetime
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel

from pipeline.catalog.events import Event, State, newest_events, state_since
from pipeline.catalog.usage import ColumnImportance, Usage
from pipeline.data.present import today
from storage.arrow import is_list, is_text
from storage.keys import is_key, map_names
from storage.layout.columns import StoredColumn

RECENT_DAYS = 7
"""Coverage and lengths are means over this many newest days."""


class FeatureDay(BaseModel, frozen=True):
    """Statistics of a feature on one day, measured by the ingest."""

    day: datetime.date
    rows: int
    present: int
    mean_length: float | None
    distinct: int | None
    drift: float | None


class Entry(BaseModel, frozen=True):
    """A feature in the catalog."""

    name: str
    kind: str
    """number, id, ids, text or other."""
    state: State
    """The declared state. A column without a declaration is active."""
    since: datetime.date | None
    """Day on which that state was declared. Without a declaration, the first day with the column in its files."""
    owner: str | None = None
    description: str | None = None
    reason: str | None = None
    alternatives: tuple[str, ...] = ()
    stored: bool
    """Whether the table has the column."""
    bytes: int
    """Compressed bytes in the files of the snapshot, from 257 files on an estimate."""
    models: tuple[str, ...]
    """Model versions that read it, with their aliases."""
    served: bool
    """Whether one of these versions has an alias, such as the champion."""
    runs: int
    """Number of training runs that read it."""
    last_read: datetime.datetime | None
    """Start of the newest of these runs."""
    last_run: str | None
    importance: ColumnImportance | None
    """Feature importance in the newest run that measured it."""
    coverage: float | None
    """Share of rows with a value on the newest days. None: not measured."""
    mean_length: float | None
    distinct: int | None
    """Distinct values on the newest day."""
    drift: float | None
    """Population stability index against earlier days, on the newest day that has one."""
    days: tuple[FeatureDay, ...] = ()
    """The newest measured days, oldest first."""


def build_entries(
    schema: pa.Schema,
    leave_out: Collection[str],
    log: Sequence[Event],
    usage: Usage,
    stored: Mapping[str, StoredColumn],
    profile: pa.Table,
    empty: Collection[str] = (),
) -> list[Entry]:
    """Returns an entry for each column of a table, measured key of a map, and declared feature without one, by name.

    Args:
        schema: Columns of the table.
        leave_out: Columns that are not features: day and label.
        stored: Size of the columns in the files.
        profile: Statistics by day and column.
        empty: Columns known to have no values, for those without a profile.
    """
    declared = newest_events(log)
    days = _days(profile)
    kinds = dict(zip(profile["column"].to_pylist(), profile["kind"].to_pylist(), strict=True))
    present = {*schema.names, *measured_keys(schema, profile)}
    names = sorted((present - {*leave_out}) | {*declared})
    found = []
    for name in names:
        event, runs, measured = declared.get(name), usage.runs_of(name), days.get(name, ())
        column = stored.get(name)
        kind = event.kind if event is not None else None
        if kind is None:
            kind = kinds.get(name) or (kind_of(schema.field(name).type) if name in schema.names else "other")
        seen = [one.day for one in measured if one.present] + ([column.first_day] if column is not None else [])
        first = state_since(log, name) or min(seen, default=None)
        declaration = event.model_dump(include={"owner", "description", "reason", "alternatives"}) if event else {}
        statistics = _statistics(measured)
        if statistics["coverage"] is None and name in empty:
            statistics["coverage"] = 0.0
        found.append(
            Entry(
                name=name,
                kind=kind,
                state="active" if event is None else event.state,
                since=first,
                stored=name in present,
                bytes=column.bytes if column is not None else 0,
                models=tuple(f"{version}" for version in usage.versions_of(name)),
                served=bool(usage.served(name)),
                runs=len(runs),
                last_read=runs[0].at if runs else None,
                last_run=runs[0].name if runs else None,
                importance=next((run.importance[name] for run in runs if name in run.importance), None),
                days=measured,
                **declaration,
                **statistics,
            )
        )
    return found


def measured_keys(schema: pa.Schema, profile: pa.Table) -> list[str]:
    """Returns the columns such as `dense_17` that are keys of maps, of those that have statistics."""
    maps = map_names(schema)
    return sorted(name for name in pc.unique(profile["column"]).to_pylist() if is_key(name, maps)) if maps else []


def kind_of(kind: pa.DataType) -> str:
    """Returns the kind of a column by its type alone."""
    if is_list(kind):
        return "ids" if pa.types.is_integer(kind.value_type) or kind_of(kind.value_type) == "text" else "other"
    if is_text(kind):
        return "text"
    if pa.types.is_integer(kind):
        return "id"
    return "number" if pa.types.is_floating(kind) or pa.types.is_decimal(kind) else "other"


def _days(profile: pa.Table) -> dict[str, tuple[FeatureDay, ...]]:
    found: dict[str, list[FeatureDay]] = {}
    for row in profile.sort_by([("day", "ascending")]).to_pylist():
        found.setdefault(row["column"], []).append(
            FeatureDay.model_validate({key: row[key] for key in FeatureDay.model_fields})
        )
    return {name: tuple(days) for name, days in found.items()}


def _statistics(days: Sequence[FeatureDay]) -> dict[str, Any]:
    """Statistics over the newest days that have begun."""
    limit = today()
    days = [day for day in days if day.day <= limit]
    recent = days[-RECENT_DAYS:]
    rows, present = sum(day.rows for day in recent), sum(day.present for day in recent)
    lengths = [(day.mean_length, day.present) for day in recent if day.mean_length is not None and day.present]
    weight = sum(count for _, count in lengths)
    return {
        "coverage": present / rows if rows else None,
        "mean_length": sum(length * count for length, count in lengths) / weight if weight else None,
        "distinct": recent[-1].distinct if recent else None,
        "drift": next((day.drift for day in reversed(days) if day.drift is not None), None),
    }

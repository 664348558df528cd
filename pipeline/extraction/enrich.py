"""Stage entry: writes columns of feature sources into the days of an existing table.

An ingest does so for the days that it writes: trainings read these columns from the table.
"""

import datetime
import hashlib
import json
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from pydantic import BaseModel

from pipeline.data.joined.materialized import note_columns, written_columns
from pipeline.data.joined.reader import SourceColumns
from pipeline.data.joined.source import (
    FeatureSource,
    added_columns,
    contents_by_day,
    pin_sources,
    without_field_ids,
)
from pipeline.data.selection import days_between
from pipeline.errors import ConfigError, ContractError
from pipeline.extraction.data_loss import StoredDay
from pipeline.transforms.joins import AnySource, EventWindow, FeatureJoin, History
from storage.reader import SnapshotReader, SnapshotRef
from storage.snapshot.days import last_notes
from storage.snapshot.writing import replace_days, write_in_commits
from storage.warehouse import Warehouse


class EnrichResult(BaseModel, frozen=True):
    """What a materialization did."""

    snapshot: SnapshotRef
    columns: tuple[str, ...]
    days_written: tuple[datetime.date, ...]
    days_skipped: tuple[datetime.date, ...]
    """Days that already have the columns from the same feature source."""
    days_without: tuple[datetime.date, ...]
    """Days that the feature source has no rows for."""
    rows: int
    matched_share: float | None
    """Share of the rows written that have a match in the feature sources. None: nothing was written."""
    bytes_written: int
    """Size of the files of the days written. Files of other days were not touched."""


@dataclass(frozen=True)
class _Columns:
    """What feature sources add to a table."""

    sources: list[FeatureSource]
    added: pa.Schema
    kept: pa.Schema
    """The table's other columns."""
    existing: tuple[str, ...]
    """All columns of the table."""
    new: bool
    """Whether the table has never had any of the added columns, so nothing can have read them."""

    @property
    def written(self) -> pa.Schema:
        return pa.schema([*self.kept, *self.added])


@dataclass(frozen=True)
class _Plan:
    """The days of a materialization, by what happens to them."""

    rows: Mapping[datetime.date, int]
    """Day -> its rows, for all days in the range."""
    due: list[datetime.date]
    without: list[datetime.date]
    """Days that the feature sources have no rows for."""
    notes: Mapping[datetime.date, dict[str, Any]]
    """Due day -> column -> identity of the feature source that it is written from."""


def enrich(
    joined: Sequence[AnySource],
    warehouse: Warehouse,
    table: str,
    root: Path,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    force: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
    only: Collection[datetime.date] | None = None,
) -> EnrichResult:
    """Writes the columns of feature sources into days of a table, whose other columns stay.

    Memory holds what the warehouse needs to write, and one day of each feature source. Those with times are sorted on
    disk.

    Args:
        root: Folder that relative paths start from.
        start: First day. None: the table's first.
        end: Last day. None: the table's last.
        force: Also writes days that are done, and overwrites values that no materialization wrote.
        only: The only days to write. None: all between start and end.
    Raises:
        ConfigError: If there is no feature source, its columns or keys do not fit the table, or a day has values in
            the columns that no materialization wrote.
        ConflictError: If another writer wrote a day meanwhile. The days before it stay done.
        DataError: If a feature source has a key twice. The days before stay done.
        EmptyDatasetError: If the table has no day in the range.
    """
    if not joined:
        raise ConfigError(
            "features.joined, histories and windows", "one to materialize, which has stored: true", "none",
            "Set stored: true where its columns are to be written into the days.",
        )  # fmt: skip
    snapshot, columns = warehouse.current(table), _resolve_columns(joined, warehouse, table, root)
    rows = {day: count for day, count in warehouse.day_rows(snapshot).items() if only is None or day in only}
    days = days_between(rows, start, end, "days to materialize")
    plan = _plan_days(columns, warehouse, snapshot, days, force)
    if not force:
        _refuse_values(warehouse, snapshot, columns, plan.due)
    sides = [SourceColumns(source, source.schema.names) for source in columns.sources]
    _write_days(warehouse, snapshot, columns, plan, sides, report)
    after, seen = warehouse.current(table), sum(side.rows for side in sides)
    files = warehouse.day_files(after)
    return EnrichResult(
        snapshot=after,
        columns=tuple(columns.added.names),
        days_written=tuple(plan.due),
        days_skipped=tuple(day for day in days if day not in (*plan.due, *plan.without)),
        days_without=tuple(plan.without),
        rows=sum(days[day] for day in plan.due),
        matched_share=sum(side.matched for side in sides) / seen if seen else None,
        bytes_written=sum(file.file_size_in_bytes for day in plan.due for file in files[day]),
    )


def fillable_columns(
    joined: Sequence[AnySource],
    warehouse: Warehouse,
    root: Path,
    days: Collection[datetime.date],
    warn: Callable[[str], None],
) -> dict[AnySource, dict[datetime.date, set[str]]]:
    """Returns feature source -> day -> the columns that a materialization could write into the day.

    Args:
        warn: Called for a source that cannot be read. It is left out.
    """
    found: dict[AnySource, dict[datetime.date, set[str]]] = {}
    for source in joined:
        try:
            sources = [FeatureSource(pinned, warehouse) for pinned in pin_sources([source], root, warehouse)]
            found[source] = {day: set(of) for day, of in _identities(sources, None, days, warehouse).items()}
        except ContractError as error:
            warn(f"columns of {source.place} are not materialized: {error}")
    return found


def _resolve_columns(joined: Sequence[AnySource], warehouse: Warehouse, table: str, root: Path) -> _Columns:
    """Checks the columns against the table: a column that an ingest wrote must not be overwritten."""
    sources = [FeatureSource(pinned, warehouse) for pinned in pin_sources(joined, root, warehouse)]
    known = {field.name for schema in warehouse.table(table).schemas().values() for field in schema.fields}
    stored = warehouse.table(table).schema().as_arrow()  # a column may be gone, or renamed, since the last commit
    ours = written_columns(warehouse, table)
    added = added_columns(sources, pa.schema([field for field in stored if field.name not in ours]))
    note_columns(warehouse, table, added.names)
    kept = [pa.field(field.name, without_field_ids(field.type)) for field in stored if field.name not in added.names]
    plain = pa.schema([pa.field(field.name, without_field_ids(field.type)) for field in added])
    return _Columns(sources, plain, pa.schema(kept), tuple(stored.names), known.isdisjoint(added.names))


def _plan_days(
    columns: _Columns, warehouse: Warehouse, rows: SnapshotRef, days: Mapping[datetime.date, int], force: bool
) -> _Plan:
    """Finds the days to write: those that lack a column, or have it from another feature source."""
    noted, wanted = warehouse.day_notes(rows.table), _identities(columns.sources, rows, days, warehouse)
    names = columns.added.names
    force = force or not set(names).issubset(columns.existing)
    without = [day for day in days if not wanted[day] and not set(noted.get(day, {})) & set(names)]

    def is_due(day: datetime.date) -> bool:
        known = noted.get(day, {})
        return force or any(known.get(name) != wanted[day].get(name) for name in names)

    due = [day for day in days if day not in without and is_due(day)]
    others = {day: {name: value for name, value in noted.get(day, {}).items() if name not in names} for day in due}
    return _Plan(days, due, without, {day: others[day] | wanted[day] for day in due})


def _write_days(
    warehouse: Warehouse,
    snapshot: SnapshotRef,
    columns: _Columns,
    plan: _Plan,
    sides: Sequence[SourceColumns],
    report: Callable[[int, int], None],
) -> None:
    """Writes the due days. Columns that are new leave the content that models have learned."""
    contents = warehouse.day_contents(snapshot) if columns.new else {}
    reader = _open_reader(warehouse, snapshot, columns.kept.names)
    identities = warehouse.written_days(snapshot.table)
    done, total = Counter[datetime.date](), sum(plan.rows[day] for day in plan.due)

    def write(days: list[datetime.date]) -> None:
        rows, before = sum(plan.rows[day] for day in days), done.total()
        batches = _join_rows(reader, days, sides, columns.written, lambda count: report(before + count, total))
        replace_days(
            warehouse, snapshot.table, {day: identities.get(day, "") for day in days}, columns.written, batches, rows,
            made_of=snapshot, anew=columns.added.names, by_day=True, same=contents,
            notes={day: plan.notes[day] for day in days},
        )  # fmt: skip
        done.update({day: plan.rows[day] for day in days})

    write_in_commits(plan.due, plan.rows.__getitem__, write)


def _refuse_values(
    warehouse: Warehouse, snapshot: SnapshotRef, columns: _Columns, days: Iterable[datetime.date]
) -> None:
    """Refuses to overwrite values that no materialization wrote, such as those of an ingest that now has the column."""
    noted = last_notes(warehouse.table(snapshot.table))
    for day in days:
        names = [name for name in columns.added.names if name not in noted.get(day, {})]
        names = [name for name in names if name in columns.existing]
        if not names:
            continue
        reader = _open_reader(warehouse, snapshot, names)
        batches = (batch for fragment in reader.fragments([day]) for batch in reader.batches(fragment))
        found = {name for batch in batches for name in names if batch.column(name).null_count < len(batch)}
        if found:
            raise ConfigError(
                f"day {day} of table '{snapshot.table}'", f"no values in {', '.join(sorted(found))}",
                "values that no materialization wrote", "Set `prefix`, or overwrite them with force=true.",
            )  # fmt: skip


def _open_reader(warehouse: Warehouse, snapshot: SnapshotRef, names: Sequence[str]) -> SnapshotReader:
    """Reads rows by the columns that the table has now, because these are written."""
    table = warehouse.table(snapshot.table)
    return SnapshotReader(table, snapshot, names, None, table.schema(), warehouse.cache)


def _join_rows(
    reader: SnapshotReader,
    days: Sequence[datetime.date],
    sides: Sequence[SourceColumns],
    schema: pa.Schema,
    on_rows: Callable[[int], None],
) -> Iterator[pa.RecordBatch]:
    """Yields the rows of days in their order, with the columns of the feature sources."""
    count = 0
    for fragment, batch in ((one, batch) for one in reader.fragments(days) for batch in reader.batches(one)):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for side in sides:
            columns |= dict(zip(side.names, side.look_up(columns, fragment.day), strict=True))
        arrays = [columns[field.name].cast(field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        count += batch.num_rows
        on_rows(count)


def _identities(
    sources: Sequence[FeatureSource], rows: SnapshotRef | None, days: Collection[datetime.date], warehouse: Warehouse
) -> dict[datetime.date, dict[str, str]]:
    """Day -> column -> identity of what it would be written from. Sources without rows of the day are left out.

    Args:
        rows: The table to write into, if it has the days already.
    """
    found: dict[datetime.date, dict[str, str]] = {day: {} for day in days}
    for source in sources:
        dated = source.source.day_column is not None
        inside = source.days() if dated else contents_by_day(source.pinned, warehouse, rows, days)
        for name in source.schema.names:
            declared = _declaration(source, name)
            for day in found.keys() & inside.keys():
                text = json.dumps([*declared, inside[day]])
                found[day][name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _declaration(source: FeatureSource, name: str) -> list[Any]:
    """Returns what the config says of an added column, apart from the content of the source."""
    one, kind = source.source, f"{source.schema.field(name).type}"
    times = [one.time, one.as_of, one.delay_seconds]
    if isinstance(one, EventWindow):
        return [one.made(list(source.added))[name], one.on, kind, *times, one.where]
    if isinstance(one, History):
        return [source.added[name], one.on, kind, *times, one.where, one.last]
    lag = [one.lag_days] if one.lag_days else []
    return [source.added[name], one.on, one.day_column, kind, *lag, *(times if one.as_of is not None else [])]


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

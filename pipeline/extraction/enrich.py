"""Stage entry: columns of side sources into the days of a table that is there already, a day at a time."""

import datetime
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyarrow as pa
from pydantic import BaseModel

from pipeline.data.joined.reader import Side, bare
from pipeline.data.joined.source import SideSource, added_columns, contents, pin
from pipeline.data.selection import days_between
from pipeline.errors import ConfigError
from pipeline.transforms.schema import FeatureJoin
from storage.days import notes
from storage.reader import SnapshotReader, SnapshotRef
from storage.warehouse import Warehouse

COLUMNS = "dlrm.joined.columns"
"""Property of a table: JSON list of the columns that back-fills have written."""


class EnrichResult(BaseModel, frozen=True):
    """What a back-fill did."""

    snapshot: SnapshotRef
    columns: tuple[str, ...]
    days_written: tuple[datetime.date, ...]
    days_skipped: tuple[datetime.date, ...]
    """They have the columns from the same side source."""
    days_without: tuple[datetime.date, ...]
    """The side source has no row of them."""
    rows: int
    matched_share: float | None
    """Share of the rows written whose key the side sources have; None: nothing was written."""
    bytes_written: int
    """Size of the files of the days written; those of other days were not touched."""


def enrich(
    joined: Sequence[FeatureJoin],
    warehouse: Warehouse,
    table: str,
    root: Path,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    again: bool = False,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> EnrichResult:
    """Writes the columns of side sources into days of a table: each day in one commit, all else in it as it was.

    Memory holds what the warehouse does while it writes, and a day of each side source.

    Args:
        root: Folder that relative paths start from.
        start: First day; None: the table's.
        end: Last day; None: the table's.
        again: Writes days that are done, too, and over values that no back-fill wrote.
    Raises:
        ConfigError: If there is no side source, its columns or keys do not fit the table, or a day has values in the
            columns that no back-fill wrote.
        ConflictError: If a day was written by others meanwhile; the days before stay done.
        DataError: If a side source has a key twice; the days before stay done.
        EmptyDatasetError: If the table has no day in the range.
    """
    if not joined:
        raise ConfigError("features.joined", "a side source to back-fill from", "none", "Add one.")
    snapshot, columns = warehouse.current(table), _columns(joined, warehouse, table, root)
    days = days_between(warehouse.day_rows(snapshot), start, end, "days to back-fill")
    noted, wanted = warehouse.day_notes(table), _identities(columns.sources, days, warehouse)
    names, lacking = columns.added.names, not set(columns.added.names).issubset(columns.there)
    without = [day for day in days if not wanted[day] and not set(noted.get(day, {})) & set(names)]
    todo = [
        day for day in days if day not in without and (again or lacking or _due(noted.get(day, {}), wanted[day], names))
    ]
    if not again:
        _refuse_values(warehouse, snapshot, columns, todo)
    sides = [Side(source, source.schema.names) for source in columns.sources]
    reader, identities = _reader(warehouse, snapshot, columns.kept.names), warehouse.written_days(table)
    done, total = 0, sum(days[day] for day in todo)
    for day in todo:
        note = {name: value for name, value in noted.get(day, {}).items() if name not in names} | wanted[day]
        batches = _joined(reader, day, sides, columns.written, partial(_report_from, report, done, total))
        warehouse.replace_days(
            table, {day: identities.get(day, "")}, columns.written, batches, days[day],
            {day: note}, made_of=snapshot,
        )  # fmt: skip
        done += days[day]
    snapshot, seen = warehouse.current(table), sum(side.rows for side in sides)
    files = warehouse.day_files(snapshot)
    return EnrichResult(
        snapshot=snapshot,
        columns=tuple(names),
        days_written=tuple(todo),
        days_skipped=tuple(day for day in days if day not in (*todo, *without)),
        days_without=tuple(without),
        rows=done,
        matched_share=sum(side.matched for side in sides) / seen if seen else None,
        bytes_written=sum(file.file_size_in_bytes for day in todo for file in files[day]),
    )


@dataclass(frozen=True)
class _Columns:
    """What side sources add to a table."""

    sources: list[SideSource]
    added: pa.Schema
    kept: pa.Schema
    """The table's other columns."""
    there: tuple[str, ...]
    """All columns that the table has."""

    @property
    def written(self) -> pa.Schema:
        return pa.schema([*self.kept, *self.added])


def _columns(joined: Sequence[FeatureJoin], warehouse: Warehouse, table: str, root: Path) -> _Columns:
    """Checked against the table: a column that an ingest wrote is not written over."""
    sources = [SideSource(pinned, warehouse) for pinned in pin(joined, root, warehouse)]
    stored = warehouse.table(table).schema().as_arrow()  # a column may be gone, or renamed, since the last commit
    ours = set(json.loads(warehouse.property_of(table, COLUMNS) or "[]"))
    added = added_columns(sources, pa.schema([field for field in stored if field.name not in ours]))
    if not ours.issuperset(added.names):
        warehouse.set_property(table, COLUMNS, json.dumps(sorted(ours.union(added.names))))
    kept = [pa.field(field.name, bare(field.type)) for field in stored if field.name not in added.names]
    plain = pa.schema([pa.field(field.name, bare(field.type)) for field in added])
    return _Columns(sources, plain, pa.schema(kept), tuple(stored.names))


def _refuse_values(
    warehouse: Warehouse, snapshot: SnapshotRef, columns: _Columns, days: Iterable[datetime.date]
) -> None:
    """Values that no back-fill wrote, as of an ingest whose source has the column by now, are not written over."""
    noted = notes(warehouse.table(snapshot.table))
    for day in days:
        names = [name for name in columns.added.names if name not in noted.get(day, {})]
        names = [name for name in names if name in columns.there]
        reader = _reader(warehouse, snapshot, names)
        batches = (batch for fragment in reader.fragments([day]) for batch in reader.batches(fragment))
        found = {name for batch in batches for name in names if batch.column(name).null_count < len(batch)}
        if found:
            raise ConfigError(
                f"day {day} of table '{snapshot.table}'", f"no values in {', '.join(sorted(found))}",
                "some that no back-fill wrote", "Set `prefix`, or write over them with again=true.",
            )  # fmt: skip


def _reader(warehouse: Warehouse, snapshot: SnapshotRef, names: Sequence[str]) -> SnapshotReader:
    """Rows by the columns that the table has now, for it is these that are written."""
    table = warehouse.table(snapshot.table)
    return SnapshotReader(table, snapshot, names, None, table.schema())


def _joined(
    reader: SnapshotReader,
    day: datetime.date,
    sides: Sequence[Side],
    schema: pa.Schema,
    on_rows: Callable[[int], None],
) -> Iterator[pa.RecordBatch]:
    """The rows of a day in their order, with the columns of the side sources."""
    count = 0
    for batch in (batch for fragment in reader.fragments([day]) for batch in reader.batches(fragment)):
        columns = dict(zip(batch.schema.names, batch.columns, strict=True))
        for side in sides:
            columns |= dict(zip(side.names, side.add([batch.column(name) for name in side.on], day), strict=True))
        arrays = [columns[field.name].cast(field.type) for field in schema]
        yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        count += batch.num_rows
        on_rows(count)


def _report_from(report: Callable[[int, int], None], base: int, total: int, rows: int) -> None:
    report(base + rows, total)


def _identities(
    sources: Sequence[SideSource], days: Iterable[datetime.date], warehouse: Warehouse
) -> dict[datetime.date, dict[str, str]]:
    """Day -> column -> what it would be written from; a source without rows of the day has no part in it."""
    found: dict[datetime.date, dict[str, str]] = {day: {} for day in days}
    for source in sources:
        dated = source.source.day_column is not None
        inside = source.days() if dated else dict.fromkeys(found, contents(source.pinned, warehouse))
        for day in found.keys() & inside.keys():
            for name, raw in source.added.items():
                declared = [raw, source.source.on, source.source.day_column, f"{source.schema.field(name).type}"]
                text = json.dumps([*declared, inside[day]])
                found[day][name] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def _due(noted: Mapping[str, str], wanted: Mapping[str, str], names: Sequence[str]) -> bool:
    return any(noted.get(name) != wanted.get(name) for name in names)

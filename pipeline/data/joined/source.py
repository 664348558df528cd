"""Feature sources: files or warehouse tables with columns to join to rows, read a day at a time."""

import datetime
import math
from bisect import bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import BaseModel
from pyiceberg.schema import Schema, assign_fresh_schema_ids

from pipeline.data.formats.csv import refuse_like_names
from pipeline.data.formats.files import Stamp, address_of, find_files, fingerprint, stamp
from pipeline.data.joined.raw import RawRows
from pipeline.data.stored import MICROS, key_type, stored_type, to_key_form, to_micros, to_stored_form
from pipeline.errors import ConfigError, DataError
from pipeline.transforms.joins import AnySource, EventWindow, FeatureJoin, History
from pipeline.transforms.schema import resolve, unknown_column
from storage.arrow import differing_clocks, has_zone, is_list
from storage.filters import check_filter, parse_filter
from storage.reader import DAY, SnapshotRef
from storage.snapshot.pyiceberg_private import to_schema_without_ids
from storage.snapshot.row_filter import compared_columns, keep_rows, make_mask
from storage.warehouse import Warehouse

PLACE = "__place"
"""Column with the place of a row in its batch."""


class PinnedSource(BaseModel, frozen=True):
    """A feature source as it was when the work was planned. Any process can open it."""

    source: AnySource
    files: tuple[str, ...] = ()
    stamps: tuple[Stamp, ...] = ()
    snapshot: SnapshotRef | None = None
    """Snapshot of a source that is a warehouse table."""

    @property
    def where(self) -> str:
        """The source as an error names it."""
        return self.source.place


class SourceRows(NamedTuple):
    """Some rows of a feature source."""

    keys: list[pa.Array]
    """In comparable form."""
    times: pa.Array | None
    """int64 microseconds since 1970. None: the source has no times."""
    values: list[pa.Array]


def pin_sources(sources: Sequence[AnySource], root: Path, warehouse: Warehouse) -> tuple[PinnedSource, ...]:
    """Pins the current state of the sources.

    Args:
        root: Folder that relative paths are relative to.
    Raises:
        ConfigError: If there is no such file.
        StorageError: If there is no such table.
    """
    found = []
    for source in sources:
        if source.table is not None:
            found.append(PinnedSource(source=source, snapshot=warehouse.current(source.table)))
        else:
            assert source.path is not None  # the config requires one of the two
            files = find_files(source.path, root, f"{source.section} path", warehouse.config.catalog)
            names = tuple(address_of(path) for path in files)
            found.append(PinnedSource(source=source, files=names, stamps=tuple(stamp(path) for path in files)))
    return tuple(found)


def source_identity(pinned: PinnedSource, warehouse: Warehouse) -> str:
    """Returns a hash that changes with the rows of a source."""
    if pinned.snapshot is None:
        return fingerprint(pinned.stamps)
    days = warehouse.day_contents(pinned.snapshot)
    return fingerprint({f"{day}": days[day] for day in days})


def contents_by_day(
    pinned: PinnedSource, warehouse: Warehouse, rows: SnapshotRef | None, days: Iterable[datetime.date]
) -> dict[datetime.date, str]:
    """Returns day -> a hash that changes with the rows of a source that may join to the day's rows.

    Of a table that is read as of a time, these are the days that begin before the last row of the day. Otherwise they
    are those of a `day_column`, or all. Of files, the hash changes with each file that has such a row.

    Args:
        rows: The table of the rows. None: any table.
    """
    if pinned.snapshot is not None and pinned.source.as_of is not None and rows is not None:
        return _contents_as_of(pinned, pinned.snapshot, warehouse, rows, days)
    if pinned.source.day_column is None:
        return dict.fromkeys(days, source_identity(pinned, warehouse))
    found = FeatureSource(pinned, warehouse).days()
    return {day: found.get(day, "") for day in days}


def _contents_as_of(
    pinned: PinnedSource, source: SnapshotRef, warehouse: Warehouse, rows: SnapshotRef, days: Iterable[datetime.date]
) -> dict[datetime.date, str]:
    """As `contents_by_day`. Where the metadata do not tell the times of some rows, they may have any."""
    assert pinned.source.time is not None
    assert pinned.source.as_of is not None
    contents = warehouse.day_contents(source)
    earliest = {day: first for day, (first, _) in _bounds(warehouse, source, pinned.source.time, late=True).items()}
    latest = {day: last for day, (_, last) in _bounds(warehouse, rows, pinned.source.as_of).items()}
    ordered = sorted(contents, key=lambda day: (earliest.get(day, -math.inf), day))
    firsts = [earliest.get(day, -math.inf) for day in ordered]
    seen = list(accumulate(ordered, lambda before, day: fingerprint([before, f"{day}", contents[day]]), initial=""))
    delay = MICROS * pinned.source.delay_seconds
    return {day: seen[bisect_right(firsts, latest.get(day, math.inf) - delay)] for day in days}


def _bounds(
    warehouse: Warehouse, reference: SnapshotRef, column: str, late: bool = False
) -> dict[datetime.date, tuple[int, int]]:
    """Returns day -> bounds of a column in microseconds, for days whose metadata have them. `late`: see `to_micros`."""
    found = {day: ends for day, ends in warehouse.day_bounds(reference, column).items() if ends is not None}
    if not found:
        return {}
    kind = warehouse.schema(reference).field(column).type
    micros = to_micros(column, pa.array([end for ends in found.values() for end in ends], kind), late).to_pylist()
    return dict(zip(found, zip(micros[::2], micros[1::2], strict=True), strict=True))


class FeatureSource(RawRows):
    """Rows of a pinned feature source, in the types that the warehouse stores.

    Attributes:
        added: Name of an added column -> its column in the source. Of a window, the columns that it reads.
        kinds: The same name -> type of its values.
        key_kinds: Types of the keys in comparable form.
        schema: The added columns.
        bytes_read: Bytes of the columns read so far, compressed.
    Raises:
        ConfigError: If a configured column is missing or its type cannot be a key.
        DataError: If a file is unreadable or a column cannot be stored.
    """

    def __init__(self, pinned: PinnedSource, warehouse: Warehouse) -> None:
        self.pinned, self.source = pinned, pinned.source
        super().__init__(
            warehouse, pinned.where, pinned.files, pinned.stamps, pinned.snapshot, pinned.source.day_column
        )
        own = [name for name in self.raw.names if not pa.types.is_null(self.raw.field(name).type)]
        named = [self.source.day_column, self.source.time]
        needed = [*self.source.on, *(one for one in named if one is not None)]
        for name in [*needed, *self.source.columns]:
            if name in self.raw.names and name not in own:
                raise DataError(
                    f"{pinned.where}, column '{name}'", "a value in some row, which tells its type", "none",
                    "Write it with a type, such as Parquet's.",
                )  # fmt: skip
        for name in needed:
            if name not in own:
                raise unknown_column(f"{pinned.where}, column", name, own)
        self.key_kinds = [
            key_type(f"{pinned.where}, key '{name}'", self.raw.field(name).type) for name in self.source.on
        ]
        if self.source.time is not None:
            to_micros(f"{pinned.where}, time '{self.source.time}'", pa.array([], self.raw.field(self.source.time).type))
        reserved = {*self.source.on, *named, DAY}
        wanted = resolve(self.source.columns, [name for name in own if name not in reserved], pinned.where)
        prefix = "" if isinstance(self.source, EventWindow) else self.source.prefix
        self.added = {f"{prefix}{name}": name for name in wanted}
        raw = {name: self.raw.field(raw).type for name, raw in self.added.items()}
        self.kinds = {name: stored_type(f"{pinned.where}, column '{name}'", kind) for name, kind in raw.items()}
        self.schema = self._added_schema()
        self.compared, self.keep = self._open_filter()

    def rows(self, day: datetime.date | None, names: Sequence[str]) -> Iterator[SourceRows]:
        """Yields keys and the columns `names` of `added` for batches of the rows that join to a day.

        Args:
            day: None for all rows.
        """
        day = None if day is None else day - self.lag
        for batch in self.batches(self._read_for(names), day):
            yield self._to_rows(batch, names)

    def rows_by_part(self, parts: Collection[str], names: Sequence[str]) -> Iterator[tuple[str, SourceRows]]:
        """As `rows`, for some of `parts`, with their names."""
        for part, batch in self.batches_by_part(self._read_for(names), parts):
            yield part, self._to_rows(batch, names)

    def _read_for(self, names: Sequence[str]) -> list[str]:
        time = [] if self.source.time is None else [self.source.time]
        return list(dict.fromkeys([*self.source.on, *time, *(self.added[name] for name in names), *self.compared]))

    def _to_rows(self, batch: pa.RecordBatch, names: Sequence[str]) -> SourceRows:
        kept, where, time = self._filtered(batch), self.pinned.where, self.source.time
        keys = [to_key_form(f"{where}, key '{name}'", kept.column(name)) for name in self.source.on]
        values = [to_stored_form(kept.column(self.added[name]), self.kinds[name]) for name in names]
        times = None if time is None else to_micros(f"{where}, time '{time}'", kept.column(time), late=True)
        return SourceRows(keys, times, values)

    def _filtered(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Returns the events that the filter keeps. It compares values as the warehouse stores them."""
        if self.keep is None:
            return batch
        compared = [to_stored_form(batch.column(name), kind) for name, kind in self.compared.items()]
        numbered = pa.RecordBatch.from_arrays([*compared, pa.array(np.arange(len(batch)))], [*self.compared, PLACE])
        return batch.take(keep_rows(numbered, self.keep, [PLACE]).column(PLACE))

    def _added_schema(self) -> pa.Schema:
        """Returns the columns that are added. Refuses those of a log that cannot make them."""
        if isinstance(self.source, FeatureJoin):
            return pa.schema(list(self.kinds.items()))
        for name, kind in self.kinds.items():
            number = pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_boolean(kind)
            if is_list(kind) or (isinstance(self.source, EventWindow) and not number):
                expected = "a number" if isinstance(self.source, EventWindow) else "a number, id or text"
                where = f"{self.pinned.where}, column '{name}'"
                raise ConfigError(where, f"{expected} of each event", f"{kind}", "Leave it out of `columns`.")
        if isinstance(self.source, History):
            return pa.schema([(name, pa.large_list(kind)) for name, kind in self.kinds.items()])
        made = self.source.made(list(self.added))
        return pa.schema([(name, pa.int64() if of is None else pa.float64()) for name, (of, _, _) in made.items()])

    def _open_filter(self) -> tuple[dict[str, pa.DataType], pc.Expression | None]:
        """Returns the columns that the filter of events compares, with their stored types, and the filter."""
        if isinstance(self.source, FeatureJoin) or self.source.where is None:
            return {}, None
        text = self.source.where
        for name in (names := compared_columns(parse_filter(text))):
            if name not in self.raw.names:
                raise unknown_column(f"{self.pinned.where}, where, column", name, self.raw.names)
        kinds = {name: stored_type(f"{self.pinned.where}, where", self.raw.field(name).type) for name in names}
        schema = to_filter_schema(map(pa.field, *zip(*kinds.items(), strict=True)))
        check_filter(text, schema)
        return kinds, make_mask(parse_filter(text), schema)[0]

    def days(self) -> dict[datetime.date, str]:
        """Returns day -> a hash that changes with the rows that join to it. Empty for a source without days."""
        return {day + self.lag: content for day, content in self._own_days().items()}

    @property
    def lag(self) -> datetime.timedelta:
        """Time from a day of the source to the day of the rows that read it."""
        return datetime.timedelta(days=self.source.lag_days)

    def _own_days(self) -> dict[datetime.date, str]:
        if self.day_column is None:
            return {}
        if self.pinned.snapshot is not None:
            return self.warehouse.day_contents(self.pinned.snapshot)
        return self.days_of_files()


def added_columns(sides: Sequence[FeatureSource], table: pa.Schema) -> pa.Schema:
    """Returns the columns that the sources add to a table.

    Raises:
        ConfigError: If a column would occur twice, or the table does not have a key or has it in another type.
    """
    found: dict[str, pa.DataType] = {}
    for side in sides:
        for name in side.source.on:
            where = f"{side.pinned.where}, key '{name}'"
            if name not in table.names:
                raise unknown_column(f"{side.pinned.where}, key", name, table.names)
            kinds = [key_type(where, schema.field(name).type) for schema in (table, side.raw)]
            if kinds[0] != kinds[1]:
                raise ConfigError(where, f"{kinds[0]} as in the table", f"{kinds[1]}", "Convert it.")
        if side.source.as_of is not None:
            if side.source.as_of not in table.names:
                raise unknown_column(f"{side.pinned.where}, as_of", side.source.as_of, table.names)
            kind = table.field(side.source.as_of).type
            to_micros(f"{side.pinned.where}, as_of '{side.source.as_of}'", pa.array([], kind))
        repeated = [name for name in side.schema.names if name in table.names or name in found]
        if repeated:
            raise ConfigError(
                side.pinned.where, "columns that the rows do not have", f"existing columns {', '.join(repeated)}",
                "Set `stored: true` if flows.enrich wrote them, otherwise set `prefix`.",
            )  # fmt: skip
        refuse_like_names(side.pinned.where, [*table.names, *found, *side.schema.names])
        found |= {name: side.schema.field(name).type for name in side.schema.names}
    return pa.schema(list(found.items()))


def list_differing_clocks(sides: Iterable[FeatureSource], table: pa.Schema) -> list[str]:
    """Says which sources compare times with a zone with a table's times without one, or the other way round."""
    found = []
    for side in sides:
        at, time = side.source.as_of, side.source.time
        if at is not None and time is not None:
            kinds = {f"as_of '{at}'": table.field(at).type, f"time '{time}'": side.raw.field(time).type}
            found.append(differing_clocks(side.pinned.where, {name: has_zone(kind) for name, kind in kinds.items()}))
    return [note for note in found if note is not None]


def to_filter_schema(columns: Iterable[pa.Field]) -> Schema:
    """Returns columns as an Iceberg schema with fresh field ids."""
    fields = [pa.field(field.name, without_field_ids(field.type)) for field in columns]
    return assign_fresh_schema_ids(to_schema_without_ids(pa.schema(fields)))


def without_field_ids(kind: pa.DataType) -> pa.DataType:
    """Removes field ids from a type: in another table they mean other columns."""
    return pa.list_(without_field_ids(kind.value_type)) if is_list(kind) else kind

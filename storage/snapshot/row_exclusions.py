"""Rows of data files that a read of one day skips: deleted ones, and those of other days."""

import datetime
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
from pydantic import BaseModel
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.types import NestedField

from storage.errors import CorruptFileError
from storage.snapshot.day_rule import EPOCH, DayNumbers, DayRule
from storage.snapshot.deletes import DeletedValues, OtherFormatError, Positions, find_equal, read_positions
from storage.snapshot.parquet import StoredColumns, reading

KEPT_BYTES = 1 << 27
"""Bytes of positions, days and deleted values that are remembered."""


class FileRows(BaseModel, frozen=True):
    """The rows of one day in a data file."""

    path: str
    day: datetime.date
    deletes: tuple[str, ...] = ()
    """Paths of the files that list deleted rows of the data file by position: Parquet, or Puffin with deletion
    vectors."""
    values: tuple[DeletedValues, ...] = ()
    """Files that delete its rows by value."""
    rule: str = ""
    """How rows tell their day, if the file may have rows of other days. Empty: all rows are of the day."""


class ReadCache:
    """Remembers what was read last. A list may name rows of all files of a day, and a file have rows of many days."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, tuple[int, Any]] = {}
        self._bytes = 0

    def __contains__(self, key: Hashable) -> bool:
        return key in self._kept

    def find(self, key: Hashable) -> Any:
        """Returns what is remembered of a key. None: nothing."""
        known = self._kept.get(key)
        return None if known is None else known[1]

    def get(self, key: Hashable, make: Callable[[], Any], most_bytes: int | None = None) -> Any:
        """Returns what was made for a key. Makes it if it is new or forgotten.

        Args:
            most_bytes: What is larger is not remembered. None: it may have any size.
        """
        if (known := self._kept.get(key)) is not None:
            return known[1]
        made = make()
        if (size := _size_of(made)) > (most_bytes or size):
            return made
        self._kept[key] = (size, made)
        self._bytes += size
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            with suppress(StopIteration, KeyError, RuntimeError):  # another thread forgets, too
                self._bytes -= self._kept.pop(next(iter(self._kept)))[0]
        return made


def _size_of(value: Any) -> int:
    if isinstance(value, Mapping):
        return sum(map(_size_of, value.values()))
    return int(value.nbytes)


class RowExclusions:
    """Rows that a read skips: deleted ones and rows of other days.

    Args:
        table: The table.
        rule: How its rows tell their day.
        cache: Remembers what was read.
    """

    def __init__(self, table: Table, rule: DayRule, cache: ReadCache) -> None:
        self.table, self.rule, self._cache = table, rule, cache
        self._columns = StoredColumns(table, rule.name)
        self._fields: dict[int, NestedField] = {}
        for schema in [*table.schemas().values(), table.schema()]:
            self._fields |= {field.field_id: field for field in schema.fields}

    def positions(self, rows: FileRows) -> Positions:
        """Returns the positions of a data file's rows to leave out, ascending and each once.

        Raises:
            CorruptFileError: If the file, or one that lists deleted rows, is unreadable.
            StorageError: If a row tells no day.
        """
        return self._cache.get(rows, lambda: self._find(rows)) if rows.rule or rows.values else self._find(rows)

    def count_left(self, rows: FileRows, stored: int) -> int:
        """Returns how many rows of a data file are left, of those that are stored in it. Raises as `positions`."""
        return stored - len(self.positions(rows))

    def estimate_left(self, rows: FileRows, stored: int) -> int:
        """As `count_left`, but a list that cannot be read deletes nothing."""
        try:
            return self.count_left(rows, stored)
        except (CorruptFileError, OtherFormatError):
            return self.count_left(rows.model_copy(update={"deletes": (), "values": ()}), stored)

    def days(self, path: str) -> DayNumbers:
        """Returns the day of each row of a data file. Raises as `positions`."""
        found: DayNumbers = self._cache.get((path, self.rule.signature), lambda: self._read_days(path))
        return found

    def _find(self, rows: FileRows) -> Positions:
        found = list[Positions]()
        for listed in rows.deletes:
            gone = self._cache.get(("positions", listed), partial(read_positions, self.table, listed))
            found += [gone[rows.path]] if rows.path in gone else []
        for fields in dict.fromkeys(one.fields for one in rows.values):
            found.append(self._find_values(rows.path, fields, [one for one in rows.values if one.fields == fields]))
        if rows.rule:
            found.append(np.flatnonzero(self.days(rows.path) != (rows.day - EPOCH).days).astype(np.int64))
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def _read_days(self, path: str) -> DayNumbers:
        count, columns = self._columns.read(self.table.io, path, [self.rule.id])
        return self.rule.of_values(columns.get(self.rule.id, pa.nulls(count)), path)  # a file may lack the column

    def _find_values(self, path: str, fields: tuple[int, ...], deletes: list[DeletedValues]) -> Positions:
        """Returns the positions of the rows that files delete by the values of some fields."""
        types = self.table.metadata.current_schema_id
        paths = [path, *(one.path for one in deletes)]
        rows, *lists = [self._cache.get((one, fields, types), partial(self._read_fields, one, fields)) for one in paths]
        listed = [pa.chunked_array([part for one in lists for part in one[number].chunks]) for number in fields]
        return find_equal([rows[number] for number in fields], listed)

    def _read_fields(self, path: str, numbers: tuple[int, ...]) -> dict[int, pa.ChunkedArray]:
        """Reads columns with the types that the table has now. Those that a file lacks have their default."""
        count, columns = self._columns.read(self.table.io, path, numbers)
        found = {}
        for number in numbers:
            field = self._fields[number]
            kind, default = schema_to_pyarrow(Schema(field)).field(0).type, field.initial_default
            filled = pa.nulls(count, kind) if default is None else pa.repeat(pa.scalar(default, kind), count)
            with reading(f"file '{path}' of table '{self.rule.name}'", self.table):
                found[number] = columns[number].cast(kind) if number in columns else pa.chunked_array([filled], kind)
        return found

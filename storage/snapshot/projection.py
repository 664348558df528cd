"""Gives columns of data files the names and types of the table."""

import copy
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from pyiceberg.schema import Schema

from storage.config import DAY
from storage.errors import StorageError
from storage.snapshot.maps import MapEntries, find_keys
from storage.snapshot.row_exclusions import FileRows
from storage.snapshot.row_groups import FileColumn

REWRITE = "Rewrite the file with the engine that wrote it, or ingest its day with force=true."
"""Remedy for a file of a table of ours."""


class Projection:
    """Columns of a table, and how they are found in its data files: by field id, or as keys of a map.

    Attributes:
        ids: Name -> field id.
        types: Name -> type that a reader gives the column.
        defaults: Name -> value where a file lacks the column. None: null.
        keys: Name -> key of a map, for those that are one.
        remedy: What helps if values of a file do not fit.
    """

    def __init__(self, schema: Schema, names: Iterable[str], remedy: str = REWRITE) -> None:
        arrow, fields = schema.as_arrow(), {name: schema.find_field(name) for name in names}
        self.ids = {name: field.field_id for name, field in fields.items()}
        self.types = {name: arrow.field(name).type for name in fields}
        self.defaults = {name: field.initial_default for name, field in fields.items()}
        self.keys = find_keys(schema, fields)
        self.remedy = remedy

    def only(self, names: Collection[str]) -> "Projection":
        """Returns some of the columns."""
        made = copy.copy(self)
        for part in ("ids", "types", "defaults", "keys"):
            setattr(made, part, {name: value for name, value in getattr(self, part).items() if name in names})
        return made

    def known_columns(
        self, compared: Iterable[str], file: pa.Schema, stored: Mapping[int, str]
    ) -> dict[str, FileColumn | None]:
        """Returns the columns that the filter compares, as `GroupFilter.may_match` takes them."""
        known: dict[str, FileColumn | None] = {}
        for name in compared:
            key, number = self.keys.get(name), self.ids[name]
            if key is not None and key.field in stored:
                continue  # the map may have what the column lacks
            if number in stored:
                known[name] = FileColumn(stored[number], file.field(stored[number]).type)
            elif name != DAY and self.defaults[name] is None:
                known[name] = None
        return known

    def stored_names(self, columns: Iterable[str], stored: Mapping[int, str]) -> list[str]:
        """Returns the names of the columns of a file that columns of the table are read from."""
        fields = [number for name in columns for number in (self.ids[name], *self._map_of(name))]
        return list(dict.fromkeys(stored[number] for number in fields if number in stored))

    def _map_of(self, name: str) -> Sequence[int]:
        return [self.keys[name].field] if name in self.keys else []

    def project(
        self, part: pa.RecordBatch, columns: Sequence[str], stored: Mapping[int, str], rows: FileRows
    ) -> pa.RecordBatch:
        """Gives columns of a part the table's names and types.

        A value missing from the file is read from its map, if the file has that: another engine that rewrites a file
        stores nulls beside the map. A column missing from both gets its default value, which is mostly null. `day` gets
        the day of the rows.
        """
        maps = {number: stored[number] for name in columns for number in self._map_of(name) if number in stored}
        indexes = {number: MapEntries(part.column(name)) for number, name in maps.items()}

        def column(name: str) -> pa.Array:
            kind, number = self.types[name], self.ids[name]
            own = self._cast(part.column(stored[number]), kind, name, rows) if number in stored else None
            key = self.keys.get(name)
            if key is not None and key.field in indexes and (own is None or own.null_count):
                entries = self._cast(indexes[key.field].column(key.key, key.scores), kind, name, rows)
                own = entries if own is None else _coalesce(own, entries)
            return _fill(rows.day if name == DAY else self.defaults[name], kind, len(part)) if own is None else own

        return pa.RecordBatch.from_arrays([column(name) for name in columns], list(columns))

    def _cast(self, array: pa.Array, kind: pa.DataType, name: str, rows: FileRows) -> pa.Array:
        if array.type == kind:
            return array
        try:
            return array.cast(kind)
        except pa.ArrowException as error:
            raise StorageError(
                f"column '{name}' of file '{rows.path}'", f"values that fit {kind}",
                f"{error}".split("\n")[0].rstrip("."), self.remedy,
            ) from error  # fmt: skip


def _coalesce(first: pa.Array, second: pa.Array) -> pa.Array:
    """Returns the first values, and the second ones where these are null. Arrow's own function knows no lists."""
    places = np.arange(len(first))
    missing = first.is_null().to_numpy(zero_copy_only=False)
    return pa.concat_arrays([first, second]).take(pa.array(np.where(missing, places + len(first), places)))


def _fill(value: Any, kind: pa.DataType, rows: int) -> pa.Array:
    return pa.nulls(rows, kind) if value is None else pa.repeat(pa.scalar(value, kind), rows)

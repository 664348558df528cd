"""Writes the keys of a table's maps as columns of their own."""

import datetime
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from pyiceberg.types import MapType, NestedField

from storage.errors import StorageError
from storage.keys import KEY, SCORES, map_names
from storage.reader import SnapshotReader, SnapshotRef
from storage.snapshot.maps import MapEntries, find_keys
from storage.warehouse import Warehouse

MOST_COLUMNS = 20_000
"""Columns that a table may have after its maps were flattened."""


def flattened(warehouse: Warehouse, name: str) -> list[str]:
    """Returns the columns of a table without its maps."""
    arrow = warehouse.table(name).schema().as_arrow()
    maps = map_names(arrow)
    return [column for column in arrow.names if column not in maps]


def count_keys(
    warehouse: Warehouse, reference: SnapshotRef, report: Callable[[int, int], None] = lambda done, total: None
) -> dict[str, int]:
    """Returns column -> rows that have it, of all keys of a table's maps, those of most rows first.

    Raises:
        StorageError: If features are read from none of the maps, or their keys are too many for columns.
    """
    table, reader = warehouse.table(reference.table), None
    maps = map_names(warehouse.schema(reference))
    counts: Counter[tuple[str, int]] = Counter()
    if maps:
        reader = warehouse.reader(reference, maps)
        fragments = reader.fragments()
        for done, fragment in enumerate(fragments):
            for batch in reader.batches(fragment):
                for column in maps:
                    keys, times = np.unique(MapEntries(batch.column(column)).keys(), return_counts=True)
                    counts.update({(column, key): int(many) for key, many in zip(keys.tolist(), times, strict=True)})
            report(done + 1, len(fragments))
    ordered = {f"{column}_{key}": many for (column, key), many in counts.most_common()}
    names = [found for column in ordered for found in (column, column + SCORES)]
    known = find_keys(table.schema(), names)
    lost = [column for column in ordered if column not in known]
    if lost:
        raise StorageError(
            f"maps of table '{reference.table}'", "whole numbers as keys, and numbers, lists or scored lists as values",
            f"another map of '{(KEY.fullmatch(lost[0]) or lost)[1]}'", "Split that column where it is written.",
        )  # fmt: skip
    if len(known) + len(table.schema().fields) > MOST_COLUMNS:
        raise StorageError(
            f"keys of the maps of table '{reference.table}'", f"at most {MOST_COLUMNS:,} columns", f"{len(known):,}",
            "Read the maps as they are.",
        )  # fmt: skip
    return {column: ordered[column.removesuffix(SCORES)] for column in names if column in known}


def add_columns(warehouse: Warehouse, name: str, columns: Mapping[str, int]) -> None:
    """Adds columns for keys of maps to a table. Files that lack them are still read from their maps."""
    table = warehouse.writable(name)
    there = set(table.schema().column_names)
    new = {column: key for column, key in find_keys(table.schema(), columns).items() if column not in there}
    if new:
        with table.update_schema() as update:
            for column, key in new.items():
                update.add_column(column, key.kind)


def days_with_maps(warehouse: Warehouse, reference: SnapshotRef) -> list[datetime.date]:
    """Returns the days with a file that has a map."""
    table = warehouse.table(reference.table)
    reader = SnapshotReader(table, reference, [], None)
    maps = {field.field_id for field in table.schema().fields if _is_map(field)}

    def has_map(path: str) -> bool:
        with reader.open(path) as file:
            return not maps.isdisjoint(reader.stored_columns(file, path))

    files = warehouse.day_files(reference)
    return [day for day, found in files.items() if any(has_map(file.file_path) for file in found)]


def drop_maps(warehouse: Warehouse, name: str) -> list[str]:
    """Removes the maps from a table, once no file has them. Returns their names."""
    table = warehouse.writable(name)
    maps: Sequence[str] = [field.name for field in table.schema().fields if _is_map(field)]
    if maps:
        with table.update_schema() as update:
            for column in maps:
                update.delete_column(column)
    return list(maps)


def _is_map(field: NestedField) -> bool:
    return isinstance(field.field_type, MapType)

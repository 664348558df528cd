"""Writes the keys of a table's maps as columns of their own."""

import datetime
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table.refs import MAIN_BRANCH

from storage.errors import ConflictError, StorageError
from storage.keys import SCORES
from storage.reader import SnapshotReader, SnapshotRef
from storage.snapshot.maps import MapEntries, find_keys, map_fields
from storage.snapshot.pyiceberg_private import require_unchanged
from storage.warehouse import Warehouse

MOST_COLUMNS = 20_000
"""Columns that a table may have after its maps were flattened."""
FILES_AT_A_TIME = 8
"""Footers read concurrently."""


def flattened(warehouse: Warehouse, name: str) -> list[str]:
    """Returns the columns of a table without its maps."""
    schema = warehouse.table(name).schema()
    return [column for column in schema.as_arrow().names if column not in map_fields(schema)]


def count_keys(
    warehouse: Warehouse,
    reference: SnapshotRef,
    days: Iterable[datetime.date] | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, int]:
    """Returns column -> rows that have it, of all keys of a table's maps, those of most rows first.

    Args:
        days: Days to read. None: all.
    Raises:
        StorageError: If features are read from none of the maps, or their keys are too many for columns.
    """
    schema, there = warehouse.table(reference.table).schema(), warehouse.schema(reference).names
    maps = map_fields(schema)
    for column in maps:
        if not find_keys(schema, [f"{column}_0"]):
            raise StorageError(
                f"map '{column}' of table '{reference.table}'",
                "whole numbers as keys, and numbers, lists or scored lists as values",
                f"{schema.find_type(column)}", "Split that column where it is written.",
            )  # fmt: skip
    counts: Counter[tuple[str, int]] = Counter()
    reader = warehouse.reader(reference, [name for name in maps if name in there])
    fragments = reader.fragments(days) if reader.columns else []
    for done, fragment in enumerate(fragments):
        for batch in reader.batches(fragment):
            for column in reader.columns:
                keys, times = np.unique(MapEntries(batch.column(column)).keys(), return_counts=True)
                counts.update({(column, key): int(many) for key, many in zip(keys.tolist(), times, strict=True)})
        report(done + 1, len(fragments))
    found = {f"{column}_{key}": many for (column, key), many in counts.most_common()}
    if len(found) + len(schema.fields) > MOST_COLUMNS:
        raise StorageError(
            f"keys of the maps of table '{reference.table}'", f"at most {MOST_COLUMNS:,} columns", f"{len(found):,}",
            "Read the maps as they are.",
        )  # fmt: skip
    scored = find_keys(schema, [column + SCORES for column in found])
    return {
        name: many for column, many in found.items() for name in (column, column + SCORES)
        if name == column or name in scored
    }  # fmt: skip


def add_columns(warehouse: Warehouse, name: str, columns: Iterable[str]) -> None:
    """Adds columns for keys of maps to a table. Files that lack them are still read from their maps."""
    table = warehouse.writable(name)
    there = set(table.schema().column_names)
    new = {column: key for column, key in find_keys(table.schema(), columns).items() if column not in there}
    if new:
        with table.update_schema() as update:
            for column, key in new.items():
                update.add_column(column, key.kind)


def refuse_new_keys(warehouse: Warehouse, reference: SnapshotRef, day: datetime.date, known: Mapping[str, int]) -> None:
    """Refuses to flatten a day with keys that have no column, because another engine has just written them.

    Raises:
        ConflictError: If there is one.
    """
    new = [column for column in count_keys(warehouse, reference, [day]) if column not in known]
    if new:
        raise ConflictError(
            f"maps of day {day} of table '{reference.table}'", "the keys that were counted", f"{new[0]}, too",
            "Another writer has changed the day. Run the command again.",
        )  # fmt: skip


def days_with_maps(warehouse: Warehouse, reference: SnapshotRef) -> list[datetime.date]:
    """Returns the days with a file that has a map."""
    table = warehouse.table(reference.table)
    reader = SnapshotReader(table, reference, [], None)
    maps = {field.field_id for field in map_fields(table.schema()).values()}

    def has_map(path: str) -> bool:
        with reader.open(path) as file:
            return not maps.isdisjoint(reader.stored_columns(file.schema_arrow, path))

    files = [(day, file.file_path) for day, found in warehouse.day_files(reference).items() for file in found]
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        mapped = list(pool.map(has_map, (path for _, path in files))) if maps else []
    return list(dict.fromkeys(day for (day, _), has in zip(files, mapped, strict=False) if has))


def drop_maps(warehouse: Warehouse, name: str) -> list[str]:
    """Removes the maps from a table whose files have none. Returns their names.

    Raises:
        ConflictError: If another writer has just added files. The maps stay then.
    """
    reference, table = warehouse.current(name), warehouse.writable(name)
    maps = list(map_fields(table.schema()))
    left = days_with_maps(warehouse, reference) if maps else []
    try:
        if left:
            raise CommitFailedException
        if maps:
            with table.transaction() as transaction:
                with transaction.update_schema() as update:
                    for column in maps:
                        update.delete_column(column)
                require_unchanged(transaction, MAIN_BRANCH, reference.snapshot_id)
    except CommitFailedException as error:
        raise ConflictError(
            f"maps of table '{name}'", "no other writer meanwhile", "another one", "Run the command again."
        ) from error
    return maps

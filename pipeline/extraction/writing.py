"""Writes the days of a source into the warehouse: refused rows into the quarantine table, the others into another."""

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pyarrow as pa

from pipeline.data.day_notes import INGEST
from pipeline.errors import ConfigError
from pipeline.extraction.days import SourceDay, group_files, rows_of_days
from pipeline.extraction.opening import OpenSource
from pipeline.extraction.samples import GOOD
from pipeline.transforms.schema import resolve
from storage.query import column_types, quote, stream
from storage.reader import DAY
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

FILE_ORDER = "ORDER BY __file, __row"
SORTED_VALUES = 1 << 23
"""Rows times columns that are put into the order of their files at once, and the next files after them. If a file has
more, all rows are sorted together: DuckDB spills what does not fit into its memory, but fails at what nearly does."""


def quarantine_name(table: str) -> str:
    """Returns the name of the table with the refused rows of `table`."""
    return f"{table}_quarantine"


def order_clause(rows: OpenSource, wanted: Sequence[str]) -> str:
    """Returns the ORDER BY clause of the rows: by the wanted columns, else in the order of the files.

    Raises:
        ConfigError: If a column does not exist, or holds lists.
    """
    types = column_types(rows.connection, rows.view)
    columns = resolve(wanted, rows.columns, "ingest.order_by")
    for name in columns:
        if types[name].endswith("[]"):
            raise ConfigError(f"ingest.order_by '{name}'", "one value a row", "a list", "Name another column.")
    if not columns:  # DuckDB keeps the order of files, but not the order of joined rows
        return FILE_ORDER if rows.files.lookups or rows.join is not None else ""
    return f"ORDER BY {', '.join([DAY, *map(quote, columns), '__file', '__row'])}"


def write_days(
    rows: OpenSource,
    warehouse: Warehouse,
    table: str,
    days: Sequence[SourceDay],
    order: str,
    into: str,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> None:
    """Writes the refused rows of the days into the quarantine table and the good rows into another.

    The refused rows come first: if the second commit fails, the next run replaces them.

    Args:
        order: Result of `order_clause`.
        into: Table of the good rows.
        on_rows: Called with the number of good rows written so far.
    """
    write_refused(rows, warehouse, table, days, order)
    schema, batches = good_rows(rows, days, rows.columns, order)
    kept = sum(day.kept for day in days)
    replace_days(warehouse, into, identities_of(days), schema, counting(batches, on_rows), kept, notes=notes_of(days))


def write_refused(rows: OpenSource, warehouse: Warehouse, table: str, days: Sequence[SourceDay], order: str) -> None:
    """Writes the refused rows of the days into the quarantine table. Arguments as of `write_days`."""
    refused = sum(day.refused for day in days)
    quarantine = quarantine_name(table)
    if refused or warehouse.has_table(quarantine):
        names = pa.table({"__read": [*rows.names], "source_file": [*rows.names.values()]})
        rows.connection.register("file_names", names)
        what = f"{DAY}, __reason AS reason, CAST(to_json(s) AS VARCHAR) AS source_row, source_file"
        bad = f"{rows.view} s LEFT JOIN file_names ON __file = __read WHERE __reason IS NOT NULL"
        query = f"SELECT {what} FROM {bad} AND {rows_of_days(rows, days)} {order}"
        replace_days(warehouse, quarantine, identities_of(days), *stream(rows.connection.sql(query)), refused)


def good_rows(
    rows: OpenSource, days: Sequence[SourceDay], columns: Sequence[str], order: str
) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Returns the schema of the rows of the days to write, and the rows."""
    query = f"SELECT {', '.join(map(quote, columns))} FROM {rows.view} WHERE {GOOD} AND "
    parts = group_files(rows, days, SORTED_VALUES // len(columns)) if order == FILE_ORDER else None
    if parts is None:
        return stream(rows.connection.sql(f"{query}{rows_of_days(rows, days)} {order}"))
    return stream(*(rows.connection.sql(f"{query}{rows_of_days(rows, days, part)} {order}") for part in parts))


def identities_of(days: Iterable[SourceDay]) -> dict[datetime.date, str]:
    """Returns day -> identity."""
    return {day.day: day.identity for day in days}


def notes_of(days: Iterable[SourceDay]) -> dict[datetime.date, Any]:
    """Returns day -> what the table notes of it."""
    return {day.day: {INGEST: day.note.model_dump(mode="json")} for day in days}


def counting(batches: Iterable[pa.RecordBatch], on_rows: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    """Yields batches, and calls a function with the number of their rows so far."""
    count = 0
    for batch in batches:
        yield batch
        count += batch.num_rows
        on_rows(count)

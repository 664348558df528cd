"""Writes the days of a source into the warehouse: refused rows into the quarantine table, the others into another."""

import datetime
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.data.day_notes import INGEST
from pipeline.data.formats.reading import as_pattern
from pipeline.errors import ConfigError
from pipeline.extraction.days import SourceDay, rows_of_days, split_rows
from pipeline.extraction.opening import OpenSource
from pipeline.extraction.samples import GOOD
from pipeline.transforms.schema import resolve
from storage.query import column_types, literal, quote, stream
from storage.reader import DAY
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

FILE_ORDER = "ORDER BY __file, __row"
PORTION_VALUES = 1 << 23
"""Values that are put into the order of their files at once: 64 MB of numbers. An item of a list is one."""
LONG = 4
"""How many times as many values as columns a row may have before portions become smaller: at most 256 MB then."""
GROUP_ROWS = 122_880
"""Rows of a row group, as DuckDB writes them. Batches end where such a group of ordered rows does: where batches end
decides where files end, and that the order of training rows, and so the bits of weights."""
PORTION_ROWS = GROUP_ROWS // 4
"""Rows that are put into order at once at least: a row group is read again for each portion of its rows."""


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
    where = f"FROM {rows.view} WHERE {GOOD} AND"
    chosen = ", ".join(map(quote, columns))
    if order != FILE_ORDER:
        return stream(rows.connection.sql(f"SELECT {chosen} {where} {rows_of_days(rows, days)} {order}"))
    values = max(len(columns), _values_of_a_row(rows, days) // LONG)
    portions = split_rows(rows, days, max(PORTION_ROWS, PORTION_VALUES // values), GROUP_ROWS)
    queries = [
        f"SELECT {chosen}, {_number(part.files)} AS __number, __row {where} {rows_of_days(rows, days, part)}"
        for part in portions
    ]
    return stream(*(rows.connection.sql(query) for query in queries), arrange=in_file_order)


def _number(files: Sequence[str]) -> str:
    """Returns the SQL of the number of a row's file. Its name in each row would be most of what is put in order."""
    names = ", ".join(map(literal, files))
    return f"CAST(list_position([{names}], __file) AS BIGINT)" if len(files) > 1 else "0::BIGINT"


def _values_of_a_row(rows: OpenSource, days: Sequence[SourceDay]) -> int:
    """Returns about how many numbers lists and texts of a row take, by the metadata of the days' files. 0: has none."""
    types = column_types(rows.connection, rows.view).values()
    if not any(kind.endswith("]") or kind.startswith(("MAP", "STRUCT", "VARCHAR", "BLOB")) for kind in types):
        return 0
    wanted = {file for day in days for file in day.files}
    patterns = [as_pattern(one.read) for file, one in rows.read.items() if str(file) in wanted]
    values = "sum(greatest(num_values, total_uncompressed_size // 8))"
    query = f"SELECT {values} // greatest(1, sum(row_group_num_rows) FILTER (column_id = 0)) FROM parquet_metadata(?)"
    return int(rows.connection.sql(query, params=[patterns]).fetchall()[0][0] or 0) if patterns else 0


def in_file_order(rows: pa.Table) -> pa.Table:
    """Puts rows in the order of their files, without the columns that tell it. DuckDB's sort takes six times longer."""
    places = rows["__row"].to_numpy()
    places = places + rows["__number"].to_numpy() * (places.max(initial=0) + 1)
    rows = rows.drop_columns(["__number", "__row"])
    ordered = rows if bool((places[1:] > places[:-1]).all()) else rows.take(pa.array(np.argsort(places)))
    whole = ordered.combine_chunks()
    return pa.concat_tables([whole.slice(begin, GROUP_ROWS) for begin in range(0, max(1, len(whole)), GROUP_ROWS)])


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

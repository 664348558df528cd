"""Days of a source written into the warehouse: the rows refused into one table, the others into another."""

from collections.abc import Callable, Iterable, Iterator, Sequence

import pyarrow as pa

from pipeline.errors import ConfigError
from pipeline.extraction.days import Day, within
from pipeline.extraction.opening import Opened
from pipeline.extraction.samples import GOOD
from pipeline.transforms.schema import resolve
from storage.query import column_types, quoted
from storage.reader import DAY
from storage.warehouse import Warehouse

BATCH_ROWS = 65_536


def spoiled_name(table: str) -> str:
    """Name of the table with the rows of `table` that were refused."""
    return f"{table}_quarantine"


def order_of(rows: Opened, wanted: Sequence[str]) -> str:
    """How rows are sorted, as SQL: as they stand in the files, or by the wanted columns first.

    Raises:
        ConfigError: If there is no such column, or it holds lists.
    """
    types = column_types(rows.connection, rows.view)
    columns = resolve(wanted, rows.columns, "ingest.order_by")
    for name in columns:
        if types[name].endswith("[]"):
            raise ConfigError(f"ingest.order_by '{name}'", "one value a row", "a list", "Name another column.")
    if not columns:  # DuckDB keeps the order of files, and no order of what it joins
        return "ORDER BY __file, __row" if rows.lookups or rows.join is not None else ""
    return f"ORDER BY {', '.join([DAY, *map(quoted, columns), '__file', '__row'])}"


def write(
    rows: Opened,
    warehouse: Warehouse,
    table: str,
    days: Sequence[Day],
    order: str,
    into: str,
    on_rows: Callable[[int], None] = lambda rows: None,
) -> None:
    """Bad rows first: if the second commit, into the table of that name, fails, running again replaces them.

    Args:
        order: Of `order_of`.
        on_rows: Called with the rows written so far.
    """
    identities = {day.day: day.identity for day in days}
    refused = sum(day.refused for day in days)
    spoiled = spoiled_name(table)
    if refused or warehouse.has_table(spoiled):
        what = f"{DAY}, __reason AS reason, CAST(to_json(s) AS VARCHAR) AS source_row"
        query = f"SELECT {what} FROM {rows.view} s WHERE __reason IS NOT NULL AND {within(days)} {order}"
        reader = rows.connection.sql(query).to_arrow_reader(BATCH_ROWS)
        warehouse.replace_days(spoiled, identities, reader.schema, reader, refused)
    columns = ", ".join(quoted(name) for name in rows.columns)
    query = f"SELECT {columns} FROM {rows.view} WHERE {GOOD} AND {within(days)} {order}"
    reader = rows.connection.sql(query).to_arrow_reader(BATCH_ROWS)
    kept = sum(day.kept for day in days)
    warehouse.replace_days(into, identities, reader.schema, _counted(reader, on_rows), kept)


def _counted(batches: Iterable[pa.RecordBatch], on_rows: Callable[[int], None]) -> Iterator[pa.RecordBatch]:
    count = 0
    for batch in batches:
        yield batch
        count += batch.num_rows
        on_rows(count)

"""Rewrites days in the layout of their table or into fewer files, with the same rows."""

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import duckdb
import pyarrow as pa
from pydantic import BaseModel
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.table import Table

from storage.errors import StorageError
from storage.layout.spec import Layout
from storage.query import connect
from storage.reader import SnapshotReader, SnapshotRef, open_parquet
from storage.snapshot.files import FILES_AT_A_TIME
from storage.snapshot.writing import replace_files
from storage.warehouse import Warehouse
from storage.writer import MARK, DataFileWriter, collect_chunks


class RewriteResult(BaseModel, frozen=True):
    """A day before and after a rewrite."""

    day: datetime.date
    rows: int
    files: tuple[int, int]
    bytes: tuple[int, int]


class RowChecksum(BaseModel, frozen=True):
    """A checksum of rows in any order: their number and the sum of their hashes."""

    rows: int = 0
    hashes: int = 0

    def plus(self, connection: duckdb.DuckDBPyConnection, rows: pa.Table) -> "RowChecksum":
        """Adds rows."""
        connection.register("rows_to_sum", rows.rename_columns([f"c{i}" for i in range(rows.num_columns)]))
        [(count, hashes)] = connection.execute(
            "SELECT count(*), coalesce(sum(hash(*COLUMNS(*))::HUGEINT), 0) FROM rows_to_sum"
        ).fetchall()
        return RowChecksum(rows=self.rows + count, hashes=self.hashes + int(hashes))


def layout_of(warehouse: Warehouse, name: str) -> Layout:
    """Returns the layout of a table's next files."""
    return Layout.of(warehouse.table(name).properties, warehouse.default_layout)


def days_in_other_layouts(warehouse: Warehouse, reference: SnapshotRef) -> list[datetime.date]:
    """Returns days that have a file in another layout than the table's."""
    table, layout = warehouse.table(reference.table), layout_of(warehouse, reference.table)
    some = {
        (day, file.file_path.rpartition("/")[2].split("-", 2)[-1]): file  # one of each write: names end with it
        for day, files in warehouse.day_files(reference).items()
        for file in files
    }
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        marks = pool.map(lambda file: _read_mark(table.io, file), some.values())
    return sorted({day for (day, _), mark in zip(some, marks, strict=True) if mark != layout.mark})


def days_to_compact(warehouse: Warehouse, reference: SnapshotRef) -> list[datetime.date]:
    """Returns days that have more files than their rows need, or rows that another engine has marked as deleted."""
    most = layout_of(warehouse, reference.table).file_rows
    files, left = warehouse.day_files(reference), warehouse.day_rows(reference)
    return [
        day
        for day, rows in left.items()
        if len(files[day]) > math.ceil(rows / most) or rows < sum(file.record_count for file in files[day])
    ]


def rewrite_days(
    warehouse: Warehouse,
    name: str,
    days: Sequence[datetime.date],
    temporary: Path,
    columns: Sequence[str] | None = None,
    check: Callable[[SnapshotRef, datetime.date], None] = lambda reference, day: None,
) -> list[RewriteResult]:
    """Rewrites days in the table's layout, in one commit. They keep their identities.

    The new files are read back before the commit. Unless they hold the same rows, nothing changes. Memory holds
    `file_rows` rows. Rows are read and written with the table's current columns.

    Args:
        columns: Columns to write. None: all of the table.
        check: Called for each day before it is read. If it raises, nothing changes.
    Raises:
        ConflictError: If another writer changed one of the days in the meantime.
        StorageError: If the rows written differ from the rows read.
    """
    table, reference = warehouse.writable(name), warehouse.current(name)
    names = table.schema().as_arrow().names if columns is None else columns
    reader = SnapshotReader(table, reference, names, None, table.schema(), warehouse.cache)
    before, after = warehouse.day_files(reference, days), dict[datetime.date, list[DataFile]]()
    sums = connect([], temporary, "1GB")

    def files(writer: DataFileWriter) -> Iterator[DataFile]:
        for day in days:
            check(reference, day)
            after[day] = _rewrite(reader, writer, day, warehouse.count_rows(reference, [day]), sums)
            yield from after[day]

    known, noted, chosen = warehouse.day_identities(name), warehouse.day_notes(name), set(days)
    notes = {day: note for day, note in noted.items() if day in chosen}
    same = warehouse.day_contents(reference, days)
    replace_files(warehouse, table, {day: known.get(day, "") for day in days}, files, notes=notes, same=same)
    return [
        RewriteResult(
            day=day,
            rows=sum(file.record_count for file in after[day]),
            files=(len(before[day]), len(after[day])),
            bytes=(sum(f.file_size_in_bytes for f in before[day]), sum(f.file_size_in_bytes for f in after[day])),
        )
        for day in days
    ]


def _rewrite(
    reader: SnapshotReader, writer: DataFileWriter, day: datetime.date, rows: int, sums: duckdb.DuckDBPyConnection
) -> list[DataFile]:
    """Writes the files of a day, and compares their rows with those that were read.

    Args:
        rows: Of the day, as metadata tells.
    """
    read, written, files = RowChecksum(), RowChecksum(), list[DataFile]()
    for chunk in collect_chunks(reader.empty().schema, _rows(reader, day), writer.layout.file_rows):
        read = read.plus(sums, chunk)
        files.extend(writer.write(chunk))
    for file in files:
        for part in _read_back(writer.io, file, reader.columns):
            written = written.plus(sums, part)
    expected = RowChecksum(rows=rows, hashes=read.hashes)
    if written != expected or read.rows != expected.rows:
        raise StorageError(
            f"day {day} of table '{reader.reference.table}'", f"the same {expected.rows} rows after rewriting",
            f"{written.rows} other rows", "The day is unchanged. Report this as a bug.",
        )  # fmt: skip
    return files


def _rows(reader: SnapshotReader, day: datetime.date) -> Iterator[pa.RecordBatch]:
    for fragment in reader.fragments([day]):
        yield from reader.batches(fragment)


def _read_back(io: FileIO, file: DataFile, names: list[str]) -> Iterator[pa.Table]:
    """Reads back the row groups of a file, columns in the order of the table."""
    with open_parquet(io, file.file_path) as parquet:
        for group in range(parquet.num_row_groups):
            yield parquet.read_row_group(group, use_threads=False).select(names)


def _read_mark(io: FileIO, found: DataFile) -> str | None:
    """Returns the mark of a file's layout, or None for a file of another writer."""
    if found.file_format != FileFormat.PARQUET:
        return None
    with open_parquet(io, found.file_path) as file:
        return (file.metadata.metadata or {}).get(MARK, b"").decode() or None


def set_layout(table: Table, layout: Layout) -> None:
    """Stores a layout in the properties of a table. Existing files stay as they are."""
    with table.transaction() as transaction:
        transaction.set_properties(layout.properties())

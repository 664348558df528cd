"""Rewrites days in the layout of their table or into fewer files, with the same rows."""

import datetime
import math
from collections.abc import Callable, Iterator, Sequence
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
    return [
        day
        for day, files in warehouse.day_files(reference).items()
        if any(_read_mark(table.io, file) != layout.mark for file in files)
    ]


def days_to_compact(warehouse: Warehouse, reference: SnapshotRef) -> list[datetime.date]:
    """Returns days that have more files than their rows need, or rows that another engine has marked as deleted."""
    most = layout_of(warehouse, reference.table).file_rows
    files, left = warehouse.day_files(reference), warehouse.day_rows(reference)
    return [
        day
        for day, rows in left.items()
        if len(files[day]) > math.ceil(rows / most) or rows < sum(file.record_count for file in files[day])
    ]


def rewrite_day(
    warehouse: Warehouse,
    name: str,
    day: datetime.date,
    temporary: Path,
    columns: Sequence[str] | None = None,
    check: Callable[[SnapshotRef, datetime.date], None] = lambda reference, day: None,
) -> RewriteResult:
    """Rewrites a day in the table's layout, in one commit. The day keeps its identity.

    The new files are read back before the commit. Unless they hold the same rows, nothing changes. Memory holds
    `file_rows` rows. Rows are read and written with the table's current columns.

    Args:
        columns: Columns to write. None: all of the table.
        check: Called before the day is read. If it raises, nothing changes.
    Raises:
        ConflictError: If another writer changed the day in the meantime.
        StorageError: If the rows written differ from the rows read.
    """
    table, reference = warehouse.writable(name), warehouse.current(name)
    check(reference, day)
    names = table.schema().as_arrow().names if columns is None else columns
    reader = SnapshotReader(table, reference, names, None, table.schema())
    before, rows = warehouse.day_files(reference)[day], warehouse.count_rows(reference, [day])
    sums = connect([], temporary, "1GB")
    after: list[DataFile] = []

    def files(writer: DataFileWriter) -> Iterator[DataFile]:
        read, written = RowChecksum(), RowChecksum()
        for chunk in collect_chunks(reader.empty().schema, _rows(reader, day), writer.layout.file_rows):
            read = read.plus(sums, chunk)
            after.extend(writer.write(chunk))
        for file in after:
            for part in _read_back(writer.io, file, reader.columns):
                written = written.plus(sums, part)
        expected = RowChecksum(rows=rows, hashes=read.hashes)
        if written != expected or read.rows != expected.rows:
            raise StorageError(
                f"day {day} of table '{name}'", f"the same {expected.rows} rows after rewriting",
                f"{written.rows} other rows", "The day is unchanged. Report this as a bug.",
            )  # fmt: skip
        yield from after

    identity = warehouse.day_identities(name).get(day, "")
    notes = {found: note for found, note in warehouse.day_notes(name).items() if found == day}
    same = {day: warehouse.day_contents(reference)[day]}
    replace_files(warehouse, table, {day: identity}, files, notes=notes, same=same)
    return RewriteResult(
        day=day,
        rows=rows,
        files=(len(before), len(after)),
        bytes=(sum(f.file_size_in_bytes for f in before), sum(f.file_size_in_bytes for f in after)),
    )


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

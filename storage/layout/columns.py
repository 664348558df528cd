"""Reads from footers which columns a snapshot's files hold, how large they are and which are empty."""

import datetime
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple, TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel
from pyiceberg.table import Table

from storage.arrow import is_list
from storage.errors import CorruptFileError
from storage.reader import SnapshotReader, SnapshotRef
from storage.snapshot.files import data_files, refuse_format
from storage.snapshot.maps import find_keys

FILES_AT_A_TIME = 8
"""Footers read concurrently. On an object store each takes a round trip or two."""
MOST_FILES = 256
"""Files looked at, evenly spread over the days, before a column counts as empty, and for its size."""
F = TypeVar("F")
EMPTY_BYTES = 256
"""Largest uncompressed size of a chunk of nulls, plus a byte per 32 rows: its levels are one run per page."""


class StoredColumn(BaseModel, frozen=True):
    """A column in the files of a snapshot."""

    bytes: int
    """Compressed bytes of its values in all files, estimated from those that were read."""
    first_day: datetime.date
    """The first of the days that were read with the column in its files."""


class EmptyColumns(NamedTuple):
    """Columns without any value, and how many of the files were searched."""

    columns: list[str]
    files_searched: int
    files: int


def find_maps(table: Table, names: Iterable[str]) -> dict[str, str]:
    """Returns name -> the map that it is read from, for those that are keys of maps and no columns."""
    schema = table.schema()
    there = {field.name for field in schema.fields}
    keys = find_keys(schema, (name for name in names if name not in there))
    return {name: str(schema.find_column_name(key.field)) for name, key in keys.items()}


def spread(items: Sequence[F], most: int) -> list[F]:
    """Returns at most so many of the items, evenly spread from the first to the last one.

    Example:
        >>> spread("abcdefg", 3)
        ['a', 'd', 'g']
    """
    last = len(items) - 1
    if last < most:
        return list(items)
    return [items[round(last * number / max(1, most - 1))] for number in range(most)]


class Footers:
    """The footers of a snapshot's data files. Columns are matched by field id, as in reading."""

    def __init__(self, table: Table, reference: SnapshotRef) -> None:
        self.table, self.reference = table, reference
        self.reader = SnapshotReader(table, reference, [], None)
        self.names = {field.field_id: field.name for field in self.reader.schema.fields}

    def columns(
        self, days: Collection[datetime.date] | None = None, most_files: int = MOST_FILES
    ) -> dict[str, StoredColumn]:
        """Reads footers of the days and returns the columns that any of these files has, in the table's order.

        Args:
            days: None: all.
            most_files: Reads those of so many files, evenly spread over the days.
        Raises:
            CorruptFileError: If a file is unreadable.
        """
        sums: dict[str, int] = {}
        first: dict[str, datetime.date] = {}
        every = self._files(days)
        files = spread(every, most_files)
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            for (day, _), found in zip(files, pool.map(lambda file: self._bytes(file[1]), files), strict=True):
                for name, size in found.items():
                    sums[name] = sums.get(name, 0) + size
                    first[name] = min(day, first.get(name, day))
        known = [name for name in self.names.values() if name in sums]
        share = len(files) / max(1, len(every))
        return {name: StoredColumn(bytes=round(sums[name] / share), first_day=first[name]) for name in known}

    def without_values(
        self, columns: Collection[str], days: Collection[datetime.date] | None = None, most_files: int = MOST_FILES
    ) -> EmptyColumns:
        """Finds columns that are null, or lists without ids, in every row of the days. NaN counts as a value.

        The search stops once every column has shown a value, usually in the first file. Data is read only from chunks
        that are too small to hold much more than nulls. Unreadable files are skipped.
        """
        files = self._files(days)
        chosen = spread(files, most_files)
        left = list(dict.fromkeys(columns))
        searched = 0
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            while left and searched < len(chosen):
                wave = chosen[searched : searched + (FILES_AT_A_TIME if searched else 1)]
                searched += len(wave)
                looks = [pool.submit(self._valued, path, left) for _, path in wave]
                valued = set().union(*(look.result() for look in looks))
                left = [name for name in left if name not in valued]
        return EmptyColumns(left, searched, len(files))

    def _files(self, days: Collection[datetime.date] | None) -> list[tuple[datetime.date, str]]:
        found = list(data_files(self.table, self.reference, days))
        for one in found:
            refuse_format(self.table, one.file)
        return sorted((one.rows.day, one.file.file_path) for one in found)

    def _bytes(self, path: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        with self.reader.open(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            for leaf, name, _ in self._leaves(file, path):
                sums[name] = sums.get(name, 0) + sum(group.column(leaf).total_compressed_size for group in groups)
        return sums

    def _valued(self, path: str, columns: Collection[str]) -> set[str]:
        """Returns those of the columns that have a value in the file."""
        found: set[str] = set()
        with suppress(CorruptFileError, OSError, pa.ArrowException), self.reader.open(path) as file:
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                for leaf, name, stored in self._leaves(file, path):
                    if (
                        name in columns
                        and name not in found
                        and self._has_value(file, number, group.column(leaf), stored)
                    ):
                        found.add(name)
        return found

    def _has_value(self, file: pq.ParquetFile, group: int, chunk: pq.ColumnChunkMetaData, stored: str) -> bool:
        counts = chunk.statistics if chunk.is_stats_set else None
        if counts is not None and counts.has_null_count:
            return bool(chunk.num_values > counts.null_count)  # an empty list counts as a null id
        if chunk.total_uncompressed_size > EMPTY_BYTES + chunk.num_values // 32:
            return True
        values = file.read_row_group(group, [stored], use_threads=False).column(0)
        while is_list(values.type):
            values = pc.list_flatten(values)
        return len(values) > values.null_count

    def _leaves(self, file: pq.ParquetFile, path: str) -> Iterator[tuple[int, str, str]]:
        """Yields (position of a column chunk, column name in the table, column name in the file)."""
        columns = self.reader.stored_columns(file.schema_arrow, path)
        names = {stored: self.names.get(number) for number, stored in columns.items()}
        for leaf in range(len(file.schema)):
            stored = file.schema.column(leaf).path.split(".")[0]
            name = names.get(stored)
            if name is not None:
                yield leaf, name, stored

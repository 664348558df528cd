"""What the footers of a snapshot's files say of its columns: where they are, what they take, what is empty."""

import datetime
from collections.abc import Collection, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel
from pyiceberg.table import Table

from storage.arrow import is_list
from storage.errors import CorruptFileError
from storage.reader import SnapshotReader, SnapshotRef, data_files, day_of, field_id, in_days

FILES_AT_A_TIME = 8
"""Files whose footers are read at once; on an object store each takes a round trip or two."""
MOST_FILES = 256
"""Files that are looked at, evenly spread over the days, to say that a column holds nothing."""
EMPTY_BYTES = 256
"""A chunk of nulls takes no more, and a byte for each 32 rows, before compression: its levels are a run a page."""


class StoredColumn(BaseModel, frozen=True):
    """A column in the files of a snapshot."""

    bytes: int
    """Compressed bytes of its values, of all files."""
    first_day: datetime.date
    """The first day whose files have the column."""


class Search(NamedTuple):
    """Columns in which no value was found, and in how many files of how many it was looked for."""

    columns: list[str]
    looked_at: int
    files: int


class Footers:
    """The footers of a snapshot's data files. As in reading, field ids decide which column of a file is meant."""

    def __init__(self, table: Table, reference: SnapshotRef) -> None:
        self.table, self.reference = table, reference
        self.reader = SnapshotReader(table, reference, [], None)
        self.names = {field.field_id: field.name for field in self.reader.schema.fields}

    def columns(self) -> dict[str, StoredColumn]:
        """The columns that any file has, in the table's order; all footers are read.

        Raises:
            CorruptFileError: If a file cannot be read.
        """
        sums: dict[str, int] = {}
        first: dict[str, datetime.date] = {}
        files = self._files(None)
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            for (day, _), found in zip(files, pool.map(lambda file: self._bytes(file[1]), files), strict=True):
                for name, size in found.items():
                    sums[name] = sums.get(name, 0) + size
                    first[name] = min(day, first.get(name, day))
        known = [name for name in self.names.values() if name in sums]
        return {name: StoredColumn(bytes=sums[name], first_day=first[name]) for name in known}

    def without_values(
        self, columns: Collection[str], days: Collection[datetime.date] | None = None, most_files: int = MOST_FILES
    ) -> Search:
        """Columns that are null, or lists without ids, in every row of the days; NaN is a value here.

        It ends once each column has shown a value, mostly in the first file. Data is read only of chunks that are too
        small to hold much more than nulls. Files that cannot be read are passed over.
        """
        files = self._files(days)
        chosen = files if len(files) <= most_files else files[:: -(-len(files) // most_files)]
        left = list(dict.fromkeys(columns))
        looked_at = 0
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            while left and looked_at < len(chosen):
                wave = chosen[looked_at : looked_at + (FILES_AT_A_TIME if looked_at else 1)]
                looked_at += len(wave)
                looks = [pool.submit(self._valued, path, left) for _, path in wave]
                valued = set().union(*(look.result() for look in looks))
                left = [name for name in left if name not in valued]
        return Search(left, looked_at, len(files))

    def _files(self, days: Collection[datetime.date] | None) -> list[tuple[datetime.date, str]]:
        filters = [] if days is None else [in_days(days)]
        return sorted((day_of(file), file.file_path) for file in data_files(self.table, self.reference, *filters))

    def _bytes(self, path: str) -> dict[str, int]:
        sums: dict[str, int] = {}
        with self.reader.open(path) as file:
            groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
            for leaf, name, _ in self._leaves(file):
                sums[name] = sums.get(name, 0) + sum(group.column(leaf).total_compressed_size for group in groups)
        return sums

    def _valued(self, path: str, columns: Collection[str]) -> set[str]:
        """Those of the columns that have a value in the file."""
        found: set[str] = set()
        with suppress(CorruptFileError, OSError, pa.ArrowException), self.reader.open(path) as file:
            for number in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(number)
                for leaf, name, stored in self._leaves(file):
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
            return bool(chunk.num_values > counts.null_count)  # an empty list counts as a null of its ids
        if chunk.total_uncompressed_size > EMPTY_BYTES + chunk.num_values // 32:
            return True
        values = file.read_row_group(group, [stored], use_threads=False).column(0)
        while is_list(values.type):
            values = pc.list_flatten(values)
        return len(values) > values.null_count

    def _leaves(self, file: pq.ParquetFile) -> Iterator[tuple[int, str, str]]:
        """Position of each column chunk, the column's name in the table and in the file."""
        names = {field.name: self.names.get(field_id(field) or -1) for field in file.schema_arrow}
        for leaf in range(len(file.schema)):
            stored = file.schema.column(leaf).path.split(".")[0]
            name = names.get(stored)
            if name is not None:
                yield leaf, name, stored

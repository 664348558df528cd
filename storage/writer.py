"""Writes data files of a table in day partitions: Parquet with checksums, in the table's own layout."""

import datetime
import itertools
import os
import uuid
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.io import FileIO
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat
from pyiceberg.partitioning import PartitionFieldValue, PartitionKey
from pyiceberg.table.locations import LocationProvider, load_location_provider
from pyiceberg.table.metadata import TableMetadata
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType, TimestampType, TimestamptzType

from storage.arrow import is_list, split_days
from storage.errors import StorageError
from storage.keys import is_key, map_names
from storage.layout.spec import Layout
from storage.pages.footer import SUFFIX, FooterSink
from storage.reader import DAY

MARK = b"dlrm.layout"
"""Key in a file's footer: the mark of its layout."""
FILES_AT_A_TIME = min(4, os.cpu_count() or 1)
BYTES_AT_A_TIME = 256 * 1024 * 1024
"""Rows that are written while the next ones are made. Larger tables are written one at a time."""
CHUNK_BYTES = BYTES_AT_A_TIME // 2
"""Rows of whole days that are written while more days are made. Narrow rows reach `Layout.file_rows` before."""
SAMPLED = 8_192
"""Values of a column that tell whether they repeat."""
REPEATING = 0.75
"""Share of distinct values among them up to which they do."""
MEASURED_COLUMNS = 64
"""Columns with statistics in the footer, 46 bytes in each row group. With statistics of 1,000 columns, a footer is half
as large again, and each reader parses it."""
TIMES = (DateType, TimestampType, TimestamptzType)


class Bounds(NamedTuple):
    """The smallest and the largest value of a column in a file, as Iceberg stores them."""

    field: int
    nulls: int
    lower: bytes
    upper: bytes


class DataFileWriter:
    """Writes rows as data files of a table, one file for each day in each call.

    Columns are written in the layout's order under the table's names and field ids. The manifest gets bounds of the
    columns of times only: statistics of hundreds of columns cost more at every commit and plan than they save.

    Args:
        metadata: Metadata of the table, including schema, location and layout.
        io: Creates the files.
        defaults: Layout settings that the table's properties do not have.
        commit: Part of the file names, which keeps those of two writers apart.
    Raises:
        StorageError: If the table is not partitioned by `day` only.
    """

    def __init__(self, metadata: TableMetadata, io: FileIO, defaults: Layout, commit: uuid.UUID) -> None:
        fields = metadata.spec().fields
        self.schema = metadata.schema()
        self.day_id = self.schema.find_field(DAY).field_id
        if [(field.source_id, type(field.transform)) for field in fields] != [(self.day_id, IdentityTransform)]:
            raise StorageError(
                "partitions of the table", "one field, the identity of `day`", str(metadata.spec()).replace("\n", " "),
                "Write to a table of another name.",
            )  # fmt: skip
        self.io, self.commit, self.spec_id = io, commit, metadata.default_spec_id
        self.spec = metadata.spec()
        self.layout = Layout.of(metadata.properties, defaults)
        arrow = schema_to_pyarrow(self.schema)
        self.arrow = pa.schema([arrow.field(name) for name in self.layout.in_order(arrow.names)])
        maps = map_names(arrow)
        self.keyed = {name for name in arrow.names if name in maps or is_key(name, maps)}
        self.order = [(name, "ascending") for name in self.layout.order_by if _is_sortable(self.arrow, name)]
        self.times = [
            (field.name, field.field_id, field.field_type)
            for field in self.schema.fields
            if isinstance(field.field_type, TIMES)
        ]
        self.locations: LocationProvider = load_location_provider(metadata.location, metadata.properties)
        self._numbers = itertools.count()

    def write(self, rows: pa.Table) -> list[DataFile]:
        """Writes a table, as `write_all`."""
        return list(self.write_all([rows]))

    def write_all(self, tables: Iterable[pa.Table]) -> Iterator[DataFile]:
        """Writes one file of each table for each day, in order of the days, while the next table is made.

        Rows are sorted by `order_by`, else keep their order. Columns that the rows lack are null. Maps that they lack
        are left out, and so are columns for keys of maps: a reader takes these from whichever of the two a file has.
        """
        begun: deque[tuple[int, list[Future[DataFile]]]] = deque()
        pool = ThreadPoolExecutor(FILES_AT_A_TIME)
        try:
            for rows in tables:
                begun.append((rows.nbytes, [pool.submit(self._file, *one) for one in self._parts(rows)]))
                while sum(size for size, _ in begun) > BYTES_AT_A_TIME or len(begun) > FILES_AT_A_TIME:
                    yield from (one.result() for one in begun.popleft()[1])
            for _, files in begun:
                yield from (one.result() for one in files)
        finally:
            pool.shutdown(cancel_futures=True)

    def _parts(self, rows: pa.Table) -> Iterator[tuple[datetime.date, pa.Table, int]]:
        """Yields the days of a table with their rows and the number of their file."""
        given = set(rows.schema.names)
        fields = pa.schema([field for field in self.arrow if field.name in given or field.name not in self.keyed])
        whole = pa.table([_column(rows, field, given) for field in fields], schema=fields)
        if whole[DAY].null_count:
            raise StorageError("column 'day'", "a day in each row", "rows without one", "Give the source's rows a day.")
        for field in fields:
            if not field.nullable and whole[field.name].null_count:
                raise StorageError(
                    f"column '{field.name}'", "a value in each row, as the table requires (NOT NULL)",
                    f"{whole[field.name].null_count} rows without one",
                    f"Give them one, or make the column optional: ALTER COLUMN {field.name} DROP NOT NULL.",
                )  # fmt: skip
        for day, part in split_days(whole, DAY):
            yield day, part, next(self._numbers)

    def _file(self, day: datetime.date, rows: pa.Table, number: int) -> DataFile:
        key = PartitionKey([PartitionFieldValue(self.spec.fields[0], day)], self.spec, self.schema)
        name = f"00000-{number}-{self.commit}{SUFFIX}"
        output = self.io.new_output(self.locations.new_data_location(name, key))
        keys = [(key, way) for key, way in self.order if key in rows.schema.names]
        if keys:
            rows = rows.take(pc.sort_indices(rows, sort_keys=keys))  # stable: equal rows keep their order
        with output.create(overwrite=True) as stream:
            metadata = write_parquet(stream, rows, self.layout)
        bounds = list(self._bounds(rows))
        return DataFile.from_args(
            content=DataFileContent.DATA,
            file_path=output.location,
            file_format=FileFormat.PARQUET,
            partition=key.partition,
            record_count=rows.num_rows,
            file_size_in_bytes=len(output),
            column_sizes={},
            value_counts={bound.field: rows.num_rows for bound in bounds},
            null_value_counts={bound.field: bound.nulls for bound in bounds},
            nan_value_counts={},
            lower_bounds={bound.field: bound.lower for bound in bounds},
            upper_bounds={bound.field: bound.upper for bound in bounds},
            key_metadata=None,
            split_offsets=[_begin(metadata.row_group(i).column(0)) for i in range(metadata.num_row_groups)],
            equality_ids=None,
            sort_order_id=None,
            spec_id=self.spec_id,
        )

    def _bounds(self, rows: pa.Table) -> Iterator[Bounds]:
        for name, number, kind in self.times:
            column = rows[name]
            found = pc.min_max(column.cast(pa.int32() if isinstance(kind, DateType) else pa.int64()))
            lower, upper = (found[end].as_py() for end in ("min", "max"))
            if lower is not None:
                yield Bounds(number, column.null_count, to_bytes(kind, lower), to_bytes(kind, upper))


def write_parquet(stream: Any, rows: pa.Table, layout: Layout) -> pq.FileMetaData:
    """Writes rows as one Parquet file, with checksums of pages and footer.

    Filters skip row groups by statistics. `day`, the columns that the layout sorts by, and the first ones of the file,
    which are the popular ones, get them: up to MEASURED_COLUMNS, none of them lists or maps.

    The Arrow schema is not stored in addition to Parquet's own: with thousands of columns it is most of the footer.
    """
    sink = FooterSink(stream)
    writer = pq.ParquetWriter(
        sink,
        rows.schema,
        store_schema=False,
        store_decimal_as_integer=True,
        write_page_checksum=True,
        write_statistics=_measured(rows.schema, layout),
        **layout.parquet(rows.schema, [name for name in rows.schema.names if not _repeats(rows[name])]),
    )
    with writer:
        writer.write_table(rows, row_group_size=layout.row_group_rows)
        writer.add_key_value_metadata({MARK: layout.mark.encode()})
        sink.hold()
    sink.finish()
    return writer.writer.metadata


def _repeats(column: pa.ChunkedArray) -> bool:
    """Tells whether a column's first values, but nulls, repeat so often that a dictionary pays.

    With a dictionary, numbers that are all different took five times the time and a quarter more bytes.
    """
    values = column.slice(0, SAMPLED).drop_null()
    if is_list(values.type):
        values = pc.list_flatten(values).slice(0, SAMPLED).drop_null()
    if pa.types.is_nested(values.type) or not len(values):
        return True
    return _count_distinct(values) <= REPEATING * len(values)


def _count_distinct(values: pa.ChunkedArray) -> int:
    """Counts different values, none of them null. Numbers are sorted: Arrow's hash table takes ten times the time."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return _count_distinct(pa.chunked_array([one.storage for one in values.chunks], kind.storage_type))
    if not pa.types.is_primitive(kind) or kind.bit_width not in (16, 32, 64):
        return int(pc.count_distinct(values).as_py())
    size = kind.bit_width // 8
    chunks = [one for one in values.chunks if len(one)]
    whole = [np.frombuffer(one.buffers()[1], f"i{size}", len(one), one.offset * size) for one in chunks]
    ordered = np.sort(np.concatenate(whole))
    return 1 + int(np.count_nonzero(ordered[1:] != ordered[:-1]))


def _measured(schema: pa.Schema, layout: Layout) -> list[str]:
    """Returns the columns that get statistics."""
    names = dict.fromkeys([DAY, *layout.order_by, *schema.names])
    return [name for name in names if _is_sortable(schema, name)][:MEASURED_COLUMNS]


def _is_sortable(schema: pa.Schema, name: str) -> bool:
    """Tells whether files can be sorted by a column, which may have been dropped since the layout was chosen."""
    return name in schema.names and not pa.types.is_nested(schema.field(name).type)


def _column(rows: pa.Table, field: pa.Field, given: set[str]) -> pa.ChunkedArray:
    """Returns a column in the table's type, or nulls where the rows do not have it."""
    if field.name not in given:
        return pa.chunked_array([pa.nulls(rows.num_rows, field.type)], field.type)
    column = rows[field.name]
    return column if column.type == field.type else column.cast(field.type)


def _begin(chunk: pq.ColumnChunkMetaData) -> int:
    """Returns the offset of a column chunk in its file."""
    return int(min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset))


def collect_chunks(
    schema: pa.Schema, batches: Iterable[pa.RecordBatch], rows: int, by_day: bool = False
) -> Iterator[pa.Table]:
    """Collects batches into tables of at least `rows` rows, or of whole days. The last table may be smaller.

    As long as rows come in order of their days, days of CHUNK_BYTES do not wait for more: they are written meanwhile.

    Args:
        schema: With the column `day`.
        by_day: Whether each table of ordered rows ends where a day does, unless one day has more rows.
    """
    pending: list[pa.RecordBatch] = []
    count = size = begin = 0  # of the pending rows, and where the last of their days begins
    ordered, last = True, None
    for batch in batches:
        if not batch.num_rows:
            continue
        days = batch.column(DAY).cast(pa.int32()).to_numpy(zero_copy_only=False)
        ordered = ordered and (last is None or days[0] >= last) and bool((days[1:] >= days[:-1]).all())
        changes = np.flatnonzero(days[1:] != days[:-1]) + 1
        if len(changes) or days[0] != last:
            begin = count + (int(changes[-1]) if len(changes) else 0)
        last = days[-1]
        pending.append(batch)
        count, size = count + len(days), size + batch.nbytes
        full, ends = count >= rows, ordered and begin > 0
        if not full and not (size >= CHUNK_BYTES and ends):
            continue
        whole, cut = pa.Table.from_batches(pending, schema), begin if ends and (by_day or not full) else count
        yield whole.slice(0, cut)
        pending = whole.slice(cut).to_batches()
        count, size, begin, ordered = count - cut, sum(one.nbytes for one in pending), 0, True
    if count:
        yield pa.Table.from_batches(pending, schema)

"""Decodes columns of a row group: lists of numbers from their pages, and what is left with pyarrow."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import islice

import pyarrow as pa
import pyarrow.parquet as pq

from storage.pages.lists import ListChunk, is_list_of_numbers, open_list
from storage.pages.ranges import find_range

MISTAKEN = "parquet-cpp version"
"""Start of the names of writers before Arrow 3, which call compressed pages uncompressed (ARROW-10353)."""


def read_columns(
    file: pq.ParquetFile, data: pa.NativeFile, row_group: int, columns: Sequence[str], batch_rows: int
) -> Iterator[pa.RecordBatch]:
    """Yields columns of a row group as `ParquetFile.iter_batches` does: the same rows, types and values.

    Args:
        data: The bytes of the file.
    Raises:
        ArrowException, OSError: If the file is damaged.
    """
    lists = {
        name: _ListColumn(chunk, file.iter_batches(batch_rows, [row_group], [name], use_threads=False))
        for name, chunk in _open_lists(file, data, row_group, columns).items()
    }
    fields = file.schema_arrow
    schema = pa.schema([fields.field(name) for name in columns], fields.metadata)
    others = [name for name in columns if name not in lists]
    for decoded in file.iter_batches(batch_rows, [row_group], others, use_threads=False):
        if lists:
            rows = len(decoded)
            arrays = [lists[name].read(rows) if name in lists else decoded.column(name) for name in columns]
            decoded = pa.RecordBatch.from_arrays(arrays, schema=schema)
        yield decoded


class _ListColumn:
    """A column of lists, decoded here as long as it can be.

    Args:
        chunk: Decodes it.
        batches: The same from pyarrow, which reads some damaged pages nevertheless, or says what is wrong.
    """

    def __init__(self, chunk: ListChunk, batches: Iterator[pa.RecordBatch]) -> None:
        self.chunk: ListChunk | None = chunk
        self.batches, self.done = batches, 0

    def read(self, rows: int) -> pa.Array:
        """Returns the rows of the next batch."""
        if self.chunk is not None:
            try:
                array = self.chunk.read(rows)
            except (OSError, pa.ArrowInvalid):
                self.chunk, self.batches = None, islice(self.batches, self.done, None)
            else:
                self.done += 1
                return array
        batch = next(self.batches, None)
        if batch is None or len(batch) != rows:
            raise pa.ArrowInvalid("columns of different length")
        return batch.column(0)


def _open_lists(
    file: pq.ParquetFile, data: pa.NativeFile, row_group: int, columns: Sequence[str]
) -> dict[str, ListChunk]:
    """Returns the columns that need not be left to pyarrow."""
    if f"{file.metadata.created_by}".startswith(MISTAKEN):
        return {}
    group, fields = file.metadata.row_group(row_group), file.schema_arrow
    leaves = defaultdict[str, list[int]](list)
    for i in range(group.num_columns):
        leaves[group.column(i).path_in_schema.split(".", 1)[0]].append(i)
    found = {}
    for name in columns:
        if len(leaves[name]) != 1:
            continue
        leaf, stored, field = group.column(leaves[name][0]), file.schema.column(leaves[name][0]), fields.field(name)
        if is_list_of_numbers(leaf, stored, field):
            begin, end = find_range(leaf)
            data.seek(begin)
            chunk = open_list(data.read_buffer(end - begin), leaf, field, group.num_rows)
            if chunk is not None:
                found[name] = chunk
    return found


def load_loops() -> None:
    """Loads the compiled loops. Otherwise the first row group would take longer than others."""
    for items in (pa.int64(), pa.float32()):
        sink = pa.BufferOutputStream()
        pq.write_table(pa.table({"ids": pa.array([[1, 2], [None, 1]], pa.list_(items))}), sink)
        data = pa.BufferReader(sink.getvalue())
        with pq.ParquetFile(data) as file:
            for _ in read_columns(file, data, 0, ["ids"], 1):
                pass

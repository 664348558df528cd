"""Finds the bytes of a file that hold some columns and fetches them in few reads."""

import io
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

MOST_BYTES = 64 * 1024 * 1024
"""Merging adjacent columns does not make a read larger than this."""


class Range(NamedTuple):
    """Bytes [begin, end) of a file."""

    begin: int
    end: int


def find_chunks(group: pq.RowGroupMetaData, names: Collection[str]) -> Iterator[Range]:
    """Yields the ranges of the column chunks of some columns. Lists and structs go by the name of the whole column."""
    for i in range(group.num_columns):
        chunk = group.column(i)
        path = chunk.path_in_schema
        if path in names or path.split(".", 1)[0] in names:
            yield find_range(chunk)


def find_range(chunk: pq.ColumnChunkMetaData) -> Range:
    """Returns the range of a column chunk."""
    begin = min(chunk.dictionary_page_offset or chunk.data_page_offset, chunk.data_page_offset)
    return Range(begin, begin + chunk.total_compressed_size)


def merge_ranges(ranges: Collection[Range], gap_bytes: int) -> list[Range]:
    """Sorts ranges and merges those with at most `gap_bytes` between them.

    Example:
        >>> [tuple(range) for range in merge_ranges([Range(10, 20), Range(0, 8), Range(30, 40)], 2)]
        [(0, 20), (30, 40)]
    """
    found: list[Range] = []
    for one in sorted(ranges):
        if found and one.begin - found[-1].end <= gap_bytes and one.end - found[-1].begin <= MOST_BYTES:
            found[-1] = Range(found[-1].begin, max(found[-1].end, one.end))
        else:
            found.append(one)
    return found


class RangeFile(io.RawIOBase):
    """A file that fetches given ranges whole, each in one read when it is first needed.

    Attributes:
        ranges: Whole ones. More may be added.
    """

    def __init__(self, file: pa.NativeFile, ranges: Sequence[Range]) -> None:
        self.file, self.ranges, self.position = file, list(ranges), 0
        self.parts: dict[Range, bytes] = {}
        self.length = file.size()

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.position, io.SEEK_END: self.length}[whence]
        return self.position

    def size(self) -> int:
        return self.length

    def read(self, size: int = -1) -> bytes:
        """Returns bytes from the current position."""
        end = self.length if size < 0 else min(self.position + size, self.length)
        begin, self.position = self.position, end
        for one in self.ranges:
            if one.begin <= begin and end <= one.end:
                if one not in self.parts:
                    self.parts[one] = self.file.read_at(one.end - one.begin, one.begin)
                return self.parts[one][begin - one.begin : end - one.begin]
        return self.file.read_at(end - begin, begin)

    def close(self) -> None:
        self.parts.clear()
        self.file.close()
        super().close()

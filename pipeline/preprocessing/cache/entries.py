"""The format of a cache's entry: finished columns of the rows of a row group, each with a checksum, in one file."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from isal.isal_zlib import crc32
from pydantic import BaseModel, NonNegativeInt, ValidationError

Lengths = Literal["uint8", "uint16", "uint32"]
MAGIC = b"dlrmcol1"
PREFIX_BYTES = len(MAGIC) + 8
ALIGNMENT = 8
MOST_HEADER_BYTES = 1 << 26


@dataclass(frozen=True, eq=False)
class RowColumn:
    """A column of N rows, finished for batches: a number, or a list of ids, per row.

    Shapes:
        values: float32 or int64 [N] of numbers; int32 or int64 [V] of ids. lengths: uint8, uint16 or uint32 [N], the
        length of each list. None: numbers, or lists of one id each.
    """

    values: npt.NDArray[Any]
    lengths: npt.NDArray[Any] | None = None
    counts: Mapping[str, int] = field(default_factory=dict)
    """Op and column -> values that a declared rule changed, of all ops that the column is made by."""

    @property
    def rows(self) -> int:
        """N."""
        return len(self.values if self.lengths is None else self.lengths)


class CachedColumn(BaseModel, frozen=True):
    """Where a column is in its file."""

    dtype: Literal["float32", "int32", "int64"]
    size: NonNegativeInt
    """Number of values."""
    lengths: Lengths | None
    begin: NonNegativeInt
    """Position of its first byte behind the header. The lengths follow the values."""
    checksum: int
    counts: dict[str, int]

    def place_lengths(self) -> int:
        """Returns the position of the lengths behind the first value, in bytes."""
        return _align(self.size * np.dtype(self.dtype).itemsize)

    def count_bytes(self, rows: int) -> int:
        """Returns the bytes of the column."""
        lengths = 0 if self.lengths is None else rows * np.dtype(self.lengths).itemsize
        return self.place_lengths() + _align(lengths)

    def read(self, content: memoryview, rows: int) -> RowColumn:
        """Returns the column in its bytes, as views.

        Raises:
            ValueError: If they are not what was written.
        """
        if crc32(content) != self.checksum:
            raise ValueError("another checksum")
        values = np.frombuffer(content, self.dtype, self.size)
        lengths = None
        if self.lengths is not None:
            lengths = np.frombuffer(content, self.lengths, rows, self.place_lengths())
        return RowColumn(values, lengths, self.counts)


class CacheHeader(BaseModel, frozen=True):
    """What an entry holds."""

    rows: NonNegativeInt
    columns: dict[str, CachedColumn]
    """By key."""


@dataclass(frozen=True, eq=False)
class CacheEntry:
    """An entry to write."""

    parts: Sequence[bytes | memoryview]
    size: int
    """Bytes of all parts."""


def encode(columns: Mapping[str, RowColumn]) -> CacheEntry:
    """Returns the content of an entry.

    Args:
        columns: By key, of as many rows each.
    """
    notes: dict[str, CachedColumn] = {}
    parts: list[bytes | memoryview] = []
    begin, rows = 0, 0
    for key, column in columns.items():
        rows, checksum, arrays = column.rows, 0, [column.values]
        arrays += [] if column.lengths is None else [column.lengths]
        for array in arrays:
            content = np.ascontiguousarray(array).view(np.uint8).data
            padding = bytes(_align(content.nbytes) - content.nbytes)
            checksum = crc32(padding, crc32(content, checksum))
            parts += [content, padding]
        notes[key] = CachedColumn.model_validate(
            {
                "dtype": column.values.dtype.name,
                "size": len(column.values),
                "lengths": None if column.lengths is None else column.lengths.dtype.name,
                "begin": begin,
                "checksum": checksum,
                "counts": dict(column.counts),
            }
        )
        begin += notes[key].count_bytes(rows)
    header = CacheHeader(rows=rows, columns=notes).model_dump_json().encode()
    header += b" " * (_align(len(header)) - len(header))
    prefix = MAGIC + len(header).to_bytes(4, "little") + crc32(header).to_bytes(4, "little")
    return CacheEntry([prefix, header, *parts], PREFIX_BYTES + len(header) + begin)


def header_bytes(prefix: bytes) -> int:
    """Returns the size of the header that follows the first PREFIX_BYTES bytes of an entry.

    Raises:
        ValueError: If they are those of another file.
    """
    size = int.from_bytes(prefix[len(MAGIC) : len(MAGIC) + 4], "little")
    if len(prefix) != PREFIX_BYTES or not prefix.startswith(MAGIC) or size > MOST_HEADER_BYTES:
        raise ValueError("another format")
    return size


def decode_header(prefix: bytes, header: bytes, size: int) -> CacheHeader:
    """Returns the header of an entry.

    Args:
        size: Bytes of the whole file.
    Raises:
        ValueError: If it is not what was written, or the file has another size.
    """
    if crc32(header) != int.from_bytes(prefix[-4:], "little"):
        raise ValueError("another checksum")
    try:
        found = CacheHeader.model_validate_json(header)
    except ValidationError:
        raise ValueError("another format") from None
    end = max((note.begin + note.count_bytes(found.rows) for note in found.columns.values()), default=0)
    if size != PREFIX_BYTES + len(header) + end:
        raise ValueError("another size")
    return found


def _align(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT

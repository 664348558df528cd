"""Reads the headers of Parquet's pages, which are Thrift structs in its compact protocol.

Source:
    parquet.thrift of apache/parquet-format, and Thrift's compact protocol. PyArrow reads pages, but shows none.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa

DATA, DICTIONARY, DATA_V2 = 0, 2, 3
"""Types of pages."""
PLAIN, PLAIN_DICTIONARY, RLE, RLE_DICTIONARY = 0, 2, 3, 8
"""Encodings of values and levels."""
TRUE, FALSE, BYTE, I16, I32, I64, DOUBLE, BINARY, LIST, SET, STRUCT = 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12
"""Types of Thrift's fields."""
DEEPEST = 8
"""Deepest nesting of structs and lists in a header. Parquet has four levels."""

Struct = dict[int, Any]


class Page(NamedTuple):
    """A page of a column chunk."""

    kind: int
    begin: int
    """Position of its first byte after the header, in the chunk."""
    stored: int
    """Bytes in the chunk."""
    size: int
    """Bytes when decompressed, with the levels."""
    checksum: int | None
    """CRC-32 of the stored bytes."""
    values: int
    """Number of entries of a dictionary, or of levels: nulls and empty lists have one each."""
    encoding: int
    level_bytes: tuple[int, int] | None = None
    """Bytes of the repetition and definition levels, in the second version of data pages."""
    compressed: bool = True


def read_pages(data: memoryview, values: int) -> Iterator[Page]:
    """Yields the pages of a column chunk in their order. Pages of other types are left out.

    Args:
        data: Unsigned bytes of the whole chunk. Some writers put more behind its pages.
        values: Levels in all its pages.
    Raises:
        ArrowInvalid: If a header is damaged, or the pages have more or fewer levels.
    """
    end = 0
    while values > 0:
        try:
            header, begin = _Reader(data, end).header()
            page = _page(header, begin)
            size = header[3]
            sizes = (size,) if page is None else (size, page.size, page.values, *(page.level_bytes or ()))
            if min(sizes) < 0 or begin + size > len(data):
                raise ValueError
        except (LookupError, TypeError, ValueError) as error:
            raise pa.ArrowInvalid(f"damaged page header at byte {end} of a column chunk") from error
        end = begin + size
        if page is not None:
            values -= 0 if page.kind == DICTIONARY else page.values
            yield page
    if values < 0:
        raise pa.ArrowInvalid("pages of a column chunk have more values than the footer says")


def _page(header: Struct, begin: int) -> Page | None:
    kind, size, stored, checksum = header[1], header[2], header[3], header.get(4)
    checksum = None if checksum is None else checksum & 0xFFFFFFFF
    if kind == DICTIONARY:
        count, encoding = header[7][1], header[7][2]
        return Page(kind, begin, stored, size, checksum, count, PLAIN if encoding == PLAIN_DICTIONARY else encoding)
    if kind == DATA:
        count, encoding, *levels = (header[5][field] for field in (1, 2, 3, 4))
        return Page(kind, begin, stored, size, checksum, count, encoding if levels == [RLE, RLE] else -1)
    if kind == DATA_V2:
        own = header[8]
        return Page(kind, begin, stored, size, checksum, own[1], own[4], (own[6], own[5]), own.get(7, True))
    return None


class _Reader:
    """Reads one header."""

    def __init__(self, data: memoryview, position: int) -> None:
        self.data, self.position = data, position

    def header(self) -> tuple[Struct, int]:
        """Returns the fields of the header by number, and the position after it.

        Raises:
            LookupError, ValueError: If it is damaged.
        """
        return self._struct(0), self.position

    def _byte(self) -> int:
        self.position += 1
        return self.data[self.position - 1]

    def _varint(self) -> int:
        value = 0
        for shift in range(0, 70, 7):
            byte = self._byte()
            value |= (byte & 127) << shift
            if byte < 128:
                return value
        raise ValueError

    def _integer(self) -> int:
        value = self._varint()
        return (value >> 1) ^ -(value & 1)

    def _struct(self, depth: int) -> Struct:
        fields, number = Struct(), 0
        while head := self._byte():
            number = number + (head >> 4) if head >> 4 else self._integer()
            fields[number] = self._value(head & 15, depth)
        return fields

    def _value(self, kind: int, depth: int) -> Any:
        if self.position > len(self.data) or depth > DEEPEST:
            raise ValueError
        if kind in (TRUE, FALSE):
            return kind == TRUE
        if kind in (I16, I32, I64):
            return self._integer()
        if kind == STRUCT:
            return self._struct(depth + 1)
        if kind in (BYTE, DOUBLE, BINARY):
            size = {BYTE: 1, DOUBLE: 8}.get(kind) or self._varint()
            self.position += size
            return None
        if kind in (LIST, SET):
            head = self._byte()
            count = self._varint() if head >> 4 == 15 else head >> 4
            if count > len(self.data) - self.position:
                raise ValueError
            for _ in range(count):
                self._value(BYTE if head & 15 in (TRUE, FALSE) else head & 15, depth + 1)
            return None
        raise ValueError

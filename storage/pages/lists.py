"""Decodes columns of lists of numbers from Parquet's pages.

PyArrow decodes a list level by level, which takes most of the time of a read. One bit per item says where lists begin,
and the loops here look at 64 of them at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from storage.arrow import is_list
from storage.pages.headers import DICTIONARY, PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY, Page, read_pages
from storage.pages.loops import Bytes, Flags, Ids, Items, find_present, find_rows, look_up, place_rows

ENCODINGS = {"PLAIN", "RLE", "PLAIN_DICTIONARY", "RLE_DICTIONARY"}
CODECS = {"SNAPPY": "snappy", "GZIP": "gzip", "BROTLI": "brotli", "ZSTD": "zstd", "LZ4": "lz4_raw"}
LEAST = 16_000
"""Items of a page, on average, below which pyarrow is faster: a page takes 50 us here."""
WIDEST = 32
"""Bits of an index into a dictionary at most."""
ITEMS: dict[pa.DataType, tuple[str, type[np.signedinteger[Any]]]] = {
    pa.int64(): ("INT64", np.int64), pa.uint64(): ("INT64", np.int64), pa.float64(): ("DOUBLE", np.int64),
    pa.int32(): ("INT32", np.int32), pa.uint32(): ("INT32", np.int32), pa.float32(): ("FLOAT", np.int32),
}  # fmt: skip
"""Type of items -> their type in the file, and the integers that have the same bits. Only bits are copied."""


def is_list_of_numbers(leaf: pq.ColumnChunkMetaData, stored: pq.ColumnSchema, field: pa.Field) -> bool:
    """Returns whether `open_list` may know a column: lists of numbers of 32 or 64 bits.

    Args:
        leaf: The column's only one.
        stored: What it is in the file.
        field: The column as pyarrow reads it.
    """
    kind = field.type
    if not is_list(kind) or leaf.physical_type != ITEMS.get(kind.value_type, ("",))[0]:
        return False
    levels = 1, 1 + field.nullable + kind.value_field.nullable
    return (
        (stored.max_repetition_level, stored.max_definition_level) == levels
        and leaf.compression in {*CODECS, "UNCOMPRESSED"}
        and ENCODINGS.issuperset(leaf.encodings)
    )


def open_list(data: pa.Buffer, leaf: pq.ColumnChunkMetaData, field: pa.Field, rows: int) -> "ListChunk | None":
    """Returns the lists of a column. None: pyarrow must decode them, because a page has something unknown.

    Args:
        data: The bytes of the column chunk.
        leaf: What the footer says about it.
        field: The column as pyarrow reads it: lists or large lists.
        rows: Rows of the row group.
    """
    codec = CODECS.get(leaf.compression)
    try:
        chunk = ListChunk(data, leaf.num_values, None if codec is None else pa.Codec(codec), field, rows)
    except pa.ArrowInvalid:
        return None  # pyarrow knows the mistakes of old writers, or says what is wrong
    pages = chunk.pages
    if len(pages) > 2 and leaf.num_values < LEAST * len(pages):
        return None
    if any(page.kind == DICTIONARY for page in pages[1:]):
        return None
    for page in pages:
        known = (PLAIN,) if page.kind == DICTIONARY else (PLAIN, PLAIN_DICTIONARY, RLE_DICTIONARY)
        if page.encoding not in known or page.size > leaf.total_uncompressed_size:
            return None
        if codec is not None and page.compressed and not _says_its_size(codec, page, chunk.stored(page)):
            return None
    return chunk


def _says_its_size(codec: str, page: Page, stored: memoryview) -> bool:
    """Returns whether it is noticed if a page decompresses to too few bytes. pyarrow does not say how many they are."""
    size = page.size - sum(page.level_bytes or ())
    if codec == "snappy":  # begins with it, 7 bits a byte
        end = next((i for i, byte in enumerate(stored[:5]) if byte < 128), 4)
        return not size or sum((byte & 127) << 7 * i for i, byte in enumerate(stored[: end + 1])) == size
    if codec == "gzip":  # ends with it
        return not size or int.from_bytes(stored[-4:], "little") == size
    return codec == "zstd" or page.checksum is not None


class ListChunk:
    """The lists of a column in one row group. They are read in order, and decoded as they are read.

    Args:
        data: The bytes of the column chunk.
        values: Levels in all its pages.
        codec: Decompresses them.
        field: The column as pyarrow reads it.
        rows: Rows of the row group.
    Raises:
        ArrowInvalid: If the header of a page is damaged.
    """

    def __init__(self, data: pa.Buffer, values: int, codec: pa.Codec | None, field: pa.Field, rows: int) -> None:
        self.data, self.codec, self.field, self.rows = memoryview(data).cast("B"), codec, field, rows
        self.pages = list(read_pages(self.data, values))
        self.items = np.dtype(ITEMS[field.type.value_type][1])
        self.dictionary: Items = np.empty(0, self.items)
        self._page: _ListPage | None = None
        self._row, self._following = 0, iter(self.pages)

    def read(self, rows: int) -> pa.Array:
        """Returns the next rows.

        Raises:
            ArrowInvalid: If a page is damaged, or there are fewer rows.
            OSError: If a page has another checksum than its header says, or cannot be decompressed.
        """
        offsets, nulls = np.zeros(rows + 1, np.int64), np.zeros(rows, np.bool_)
        parts: list[tuple[_ListPage, int]] = []
        done = items = 0
        while True:
            page = self._page
            if page is not None:
                end = min(self._row + rows - done, page.rows)
                count, starts = end - self._row, page.starts[self._row : end + 1]
                offsets[done : done + count + 1] = starts + (items - starts[0])
                nulls[done : done + count] = page.nulls[self._row : end]
                items += int(starts[-1] - starts[0])
                parts.append((page, int(starts[-1] - starts[0])))
                done, self._row = done + count, end
                if end < page.rows:
                    break
            following = self._open_page()
            if following is None:
                break
            if following.lead and not done:
                raise pa.ArrowInvalid(f"column '{self.field.name}' begins within a row")
            parts.append((following, following.lead))  # of the last row so far
            items += following.lead
            offsets[done] = items
            if following.rows and done == rows:
                break
        if done < rows:
            raise pa.ArrowInvalid(f"column '{self.field.name}' has fewer rows than its row group")
        return self._array(offsets, nulls, parts)

    def _array(self, offsets: Ids, nulls: Flags, parts: Sequence[tuple["_ListPage", int]]) -> pa.Array:
        items, rows = int(offsets[-1]), len(nulls)
        values, marks = pa.allocate_buffer(self.items.itemsize * items), None
        out, done = np.frombuffer(values, self.items), 0
        for page, count in parts:
            some = page.read(out[done : done + count])
            if some is not None:
                marks = np.ones(items, np.bool_) if marks is None else marks
                marks[done : done + count] = some
            done += count
        child = pa.Array.from_buffers(self.field.type.value_type, items, [_bits(marks), values])
        valid = _bits(~nulls) if nulls.any() else None
        places = self._narrow(offsets) if pa.types.is_list(self.field.type) else offsets
        return pa.Array.from_buffers(self.field.type, rows, [valid, pa.py_buffer(places)], children=[child])

    def _narrow(self, offsets: Ids) -> npt.NDArray[np.int32]:
        """Returns the offsets of a list that is not large."""
        if offsets[-1] > np.iinfo(np.int32).max:
            raise pa.ArrowInvalid(f"column '{self.field.name}' has {offsets[-1]} items in {len(offsets) - 1} rows")
        return offsets.astype(np.int32)

    def _open_page(self) -> "_ListPage | None":
        """Goes to the next page with data."""
        for page in self._following:
            if not page.values:
                continue
            if page.kind == DICTIONARY:
                body = self.decompress(page)
                if self.items.itemsize * page.values > len(body):
                    raise pa.ArrowInvalid(
                        f"column '{self.field.name}': a dictionary has fewer values than its header says"
                    )
                self.dictionary = np.frombuffer(body, self.items, page.values).copy()
            else:
                self._page, self._row = _ListPage(self.decompress(page), page, self), 0
                return self._page
        return None

    def stored(self, page: Page) -> memoryview:
        """Returns the values of a page as they are stored."""
        return self.data[page.begin + sum(page.level_bytes or ()) : page.begin + page.stored]

    def decompress(self, page: Page) -> Bytes:
        """Returns the bytes of a page. Raises as `read`."""
        stored, levels = self.data[page.begin : page.begin + page.stored], sum(page.level_bytes or ())
        if page.checksum is not None and crc32(stored) != page.checksum:
            raise OSError(f"could not verify page integrity, CRC checksum of column '{self.field.name}' differs")
        if levels > page.stored:
            raise pa.ArrowInvalid(f"column '{self.field.name}': {levels} bytes of levels in a page of {page.stored}")
        body = np.frombuffer(stored, np.uint8)
        if self.codec is not None and page.compressed and page.size != levels:
            values = np.frombuffer(self.codec.decompress(stored[levels:], page.size - levels), np.uint8)
            body = np.concatenate([body[:levels], values]) if levels else values
        body.flags.writeable = False  # numba compiles a loop for each kind of array
        return body


class _ListPage:
    """A page with data. Its items are decoded as they are read.

    Attributes:
        rows: Number of rows N that begin in it.
        starts: int64 [N + 1]. Position of the first item of each of them, then number of items.
        nulls: bool [N]. Which of them are null.
        lead: Items before them, which belong to a row of an earlier page.
    """

    def __init__(self, body: Bytes, page: Page, chunk: ListChunk) -> None:
        self.body, self.name, self.dictionary = body, chunk.field.name, chunk.dictionary
        if page.level_bytes is None:
            repetition = self._section(0)
            definition = self._section(repetition[1])
        else:
            repetition = 0, page.level_bytes[0]
            definition = page.level_bytes[0], sum(page.level_bytes)
        empty = int(chunk.field.nullable)
        most = empty + 1 + int(chunk.field.type.value_field.nullable)
        starts = np.empty(min(page.values, chunk.rows) + 1, np.int64)
        self.rows = find_rows(body, *repetition, page.values, starts[:-1])
        self._check(self.rows >= 0, "damaged repetition levels")
        self.starts, self.nulls = starts[: self.rows + 1], np.empty(self.rows, np.bool_)
        levels = body, *definition, page.values, empty, most
        items, present = place_rows(*levels, self.starts[:-1], self.nulls)
        self._check(items >= 0, "damaged definition levels")
        self.starts[-1], self.lead = items, int(self.starts[0]) if self.rows else items
        self._open_values(definition[1], page.encoding == PLAIN, present)
        self._read, self._items = 0, None
        if present < items:
            marks, values = np.empty(items, np.bool_), np.empty(present, self.dictionary.dtype)
            find_present(*levels, marks)
            self._decode(values)
            spread = np.zeros(items, values.dtype)
            spread[marks] = values
            self._read, self._items = 0, (spread, marks)

    def read(self, out: Items) -> Flags | None:
        """Writes the next items, and returns which of them are not null: bool [V], or None for all."""
        if self._items is None:
            self._decode(out)
            return None
        values, marks = self._items
        part = slice(self._read, self._read + len(out))
        out[:] = values[part]
        self._read = part.stop
        return marks[part]

    def _open_values(self, begin: int, plain: bool, present: int) -> None:
        self._plain, self._width, self._cursor = None, 0, np.zeros(4, np.int64)
        if present and plain:
            items = self.dictionary.dtype
            self._check(begin + items.itemsize * present <= len(self.body), f"fewer than {present} items")
            self._plain = np.frombuffer(self.body, items, present, begin)
        elif present:
            self._check(begin < len(self.body) and len(self.dictionary) > 0, "no dictionary, or no index into it")
            self._width, self._cursor[0] = int(self.body[begin]), begin + 1
            self._check(self._width <= WIDEST, f"indices of {self._width} bits")

    def _decode(self, out: Items) -> None:
        """Writes the next items that are not null."""
        if self._plain is not None:
            out[:] = self._plain[self._read : self._read + len(out)]
            self._read += len(out)
        elif len(out):
            done = look_up(self.body, self._width, self._cursor, self.dictionary, out)
            self._check(done >= 0, "damaged indices")

    def _section(self, begin: int) -> tuple[int, int]:
        """Returns the bytes of levels that begin with their length."""
        self._check(begin + 4 <= len(self.body), "no levels")
        end = begin + 4 + int.from_bytes(self.body[begin : begin + 4].tobytes(), "little")
        self._check(end <= len(self.body), "too few levels")
        return begin + 4, end

    def _check(self, sound: bool, damage: str) -> None:
        if not sound:
            raise pa.ArrowInvalid(f"column '{self.name}': a page has {damage}")


def _bits(flags: Flags | None) -> pa.Buffer | None:
    return None if flags is None else pa.py_buffer(np.packbits(flags, bitorder="little"))

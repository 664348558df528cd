"""A checksum for a file's footer: those of Parquet's pages do not cover it, and a damaged one can end the process.

It stands in the twelve bytes before the footer, where Parquet keeps nothing, and says the footer's length as well.
"""

import io
import struct
import zlib
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIX = "-checked.parquet"
"""End of the names of files that have it."""
MARK = b"dlrm"
TAIL = struct.Struct("<I4s")
"""Last bytes of a Parquet file: length of the footer, and "PAR1"."""
CHECK = struct.Struct("<4sII")
"""Ours before the footer: mark, length of the footer, CRC-32 of the footer."""


class FooterSink(io.RawIOBase):
    """Hands bytes on to a stream, but keeps the footer back until its checksum is written before it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.position = stream, 0
        self.footer: bytearray | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def write(self, data: Any) -> int:
        """Bytes of a column chunk, or of the footer once `hold` was called."""
        size = memoryview(data).nbytes
        self.position += size
        if self.footer is None:
            self.stream.write(data)
        else:
            self.footer += data
        return size

    def hold(self) -> None:
        """What is written from here on is the footer."""
        self.footer = bytearray()

    def finish(self) -> None:
        """Writes checksum and footer."""
        footer = bytes(self.footer or b"")
        metadata = footer[: -TAIL.size]
        self.stream.write(CHECK.pack(MARK, len(metadata), zlib.crc32(metadata)) + footer)


def read_footer(file: pa.NativeFile, checked: bool) -> pq.FileMetaData:
    """The metadata of a Parquet file, read once.

    Args:
        checked: Whether the file has to have a checksum, as its name says.
    Raises:
        OSError: If the footer is not as it was written, or there is none.
    """
    size = file.size()
    if size < TAIL.size + 4:
        raise OSError(f"a file of {size} bytes")
    length, magic = TAIL.unpack(file.read_at(TAIL.size, size - TAIL.size))
    before = CHECK.size if checked else 0
    if magic != b"PAR1" or length + before + TAIL.size > size:
        raise OSError("no footer of a Parquet file at its end")
    tail = file.read_at(before + length + TAIL.size, size - before - length - TAIL.size)
    footer = tail[before:]
    if checked and tail[:before] != CHECK.pack(MARK, length, zlib.crc32(footer[: -TAIL.size])):
        raise OSError("a footer that its checksum does not fit")
    return pq.read_metadata(pa.BufferReader(b"PAR1" + footer))

"""A checksum for a Parquet file's footer.

Parquet's page checksums do not cover the footer, and a damaged one can crash the process. The checksum and the footer's
length take the twelve bytes before the footer, which Parquet does not use.
"""

import io
import struct
import zlib
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

SUFFIX = "-checked.parquet"
"""Suffix of files with a footer checksum."""
MARK = b"dlrm"
TAIL = struct.Struct("<I4s")
"""Last bytes of a Parquet file: length of the footer, and "PAR1"."""
CHECK = struct.Struct("<4sII")
"""Our bytes before the footer: mark, length of the footer, CRC-32 of the footer."""


class FooterSink(io.RawIOBase):
    """Passes bytes to a stream, but holds back the footer until its checksum is written."""

    def __init__(self, stream: IO[bytes]) -> None:
        self.stream, self.position = stream, 0
        self.footer: bytearray | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def write(self, data: Any) -> int:
        """Takes bytes of a column chunk, or of the footer after `hold`."""
        size = memoryview(data).nbytes
        self.position += size
        if self.footer is None:
            self.stream.write(data)
        else:
            self.footer += data
        return size

    def hold(self) -> None:
        """Treats everything written from here on as the footer."""
        self.footer = bytearray()

    def finish(self) -> None:
        """Writes the checksum and the footer."""
        footer = bytes(self.footer or b"")
        metadata = footer[: -TAIL.size]
        self.stream.write(CHECK.pack(MARK, len(metadata), zlib.crc32(metadata)) + footer)


def read_footer(file: pa.NativeFile, checked: bool) -> pq.FileMetaData:
    """Reads the metadata of a Parquet file.

    Args:
        checked: Whether the file must have a checksum.
    Raises:
        OSError: If the footer is damaged or missing.
    """
    size = file.size()
    if size < TAIL.size + 4:
        raise OSError(f"a file of {size} bytes")
    length, magic = TAIL.unpack(file.read_at(TAIL.size, size - TAIL.size))
    before = CHECK.size if checked else 0
    if magic != b"PAR1" or length + before + TAIL.size > size:
        raise OSError("no Parquet footer at its end")
    tail = file.read_at(before + length + TAIL.size, size - before - length - TAIL.size)
    footer = tail[before:]
    if checked and tail[:before] != CHECK.pack(MARK, length, zlib.crc32(footer[: -TAIL.size])):
        raise OSError("a footer that does not match its checksum")
    return pq.read_metadata(pa.BufferReader(b"PAR1" + footer))

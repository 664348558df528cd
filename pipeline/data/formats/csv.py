"""Copies CSV files to Parquet, each value as the text that it is. A file's first line names its columns.

Nothing else is found out about a file but its delimiter: no line is a comment, and none is left out.
"""

import csv
import io
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, suppress
from gzip import BadGzipFile
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
from isal import igzip, igzip_lib

from pipeline.data.formats.files import SourceFile, address_of, stamp
from pipeline.errors import DataError
from storage.errors import is_shortage
from storage.objects import open_file, unreachable
from storage.query import literal

if TYPE_CHECKING:
    import duckdb

DELIMITERS = ",\t;|"
"""Tried in this order."""
HEAD_BYTES = 1 << 20
"""The first two lines have to end within so many bytes."""
MOST_WORDS = 1_000
"""Different values up to which a column of a copy has a dictionary."""
COPY_CELLS = 1 << 25
"""Rows times columns of a row group of a copy."""
CODECS = {"gz": "gzip", "zst": "zstd"}
"""Ending of a compressed file's name -> how it is compressed, as far as DuckDB reads it."""
SIGNATURES = {
    b"\x1f\x8b": "gzip without the ending .gz",
    b"\x28\xb5\x2f\xfd": "zstd without the ending .zst",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK": "a zip archive",
    b"PAR1": "a Parquet file",
    b"Obj\x01": "an Avro file",
}
"""How files that are no text begin -> what they are."""
BLOCK_BYTES = 1 << 24
"""Bytes that are counted at a time. A line is no longer."""
START_BYTES = 1 << 20
"""Bytes that are copied at a time where only the start of a file is read."""
PACKED_BYTES = 1 << 14
"""Bytes of a compressed file that are read at a time there."""
CRITEO_COLUMNS = {
    "label": "VARCHAR",
    **{f"int_{i}": "BIGINT" for i in range(1, 14)},
    **{f"cat_{i}": "VARCHAR" for i in range(1, 27)},
}
"""Columns of the headerless Criteo files: label, 13 counts, 26 hexadecimal categories."""


class Dialect(NamedTuple):
    """What a CSV file's first lines tell."""

    delimiter: str
    names: tuple[str, ...]


def copy_csv(connection: "duckdb.DuckDBPyConnection", dialect: Dialect, copy: Path, pattern: str) -> None:
    """Copies a CSV file. An empty value is null, quoted or not.

    Args:
        pattern: Matches the file alone, as DuckDB reads patterns.
    Raises:
        Error: DuckDB's, for a line with more or fewer values than the first one and for text that is not UTF-8.
    """
    rows = connection.read_csv(
        [pattern],  # type: ignore[arg-type]
        auto_detect=False,
        header=True,
        columns=dict.fromkeys(dialect.names, "VARCHAR"),
        delimiter=dialect.delimiter,
        quotechar='"',
        escapechar='"',
        comment="",
        skiprows=0,
        strict_mode=True,
        hive_partitioning=False,
    )
    write_copy(connection, rows, copy)


def copy_criteo(connection: "duckdb.DuckDBPyConnection", copy: Path, pattern: str) -> None:
    """Copies a file of the Criteo data sets: without names, separated by tabs. Arguments as of `copy_csv`."""
    rows = connection.read_csv(
        [pattern],  # type: ignore[arg-type]
        header=False, delimiter="\t", columns=CRITEO_COLUMNS, quotechar="", escapechar="", auto_detect=False,
        hive_partitioning=False,
    )  # fmt: skip
    write_copy(connection, rows, copy)


def write_copy(connection: "duckdb.DuckDBPyConnection", rows: "duckdb.DuckDBPyRelation", copy: Path) -> None:
    """Writes rows of the connection as a Parquet file that is read once or twice.

    A dictionary of many values takes as long as all the rest, and a codec half of it. The encodings of version 2 make
    files as small. Memory does not grow with the columns.
    """
    group = max(2_048, min(122_880, COPY_CELLS // max(len(rows.columns), 1)))
    options = f"FORMAT parquet, PARQUET_VERSION V2, COMPRESSION uncompressed, ROW_GROUP_SIZE {group}"
    connection.execute(f"COPY ({rows.sql_query()}) TO {literal(copy)} ({options}, DICTIONARY_SIZE_LIMIT {MOST_WORDS})")


def read_dialect(plain: Path, where: str) -> Dialect | None:
    """Returns the delimiter and names of a CSV file, or None for a file without a line.

    The delimiter is the one that gives the first line several values and the second as many, and most of them.

    Args:
        where: The file as errors name it.
    Raises:
        DataError: If the names are no text in UTF-8, or two columns have one.
    """
    with plain.open("rb") as stream:
        head = stream.read(HEAD_BYTES)
    text = head.decode("utf-8-sig", errors="replace").lstrip("\r\n")  # DuckDB names the line of what is no text
    if not text:
        return None
    if "\0" in text:
        packed = next((name for start, name in SIGNATURES.items() if head.startswith(start)), None)
        if packed is not None:
            raise DataError(where, "text, plain or by gzip or zstd", packed, "Unpack it, or name it as what it is.")
        raise DataError(where, "text", "a byte 0", "Set source.format, or write it in UTF-8.")
    found = {delimiter: _first_lines(text, delimiter) for delimiter in DELIMITERS}
    several = {mark: lines for mark, lines in found.items() if len(lines[0]) > 1} or found
    fitting = {mark: lines for mark, lines in several.items() if len({len(line) for line in lines}) == 1} or several
    delimiter = max(fitting, key=lambda mark: len(fitting[mark][0]))
    if "\ufffd" in "".join(fitting[delimiter][0]):
        raise DataError(where, "names in UTF-8", "other bytes in line 1", "Write it in UTF-8.")
    names = [name or f"column{place}" for place, name in enumerate(fitting[delimiter][0])]
    refuse_like_names(where, names)
    if len(names) == 1 and head.lstrip(b"\xef\xbb\xbf")[:1] in b"\r\n":  # a null, in a file of one column
        raise DataError(where, "a name in the first line", "an empty line", "Remove that line.")
    return Dialect(delimiter, tuple(names))


def _first_lines(text: str, delimiter: str) -> list[list[str]]:
    lines = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter)
    found: list[list[str]] = []
    with suppress(csv.Error):  # a value longer than the module takes
        for line in lines:
            found += [line] if line else []
            if len(found) == 2:
                break
    return found or [[text.partition("\n")[0]]]


def refuse_like_names(where: str, names: "list[str] | tuple[str, ...]") -> None:
    """Refuses two columns of one name, and names that differ only in case: no table can have both.

    Raises:
        DataError: With both names.
    """
    seen: dict[str, str] = {}
    for name in names:
        other = seen.get(name.lower())
        seen[name.lower()] = name
        if other is not None:
            found = f"'{name}' twice" if other == name else f"'{other}' and '{name}'"
            raise DataError(where, "names that differ in more than their case", found, "Rename one in the files.")


def unpack(
    file: SourceFile, folder: Path, properties: Mapping[str, str], share: float = 1.0, quoted: bool = False
) -> Path:
    """Returns the uncompressed local file to read: the file itself, or a copy in a folder.

    A file is read twice and more. DuckDB reads a compressed one with one thread.

    Args:
        share: Share of the bytes to read, from the start to the end of a row.
        quoted: Whether values in quotes may have ends of lines.
    Raises:
        RuntimeError: If the file is damaged.
        StorageError: If its store fails.
    """
    name, _, ending = file.name.rpartition(".")
    codec = CODECS.get(ending.lower())
    if isinstance(file, Path) and codec is None and share == 1.0:
        return file
    plain = folder / (file.name if codec is None else name)
    try:
        with (
            plain.open("wb") as copy,
            open_file(address_of(file), properties) as opened,
            _unpacked(opened if share == 1.0 else _Slow(opened), codec) as stream,
        ):
            if share == 1.0:
                while block := stream.read(BLOCK_BYTES):
                    copy.write(block)
            else:
                _copy_start(stream, copy, lambda: opened.tell() >= share * stamp(file)[1], quoted)
    except (EOFError, BadGzipFile, igzip_lib.IsalError) as error:  # type: ignore[misc]  # its stub declares no class
        raise RuntimeError(f"{error}") from error
    except OSError as error:
        if isinstance(file, Path) or is_shortage(error) or error.errno is not None:  # such as a full disk
            raise
        raise unreachable("object store of the source", error) from error
    return plain


def _copy_start(
    stream: "IO[bytes] | pa.NativeFile", copy: IO[bytes], is_enough: Callable[[], bool], quoted: bool
) -> None:
    """Copies rows until it is enough, up to an end of line outside quotes, or to the last one if quotes never end."""
    inside = 0
    while block := stream.read(START_BYTES):
        if is_enough():
            ends = np.flatnonzero(np.frombuffer(block, np.uint8) == ord("\n"))
            quotes = np.cumsum(np.frombuffer(block, np.uint8) == ord('"'))
            outside = ends[(quotes[ends] + inside) % 2 == 0] if quoted else ends
            if len(ends):
                copy.write(block[: (outside if len(outside) else ends)[-1] + 1])
                return
        inside += block.count(b'"')
        copy.write(block)


class _Slow(io.RawIOBase):
    """A file that gives little at a time, so that its place tells how much of it was unpacked."""

    def __init__(self, file: "pa.NativeFile") -> None:
        self.file = file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Fills the start of a buffer."""
        content = self.file.read(min(len(buffer), PACKED_BYTES))
        buffer[: len(content)] = content
        return len(content)


def _unpacked(
    opened: "pa.NativeFile | _Slow", codec: str | None
) -> "AbstractContextManager[IO[bytes] | pa.NativeFile]":
    if codec == "gzip":  # three times as fast as Arrow's
        return igzip.open(opened)
    return nullcontext(opened) if codec is None else pa.CompressedInputStream(opened, codec)


def count_csv(plain: Path, dialect: Dialect) -> int:
    """Counts the rows of a CSV file, by another parser than the one that copies it.

    An empty line is a null if there is one column, and no row otherwise.
    """
    first, several = dialect.names[0], len(dialect.names) > 1
    if several and (lines := _count_plain_lines(plain, dialect)) is not None:
        return lines - 1
    with plain.open("rb") as stream:
        reader = pa_csv.open_csv(
            stream,
            pa_csv.ReadOptions(block_size=BLOCK_BYTES, column_names=list(dialect.names), skip_rows=0),
            pa_csv.ParseOptions(delimiter=dialect.delimiter, newlines_in_values=True, ignore_empty_lines=several),
            pa_csv.ConvertOptions(include_columns=[first], column_types={first: pa.binary()}),
        )
        return sum(batch.num_rows for batch in reader) - 1


def _count_plain_lines(plain: Path, dialect: Dialect) -> int | None:
    """Counts the lines of a file. None: a parser has to tell.

    It has quotes, empty lines, other ends of lines than \\n, or lines with more or fewer values than the first: DuckDB
    passes over more of them if they are empty.
    """
    lines, marks, last = 0, 0, b"\n"
    with plain.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            ends = np.frombuffer(last + block, np.uint8) == ord("\n")
            if b'"' in block or b"\r" in block or (ends[1:] & ends[:-1]).any():
                return None
            marks += int(np.count_nonzero(np.frombuffer(block, np.uint8) == ord(dialect.delimiter)))
            lines, last = lines + int(np.count_nonzero(ends[1:])), block[-1:]
    lines += int(last != b"\n")
    return lines if marks == lines * (len(dialect.names) - 1) else None

"""Opens data files, and finds the columns in them by Iceberg field id."""

import errno
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io import FileIO
from pyiceberg.table import Table

from storage.errors import CorruptFileError, StorageError, is_shortage
from storage.pages.footer import SUFFIX, read_footer
from storage.snapshot.foreign import remedy_of

REPAIR = "Put it back from a copy, or write its rows again with the engine of table '{}'."
"""Remedy for a file of another engine's table."""
REFUSALS = (errno.EACCES, errno.EPERM)
"""What the system says if a process may not read a file."""
READ_OPTIONS: dict[str, Any] = {
    "page_checksum_verification": True,
    "list_type": pa.LargeListType,  # the Arrow types that Iceberg's types map to
    "binary_type": pa.large_binary(),
}


def local_path(path: str) -> str | None:
    """Returns the path of a file in a local file system. None: it is elsewhere. Spark writes `file:/`.

    Example:
        >>> local_path("file:///a"), local_path("file:/a"), local_path("/a"), local_path("s3://a/b")
        ('/a', '/a', '/a', None)
    """
    found = path.removeprefix("file://") if path.startswith("file://") else path.removeprefix("file:")
    return found if found.startswith("/") else None


def open_parquet(io: FileIO, path: str) -> pq.ParquetFile:
    """Opens a data file for reading by column. Verifies the checksums of footer and pages."""
    file = _open_file(io, path)
    metadata = read_footer(file, checked=path.endswith(SUFFIX))
    return pq.ParquetFile(file, metadata=metadata, pre_buffer=local_path(path) is None, **READ_OPTIONS)


def read_metadata(io: FileIO, path: str) -> pq.FileMetaData:
    """Reads the footer of a data file, and verifies its checksum."""
    with _open_file(io, path) as file:
        return read_footer(file, checked=path.endswith(SUFFIX))


def _open_file(io: FileIO, path: str) -> Any:
    local = local_path(path)
    return io.new_input(path).open() if local is None else pa.memory_map(local)


@contextmanager
def reading(where: str, table: Table) -> Iterator[None]:
    """Raises `CorruptFileError` for what Arrow says about a file. Names of columns may be no text.

    What the machine lacks is no fault of the file: nothing is quarantined for it.
    """
    try:
        yield
    except OSError as error:
        if is_shortage(error):
            raise
        if error.errno in REFUSALS:
            raise StorageError(
                where, "a file that this process may read", f"{error}", "Give it the permission."
            ) from error
        raise corrupt(where, table, error) from error
    except (pa.ArrowException, UnicodeDecodeError) as error:
        raise corrupt(where, table, error) from error


def corrupt(where: str, table: Table, error: Exception | str) -> CorruptFileError:
    """Returns the error about a file of a table that is not as it was written."""
    reason = str(error).split("\n")[0].rstrip(".")
    return CorruptFileError(
        where, "a whole Parquet file", reason, remedy_of(table, "Ingest its day with force=true.", REPAIR)
    )


def field_id(field: pa.Field) -> int | None:
    """Returns the Iceberg field id that a Parquet file stores for a column."""
    value = (field.metadata or {}).get(b"PARQUET:field_id")
    return int(value) if value is not None else None


class StoredColumns:
    """Finds columns of a table in its data files: by field id, or by name in files that have no ids.

    Args:
        name: What errors call the table.
    """

    def __init__(self, table: Table, name: str) -> None:
        self._name, self._table = name, table
        mapping = table.name_mapping()
        self._mapped: Mapping[str, int] | None = None
        if mapping is not None:
            self._mapped = {name: field.field_id for field in mapping for name in field.names if field.field_id}

    def of(self, schema: pa.Schema, path: str) -> dict[int, str]:
        """Returns field id -> name of each column in a data file.

        A file that no Iceberg engine wrote, but that was registered, has no ids. Then the table maps its names.

        Raises:
            StorageError: If the file has no ids and the table no mapping.
        """
        own = {number: field.name for field in schema if (number := field_id(field)) is not None}
        if own:
            return own
        if self._mapped is None:
            raise StorageError(
                f"file '{path}' of table '{self._name}'", "field ids, or a mapping of names by the table",
                "neither", "Set the table's property schema.name-mapping.default"
                f"{remedy_of(self._table, ', or ingest its day with force=true', '')}.",
            )  # fmt: skip
        return {self._mapped[name]: name for name in schema.names if name in self._mapped}

    def names_of(self, number: int) -> tuple[str, ...]:
        """Returns the names that a field has in files without ids."""
        return tuple(name for name, mapped in (self._mapped or {}).items() if mapped == number)

    def read(self, io: FileIO, path: str, numbers: Iterable[int]) -> tuple[int, dict[int, pa.ChunkedArray]]:
        """Returns the number of rows of a data file, and field id -> values of those columns that it has.

        Raises:
            CorruptFileError: If the file is unreadable. StorageError: As `of`.
        """
        with reading(f"file '{path}' of table '{self._name}'", self._table), open_parquet(io, path) as file:
            stored = self.of(file.schema_arrow, path)
            names = {number: stored[number] for number in numbers if number in stored}
            rows = file.read(list(names.values()), use_threads=False)
            return file.metadata.num_rows, {number: rows[name] for number, name in names.items()}

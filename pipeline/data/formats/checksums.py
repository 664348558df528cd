"""Finds damaged Parquet files: pages with other checksums, at which DuckDB does not look, and what cannot be read."""

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from pipeline.data.formats.files import SourceFile, address_of
from pipeline.errors import ContractError, DataError
from storage.errors import is_shortage, machine_lacks
from storage.objects import open_file, store_failure
from storage.pages.headers import read_pages


def verify_pages(file: SourceFile, properties: Mapping[str, str]) -> None:
    """Reads all pages of a Parquet file that have a checksum. A file whose first page has none is not read further.

    Raises:
        DataError: If a page has another checksum, with its column.
    """
    try:
        with open_file(address_of(file), properties) as opened, pq.ParquetFile(opened) as parquet:
            metadata = parquet.metadata
            for group in range(metadata.num_row_groups):
                for place in range(metadata.num_columns):
                    chunk = metadata.row_group(group).column(place)
                    if not _verify(file, opened, chunk):
                        return
    except pa.ArrowException:
        return  # headers that we do not know; DuckDB says what is wrong when it reads the values


def _verify(file: SourceFile, opened: pa.NativeFile, chunk: pq.ColumnChunkMetaData) -> bool:
    """Returns whether the pages of a column chunk have checksums."""
    begin = chunk.dictionary_page_offset if chunk.has_dictionary_page else chunk.data_page_offset
    opened.seek(begin)
    data = memoryview(opened.read_buffer(chunk.total_compressed_size)).cast("B")
    for page in read_pages(data, chunk.num_values):
        if page.checksum is None:
            return False
        if crc32(data[page.begin : page.begin + page.stored]) != page.checksum:
            raise DataError(
                f"column '{chunk.path_in_schema}' of '{file.name}'", "pages as their checksums say", "other bytes",
                "Fetch or write the file again.",
            )  # fmt: skip
    return True


def find_damage(
    files: Sequence[SourceFile], properties: Mapping[str, str], values: bool = True
) -> ContractError | None:
    """Returns what is wrong with the first of some Parquet files that cannot be read. None: all can be read.

    It reads the footers of all files first. It is slow, and meant for when a read has failed without naming the file.

    Args:
        properties: Access to object stores: `warehouse.catalog`.
        values: Whether to read the values, too.
    """
    for step in (_find_bad_footer, _find_bad_values) if values else (_find_bad_footer,):
        for file in files:
            if (found := step(file, properties)) is not None:
                return found
    return None


def _find_bad_footer(file: SourceFile, properties: Mapping[str, str]) -> ContractError | None:
    try:
        with open_file(address_of(file), properties) as opened:
            _ = pq.read_metadata(opened).schema.names  # decodes them
    except UnicodeDecodeError:
        where = f"names of columns of '{file.name}'"
        return DataError(where, "text in UTF-8", "other bytes", "Write the file again.")
    except (pa.ArrowException, OSError) as error:
        remedy = "Fetch or write the file again; one of another format needs its ending."
        return _unreadable(f"file '{file.name}'", error, remedy)
    return None


def _find_bad_values(file: SourceFile, properties: Mapping[str, str]) -> ContractError | None:
    where = f"file '{file.name}'"
    try:
        with open_file(address_of(file), properties) as opened, pq.ParquetFile(opened) as parquet:
            for group in range(parquet.metadata.num_row_groups):
                for name in dict.fromkeys(parquet.schema_arrow.names):
                    where = f"column '{name}' of '{file.name}'"
                    column = parquet.read_row_group(group, [name])
                    try:
                        column.validate(full=True)
                    except pa.ArrowInvalid:
                        return DataError(where, "text in UTF-8", "other bytes", "Write the file again in UTF-8.")
    except (pa.ArrowException, OSError, MemoryError) as error:
        return _unreadable(where, error, "Fetch or write the file again.")
    return None


def _unreadable(where: str, error: Exception, remedy: str) -> ContractError:
    """Returns an error about bytes that are no Parquet, or about the store or machine that does not give them."""
    if (lost := store_failure(error)) is not None:
        return lost
    if is_shortage(error):
        return machine_lacks(where, error)
    return DataError(where, "Parquet that can be read", f"{error}".partition("\n")[0].rstrip(". "), remedy)

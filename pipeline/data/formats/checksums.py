"""Compares the pages of Parquet files with their checksums. DuckDB does not look at them."""

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.parquet as pq
from isal.isal_zlib import crc32

from pipeline.data.formats.files import SourceFile, address_of
from pipeline.errors import DataError
from storage.objects import open_file
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

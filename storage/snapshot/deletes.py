"""Reads which rows of data files are deleted (Iceberg specification, "Delete Formats")."""

import math
import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.table import Table
from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
from pyiceberg.table.puffin import PuffinFile

from storage.errors import CorruptFileError, StorageError
from storage.snapshot.foreign import remedy_of
from storage.snapshot.parquet import REPAIR

PUFFIN = b"PFA1"
"""First bytes of a file with deletion vectors."""
FORMATS = {b"ORC": "ORC", b"Obj\x01": "AVRO"}
"""First bytes of a file -> its format."""
Positions = npt.NDArray[np.int64]


class DeletedValues(BaseModel, frozen=True):
    """A file that deletes rows by value (an equality delete file)."""

    path: str
    fields: tuple[int, ...]
    """Ids of the fields that are compared. A row goes if all of them equal those of a row of the file."""


class OtherFormatError(StorageError):
    """A file of another engine is in a format that is not read."""


def format_error(table: Table, path: str, found: str) -> OtherFormatError:
    """Returns the error about a file in another format than Parquet."""
    return OtherFormatError(
        f"file '{path}'", "a Parquet file", f"one in {found}",
        "Set the table's properties write.format.default=parquet and write.delete.format.default=parquet and rewrite "
        f"it: in Spark {rewrite_call(table, 'rewrite-all', 'true')}.",
    )  # fmt: skip


def rewrite_call(table: Table, option: str, value: str) -> str:
    """Returns the SQL to rewrite the files of a table in Spark, whose catalog has the same name in an SQL database."""
    name = ".".join([*([table.catalog.name] if isinstance(table.catalog, SqlCatalog) else []), *table.name()])
    return f"`CALL system.rewrite_data_files(table => '{name}', options => map('{option}', '{value}'))`"


def read_positions(table: Table, listed: str) -> dict[str, Positions]:
    """Returns data file -> positions of its deleted rows, from Parquet or from Puffin with deletion vectors.

    Raises:
        CorruptFileError: If the list is unreadable. OtherFormatError: If it is in another format.
    """
    try:
        with table.io.new_input(listed).open() as file:
            begin = file.read(len(PUFFIN))
            for magic, name in FORMATS.items():
                if begin.startswith(magic):
                    raise format_error(table, listed, name)
            puffin = begin == PUFFIN
            file.seek(0)
            return _read_vectors(file.read()) if puffin else _read_rows(file)
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        raise CorruptFileError(
            f"file '{listed}', which lists deleted rows", "a whole Parquet or Puffin file",
            str(error).split("\n")[0].rstrip(".") or "none",
            remedy_of(table, "Ingest the day again with force=true.", REPAIR),
        ) from error  # fmt: skip


def _read_rows(file: Any) -> dict[str, Positions]:
    rows = pq.read_table(
        file, columns=["file_path", "pos"], use_threads=False, read_dictionary=["file_path"],
        page_checksum_verification=True,
    )  # fmt: skip
    paths = rows["file_path"].unify_dictionaries().combine_chunks()
    codes, names = paths.indices.to_numpy(), paths.dictionary.to_pylist()
    order = np.argsort(codes, kind="stable")
    starts = np.searchsorted(codes[order], np.arange(1, len(names)))
    return dict(zip(names, np.split(rows["pos"].to_numpy()[order].astype(np.int64), starts), strict=bool(names)))


def _read_vectors(content: bytes) -> dict[str, Positions]:
    puffin = PuffinFile(content)
    for blob in puffin.footer.blobs:
        payload = puffin.get_blob_payload(blob)
        end = 4 + int.from_bytes(payload[:4], "big")
        if zlib.crc32(payload[4:end]) != int.from_bytes(payload[end : end + 4], "big"):
            raise ValueError("a deletion vector with another checksum")
    vectors = deletion_vectors_from_puffin_file(puffin)
    return {one.referenced_data_file: one.to_vector().to_numpy().astype(np.int64) for one in vectors}


def find_equal(rows: Sequence[pa.ChunkedArray], deleted: Sequence[pa.ChunkedArray]) -> Positions:
    """Returns the positions of rows that equal one of the deleted ones in all columns.

    Null equals null and NaN equals NaN: nothing else could delete them. 0 equals -0, as in filters.

    Args:
        rows: The compared columns of a data file.
        deleted: The same columns, of the same types, of the deletes.
    Example:
        >>> users, gone = pa.chunked_array([[4, None, 4, 2]]), pa.chunked_array([[4, None]])
        >>> find_equal([users], [gone]).tolist()
        [0, 1, 2]
    """
    count = len(rows[0])
    codes = np.zeros(count + len(deleted[0]), np.int64)
    for old, new in zip(deleted, rows, strict=True):
        both = _of_one_form(pa.chunked_array([*new.chunks, *old.chunks], old.type).combine_chunks())
        found = both.dictionary_encode(null_encoding="encode").indices.to_numpy()
        _, codes = np.unique(codes * (int(found.max(initial=0)) + 1) + found, return_inverse=True)
    return np.flatnonzero(np.isin(codes[:count], codes[count:])).astype(np.int64)


def _of_one_form(values: pa.Array) -> pa.Array:
    """Gives equal numbers equal bits: -0 becomes 0, and every NaN the same one."""
    if not pa.types.is_floating(values.type):
        return values
    return pc.if_else(pc.is_nan(values), pa.scalar(math.nan, values.type), pc.add(values, pa.scalar(0.0, values.type)))

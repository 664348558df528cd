"""Commits to a table as another engine would: files in any partition, and row-level deletes."""

import json
import struct
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import (
    DataFile,
    DataFileContent,
    FileFormat,
    ManifestContent,
    ManifestEntry,
    ManifestEntryStatus,
    ManifestFile,
    ManifestWriterV2,
)
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Operation
from pyiceberg.table.update.snapshot import _FastAppendFiles
from pyiceberg.typedef import Record
from pyroaring import BitMap


def add_file(table: Table, rows: pa.Table, partition: Record, file_format: FileFormat = FileFormat.PARQUET) -> str:
    """Writes rows with field ids as one file of the table's current partition spec. Returns its path."""
    return add_files(table, [(rows, partition)], file_format)[0]


def add_files(
    table: Table, parts: Iterable[tuple[pa.Table, Record]], file_format: FileFormat = FileFormat.PARQUET, **options: Any
) -> list[str]:
    """Writes several files in one commit, with options of Parquet's writer. Returns their paths."""
    arrow, paths = schema_to_pyarrow(table.schema()), []
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        for rows, partition in parts:
            paths.append(path := _new_path(table))
            pq.write_table(
                pa.table([rows[field.name].cast(field.type) for field in arrow], schema=arrow), path, **options
            )
            append.append_data_file(_describe(table, path, partition, rows.num_rows, file_format))
    return paths


def register(table: Table, path: str, partition: Record, rows: int) -> None:
    """Adds a file that was written without the table, and has no field ids."""
    with table.transaction() as transaction, transaction.update_snapshot().fast_append() as append:
        append.append_data_file(_describe(table, path, partition, rows))


class _DeletesWriter(ManifestWriterV2):
    def content(self) -> ManifestContent:
        return ManifestContent.DELETES

    @property
    def _meta(self) -> dict[str, str]:
        return {**super()._meta, "content": "deletes"}


class _AddDeletes(_FastAppendFiles):
    deletes: DataFile
    spec_id: int

    def _manifests(self) -> list[ManifestFile]:
        metadata = self._transaction.table_metadata
        with _DeletesWriter(
            metadata.specs()[self.spec_id],
            metadata.schema(),
            self.new_manifest_output(),
            self._snapshot_id,
            self._compression,
        ) as writer:
            entry = ManifestEntry.from_args(
                status=ManifestEntryStatus.ADDED, snapshot_id=self._snapshot_id, sequence_number=None,
                file_sequence_number=None, data_file=self.deletes,
            )  # fmt: skip
            writer.add(entry)
        return [*super()._manifests(), writer.to_manifest_file()]


def delete_rows(
    table: Table, positions: dict[str, list[int]], partition: Record, how: Literal["file", "vector"] = "file"
) -> str:
    """Deletes rows of data files. Returns the path of what lists them.

    Args:
        positions: Data file -> positions of its rows.
        how: In a position-delete file, or by deletion vectors.
    """
    path = _new_path(table)
    pairs = [(file, position) for file, found in positions.items() for position in found]
    if how == "vector":
        Path(path).write_bytes(_puffin(positions))
    else:
        pq.write_table(pa.table({"file_path": [file for file, _ in pairs], "pos": [at for _, at in pairs]}), path)
    file_format = FileFormat.PUFFIN if how == "vector" else FileFormat.PARQUET
    _add_deletes(table, _describe(table, path, partition, len(pairs), file_format, DataFileContent.POSITION_DELETES))
    return path


def delete_values(table: Table, values: pa.Table, partition: Record, spec_id: int | None = None) -> str:
    """Deletes older rows that have the same values in some columns (an equality delete file). Returns its path.

    Args:
        partition: Partition of the rows. An empty one deletes rows of all.
        spec_id: Partition spec of the deletes. None: the table's current one.
    """
    path = _new_path(table)
    arrow = schema_to_pyarrow(table.schema().select(*values.column_names))
    pq.write_table(pa.table([values[field.name].cast(field.type) for field in arrow], schema=arrow), path)
    ids = [table.schema().find_field(name).field_id for name in values.column_names]
    kind = DataFileContent.EQUALITY_DELETES
    _add_deletes(table, _describe(table, path, partition, values.num_rows, content=kind, equality_ids=ids), spec_id)
    return path


def _add_deletes(table: Table, file: DataFile, spec_id: int | None = None) -> None:
    transaction = table.transaction()
    change = _AddDeletes(Operation.APPEND, transaction, table.io)
    change.deletes, change.spec_id = file, table.spec().spec_id if spec_id is None else spec_id
    change.commit()
    transaction.commit_transaction()


def _puffin(positions: dict[str, list[int]]) -> bytes:
    """Returns a Puffin file with a deletion vector for each data file, as the Iceberg specification lays it out."""
    body, blobs = b"PFA1", []
    for file, found in positions.items():
        vector = bytes.fromhex("D1D33964") + struct.pack("<qi", 1, 0) + BitMap(found).serialize()
        blob = struct.pack(">I", len(vector)) + vector + struct.pack(">I", zlib.crc32(vector))
        properties = {"referenced-data-file": file, "cardinality": str(len(found))}
        place = {"offset": len(body), "length": len(blob), "snapshot-id": -1, "sequence-number": -1}
        blobs.append({"type": "deletion-vector-v1", "fields": [2147483645], **place, "properties": properties})
        body += blob
    footer = json.dumps({"blobs": blobs}).encode()
    return body + b"PFA1" + footer + struct.pack("<i", len(footer)) + bytes(4) + b"PFA1"


def _new_path(table: Table) -> str:
    folder = Path(table.location().removeprefix("file://")) / "data"
    folder.mkdir(parents=True, exist_ok=True)
    return f"{folder}/foreign-{len(list(folder.iterdir()))}.parquet"


def _describe(
    table: Table,
    path: str,
    partition: Record,
    rows: int,
    file_format: FileFormat = FileFormat.PARQUET,
    content: DataFileContent = DataFileContent.DATA,
    equality_ids: list[int] | None = None,
) -> DataFile:
    made: Callable[..., DataFile] = DataFile.from_args
    nothing: dict[int, Any] = {}
    return made(
        content=content, file_path=path, file_format=file_format, partition=partition, record_count=rows,
        file_size_in_bytes=Path(path).stat().st_size, column_sizes=nothing, value_counts=nothing,
        null_value_counts=nothing, nan_value_counts=nothing, lower_bounds=nothing, upper_bounds=nothing,
        key_metadata=None, split_offsets=None, equality_ids=equality_ids, sort_order_id=None,
        spec_id=table.spec().spec_id,
    )  # fmt: skip

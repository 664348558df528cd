"""Lists the data files of a snapshot by day, and their deleted rows. Refuses files with unknown days or rows."""

import datetime
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel
from pyiceberg.expressions import BooleanExpression, In
from pyiceberg.expressions.visitors import bind, extract_field_ids
from pyiceberg.io import FileIO
from pyiceberg.manifest import DataFile, FileFormat
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import FileScanTask, Table
from pyiceberg.table.deletion_vector import deletion_vectors_from_puffin_file
from pyiceberg.table.puffin import PuffinFile
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform
from pyiceberg.types import DateType

from storage.config import DAY
from storage.errors import CorruptFileError, StorageError

EPOCH = datetime.date(1970, 1, 1)
KEPT_ROWS = 1 << 24
"""Deleted rows that are remembered, of eight bytes each."""
PUFFIN = b"PFA1"
"""First bytes of a file with deletion vectors."""
Positions = npt.NDArray[np.int64]


class SnapshotRef(BaseModel, frozen=True):
    """One state of one table. Reading it always gives the same rows."""

    table: str
    snapshot_id: int


class DayFile(NamedTuple):
    """A data file with the one day of its rows."""

    day: datetime.date
    file: DataFile
    deletes: tuple[str, ...]
    """Paths of the files that list its deleted rows by position: Parquet, or Puffin with deletion vectors."""
    constants: frozenset[int]
    """Ids of fields with one value in the partition, which the file may lack. Without `day`."""


def snapshot_at(table: Table, reference: SnapshotRef) -> Snapshot:
    """Returns the snapshot.

    Raises:
        StorageError: If the table does not have it.
    """
    snapshot = table.snapshot_by_id(reference.snapshot_id)
    if snapshot is None:
        raise StorageError(
            f"snapshot {reference.snapshot_id} of table '{reference.table}'", "a snapshot of the table",
            "none of that id", "It may have expired. Use the current snapshot.",
        )  # fmt: skip
    return snapshot


def schema_at(table: Table, reference: SnapshotRef) -> Schema:
    """Returns the schema of a snapshot. Raises as `snapshot_at`.

    The newest snapshot has the table's present columns, without those that were dropped or renamed after it was
    written. Of those that were added, it has only columns with a default. An ingest adds its columns before it writes,
    and until then rows lack them.
    """
    snapshot, now = snapshot_at(table, reference), table.schema()
    then = now if snapshot.schema_id is None else table.schemas()[snapshot.schema_id]
    if snapshot.snapshot_id != table.metadata.current_snapshot_id:
        return then
    known = {field.field_id for field in then.fields}
    return Schema(*(one for one in now.fields if one.field_id in known or one.initial_default is not None))


def days_filter(days: Iterable[datetime.date]) -> BooleanExpression:
    """Builds a filter for rows of some days."""
    return In(DAY, [day.isoformat() for day in sorted(days)])  # type: ignore[call-arg, arg-type]


def day_of(file: DataFile, place: int = 0) -> datetime.date:
    """Returns the day partition of a data file.

    Args:
        place: Number of the day among the partition's values.
    """
    value: Any = file.partition[place]
    return value if isinstance(value, datetime.date) else EPOCH + datetime.timedelta(days=int(value))


def data_files(
    table: Table,
    reference: SnapshotRef,
    days: Collection[datetime.date] | None = None,
    row_filter: BooleanExpression | None = None,
) -> Iterator[DayFile]:
    """Yields the data files of a snapshot.

    Args:
        days: Days of the files. None: all.
        row_filter: Leaves out files without a matching row, as far as metadata tells.
    Raises:
        StorageError: If the day of a file is not known, or deletes by value apply to it.
    """
    name = reference.table
    schema = schema_at(table, reference)
    day_id = _find_day(name, schema)
    _find_day(name, table.schema())  # filters are bound to this one
    scan = table.scan(snapshot_id=reference.snapshot_id)
    for condition in (row_filter, None if days is None else days_filter(days)):
        if condition is not None and _means_the_same(condition, schema, table.schema()):
            scan = scan.filter(condition)
    specs = {number: _find_place(spec, day_id) for number, spec in table.specs().items()}
    for task in _plan(table, scan):
        spec, place = table.specs()[task.file.spec_id], specs[task.file.spec_id]
        if place is None:
            raise StorageError(
                f"file '{task.file.file_path}' of table '{name}'", "one day's rows, in a partition of that `day`",
                f"partitions by {_describe(spec, schema)}",
                f"Partition the table by `day` and rewrite it: in Spark {rewrite_call(table, 'rewrite-all', 'true')}.",
            )  # fmt: skip
        if task.file.partition[place] is None:
            raise StorageError(
                f"file '{task.file.file_path}' of table '{name}'", "a day in each row",
                f"{task.file.record_count} rows without one", "Delete them with the engine that wrote them.",
            )  # fmt: skip
        day = day_of(task.file, place)
        if days is not None and day not in days:
            continue
        constants = {field.source_id for field in spec.fields if isinstance(field.transform, IdentityTransform)}
        yield DayFile(
            day,
            task.file,
            tuple(sorted(deletes.file_path for deletes in task.delete_files)),
            frozenset(constants - {day_id}),
        )


def refuse_unreadable(table: Table, found: DayFile) -> None:
    """Refuses a file that our readers would read wrongly.

    Raises:
        StorageError: If another engine wrote it in another format.
    """
    path = found.file.file_path
    if found.file.file_format != FileFormat.PARQUET:
        raise StorageError(
            f"file '{path}' of day {found.day}", "a Parquet file", f"one in {found.file.file_format.name}",
            "Set the table's property write.format.default=parquet and rewrite it: in Spark "
            f"{rewrite_call(table, 'rewrite-all', 'true')}.",
        )  # fmt: skip


class DeletedRows:
    """Reads which rows of data files another engine has deleted by position (Iceberg specification, "Position Delete
    Files" and "Deletion Vectors"). A list may name rows of all files of a day, so the last ones read are kept.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Mapping[str, Positions]] = {}

    def positions(self, io: FileIO, path: str, deletes: Iterable[str]) -> Positions:
        """Returns the positions of a data file's deleted rows, ascending and each once.

        Args:
            io: Opens the lists.
            path: The data file.
            deletes: Paths of the lists of its deleted rows.
        Raises:
            CorruptFileError: If one of them is unreadable.
        """
        found = [rows for listed in deletes if (rows := self._read(io, listed).get(path)) is not None]
        return np.unique(np.concatenate(found)) if found else np.empty(0, np.int64)

    def count_left(self, io: FileIO, found: DayFile) -> int:
        """Returns how many rows of a data file are not deleted. Raises as `positions`."""
        return found.file.record_count - len(self.positions(io, found.file.file_path, found.deletes))

    def estimate_left(self, io: FileIO, found: DayFile) -> int:
        """As `count_left`, but a damaged list deletes nothing."""
        try:
            return self.count_left(io, found)
        except CorruptFileError:
            return found.file.record_count

    def _read(self, io: FileIO, listed: str) -> Mapping[str, Positions]:
        if listed not in self._kept:
            self._kept[listed] = _read_list(io, listed)
            sizes = {name: sum(map(len, rows.values())) for name, rows in self._kept.items()}
            for oldest in list(sizes)[:-1]:
                if sum(sizes.values()) > KEPT_ROWS:
                    del self._kept[oldest], sizes[oldest]
        return self._kept[listed]


def _read_list(io: FileIO, listed: str) -> dict[str, Positions]:
    """Returns data file -> positions of its deleted rows."""
    try:
        with io.new_input(listed).open() as file:
            puffin = file.read(len(PUFFIN)) == PUFFIN
            file.seek(0)
            return _read_vectors(file.read()) if puffin else _read_positions(file)
    except (OSError, ValueError, LookupError, pa.ArrowException) as error:
        raise CorruptFileError(
            f"file '{listed}', which lists deleted rows", "a whole Parquet or Puffin file",
            str(error).split("\n")[0].rstrip(".") or "none", "Ingest the day again with force=true.",
        ) from error  # fmt: skip


def _read_positions(file: Any) -> dict[str, Positions]:
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


def rewrite_call(table: Table, option: str, value: str) -> str:
    """Returns the SQL to rewrite the files of a table in Spark."""
    name = ".".join(table.name()[-2:])
    return f"`CALL system.rewrite_data_files(table => '{name}', options => map('{option}', '{value}'))`"


def _plan(table: Table, scan: Any) -> Iterable[FileScanTask]:
    try:
        tasks: Iterable[FileScanTask] = scan.plan_files()
    except ValueError as error:
        if "equality deletes" not in str(error):
            raise
        raise StorageError(
            f"table '{table.name()[-1]}'", "no deletes by value (equality deletes)", "some",
            "Apply them with the engine that wrote them, in Spark with "
            f"{rewrite_call(table, 'delete-file-threshold', '1')}.",
        ) from error  # fmt: skip
    return tasks


def _means_the_same(row_filter: BooleanExpression, then: Schema, now: Schema) -> bool:
    """Tells whether a filter compares the same columns in two schemas. pyiceberg plans with the table's present one."""
    try:
        fields = [extract_field_ids(bind(schema, row_filter, case_sensitive=True)) for schema in (then, now)]
    except (ValueError, TypeError):
        return False
    return fields[0] == fields[1]


def _find_day(table: str, schema: Schema) -> int:
    """Returns the field id of the column `day`."""
    field = next((field for field in schema.fields if field.name == DAY), None)
    if field is None or not isinstance(field.field_type, DateType):
        alike = [f"'{other.name}' {other.field_type}" for other in schema.fields if other.name.lower() == DAY]
        raise StorageError(
            f"table '{table}'", "a column `day` of type date", ", ".join(alike) or "no column of that name",
            "Ingest its files into a table of another name, with source.day_column.",
        )  # fmt: skip
    return field.field_id


def _find_place(spec: PartitionSpec, day_id: int) -> int | None:
    """Returns the place of the day in the partition, or None if rows of several days may share a file."""
    for place, field in enumerate(spec.fields):
        if field.source_id == day_id and isinstance(field.transform, IdentityTransform):
            return place
    return None


def _describe(spec: PartitionSpec, schema: Schema) -> str:
    named = [f"{field.transform} of {schema.find_column_name(field.source_id)}" for field in spec.fields]
    return ", ".join(named) or "nothing"

"""Lists the data files of a snapshot by day, and what deletes their rows."""

import datetime
import gc
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import pyarrow.fs as fs
from pydantic import BaseModel
from pyiceberg.expressions import AlwaysTrue, And, BooleanExpression
from pyiceberg.expressions.visitors import bind, extract_field_ids
from pyiceberg.io.pyarrow import PyArrowFileIO
from pyiceberg.manifest import DataFile, DataFileContent, FileFormat, ManifestContent, ManifestEntry, ManifestFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.table import ManifestGroupPlanner, Table
from pyiceberg.table.delete_file_index import DeleteFileIndex
from pyiceberg.table.snapshots import Snapshot
from pyiceberg.transforms import IdentityTransform, VoidTransform
from pyiceberg.typedef import Record

from storage.errors import StorageError, reading_metadata
from storage.snapshot.day_rule import EPOCH, DayRule
from storage.snapshot.deletes import DeletedValues, format_error, rewrite_call
from storage.snapshot.foreign import ForeignTable
from storage.snapshot.row_exclusions import FileRows, ReadCache, RowExclusions

MOST_KEPT_BYTES = 1 << 26
"""Bytes of the longest list of a snapshot's files that is remembered. A snapshot never changes."""
FILE_BYTES, METRIC_BYTES = 4_000, 100
"""Bytes that a file and each of its columns' metrics take in such a list, about."""
DATA = "data"
"""Folder of a table's data files."""
METRICS = ("column_sizes", "value_counts", "null_value_counts", "nan_value_counts", "lower_bounds", "upper_bounds")
FILES_AT_A_TIME = 8
"""Files of which days or footers are read concurrently. On an object store each takes a round trip or two."""


class SnapshotRef(BaseModel, frozen=True):
    """One state of one table. Reading it always gives the same rows."""

    table: str
    snapshot_id: int


class DayFile(NamedTuple):
    """A data file, or the part of it that is of one day."""

    rows: FileRows
    file: DataFile
    constants: frozenset[int]
    """Ids of fields with one value in the partition, which the file may lack. Without the column `day`."""


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
    """Returns the schema of a snapshot, with the column `day`. Raises as `snapshot_at` and `DayRule`."""
    return rule_of(table, reference).schema(stored_schema(table, reference))


def stored_schema(table: Table, reference: SnapshotRef) -> Schema:
    """Returns the schema of a snapshot's files. Raises as `snapshot_at`.

    The newest snapshot has the table's present columns, without those that were dropped or renamed after it was
    written. Of those that were added, it has only columns with a default. An ingest adds its columns before it writes,
    and until then rows lack them.
    """
    snapshot, now = snapshot_at(table, reference), table.schema()
    then = now if snapshot.schema_id is None else table.schemas()[snapshot.schema_id]
    if snapshot.snapshot_id != table.metadata.current_snapshot_id:
        return then
    known = {field.field_id for field in then.fields}
    kept = [one for one in now.fields if one.field_id in known or one.initial_default is not None]
    return now if len(kept) == len(now.fields) else Schema(*kept)  # a new schema has none of its indexes yet


def rule_of(table: Table, reference: SnapshotRef) -> DayRule:
    """Returns how the rows of a snapshot tell their day. Raises as `DayRule`."""
    config = table.source if isinstance(table, ForeignTable) else None
    return DayRule(reference.table, stored_schema(table, reference), config)


def day_of(file: DataFile) -> datetime.date:
    """Returns the day partition of a data file that we wrote."""
    value = file.partition[0]
    return value if isinstance(value, datetime.date) else EPOCH + datetime.timedelta(days=int(value))


def data_files(
    table: Table,
    reference: SnapshotRef,
    days: Collection[datetime.date] | None = None,
    row_filter: BooleanExpression | None = None,
    cache: ReadCache | None = None,
) -> Iterator[DayFile]:
    """Returns the data files of a snapshot, those with rows of several days once for each.

    Where neither a partition nor the bounds of a file tell the day of its rows, the column of the day is read.

    Args:
        days: Days of the files. None: all.
        row_filter: Leaves out files without a matching row, as far as metadata tells.
        cache: Remembers the days of rows that were read, and the files of snapshots that were listed whole.
    Raises:
        StorageError: If a row tells no day, or the file has another format than Parquet and may have several.
    """
    rule = rule_of(table, reference)
    cache = cache or ReadCache()
    key = (table.metadata.table_uuid, reference.snapshot_id, rule.signature)
    if row_filter is None and (days is None or key in cache):

        def find() -> _Listing:
            with keeping_garbage():
                return _Listing(_find_files(table, reference, rule, None, None, cache))

        every = cache.get(key, find, MOST_KEPT_BYTES)
        return (one for one in every if days is None or one.rows.day in days)
    return _find_files(table, reference, rule, days, row_filter, cache)


@contextmanager
def keeping_garbage() -> Iterator[None]:
    """Stops the collector of cycles while millions of objects are made that all stay: it would visit each many times.

    Half of the time of a list of 100,000 files was the collector's.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _Listing(list[DayFile]):
    """All files of a snapshot."""

    @property
    def nbytes(self) -> int:
        """Estimated bytes in memory. Files of one table have about as many metrics."""
        some = self[:: max(1, len(self) // 100)]
        metrics = sum(len(getattr(one.file, part) or ()) for one in some for part in METRICS) / max(1, len(some))
        return round(len(self) * (FILE_BYTES + METRIC_BYTES * metrics))


def _find_files(
    table: Table,
    reference: SnapshotRef,
    rule: DayRule,
    days: Collection[datetime.date] | None,
    row_filter: BooleanExpression | None,
    cache: ReadCache,
) -> Iterator[DayFile]:
    """Reads what `data_files` yields from the manifests."""
    exclusions = RowExclusions(table, rule, cache)
    wanted = None if days is None else rule.condition(days)
    found = list(_plan(table, reference, [one for one in (row_filter, wanted) if one is not None], cache))
    dated = [(one, rule.of_partition(one.spec, one.file) or rule.of_bounds(one.file)) for one in found]
    mixed = [one.file.file_path for one, day in dated if day is None]
    for one, day in dated:
        if day is None:
            refuse_format(table, one.file)
    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        read = dict(zip(mixed, pool.map(lambda path: np.unique(exclusions.days(path)).tolist(), mixed), strict=True))
    for one, day in dated:
        same = {field.source_id for field in one.spec.fields if isinstance(field.transform, IdentityTransform)}
        numbers = read[one.file.file_path] if day is None else [(day - EPOCH).days]
        for number in numbers:
            of_day = rule.date_of(number)
            if days is None or of_day in days:
                rows = FileRows(
                    path=one.file.file_path,
                    day=of_day,
                    deletes=one.deletes,
                    values=one.values,
                    rule=rule.signature if day is None else "",
                )
                yield DayFile(rows, one.file, frozenset(same - ({rule.id} if rule.stored else set())))


def filesystem_of(table: Table) -> tuple[fs.FileSystem, str]:
    """Returns the filesystem of the table and the path of its location there."""
    if not isinstance(table.io, PyArrowFileIO):
        raise StorageError(
            f"files of table '{table.name()[-1]}'", "pyiceberg's PyArrowFileIO", type(table.io).__name__,
            "Set the catalog's `py-io-impl` to pyiceberg.io.pyarrow.PyArrowFileIO.",
        )  # fmt: skip
    scheme, host, path = PyArrowFileIO.parse_location(table.location(), table.io.properties)
    return table.io.fs_by_scheme(scheme, host), path.rstrip("/")


def refuse_format(table: Table, file: DataFile) -> None:
    """Refuses a file that our readers would read wrongly.

    Raises:
        StorageError: If another engine wrote it in another format.
    """
    if file.file_format != FileFormat.PARQUET:
        raise format_error(table, file.file_path, file.file_format.name)


class _Planned(NamedTuple):
    """A data file of a snapshot, and what deletes its rows."""

    file: DataFile
    spec: PartitionSpec
    deletes: tuple[str, ...]
    values: tuple[DeletedValues, ...]


def _plan(
    table: Table, reference: SnapshotRef, conditions: Iterable[BooleanExpression], cache: ReadCache
) -> Iterator[_Planned]:
    """Yields the data files that may have rows that pass all conditions.

    Deletes are planned without the conditions: the rows of an equality delete file may have other values elsewhere.
    """
    snapshot, schema = snapshot_at(table, reference), schema_at(table, reference)
    chosen: BooleanExpression = AlwaysTrue()
    for condition in conditions:
        if _means_the_same(condition, schema, table.schema()):
            chosen = And(chosen, condition)
    parts = {ManifestContent.DATA: chosen, ManifestContent.DELETES: AlwaysTrue()}
    entries: dict[ManifestContent, list[ManifestEntry]] = {}
    try:
        with reading_metadata(reference.table):
            manifests = snapshot.manifests(table.io)
            for content, condition in parts.items():
                of_kind = [one for one in manifests if one.content == content]
                entries[content] = [one for found in _entries(table, of_kind, condition, cache) for one in found]
    except StorageError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            snapshot_at(table.refresh(), reference)  # says so if it has just expired
        raise
    specs, positions, values = table.specs(), DeleteFileIndex(), _DeletesByValue(table)
    for entry in sorted(entries[ManifestContent.DELETES], key=lambda one: one.data_file.file_path):
        if entry.data_file.content == DataFileContent.EQUALITY_DELETES:
            values.add(entry)
        else:
            positions.add_delete_file(entry, entry.data_file.partition)
    for entry in entries[ManifestContent.DATA]:
        file, number = entry.data_file, entry.sequence_number or 0
        lists = positions.for_data_file(number, file, file.partition)
        deletes = tuple(sorted(one.file_path for one in lists))
        yield _Planned(file, specs[file.spec_id], deletes, values.of(entry))


class _Manifest(list[ManifestEntry]):
    """The live entries of a manifest, which never changes. A commit keeps most manifests of the snapshot before."""

    @property
    def nbytes(self) -> int:
        """Estimated bytes in memory, beside the files, which lists of them share."""
        return len(self) * FILE_BYTES


def _entries(
    table: Table, manifests: Sequence[ManifestFile], condition: BooleanExpression, cache: ReadCache
) -> Iterator[Iterable[ManifestEntry]]:
    """Yields the entries of manifests that may have rows that pass a condition.

    pyiceberg evaluates also one that all pass, for each file, which takes as long as to decode its entry.
    """
    if not isinstance(condition, AlwaysTrue):
        yield from ManifestGroupPlanner(table.metadata, table.io, condition).plan_manifest_entries(list(manifests))
        return
    files = sum((one.added_files_count or 0) + (one.existing_files_count or 0) for one in manifests)
    kept = MOST_KEPT_BYTES if files * FILE_BYTES <= MOST_KEPT_BYTES else 1

    def read(manifest: ManifestFile) -> _Manifest:
        return _Manifest(manifest.fetch_manifest_entry(table.io, discard_deleted=True))

    def find(manifest: ManifestFile) -> _Manifest:
        key = (table.metadata.table_uuid, manifest.manifest_path)
        found: _Manifest = cache.get(key, lambda: read(manifest), kept)
        return found

    with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
        for found in pool.map(find, manifests):
            yield (one for one in found if one.data_file.record_count)


class _DeletesByValue:
    """Equality delete files. One applies to older data files of its partition, or of all if it has none."""

    def __init__(self, table: Table) -> None:
        self._table, self._specs = table, table.specs()
        self._known = {field.field_id for schema in table.schemas().values() for field in schema.fields}
        self._found: dict[tuple[int, Record] | None, list[tuple[int, DeletedValues]]] = defaultdict(list)

    def add(self, entry: ManifestEntry) -> None:
        file = entry.data_file
        refuse_format(self._table, file)
        fields = tuple(sorted(file.equality_ids or ()))
        if not fields or not self._known.issuperset(fields):
            raise StorageError(
                f"file '{file.file_path}', which deletes rows by value", "whole columns of the table to compare",
                f"fields {', '.join(map(str, fields)) or 'none'}",
                "Apply it with the engine that wrote it, in Spark with "
                f"{rewrite_call(self._table, 'delete-file-threshold', '1')}.",
            )  # fmt: skip
        listed = DeletedValues(path=file.file_path, fields=fields)
        parts = self._specs[file.spec_id].fields
        apart = any(not isinstance(field.transform, VoidTransform) for field in parts)
        self._found[(file.spec_id, file.partition) if apart else None].append((entry.sequence_number or 0, listed))

    def of(self, entry: ManifestEntry) -> tuple[DeletedValues, ...]:
        if not self._found:
            return ()
        file, age = entry.data_file, entry.sequence_number or 0
        found = [*self._found.get(None, ()), *self._found.get((file.spec_id, file.partition), ())]
        return tuple(one for number, one in found if number > age)


def _means_the_same(row_filter: BooleanExpression, then: Schema, now: Schema) -> bool:
    """Tells whether a filter compares the same columns in two schemas. pyiceberg plans with the table's present one."""
    try:
        fields = [extract_field_ids(bind(schema, row_filter, case_sensitive=True)) for schema in (then, now)]
    except (ValueError, TypeError):
        return False
    return fields[0] == fields[1]

"""Writes to tables: replaces whole days or appends a few rows, in one commit each."""

import datetime
import json
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from types import MappingProxyType
from typing import Any, TypedDict, TypeVar, Unpack

import pyarrow as pa
from pyiceberg.exceptions import CommitFailedException, TableAlreadyExistsError
from pyiceberg.manifest import DataFile
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Operation

from storage.arrow import family_of, is_same_type
from storage.config import find_owner
from storage.errors import ConflictError, ContractError, StorageError, UnknownCommitError
from storage.keys import is_key
from storage.snapshot.catalog import PART_OF, new_table
from storage.snapshot.commit import CachedTransaction, RecordingIO, ReplacedDays, committing
from storage.snapshot.day_rule import days_filter
from storage.snapshot.days import CONTENTS, IDENTITIES, NOTES, hash_paths
from storage.snapshot.files import SnapshotRef, data_files, day_of
from storage.snapshot.pyiceberg_private import table_of
from storage.warehouse import Warehouse, check_name, reference_of, refuse_mixed
from storage.writer import DataFileWriter, collect_chunks

COMMIT_ROWS = 5_000_000
"""Days with so many rows are written in one commit. What a commit costs grows with the days of the table."""
T = TypeVar("T")


def in_commits(days: Iterable[T], rows: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Groups days in their order, with at most so many rows a group. A larger day is a group of its own.

    Example:
        >>> list(in_commits([3, 4, 9, 1], lambda day: day, 7))
        [[3, 4], [9], [1]]
    """
    group: list[T] = []
    count = 0
    for day in days:
        if group and count + rows(day) > most:
            yield group
            group, count = [], 0
        group.append(day)
        count += rows(day)
    if group:
        yield group


def write_in_commits(days: Iterable[T], rows: Callable[[T], int], write: Callable[[list[T]], object]) -> None:
    """Writes days in groups of COMMIT_ROWS. Those of a group that fails are written one by one, up to the one at fault.

    Args:
        write: Writes a group in one commit.
    """
    for group in in_commits(days, rows, COMMIT_ROWS):
        try:
            write(group)
        except ContractError as error:
            if len(group) == 1 or isinstance(error, UnknownCommitError):
                raise
            for day in group:
                write([day])


class DayRecords(TypedDict, total=False):
    """Further arguments of `replace_days`. All but the last are those of `replace_files`."""

    notes: Mapping[datetime.date, Any]
    same: Mapping[datetime.date, str]
    by_day: bool
    """Whether a day has no more files than its rows need. Rows come in order of their days."""


def replace_days(
    warehouse: Warehouse,
    name: str,
    days: Mapping[datetime.date, str],
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    rows: int,
    made_of: SnapshotRef | None = None,
    anew: Collection[str] = (),
    **records: Unpack[DayRecords],
) -> SnapshotRef:
    """Replaces whole days of a table in one commit. Creates the table or adds columns as needed.

    Readers see either all old days or all new ones. Memory holds `file_rows` rows, and a few times as many if they are
    small.

    Args:
        days: Day -> identity of what is written, recorded in the snapshot's summary.
        schema: Arrow schema of the batches, including the column `day`.
        batches: The rows, all of them in `days`.
        rows: Expected number of rows, checked before the commit and against the table after it.
        made_of: The snapshot that the new rows were derived from.
        anew: Columns that are added again if another engine has dropped them. Earlier days have nulls there.
        records: As in `replace_files`, and `by_day` of `DayRecords`.
    Raises:
        ConflictError: If another writer changed one of these days in the meantime.
        StorageError: If the row counts differ, a row belongs to another day, or a column changed its type or was
            renamed or dropped by another engine.
    """
    by_day = records.pop("by_day", False)
    files = partial(_write, name=name, schema=schema, batches=batches, rows=rows, by_day=by_day)
    table = _evolve(warehouse, name, schema, anew)
    if made_of is not None:
        _refuse_changed(warehouse, table, made_of, days)
    notes, same = records.get("notes", {}), records.get("same", {})
    reference = replace_files(warehouse, table, days, files, notes, same)
    _assert_rows(warehouse, reference, sorted(days), rows)
    return reference


class StagedDays:
    """Data files of days that are written, but no part of their table yet. Made by `stage_days`."""

    def __init__(self, warehouse: Warehouse, name: str, schema: pa.Schema, staged: Transaction) -> None:
        self.warehouse, self.name, self.schema = warehouse, name, schema
        self.begun = _snapshot_of(table_of(staged))
        self.metadata, self.io = staged.table_metadata, RecordingIO(table_of(staged).io)
        self.files: list[DataFile] = []

    def write(self, batches: Iterable[pa.RecordBatch], days: Collection[datetime.date], rows: int) -> None:
        """Writes rows. Arguments and errors as of `replace_days`."""
        writer = DataFileWriter(self.metadata, self.io, self.warehouse.default_layout, uuid.uuid4())
        self.files = [*_write(writer, self.name, self.schema, batches, rows)]
        for file in self.files:
            _refuse_other_day(self.name, file, days)

    def commit(self, days: Mapping[datetime.date, str], notes: Mapping[datetime.date, Any]) -> SnapshotRef:
        """Replaces days of the table by their files. Creates the table or adds columns as needed.

        Raises:
            ConflictError: If another writer changed one of these days, or the columns of the table, in the meantime.
        """
        table = _evolve(self.warehouse, self.name, self.schema)
        now, then = table.metadata, self.metadata
        kept = all(field in now.schema().fields for field in then.schema().fields)  # others are null in our files
        if not kept or (now.location, now.spec()) != (then.location, then.spec()):
            raise ConflictError(
                f"schema of table '{self.name}'", "no concurrent change", "another one", "Run the command again."
            )
        _refuse_changed(self.warehouse, table, self.begun, days)
        files = [file for file in self.files if day_of(file) in days]
        reference = replace_files(self.warehouse, table, days, lambda writer: files, notes, io=self._hand_over(files))
        _assert_rows(self.warehouse, reference, sorted(days), sum(file.record_count for file in files))
        return reference

    def _hand_over(self, files: Sequence[DataFile]) -> RecordingIO:
        """Returns the files' own record: from here on the commit decides whether they stay, whatever ends it."""
        paths, theirs = {file.file_path for file in files}, RecordingIO(self.io.io)
        theirs.written = [path for path in self.io.written if path in paths]
        self.io.written = [path for path in self.io.written if path not in paths]
        return theirs


@contextmanager
def stage_days(warehouse: Warehouse, name: str, schema: pa.Schema) -> Iterator[StagedDays | None]:
    """Yields what writes data files for a table before it is known which of them become part of it.

    The table need not exist. Files that no commit has named are deleted at the end. None: the table cannot have these
    columns, and `replace_days` says why.
    """
    if warehouse.has_table(name):
        table = warehouse.writable(name)
        try:
            _refuse_unfit(table, schema)
        except StorageError:
            yield None
            return
        transaction: Transaction = CachedTransaction(table)
        if not _holds_all(table.schema().as_arrow(), schema):
            with transaction.update_schema() as update:
                update.union_by_name(schema)
    else:
        identifier = (warehouse.config.namespace, name)
        transaction = new_table(warehouse.catalog, identifier, schema, warehouse.default_layout.properties())
    staged = StagedDays(warehouse, name, schema, transaction)
    try:
        yield staged
    finally:
        staged.io.discard()


def _write(
    writer: DataFileWriter,
    name: str,
    schema: pa.Schema,
    batches: Iterable[pa.RecordBatch],
    rows: int,
    by_day: bool = False,
) -> Iterator[DataFile]:
    count = 0
    for file in writer.write_all(collect_chunks(schema, batches, writer.layout.file_rows, by_day)):
        count += file.record_count
        yield file
    if count != rows:
        raise StorageError(
            f"table '{name}'", f"{rows} rows to write", f"{count}",
            "The source changed while it was read. Run the command again.",
        )  # fmt: skip


def _refuse_other_day(name: str, file: DataFile, days: Collection[datetime.date]) -> None:
    if day_of(file) not in days:
        raise StorageError(
            f"table '{name}'", f"rows of {_span(days)} only", f"rows of {day_of(file)}", "Pass all days of the rows."
        )


def replace_files(
    warehouse: Warehouse,
    table: Table,
    days: Mapping[datetime.date, str],
    files: Callable[[DataFileWriter], Iterable[DataFile]],
    notes: Mapping[datetime.date, Any] = MappingProxyType({}),
    same: Mapping[datetime.date, str] = MappingProxyType({}),
    io: RecordingIO | None = None,
) -> SnapshotRef:
    """Replaces the files of whole days in one commit. A change that did not take effect leaves no file.

    Args:
        table: The table as loaded when the rows were read.
        days: As in `replace_days`. An empty identity is not recorded.
        files: Writes the new files. An error it raises aborts the commit.
        notes: Day -> a JSON value about what is written, for `day_notes`. The next write of the day discards it.
        same: Day -> its `day_contents`, where the new files hold the same rows as before. They may have columns
            that the table has never had.
        io: Has written the new files already. None: they are written now.
    Raises:
        ConflictError: If another writer changed one of these days in the meantime.
        StorageError: If a file belongs to another day.
        UnknownCommitError: If the commit may or may not have taken effect.
    """
    name, transaction, io = table.name()[-1], CachedTransaction(table), io or RecordingIO(table.io)
    overwrite = _overwrite(warehouse, table, transaction, days)
    written = {day: identity for day, identity in days.items() if identity}
    paths: dict[datetime.date, list[str]] = {day: [] for day in days}
    with committing(table, transaction, io, overwrite.snapshot_id, f"no other writer of {_span(days)}"):
        for file in files(DataFileWriter(table.metadata, io, warehouse.default_layout, overwrite.commit_uuid)):
            _refuse_other_day(name, file, days)
            overwrite.append_data_file(file)
            paths[day_of(file)].append(file.file_path)
        contents = {day: [as_now := hash_paths(paths[day]), same.get(day, as_now)] for day in paths}
        overwrite.records = {IDENTITIES: written, NOTES: notes, CONTENTS: contents}
        overwrite.commit()
    return SnapshotRef(table=name, snapshot_id=overwrite.snapshot_id)


def append_rows(warehouse: Warehouse, name: str, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> SnapshotRef:
    """Adds a few rows, such as events, in one commit. Creates the table or adds columns as needed.

    Concurrent appends are kept: pyiceberg retries the commit on top of them.

    Args:
        schema: Arrow schema of the rows, including the column `day`.
    Raises:
        ConflictError: If other writers committed first at every retry. Nothing is added then.
    """
    table = _evolve(warehouse, name, schema)
    transaction, io = CachedTransaction(table), RecordingIO(table.io)
    append = transaction.update_snapshot().fast_append()
    chunk = pa.Table.from_pylist(list(rows), schema)
    with committing(table, transaction, io, append.snapshot_id, "no other writer meanwhile"):
        for file in DataFileWriter(table.metadata, io, warehouse.default_layout, append.commit_uuid).write(chunk):
            append.append_data_file(file)
        append.commit()
    return SnapshotRef(table=name, snapshot_id=append.snapshot_id)


def _refuse_changed(
    warehouse: Warehouse, table: Table, made_of: SnapshotRef | None, days: Iterable[datetime.date]
) -> None:
    """Checks that days have not changed since a snapshot. The commit itself detects later changes.

    Args:
        made_of: None: there was none.
    """
    before, now = ({} if one is None else warehouse.day_names(one) for one in (made_of, _snapshot_of(table)))
    changed = [day for day in days if before.get(day) != now.get(day)]
    if changed:
        when = "before the first snapshot" if made_of is None else f"as in snapshot {made_of.snapshot_id}"
        raise ConflictError(
            f"table '{table.name()[-1]}'", f"{_span(changed)} {when}", "rows written in the meantime",
            "Run the command again.",
        )  # fmt: skip


def _snapshot_of(table: Table) -> SnapshotRef | None:
    return None if table.current_snapshot() is None else reference_of(table)


def _overwrite(
    warehouse: Warehouse, table: Table, transaction: Transaction, days: Iterable[datetime.date]
) -> ReplacedDays:
    """Starts one snapshot for the whole change. Table.append() would make one for every chunk of rows."""
    where = days_filter(days)
    kind = Operation.APPEND if table.current_snapshot() is None else Operation.OVERWRITE
    overwrite = ReplacedDays(kind, transaction, table.io)
    overwrite.delete_by_predicate(where)
    if table.current_snapshot() is not None:
        for found in data_files(table, reference_of(table), frozenset(days), cache=warehouse.cache):
            refuse_mixed(found)
            overwrite.delete_data_file(found.file)
    return overwrite


def _assert_rows(warehouse: Warehouse, reference: SnapshotRef, days: Sequence[datetime.date], rows: int) -> None:
    left_out = warehouse.left_out(reference)
    found = data_files(left_out.table, reference, days, cache=warehouse.cache)
    stored = sum(left_out.estimate_left(one.rows, one.file.record_count) for one in found)
    if stored != rows:
        raise StorageError(
            f"table '{reference.table}'", f"{rows} rows in {len(days)} days after the commit", f"{stored}",
            "Do not train on this snapshot. Ingest the days again.",
        )  # fmt: skip


def _evolve(warehouse: Warehouse, name: str, schema: pa.Schema, anew: Collection[str] = ()) -> Table:
    """Creates the table or adds missing columns. Retries if another writer changes the schema first."""
    for column in schema.names:
        check_name(column)
    for _ in range(5):
        try:
            if not warehouse.has_table(name):
                identifier = (warehouse.config.namespace, name)
                new_table(
                    warehouse.catalog, identifier, schema, warehouse.default_layout.properties()
                ).commit_transaction()
            table = warehouse.writable(name)
            _refuse_unfit(table, schema, anew)
            if not _holds_all(table.schema().as_arrow(), schema):
                with table.update_schema() as update:
                    update.union_by_name(schema)  # quadratic in the number of columns
            return table
        except (CommitFailedException, TableAlreadyExistsError) as error:
            conflict = error
    others = "another writer's change five times"
    raise ConflictError(
        f"schema of table '{name}'", "no concurrent change", others, "Run the command again."
    ) from conflict


def _refuse_unfit(table: Table, schema: pa.Schema, anew: Collection[str] = ()) -> None:
    """Refuses columns that the table cannot have."""
    _refuse_stranger(table, schema)
    _refuse_split(table, schema.names, anew)
    _check_types(table.name()[-1], table.schema().as_arrow(), schema)


def _span(days: Iterable[datetime.date]) -> str:
    first, last = min(days), max(days)
    return f"{first}" if first == last else f"{first} to {last}"


def _refuse_stranger(table: Table, schema: pa.Schema) -> None:
    """Refuses to write features, statistics or scores into a table that somebody made for another purpose."""
    name, known = table.name()[-1], set(table.schema().column_names)
    owner, missing = find_owner(name), [column for column in schema.names if column not in known]
    if owner is None or table.properties.get(PART_OF) == owner or not missing:
        return
    raise StorageError(
        f"table '{name}'", f"the one that belongs to table '{owner}'", f"a table without {', '.join(missing)}",
        f"Rename table '{name}', or set another name than '{owner}'.",
    )  # fmt: skip


def _refuse_split(table: Table, names: Collection[str], anew: Collection[str]) -> None:
    """Refuses to write a column by a name that another engine took from it: its values would be in two columns.

    A renamed column may be written by its new name. A map may be gone if its keys have columns.

    Args:
        anew: Names that may be added again after a drop.
    """
    fields = {(field.name, field.field_id) for schema in table.schemas().values() for field in schema.fields}
    now = {field.field_id: field.name for field in table.schema().fields}
    for name, number in sorted(fields):
        there, where = now.get(number), f"column '{name}' of table '{table.name()[-1]}'"
        if there == name or name not in names:
            continue
        if there is not None and not (there in names and {one for old, one in fields if old == there} == {number}):
            raise StorageError(
                where, f"field {number} of that name", f"another engine's rename of it to '{there}'",
                f'Rename it back, or follow it in the source with rename={{"{name}": "{there}"}} and in the features.',
            )  # fmt: skip
        gone = there is None and name not in now.values() and name not in anew
        if gone and not any(is_key(column, [name]) for column in now.values()):
            raise StorageError(
                where, f"field {number}, which it was", "a drop of it by another engine. It would be null in all "
                "earlier days", f'Give the column another name, such as source.rename={{"{name}": "{name}_2"}}.',
            )  # fmt: skip
    cased = {there.lower(): there for there in now.values()}
    for name in names:
        other = cased.get(name.lower(), name)
        if other != name and name not in now.values():
            raise StorageError(
                f"column '{name}' of table '{table.name()[-1]}'",
                "a name that differs from others in more than its case",
                f"'{other}' in the table: the values of one column would be in two",
                f'Write one of them everywhere, such as source.rename={{"{name}": "{other}"}}.',
            )  # fmt: skip


def _check_types(table: str, old: pa.Schema, new: pa.Schema) -> None:
    known = set(old.names)
    pairs = {name: (old.field(name).type, new.field(name).type) for name in new.names if name in known}
    changed = {name: pair for name, pair in pairs.items() if family_of(pair[0]) != family_of(pair[1])}
    if changed:
        new_names = json.dumps({name: f"{name}_2" for name in changed})
        raise StorageError(
            f"columns of table '{table}'", ", ".join(f"{name} {family_of(pair[0])}" for name, pair in changed.items()),
            ", ".join(f"{name} {family_of(pair[1])}" for name, pair in changed.items()),
            f"A table's column keeps its type. Convert it, begin a new one with source.rename={new_names}"
            " (null in all earlier days), or write all days into another table with name=NAME.",
        )  # fmt: skip


def _holds_all(old: pa.Schema, new: pa.Schema) -> bool:
    """Tells whether a table has all columns of a schema with their types."""
    known = {field.name: field.type for field in old}
    return all(field.name in known and is_same_type(known[field.name], field.type) for field in new)

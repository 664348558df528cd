"""The Iceberg warehouse: tables partitioned by day, replaced a day at a time."""

import datetime
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pyarrow as pa
from pyiceberg.catalog import PY_CATALOG_IMPL, TYPE, URI, Catalog, load_catalog
from pyiceberg.conversions import from_bytes
from pyiceberg.exceptions import (
    CommitFailedException,
    NoSuchTableError,
    RESTError,
    TableAlreadyExistsError,
    ValidationException,
)
from pyiceberg.expressions import BooleanExpression
from pyiceberg.io import PY_IO_IMPL, FileIO, InputFile, OutputFile
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.table import Table, Transaction
from pyiceberg.table.snapshots import Operation, Snapshot
from pyiceberg.utils.config import Config

from storage.arrow import family_of, is_same_type
from storage.config import NAME, WarehouseConfig, find_owner
from storage.errors import ConflictError, StorageError, UnknownCommitError, reading_metadata
from storage.keys import expand_keys, map_names
from storage.layout.spec import Layout
from storage.objects import add_variables, send_lengths
from storage.reader import DAY, SnapshotReader, SnapshotRef
from storage.snapshot.catalog import ParsedOnceCatalog
from storage.snapshot.commit import CachedTransaction, ReplacedDays
from storage.snapshot.day_rule import days_filter
from storage.snapshot.days import (
    CONTENTS,
    IDENTITIES,
    NOTES,
    hash_paths,
    identities,
    last_identities,
    notes,
    row_hashes_by_files,
)
from storage.snapshot.files import DayFile, data_files, day_of, refuse_format, rule_of, schema_at, snapshot_at
from storage.snapshot.foreign import ForeignTable, ForeignTables, alias_of, newest_snapshot
from storage.snapshot.maps import add_keys
from storage.snapshot.row_exclusions import ReadCache, RowExclusions
from storage.writer import TIMES, DataFileWriter, collect_chunks

_ERRNO = re.compile(r"\[Errno \d+\] ([\w ]+)")
"""What the operating system says, inside the text of an error."""
_PASSWORD = re.compile("//[^/\\s]*@")
"""User and password in an address."""
PART_OF = "dlrm.part-of"
"""Table property: the table of samples that a table belongs to."""
FILES_AT_A_TIME = 16
"""File sizes requested concurrently. On an object store each takes a round trip."""


class Warehouse:
    """Tables of one catalog.

    Args:
        config: Catalog and layout.
        home: Folder of the embedded catalog, used unless the config names another catalog.
    """

    def __init__(self, config: WarehouseConfig, home: Path) -> None:
        self.config = config
        self.home = home
        self._cache = ReadCache()
        self._foreign = ForeignTables(config.tables)

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog, opened on first use. Its namespace is created if missing."""
        properties = dict(self.config.catalog)
        named = {**(Config().get_catalog_config("dlrm") or {}), **properties}  # pyiceberg's own file and variables, too
        if not properties or not named.keys() & {"type", "uri", "py-catalog-impl"}:
            self.home.mkdir(parents=True, exist_ok=True)
            folder = self.home.resolve()
            embedded = {TYPE: "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}"}
            properties = embedded | properties
        if properties.get("warehouse", "").startswith(("file:", "/")):
            properties = {PY_IO_IMPL: "storage.durable.DurableFileIO", **properties}
        send_lengths({key: str(value) for key, value in (named | dict(properties)).items()})
        try:
            catalog = _load_catalog("dlrm", add_variables(properties))
            catalog.create_namespace_if_not_exists(self.config.namespace)
        except (RESTError, OSError, ValueError) as error:
            if not type(error).__module__.startswith(("pyiceberg.", "requests.", "pydantic_core.")):
                raise
            address, text = (_PASSWORD.sub("//", f"{one}") for one in (named.get("uri", "no uri"), error))
            known = _ERRNO.search(text)
            reason = known[1] if known else text.split("\n")[0].rstrip(".")
            remedy = "Check `warehouse.catalog`, its token or credential, and that the server runs."
            raise StorageError.of(f"cannot open the catalog at {address}: {reason}", remedy) from error
        return catalog

    @property
    def default_layout(self) -> Layout:
        """The layout of new tables."""
        config = self.config
        return Layout(codec=config.codec, row_group_rows=config.row_group_rows, file_rows=config.file_rows)

    def table(self, name: str) -> Table:
        """Loads the table in its current state.

        Raises:
            StorageError: If there is no such table.
        """
        if name in self._foreign:
            return self._foreign.load(self.catalog, name)
        identifier = (self.config.namespace, _check_name(name))
        try:
            with reading_metadata(name):
                return self.catalog.load_table(identifier)
        except NoSuchTableError:
            known = ", ".join(sorted(row[-1] for row in self.catalog.list_tables(self.config.namespace))) or "none"
            raise StorageError(
                f"table '{name}'", "a table of the warehouse", f"tables: {known}", "Run `python -m flows.ingest` first."
            ) from None

    def own(self, name: str) -> Table:
        """Loads a table to change or clean it.

        Raises:
            StorageError: If there is no such table, or it is another engine's.
        """
        table = self.table(name)
        if isinstance(table, ForeignTable):
            table.refuse_change()
        return table

    def writable(self, name: str) -> Table:
        """Loads a table to write to it. pyiceberg can read format version 3, but not write it. Raises as `own`."""
        table = self.own(name)
        if table.format_version > 2:
            raise StorageError(
                f"format of table '{name}'", "version 1 or 2 to change it", f"{table.format_version}",
                "Copy it into a table of version 2 with the engine that made it.",
            )  # fmt: skip
        return table

    def has_table(self, name: str) -> bool:
        """Tells whether the table exists."""
        return name in self._foreign or self.catalog.table_exists((self.config.namespace, _check_name(name)))

    def is_foreign(self, name: str) -> bool:
        """Tells whether a table is another engine's, which is only read."""
        return name in self._foreign

    def replace_days(
        self,
        name: str,
        days: Mapping[datetime.date, str],
        schema: pa.Schema,
        batches: Iterable[pa.RecordBatch],
        rows: int,
        notes: Mapping[datetime.date, Any] = MappingProxyType({}),
        made_of: SnapshotRef | None = None,
        same: Mapping[datetime.date, str] = MappingProxyType({}),
    ) -> SnapshotRef:
        """Replaces whole days of a table in one commit. Creates the table or adds columns as needed.

        Readers see either all old days or all new ones. Memory holds `file_rows` rows.

        Args:
            days: Day -> identity of what is written, recorded in the snapshot's summary.
            schema: Arrow schema of the batches, including the column `day`.
            batches: The rows, all of them in `days`.
            rows: Expected number of rows, checked before the commit and against the table after it.
            notes: Day -> a JSON value about what is written, for `day_notes`. The next write of the day discards it.
            made_of: The snapshot that the new rows were derived from.
            same: As in `replace_files`.
        Raises:
            ConflictError: If another writer changed one of these days in the meantime.
            StorageError: If the row counts differ, a row belongs to another day, or a column changed its type.
        """

        def files(writer: DataFileWriter) -> Iterator[DataFile]:
            count = 0
            for chunk in collect_chunks(schema, batches, writer.layout.file_rows):
                count += chunk.num_rows
                yield from writer.write(chunk)
            if count != rows:
                raise StorageError(
                    f"table '{name}'",
                    f"{rows} rows to write",
                    f"{count}",
                    "The source changed while it was read. Run the command again.",
                )

        table = self._evolve(name, schema)
        if made_of is not None:
            self._refuse_changed(table, made_of, days)
        reference = self.replace_files(table, days, files, notes=notes, same=same)
        self._assert_rows(reference, sorted(days), rows)
        return reference

    def replace_files(
        self,
        table: Table,
        days: Mapping[datetime.date, str],
        files: Callable[[DataFileWriter], Iterable[DataFile]],
        notes: Mapping[datetime.date, Any] = MappingProxyType({}),
        same: Mapping[datetime.date, str] = MappingProxyType({}),
    ) -> SnapshotRef:
        """Replaces the files of whole days in one commit. A change that did not take effect leaves no file.

        Args:
            table: The table as loaded when the rows were read.
            days: As in `replace_days`. An empty identity is not recorded.
            files: Writes the new files. An error it raises aborts the commit.
            notes: As in `replace_days`.
            same: Day -> its `day_contents`, where the new files hold the same rows as before. They may have columns
                that the table has never had.
        Raises:
            ConflictError: If another writer changed one of these days in the meantime.
            StorageError: If a file belongs to another day.
            UnknownCommitError: If the commit may or may not have taken effect.
        """
        name, transaction, io = table.name()[-1], CachedTransaction(table), _RecordingIO(table.io)
        overwrite = self._overwrite(table, transaction, days)
        written = {day: identity for day, identity in days.items() if identity}
        paths: dict[datetime.date, list[str]] = {day: [] for day in days}
        with self._committing(name, transaction, io, overwrite.snapshot_id, f"no other writer of {_span(days)}"):
            for file in files(DataFileWriter(table.metadata, io, self.default_layout, overwrite.commit_uuid)):
                if day_of(file) not in days:
                    raise StorageError(
                        f"table '{name}'",
                        f"rows of {_span(days)} only",
                        f"rows of {day_of(file)}",
                        "Pass all days of the rows.",
                    )
                overwrite.append_data_file(file)
                paths[day_of(file)].append(file.file_path)
            contents = {day: [as_now := hash_paths(paths[day]), same.get(day, as_now)] for day in paths}
            overwrite.records = {IDENTITIES: written, NOTES: notes, CONTENTS: contents}
            overwrite.commit()
        return SnapshotRef(table=name, snapshot_id=overwrite.snapshot_id)

    @contextmanager
    def _committing(
        self, name: str, transaction: Transaction, io: "_RecordingIO", snapshot_id: int, expected: str
    ) -> Iterator[None]:
        """Writes files in the block and commits them after it. A change that did not take effect leaves no file.

        If the catalog does not say whether it committed, the files stay, because a snapshot may name them.
        If none does, `vacuum` deletes them.

        Args:
            expected: What the error says was expected of other writers.
        Raises:
            ConflictError: If another writer committed first.
            UnknownCommitError: If the commit may or may not have taken effect.
        """
        try:
            yield
        except BaseException:
            io.discard()
            raise
        try:
            transaction.commit_transaction()
        except Exception as error:
            if self._has_snapshot(name, snapshot_id):
                return
            if isinstance(error, CommitFailedException | ValidationException):
                io.discard()
                raise ConflictError(
                    f"table '{name}'", expected, "a commit of another writer", "Run the command again."
                ) from error
            raise UnknownCommitError(
                f"commit to table '{name}'", "an answer of the catalog", f"{error}".split("\n")[0].rstrip("."),
                "It may still take effect. Run the command again: it skips what was written.",
            ) from error  # fmt: skip

    def _has_snapshot(self, name: str, snapshot_id: int) -> bool:
        """Tells whether a table is known to have a snapshot. False if the catalog does not answer."""
        try:
            return self.table(name).snapshot_by_id(snapshot_id) is not None
        except Exception:
            return False

    def append(self, name: str, schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> SnapshotRef:
        """Adds a few rows, such as events, in one commit. Creates the table or adds columns as needed.

        Concurrent appends are kept: pyiceberg retries the commit on top of them.

        Args:
            schema: Arrow schema of the rows, including the column `day`.
        Raises:
            ConflictError: If other writers committed first at every retry. Nothing is added then.
        """
        table = self._evolve(name, schema)
        transaction, io = CachedTransaction(table), _RecordingIO(table.io)
        append = transaction.update_snapshot().fast_append()
        chunk = pa.Table.from_pylist(list(rows), schema)
        with self._committing(name, transaction, io, append.snapshot_id, "no other writer meanwhile"):
            for file in DataFileWriter(table.metadata, io, self.default_layout, append.commit_uuid).write(chunk):
                append.append_data_file(file)
            append.commit()
        return SnapshotRef(table=name, snapshot_id=append.snapshot_id)

    def _refuse_changed(self, table: Table, made_of: SnapshotRef, days: Iterable[datetime.date]) -> None:
        """Checks that days have not changed since a snapshot. The commit itself detects later changes."""
        before, now = self.day_names(made_of), self.day_names(_reference(table))
        changed = [day for day in days if before.get(day) != now.get(day)]
        if changed:
            raise ConflictError(
                f"table '{made_of.table}'", f"{_span(changed)} as in snapshot {made_of.snapshot_id}",
                "rows written in the meantime", "Run the command again.",
            )  # fmt: skip

    def _overwrite(self, table: Table, transaction: Transaction, days: Iterable[datetime.date]) -> ReplacedDays:
        """Starts one snapshot for the whole change. Table.append() would make one for every chunk of rows."""
        where = days_filter(days)
        kind = Operation.APPEND if table.current_snapshot() is None else Operation.OVERWRITE
        overwrite = ReplacedDays(kind, transaction, table.io)
        overwrite.delete_by_predicate(where)
        if table.current_snapshot() is not None:
            for found in data_files(table, _reference(table), frozenset(days), cache=self._cache):
                _refuse_mixed(found)
                overwrite.delete_data_file(found.file)
        return overwrite

    def _assert_rows(self, reference: SnapshotRef, days: Sequence[datetime.date], rows: int) -> None:
        exclusions = self._exclusions(reference)
        found = data_files(exclusions.table, reference, days, cache=self._cache)
        stored = sum(exclusions.estimate_left(one.rows, one.file.record_count) for one in found)
        if stored != rows:
            raise StorageError(
                f"table '{reference.table}'", f"{rows} rows in {len(days)} days after the commit", f"{stored}",
                "Do not train on this snapshot. Ingest the days again.",
            )  # fmt: skip

    def _evolve(self, name: str, schema: pa.Schema) -> Table:
        """Creates the table or adds missing columns. Retries if another writer changes the schema first."""
        _check_columns(schema)
        for _ in range(5):
            try:
                if not self.has_table(name):
                    identifier = (self.config.namespace, name)
                    with (
                        self.catalog.create_table_transaction(
                            identifier, schema, properties=self._properties(name)
                        ) as creation,
                        creation.update_spec() as spec,
                    ):
                        spec.add_identity(DAY)
                table = self.writable(name)
                _refuse_stranger(table, schema)
                _check_types(name, table.schema().as_arrow(), schema)
                if not _holds_all(table.schema().as_arrow(), schema):
                    with table.update_schema() as update:
                        update.union_by_name(schema)  # quadratic in the number of columns
                return table
            except (CommitFailedException, TableAlreadyExistsError) as error:
                conflict = error
        raise ConflictError(
            f"schema of table '{name}'",
            "no concurrent change",
            "another writer's change five times",
            "Run the command again.",
        ) from conflict

    def _properties(self, name: str) -> dict[str, str]:
        owner = find_owner(name)
        return {
            **({} if owner is None else {PART_OF: owner}),
            "format-version": "2",
            **self.default_layout.properties(),
            # Statistics of hundreds of columns cost more at every commit and plan than they save.
            "write.metadata.metrics.default": "none",
            f"write.metadata.metrics.column.{DAY}": "full",
            "write.metadata.previous-versions-max": "20",
            "write.metadata.delete-after-commit.enabled": "true",
            "write.delete.isolation-level": "serializable",
        }

    def current(self, name: str) -> SnapshotRef:
        """Returns the newest snapshot of a table.

        Raises:
            StorageError: If the table does not exist or was never written.
        """
        return _reference(self.table(name))

    def written_days(self, name: str) -> dict[datetime.date, str]:
        """Returns day -> identity of the write that left its files, for days that have all of them.

        Days that another engine has changed since are left out.
        """
        there = self._whole_names(name)
        found = identities(self.table(name), there) if there else {}
        return {day: identity for day, identity in found.items() if day in there}

    def changed_days(self, name: str) -> dict[datetime.date, str]:
        """Returns day -> identity of our last write, for days that another engine has changed since."""
        there = self._whole_names(name)
        written = identities(self.table(name), there) if there else {}
        last = last_identities(self.table(name)) if there else {}
        return {day: identity for day, identity in last.items() if day in there and day not in written}

    def day_identities(self, name: str) -> dict[datetime.date, str]:
        """Returns day -> identity of the write that left its files, or that left it without files."""
        table = self.table(name)
        return identities(table, {} if table.current_snapshot() is None else self.day_names(_reference(table)))

    def day_notes(self, name: str) -> dict[datetime.date, Any]:
        """Returns day -> the note of the write that left its files.

        Days without a note and days that another engine has written since are left out. A day keeps its note if rows
        of it are only marked as deleted.
        """
        table = self.table(name)
        if table.current_snapshot() is None:
            return {}
        files = self._files(_reference(table))  # deleted rows do not change what a day was made of
        return notes(table, {day: hash_paths([one.file.file_path for one in files[day]]) for day in files})

    def set_properties(self, name: str, values: Mapping[str, str]) -> None:
        """Sets properties of a table in one commit."""
        with self.writable(name).transaction() as transaction:
            transaction.set_properties(dict(values))

    def whole_days(self, name: str) -> set[datetime.date]:
        """Returns the days of the newest snapshot that have all their files in full, from any writer."""
        return set(self._whole_names(name))

    def _whole_names(self, name: str) -> dict[datetime.date, str]:
        """Returns the whole days of the newest snapshot with the hash of their files' names."""
        table = self.table(name) if self.has_table(name) else None
        if table is None or table.current_snapshot() is None:
            return {}
        files = self._files(_reference(table))
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            whole = zip(files, pool.map(partial(_are_whole, table.io), files.values()), strict=True)
            return {day: _name_of(files[day]) for day, found in whole if found}

    def tag(self, reference: SnapshotRef, tag: str) -> None:
        """Tags a snapshot, which keeps it from expiring. Tagging it again changes nothing.

        A table of another engine is not tagged. Its owner decides how long a snapshot stays.

        Raises:
            StorageError: If there is no such snapshot, or another snapshot has the tag.
        """
        table = self.table(reference.table)
        snapshot_at(table, reference)
        if isinstance(table, ForeignTable):
            return
        holder = table.refs().get(tag)
        if holder is not None and holder.snapshot_id != reference.snapshot_id:
            raise StorageError(
                f"tag '{tag}' of table '{reference.table}'", f"snapshot {reference.snapshot_id}",
                f"{holder.snapshot_id}", "A tag cannot move to another snapshot. Choose another name.",
            )  # fmt: skip
        if holder is None:
            self.writable(reference.table).manage_snapshots().create_tag(reference.snapshot_id, tag).commit()

    def schema(self, reference: SnapshotRef, wanted: Iterable[str] = ()) -> pa.Schema:
        """Returns the Arrow schema of the table at the snapshot.

        Args:
            wanted: Columns that are keys of maps, such as `dense_17` or `ids[42..80]`. Other names change nothing.
        """
        schema = schema_at(self.table(reference.table), reference)
        maps = map_names(arrow := schema.as_arrow())
        names = [name for pattern in wanted for name in expand_keys(pattern, arrow.names, maps)] if maps else []
        return add_keys(schema, names).as_arrow() if names else arrow

    def filter_schema(self, reference: SnapshotRef, wanted: Iterable[str] = ()) -> Schema:
        """Returns the columns that a filter can name, and those of `wanted` that are keys of maps."""
        return add_keys(schema_at(self.table(reference.table), reference), wanted)

    def day_rows(self, reference: SnapshotRef) -> dict[datetime.date, int]:
        """Counts the rows of each day at the snapshot, in order of the days.

        It reads metadata, and the lists of deleted rows where another engine has deleted some. A damaged list deletes
        nothing here, so that it blocks no other day. Reading its day raises.
        """
        exclusions = self._exclusions(reference)
        return {
            day: sum(exclusions.estimate_left(one.rows, one.file.record_count) for one in files)
            for day, files in self._files(reference).items()
        }

    def count_rows(self, reference: SnapshotRef, days: Iterable[datetime.date]) -> int:
        """Counts the rows of some days, as `day_rows`.

        Raises:
            StorageError: If they cannot be read, because a file has another format.
        """
        exclusions, files = self._exclusions(reference), self._files(reference)
        found = [one for day in days for one in files[day]]
        for one in found:
            refuse_format(exclusions.table, one.file)
        return sum(exclusions.count_left(one.rows, one.file.record_count) for one in found)

    def _exclusions(self, reference: SnapshotRef) -> RowExclusions:
        table = self.table(reference.table)
        return RowExclusions(table, rule_of(table, reference), self._cache)

    def day_contents(self, reference: SnapshotRef) -> dict[datetime.date, str]:
        """Returns day -> a hash that identifies its rows, whatever files and order they are in.

        It works for days from any writer. It stays the same while only other days or the day's layout change.
        """
        known = row_hashes_by_files(self.table(reference.table))
        return {day: known.get(name, name) for day, name in self.day_names(reference).items()}

    def day_bounds(self, reference: SnapshotRef, column: str) -> dict[datetime.date, tuple[int, int] | None]:
        """Returns day -> bounds of a column of dates or timestamps: days or microseconds since 1970, in UTC.

        They come from the metadata. Another engine may count rows that it has deleted. None: a file tells no bounds.
        """
        fields = schema_at(self.table(reference.table), reference).fields
        field = next((one for one in fields if one.name == column), None)
        files = self._files(reference)
        if field is None or not isinstance(field.field_type, TIMES):
            return dict.fromkeys(files)
        kind, number = field.field_type, field.field_id

        def bounds(found: Iterable[DayFile]) -> tuple[int, int] | None:
            sides = [(one.file.lower_bounds or {}, one.file.upper_bounds or {}) for one in found]
            if any(number not in of for side in sides for of in side):
                return None
            ends: Any = [[from_bytes(kind, of[number]) for of in side] for side in sides]
            return min(first for first, _ in ends), max(last for _, last in ends)

        return {day: bounds(files[day]) for day in files}

    def day_names(self, reference: SnapshotRef) -> dict[datetime.date, str]:
        """Returns day -> a hash of the names of its files. Equal hashes mean equal rows at equal positions."""
        return {day: _name_of(files) for day, files in self._files(reference).items()}

    def day_files(self, reference: SnapshotRef) -> dict[datetime.date, list[DataFile]]:
        """Returns the data files of each day at the snapshot, in order of the days.

        Raises:
            StorageError: If rows of several days may share a file.
        """
        found = self._files(reference)
        for one in (one for files in found.values() for one in files):
            _refuse_mixed(one)
        return {day: [one.file for one in files] for day, files in found.items()}

    def _files(self, reference: SnapshotRef) -> dict[datetime.date, list[DayFile]]:
        """Returns the data files of each day that has a row left."""
        exclusions, files = self._exclusions(reference), dict[datetime.date, list[DayFile]]()
        for found in data_files(exclusions.table, reference, cache=self._cache):
            files.setdefault(found.rows.day, []).append(found)
        return {
            day: found
            for day, found in sorted(files.items())
            if any(
                not (one.rows.deletes or one.rows.values) or exclusions.estimate_left(one.rows, one.file.record_count)
                for one in found
            )
        }

    def reader(
        self, reference: SnapshotRef, columns: Sequence[str], row_filter: BooleanExpression | None = None
    ) -> SnapshotReader:
        """Opens a reader of some columns of a pinned snapshot, for the rows that pass the filter.

        Raises:
            StorageError: If the table does not have a column or the filter does not match its columns.
        """
        return SnapshotReader(self.table(reference.table), reference, columns, row_filter, cache=self._cache)


def _load_catalog(name: str, properties: dict[str, str]) -> Catalog:
    every = {**(Config().get_catalog_config(name) or {}), **properties}
    if f"{every.get(TYPE)}".lower() == "sql" and PY_CATALOG_IMPL not in every and URI in every:
        return ParsedOnceCatalog(name, **{key: str(value) for key, value in every.items()})
    return load_catalog(name, **properties)


def _reference(table: Table) -> SnapshotRef:
    return SnapshotRef(table=alias_of(table), snapshot_id=_current(table).snapshot_id)


def _current(table: Table) -> Snapshot:
    snapshot = newest_snapshot(table)
    if snapshot is None:
        raise StorageError(
            f"table '{alias_of(table)}'", "at least one day", "an empty table", "Run the ingest flow first."
        )
    return snapshot


def _span(days: Iterable[datetime.date]) -> str:
    first, last = min(days), max(days)
    return f"{first}" if first == last else f"{first} to {last}"


def _check_name(name: str) -> str:
    if not NAME.fullmatch(name):
        raise StorageError(f"name {name!r}", f"a name that matches {NAME.pattern}", "another form", "Rename it.")
    return name


def _name_of(files: Iterable[DayFile]) -> str:
    return hash_paths([path for found in files for path in _paths_of(found)])


def _paths_of(found: DayFile) -> list[str]:
    """Returns what decides the rows of a data file: its name, those of the files that delete its rows, and the rule
    of their day."""
    rule = [found.rows.rule] if found.rows.rule else []
    return [found.rows.path, *found.rows.deletes, *(one.path for one in found.rows.values), *rule]


def _refuse_mixed(found: DayFile) -> None:
    if found.rows.rule:
        raise StorageError(
            f"file '{found.rows.path}'", "one day's rows, in a partition of that `day`", "rows of several days",
            "Days of this table are read, but not replaced. Write to a table of another name.",
        )  # fmt: skip


def _are_whole(io: FileIO, files: Sequence[DayFile]) -> bool:
    """Tells whether files have the sizes they were written with, without reading them."""
    try:
        return all(len(io.new_input(found.file.file_path)) == found.file.file_size_in_bytes for found in files)
    except FileNotFoundError:
        return False


def _check_columns(schema: pa.Schema) -> None:
    for name in schema.names:
        _check_name(name)


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


def _check_types(table: str, old: pa.Schema, new: pa.Schema) -> None:
    known = set(old.names)
    pairs = {name: (old.field(name).type, new.field(name).type) for name in new.names if name in known}
    changed = {name: pair for name, pair in pairs.items() if family_of(pair[0]) != family_of(pair[1])}
    if changed:
        raise StorageError(
            f"columns of table '{table}'", ", ".join(f"{name} {family_of(pair[0])}" for name, pair in changed.items()),
            ", ".join(f"{name} {family_of(pair[1])}" for name, pair in changed.items()),
            "The type of a column cannot change. Convert the source column, or write to a table of another name.",
        )  # fmt: skip


def _holds_all(old: pa.Schema, new: pa.Schema) -> bool:
    """Tells whether a table has all columns of a schema with their types."""
    known = {field.name: field.type for field in old}
    return all(field.name in known and is_same_type(known[field.name], field.type) for field in new)


class _RecordingIO(FileIO):
    """Records what is written through it, including partial files, so it can be deleted again."""

    def __init__(self, io: FileIO) -> None:
        super().__init__(io.properties)
        self.io = io
        self.written: list[str] = []

    def new_input(self, location: str) -> InputFile:
        return self.io.new_input(location)

    def new_output(self, location: str) -> OutputFile:
        self.written.append(location)
        return self.io.new_output(location)

    def delete(self, location: str | InputFile | OutputFile) -> None:
        self.io.delete(location)

    def discard(self) -> None:
        """Deletes everything written."""
        for location in self.written:
            with suppress(FileNotFoundError):  # announced but never created
                self.io.delete(location)

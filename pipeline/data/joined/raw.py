"""Reads rows of pinned files, or of a snapshot of a table, with the columns and types that they have there."""

import datetime
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline.data.formats.files import SourceFile, Stamp, fingerprint, form_of, stamp
from pipeline.data.joined.known_files import KnownFiles
from pipeline.data.stored import to_days
from pipeline.errors import ContractError, DataError
from storage.errors import is_shortage, machine_lacks
from storage.objects import ObjectFile, find_objects, is_address, open_file
from storage.reader import SnapshotRef
from storage.scratch import ScratchFolder
from storage.warehouse import Warehouse

KEPT_COPIES = 8
"""How many sets of files a process keeps copies of."""


class RawRows:
    """Rows of files or of a table, read in batches.

    Attributes:
        raw: Columns over all files.
        bytes_read: Bytes of the columns read so far, compressed.

    Args:
        where: The files or the table as an error names them.
        stamps: Of the files. A file with another stamp is refused.
        snapshot: Of a table, in place of files.
        day_column: Column of the files with a day.
    Raises:
        DataError: If a file is unreadable or has changed.
    """

    def __init__(
        self,
        warehouse: Warehouse,
        where: str,
        files: Sequence[str],
        stamps: Sequence[Stamp],
        snapshot: SnapshotRef | None = None,
        day_column: str | None = None,
    ) -> None:
        self.warehouse, self.where, self.files, self.stamps = warehouse, where, files, stamps
        self.snapshot, self.day_column = snapshot, day_column
        self.bytes_read = 0
        self.read = {path: path for path in files}
        self.raw = self._raw_schema()

    def _raw_schema(self) -> pa.Schema:
        if self.snapshot is not None:
            return self.warehouse.schema(self.snapshot)
        self._copies: ScratchFolder | None = None
        self._days: dict[datetime.date, list[str]] | None = None
        try:
            others = any(form_of(Path(path), "auto") != "parquet" for path in self.files)
            schemas = [] if others else self._known_schemas()
            if others or not _have_one_type(schemas):
                self._check_stamps(self.files)
                self._copies, self.read = _copy_typed(
                    tuple(self.files), tuple(map(tuple, self.stamps)), self.warehouse.home / "tmp",
                    tuple(sorted(self.warehouse.config.catalog.items())),
                )  # fmt: skip
                schemas = [self._schema_of(path) for path in self.read.values()]
            return pa.unify_schemas(schemas, promote_options="permissive")
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error, self.files, values=False) from error

    def _known_schemas(self) -> list[pa.Schema]:
        """Opens the files that are not known."""
        known = self._known = KnownFiles(self.warehouse.home, self.where, self.files, self.stamps, self.day_column)
        new = [path for path in self.files if path not in known.files]
        self._check_stamps(new)
        schemas = {path: self._schema_of(path) for path in new}
        self._check_stamps(new)
        return known.add_schemas(schemas)

    def _check_stamps(self, files: Iterable[str]) -> None:
        stamps = dict(zip(self.files, self.stamps, strict=True))
        wanted = list(files)
        changed = find_changed(wanted, [stamps[path] for path in wanted], self.warehouse.config.catalog)
        if changed is not None:
            raise DataError(
                f"{self.where}, file '{changed}'", "the file unchanged since the run started",
                "a changed or missing file", "Run the command again to use the files as they are now.",
            )  # fmt: skip

    def days_of_files(self) -> dict[datetime.date, str]:
        """Returns day -> a hash of the files that have rows of it."""
        stamps = dict(zip(self.files, self.stamps, strict=True))
        return {day: fingerprint([stamps[path] for path in files]) for day, files in self._files_by_day().items()}

    def _files_by_day(self) -> dict[datetime.date, list[str]]:
        """Returns day -> the files with rows of it. Reads the days of files that are not known."""
        if self._days is None:
            known = None if self._copies is not None else self._known  # types of copies depend on the other files
            new = self.files if known is None else [path for path in self.files if known.files[path].days is None]
            self._check_stamps(new)
            found = {path: tuple(sorted(self._days_in(path))) for path in new}
            self._check_stamps(new)
            days = found if known is None else known.add_days(found)
            self._days = {}
            for path in self.files:
                for day in days[path]:
                    self._days.setdefault(day, []).append(path)
            self._days = dict(sorted(self._days.items()))
        return self._days

    def _days_in(self, path: str) -> set[datetime.date]:
        column = self.day_column
        assert column is not None
        found: set[datetime.date] = set()
        for batch in self._read(path, [column], None):
            found.update(self._days_of(batch).unique().drop_null().to_pylist())
        return found

    def _open(self, path: str) -> pa.NativeFile:
        return open_file(path, self.warehouse.config.catalog)

    def _schema_of(self, path: str) -> pa.Schema:
        with self._open(path) as opened, _parquet_file(opened) as file:
            return file.schema_arrow

    def parts(self) -> dict[str, str]:
        """Returns the days of a table, or the files, in reading order: name -> a hash that changes with its rows."""
        if self.snapshot is not None:
            return {f"{day}": name for day, name in self.warehouse.day_names(self.snapshot).items()}
        return {path: fingerprint([status]) for path, status in zip(self.files, self.stamps, strict=True)}

    def identify(self, columns: Sequence[str]) -> list[str]:
        """Returns all that decides the values of columns in a part, beside the part."""
        if self.snapshot is None:
            return [f"{self.raw.field(name).type}" for name in columns]
        reader = self.warehouse.reader(self.snapshot, list(dict.fromkeys(columns)))
        return [reader.identify(name) for name in columns]

    def batches_by_part(self, columns: Sequence[str], parts: Collection[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
        """Yields the name of a part and columns of its rows, for some of `parts`."""
        if self.snapshot is not None:
            reader = self.warehouse.reader(self.snapshot, columns)
            for fragment in reader.fragments(map(datetime.date.fromisoformat, parts)):
                for batch in reader.batches(fragment):
                    yield f"{fragment.day}", batch
            self.bytes_read += reader.bytes_read
            return
        wanted = set(parts)
        files = [path for path in self.files if path in wanted]
        self._check_stamps(files)
        for path in files:
            for batch in self._read(path, columns, None):
                yield path, batch

    def batches(self, columns: Sequence[str], day: datetime.date | None = None) -> Iterator[pa.RecordBatch]:
        """Yields columns of the rows of a day, or of all."""
        if day is None or self.snapshot is not None:
            parts = self.parts() if day is None else [f"{day}"]
            yield from (batch for _, batch in self.batches_by_part(columns, parts))
            return
        dated = [] if self.day_column is None else [self.day_column]
        files = self._files_by_day().get(day, []) if dated else self.files
        self._check_stamps(files)
        for path in files:
            for batch in self._read(path, list(dict.fromkeys([*columns, *dated])), day):
                yield batch.filter(pc.equal(self._days_of(batch), pa.scalar(day, pa.date32()))) if dated else batch

    def _read(self, path: str, columns: Sequence[str], day: datetime.date | None) -> Iterator[pa.RecordBatch]:
        """Reads columns of one file in their types over all files. Columns missing from the file are null."""
        schema = pa.schema([self.raw.field(name) for name in columns]).remove_metadata()
        try:
            for batch in self._parquet(self.read[path], schema, day):
                arrays = [
                    batch.column(field.name).cast(field.type)
                    if field.name in batch.schema.names
                    else pa.nulls(batch.num_rows, field.type)
                    for field in schema
                ]
                yield pa.RecordBatch.from_arrays(arrays, schema=schema)
        except (OSError, pa.ArrowException) as error:
            raise self._unreadable(error, [path]) from error

    def _parquet(self, path: str, schema: pa.Schema, day: datetime.date | None) -> Iterator[pa.RecordBatch]:
        with self._open(path) as opened, _parquet_file(opened) as file:
            names = [name for name in schema.names if name in file.schema_arrow.names]
            for number in range(file.num_row_groups):
                group = file.metadata.row_group(number)
                chunks = [group.column(i) for i in range(group.num_columns)]
                if day is not None and not self._may_hold(chunks, day):
                    continue
                wanted = [chunk for chunk in chunks if chunk.path_in_schema.split(".")[0] in names]
                self.bytes_read += sum(chunk.total_compressed_size for chunk in wanted)
                yield from file.iter_batches(row_groups=[number], columns=names, use_threads=False)

    def _may_hold(self, chunks: Sequence[pq.ColumnChunkMetaData], day: datetime.date) -> bool:
        """Tells from statistics whether a row group may have rows of a day."""
        for chunk in chunks:
            if chunk.path_in_schema == self.day_column and chunk.statistics is not None:
                statistics = chunk.statistics
                bounds = [_day(value) for value in (statistics.min, statistics.max)] if statistics.has_min_max else []
                return None in bounds or not bounds or bounds[0] <= day <= bounds[1]
        return True

    def _days_of(self, batch: pa.RecordBatch) -> pa.Array:
        assert self.day_column is not None
        return to_days(f"{self.where}, day_column", batch.column(self.day_column))

    def _unreadable(self, error: Exception, files: Sequence[str], values: bool = True) -> ContractError:
        """Returns an error about one of some files: of its footer, or of its values, too."""
        if isinstance(error, ContractError):
            return error
        if is_shortage(error):
            return machine_lacks(self.where, error)
        from pipeline.data.formats.checksums import find_damage  # imported here: it is for errors alone

        given = dict(zip(self.files, _sources(self.files, self.stamps), strict=True))
        parquet = [given[path] for path in files if form_of(given[path], "auto") == "parquet"]
        if (damage := find_damage(parquet, self.warehouse.config.catalog, values)) is not None:
            return damage
        reason = str(error).split("\n")[0].rstrip(".")
        return DataError(self.where, "readable files", reason, "Repair the files.")


def find_changed(files: Sequence[str], stamps: Sequence[Stamp], properties: Mapping[str, str]) -> str | None:
    """Returns the first file that is gone or has another stamp. None: there is none.

    Args:
        properties: Access to object stores: `warehouse.catalog`.
    """
    for path, status in zip(files, stamps, strict=True):
        if _stamp_of(path, properties) != tuple(status):
            return path
    return None


def _stamp_of(path: str, properties: Mapping[str, str]) -> Stamp | None:
    """Returns the present stamp of a file, or None if it is gone."""
    if is_address(path):
        return next((stamp(one) for one in find_objects(path, properties)), None)
    return stamp(Path(path)) if Path(path).exists() else None


def _parquet_file(opened: pa.NativeFile) -> pq.ParquetFile:
    """Opens a Parquet file. Old times of 96 bits have microseconds: nanoseconds end in the year 2262."""
    return pq.ParquetFile(opened, coerce_int96_timestamp_unit="us")


def _have_one_type(schemas: Sequence[pa.Schema]) -> bool:
    """Tells whether no column has two types in files, or bytes that may be text."""
    kinds: dict[str, set[pa.DataType]] = {}
    for field in (field for schema in schemas for field in schema):
        kinds.setdefault(field.name, set()).add(field.type)
    return all(len(each - {pa.null()}) <= 1 and not any(map(_is_binary, each)) for each in kinds.values())


def _is_binary(kind: pa.DataType) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)


@lru_cache(maxsize=KEPT_COPIES)
def _copy_typed(
    files: tuple[str, ...], stamps: tuple[Stamp, ...], place: Path, properties: tuple[tuple[str, str], ...]
) -> tuple[ScratchFolder, dict[str, str]]:
    """Copies files of any format to Parquet, with the types that columns have over all files.

    Returns:
        The folder of the copies, which lives as long as it is referred to, and file -> copy.
    """
    from pipeline.data.formats.reading import copy_typed  # imported here: most sources need no DuckDB

    folder = ScratchFolder("typed-", place)
    copies = copy_typed(_sources(files, stamps), Path(folder.name), dict(properties))
    return folder, dict(zip(files, map(str, copies), strict=True))


def _sources(files: Sequence[str], stamps: Sequence[Stamp]) -> list[SourceFile]:
    return [
        ObjectFile(path, size, modified) if is_address(path) else Path(path)
        for path, (_, size, modified) in zip(files, stamps, strict=True)
    ]


def _day(value: Any) -> Any:
    """Returns the day of a Parquet statistic, or None if it cannot be determined."""
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(value[:10])
    except (TypeError, ValueError):
        return None

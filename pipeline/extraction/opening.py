"""Opens a source: finds or generates its files, and makes their rows one view of labelled samples."""

import datetime
import fnmatch
import hashlib
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import duckdb
import pyarrow as pa

from pipeline.data.formats.files import SourceFile, address_of, find_files, folder_values, form_of
from pipeline.data.formats.reading import Decoder, ReadableFile, explain, explained, first_line, readable_names
from pipeline.data.formats.sample import choose_sample
from pipeline.data.formats.types import FILE, ISO_DATE, ROW
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.config import REPEAT_DAYS, EventTable, LabelColumns, SideTable, SourceConfig, names_in
from pipeline.extraction.generator.logs import write_logs
from pipeline.extraction.join import KEY, LEFT_OUT, OUTCOMES, REASON, SHOWN, Join
from pipeline.extraction.samples import (
    GOOD,
    add_event_types,
    add_types,
    unstorable_columns,
    unstorable_event_columns,
)
from pipeline.extraction.sources import create_view, join_side_tables
from pipeline.transforms.schema import FeatureSchema
from storage.arrow import is_list, is_text
from storage.keys import map_of
from storage.names import Format
from storage.objects import ObjectFile
from storage.query import column_types, connect
from storage.scratch import ScratchFolder
from storage.warehouse import Warehouse

MEMORY = "25%"
"""Share of the machine's memory that DuckDB may use. Larger joins and sorts spill to disk."""
THREAD_BYTES = 128 << 20
"""Memory that each of DuckDB's threads needs at least."""

SOURCE = "source"
"""View of the rows as the files have them."""

Report = Callable[[str, int, int], None]
"""Called with (what, done, total) while rows are generated or written."""


@dataclass(frozen=True)
class SourceContext:
    """A source, with all that is needed to read it."""

    source: SourceConfig
    schema: FeatureSchema | LabelColumns
    """`LabelColumns` while no features are declared yet: then every column keeps its type."""
    warehouse: Warehouse
    table: str
    """Table that the rows are for. It names the generated logs, too."""
    root: Path
    """Folder that relative paths start from."""
    logs: Path
    """Folder that the generator writes its logs into."""
    only: frozenset[datetime.date] = frozenset()
    """Days that are asked for. Empty: all. Files whose path names another day are then not opened."""
    memory_bytes: int | None = None
    """`ingest.memory_bytes`."""
    events: EventTable | None = None
    """Set if the rows are events of a log. They have no label."""
    repeat_days: int = REPEAT_DAYS
    """`ingest.repeat_days`."""
    roles: frozenset[str] = frozenset()
    """Names and patterns in other sections of the config, which may be of columns."""

    @property
    def label(self) -> str | None:
        """Column of the label, if the rows have one."""
        return self.schema.label if self.events is None else None

    @property
    def outcome_columns(self) -> list[str]:
        """Columns computed from outcomes: labels and weight, no features."""
        return self.source.outcome_columns(self.schema.label)

    @property
    def clocks(self) -> set[str]:
        """Columns of the rows that something takes as a time, and not as a day alone."""
        source, events, sources = self.source, self.events, getattr(self.schema, "sources", ())
        found = {one.as_of for one in (*source.lookups, *sources)}
        found |= {source.outcomes.feature_time if source.outcomes else None, events.time if events else None}
        return {name for name in found if name is not None}

    def reads(self, column: str) -> bool:
        """Tells whether anything in the config may read a column. Of events, and before features are declared: yes."""
        if self.events is not None or isinstance(self.schema, LabelColumns):
            return True
        return column in self._features or self.has_role(column)

    def has_role(self, column: str) -> bool:
        """Tells whether something may read a column for another purpose than `features.dense` or derived features."""
        return column in self._roles

    @cached_property
    def _features(self) -> "_Mentions":
        assert isinstance(self.schema, FeatureSchema)
        return _Mentions.of([*self.schema.named_columns(), *names_in(self.schema)])

    @cached_property
    def _roles(self) -> "_Mentions":
        other = [*names_in(self.schema, {"dense", "derived"}), *names_in(self.source, {"rename", "path"})]
        return _Mentions.of([*other, *self.roles])

    @property
    def repeat_seconds(self) -> int:
        """How long before a row another one may lie that it repeats."""
        return self.repeat_days * 86_400

    def place(self, key: str) -> str:
        """Returns a key of the source as the config has it: an event table has other names for some."""
        if self.events is None:
            return f"source.{key}"
        return f"events.{self.table}.{'time' if key == 'day_column' else key}"

    def find(self, pattern: str | Sequence[str], where: str) -> list[SourceFile]:
        """Finds files of the source. Raises as `find_files`.

        Args:
            where: Config key of the pattern.
        """
        return find_files(pattern, self.root, where, self.warehouse.config.catalog)


@dataclass(frozen=True)
class _Mentions:
    """What texts of a config may mean: columns, patterns of columns, or keys of maps.

    Example:
        >>> mentions = _Mentions.of(["ids_7", "cat_*"])
        >>> [name in mentions for name in ("ids", "cat_user", "cat")]
        [True, True, False]
    """

    names: frozenset[str]
    patterns: re.Pattern[str]

    @classmethod
    def of(cls, texts: Iterable[str]) -> Self:
        names = frozenset(texts)
        patterns = sorted(name for name in names if not {*"*?["}.isdisjoint(name))
        maps = {one for one in map(map_of, names) if one is not None}
        return cls(names | maps, re.compile("|".join(map(fnmatch.translate, patterns)) or "(?!)"))

    def __contains__(self, column: str) -> bool:
        return column in self.names or self.patterns.fullmatch(column) is not None


@dataclass(frozen=True)
class SourceFiles:
    """Files of a source. A local one is an absolute path without links, so that `str` is its address."""

    rows: Sequence[SourceFile]
    """Of the samples, or of the feature log."""
    outcomes: Sequence[SourceFile]
    """Of the outcome log."""
    lookups: Mapping[SideTable, Sequence[SourceFile]]

    def all(self) -> list[SourceFile]:
        """Returns the files of all kinds."""
        return [*self.rows, *self.outcomes, *(file for files in self.lookups.values() for file in files)]

    def covers(self, other: "SourceFiles") -> bool:
        """Tells whether it has all rows and outcomes of another."""
        return {*other.rows} <= {*self.rows} and {*other.outcomes} <= {*self.outcomes}


@dataclass(frozen=True)
class KnownTypes:
    """Types that columns have in files that are not opened."""

    rows: Mapping[str, str] = field(default_factory=dict)
    """Column of the samples, or of the feature log -> DuckDB's type."""
    outcomes: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RawSource:
    """Rows as the files have them."""

    connection: duckdb.DuckDBPyConnection
    view: str
    files: SourceFiles
    read: Mapping[SourceFile, ReadableFile]
    """File -> the file that its rows are read from."""
    notes: Sequence[str]
    """What to warn of."""
    guessed: Collection[str]
    """Columns whose types are what values of text say."""


@dataclass(frozen=True)
class OpenSource:
    """An open source, ready for queries."""

    connection: duckdb.DuckDBPyConnection
    view: str
    """View made by `add_types`."""
    files: SourceFiles
    """The files that are open."""
    read: Mapping[SourceFile, ReadableFile]
    """File -> the file that its rows are read from."""
    join: Join | None
    unmatched: list[tuple[str, str]]
    """(side table, column that is null if the side table lacks the row's key)."""
    left_out: Mapping[str, str]
    """Column that is not stored -> its type: the warehouse has none for it, and no feature reads it."""
    notes: Sequence[str]
    """What to warn of."""

    @property
    def columns(self) -> list[str]:
        """Columns to store."""
        return [name for name in self.connection.view(self.view).columns if not name.startswith("__")]

    @cached_property
    def names(self) -> dict[str, str]:
        """File that rows are read from -> the file of the source, whose copy it may be."""
        files = [*self.files.rows, *self.files.outcomes]
        return {address_of(self.read[file].read): str(file) for file in files}

    @property
    def types(self) -> KnownTypes:
        """Types of the columns as the files have them."""
        logs = {} if self.join is None else column_types(self.connection, OUTCOMES)
        views = column_types(self.connection, SOURCE), logs
        return KnownTypes(*({name: kind for name, kind in one.items() if name not in (FILE, ROW)} for one in views))

    def create_good_view(self, where: str) -> str:
        """Creates a view of the rows to write that meet a condition, and returns its name."""
        self.connection.execute(f"CREATE OR REPLACE VIEW good AS SELECT * FROM {self.view} WHERE {GOOD} AND {where}")
        return "good"


class SourceReader:
    """Opens files of a source, as few as are needed at a time. Text and Avro are decoded once, however often opened.

    Args:
        numbered: Whether the order of the rows is needed even if nothing is joined.
        look_at: Opens a part of the rows with about so many values, spread over all. None: opens all.
    Attributes:
        files: All files of the source, or those with rows of the part.
        scale: Rows of the source for each row that is opened, about.
        known: Types of columns in files that will not be opened: those opened have all these columns.
    """

    def __init__(
        self,
        context: SourceContext,
        report: Report = lambda what, done, total: None,
        numbered: bool = False,
        look_at: int | None = None,
    ) -> None:
        source, catalog = context.source, context.warehouse.config.catalog
        rows, outcomes = _find_files(context, report)
        forms = {file: form_of(file, source.format) for file in rows}
        sample = None if look_at is None else choose_sample(forms, look_at, catalog)
        rows, self.scale = (rows, 1.0) if sample is None else ([*sample.parts], sample.scale)
        lookups = {one: context.find(one.path, "source.lookups path") for one in source.lookups}
        self.context, self.files, self.known = context, SourceFiles(rows, outcomes, lookups), KnownTypes()
        unique = context.events is not None and context.events.unique is not None
        self.numbered = bool(lookups or source.outcomes or unique or numbered)
        every: dict[SourceFile, Format] = dict.fromkeys(self.files.all(), "auto")
        every |= dict.fromkeys(rows, source.format)
        place, limits = context.warehouse.home / "tmp", duckdb_limits(context.memory_bytes)
        self._decoder = Decoder(every, place, catalog, limits, report, {} if sample is None else sample.parts)
        self._stack = ExitStack()
        self._open: OpenSource | None = None
        self._ever: set[SourceFile] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        with self._decoder:
            self._stack.__exit__(*error)

    def decode(self, files: Sequence[SourceFile]) -> dict[SourceFile, ReadableFile]:
        """Returns file -> the file that its rows are read from."""
        return self._decoder.read(files)

    @property
    def opened(self) -> int:
        """Number of files of rows and outcomes that were opened."""
        return len(self._ever)

    def rows(self, files: SourceFiles) -> OpenSource:
        """Returns an open source with at least these files, as `open`. It closes the one that was open before.

        A few files may contradict what all of them together say, such as one that has fractions for missing numbers.
        """
        if self._open is None or not self._open.files.covers(files):
            self._stack.close()
            try:
                self._open = self._stack.enter_context(self.open(files))
            except (ConfigError, DataError):
                if files.covers(self.files):
                    raise
                self._open = self._stack.enter_context(self.open(self.files))
            self._ever |= {*self._open.files.rows, *self._open.files.outcomes}
        return self._open

    @contextmanager
    def open_raw(self, files: SourceFiles) -> Iterator[RawSource]:
        """Opens rows as the files have them, side tables joined."""
        context, source = self.context, self.context.source
        read = self._decoder.read(files.all())
        with _connection(list(read.values()), context) as connection:
            stored = stored_types(context.warehouse, context.table)
            times = [source.day_column or "", *([source.outcomes.feature_time] if source.outcomes else [])]
            rows = [read[file] for file in files.rows]
            with self._explained(read):
                hidden = create_view(
                    connection, SOURCE, rows, context.place("path"), self.numbered, times,
                    source.date_format or (), source.day_unit, source.rename,
                    {name: kind.removesuffix("[]") for name, kind in stored.items()}, context.clocks, self.known.rows,
                )  # fmt: skip
                tables = [(one, [read[file] for file in paths]) for one, paths in files.lookups.items()]
                view, notes = join_side_tables(connection, SOURCE, tables, source.rename) if tables else (SOURCE, [])
            notes += self._describe_unread(files, column_types(connection, view), hidden)
            views = {SOURCE: files.rows, **{f"lookup_{i}": paths for i, paths in enumerate(files.lookups.values())}}
            texts = [name for name, of in views.items() if any(read[file].form in ("csv", "json") for file in of)]
            guessed = {name for one in texts for name in column_types(connection, one)}
            yield RawSource(connection, view, files, read, notes, guessed)

    def _explained(self, read: Mapping[SourceFile, ReadableFile]) -> AbstractContextManager[None]:
        """Turns errors of DuckDB and Arrow about files into ours."""
        catalog = self.context.warehouse.config.catalog
        return explained("files of the source", "Correct the files.", [*read.values()], catalog)

    def _describe_unread(self, files: SourceFiles, types: Mapping[str, str], hidden: Sequence[str]) -> Iterator[str]:
        """Yields what of the files, or of the config, rows do not have.

        Args:
            types: Columns of the rows -> type.
            hidden: Columns whose names begin with __.
        """
        rename = self.context.place("rename")
        if hidden:
            yield f"columns left out, whose names begin with __ ({rename} gives them others): {', '.join(hidden)}"
        if absent := [old for old, new in self.context.source.rename.items() if new not in types]:
            yield f"{rename} names columns that these files do not have: {', '.join(absent)}"
        given = {pair for file in files.rows for pair in folder_values(file).items()}
        folders = {name for name, value in given if not re.fullmatch(ISO_DATE, value)}
        if unread := sorted(folders - types.keys()):
            yield f"folders name values that are no columns of the rows: {', '.join(unread)}"

    @contextmanager
    def open(self, files: SourceFiles) -> Iterator[OpenSource]:
        """Opens samples. Those of joined logs get their labels when `Join.attribute` is called.

        Raises:
            ConfigError: If the source lacks a column that the configuration names.
            DataError: If values have the wrong type, or cannot be read while the source is open.
        """
        context, source = self.context, self.context.source
        with self.open_raw(files) as raw:
            connection, view = raw.connection, raw.view
            unmatched = [(lookup.path, f"__matched_{i}") for i, lookup in enumerate(source.lookups)]
            join, columns = None, [column for _, column in unmatched]
            if source.outcomes is not None:
                logged = [raw.read[file] for file in files.outcomes]
                with self._explained(raw.read):
                    join = Join(
                        connection, view, source.outcomes, logged, context.schema.label, source.date_format or (),
                        source.day_unit, self.known.outcomes,
                    )  # fmt: skip
                join.whole = len(files.outcomes) == len(self.files.outcomes)
                join.mark_repeated(context.repeat_seconds)
                view, columns = join.view, [*columns, KEY, SHOWN, REASON, LEFT_OUT]
            stored = stored_types(context.warehouse, context.table)
            if context.events is None:
                made = context.outcome_columns
                left = unstorable_columns(connection, view, context.schema, made)
                guessed = [name for name in raw.guessed if not context.has_role(name)]
                samples = add_types(connection, view, context.schema, source, columns, made, stored, guessed)
            else:
                left = unstorable_event_columns(connection, view, context.events)
                samples = add_event_types(
                    connection, view, context.events, context.place, context.repeat_seconds, stored
                )
            notes = [*raw.notes, *([join.clocks] if join is not None and join.clocks else [])]
            yield OpenSource(connection, samples, files, raw.read, join, unmatched, left, notes)


def stored_types(warehouse: Warehouse, table: str) -> dict[str, str]:
    """Returns column -> DuckDB's type of it in the table. Empty: there is no table."""
    if not warehouse.has_table(table):
        return {}
    fields = warehouse.table(table).schema().as_arrow()
    return {field.name: kind for field in fields if (kind := _duckdb_type(field.type)) is not None}


def _duckdb_type(kind: pa.DataType) -> str | None:
    if is_list(kind):
        item = _duckdb_type(kind.value_type)
        return None if item is None else f"{item}[]"
    if is_text(kind):
        return "VARCHAR"
    if pa.types.is_boolean(kind):
        return "BOOLEAN"
    if pa.types.is_integer(kind):
        return "BIGINT"
    if pa.types.is_timestamp(kind):
        return "TIMESTAMP WITH TIME ZONE" if kind.tz else "TIMESTAMP"
    return {pa.float32(): "FLOAT", pa.float64(): "DOUBLE", pa.date32(): "DATE"}.get(kind)


def duckdb_limits(memory_bytes: int | None) -> dict[str, Any]:
    """Returns the memory and the threads of an ingest's DuckDB, as arguments of `connect`.

    Args:
        memory_bytes: `ingest.memory_bytes`.
    """
    cores = len(os.sched_getaffinity(0))
    if memory_bytes is None:
        return {"memory_limit": MEMORY, "threads": cores}
    return {"memory_limit": f"{memory_bytes}B", "threads": max(1, min(cores, memory_bytes // THREAD_BYTES))}


@contextmanager
def _connection(files: Sequence[ReadableFile], context: SourceContext) -> Iterator[duckdb.DuckDBPyConnection]:
    """Connects to DuckDB with a temporary folder of its own, and turns its errors about rows into ours."""
    warehouse, limits = context.warehouse, duckdb_limits(context.memory_bytes)
    local = [one.read for one in files if isinstance(one.read, Path)]
    readable, addresses = readable_names(local, [one.read for one in files if isinstance(one.read, ObjectFile)])
    with (
        ScratchFolder("ingest-", warehouse.home / "tmp") as folder,
        connect(readable, Path(folder), **limits, objects=addresses, properties=warehouse.config.catalog) as connection,
    ):
        try:
            yield connection
        except duckdb.OutOfMemoryException as error:
            raise DataError(
                "memory of the ingest", f"rows that fit into {limits['memory_limit']} of memory", first_line(error),
                "Raise ingest.memory_bytes, or ingest fewer days at once.",
            ) from error  # fmt: skip
        except (duckdb.Error, UnicodeDecodeError) as error:
            catalog = warehouse.config.catalog
            raise explain(error, "rows of the source", "Correct the files.", files, catalog) from error


def _find_files(context: SourceContext, report: Report) -> tuple[list[SourceFile], list[SourceFile]]:
    """Files of the samples (or of the feature log) and of the outcome log. Generates the logs if they are missing."""
    source = context.source
    if source.generator is None or source.outcomes is None:
        assert source.path is not None
        files = context.find(source.path, context.place("path"))
        logged = source.outcomes.path if source.outcomes else None
        unique = context.events is not None and context.events.unique is not None
        if logged is None and not unique:  # the first row of a repeated one may lie in another day's file
            files = _of_days(files, source.day_column, context.only)
        return files, context.find(logged, "source.outcomes.path") if logged else []
    folder = generate_logs(context, report).resolve()
    return sorted((folder / "features").glob("*.parquet")), sorted((folder / "outcomes").glob("*.parquet"))


def generate_logs(context: SourceContext, report: Report) -> Path:
    """Returns the folder of the generated logs. Writes them if they are missing."""
    generator, outcomes = context.source.generator, context.source.outcomes
    assert generator is not None
    assert outcomes is not None
    identity = fingerprint([generator.model_dump(mode="json"), outcomes.window_seconds])[:12]
    folder = context.logs / f"{context.table}-{identity}"
    if not (folder / "complete").exists():
        total = generator.days * generator.rows_per_day
        made = Counter[str]()

        def on_rows(rows: int) -> None:
            made["rows"] += rows
            report("generate", made["rows"], total)

        write_logs(generator, folder, outcomes.window_seconds, on_rows)
        (folder / "complete").touch()
    return folder


def _of_days(files: list[SourceFile], column: str | None, only: frozenset[datetime.date]) -> list[SourceFile]:
    """Leaves out files in folders of other days, such as `day=2025-01-31`. Keeps all if none would be left."""
    if column is None or not only:
        return files
    asked = {f"{day}" for day in only}

    def may_have(file: SourceFile) -> bool:
        found = folder_values(file).get(column)
        return found is None or found in asked or re.fullmatch(ISO_DATE, found) is None

    return [file for file in files if may_have(file)] or files


def fingerprint(value: object) -> str:
    """Returns the SHA-256 of a value as JSON, in hexadecimal."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()

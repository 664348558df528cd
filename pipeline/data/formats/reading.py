"""One way to read files of any format: text and Avro are copied to Parquet once, and all files become one relation.

Whoever reads files meets the same rows, nulls and types: for samples, outcomes, side tables, feature sources, events.
"""

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cached_property
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from types import MappingProxyType
from typing import NamedTuple, Self

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.formats.avro import copy_avro, count_avro
from pipeline.data.formats.checksums import find_damage
from pipeline.data.formats.csv import (
    copy_criteo,
    copy_csv,
    count_csv,
    read_dialect,
    refuse_like_names,
    unpack,
    write_copy,
)
from pipeline.data.formats.files import SourceFile, address_of, form_of
from pipeline.data.formats.json import copy_json, count_lines, without_mark
from pipeline.data.formats.sample import Part, copy_groups
from pipeline.data.formats.types import FILE, ROW, common_types, type_text
from pipeline.errors import ContractError, DataError
from storage.errors import is_shortage, machine_lacks
from storage.names import Format
from storage.objects import ObjectFile, open_file, store_failure
from storage.query import connect, literal, quote
from storage.scratch import ScratchFolder

_SCHEMAS = """
    SELECT file_name, md5(string_agg(concat_ws('|', name, type, type_length, num_children, converted_type, scale,
        precision, logical_type), ',' ORDER BY place))
    FROM (SELECT *, row_number() OVER () AS place FROM parquet_schema(?)) GROUP BY file_name
"""
SHOWN_LETTERS = 100
"""Of a value, or of a line of CSV, in an error."""
OF_DAMAGE = (duckdb.Error, pa.ArrowException, OSError, UnicodeDecodeError)
NOT_OF_DAMAGE = (
    duckdb.OutOfMemoryException, duckdb.ConversionException, duckdb.BinderException, duckdb.ParserException,
    duckdb.OutOfRangeException, duckdb.CatalogException,
)  # fmt: skip
OWN = "Invalid Input Error: column '"
"""In the text of errors that our own SQL raises."""
NANOSECONDS = {"TIMESTAMP_NS": "", "TIMESTAMPTZ_NS": " AT TIME ZONE 'UTC'"}
"""DuckDB's types of times in nanoseconds -> what gives one of microseconds its zone."""


class ReadableFile(NamedTuple):
    """A source file, and the Parquet file that its rows are read from."""

    file: SourceFile
    form: Format
    """Its format; not auto."""
    read: SourceFile
    """The file itself, or its copy."""
    rows: int | None = None
    """Rows of a copied file, counted in the file by another way than the one that copied it."""


class Decoder:
    """Copies text and Avro to Parquet, each file once. The copies are deleted at the end.

    Args:
        files: All files that may be asked for -> their format.
        place: Folder for the copies.
        properties: Access to object stores: `warehouse.catalog`.
        limits: Memory and threads of DuckDB, as arguments of `connect`.
        report: Called with ("decode", done, total) for each file to copy.
        parts: File -> the part of it that is copied. Others are whole.
    """

    def __init__(
        self,
        files: Mapping[SourceFile, Format],
        place: Path,
        properties: Mapping[str, str] = MappingProxyType({}),
        limits: Mapping[str, int | str | None] = MappingProxyType({}),
        report: Callable[[str, int, int], None] = lambda what, done, total: None,
        parts: Mapping[SourceFile, Part] = MappingProxyType({}),
    ) -> None:
        self.forms = {file: form_of(file, form) for file, form in files.items()}
        self.parts = parts
        self.place, self.properties, self.limits, self.report = place, properties, limits, report
        self._made: dict[SourceFile, ReadableFile] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @cached_property
    def _folder(self) -> Path:
        return Path(self._stack.enter_context(ScratchFolder("decoded-", self.place)))

    @cached_property
    def _numbers(self) -> dict[SourceFile, int]:
        """Copied files -> their number: copies have the order of the files."""
        copied = (file for file, form in self.forms.items() if form != "parquet" or file in self.parts)
        return {file: number for number, file in enumerate(sorted(copied, key=address_of))}

    def read(self, files: Iterable[SourceFile]) -> dict[SourceFile, ReadableFile]:
        """Returns file -> the Parquet file to read.

        Raises:
            ConfigError: If a file needs a package that is not installed.
            DataError: If a file cannot be read in its format, or its copy lacks rows.
        """
        wanted = list(dict.fromkeys(files))
        missing = [file for file in wanted if file in self._numbers and file not in self._made]
        if missing:
            folder = self._folder
            with (
                _connect([*missing, folder], folder / "spill", self.properties, self.limits) as connection,
                ThreadPoolExecutor(_threads_of(connection)) as pool,
            ):
                jobs = {
                    file: pool.submit(self._decode, connection.cursor(), file, folder)
                    for file in sorted(missing, key=address_of)
                }
                try:
                    alone = [
                        file
                        for number, file in enumerate(jobs)
                        if not self._take(jobs[file], file, number, len(missing))
                    ]
                finally:
                    pool.shutdown(cancel_futures=True)
                for file in alone:
                    self._made[file] = self._decode(connection, file, folder)
        return {file: self._made.get(file) or ReadableFile(file, self.forms[file], file) for file in wanted}

    def _take(self, job: "Future[ReadableFile]", file: SourceFile, number: int, total: int) -> bool:
        """Waits for a copy. Returns False if there is too little memory for several at once."""
        self.report("decode", number, total)
        try:
            self._made[file] = job.result()
        except DataError as error:
            if not isinstance(error.__cause__, duckdb.OutOfMemoryException):
                raise
            return False
        return True

    def _decode(self, connection: duckdb.DuckDBPyConnection, file: SourceFile, folder: Path) -> ReadableFile:
        copy = folder / f"{self._numbers[file]:09}" / _parts(file)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.unlink(missing_ok=True)
        return _copy(connection, file, self.forms[file], copy, self.properties, self.parts.get(file, Part()))


@contextmanager
def readable_files(
    files: Mapping[SourceFile, Format],
    place: Path,
    properties: Mapping[str, str] = MappingProxyType({}),
    limits: Mapping[str, int | str | None] = MappingProxyType({}),
) -> Iterator[dict[SourceFile, ReadableFile]]:
    """Yields file -> the Parquet file to read. Arguments and errors as of `Decoder`."""
    with Decoder(files, place, properties, limits) as decoder:
        yield decoder.read(files)


def _threads_of(connection: duckdb.DuckDBPyConnection) -> int:
    return int(connection.sql("SELECT current_setting('threads')").fetchall()[0][0])


def _parts(file: SourceFile) -> str:
    """Returns folders and name of a copy: those with a value, such as day=2025-01-31, and the file's own name."""
    *folders, name = address_of(file).split("/")
    return "/".join([*(folder for folder in folders if "=" in folder), name])


def _connect(
    files: Sequence[SourceFile], spill: Path, properties: Mapping[str, str], limits: Mapping[str, int | str | None]
) -> duckdb.DuckDBPyConnection:
    local = [path for path in files if isinstance(path, Path)]
    objects = [path for path in files if isinstance(path, ObjectFile)]
    readable, addresses = readable_names(local, objects)
    return connect(readable, spill, objects=addresses, properties=properties, **limits)  # type: ignore[arg-type]


def readable_names(local: Sequence[Path], objects: Sequence[ObjectFile]) -> tuple[list[Path], list[str]]:
    """Returns the paths and addresses that `connect` has to allow, as such and as the patterns that name them."""
    return [*local, *(Path(as_pattern(path)) for path in local)], [*map(str, objects), *map(as_pattern, objects)]


def _copy(
    connection: duckdb.DuckDBPyConnection,
    file: SourceFile,
    form: Format,
    copy: Path,
    properties: Mapping[str, str],
    part: Part,
) -> ReadableFile:
    """Copies a file or a part of it, and compares its rows with those that are counted in it."""
    if form == "parquet":
        with explained(f"Parquet file '{file.name}'"):
            rows = copy_groups(file, part, copy, properties)
    elif form == "avro":
        copy_avro(file, copy, properties)
        rows = count_avro(file, properties)
    else:
        where = f"{'CSV' if form == 'criteo' else form.upper()} file '{file.name}'"
        with explained(where), TemporaryDirectory(prefix="plain-", dir=copy.parent) as folder:
            plain = unpack(file, Path(folder), properties, part.share, quoted=form == "csv")
            plain = without_mark(plain, Path(folder)) if form == "json" else plain
            try:
                rows = _copy_text(connection, plain, form, copy, where)
            except duckdb.Error as error:
                raise type(error)(f"{error}".replace(f"{plain}", address_of(file))) from error
    found = pq.read_metadata(copy).num_rows if copy.exists() else 0
    if found != rows:
        remedy = "Run it again once the file is complete: it may have changed meanwhile."
        raise DataError(f"file '{file.name}'", f"{rows} rows, as its lines say", f"{found}", remedy)
    return ReadableFile(file, form, copy, rows)


def _copy_text(connection: duckdb.DuckDBPyConnection, plain: Path, form: Format, copy: Path, where: str) -> int:
    """Copies a local, uncompressed file of text. Returns its rows, counted meanwhile."""
    dialect = read_dialect(plain, where) if form == "csv" else None
    if plain.stat().st_size == 0 or (form == "csv" and dialect is None):
        return 0
    with ThreadPoolExecutor(1, "count") as thread:
        if dialect is not None:
            rows = thread.submit(count_csv, plain, dialect)
            copy_csv(connection, dialect, copy, as_pattern(plain))
        else:
            rows = thread.submit(count_lines, plain)
            if form == "json":
                copy_json(connection, plain, where, copy, as_pattern(plain))
            else:
                copy_criteo(connection, copy, as_pattern(plain))
        return rows.result()


def copy_typed(
    files: Sequence[SourceFile], folder: Path, properties: Mapping[str, str] = MappingProxyType({})
) -> list[Path]:
    """Copies files to Parquet, each as it is read together with the others. Returns the copies in that order.

    Raises:
        ConfigError, DataError: As `readable_files` and `read_files`.
    """
    with (
        readable_files(dict.fromkeys(files, "auto"), folder, properties) as read,
        _connect([*(one.read for one in read.values()), folder], folder / "spill", properties, {}) as connection,
        explained(f"files, first '{files[0].name}'", "Correct the files.", [*read.values()], properties),
    ):
        rows = read_files(connection, [read[file] for file in files])
        wide = {quote(name): f"{kind}" for name, kind in zip(rows.columns, rows.types, strict=True)}
        wide = {name: kind.replace("HUGE", "UBIG") for name, kind in wide.items() if kind in ("HUGEINT", "HUGEINT[]")}
        replaced = ", ".join(f"CAST({name} AS {kind}) AS {name}" for name, kind in wide.items())
        rows = rows.select(f"* REPLACE ({replaced})") if wide else rows
        copies = [folder / f"{number}.parquet" for number in range(len(files))]
        for file, copy in zip(files, copies, strict=True):
            own = rows.filter(f"{FILE} = {literal(address_of(read[file].read))}").select(f"* EXCLUDE ({FILE})")
            write_copy(connection, own, copy)
    return copies


def count_rows_of(file: ReadableFile, properties: Mapping[str, str]) -> int:
    """Returns the rows of a file: of text as its lines were counted, of Parquet as its footer says."""
    if file.rows is not None:
        return file.rows
    with explained(f"Parquet file '{file.file.name}'"), open_file(address_of(file.read), properties) as opened:
        return int(pq.read_metadata(opened).num_rows)


@contextmanager
def explained(
    where: str,
    remedy: str = "Correct the file, or set source.format.",
    files: Sequence[ReadableFile] = (),
    properties: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[None]:
    """Turns DuckDB's and Arrow's errors about files into ours.

    Args:
        files: If one of these is a damaged Parquet file, it is named.
        properties: Access to object stores.
    """
    try:
        yield
    except (duckdb.Error, pa.ArrowException, OSError, RuntimeError, UnicodeDecodeError) as error:
        raise explain(error, where, remedy, files, properties) from error


def explain(
    error: Exception, where: str, remedy: str, files: Sequence[ReadableFile], properties: Mapping[str, str]
) -> ContractError:
    """Returns our error for one of DuckDB or Arrow about rows. Arguments as of `explained`."""
    if (lost := store_failure(error)) is not None:
        return lost
    if isinstance(error, duckdb.OutOfMemoryException):
        remedy = "Raise ingest.memory_bytes, or read fewer files at once."
        return DataError(where, "rows that fit into DuckDB's memory", first_line(error), remedy)
    if is_shortage(error):
        return machine_lacks(where, error)
    if (damage := _damage_behind(error, files, properties)) is not None:
        return damage
    unicode = isinstance(error, UnicodeDecodeError) or ("Invalid unicode" in f"{error}" and "CSV" not in f"{error}")
    return DataError(where, "readable values", "text that is not UTF-8" if unicode else first_line(error), remedy)


def _damage_behind(
    error: Exception, files: Sequence[ReadableFile], properties: Mapping[str, str]
) -> ContractError | None:
    """Returns what an error about rows may not say: which Parquet file is damaged. None: it is about something else."""
    if not isinstance(error, OF_DAMAGE) or isinstance(error, NOT_OF_DAMAGE) or OWN in f"{error}":
        return None
    return find_damage([one.file for one in files if one.form == "parquet"], properties)


def read_files(
    connection: duckdb.DuckDBPyConnection,
    files: Sequence[ReadableFile],
    numbered: bool = False,
    as_text: Sequence[str] = (),
    stored: Mapping[str, str] = MappingProxyType({}),
) -> duckdb.DuckDBPyRelation:
    """Returns the rows of all files with the column FILE. A column that a file lacks is null in its rows.

    Args:
        files: Non-empty. Rows keep their order.
        numbered: Whether to add the column ROW.
        as_text: Columns of text to leave as they are.
        stored: Column -> DuckDB's type of it in the table that the rows are for.
    Raises:
        DataError: If names differ only in case, or a column has types that exclude each other.
        Error: DuckDB's, for a damaged file.
    """
    with_rows = [one for one in files if one.form == "parquet" or not isinstance(one.read, Path) or one.read.exists()]
    if not with_rows:
        raise DataError(f"file '{files[0].file.name}'", "at least one line", "an empty file", "Write the file again.")
    groups = _group(connection, with_rows)
    rows = [_in_microseconds(_decode_bytes(_read_group(connection, group, numbered))) for group in groups]
    kinds = [dict(zip(part.columns, map(str, part.types), strict=True)) for part in rows]
    names = [[name for name in part if name not in (FILE, ROW)] for part in kinds]
    every = list(dict.fromkeys(name for part in names for name in part))
    refuse_like_names(f"files, first '{files[0].file.name}'", every)
    where = [f"'{group[0].file.name}'" for group in groups]
    columns = [{name: kind for name, kind in part.items() if name not in (FILE, ROW)} for part in kinds]
    casts = common_types(columns, where, rows)
    parts = []
    for number, (part, cast) in enumerate(zip(rows, casts, strict=True)):
        replaced = ", ".join(f"{sql} AS {quote(name)}" for name, sql in cast.items())
        view = f"files_{_next(connection)}_{number}"
        (part.select(f"* REPLACE ({replaced})") if replaced else part).create_view(view)
        parts.append(f"SELECT * FROM {view}")
    joined = connection.sql(" UNION ALL BY NAME ".join(parts))
    texts = {name for name, kind in zip(joined.columns, map(str, joined.types), strict=True) if kind == "VARCHAR"}
    typed, copies = {}, {}
    for name in texts - {FILE, *as_text}:
        having = [(group, own[name]) for group, own in zip(groups, columns, strict=True) if name in own]
        forms = {group[0].form for group, kind in having if kind == "VARCHAR"}
        if {"csv", "json"} & forms:
            typed[name] = forms == {"csv"}
        if forms == {"csv"} and all(kind == "VARCHAR" for _, kind in having):
            copies[name] = [one.read for group, _ in having for one in group if isinstance(one.read, Path)]
    return type_text(joined, typed, stored, copies, _threads_of(connection))


def _read_group(
    connection: duckdb.DuckDBPyConnection, group: Sequence[ReadableFile], numbered: bool
) -> duckdb.DuckDBPyRelation:
    names = ", ".join(literal(as_pattern(one.read)) for one in group)
    options = f"filename='{FILE}', file_row_number={numbered}, hive_partitioning=false"
    return connection.sql(f"SELECT * FROM read_parquet([{names}], {options})")


def _decode_bytes(rows: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """Makes text of bytes that are UTF-8 in every row: old writers mark no text as such."""
    names = [quote(name) for name, kind in zip(rows.columns, rows.types, strict=True) if f"{kind}" == "BLOB"]
    if not names:
        return rows
    tests = [f"bool_and(TRY(decode({name})) IS NOT NULL) FILTER ({name} IS NOT NULL)" for name in names]
    passed = rows.aggregate(", ".join(tests)).fetchall()[0]
    texts = [f"decode({name}) AS {name}" for name, good in zip(names, passed, strict=True) if good is not False]
    return rows.select(f"* REPLACE ({', '.join(texts)})") if texts else rows


def _in_microseconds(rows: duckdb.DuckDBPyRelation) -> duckdb.DuckDBPyRelation:
    """Cuts times in nanoseconds, as pandas writes them, to microseconds.

    DuckDB would round the last ones of a day into the next, and compares and converts few of those with a zone.
    """
    casts = []
    for name, kind in zip(rows.columns, map(str, rows.types), strict=True):
        item = kind.removesuffix("[]")
        if item in NANOSECONDS:
            value = quote(name) if item == kind else "x"
            count = f"epoch_ns({value})"
            time = f"make_timestamp(({count} - (({count} % 1000) + 1000) % 1000) // 1000)" + NANOSECONDS[item]
            casts.append((time if item == kind else f"list_transform({quote(name)}, lambda x: {time})", name))
    return rows.select(f"* REPLACE ({', '.join(f'{sql} AS {quote(name)}' for sql, name in casts)})") if casts else rows


def _next(connection: duckdb.DuckDBPyConnection) -> int:
    """Returns a number that no view of ours has yet."""
    return int(connection.sql("SELECT count(*) FROM duckdb_views() WHERE NOT internal").fetchall()[0][0])


def _group(connection: duckdb.DuckDBPyConnection, files: Sequence[ReadableFile]) -> list[list[ReadableFile]]:
    """Returns the files in their order, in groups that have the same format and the same columns."""
    listed = connection.execute(_SCHEMAS, [[as_pattern(one.read) for one in files]]).fetchall()
    schemas = dict(listed)
    keys = {one.read: (one.form, schemas.get(address_of(one.read))) for one in files}
    groups = [list(group) for _, group in groupby(files, lambda one: keys[one.read])]
    for group in groups:
        where, names = f"file '{group[0].file.name}'", _top_names(connection, group[0])
        refuse_like_names(where if group[0].form != "parquet" else f"Parquet {where}", names)
        if taken := [name for name in names if name.lower() == ROW]:
            expected = f"columns of other names than {ROW}, by which DuckDB numbers rows"
            raise DataError(where, expected, taken[0], "Write the file without it, or under another name.")
    return groups


def _top_names(connection: duckdb.DuckDBPyConnection, file: ReadableFile) -> list[str]:
    """Returns the names of a Parquet file's columns as it has them. DuckDB gives other names to repeated ones."""
    listed = connection.execute(
        "SELECT name, coalesce(num_children, 0) FROM parquet_schema(?)", [as_pattern(file.read)]
    ).fetchall()
    names, inner = [], 0
    for name, children in listed[1:]:
        if inner == 0:
            names.append(name)
        else:
            inner -= 1
        inner += children
    return names


def as_pattern(path: SourceFile) -> str:
    """Returns a pattern that matches only this file, because DuckDB treats every name as a pattern."""
    return re.sub(r"([\[*?])", r"[\1]", address_of(path))


def first_line(error: Exception) -> str:
    """Returns the first line of an error. One of a CSV line also gets the reason."""
    lines = str(error).split("\n")
    if "reached an invalid state" in lines[0]:
        return "lines that end in several ways, such as \\r\\n and \\n"
    if "CSV Error" not in lines[0]:
        return lines[0].rstrip(". ")
    told = [*itertools.takewhile(lambda line: not line.startswith("Possible "), lines[1:])]
    reason = next((line for line in reversed(told) if line), "")  # after the line itself, which may be several
    line, marker = re.search(r"Line: \d+", lines[0]), "Original Line: "
    text = next((one.removeprefix(marker)[:SHOWN_LETTERS] for one in told if one.startswith(marker)), None)
    shown = "" if text is None or text == reason else f" in '{text}'"  # the number counts rows: values may have lines
    return f"{'an error' if line is None else line[0].lower().replace(':', '')}: {reason.rstrip('.')}{shown}"

"""Parquet, CSV, JSON lines, Criteo TSV and side tables as uniform DuckDB views."""

import contextlib
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import duckdb
import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.files import CSV, JSON, SourceFile, address_of, folder_values
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.config import Format, SideTable
from pipeline.extraction.formats.text import FILE, convert_iso, parse_times, read_csv, read_json
from storage.objects import open_file, store_failure
from storage.query import column_types, quote

CRITEO_COLUMNS = {
    "label": "VARCHAR",
    **{f"int_{i}": "BIGINT" for i in range(1, 14)},
    **{f"cat_{i}": "VARCHAR" for i in range(1, 27)},
}
"""Columns of the headerless Criteo files: label, 13 counts, 26 hexadecimal categories."""

NAMED: Mapping[Format, re.Pattern[str]] = {"csv": CSV, "json": JSON}
"""Format -> names of its files."""

ROW = "file_row_number"
"""Column added before joins, which lose the order of rows. FILE and ROW restore it."""


_INTEGERS = (
    "BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT",
)  # fmt: skip


def create_view(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    files: Sequence[SourceFile],
    form: Format,
    where: str = "source.path",
    numbered: bool = False,
    times: Sequence[str] = (),
    formats: Sequence[str] = (),
    rename: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Creates one view of all files. A column that a file lacks is null in its rows.

    Args:
        where: Config key that names the files.
        numbered: Whether to add the column ROW.
        times: Columns with a day or time.
        formats: `source.date_format`, to read text in these columns.
        rename: `source.rename`. Columns that the files lack are passed over. The other names here are new ones.
    Raises:
        ConfigError: If there is no such format.
        DataError: If a file cannot be read in its format, or a time has none of the formats.
    """
    names = [as_pattern(path) for path in files]
    if form == "auto":
        named = [form for form, pattern in NAMED.items() if any(pattern.search(path.name) for path in files)]
        form = named[0] if named else "parquet"
    try:
        old = {new: given for given, new in rename.items()}
        given = [old.get(time, time) for time in times]
        rows = _relation(connection, names, form, numbered, given if formats else ())
        rows = _add_folders(rows, files, given)
        rows = _rename(rows, rename, where)
        parsed = [
            time for time, kind in zip(rows.columns, rows.types, strict=True) if time in times and kind == "VARCHAR"
        ]
        if formats and parsed:
            rows = parse_times(rows, parsed, formats)
        rows.create_view(name)
    except (duckdb.Error, RuntimeError) as error:
        if (lost := store_failure(error)) is not None:
            raise lost from error
        reason = first_line(error) if isinstance(error, duckdb.Error) else "names of columns that are not UTF-8"
        raise DataError(
            f"files of {where}, first '{files[0].name}'", f"readable files, format '{form}'", reason,
            "Set source.format, or correct the files." if where == "source.path" else "Correct the files.",
        ) from error  # fmt: skip


def _rename(rows: duckdb.DuckDBPyRelation, rename: Mapping[str, str], where: str) -> duckdb.DuckDBPyRelation:
    """Gives columns their new names. Refuses a name that another column has."""
    found = {old: new for old, new in rename.items() if old in rows.columns}
    taken = [new for new in found.values() if new in rows.columns and new not in found]
    if taken:
        raise ConfigError(
            f"source.rename, files of {where}", "names that no column has", f"'{taken[0]}'", "Choose another name."
        )
    pairs = ", ".join(f"{quote(old)} AS {quote(new)}" for old, new in found.items())
    return rows.select(f"* RENAME ({pairs})") if found else rows


def first_line(error: Exception) -> str:
    """Returns the first line of a DuckDB error. An error in a CSV line also gets the file and the reason."""
    lines = str(error).split("\n")
    file = next((line.partition(" = ")[2] for line in lines if line.startswith("  file = ")), None)
    if "CSV Error" not in lines[0] or file is None:
        return lines[0].rstrip(". ")
    reason = next((line for line in lines[1:] if line and not line.startswith("Original Line")), "")
    return f"{lines[0]} of '{Path(file).name}', {reason.rstrip('.')}"


def find_invalid_utf8(files: Sequence[SourceFile], properties: Mapping[str, str]) -> tuple[SourceFile, str] | None:
    """Returns the first Parquet file with text that is not UTF-8, and its column. None: all text is valid."""
    for path in (path for path in files if not any(pattern.search(path.name) for pattern in NAMED.values())):
        with (
            contextlib.suppress(pa.ArrowInvalid, OSError),
            open_file(address_of(path), properties) as opened,
            pq.ParquetFile(opened) as file,
        ):
            for group in range(file.num_row_groups):
                for name, column in zip(file.schema_arrow.names, file.read_row_group(group).columns, strict=True):
                    try:
                        column.validate(full=True)
                    except pa.ArrowInvalid:
                        return path, name
    return None


def as_pattern(path: SourceFile) -> str:
    """Returns a pattern that matches only this file, because DuckDB treats every name as a pattern."""
    return re.sub(r"([\[*?])", r"[\1]", address_of(path))


def _add_folders(
    rows: duckdb.DuckDBPyRelation, files: Sequence[SourceFile], times: Sequence[str]
) -> duckdb.DuckDBPyRelation:
    """Adds those of the times that the files lack, but that name folders of all of them, such as `day=2025-01-31`.

    DuckDB's own way adds all folders, and to columns that the files have.
    """
    common = set.intersection(*({*folder_values(file)} for file in files))
    added = [name for name in dict.fromkeys(times) if name in common and name not in rows.columns]
    patterns = {name: f".*(?:^|/){re.escape(name)}=([^/]*)/".replace("'", "''") for name in added}
    texts = [f"regexp_extract({FILE}, '{pattern}', 1) AS {quote(name)}" for name, pattern in patterns.items()]
    return rows.select(f"*, {', '.join(texts)}") if texts else rows


def _relation(
    connection: duckdb.DuckDBPyConnection, names: list[str], form: Format, numbered: bool, as_text: Sequence[str]
) -> duckdb.DuckDBPyRelation:
    if form == "parquet":
        return connection.read_parquet(
            names, filename=True, union_by_name=True, file_row_number=numbered, hive_partitioning=False
        )
    if form == "criteo":
        rows = connection.read_csv(
            names,  # type: ignore[arg-type]
            header=False,
            delimiter="\t",
            columns=CRITEO_COLUMNS,
            filename=True,
            quotechar="",
            escapechar="",
            auto_detect=False,
            hive_partitioning=False,
        )
    elif form == "json":
        rows = convert_iso(read_json(connection, names), as_text)
    else:
        rows = convert_iso(read_csv(connection, names, as_text), as_text)
    return rows.select(f"*, row_number() OVER () AS {ROW}") if numbered else rows


def key_family(kind: str) -> str | None:
    """Returns the family of a DuckDB type as a join key. Only keys of one family are compared. None: not comparable."""
    if kind in _INTEGERS or re.fullmatch(r"DECIMAL\(\d+,0\)", kind):
        return "integers"
    if kind == "VARCHAR" or kind.startswith("ENUM"):
        return "text"
    if kind == "DATE" or kind.startswith("TIMESTAMP"):
        return re.sub(r"_\w+", "", kind)
    return kind if kind in ("UUID", '"NULL"') else None


def check_keys(where: str, key: str, kinds: Mapping[str, str]) -> None:
    """Refuses keys that DuckDB would round or convert for a comparison.

    Args:
        kinds: Name of a table, as errors show it -> type of its key.
    Raises:
        ConfigError: If the types differ in kind, or are floats.
    """
    families = [key_family(kind) for kind in kinds.values()]
    if None in families or len({*families} - {'"NULL"'}) > 1:
        raise ConfigError(
            f"{where}, key '{key}'",
            "integers, text, dates or timestamps in both tables",
            ", ".join(f"{kind} in the {table}" for table, kind in kinds.items()),
            "Write the key with one type in all files. Use integers for ids: a column of pandas with missing ids needs"
            " the type Int64.",
        )


def join_side_tables(
    connection: duckdb.DuckDBPyConnection,
    source: str,
    lookups: Sequence[tuple[SideTable, list[SourceFile]]],
    rename: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Creates a view of the source with the columns of every side table, and returns its name.

    Args:
        rename: `source.rename`.

    Raises:
        ConfigError: If a key column is missing or of another kind, or two tables have the same column.
        DataError: If a side table has two rows with one key.
    """
    columns = column_types(connection, source)
    selected, joins = ["s.*"], []
    for i, (lookup, files) in enumerate(lookups):
        view = f"lookup_{i}"
        create_view(connection, view, files, "auto", lookup.place, rename=rename)
        own = {name: kind for name, kind in column_types(connection, view).items() if name != FILE}
        _check_side_table(connection, lookup, view, columns, own)
        added = [name for name in own if name not in (*lookup.on, lookup.valid_from)]
        selected += [f"l{i}.{quote(name)}" for name in added]
        selected.append(f"l{i}.__matched AS __matched_{i}")
        joins.append(_join(lookup, view, f"l{i}", columns, own))
        columns |= {name: own[name] for name in added}
    connection.execute(f"CREATE VIEW {source}_wide AS SELECT {', '.join(selected)} FROM {source} s {' '.join(joins)}")
    return f"{source}_wide"


def _join(lookup: SideTable, view: str, name: str, rows: Mapping[str, str], own: Mapping[str, str]) -> str:
    """Returns the SQL that joins a side table by key, or by key and time.

    Args:
        rows, own: Columns of the rows and of the side table -> type.
    """
    if lookup.as_of is None or lookup.valid_from is None:
        key = ", ".join(map(quote, lookup.on))
        return f"LEFT JOIN (SELECT *, true AS __matched FROM {view}) {name} USING ({key})"
    where = lookup.place
    keys = " AND ".join(f"s.{quote(one)} = {name}.{quote(one)}" for one in lookup.on)
    since = _moment(f"{where}, valid_from", "", lookup.valid_from, own)
    if own[lookup.valid_from] == "DATE":
        since = f"{since} + INTERVAL 1 DAY - INTERVAL 1 MICROSECOND"
    at = f"{_moment(f'{where}, as_of', 's.', lookup.as_of, rows)} - to_seconds({lookup.delay_seconds})"
    side = f"SELECT *, true AS __matched, {since} AS __since FROM {view} WHERE {quote(lookup.valid_from)} IS NOT NULL"
    return f"ASOF LEFT JOIN ({side}) {name} ON {keys} AND {at} >= {name}.__since"


def _moment(where: str, table: str, name: str, columns: Mapping[str, str]) -> str:
    """Returns the SQL of a time in UTC."""
    kind, column = columns[name], f"{table}{quote(name)}"
    if kind == "TIMESTAMP WITH TIME ZONE":
        return f"timezone('UTC', {column})"
    if kind != "DATE" and not kind.startswith("TIMESTAMP"):
        raise ConfigError(f"{where} '{name}'", "timestamps or dates", kind, "Convert it, or name another column.")
    return f"CAST({column} AS TIMESTAMP)"


def _check_side_table(
    connection: duckdb.DuckDBPyConnection, lookup: SideTable, view: str, columns: dict[str, str], own: dict[str, str]
) -> None:
    where = lookup.place
    for name in lookup.on:
        if name not in columns or name not in own:
            raise ConfigError(where, f"key column '{name}' in both tables", "a table without it", "Correct `on`.")
        check_keys(where, name, {"rows": columns[name], "side table": own[name]})
    for named, there, table in ((lookup.as_of, columns, "rows"), (lookup.valid_from, own, "side table")):
        if named is not None and named not in there:
            raise ConfigError(where, f"column '{named}' in the {table}", "none of that name", "Correct the name.")
    taken = [name for name in own if name in columns and name not in (*lookup.on, lookup.valid_from)]
    if taken:
        raise ConfigError(where, "columns that the rows do not have", f"{', '.join(taken)} in both", "Rename them.")
    key = ", ".join(map(quote, [*lookup.on, *([] if lookup.valid_from is None else [lookup.valid_from])]))
    row = connection.sql(f"SELECT count(*), count(DISTINCT ({key})) FROM {view}").fetchall()[0]
    if row[0] != row[1]:
        raise DataError(
            where, f"a unique key ({key})", f"{row[0]} rows of {row[1]} keys", "Remove duplicate and empty keys."
        )

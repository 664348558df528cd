"""Files and side tables as uniform DuckDB views."""

import re
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

import duckdb

from pipeline.data.formats.csv import refuse_like_names
from pipeline.data.formats.files import folder_values
from pipeline.data.formats.reading import ReadableFile, read_files
from pipeline.data.formats.types import FILE, NOTHING, ROW, as_text, count_times, is_number, parse_times
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.config import SideTable
from storage.arrow import differing_clocks
from storage.query import column_types, literal, quote

_INTEGERS = (
    "BOOLEAN", "TINYINT", "SMALLINT", "INTEGER", "BIGINT", "HUGEINT", "UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT",
)  # fmt: skip


def create_view(
    connection: duckdb.DuckDBPyConnection,
    name: str,
    files: Sequence[ReadableFile],
    where: str = "source.path",
    numbered: bool = False,
    times: Sequence[str] = (),
    formats: Sequence[str] = (),
    unit: str | None = None,
    rename: Mapping[str, str] = MappingProxyType({}),
    stored: Mapping[str, str] = MappingProxyType({}),
    clocks: Collection[str] = (),
    known: Mapping[str, str] = MappingProxyType({}),
) -> list[str]:
    """Creates one view of all files. A column that a file lacks is null in its rows.

    Columns whose names begin with __ are left out: views have such columns of their own.

    Args:
        where: Config key that names the files.
        numbered: Whether to add the column ROW.
        times: Columns with a day or time.
        formats: `source.date_format`, to read text in these columns.
        unit: `source.day_unit`, to read numbers in `clocks`.
        clocks: Columns that something takes as a time, and not as a day alone.
        rename: `source.rename`. Columns that the files lack are passed over. The other names here are new ones.
        stored: Column -> DuckDB's type of it in the table that the rows are for.
        known: Column -> its type in further files. The view has all of them.
    Returns:
        The columns that are left out.
    Raises:
        DataError: If columns or their types exclude each other, or a time has none of the formats.
        Error: DuckDB's, for a damaged file.
    """
    old = {new: given for given, new in rename.items()}
    given = [old.get(time, time) for time in times]
    kept = {old.get(column, column): kind for column, kind in {**known, **stored}.items()}
    rows = read_files(connection, files, numbered, given if formats else (), kept)
    rows = _rename(_add_folders(rows, files, given), rename, where)
    hidden = [name for name in rows.columns if name.startswith("__") and name != FILE]
    rows = rows.select(f"* EXCLUDE ({', '.join(map(quote, hidden))})") if hidden else rows
    kinds = dict(zip(rows.columns, map(str, rows.types), strict=True))
    empty = [time for time, kind in kinds.items() if time in times and kind == NOTHING]
    if empty:  # a log without a row yet is one of times
        rows = rows.select(f"* REPLACE ({', '.join(f'CAST(NULL AS TIMESTAMP) AS {quote(one)}' for one in empty)})")
    counted = [time for time, kind in kinds.items() if time in clocks and is_number(kind)]
    written = [time for time, kind in kinds.items() if time in times and unit is None and is_number(kind)]
    parsed = [time for time, kind in kinds.items() if time in times and kind == "VARCHAR"] + written
    if formats and parsed:
        texts = ", ".join(f"{as_text(quote(time), kinds[time])} AS {quote(time)}" for time in written)
        rows = rows.select(f"* REPLACE ({texts})") if texts else rows  # numbers such as 20250131
        rows = parse_times(rows, parsed, formats)
    refuse_like_names(f"columns of {where}", rows.columns)  # DuckDB would give one of them another name
    if unit is not None and counted:
        section = "source." if where.startswith("source.") else where.removesuffix("path")
        rows = count_times(rows, counted, unit, f"{section}day_unit")
    _add_known(rows, known).create_view(name)
    return hidden


def _add_known(rows: duckdb.DuckDBPyRelation, known: Mapping[str, str]) -> duckdb.DuckDBPyRelation:
    """Adds the columns that only further files have, and gives those without a value the type that they have there."""
    kinds = dict(zip(rows.columns, map(str, rows.types), strict=True))
    nulls = {name: f"CAST(NULL AS {kind}) AS {quote(name)}" for name, kind in known.items() if kind != NOTHING}
    replaced = [sql for name, sql in nulls.items() if kinds.get(name) == NOTHING]
    added = [sql for name, sql in nulls.items() if name not in kinds]
    star = f"* REPLACE ({', '.join(replaced)})" if replaced else "*"
    return rows.select(", ".join([star, *added])) if replaced or added else rows


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


def _add_folders(
    rows: duckdb.DuckDBPyRelation, files: Sequence[ReadableFile], times: Sequence[str]
) -> duckdb.DuckDBPyRelation:
    """Adds those of the times that the files lack, but that name folders of all of them, such as `day=2025-01-31`.

    DuckDB's own way adds all folders, and to columns that the files have.
    """
    common = set.intersection(*({*folder_values(one.read)} for one in files))
    added = [name for name in dict.fromkeys(times) if name in common and name not in rows.columns]
    patterns = {name: f".*(?:^|/){re.escape(name)}=([^/]*)/" for name in added}
    texts = [f"regexp_extract({FILE}, {literal(pattern)}, 1) AS {quote(name)}" for name, pattern in patterns.items()]
    return rows.select(f"*, {', '.join(texts)}") if texts else rows


def repeated_rows(view: str, columns: Sequence[str], nulls: bool, time: str, seconds: int) -> str:
    """Returns the SQL for FILE and ROW of the rows of a view that repeat an earlier one in some columns.

    Args:
        view: Numbered.
        nulls: Whether nulls are equal. Else a row with a null repeats none.
        time: Column with the time of a row. Of rows with one time the first in the files is the earlier.
        seconds: How long before a row another one may lie that it repeats.
    """
    listed, at = ", ".join(map(quote, columns)), quote(time)
    known = "true" if nulls else " AND ".join(f"{quote(name)} IS NOT NULL" for name in columns)
    several = f"SELECT hash({listed}) FROM {view} WHERE {known} GROUP BY 1 HAVING count(*) > 1"
    earlier = f"lag({at}) OVER (PARTITION BY {listed} ORDER BY {at}, {FILE}, {ROW}) AS earlier"
    found = f"SELECT {FILE} AS file, {ROW} AS row, {at} AS moment, {earlier} FROM {view}"
    return (
        f"SELECT file, row FROM ({found} WHERE {known} AND hash({listed}) IN ({several}))"
        f" WHERE moment <= earlier + to_seconds({seconds})"
    )


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


def has_zone(kind: str) -> bool | None:
    """Whether the times of a DuckDB type have a zone. None: dates, or no times."""
    return "ZONE" in kind if kind.startswith("TIMESTAMP") else None


def join_side_tables(
    connection: duckdb.DuckDBPyConnection,
    source: str,
    lookups: Sequence[tuple[SideTable, list[ReadableFile]]],
    rename: Mapping[str, str] = MappingProxyType({}),
) -> tuple[str, list[str]]:
    """Creates a view of the source with the columns of every side table. Returns its name, and what to warn of.

    Args:
        rename: `source.rename`.

    Raises:
        ConfigError: If a key column is missing or of another kind, or two tables have the same column.
        DataError: If a side table has two rows with one key.
    """
    columns = column_types(connection, source)
    selected, joins, notes = ["s.*"], [], list[str]()
    for i, (lookup, files) in enumerate(lookups):
        view = f"lookup_{i}"
        if hidden := create_view(connection, view, files, lookup.place, rename=rename):
            notes.append(f"columns left out of {lookup.place}, whose names begin with __: {', '.join(hidden)}")
        own = {name: kind for name, kind in column_types(connection, view).items() if name != FILE}
        _check_side_table(connection, lookup, view, columns, own)
        added = [name for name in own if name not in (*lookup.on, lookup.valid_from)]
        selected += [f"l{i}.{quote(name)}" for name in added]
        selected.append(f"l{i}.__matched AS __matched_{i}")
        joins.append(_join(lookup, view, f"l{i}", columns, own))
        if lookup.as_of is not None and lookup.valid_from is not None:
            zones = {lookup.as_of: has_zone(columns[lookup.as_of]), lookup.valid_from: has_zone(own[lookup.valid_from])}
            notes += filter(None, [differing_clocks(lookup.place, zones)])
        columns |= {name: own[name] for name in added}
    connection.execute(f"CREATE VIEW {source}_wide AS SELECT {', '.join(selected)} FROM {source} s {' '.join(joins)}")
    return f"{source}_wide", notes


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
    lowered = {name.lower() for name in columns}
    taken = [name for name in own if name.lower() in lowered and name not in (*lookup.on, lookup.valid_from)]
    if taken:
        raise ConfigError(where, "columns that the rows do not have", f"{', '.join(taken)} in both", "Rename them.")
    key = ", ".join(map(quote, [*lookup.on, *([] if lookup.valid_from is None else [lookup.valid_from])]))
    row = connection.sql(f"SELECT count(*), count(DISTINCT ({key})) FROM {view}").fetchall()[0]
    if row[0] != row[1]:
        raise DataError(
            where, f"a unique key ({key})", f"{row[0]} rows of {row[1]} keys", "Remove duplicate and empty keys."
        )

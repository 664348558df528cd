"""Copies JSON lines to Parquet: one object a line."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from pipeline.data.formats.csv import open_plain, refuse_like_names, rows_of_a_group
from pipeline.data.formats.files import SourceFile
from pipeline.errors import DataError
from storage.query import quote

if TYPE_CHECKING:
    import duckdb

MOST_LINE_BYTES = 64 * 1024 * 1024
"""Longest line."""
_TEXT = ("DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE", "UUID", "JSON")
"""Types that DuckDB may guess, and whose values are text or of several types."""
_LONG = r"(^|[\[,:])-?\d{16,}($|[\],}])"
"""A whole number that a fractional one may not hold exactly."""
_WHOLE = r"-?\d+(\.0+)?"
BLOCK_BYTES = 1 << 24


def copy_json(connection: "duckdb.DuckDBPyConnection", file: SourceFile, copy: Path, pattern: str) -> None:
    """Copies a file of JSON lines. A column's type fits all its values in the file. Dates and times stay text.

    A column with lists and single values gets lists of one in their place.

    Args:
        pattern: As of `copy_csv`.
    Raises:
        Error: DuckDB's, for a line that is no JSON.
        DataError: If a line is no object, two keys differ only in case, or fractions stand among ids that they round.
    """
    listed = "['" + pattern.replace("'", "''") + "']"
    options = f"{listed}, format='newline_delimited', hive_partitioning=false, maximum_object_size={MOST_LINE_BYTES}"
    where = f"JSON file '{file.name}'"
    objects = f"read_json_objects({options})"
    others = connection.sql(
        f"SELECT place FROM (SELECT row_number() OVER () AS place, json FROM {objects})"
        " WHERE json_type(json) <> 'OBJECT' LIMIT 1"
    )
    if (odd := others.fetchall()) != []:
        raise DataError(where, "one object a line", f"another value, {_nth(odd[0][0])}", "Correct the file.")
    keys = connection.sql(f"SELECT DISTINCT unnest(json_keys(json)) FROM {objects}").fetchall()
    refuse_like_names(where, sorted(key for (key,) in keys))
    if ("",) in keys:  # DuckDB then reads each object as one text
        raise DataError(where, "keys that can be names", "an empty one", "Give it a name.")
    found = connection.sql(f"SELECT * FROM read_json({options}, sample_size=-1, map_inference_threshold=-1)")
    kinds = {name: f"{kind}" for name, kind in zip(found.columns, found.types, strict=True)}
    raw = f"read_json({options}, columns={{{', '.join(_pair(name, 'JSON') for name in kinds)}}})"
    doubtful = [name for name, kind in kinds.items() if kind.removesuffix("[]") in ("JSON", "DOUBLE", "HUGEINT")]
    casts = {name: cast for name in doubtful if (cast := _exact(connection, raw, name, kinds[name], where)) is not None}
    plain = {name: "VARCHAR" if kind in _TEXT else kind for name, kind in kinds.items()}
    columns = ", ".join(_pair(name, "JSON" if name in casts else kind) for name, kind in plain.items())
    rows = connection.sql(f"SELECT * FROM read_json({options}, columns={{{columns}}})")
    replaced = ", ".join(f"{cast} AS {quote(name)}" for name, cast in casts.items())
    rows = rows.select(f"* REPLACE ({replaced})") if casts else rows
    rows.write_parquet(str(copy), compression="lz4", row_group_size=rows_of_a_group(len(kinds)))


def _nth(line: int) -> str:
    return f"the first of which is object {line}"


def _pair(name: str, kind: str) -> str:
    return f"'{name.replace(chr(39), chr(39) * 2)}': '{kind}'"


def _exact(connection: "duckdb.DuckDBPyConnection", raw: str, name: str, kind: str, where: str) -> str | None:
    """Returns the SQL of a column in which DuckDB would round numbers or mix types. None: its own type is right."""
    column = quote(name)
    if kind == "JSON[]":  # of no list with an item, or of items of several types
        empty = connection.sql(f"SELECT max(json_array_length({column})) FROM {raw}").fetchall()[0][0] == 0
        return f"CASE WHEN json_type({column}) <> 'NULL' THEN [] END" if empty else None
    if kind == "JSON":
        query = f"SELECT DISTINCT json_type({column}) FROM {raw} WHERE json_type({column}) <> 'NULL'"
        types = {one for (one,) in connection.sql(query).fetchall()}
        if not types:
            return "NULL"
        if "ARRAY" not in types or "OBJECT" in types:
            return None
        listed = f"CASE json_type({column}) WHEN 'ARRAY' THEN {column} ELSE json_array({column}) END"
        query = f"SELECT json_group_structure({listed}) FROM {raw} WHERE json_type({column}) <> 'NULL'"
        structure = connection.sql(query).fetchall()[0][0].replace("'", "''")
        structure = structure.replace('"JSON"', '"VARCHAR"')
        return f"CASE WHEN json_type({column}) <> 'NULL' THEN from_json({listed}, '{structure}') END"
    text = f"CAST({column} AS VARCHAR)"
    if kind.startswith("HUGEINT"):  # Parquet has no such type, and DuckDB writes fractions
        values = f"from_json({column}, '[\"HUGEINT\"]')" if kind.endswith("[]") else f"[TRY_CAST({text} AS HUGEINT)]"
        bounds = f"SELECT min(list_min({values})), max(list_max({values})) FROM {raw}"
        [(least, most)] = connection.sql(bounds).fetchall()
        if least < 0 or most >= 2**64:
            raise _not_ids(name, where, most, least)
        return f"CAST({values} AS UBIGINT[]){'' if kind.endswith('[]') else '[1]'}"
    query = (
        f"SELECT any_value({text}) FILTER (regexp_matches({text}, '{_LONG}')),"
        f" any_value({text}) FILTER (NOT regexp_full_match({text}, '{_WHOLE}')),"
        f" bool_and(TRY_CAST({text} AS HUGEINT) BETWEEN 0 AND 18446744073709551615)"
        f" FROM {raw} WHERE json_type({column}) <> 'NULL'"
    )
    long, fraction, fits = connection.sql(query).fetchall()[0]
    if long is None:
        return None
    if kind == "DOUBLE" and fraction is None and fits:
        return f"CAST(TRY_CAST({text} AS HUGEINT) AS UBIGINT)"
    raise _not_ids(name, where, long, fraction or "larger ones")


def _not_ids(name: str, where: str, one: object, other: object) -> DataError:
    return DataError(
        f"column '{name}' of {where}", f"whole numbers of 64 bits, as {one} is", f"{other}",
        "Write ids as whole numbers or text.",
    )  # fmt: skip


def count_lines(file: SourceFile, properties: Mapping[str, str]) -> int:
    """Counts the lines that are not blank: no value of JSON holds the end of a line."""
    lines, rest = 0, b""
    with open_plain(file, properties) as stream:
        while block := stream.read(BLOCK_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            lines += sum(not line.isspace() and line != b"" for line in whole)
    return lines + (rest.strip() != b"")

"""Copies JSON lines to Parquet: one object a line."""

import re
import shutil
from codecs import BOM_UTF8
from collections.abc import Collection, Sequence
from pathlib import Path

import duckdb
import numpy as np
import orjson
import pyarrow.parquet as pq

from pipeline.data.formats.alike import are_alike
from pipeline.data.formats.csv import BLOCK_BYTES, refuse_like_names, write_copy
from pipeline.errors import DataError
from storage.query import literal, quote

ONE_A_LINE = "Write one object a line, as pandas does with lines=True and jq with -c '.[]'."
MOST_LINE_BYTES = 64 * 1024 * 1024
"""Longest line."""
_TIMES = ("DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE", "UUID")
_TEXT = (*_TIMES, "JSON")
"""Types that DuckDB may guess, and whose values are text or of several types."""
FIRST_ROWS = 20_480
"""Rows whose types are those of all rows, if all are alike."""
SMALL_BYTES = 1 << 23
"""Bytes up to which DuckDB looks at all rows at once."""
_LONG = r"(^|[\[,:])-?\d{16,}($|[\],}])"
"""A whole number that a fractional one may not hold exactly."""
LARGE = 1e15
"""Numbers of that size have 16 digits before the point."""
_NUMBER = re.compile(r"_\d+(?=(_\d+)*$)")
_WHOLE = r"-?\d+(\.0+)?"
_BLANK = re.compile(rb"\n[ \t\r\v\f]*(?=\n)")
"""A line without anything, and the end of the one before."""


def without_mark(plain: Path, folder: Path) -> Path:
    """Returns the file, or a copy in a folder without the mark of UTF-8 at its start, which DuckDB takes for text."""
    with plain.open("rb") as opened:
        if opened.read(len(BOM_UTF8)) != BOM_UTF8:
            return plain
        copy = folder / "unmarked" / plain.name
        copy.parent.mkdir()
        with copy.open("wb") as out:
            shutil.copyfileobj(opened, out, BLOCK_BYTES)
    return copy


def copy_json(connection: duckdb.DuckDBPyConnection, plain: Path, where: str, copy: Path, pattern: str) -> None:
    """Copies a file of JSON lines. A column's type fits all its values in the file. Dates and times stay text.

    A column with lists and single values gets lists of one in their place.

    Args:
        plain: The file, local and not compressed.
        where: The file as errors name it.
        pattern: As of `copy_csv`.
    Raises:
        DataError: If a line is no object, two keys differ only in case, or fractions stand among ids that they round.
    """
    try:
        _copy_json(connection, plain, where, copy, pattern)
    except duckdb.InvalidInputException as error:
        if "Malformed JSON" not in str(error) or (bad := _first_bad_line(plain)) is None:
            raise
        raise DataError(where, "one object a line", f"no JSON in line {bad}", ONE_A_LINE) from error


def _first_bad_line(plain: Path) -> int | None:
    """Returns the number of the first line that is no JSON. DuckDB counts others than the file has."""
    with plain.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            try:
                if line.strip():
                    orjson.loads(line)
            except orjson.JSONDecodeError:
                return number
    return None


def _copy_json(connection: duckdb.DuckDBPyConnection, plain: Path, where: str, copy: Path, pattern: str) -> None:
    options = "format='newline_delimited', hive_partitioning=false"
    options = f"[{literal(pattern)}], {options}, maximum_object_size={MOST_LINE_BYTES}"
    objects = f"read_json_objects({options})"
    alike, kinds = False, {}
    if plain.stat().st_size > SMALL_BYTES:
        kinds = _kinds(connection, f"{options}, sample_size={FIRST_ROWS}")
        alike = are_alike(plain, {name: "VARCHAR" if kind in _TIMES else _narrow(kind) for name, kind in kinds.items()})
    if not alike:
        kinds = _kinds(connection, f"{options}, sample_size=-1")
    if doubted := _may_be_renamed([*kinds]):
        _check_objects(connection, objects, where)
    raw = f"read_json({options}, columns={{{', '.join(_pair(name, 'JSON') for name in kinds)}}})"
    doubtful = [name for name, kind in kinds.items() if kind.removesuffix("[]") == "JSON"]
    huge = [name for name, kind in kinds.items() if _narrow(kind) != kind]
    read = {name: "VARCHAR" if kind in _TEXT else _narrow(kind) for name, kind in kinds.items()}

    def write(names: Collection[str]) -> None:
        casts = {name: cast for name in names if (cast := _exact(connection, raw, name, kinds[name], where))}
        columns = ", ".join(_pair(name, "JSON" if name in casts else kind) for name, kind in read.items())
        rows = connection.sql(f"SELECT * FROM read_json({options}, columns={{{columns}}})")
        replaced = ", ".join(f"{cast} AS {quote(name)}" for name, cast in casts.items())
        rows = rows.select(f"* REPLACE ({replaced})") if casts else rows
        write_copy(connection, rows, copy)

    try:
        write(doubtful)
    except duckdb.InvalidInputException:
        if not huge:
            raise
        read |= {name: kinds[name] for name in huge}
        doubtful += [name for name in huge if kinds[name].removesuffix("[]") == "HUGEINT"]
        write(doubtful)
    if not (doubted or alike) and _may_lack_values(copy):
        _check_objects(connection, objects, where)
    fractions = [name for name, kind in kinds.items() if kind.removesuffix("[]") == "DOUBLE"]
    if rounded := [name for name in fractions if _may_be_large(copy, name)]:
        write([*doubtful, *rounded])


def _kinds(connection: duckdb.DuckDBPyConnection, options: str) -> dict[str, str]:
    """Returns column -> the type that fits its values in the rows that the options let DuckDB look at."""
    found = connection.sql(f"SELECT * FROM read_json({options}, map_inference_threshold=-1)")
    return {name: f"{kind}" for name, kind in zip(found.columns, found.types, strict=True)}


def _narrow(kind: str) -> str:
    """Returns a type with whole numbers of 64 bits: DuckDB's for 1 and -1 together has 128."""
    return kind if "STRUCT" in kind else kind.replace("HUGEINT", "BIGINT")


def _may_be_renamed(names: Sequence[str]) -> bool:
    """Tells whether DuckDB may have found other names than the keys of objects.

    It calls the values "json" if one is no object or a key is empty, and a key "A_1" if there is "a".
    """
    known = {name.lower() for name in names}
    bases = {name[: end.start()].lower() for name in names for end in _NUMBER.finditer(name)}
    return names == ["json"] or len(known) < len(names) or not known.isdisjoint(bases)


def _may_lack_values(copy: Path) -> bool:
    """Tells whether the statistics of a Parquet file leave open that a row has no value, as that of a `null` has."""
    file = pq.read_metadata(copy)
    groups = (file.row_group(number) for number in range(file.num_row_groups))
    for group in groups:
        known = (group.column(place).statistics for place in range(group.num_columns))
        if not any(one is not None and one.has_null_count and one.null_count == 0 for one in known):
            return True
    return False


def _may_be_large(copy: Path, name: str) -> bool:
    """Tells whether the statistics of a Parquet file leave open that a column of numbers has values from LARGE on."""
    file = pq.read_metadata(copy)
    for group in (file.row_group(number) for number in range(file.num_row_groups)):
        for column in (group.column(place) for place in range(group.num_columns)):
            if column.path_in_schema != name and not column.path_in_schema.startswith(f"{name}."):
                continue
            known = column.statistics
            bounds = (known.min, known.max) if known is not None and known.has_min_max else ()
            empty = known is not None and known.null_count == column.num_values
            if not empty and not (bounds and all(isinstance(one, float) and abs(one) < LARGE for one in bounds)):
                return True
    return False


def _check_objects(connection: duckdb.DuckDBPyConnection, objects: str, where: str) -> None:
    """Refuses lines that are no objects, and keys that cannot be columns together."""
    keys_of = "CASE json_type(json) WHEN 'OBJECT' THEN json_keys(json) ELSE [NULL] END"
    query = f"SELECT DISTINCT unnest(keys) FROM (SELECT DISTINCT {keys_of} AS keys FROM {objects})"
    keys = [key for (key,) in connection.sql(query).fetchall()]
    if None in keys:
        places = f"SELECT row_number() OVER () AS place, json FROM {objects}"
        query = f"SELECT min(place) FROM ({places}) WHERE json_type(json) <> 'OBJECT'"
        odd = connection.sql(query).fetchall()[0][0]
        raise DataError(where, "one object a line", f"another value, {_nth(odd)}", ONE_A_LINE)
    refuse_like_names(where, sorted(keys))
    if "" in keys:  # DuckDB then reads each object as one text
        raise DataError(where, "keys that can be names", "an empty one", "Give it a name.")


def _nth(line: int) -> str:
    return f"the first of which is object {line}"


def _pair(name: str, kind: str) -> str:
    return f"{literal(name)}: '{kind}'"


def _exact(connection: duckdb.DuckDBPyConnection, raw: str, name: str, kind: str, where: str) -> str | None:
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
        structure = connection.sql(query).fetchall()[0][0]
        structure = structure.replace('"JSON"', '"VARCHAR"')
        lists = f"from_json({listed}, {literal(structure)})"
        lists = _whole(connection, raw, lists, name, where) if structure == '["HUGEINT"]' else lists
        return f"CASE WHEN json_type({column}) <> 'NULL' THEN {lists} END"
    text = f"CAST({column} AS VARCHAR)"
    if kind == "HUGEINT[]":
        return _whole(connection, raw, f"from_json({column}, '[\"HUGEINT\"]')", name, where)
    number = f"[TRY_CAST({text} AS HUGEINT)]"
    if kind == "HUGEINT":
        return f"{_whole(connection, raw, number, name, where)}[1]"
    query = (
        f"SELECT any_value({text}) FILTER (regexp_matches({text}, '{_LONG}')),"
        f" any_value({text}) FILTER (NOT regexp_full_match({text}, '{_WHOLE}')),"
        f" bool_and({number}[1] IS NOT NULL)"
        f" FROM {raw} WHERE json_type({column}) <> 'NULL'"
    )
    long, fraction, fits = connection.sql(query).fetchall()[0]
    if long is None:
        return None
    if kind == "DOUBLE" and fraction is None and fits:
        return f"{_whole(connection, raw, number, name, where)}[1]"
    raise _not_ids(name, where, long, fraction or "larger ones")


def _whole(connection: duckdb.DuckDBPyConnection, raw: str, values: str, name: str, where: str) -> str:
    """Returns the SQL of lists of whole numbers in 64 bits: Parquet has no larger ones, and DuckDB writes fractions."""
    [(least, most)] = connection.sql(f"SELECT min(list_min({values})), max(list_max({values})) FROM {raw}").fetchall()
    if most >= 2**63 and (least < 0 or most >= 2**64):
        raise _not_ids(name, where, most, least)
    kind = "BIGINT" if most < 2**63 else "UBIGINT"
    return f"CAST({values} AS {kind}[])"


def _not_ids(name: str, where: str, one: object, other: object) -> DataError:
    return DataError(
        f"column '{name}' of {where}", f"whole numbers of 64 bits, as {one} is", f"{other}",
        "Write ids as whole numbers or text.",
    )  # fmt: skip


def count_lines(plain: Path) -> int:
    """Counts the lines that are not blank: no value of JSON holds the end of a line."""
    lines, rest = 0, b"\n"
    with plain.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            whole, end, rest = (rest + block).rpartition(b"\n")
            text = np.frombuffer(whole + end, np.uint8)
            ends = np.flatnonzero(text == ord("\n"))
            blank = (text[ends[:-1] + 1] <= ord(" ")).any()
            rest = end + rest
            lines += len(ends) - 1 - (len(_BLANK.findall(whole + end)) if blank else 0)
    return lines + (rest.strip() != b"")

"""Types of columns over all files: of text by its values, and one for columns whose files have several.

A whole number stays exact, whatever another file says. Text becomes a number or a time only where no value changes.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import duckdb

from pipeline.data.formats.numbers import DECIMAL, EXACT_LENGTH, ZERO_BEHIND, find_decimal
from pipeline.errors import ConfigError, DataError
from storage.query import literal, quote

FILE = "__file_name"
"""Column with the file of a row."""
ROW = "file_row_number"
"""Column with a row's place in its file. Joins lose the order of rows. FILE and ROW restore it."""

_TIME = r"[ T]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?"
FIRST_ROWS = 1_000
"""Rows that most types are excluded by."""
TESTS_AT_ONCE = 150
"""DuckDB's memory for a query grows with the square of its tests."""
ISO_DATE = r"\d{4}-\d{2}-\d{2}"
ISO_DAY = f"{ISO_DATE}({_TIME}([Zz]| UTC|[+-]00(:?00)?)?)?"
"""Text with a day: an ISO date or timestamp, without a zone or in UTC, which BigQuery spells out. In another zone the
day may differ."""
_ISO = {
    "DATE": ISO_DATE,
    "TIMESTAMP": ISO_DATE + _TIME,
    "TIMESTAMPTZ": rf"{ISO_DATE}{_TIME}([Zz]| UTC|[+-]\d{{2}}(:?\d{{2}})?)",
}
"""Type -> its text."""
_NUMBERS = ("BIGINT", "HUGEINT", "DOUBLE", "Double")
"""`Double` in small letters: with zeros behind, such as 1.10, and as many places each. The names are one to DuckDB."""
_FOUND_BY_ARROW = ("DOUBLE", "double")
"""Types that `find_decimal` tells."""
_INTEGERS = ("TINYINT", "SMALLINT", "INTEGER", "BIGINT")
_UNSIGNED = ("UTINYINT", "USMALLINT", "UINTEGER", "UBIGINT")
_EXACT = {"FLOAT": 2**24, "DOUBLE": 2**53}
"""Type -> how far it holds every whole number."""
SECOND = {"seconds": 1, "milliseconds": 1_000, "microseconds": 1_000_000}
"""Unit of `source.day_unit` -> how many make a second."""
YEARS = (-62_135_596_800_000_000, 253_402_300_799_999_999)
"""First and last microsecond of the years 1 to 9999, since 1970."""
NOTHING = '"NULL"'
"""DuckDB's type of a column without any value."""


def type_text(
    rows: duckdb.DuckDBPyRelation,
    columns: Mapping[str, bool],
    stored: Mapping[str, str] = MappingProxyType({}),
    copies: Mapping[str, Sequence[Path]] = MappingProxyType({}),
    threads: int = 1,
) -> duckdb.DuckDBPyRelation:
    """Converts columns of text to the first type that fits all their values, and has the same text for each.

    A number has no sign +, no zeros in front, and no other zeros behind it than all have: 1.10 and 1.9 are versions.
    All other text stays as it is written. A column without a value has no type.

    Args:
        columns: Columns of text to look at -> whether they may be numbers. Else only times are looked for.
        stored: Column -> type that the table has. Text stays text, and fractional numbers take any number.
        copies: Column -> the Parquet files with all its texts, where these are read as they are.
        threads: For these files.
    """
    tried = {name: _candidates(numbers, stored.get(name)) for name, numbers in columns.items()}
    tried = {name: kinds for name, kinds in tried.items() if kinds}
    if not tried:
        return rows
    first, seen = _test(rows.limit(FIRST_ROWS), [(name, kind) for name, kinds in tried.items() for kind in kinds])
    tried = {name: [kind for kind in kinds if first[name, kind] is not False] for name, kinds in tried.items()}
    chosen: dict[str, str] = {}
    while tried := {name: kinds for name, kinds in tried.items() if kinds}:  # most need one look
        wanted = [(name, kinds[0]) for name, kinds in tried.items()]
        results = first if seen < FIRST_ROWS else _test_all(rows, wanted, copies, threads)
        for name, kinds in tried.items():
            passed = results[name, kinds[0]]
            if passed is None:
                chosen[name] = NOTHING
            elif passed:
                chosen[name] = kinds[0]
        tried = {name: kinds[1:] for name, kinds in tried.items() if name not in chosen}
    casts = [
        f"{'NULL' if kind == NOTHING else f'CAST({quote(name)} AS {kind.lower()})'} AS {quote(name)}"
        for name, kind in chosen.items()
    ]
    return rows.select(f"* REPLACE ({', '.join(casts)})") if casts else rows


def _candidates(numbers: bool, stored: str | None) -> list[str]:
    if stored == "VARCHAR":
        return []
    if not numbers:
        return [*_ISO]
    if stored == "BOOLEAN":
        return ["BOOLEAN", *_NUMBERS, *_ISO]
    return [*(["double"] if stored in _EXACT else []), *_NUMBERS, *_ISO]


def _test_all(
    rows: duckdb.DuckDBPyRelation,
    tests: Sequence[tuple[str, str]],
    copies: Mapping[str, Sequence[Path]],
    threads: int,
) -> dict[tuple[str, str], bool | None]:
    """Returns what `_test` does, of decimal numbers without SQL."""
    decimal = find_decimal(
        {name: copies[name] for name, kind in tests if kind in _FOUND_BY_ARROW and name in copies}, threads
    )
    found: dict[tuple[str, str], bool | None] = {one: True for one in tests if one[0] in decimal}
    left = [one for one in tests if one not in found]
    return {**found, **(_test(rows, left)[0] if left else {})}


def _test(
    rows: duckdb.DuckDBPyRelation, tests: Sequence[tuple[str, str]]
) -> tuple[dict[tuple[str, str], bool | None], int]:
    """Returns (column, type) -> whether all values fit, and the number of rows. None: there is no value."""
    texts = [_fits(quote(name), kind) for name, kind in tests]
    parts = [", ".join(texts[at : at + TESTS_AT_ONCE]) for at in range(0, len(texts), TESTS_AT_ONCE)]
    found = [rows.aggregate(f"{part}, count(*)").fetchall()[0] for part in parts]
    return dict(zip(tests, (one for part in found for one in part[:-1]), strict=True)), found[0][-1]


def _fits(column: str, kind: str) -> str:
    """Returns the SQL that tells whether all values have a type."""
    fits = f"bool_and({fits_text(column, kind)}) FILTER ({column} IS NOT NULL)"
    if kind != "Double":
        return fits
    places, pointed = f"length({column}) - strpos({column}, '.')", f"contains({column}, '.')"
    return f"{fits} AND min({places}) FILTER ({pointed}) = max({places}) FILTER ({pointed})"


def fits_text(value: str, kind: str) -> str:
    """Returns the SQL that tells whether a text has a type. `double` in small letters: by any way of writing.

    Args:
        value: SQL of a text that is not null.
    """
    if kind in _ISO:
        return f"regexp_full_match({value}, '{_ISO[kind]}') AND TRY_CAST({value} AS {kind}) IS NOT NULL"
    if kind == "double":
        return f"TRY_CAST({value} AS DOUBLE) IS NOT NULL"
    if kind == "BOOLEAN":
        return f"lower({value}) IN ('true', 'false')"
    same = f"coalesce(CAST(TRY_CAST({value} AS {kind}) AS VARCHAR) = {value}, false)"
    if kind.upper() == "DOUBLE":  # a long one may have more digits than a number keeps
        test = (
            f"CASE WHEN length({value}) <= {EXACT_LENGTH} THEN regexp_full_match({value}, '{DECIMAL}') ELSE {same} END"
        )
        behind = f"regexp_matches({value}, '{ZERO_BEHIND}')"
        return (
            f"{test} AND NOT CASE WHEN suffix({value}, '0') THEN {behind} ELSE false END" if kind == "DOUBLE" else test
        )
    if kind == "HUGEINT":
        return f"{same} AND TRY_CAST({value} AS HUGEINT) BETWEEN 0 AND 18446744073709551615"
    return same


def common_types(
    columns: Sequence[Mapping[str, str]], where: Sequence[str], rows: Sequence[duckdb.DuckDBPyRelation]
) -> list[dict[str, str]]:
    """Returns, for each group of files, column -> the SQL that gives it the type that it has over all files.

    Whole numbers of different widths take the widest. Whole numbers beside fractional ones stay whole if all are; a
    value among lists becomes a list of one.

    Args:
        columns: Of each group, column -> its type there.
        where: The groups as an error names them.
        rows: Rows of the groups, for types that depend on values.
    Raises:
        DataError: If ids of one file would be rounded by numbers of another, or only some times have a zone.
    """
    names = list(dict.fromkeys(name for group in columns for name in group))
    mixed = [name for name in names if len({group[name] for group in columns if name in group} - {NOTHING}) > 1]
    casts: list[dict[str, str]] = [{} for _ in columns]
    for name in mixed:
        kinds = [group.get(name, NOTHING) for group in columns]
        for place, cast in enumerate(_common(name, kinds, where, rows)):
            if cast is not None:
                casts[place][name] = cast
    return casts


def _common(
    name: str, kinds: Sequence[str], where: Sequence[str], rows: Sequence[duckdb.DuckDBPyRelation]
) -> list[str | None]:
    """Returns the SQL of a column in each group. None: it has the type, or no value."""
    column = quote(name)
    given = kinds
    if not all(kind == NOTHING or _is_whole(kind) or _is_fractional(kind) for kind in kinds):
        kinds = [
            kind if _has_value(group, column, kind) else _emptied(kind) for kind, group in zip(kinds, rows, strict=True)
        ]
    listed = any(kind.endswith("[]") for kind in kinds)
    items = [kind.removesuffix("[]") for kind in kinds]
    found = {kind for kind in items if kind != NOTHING}
    nothing = ["NULL" if kind == NOTHING != before else None for kind, before in zip(kinds, given, strict=True)]
    if not found or any(kind.startswith(("STRUCT", "MAP", "UNION")) or kind.endswith("]") for kind in found):
        return nothing  # DuckDB's own rule, or nobody's
    target = _target(name, items, found, where, rows, listed)
    casts: list[str | None] = []
    for kind, item, none in zip(kinds, items, nothing, strict=True):
        if kind == NOTHING:
            casts.append(none)
            continue
        value = column if kind.endswith("[]") or not listed else f"[{column}]"
        wanted = f"{target}[]" if listed else target
        if target == "VARCHAR" and kind.endswith("[]"):
            casts.append(f"list_transform({column}, lambda x: {as_text('x', item)})")
        elif target == "VARCHAR":
            text = as_text(column, item)
            casts.append(f"CASE WHEN {column} IS NOT NULL THEN [{text}] END" if listed else text)
        elif value == column:
            casts.append(f"CAST({column} AS {wanted})")
        else:
            casts.append(f"CASE WHEN {column} IS NOT NULL THEN CAST({value} AS {wanted}) END")
    return casts


def as_text(value: str, kind: str) -> str:
    """Returns the SQL of a value as text: 5.0 is the id 5, also as a decimal.

    Args:
        value: SQL.
        kind: Its type.
    """
    text = f"CAST({value} AS VARCHAR)"
    if is_decimal(kind) and not kind.endswith(",0)"):
        return f"regexp_replace({text}, '\\.?0+$', '')"
    if kind not in _EXACT:
        return text
    whole = f"WHEN {value} = floor({value}) AND abs({value}) <= {_EXACT[kind]}"
    return f"CASE {whole} THEN CAST({value} AS HUGEINT)::VARCHAR ELSE {text} END"


def is_decimal(kind: str) -> bool:
    """Tells whether a type of DuckDB has decimals, but no lists of them."""
    return kind.startswith("DECIMAL(") and kind.endswith(")")


def _target(
    name: str,
    items: Sequence[str],
    found: Collection[str],
    where: Sequence[str],
    rows: Sequence[duckdb.DuckDBPyRelation],
    listed: bool,
) -> str:
    if len(found) == 1:
        return next(iter(found))
    if "BLOB" in found:
        place = where[items.index("BLOB")]
        raise DataError(f"column '{name}' of {place}", "text in UTF-8, as in other files", "bytes", "Write it as text.")
    if all(_is_whole(kind) or kind == "BOOLEAN" for kind in found):
        widest = _widest(found)
        return _number(name, items, where, rows, listed) if widest == "HUGEINT" else widest
    if all(_is_whole(kind) or _is_fractional(kind) for kind in found):
        return _number(name, items, where, rows, listed)
    if all(kind == "DATE" or kind.startswith("TIMESTAMP") for kind in found):
        zoned = [kind for kind in found if "ZONE" in kind]
        if zoned and len(zoned) < len(found):
            raise DataError(
                f"column '{name}' of {where[items.index(zoned[0])]}",
                "times without a zone, as in other files",
                zoned[0],
                "Write all times in UTC, with a zone or without.",
            )
        return zoned[0] if zoned else "TIMESTAMP"
    return "VARCHAR"


def _is_whole(kind: str) -> bool:
    return kind in (*_INTEGERS, *_UNSIGNED, "HUGEINT") or re.fullmatch(r"DECIMAL\(\d+,0\)", kind) is not None


def is_number(kind: str) -> bool:
    """Tells whether a type of DuckDB has numbers, but for truth values."""
    return _is_whole(kind) or _is_fractional(kind)


def _is_fractional(kind: str) -> bool:
    return kind in _EXACT or kind.startswith("DECIMAL")


def _widest(kinds: Collection[str]) -> str:
    """Returns the narrowest type of whole numbers that holds those of all types."""
    if all(kind in _UNSIGNED for kind in kinds):
        return max(kinds, key=_UNSIGNED.index)
    if all(kind in (*_INTEGERS, *_UNSIGNED[:-1], "BOOLEAN") for kind in kinds):
        return "BIGINT" if {"UINTEGER", "BIGINT"} & {*kinds} else "INTEGER"
    return "HUGEINT"


def _number(
    name: str, items: Sequence[str], where: Sequence[str], rows: Sequence[duckdb.DuckDBPyRelation], listed: bool
) -> str:
    """Returns the type of a column that is whole in some files and fractional in others, or whole in several ways.

    It stays whole if all its values are. Otherwise no whole number may be so large that a fractional one rounds it.
    """
    column = quote(name)
    item = "item" if listed else column
    fractions, largest, whole = [], 0, True
    for kind, place, group in zip(items, where, rows, strict=True):
        if kind == NOTHING:
            continue
        values = group.select(f"unnest({column}) AS item") if listed and _lists(group, name) else group
        taken = column if values is group else item
        if _is_whole(kind) or kind == "BOOLEAN":
            most = values.aggregate(f"max(abs(CAST({taken} AS HUGEINT)))").fetchall()[0][0]
            largest = max(largest, most or 0)
            continue
        test = f"{taken} = floor({taken})"
        if is_decimal(kind):  # whole ones are ids, as long as they may be
            most = values.filter(test).aggregate(f"max(abs({taken}))").fetchall()[0][0]
            largest = max(largest, int(most or 0))
        else:
            test += f" AND abs({taken}) <= {_EXACT[kind]}"
        odd = values.filter(f"{taken} IS NOT NULL AND NOT ({test})").limit(1).select(f"CAST({taken} AS VARCHAR)")
        if (bad := odd.fetchall()) != []:
            whole = False
            fractions.append((place, bad[0][0]))
    if whole:
        return "BIGINT" if largest < 2**63 else "HUGEINT"
    if largest > _EXACT["DOUBLE"]:
        place, value = fractions[0]
        raise DataError(
            f"column '{name}' of {place}", f"whole numbers, as in other files, one of which is {largest}", f"{value}",
            "Write ids as whole numbers or text in all files.",
        )  # fmt: skip
    return "DOUBLE"


def _has_value(rows: duckdb.DuckDBPyRelation, column: str, kind: str) -> bool:
    """Tells whether a column has a value, or a list with an item."""
    test = f"len({column}) > 0" if kind.endswith("[]") else f"{column} IS NOT NULL"
    return kind != NOTHING and rows.filter(test).limit(1).select("1").fetchall() != []


def _emptied(kind: str) -> str:
    return f"{NOTHING}[]" if kind.endswith("[]") else NOTHING


def _lists(rows: duckdb.DuckDBPyRelation, name: str) -> bool:
    return f"{rows.types[rows.columns.index(name)]}".endswith("[]")


def count_times(rows: duckdb.DuckDBPyRelation, times: Sequence[str], unit: str, key: str) -> duckdb.DuckDBPyRelation:
    """Converts columns of numbers, the time since 1970-01-01 in UTC, to timestamps of microseconds.

    Args:
        unit: One of SECOND.
        key: Config key of the unit.
    Raises:
        DataError: If a number is no time of the years 1 to 9999.
    """
    values = {}
    for name in times:
        exact = f"TRY_CAST({quote(name)} AS DECIMAL(24,6)) * {1_000_000 // SECOND[unit]}"
        micros = f"TRY_CAST(round({exact}) AS BIGINT)"
        values[name] = f"CASE WHEN {micros} BETWEEN {YEARS[0]} AND {YEARS[1]} THEN make_timestamp({micros}) END"
    for name, value in values.items():
        bad = rows.filter(f"{quote(name)} IS NOT NULL AND {value} IS NULL").limit(1)
        for number, file in bad.select(f"CAST({quote(name)} AS VARCHAR), {FILE}").fetchall():
            raise DataError(
                f"column '{name}' of '{file.rpartition('/')[2]}'", f"{unit} since 1970, as {key} says", number,
                "Correct the value, or the unit.",
            )  # fmt: skip
    return rows.select(f"* REPLACE ({', '.join(f'{value} AS {quote(name)}' for name, value in values.items())})")


def parse_times(rows: duckdb.DuckDBPyRelation, times: Sequence[str], formats: Sequence[str]) -> duckdb.DuckDBPyRelation:
    """Converts text columns to timestamps."""
    listed = f"[{', '.join(map(literal, formats))}]"
    shown = "'" + "' or '".join(formats) + "'"
    parsed = {name: f"try_strptime({quote(name)}, {listed})" for name in times}
    for name, value in parsed.items():
        column = quote(name)
        try:
            bad = rows.filter(f"{column} IS NOT NULL AND {value} IS NULL").limit(1).select(column, FILE).fetchall()
        except duckdb.InvalidInputException as error:
            if "format specifier" not in str(error):
                raise
            raise ConfigError(
                "source.date_format", "formats as of strptime, such as '%m/%d/%Y'", shown, "Correct the format."
            ) from error
        if bad:
            raise DataError(
                f"column '{name}' of '{bad[0][1].rpartition('/')[2]}'", f"times as source.date_format says, {shown}",
                f"'{bad[0][0]}'", "Correct the value, or the format.",
            )  # fmt: skip
    return rows.select(f"* REPLACE ({', '.join(f'{value} AS {quote(name)}' for name, value in parsed.items())})")

"""Reads CSV files, JSON lines, and dates and times in text. DuckDB would guess their format file by file."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import duckdb

from pipeline.errors import ConfigError, DataError
from storage.query import quote

FILE = "filename"
"""Column that DuckDB adds: the file of a row."""

_CSV_KINDS = ["BOOLEAN", "BIGINT", "HUGEINT", "DOUBLE", "VARCHAR"]
"""Types that DuckDB may find in CSV files. No dates or times: it would guess and change their format."""
_TIME = r"[ T]([01]\d|2[0-3]):[0-5]\d(:[0-5]\d(\.\d+)?)?"
_JSON_TEXT = ("DATE", "TIME", "TIMESTAMP", "TIMESTAMP WITH TIME ZONE", "UUID", "JSON")
"""Types that DuckDB may guess in JSON lines, and whose values are text or of several types."""
MOST_LINE_BYTES = 64 * 1024 * 1024
"""Longest line of JSON."""
TESTS_AT_ONCE = 150
"""DuckDB's memory for a query grows with the square of its tests."""
ISO_DATE = r"\d{4}-\d{2}-\d{2}"
ISO_DAY = f"{ISO_DATE}({_TIME}([Zz]|[+-]00(:?00)?)?)?"
"""Text with a day: an ISO date or timestamp, without a zone or in UTC. In another zone the day may differ."""
_ISO = {
    "DATE": ISO_DATE,
    "TIMESTAMP": ISO_DATE + _TIME,
    "TIMESTAMPTZ": rf"{ISO_DATE}{_TIME}([Zz]|[+-]\d{{2}}(:?\d{{2}})?)",
}
"""Type -> its text in CSV files."""


def read_csv(
    connection: duckdb.DuckDBPyConnection, names: list[str], as_text: Sequence[str]
) -> duckdb.DuckDBPyRelation:
    """Reads CSV files. A column's type fits all its values in all files, because text may come late."""
    options: dict[str, Any] = {"filename": True, "union_by_name": True, "hive_partitioning": False}
    rows = connection.read_csv(names, **options, sample_size=-1, auto_type_candidates=_CSV_KINDS)  # type: ignore[arg-type]
    found = dict(zip(rows.columns, map(str, rows.types), strict=True))
    options["dtype"] = {name: "VARCHAR" if name in as_text else kind for name, kind in found.items() if name != FILE}
    sniff = (
        "SELECT Delimiter, Quote, Escape, Comment, SkipRows, HasHeader"
        " FROM sniff_csv(?, sample_size=-1, auto_type_candidates=?)"
    )
    dialects = {connection.execute(sniff, [name, _CSV_KINDS]).fetchall()[0] for name in names}
    if len(dialects) > 1:
        return connection.read_csv(names, **options, sample_size=-1)  # type: ignore[arg-type]
    # With a given dialect, a query need not read all files to find it.
    delimiter, *marks, skipped, header = dialects.pop()
    quotes, escape, comment = ("" if mark == "(empty)" else mark for mark in marks)
    return connection.read_csv(
        names,  # type: ignore[arg-type]
        **options,
        delimiter=delimiter,
        quotechar=quotes,
        escapechar=escape,
        comment=comment,
        skiprows=skipped,
        header=header,
    )


def read_json(connection: duckdb.DuckDBPyConnection, names: list[str]) -> duckdb.DuckDBPyRelation:
    """Reads files of JSON lines: one object a line. A column's type fits all its values in all files.

    Dates and times stay text. A column without any value is left out.
    """
    listed = "[" + ", ".join("'" + name.replace("'", "''") + "'" for name in names) + "]"
    reads = (
        f"read_json({listed}, format='newline_delimited', filename=true, hive_partitioning=false,"
        f" maximum_object_size={MOST_LINE_BYTES}"
    )
    found = connection.sql(f"SELECT * FROM {reads}, union_by_name=true, sample_size=-1, map_inference_threshold=-1)")
    kinds = {name: f"{kind}" for name, kind in zip(found.columns, found.types, strict=True) if name != FILE}
    kinds = {name: "VARCHAR" if kind in _JSON_TEXT else kind for name, kind in kinds.items()}
    columns = ", ".join(f"'{name.replace(chr(39), chr(39) * 2)}': '{kind}'" for name, kind in kinds.items())
    rows = connection.sql(f"SELECT * FROM {reads}, columns={{{columns}}})")
    doubtful = [name for name, kind in zip(found.columns, found.types, strict=True) if f"{kind}" == "JSON"]
    counts = rows.aggregate(", ".join(f"count({quote(name)})" for name in doubtful)).fetchall()[0] if doubtful else ()
    empty = [quote(name) for name, count in zip(doubtful, counts, strict=True) if not count]
    return rows.select(f"* EXCLUDE ({', '.join(empty)})") if empty else rows


def convert_iso(rows: duckdb.DuckDBPyRelation, other: Sequence[str]) -> duckdb.DuckDBPyRelation:
    """Converts text columns in which every value is an ISO date, or every value an ISO timestamp.

    Args:
        other: Columns to leave as they are.
    """
    kinds = dict(zip(rows.columns, map(str, rows.types), strict=True))
    texts = [name for name, kind in kinds.items() if kind == "VARCHAR" and name not in (FILE, *other)]
    tried = [(name, kind) for name in texts for kind in _ISO]
    for sample in (rows.limit(1_000), rows):  # most columns need no second look
        tests = [f"bool_and({_is_iso(quote(name), kind)}) FILTER ({quote(name)} IS NOT NULL)" for name, kind in tried]
        parts = [", ".join(tests[at : at + TESTS_AT_ONCE]) for at in range(0, len(tests), TESTS_AT_ONCE)]
        passed = [one for part in parts for one in sample.aggregate(part).fetchall()[0]]
        tried = [one for one, good in zip(tried, passed, strict=True) if good or (good is None and sample is not rows)]
    casts = [f"CAST({quote(name)} AS {kind}) AS {quote(name)}" for name, kind in tried]
    return rows.select(f"* REPLACE ({', '.join(casts)})") if casts else rows


def _is_iso(column: str, kind: str) -> str:
    return f"regexp_full_match({column}, '{_ISO[kind]}') AND TRY_CAST({column} AS {kind}) IS NOT NULL"


def parse_times(rows: duckdb.DuckDBPyRelation, times: Sequence[str], formats: Sequence[str]) -> duckdb.DuckDBPyRelation:
    """Converts text columns to timestamps."""
    listed = "[" + ", ".join("'" + text.replace("'", "''") + "'" for text in formats) + "]"
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
                f"column '{name}' of '{Path(bad[0][1]).name}'", f"times as source.date_format says, {shown}",
                f"'{bad[0][0]}'", "Correct the value, or the format.",
            )  # fmt: skip
    return rows.select(f"* REPLACE ({', '.join(f'{value} AS {quote(name)}' for name, value in parsed.items())})")

"""The typed and labelled view of the rows to write."""

import datetime
import fnmatch
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import duckdb

from pipeline.data.formats.reading import SHOWN_LETTERS
from pipeline.data.formats.types import FILE, ISO_DAY, NOTHING, ROW, as_text, fits_text, is_decimal, is_number
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.config import EventTable, LabelColumns, SourceConfig, refuse_outcomes
from pipeline.extraction.join import LEFT_OUT, REASON
from pipeline.extraction.sources import repeated_rows
from pipeline.transforms.schema import FeatureSchema, input_kinds, resolve, unknown_column
from storage.keys import is_key
from storage.names import LEAST_WEIGHT, MOST_WEIGHT, NAME
from storage.query import column_types, literal, quote
from storage.reader import DAY

_INTS = {
    "TINYINT": "INTEGER",
    "SMALLINT": "INTEGER",
    "UTINYINT": "INTEGER",
    "USMALLINT": "INTEGER",
    "UINTEGER": "BIGINT",
}
ANONYMOUS = "__anonymous"
"""Column of the view of events: whether a row lacks a key."""
MISFITS = "__misfits"
"""Column of the view: values that would change in the table, whose types stay, as {column, value}, among nulls.

The view lacks it if all types are those of the table."""
GOOD = f"__reason IS NULL AND NOT {LEFT_OUT}"
"""SQL condition on rows of the typed view to write."""
DAY_UNITS = {"seconds": 86_400, "milliseconds": 86_400_000, "microseconds": 86_400_000_000}
"""Unit of `source.day_unit` -> how many make a day."""
WRITTEN_DAYS = (19_000_101, 22_001_231)
"""Numbers from here to there are rather days as they are written, 20250131, than seconds since 1970."""
FARTHEST_DAY = 1_000_000
"""Days from 1970 within which a number counts as a time."""
MAP = re.compile(
    r"MAP\((INTEGER|BIGINT), ((FLOAT|DOUBLE|INTEGER|BIGINT|VARCHAR)(\[\])?|MAP\((INTEGER|BIGINT), (FLOAT|DOUBLE)\))\)"
)
"""DuckDB's name of a map of features: key -> a number, a list of ids, or a scored list."""
_KEPT = ("BOOLEAN", "INTEGER", "BIGINT", "FLOAT", "DOUBLE", "VARCHAR", "DATE")


def add_types(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    schema: FeatureSchema | LabelColumns,
    source: SourceConfig,
    matched: Sequence[str],
    made: Sequence[str],
    stored: Mapping[str, str] = MappingProxyType({}),
    guessed: Collection[str] = (),
) -> str:
    """Creates a view of the rows as stored, with day, label and the reason why a row is refused. Returns its name.

    Args:
        matched: Further columns to keep: matches in side tables, and what the log join says of the row.
        made: Columns computed from outcomes; they are no features.
        stored: Column of the table -> DuckDB's type of it.
        guessed: Columns whose types are what values of text say. Whole numbers that features read as numbers, such as
            prices of a quiet day, are stored as floats there: another day has fractions.
    Raises:
        ConfigError: If the configuration names a column that the rows lack.
        DataError: If a column has a type that cannot be stored, or a row has no day.
    """
    types, day = column_types(connection, view), source.day or source.day_column
    names = [name for name in types if name not in (FILE, ROW) and not name.startswith("__")]
    resolve([schema.label], names, "features.label")
    if schema.weight is not None:
        resolve([schema.weight], names, "features.weight")
    if isinstance(day, str):
        resolve([day], names, "source.day_column")
    maps = maps_of(types)
    read = read_columns(schema, [name for name in names if name != DAY or day == DAY], made, maps)
    dense = read.numbers
    _check_text(connection, view, [name for name in dense if types[name] == "VARCHAR" and name not in stored])
    # A column of untyped nulls or empty lists is left out. When a later file gives its type, these rows read null.
    untyped = {name for name in names if types[name].removesuffix("[]") == NOTHING and name not in dense}
    left = {*untyped, *unstorable_columns(connection, view, schema, made)}
    kept = [name for name in names if name not in (schema.label, *left) and name.lower() != DAY]
    if isinstance(schema, FeatureSchema):
        _check_names(sorted(name for name in kept if not NAME.fullmatch(name)))
    weight = None if schema.weight in made else schema.weight
    loose = (
        weight if weight is not None and types[weight] == "VARCHAR" else None
    )  # text that is not a number is refused
    numbers = [*dense, *([] if loose is None else [loose])]
    items = {name: types[name].removesuffix("[]") for name in dense if name in guessed and name not in read.ids}
    floats = {name: f"DOUBLE{types[name][len(item) :]}" for name, item in items.items() if _is_whole(item)}
    typed = _type_columns(connection, view, {name: types[name] for name in kept}, floats | {**stored}, numbers)
    date = _day(day, types[day], source.day_unit) if isinstance(day, str) else f"DATE '{day}'"
    _refuse_other_day(connection, view, {name: types[name] for name in names if name != day}, date)
    outcome = _label(schema.label, source.positive)
    reasons = [f"WHEN {REASON} IS NOT NULL THEN {REASON}"] if REASON in matched else []
    if not made:  # a label computed from outcomes is never bad
        reasons.append(_bad_label(schema.label, outcome, source.unlabelled == "skip"))
    reasons += [] if weight is None else [_bad_weight(weight)]
    reason = f"CASE {' '.join(reasons)} END" if reasons else "CAST(NULL AS VARCHAR)"
    label = quote(schema.label)
    skipped = unlabelled(schema.label) if source.unlabelled == "skip" else "false"
    matched = matched if LEFT_OUT in matched else [*matched, f"{skipped} AS {LEFT_OUT}"]
    connection.execute(
        f"CREATE VIEW samples AS SELECT {', '.join([*typed, *matched])}, {date} AS {DAY}, {label} AS __raw_label,"
        f" TRY_CAST({outcome} AS INTEGER) AS {label}, {reason} AS __reason, {FILE} AS __file,"
        f" {ROW if ROW in types else 0} AS __row FROM {view}"
    )
    if isinstance(day, str):
        _check_days(connection, view, day, types[day], count_rows(connection, "samples", f"{DAY} IS NULL"), date)
    return "samples"


def _refuse_other_day(connection: duckdb.DuckDBPyConnection, view: str, types: Mapping[str, str], date: str) -> None:
    """Refuses a column that the table's own column `day` would hide, unless it is the same day in every row.

    Args:
        types: Column -> type, of the columns that do not give the day.
        date: SQL of the day.
    """
    for name in (name for name in types if name.lower() == DAY):
        dated = types[name].startswith(("DATE", "TIMESTAMP", "VARCHAR"))
        differs = f"{_day(name, types[name], None)} IS DISTINCT FROM {date}" if dated else "true"
        query = f"SELECT CAST({quote(name)} AS VARCHAR), {date} FROM {view} WHERE {differs} LIMIT 1"
        for row in connection.sql(query).fetchall():
            raise ConfigError(
                f"column '{name}' of the source", f"another name than {DAY}, the table's column for the day of a row",
                f"'{row[0]}' in a row of {row[1]}",
                f'Rename it: source.rename={{"{name}": "own_day"}}, or set source.day_column={name} if it is the day.',
            )  # fmt: skip


def add_event_types(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    events: EventTable,
    place: Callable[[str], str],
    repeat_seconds: int,
    stored: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """Creates a view of events as stored, as `add_types`. They have no label. Those that lack a key are left out.

    Args:
        place: Key of the config -> where errors say that it is.
        repeat_seconds: How long before an event another one may lie that it repeats.
    """
    types = column_types(connection, view)
    names = [name for name in types if name not in (FILE, ROW) and not name.startswith("__")]
    keys = resolve(events.key, names, place("key"))
    (time,) = resolve([events.time], names, place("time"))
    if not types[time].startswith(("TIMESTAMP", "DATE")):
        raise ConfigError(
            f"{place('time')} '{time}'", "timestamps or dates", types[time],
            "Set date_format for text or day_unit for numbers, or write timestamps.",
        )  # fmt: skip
    chosen = dict.fromkeys([*keys, time, *resolve(events.columns, names, place("columns"))])
    for name in chosen:
        if name.lower() == DAY:  # the table's day is made of the time
            raise ConfigError(
                f"{place('columns')} '{name}'", f"columns with other names than {DAY}, the table's own column", name,
                f'Rename it: {place("rename")}={{"{name}": "date"}}.',
            )  # fmt: skip
    named = {*keys, time, *(name for name in events.columns if name in names)}
    kept = [
        name
        for name in chosen
        if types[name].removesuffix("[]") != NOTHING and (name in named or is_storable(types[name]))
    ]
    _check_names(sorted(name for name in kept if not NAME.fullmatch(name)))
    typed = _type_columns(connection, view, {name: types[name] for name in kept}, stored)
    date = _day(time, types[time], None)
    left_out = anonymous = " OR ".join(f"{quote(name)} IS NULL" for name in keys)
    if events.unique is not None:
        columns = resolve(events.unique, names, place("unique"))
        query = repeated_rows(view, columns, "*" in events.unique, time, repeat_seconds)
        connection.execute(f"CREATE TABLE repeated_rows AS {query}")
        left_out = f"{anonymous} OR ({FILE}, {ROW}) IN (SELECT (file, row) FROM repeated_rows)"
    made = f"{date} AS {DAY}, ({left_out}) AS {LEFT_OUT}, ({anonymous}) AS {ANONYMOUS}"
    connection.execute(
        f"CREATE VIEW samples AS SELECT {', '.join(typed)}, {made}, CAST(NULL AS VARCHAR) AS __reason,"
        f" {FILE} AS __file, {ROW if ROW in types else 0} AS __row FROM {view}"
    )
    _check_days(connection, view, time, types[time], count_rows(connection, "samples", f"{DAY} IS NULL"), date, place)
    return "samples"


def count_repeated(connection: duckdb.DuckDBPyConnection, view: str, condition: str) -> int:
    """Returns the rows of the view that repeat another one in all columns to store."""
    names = ", ".join(quote(name) for name in column_types(connection, view) if not name.startswith("__"))
    query = f"SELECT count(*) - count(DISTINCT hash({names})) FROM {view} WHERE {condition} AND NOT {ANONYMOUS}"
    return int(connection.sql(query).fetchall()[0][0])


def maps_of(types: Mapping[str, str]) -> list[str]:
    """Returns the columns that are maps.

    Args:
        types: Column -> DuckDB type.
    """
    return [name for name, kind in types.items() if kind.startswith("MAP(") and not kind.endswith("[]")]


def _check_names(refused: Sequence[str]) -> None:
    """Refuses names that a table cannot have, all at once."""
    if refused:
        example = json.dumps({name: plain_name(name) for name in refused[:3]})
        raise ConfigError(
            "columns of the source", "names of letters, digits and _", ", ".join(f"'{name}'" for name in refused),
            f"Give them other names: source.rename={example}.",
        )  # fmt: skip


def plain_name(name: str) -> str:
    """Returns a name with _ for whatever a table's column may not have.

    Example:
        >>> plain_name("hours-per-week"), plain_name("2nd floor")
        ('hours_per_week', '_2nd_floor')
    """
    plain = re.sub(r"\W", "_", name, flags=re.ASCII)[:120]
    return plain if NAME.fullmatch(plain) else f"_{plain}"


def _day(name: str, kind: str, unit: str | None) -> str:
    """Returns SQL for the day in a column, or null if it has none. Python's dates end with the year 9999."""
    column, given = quote(name), quote(name)
    if unit is not None and not kind.startswith(("DATE", "TIMESTAMP")):
        given = f"DATE '1970-01-01' + TRY_CAST(floor({_number(quote(name))} / {DAY_UNITS[unit]}) AS INTEGER)"
        return f"CASE WHEN abs({_number(quote(name))}) < {FARTHEST_DAY * DAY_UNITS[unit]} THEN {given} END"
    if kind == "VARCHAR":  # DuckDB would drop a zone, and read words such as 'epoch'
        given = f"CASE WHEN regexp_full_match({column}, '{ISO_DAY}') THEN left({column}, 10) END"
    date = f"TRY_CAST({given} AS DATE)"
    return f"CASE WHEN {date} BETWEEN DATE '0001-01-01' AND DATE '9999-12-31' THEN {date} END"


def guess_unit(largest: float) -> str:
    """Returns the unit that puts a time since 1970 into our days.

    Example:
        >>> guess_unit(1_700_000_000), guess_unit(1_700_000_000_000)
        ('seconds', 'milliseconds')
    """
    return next((unit for unit, days in DAY_UNITS.items() if largest < FARTHEST_DAY * days / 10), "microseconds")


def _check_days(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    day: str,
    kind: str,
    undated: int,
    date: str,
    place: Callable[[str], str] = "source.{}".format,
) -> None:
    """Refuses rows without a day, and names one."""
    if not undated:
        return
    query = f"SELECT CAST({quote(day)} AS VARCHAR), {FILE} FROM {view} WHERE {date} IS NULL ORDER BY 1 LIMIT 1"
    value, file = connection.sql(query).fetchall()[0]
    found = "null" if value is None else f"'{value}'"
    remedy = f"Write ISO dates, times in UTC, or set {place('date_format')}; or filter those rows out."
    if re.match(r"U?(TINY|SMALL|BIG|HUGE)?INT|DOUBLE|FLOAT|DECIMAL", kind):
        number = _number(quote(day))
        ends = connection.sql(f"SELECT min({number}), max(abs({number})) FROM {view}").fetchall()[0]
        unit = f"{place('day_unit')}={guess_unit(ends[1] or 0.0)}"
        remedy = f"If they are times since 1970, set {unit}; else write ISO dates."
        if WRITTEN_DAYS[0] <= (ends[0] or 0) and (ends[1] or 0) <= WRITTEN_DAYS[1]:
            remedy = f'Set {place("date_format")}="%Y%m%d".'
    raise DataError(
        f"{place('day_column')} '{day}'", "a date in every row",
        f"no date in {undated} rows, such as {found} in '{Path(file).name}'", remedy,
    )  # fmt: skip


def _number(value: str) -> str:
    """SQL of a value as a number, or null if it is none. Truth values are 0 and 1, also in text."""
    number, text = f"TRY_CAST({value} AS DOUBLE)", f"lower(CAST({value} AS VARCHAR))"
    return f"coalesce({number}, CASE {text} WHEN 'true' THEN 1.0::DOUBLE WHEN 'false' THEN 0.0::DOUBLE END)"


def _label(name: str, positive: bool | int | float | str | None) -> str:
    """SQL of the label as a number, or null if it is none.

    Args:
        positive: `source.positive`.
    """
    if positive is None:
        return _number(quote(name))
    text = f"CAST({quote(name)} AS VARCHAR)"
    if isinstance(positive, bool):
        chosen = f"lower({text}) = '{str(positive).lower()}'"
    else:
        shown = literal(positive)
        chosen = f"({text} = {shown} OR {_number(quote(name))} = TRY_CAST({shown} AS DOUBLE))"
    return f"CASE WHEN NOT {unlabelled(name)} THEN CASE WHEN {chosen} THEN 1 ELSE 0 END END"


def unlabelled(name: str) -> str:
    """SQL of whether a row has no label: null, or NaN."""
    return f"({quote(name)} IS NULL OR coalesce(isnan({_number(quote(name))}), false))"


def _bad_label(name: str, label: str, skipped: bool) -> str:
    """SQL of why a label is bad.

    Args:
        skipped: Rows without a label are not bad.
    """
    none = "NULL" if skipped else "'label is null'"
    return (
        f"WHEN {unlabelled(name)} THEN {none} WHEN {label} IS NULL THEN 'label is not a number'"
        f" WHEN {label} NOT IN (0, 1) THEN 'label is not 0 or 1'"
    )


def _bad_weight(name: str) -> str:
    weight = _number(quote(name))
    return (
        f"WHEN {quote(name)} IS NULL THEN 'weight is null' WHEN {weight} IS NULL THEN 'weight is not a number'"
        f" WHEN {weight} NOT BETWEEN {LEAST_WEIGHT} AND {MOST_WEIGHT} THEN 'weight is not {LEAST_WEIGHT:g} to"
        f" {MOST_WEIGHT:,.0f}'"
    )


def number_columns(
    schema: FeatureSchema | LabelColumns, names: list[str], made: Sequence[str], maps: Collection[str] = ()
) -> set[str]:
    """Returns the columns of the stored rows with counts or labels: their integers are not ids."""
    return {schema.label, *made, *read_columns(schema, names, made, maps).numbers}


class ReadColumns(NamedTuple):
    """Columns that features read, without keys of maps."""

    numbers: list[str]
    """Those that one reads as numbers."""
    ids: list[str]
    """Those that one reads as anything else."""


def read_columns(
    schema: FeatureSchema | LabelColumns, names: list[str], made: Sequence[str], maps: Collection[str] = ()
) -> ReadColumns:
    """Returns the columns that features read.

    Args:
        maps: Those of the columns that are maps.
    Raises:
        ConfigError: If a column of the schema does not exist, or is an outcome.
    """
    if isinstance(schema, LabelColumns):
        return ReadColumns([], [])
    derived = [op.output for op in schema.derived]
    known = [*names, *derived]
    found = ReadColumns([], [])
    for dense in schema.dense:
        columns = _resolved(schema, dense.columns, known, maps, "features.dense column")
        found[dense.read_kind("dense") != "dense"].extend(columns)
    for sparse in schema.sparse:
        columns = _resolved(schema, sparse.columns, known, maps, "features.sparse column")
        found[sparse.read_kind("sparse") != "dense"].extend(columns)
    for op in schema.derived:
        for name, kind in zip(op.inputs, input_kinds(op), strict=False):
            if name not in known:
                if _is_joined(schema, name) or is_key(name, maps):
                    continue
                raise unknown_column(f"{op.kind} of '{op.output}', input", name, known)
            found[kind != "dense"].append(name)
    refuse_outcomes([*found.numbers, *found.ids], made)
    return ReadColumns(*([name for name in dict.fromkeys(one) if name not in derived] for one in found))


def _resolved(
    schema: FeatureSchema, patterns: Sequence[str], known: Sequence[str], maps: Collection[str], where: str
) -> list[str]:
    """Returns columns of the source that the patterns name.

    Columns of feature sources are joined later, and keys of maps are looked up later, when rows are read.
    """
    stored = [name for name in patterns if fnmatch.filter(known, name) or not is_key(name, maps)]
    own = [name for name in stored if fnmatch.filter(known, name) or not _is_joined(schema, name)]
    return resolve(own, known, where)


def _is_joined(schema: FeatureSchema, pattern: str) -> bool:
    return any(source.may_add(pattern) for source in schema.sources)


def _check_text(connection: duckdb.DuckDBPyConnection, view: str, columns: list[str]) -> None:
    """Refuses text in dense columns unless it reads as numbers."""
    for name in columns:
        bad = f"{quote(name)} IS NOT NULL AND {_number(quote(name))} IS NULL"
        row = connection.sql(f"SELECT count(*), min({quote(name)}) FROM {view} WHERE {bad}").fetchall()[0]
        if row[0]:
            raise DataError(
                f"dense column '{name}'", "numbers", f"text such as '{row[1]}' in {row[0]} rows",
                "Clean the column, or declare it under features.sparse.",
            )  # fmt: skip


def is_storable(kind: str) -> bool:
    """Tells whether the warehouse has a type for a column."""
    try:
        _cast("", kind, False)
    except DataError:
        return False
    return True


def unstorable_columns(
    connection: duckdb.DuckDBPyConnection, view: str, schema: FeatureSchema | LabelColumns, made: Sequence[str]
) -> dict[str, str]:
    """Returns the columns that the warehouse has no type for and that no feature reads -> their types."""
    types = column_types(connection, view)
    names = [name for name in types if name not in (FILE, ROW) and not name.startswith("__")]
    odd = [name for name in names if not is_storable(types[name])]
    if not odd:
        return {}
    numbers, ids = read_columns(schema, names, made, maps_of(types))
    return {name: types[name] for name in odd if name not in (*numbers, *ids, schema.label, schema.weight)}


def unstorable_event_columns(connection: duckdb.DuckDBPyConnection, view: str, events: EventTable) -> dict[str, str]:
    """Returns the columns that patterns of an event table take and the warehouse has no type for -> their types."""
    types = {name: kind for name, kind in column_types(connection, view).items() if name not in (FILE, ROW)}
    taken = {name for pattern in events.columns for name in fnmatch.filter(types, pattern)} - {*events.columns}
    return {name: types[name] for name in types if name in taken and not is_storable(types[name])}


def _type_columns(
    connection: duckdb.DuckDBPyConnection,
    view: str,
    types: Mapping[str, str],
    stored: Mapping[str, str],
    dense: Collection[str] = (),
) -> list[str]:
    """Returns the SQL of columns in the types that they are stored in, and of MISFITS if they have others.

    Args:
        types: Column -> DuckDB's type.
        stored, dense: As in `add_types`.
    """
    own = _type_decimals(connection, view, {name: types[name] for name in types if name not in (*dense, *stored)})
    typed, misfits = list[str](), list[str]()
    for name, kind in types.items():
        fitted = _fit(name, kind, one, name in dense) if (one := stored.get(name) or own.get(name)) else None
        column, (value, test) = quote(name), fitted or (_cast(name, kind, name in dense), "true")
        if test != "true" and name in stored:
            fits, shown = f"coalesce({test}, false)", f"left(CAST({column} AS VARCHAR), {SHOWN_LETTERS})"
            found = f"{{'column': {literal(name)}, 'value': {shown}}}"
            misfits.append(f"CASE WHEN {column} IS NOT NULL AND NOT {fits} THEN {found} END")
            value = f"CASE WHEN {column} IS NOT NULL AND {fits} THEN {value} END"
        typed.append(f"{value} AS {column}")
    return [*typed, *([f"[{', '.join(misfits)}] AS {MISFITS}"] if misfits else [])]


class Misfit(NamedTuple):
    """Values of a day that would change in the table."""

    day: datetime.date
    column: str
    rows: int
    value: str
    """Such as this one."""
    file: str
    """One that has them, as it is read."""


def find_misfits(connection: duckdb.DuckDBPyConnection, view: str, condition: str) -> list[Misfit]:
    """Returns the values that would change in the table, of the rows that meet a condition.

    Args:
        view: Made by `add_types` or `add_event_types`.
    """
    if MISFITS not in connection.view(view).columns:
        return []
    query = (
        f"SELECT {DAY}, one.column, count(*), min(one.value), min(__file)"
        f" FROM (SELECT {DAY}, __file, unnest(list_filter({MISFITS}, lambda one: one IS NOT NULL)) AS one"
        f" FROM {view} WHERE {condition}) GROUP BY ALL ORDER BY ALL"
    )
    return [Misfit(*row) for row in connection.sql(query).fetchall()]


def _type_decimals(connection: duckdb.DuckDBPyConnection, view: str, types: Mapping[str, str]) -> dict[str, str]:
    """Returns the type of columns of decimals, or of lists of them, that no feature reads as numbers.

    Whole ones are ids, however long.

    Raises:
        DataError: If fractions are among whole ones that a float would round.
    """
    names = [name for name, kind in types.items() if is_decimal(kind.removesuffix("[]"))]
    tests = []
    for name in names:
        one = quote(name)
        fractional, whole = f"{one} <> floor({one})", f"CASE WHEN {one} = floor({one}) THEN abs({one}) END"
        if types[name].endswith("]"):
            fractional = f"len(list_filter({one}, lambda x: x <> floor(x))) > 0"
            whole = f"list_max(list_transform(list_filter({one}, lambda x: x = floor(x)), lambda x: abs(x)))"
        tests.append(f"bool_or({fractional}), max({whole})")
    results = connection.sql(f"SELECT {', '.join(tests)} FROM {view}").fetchall()[0] if names else ()
    found: dict[str, str] = {}
    for name, fractions, most in zip(names, results[::2], results[1::2], strict=True):
        if fractions and (most or 0) > 2**53:
            raise DataError(
                f"column '{name}'", "whole numbers, or none beyond 2^53 among fractions", f"{int(most)} and fractions",
                "Write ids as whole numbers or text in all rows.",
            )  # fmt: skip
        kind = "DOUBLE" if fractions else "VARCHAR" if (most or 0) >= 2**63 else "BIGINT"
        found[name] = f"{kind}[]" if types[name].endswith("]") else kind
    return found


def _fit(name: str, kind: str, stored: str, dense: bool) -> tuple[str, str] | None:
    """SQL of a column in the type that the table has, and of whether a value stays what it is.

    Args:
        stored: Type of the column in the table.
    Returns:
        None if the type is that of the table, or one that `_cast` makes it of.
    """
    column, item, wanted = quote(name), kind.removesuffix("[]"), stored.removesuffix("[]")
    if item == NOTHING or not is_storable(kind):
        return None
    if item != kind and wanted == stored:  # a value among lists is a list of one
        value, test = _fit_value(f"{column}[1]", item, wanted, dense) or (f"{column}[1]", "true")
        return value, f"len({column}) = 0 OR len({column}) = 1 AND coalesce({test}, {column}[1] IS NULL)"
    fitted = _fit_value(column if item == kind else "x", item, wanted, dense)
    if item == kind and wanted != stored:
        value, test = fitted or (column, "true")
        return f"CASE WHEN {column} IS NOT NULL THEN [{value}] END", "false" if wanted == "VARCHAR" else test
    if fitted is None or item == kind:
        return fitted
    value, test = fitted
    odd = f"list_filter({column}, lambda x: x IS NOT NULL AND NOT coalesce({test}, false))"
    return f"list_transform({column}, lambda x: {value})", "true" if test == "true" else f"len({odd}) = 0"


def _fit_value(value: str, kind: str, stored: str, dense: bool) -> tuple[str, str] | None:
    """Returns what `_fit` does, of a value that is no list."""
    if stored == "VARCHAR":  # the table refuses numbers for a dense feature whose column is text
        return None if dense or kind == stored else (as_text(value, kind), "true")
    cast, decimal = f"TRY_CAST({value} AS {stored})", is_decimal(kind)
    floats = ("FLOAT", "DOUBLE")
    if kind == "VARCHAR" and not (dense and stored in ("BIGINT", *floats)):
        names = {"DOUBLE": "double", "TIMESTAMP WITH TIME ZONE": "TIMESTAMPTZ"}
        return cast, fits_text(value, names.get(stored, stored))
    if kind == "VARCHAR":
        cast = f"TRY_CAST({_number(value)} AS {stored})"
        return cast, f"{cast} IS NOT NULL" if stored in floats else f"{_number(value)} = {cast}"
    whole = decimal or _is_whole(kind)
    if kind == "BOOLEAN" != stored and stored in ("BIGINT", *floats):
        return cast, "true"
    if stored in floats and whole:
        exact = f"abs({value if decimal else f'CAST({value} AS HUGEINT)'}) <= {2**53 if stored == 'DOUBLE' else 2**24}"
        return cast, "true" if dense else f"{value} <> floor({value}) OR {exact}" if decimal else exact
    if stored == "BIGINT" and (decimal or kind in floats):
        missing = "" if decimal else f" OR isnan({value})"  # so pandas writes whole numbers of which one is missing
        return cast, f"{value} = floor({value}) AND abs({value}) <= {2**63 - 1 if decimal else 2**53}{missing}"
    if stored == "BOOLEAN" and is_number(kind):
        return cast, f"{value} IN (0, 1)"
    if stored.startswith("TIMESTAMP") and kind == "DATE" and "ZONE" not in stored:
        return cast, "true"
    if stored == "DATE" and kind.startswith("TIMESTAMP") and "ZONE" not in kind:
        return cast, f"{value} = {cast}"
    return None if _stored_family(kind) == _stored_family(stored) else (f"CAST(NULL AS {stored})", "false")


def name_type(kind: str) -> str:
    """Returns what people call the values of a type.

    Example:
        >>> name_type("BIGINT[]"), name_type("DOUBLE")
        ('lists of whole numbers', 'numbers up to 2^53')
    """
    names = {
        "BIGINT": "whole numbers", "DOUBLE": "numbers up to 2^53", "FLOAT": "numbers up to 2^24", "VARCHAR": "text",
        "BOOLEAN": "truth values", "DATE": "dates", "TIMESTAMP": "times without a zone",
        "TIMESTAMP WITH TIME ZONE": "times with a zone",
    }  # fmt: skip
    return f"lists of {name_type(kind[:-2])}" if kind.endswith("[]") else names[kind]


def _is_whole(kind: str) -> bool:
    return _stored_family(kind) == "integer"


def _stored_family(kind: str) -> str:
    """Returns what the table can widen into each other."""
    if is_number(kind):
        return "float" if kind in ("FLOAT", "DOUBLE") else "integer"
    return f"TIMESTAMP {'ZONE' in kind}" if kind.startswith("TIMESTAMP") else kind


def _cast(name: str, kind: str, dense: bool) -> str:
    """SQL of the column as a type that Iceberg stores."""
    column = quote(name)
    item, lists = (kind[:-2], "[]") if kind.endswith("[]") else (kind, "")
    if dense and kind in ("VARCHAR", NOTHING):
        return _number(quote(name))
    if MAP.fullmatch(kind):
        return column
    if item.endswith("]"):
        raise _unstorable(name, kind)
    if item in _KEPT:
        return column
    if item in _INTS:
        return f"CAST({column} AS {_INTS[item]}{lists})"
    if item.startswith("DECIMAL") or item in ("UBIGINT", "HUGEINT"):
        return _cast_whole(name, item, lists, dense)
    if item.startswith("TIMESTAMP"):
        return f"CAST({column} AS {'TIMESTAMPTZ' if 'ZONE' in item else 'TIMESTAMP'}{lists})"
    if item.startswith("ENUM") or item in ("UUID", "TIME"):
        return f"CAST({column} AS VARCHAR{lists})"
    raise _unstorable(name, kind)


def _cast_whole(name: str, item: str, lists: str, rounded: bool) -> str:
    """SQL of decimals, and of whole numbers that 63 bits may not hold."""
    column = quote(name)
    if rounded or (item.startswith("DECIMAL") and not item.endswith(",0)")):
        return f"CAST({column} AS DOUBLE{lists})"
    if item not in ("UBIGINT", "HUGEINT"):
        return f"CAST({column} AS BIGINT{lists})"
    value = "x" if lists else column
    id_ = _wrapped(value) if item == "UBIGINT" else _checked_id(name, value)  # an id keeps all its 64 bits
    return f"list_transform({column}, lambda x: {id_})" if lists else id_


def _unstorable(name: str, kind: str) -> DataError:
    return DataError(
        f"column '{name}'",
        "numbers, text, dates, lists of them or maps of them by a whole number",
        f"type {kind}",
        "Split it into separate columns.",
    )


def _wrapped(value: str) -> str:
    shifted = f"CAST({value} AS HUGEINT) - 18446744073709551616"
    return f"CAST(CASE WHEN {value} > 9223372036854775807 THEN {shifted} ELSE {value} END AS BIGINT)"


def _checked_id(name: str, value: str) -> str:
    """SQL of a whole number as an id of 64 bits. It fails at a number that is none, and names it."""
    fits = f"{value} IS NULL OR {value} BETWEEN 0 AND 18446744073709551615"
    sentence = literal(f"column '{name}' holds ids beyond 63 bits, and ")
    refuse = f"error({sentence} || {value} || ', which is not between 0 and 2^64 - 1')"
    return f"CASE WHEN {fits} THEN {_wrapped(value)} ELSE {refuse} END"


def count_rows(connection: duckdb.DuckDBPyConnection, view: str, condition: str) -> int:
    """Returns the number of rows of the view that meet the condition."""
    return int(connection.sql(f"SELECT count(*) FROM {view} WHERE {condition}").fetchall()[0][0])

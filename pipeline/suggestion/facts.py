"""Facts that a suggestion is based on: column statistics over all days, and how columns, label and days relate."""

import datetime
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import duckdb
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.alone import NOTHING, Alone
from pipeline.data.measurement import measure
from pipeline.data.present import last_possible_day
from pipeline.data.profile import Rows
from pipeline.suggestion.leaks import look_at_columns
from storage.query import quote, stream
from storage.reader import DAY

ALL = datetime.date(1970, 1, 1)
"""The day given to all rows when they are measured together."""
AT_A_TIME = 200
"""How many columns are looked at in one pass."""
FEW_VALUES = 4
"""Text columns with up to this many values are counted by value."""
MOST_CODES = 1 << 16
"""Whole numbers with more values are not tested for roughness."""
FEWEST_CODES = 12
"""Nor are those with fewer."""
GROUPED_AT_A_TIME = 30
"""How many columns are grouped in one pass."""
SKETCH_ERROR = 0.03
"""By how much a ratio of two approximate counts may differ from 1 without meaning it."""
BLOCK = 256
"""Rows that are in the same half."""
FEWEST_SEEN = 5
"""Rows of a value in a sample that tell on how many days it occurs."""
Counts = npt.NDArray[np.float64]


@dataclass(frozen=True)
class ColumnFacts:
    """One column over all rows."""

    name: str
    type: str
    """DuckDB type."""
    kind: str
    rows: int
    present: int
    distinct: int = 0
    mean_length: float | None = None
    p99_length: int | None = None
    max_length: int | None = None
    mean: float | None = None
    deviation: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    alone: Alone = NOTHING
    """What it tells of the label by itself."""
    by_day: float | None = None
    """Correlation of the values with the day."""
    days_a_value: float | None = None
    """On how many days a value occurs, on average."""
    whole: bool = False
    """Whether all its floats are whole numbers."""
    readable: float = 0.0
    """Share of its text values that read as numbers."""
    word: str | None = None
    """A text value that does not."""
    hours: int = 0
    """Number of different hours in a column of times."""
    days: float = 0.0
    """Days between the first and the last value of a column of times or dates."""
    roughness: float | None = None
    """By how many deviations the label rate differs between neighbouring whole numbers. A count has about 0, a code
    more. None: not tested."""
    values: Mapping[str, tuple[int, int]] | None = None
    """Value -> (rows, rows with label 1), of text with few values."""

    @property
    def coverage(self) -> float:
        """Share of rows with a value."""
        return self.present / self.rows if self.rows else 0.0


@dataclass(frozen=True)
class DayFacts:
    """One day."""

    day: datetime.date
    rows: int
    positives: int


@dataclass(frozen=True)
class TableFacts:
    """Facts about all columns of a table or source."""

    facts: tuple[ColumnFacts, ...]
    days: tuple[DayFacts, ...]
    """In order."""
    scale: float = 1.0
    """Rows of all for each row that was looked at. Where it is over 1, all counts are estimates."""

    @property
    def rows(self) -> int:
        """Rows of all days."""
        return sum(day.rows for day in self.days)

    @property
    def positives(self) -> int:
        """Rows with label 1."""
        return sum(day.positives for day in self.days)


def observe(
    connection: duckdb.DuckDBPyConnection,
    rows: Rows,
    types: Mapping[str, str],
    rows_looked_at: int,
    label: str,
    scale: float = 1.0,
) -> TableFacts:
    """Measures all columns over all days at once.

    Args:
        types: Column -> its DuckDB type.
        rows_looked_at: Number of the rows.
        scale: Rows of all for each of these rows.
    """
    columns = {name: kind for name, kind in types.items() if name != DAY and not name.startswith("__")}
    schema, batches = stream(connection.sql(f"SELECT {', '.join(map(quote, columns))} FROM {rows(columns)}"))
    found = {row["column"]: row for row in measure(schema, batches, {label}, ALL).to_pylist()}
    looks = look_closer(connection, rows, {name: kind for name, kind in columns.items() if name != label})
    kinds = {name: "time" if is_time(kind) else found[name]["kind"] for name, kind in columns.items()}
    kinds = {name: kind for name, kind in kinds.items() if kind != "other"}
    alone = look_at_columns(connection, rows, kinds, label, rows_looked_at)
    facts = [
        _fact(found[name], kind, {"alone": alone.get(name, NOTHING), **looks.get(name, {})})
        for name, kind in columns.items()
    ]
    facts, found_days = _with_values(connection, rows, facts, label), _count_days(connection, rows, label)
    if scale > 1.0:
        growth = measure_growth(connection, rows, {fact.name: fact.type for fact in facts})
        facts = [_scaled(fact, scale, growth[fact.name]) for fact in facts]
        found_days = [DayFacts(one.day, round(one.rows * scale), round(one.positives * scale)) for one in found_days]
    return TableFacts(tuple(facts), tuple(found_days), scale)


def measure_growth(connection: duckdb.DuckDBPyConnection, rows: Rows, types: Mapping[str, str]) -> dict[str, float]:
    """Returns column -> the exponent with which its distinct values grow with the rows, by half of them and all.

    The half is every other block: neighbours may share a value, such as a session, that no others have.

    Args:
        types: Column -> its DuckDB type. Of lists, items are counted.
    Source:
        Heaps' law: n rows have K * n ** exponent distinct values; ids whose frequencies fall by a power law follow it.
    """
    plain = [name for name, kind in types.items() if not kind.endswith("]")]
    parts = [plain[start : start + AT_A_TIME] for start in range(0, len(plain), AT_A_TIME)]
    found: dict[str, float] = {}
    for part in [*parts, *([name] for name in types if name not in plain)]:
        listed = ", ".join(f"unnest({quote(name)})" if types[name].endswith("]") else quote(name) for name in part)
        columns = ", ".join(f"__c{place}" for place in range(len(part)))
        numbered = f"(SELECT {', '.join(map(quote, part))}, row_number() OVER () AS __nth FROM {rows(part)})"
        counts = ", ".join(
            f"approx_count_distinct(__c{place}) FILTER (__nth // {BLOCK} % 2 = 0), approx_count_distinct(__c{place})"
            for place in range(len(part))
        )
        query = f"SELECT {counts} FROM (SELECT {listed}, __nth FROM {numbered}) AS t({columns}, __nth)"
        (row,) = connection.sql(query).fetchall()
        for name, half, whole in zip(part, row[::2], row[1::2], strict=True):
            found[name] = min(1.0, math.log2(max(1.0, whole / max(1, half) - SKETCH_ERROR)))
    return found


def _scaled(fact: ColumnFacts, scale: float, growth: float) -> ColumnFacts:
    """Estimates the facts of all rows from those of a sample.

    On how many days a value occurs is unknown if most values were seen once or twice.
    """
    present = round(fact.present * scale)
    return replace(
        fact,
        rows=round(fact.rows * scale),
        present=present,
        distinct=min(present, round(fact.distinct * scale**growth)),
        days_a_value=fact.days_a_value if fact.present >= FEWEST_SEEN * fact.distinct else None,
    )


def is_time(kind: str) -> bool:
    """Whether a DuckDB type is that of a time."""
    return kind.startswith("TIMESTAMP") and not kind.endswith("]")


def _count_days(connection: duckdb.DuckDBPyConnection, rows: Rows, label: str) -> list[DayFacts]:
    query = f"SELECT {DAY}, count(*), coalesce(sum({quote(label)}), 0) FROM {rows([label])} GROUP BY {DAY} ORDER BY 1"
    days = [DayFacts(day, count, int(positives)) for day, count, positives in connection.sql(query).fetchall()]
    limit = last_possible_day()
    return [one for one in days if one.day <= limit] or days  # an ingest holds the others


def _fact(row: Mapping[str, Any], kind: str, look: Mapping[str, Any]) -> ColumnFacts:
    shared = {key: row[key] for key in ColumnFacts.__dataclass_fields__ if row.get(key) is not None}
    return ColumnFacts(**shared, name=row["column"], type=kind, **look)


def look_closer(
    connection: duckdb.DuckDBPyConnection, rows: Rows, types: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Returns column -> facts that relate it to the day, and say what its values look like."""
    names = [name for name, kind in types.items() if name != DAY and not kind.endswith("]")]
    found: dict[str, dict[str, Any]] = {}
    for start in range(0, len(names), AT_A_TIME):
        part = names[start : start + AT_A_TIME]
        looks = [_look(name, types[name]) for name in part]
        structs = ["{" + ", ".join(f"'{key}': {value}" for key, value in look.items()) + "}" for look in looks]
        (row,) = connection.sql(f"SELECT {', '.join(structs)} FROM {rows(part)}").fetchall()
        for name, one in zip(part, row, strict=True):
            known = {key: value for key, value in one.items() if value is not None and value == value}  # noqa: PLR0124
            found[name] = {key: value for key, value in known.items() if key != "present"}
            if "readable" in found[name]:
                found[name]["readable"] = one["readable"] / max(1, one["present"])
    return found


def _look(name: str, kind: str) -> dict[str, str]:
    """Returns fact -> its aggregate in SQL."""
    column, look = quote(name), {}
    pairs = f"approx_count_distinct(row({column}, {DAY})) FILTER ({column} IS NOT NULL)"
    look["days_a_value"] = f"{pairs} / greatest(1, approx_count_distinct({column}))"
    if kind.startswith(("TIMESTAMP", "DATE")):
        look["by_day"] = f"corr(epoch({column}), epoch({DAY}))"
        look["days"] = f"(epoch(max({column})) - epoch(min({column}))) / 86400.0"
        return look | ({} if kind == "DATE" else {"hours": f"count(DISTINCT hour({column}))"})
    value = f"TRY_CAST({column} AS DOUBLE)"
    finite = f"CASE WHEN abs({value}) < 1e100 THEN {value} END"
    look["by_day"] = f"corr({finite}, epoch({DAY}))"
    if kind in ("FLOAT", "DOUBLE"):
        look["whole"] = f"coalesce(bool_and(abs({value}) < 9e15 AND {value} = floor({value})) FILTER ({value} = {value}"
        look["whole"] += f" AND NOT isnan({value})), false)"
    if kind == "VARCHAR":
        look |= {"present": f"count({column})", "readable": f"count({value})"}
        look["word"] = f"min({column}) FILTER ({value} IS NULL)"
    return look


def count_values(
    connection: duckdb.DuckDBPyConnection, rows: Rows, names: Sequence[str], label: str
) -> Iterator[tuple[str, list[Any], Counts, Counts]]:
    """Yields the name of each column, its values in order, their rows, and their rows with label 1."""
    for start in range(0, len(names), GROUPED_AT_A_TIME):
        part = names[start : start + GROUPED_AT_A_TIME]
        listed = ", ".join(map(quote, part))
        sets = ", ".join(f"({quote(name)})" for name in part)
        query = f"SELECT {listed}, count(*), coalesce(sum({quote(label)}), 0), grouping({listed})"
        found = connection.sql(f"{query} FROM {rows([label, *part])} GROUP BY GROUPING SETS ({sets})").to_arrow_table()
        *columns, number, positives, group = found.columns
        for at, (name, column) in enumerate(zip(part, columns, strict=True)):
            own = pc.equal(group, (1 << len(part)) - 1 - (1 << (len(part) - 1 - at)))
            table = pa.table({"value": column, "rows": number, "positives": positives.cast(pa.float64())})
            table = table.filter(pc.and_(own, pc.is_valid(column))).sort_by("value")
            yield (
                name,
                table["value"].to_pylist(),
                *(table[key].to_numpy().astype(float) for key in ("rows", "positives")),
            )


def _with_values(
    connection: duckdb.DuckDBPyConnection, rows: Rows, facts: Sequence[ColumnFacts], label: str
) -> list[ColumnFacts]:
    """Adds what needs the rows of each value: the counts of few values, and roughness."""
    kinds = {fact.name: fact for fact in facts if fact.name != label and (fact.kind in ("id", "text") or fact.whole)}
    names = [
        name
        for name, fact in kinds.items()
        if 2 <= fact.distinct <= (2 * FEW_VALUES if fact.kind == "text" else MOST_CODES)
    ]
    added: dict[str, dict[str, Any]] = {}
    for name, values, number, positives in count_values(connection, rows, names, label):
        fact, more = kinds[name], added.setdefault(name, {})
        if fact.kind == "text" and len(values) <= FEW_VALUES:
            more["values"] = {
                value: (int(count), int(hits)) for value, count, hits in zip(values, number, positives, strict=True)
            }
        if fact.kind != "text" and len(values) >= FEWEST_CODES:
            more["roughness"] = measure_roughness(number, positives)
    return [replace(fact, **added.get(fact.name, {})) for fact in facts]


def measure_roughness(rows: Counts, positives: Counts) -> float:
    """Returns how much the label rates of neighbouring values differ, in standard deviations of what chance gives.

    Neighbours are the values of one of up to 64 bins. The statistic is Pearson's chi-squared.

    Shapes:
        rows, positives: float64 [V], of the values in their order.
    """
    bins = np.arange(len(rows)) * min(64, len(rows) // 3) // len(rows)
    total, hits = np.bincount(bins, rows), np.bincount(bins, positives)
    rate = (hits / total)[bins]
    mixed = (rate > 0.0) & (rate < 1.0)
    freedom = int(mixed.sum()) - len(np.unique(bins[mixed]))
    if freedom < 1:
        return 0.0
    surprise = (positives - rows * rate)[mixed] ** 2 / (rows * rate * (1.0 - rate))[mixed]
    # With few rows a value the statistic scatters more than 2 a degree of freedom.
    scatter = 2.0 + float(np.mean((1.0 - 6.0 * rate * (1.0 - rate))[mixed] / (rows * rate * (1.0 - rate))[mixed]))
    return float((surprise.sum() - freedom) / math.sqrt(max(scatter, 1.0) * freedom))


def find_row_key(
    connection: duckdb.DuckDBPyConnection, rows: Rows, observed: TableFacts, apart: Sequence[str]
) -> tuple[tuple[str, ...], float]:
    """Returns the columns that tell rows apart, and the largest share of rows that are equal in them.

    A column that names rows is taken alone. Otherwise columns are added, those with most values first, until nearly all
    rows differ or another column changes nothing.

    Args:
        apart: Columns that are left out, such as the label.
    """
    usable = [one for one in observed.facts if one.name not in apart and one.present and _is_hashable(one)]
    usable.sort(key=lambda one: (-one.distinct, one.kind == "number"))
    named = [one for one in usable if one.distinct >= 0.9 * observed.rows and one.coverage > 0.99]
    names = [one.name for one in (named[:1] or usable[:MOST_KEYS])]
    if not names:
        return (), 1.0
    prefixes = [names[: i + 1] for i in range(len(names))]
    counts = ", ".join(f"approx_count_distinct(row({', '.join(map(quote, prefix))}))" for prefix in prefixes)
    distinct = [int(count) for count in connection.sql(f"SELECT {counts} FROM {rows(names)}").fetchall()[0]]
    seen = max(1.0, observed.rows / observed.scale)
    enough = min(0.9 * seen, 0.98 * max(distinct))
    key = next(prefix for prefix, count in zip(prefixes, distinct, strict=True) if count >= enough)
    listed = ", ".join(map(quote, key))
    query = f"SELECT max(n) FROM (SELECT count(*) AS n FROM {rows(key)} GROUP BY {listed})"
    return tuple(key), connection.sql(query).fetchall()[0][0] / seen


MOST_KEYS = 8
"""Most columns of a key that tells rows apart."""


def _is_hashable(fact: ColumnFacts) -> bool:
    return fact.kind in ("id", "text", "number") or fact.type.startswith("TIMESTAMP")

"""The days of a source: their rows counted, and an identity that changes with what they are made of."""

import datetime
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pipeline.data.files import stamp
from pipeline.errors import EmptyDatasetError
from pipeline.extraction.config import SourceConfig
from pipeline.extraction.join import KEY, LEFT_OUT
from pipeline.extraction.opening import Opened, fingerprint
from pipeline.transforms.schema import FeatureSchema
from storage.reader import DAY


@dataclass(frozen=True)
class Day:
    """What a first look at the source says of one day."""

    day: datetime.date
    rows: int
    refused: int
    identity: str
    left_out: int = 0
    """Negatives that are thinned out."""

    @property
    def kept(self) -> int:
        """Rows that are written."""
        return self.rows - self.refused - self.left_out


def survey(rows: Opened, source: SourceConfig, schema: FeatureSchema, order_by: Sequence[str]) -> list[Day]:
    """Counts by day, and for each day an identity made of the files that hold its rows and, where logs are joined, of
    those that may hold outcomes of them."""
    later = [part for part in (order_by, schema.weight) if part]  # days of older versions keep their identity
    shared = fingerprint([source.said(), schema.label, _stamps(rows.lookups), *later])
    stamps = {str(path.resolve()): _stamps([path]) for path in [*rows.files, *rows.outcomes]}
    outcomes = None if rows.join is None else rows.join.files_by_day(rows.view)
    which = f"sum(md5_number_lower(concat_ws(':', {KEY}, parse_filename(__file), __row))) FILTER (__reason IS NOT NULL)"
    found = rows.connection.sql(
        f"SELECT {DAY}, count(*), count(__reason), list(DISTINCT __file ORDER BY __file),"
        f" {'NULL' if outcomes is None else which} FROM {rows.view} GROUP BY {DAY} ORDER BY {DAY}"
    ).fetchall()
    days = []
    for day, count, bad, files, aside in found:
        content = [shared, [stamps[file] for file in files]]
        if outcomes is not None:  # a repeated impression may have its first row in the file of another day
            content += [[stamps[file] for file in outcomes.get(day, [])], str(aside or 0)]
        days.append(Day(day, count, bad, fingerprint(content)[:16]))
    return days


def named(days: Sequence[Day], only: Iterable[datetime.date]) -> list[Day]:
    """The days that are asked for; none named: all of them.

    Raises:
        EmptyDatasetError: If there is no day at all, or none of a name.
    """
    if not days:
        raise EmptyDatasetError("source", "at least one row", "none", "Check source.path.")
    asked = set(only)
    absent = sorted(asked - {day.day for day in days})
    if absent:
        raise EmptyDatasetError(
            f"day {absent[0]}",
            f"a day of the source, {days[0].day} to {days[-1].day}",
            "no row of it",
            "Name another day.",
        )
    return [day for day in days if not asked or day.day in asked]


def thinned(rows: Opened, days: Sequence[Day]) -> list[Day]:
    """The days, with the negatives that are left out of them."""
    where = f"{LEFT_OUT} AND __reason IS NULL AND {within(days)}"
    query = f"SELECT {DAY}, count(*) FROM {rows.view} WHERE {where} GROUP BY {DAY}"
    left_out = dict(rows.connection.sql(query).fetchall())
    return [replace(day, left_out=left_out.get(day.day, 0)) for day in days]


def refused(rows: Opened, days: Sequence[Day]) -> dict[str, int]:
    """Reason -> rows of the days that are refused for it."""
    bad = [day for day in days if day.refused]
    if not bad:
        return {}
    where = f"__reason IS NOT NULL AND {within(bad)}"
    query = f"SELECT __reason, count(*) FROM {rows.view} WHERE {where} GROUP BY 1 ORDER BY 1"
    return dict(rows.connection.sql(query).fetchall())


def within(days: Sequence[Day]) -> str:
    """Condition on a row, as SQL: it is of one of the days."""
    if not days:
        return "false"
    dates = ", ".join(f"DATE '{day.day}'" for day in days)
    return f"{DAY} IN ({dates})"


def groups(days: Iterable[Day], rows: int) -> Iterator[list[Day]]:
    """Days in their order, together as long as they have no more rows than that."""
    group: list[Day] = []
    for day in days:
        if group and sum(other.rows for other in group) + day.rows > rows:
            yield group
            group = []
        group.append(day)
    if group:
        yield group


def _stamps(files: Iterable[Path]) -> str:
    """Name, size and time of change of files: what tells that a file is the one already read."""
    return json.dumps([stamp(path) for path in files])

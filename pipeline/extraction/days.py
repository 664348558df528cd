"""The days of a source: row counts, and an identity that changes with the input of the day."""

import datetime
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel

from pipeline.data.day_notes import DayNote, InputFiles
from pipeline.data.formats.files import Stamp, address_of, stamp
from pipeline.data.formats.reading import count_rows_of
from pipeline.data.present import today
from pipeline.errors import DataError, EmptyDatasetError
from pipeline.extraction.config import EventTable, SourceConfig
from pipeline.extraction.join import KEY, LEFT_OUT
from pipeline.extraction.opening import OpenSource, SourceContext, fingerprint
from storage.reader import DAY


@dataclass(frozen=True)
class SourceDay:
    """Row counts and identity of one day of a source."""

    day: datetime.date
    rows: int
    refused: int
    identity: str
    note: DayNote
    files: Mapping[str, int] = field(default_factory=dict)
    """File that the rows are read from -> how many."""
    refused_of: Mapping[str, int] = field(default_factory=dict)
    """File -> rows of it that are refused."""
    left_of: Mapping[str, int] = field(default_factory=dict)
    """File -> rows of it that are left out: negatives removed by downsampling, and what else is not stored."""

    @property
    def left_out(self) -> int:
        """Rows that are left out."""
        return sum(self.left_of.values())

    @property
    def kept(self) -> int:
        """Rows to write."""
        return self.rows - self.refused - self.left_out


class FileAccount(BaseModel, frozen=True):
    """What became of the rows of a file: `rows` is the sum of the others."""

    rows: int
    """As counted in the file itself: its records, or its footer's number."""
    written: int = 0
    quarantined: int = 0
    left_out: int = 0
    held: int = 0
    """Rows of days that broke a rule."""
    other_days: int = 0
    """Rows of days that were not due: written earlier, or not asked for."""


class Accounts(BaseModel, frozen=True):
    """What became of the rows of all files of an ingest."""

    count: int
    total: FileAccount
    incomplete: Mapping[str, FileAccount]
    """File -> its rows, of files whose rows were not all good: those with the most such rows, MOST_FILES at most."""
    unlisted: int
    """Further files of that kind."""


MOST_FILES = 20
"""Files that a result lists one by one."""


def account(
    lines: Mapping[str, int], written: Sequence[SourceDay], held: Sequence[SourceDay], names: Mapping[str, str]
) -> Accounts:
    """Says for each file what became of its rows.

    Args:
        lines: File that rows are read from -> how many it has.
        names: The same -> the file of the source.
    """
    found = {file: Counter(rows=count, other_days=count) for file, count in lines.items()}
    for kind, days in (("written", written), ("held", held)):
        for day in days:
            for file, count in day.files.items():
                refused, left = day.refused_of.get(file, 0), day.left_of.get(file, 0)
                found[file].update({"quarantined": refused, "left_out": left, kind: count - refused - left})
                found[file]["other_days"] -= count
    lost = {file: one["quarantined"] + one["left_out"] for file, one in found.items()}
    worst = sorted((file for file in found if lost[file]), key=lambda file: (-lost[file], names[file]))
    return Accounts(
        count=len(found),
        total=FileAccount(**sum(found.values(), Counter({"rows": 0}))),
        incomplete={names[file]: FileAccount(**found[file]) for file in worst[:MOST_FILES]},
        unlisted=max(0, len(worst) - MOST_FILES),
    )


def survey(rows: OpenSource, context: SourceContext, order_by: Sequence[str]) -> tuple[list[SourceDay], dict[str, int]]:
    """Counts the rows of each day and file, and gives each day an identity.

    The identity covers the config of the source and the files that hold rows of the day. If logs are joined, it also
    covers the files that may hold outcomes of these rows, and whether the day is open. It covers a side table only if
    `refresh` says so.

    Returns:
        The days, and each file that rows are read from with their number as the file itself has it.
    """
    schema = context.schema
    events, source = context.events, context.source.ingested()
    lookups = {one: context.find(one.path, "source.lookups path") for one in context.source.lookups}
    refreshed = [path for one, files in lookups.items() if one.refresh == "past_days" for path in files]
    if events is None:
        declared = [source, schema.label, schema.weight]
        definition = fingerprint([_definition(context.source), *declared[1:]])[:16]
    else:  # whatever the path is called, the stamps name the files
        declared = [events.model_dump(mode="json", exclude=_not_declared(events))]
        definition = fingerprint(["events", *declared])[:16]
    shared = fingerprint([*declared, _as_json(map(stamp, refreshed)), list(order_by)])
    stamps = {address_of(rows.read[path].read): stamp(path) for path in [*rows.files, *rows.outcomes]}
    texts = {address: _as_json([one]) for address, one in stamps.items()}
    windows = None if rows.join is None else rows.join.windows_by_day(rows.view)
    which = f"sum(md5_number_lower(concat_ws(':', {KEY}, parse_filename(__file), __row))) FILTER (__reason IS NOT NULL)"
    counted = (
        f"SELECT {DAY}, __file, count(*) AS rows, count(__reason) AS bad,"
        f" {'NULL' if windows is None else which} AS aside FROM {rows.view} GROUP BY {DAY}, __file"
    )
    found = rows.connection.sql(
        f"SELECT {DAY}, sum(rows)::BIGINT, sum(bad)::BIGINT,"
        f" map(list(__file ORDER BY __file), list(rows ORDER BY __file)), sum(aside),"
        f" map(list(__file ORDER BY __file), list(bad ORDER BY __file))"
        f" FROM ({counted}) GROUP BY {DAY} ORDER BY {DAY}"
    ).fetchall()
    lines = _check_counts(rows, [files for _, _, _, files, *_ in found], context.warehouse.config.catalog)
    sides = {one.path: fingerprint(_as_json(map(stamp, files)))[:16] for one, files in lookups.items()}
    days = []
    for day, count, bad, files, aside, bad_of in found:
        content: list[object] = [shared, [texts[file] for file in files]]
        outcomes, is_open = (windows or {}).get(day, ([], False))
        is_open = is_open and context.source.generator is None  # the generator writes all outcomes at once
        if windows is not None:  # a repeated impression's first row may lie in another day's file
            content += [[texts[file] for file in outcomes], str(aside or 0)]
        content += ["open"] if is_open else []  # when the day closes, it is written again
        note = DayNote(
            open=is_open,
            rows=InputFiles.of([stamps[file] for file in files]),
            outcomes=InputFiles.of([stamps[file] for file in outcomes]),
            lookups=sides,
            definition=definition,
        )
        days.append(SourceDay(day, count, bad, fingerprint(content)[:16], note, files, bad_of))
    return days, lines


def _not_declared(events: EventTable) -> set[str]:
    """Returns the keys of an event table that do not say what its rows are."""
    unset = {key for key in ("unique", "day_unit") if getattr(events, key) is None}
    return {"path", "format", "keep_days"} | unset


def _check_counts(
    rows: OpenSource, found: Sequence[Mapping[str, int]], properties: Mapping[str, str]
) -> dict[str, int]:
    """Compares the rows of each file with its lines, or with its footer: none may be lost or doubled on the way.

    Returns:
        File that the rows are read from -> their number.
    Raises:
        DataError: With the first file of which other rows were read than it has.
    """
    counted: Counter[str] = Counter()
    for files in found:
        counted.update(files)
    lines = {}
    for file in rows.files:
        read = rows.read[file]
        lines[address_of(read.read)] = expected = count_rows_of(read, properties)
        if counted[address_of(read.read)] != expected:
            raise DataError(
                f"file '{file.name}'", f"{expected} rows, as the file has", f"{counted[address_of(read.read)]}",
                "Run it again once the file is complete: it may have changed meanwhile.",
            )  # fmt: skip
    return lines


def _definition(source: SourceConfig) -> dict[str, Any]:
    """Returns the values of a source's config that say what its rows and labels are, wherever they come from."""
    places: Any = {"outcomes": {"path"}, "lookups": {"__all__": {"path", "refresh"}}}
    places |= dict.fromkeys(("path", "format", "generator"), True)
    return source.model_dump(mode="json", exclude_defaults=True, exclude=places)


def first_kept(days: Collection[datetime.date], events: EventTable | None) -> datetime.date:
    """Returns the first day that `keep_days` keeps. Days that have not begun do not count."""
    limit = today()
    begun = sorted(day for day in days if day <= limit)
    if events is None or events.keep_days is None or len(begun) <= events.keep_days:
        return datetime.date.min
    return begun[-events.keep_days]


def select_days(days: Sequence[SourceDay], only: Iterable[datetime.date], key: str = "source.path") -> list[SourceDay]:
    """Returns the days in `only`, or all days if it is empty.

    Args:
        key: Config key that names the source.
    Raises:
        EmptyDatasetError: If the source has no day at all, or lacks one of `only`.
    """
    asked = asked_days([day.day for day in days], only, "the source", key)
    return [day for day in days if day.day in asked]


def asked_days(
    known: Collection[datetime.date], only: Iterable[datetime.date], of: str, key: str
) -> set[datetime.date]:
    """Returns the days in `only`, or all days if it is empty.

    Args:
        of: What has the days, for errors.
        key: Config key that names it.
    Raises:
        EmptyDatasetError: If there is no day at all, or one of `only` is absent.
    """
    if not known:
        raise EmptyDatasetError(of.removeprefix("the "), "at least one row", "none", f"Check {key}.")
    asked = set(only)
    absent = sorted(asked - set(known))
    if absent:
        raise EmptyDatasetError(
            f"day {absent[0]}", f"a day of {of}, {min(known)} to {max(known)}", "no row of it", "Name another day."
        )
    return asked or set(known)


def count_left_out(rows: OpenSource, days: Sequence[SourceDay]) -> list[SourceDay]:
    """Returns the days with the number of rows that are left out of them, by file."""
    where = f"{LEFT_OUT} AND __reason IS NULL AND {days_condition(days)}"
    query = f"SELECT {DAY}, __file, count(*) FROM {rows.view} WHERE {where} GROUP BY {DAY}, __file"
    left: defaultdict[datetime.date, dict[str, int]] = defaultdict(dict)
    for day, file, count in rows.connection.sql(query).fetchall():
        left[day][file] = count
    return [replace(day, left_of=left[day.day]) for day in days]


def count_refused(rows: OpenSource, days: Sequence[SourceDay]) -> dict[str, int]:
    """Returns reason -> rows of the days that are refused for it."""
    bad = [day for day in days if day.refused]
    if not bad:
        return {}
    where = f"__reason IS NOT NULL AND {days_condition(bad)}"
    query = f"SELECT __reason, count(*) FROM {rows.view} WHERE {where} GROUP BY 1 ORDER BY 1"
    return dict(rows.connection.sql(query).fetchall())


def days_condition(days: Sequence[SourceDay]) -> str:
    """Returns the SQL condition that a row belongs to one of the days.

    DuckDB joins the rows with the values of a longer IN, and a join by several threads loses the order of rows.
    """
    spans: list[list[datetime.date]] = []
    for day in sorted(one.day for one in days):
        if spans and day == spans[-1][1] + datetime.timedelta(1):
            spans[-1][1] = day
        else:
            spans.append([day, day])
    tests = [f"{DAY} BETWEEN DATE '{first}' AND DATE '{last}'" for first, last in spans]
    return f"({' OR '.join(tests) or 'false'})"


def group_days(days: Iterable[SourceDay], rows: int) -> Iterator[list[SourceDay]]:
    """Groups days in their order, with at most `rows` rows a group. A larger day is a group of its own."""
    group: list[SourceDay] = []
    for day in days:
        if group and sum(other.rows for other in group) + day.rows > rows:
            yield group
            group = []
        group.append(day)
    if group:
        yield group


def _as_json(stamps: Iterable[Stamp]) -> str:
    """The same stamps mean the same files."""
    return json.dumps(list(stamps))

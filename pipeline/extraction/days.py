"""The days of a source: row counts, and an identity that changes with the input of the day."""

import datetime
import json
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from pydantic import BaseModel

from pipeline.data.day_notes import DayNote, InputFiles
from pipeline.data.formats.files import Stamp, address_of, stamp
from pipeline.data.formats.reading import as_pattern
from pipeline.data.present import today
from pipeline.errors import EmptyDatasetError
from pipeline.extraction.config import EventTable
from pipeline.extraction.inventory import (
    FileDay,
    Inventory,
    OutcomeFile,
    RowFile,
    Window,
    choose,
    definition_of,
    nearness,
    reached,
    spans_of,
    stamp_of,
    undeclared_keys,
    windows_by_day,
)
from pipeline.extraction.join import LEFT_OUT
from pipeline.extraction.opening import OpenSource, SourceContext, SourceFiles, fingerprint
from storage.query import literal
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
    """File -> its rows of the day."""
    refused_of: Mapping[str, int] = field(default_factory=dict)
    """File -> rows of it that are refused."""
    left_of: Mapping[str, int] = field(default_factory=dict)
    """File -> rows of it that are left out: negatives removed by downsampling, and what else is not stored."""
    outcomes: Sequence[str] = ()
    """Files that may hold outcomes of its impressions."""

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
    opened: int
    """Files that were opened. The others are as an earlier ingest found them, and have no row of a day to write."""
    total: FileAccount
    incomplete: Mapping[str, FileAccount]
    """File -> its rows, of files whose rows were not all good: those with the most such rows, MOST_FILES at most."""
    unlisted: int
    """Further files of that kind."""


MOST_FILES = 20
"""Files that a result lists one by one."""


def account(inventory: Inventory, opened: int, written: Sequence[SourceDay], held: Sequence[SourceDay]) -> Accounts:
    """Says for each file what became of its rows.

    Args:
        opened: Number of files that were opened.
    """
    found = {file: Counter(rows=one.rows, other_days=one.rows) for file, one in inventory.rows.items()}
    for kind, days in (("written", written), ("held", held)):
        for day in days:
            for file, count in day.files.items():
                refused, left = day.refused_of.get(file, 0), day.left_of.get(file, 0)
                found[file].update({"quarantined": refused, "left_out": left, kind: count - refused - left})
                found[file]["other_days"] -= count
    lost = {file: one["quarantined"] + one["left_out"] for file, one in found.items()}
    worst = sorted((file for file in found if lost[file]), key=lambda file: (-lost[file], file))
    return Accounts(
        count=len(found),
        opened=opened,
        total=FileAccount(**sum(found.values(), Counter({"rows": 0}))),
        incomplete={file: FileAccount(**found[file]) for file in worst[:MOST_FILES]},
        unlisted=max(0, len(worst) - MOST_FILES),
    )


def list_days(
    inventory: Inventory, context: SourceContext, files: SourceFiles, order_by: Sequence[str]
) -> list[SourceDay]:
    """Returns the days of a source, each with an identity.

    The identity covers the config of the source and the files that hold rows of the day. If logs are joined, it also
    covers the files that may hold outcomes of these rows, and whether the day is open. It covers a side table only if
    `refresh` says so.
    """
    events, schema = context.events, context.schema
    refreshed = [path for one, paths in files.lookups.items() if one.refresh == "past_days" for path in paths]
    if events is None:
        declared = [context.source.ingested(), schema.label, schema.weight]
    else:
        declared = [events.model_dump(mode="json", exclude=undeclared_keys(events))]
    near = nearness(context)
    repeats = [] if near is None else [near.repeats]
    shared = fingerprint([*declared, _as_json(map(stamp, refreshed)), list(order_by), *repeats])
    known: dict[str, RowFile | OutcomeFile] = {**inventory.rows, **inventory.outcomes}
    stamps = {address: stamp_of(address, file) for address, file in known.items()}
    texts = {address: _as_json([one]) for address, one in stamps.items()}
    outcomes = context.source.outcomes
    windows = None if outcomes is None else windows_by_day(inventory, outcomes.longest_seconds)
    sides = {one.path: fingerprint(_as_json(map(stamp, paths)))[:16] for one, paths in files.lookups.items()}
    found: defaultdict[datetime.date, dict[str, FileDay]] = defaultdict(dict)
    for address, one in sorted(inventory.rows.items()):
        for day, counts in one.days.items():
            found[day][address] = counts
    days, definition = [], definition_of(context)
    for day, of in sorted(found.items()):
        content: list[object] = [shared, [texts[file] for file in of]]
        window = Window([], False) if windows is None else windows.get(day, Window([], False))
        is_open = window.is_open and context.source.generator is None  # the generator writes all outcomes at once
        aside = sum(one.aside for one in of.values())  # the first row of a repeated one may lie in another day's file
        if windows is not None:
            content += [[texts[file] for file in window.files], str(aside)]
        elif aside:
            content.append(str(aside))
        content += ["open"] if is_open else []  # when the day closes, it is written again
        note = DayNote(
            open=is_open,
            rows=InputFiles.of([stamps[file] for file in of]),
            outcomes=InputFiles.of([stamps[file] for file in window.files]),
            lookups=sides,
            definition=definition,
        )
        rows, refused = {file: one.rows for file, one in of.items()}, {file: one.refused for file, one in of.items()}
        days.append(
            SourceDay(
                day, sum(rows.values()), sum(refused.values()), fingerprint(content)[:16], note, rows, refused,
                outcomes=window.files,
            )
        )  # fmt: skip
    return days


def choose_files(
    days: Sequence[SourceDay], inventory: Inventory, context: SourceContext, files: SourceFiles
) -> SourceFiles:
    """Returns the files to open for some days: theirs, and those whose rows or outcomes matter to them."""
    if not context.warehouse.has_table(context.table):  # it takes its types from all files
        return files
    rows = {file for day in days for file in day.files}
    if (near := nearness(context)) is not None:
        of = {day.day for day in days}
        counted = [one.days[day] for one in inventory.rows.values() for day in of & one.days.keys()]
        rows |= reached(inventory.rows, spans_of(counted), near.before, 0).keys()
    return choose(files, rows, {file for day in days for file in day.outcomes}, inventory)


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
    where = f"{LEFT_OUT} AND __reason IS NULL AND {rows_of_days(rows, days)}"
    query = f"SELECT {DAY}, __file, count(*) FROM {rows.view} WHERE {where} GROUP BY {DAY}, __file"
    left: defaultdict[datetime.date, dict[str, int]] = defaultdict(dict)
    names = rows.names
    for day, file, count in rows.connection.sql(query).fetchall():
        left[day][names[file]] = count
    return [replace(day, left_of=left[day.day]) for day in days]


def count_refused(rows: OpenSource, days: Sequence[SourceDay]) -> dict[str, int]:
    """Returns reason -> rows of the days that are refused for it."""
    bad = [day for day in days if day.refused]
    if not bad:
        return {}
    where = f"__reason IS NOT NULL AND {rows_of_days(rows, bad)}"
    query = f"SELECT __reason, count(*) FROM {rows.view} WHERE {where} GROUP BY 1 ORDER BY 1"
    return dict(rows.connection.sql(query).fetchall())


class Portion(NamedTuple):
    """Rows of some files."""

    files: Sequence[str]
    """As they are read."""
    places: tuple[int, int] | None = None
    """The first of the rows and the end of them, in the one file. None: all."""


def rows_of_days(rows: OpenSource, days: Sequence[SourceDay], only: Portion | None = None) -> str:
    """Returns the SQL condition that a row of an open source belongs to one of the days.

    It names the files of the days, so that DuckDB scans no other. It knows that before it reads a row.

    Args:
        only: The rows that are looked for. None: all.
    """
    wanted = {file for day in days for file in day.files}
    named = [read for read, file in rows.names.items() if file in wanted and (only is None or read in only.files)]
    files = ", ".join(map(literal, named))
    places = f" AND __row >= {only.places[0]} AND __row < {only.places[1]}" if only and only.places else ""
    return f"list_contains([{files}], __file) AND {days_condition(days)}{places}" if files else "false"


def split_rows(rows: OpenSource, days: Sequence[SourceDay], most: int, group: int) -> list[Portion]:
    """Splits the rows of days into portions of at most `most` rows, in the order of the files and of the rows in them.

    A file with more rows of the days is split by places. Parquet's metadata tell DuckDB where these lie.

    Args:
        group: Rows of a row group. A file is split between groups, if a portion holds one.
    """
    counts = Counter[str]()
    for day in days:
        counts.update(day.files)
    copies = {address_of(one.read): one.read for one in rows.read.values()}
    portions, files, room = list[Portion](), list[str](), most
    for read, file in sorted(rows.names.items()):
        if not counts[file]:
            continue
        if counts[file] > room and files:
            portions.append(Portion(files))
            files, room = [], most
        if counts[file] > most:
            pattern = as_pattern(copies[read])
            metadata = rows.connection.sql("SELECT num_rows FROM parquet_file_metadata(?)", params=[pattern])
            whole = int(metadata.fetchall()[0][0])
            step = most // group * group or most
            portions += [Portion([read], (begin, begin + step)) for begin in range(0, whole, step)]
        else:
            files.append(read)
            room -= counts[file]
    return [*portions, Portion(files)] if files or not portions else portions


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


def _as_json(stamps: Iterable[Stamp]) -> str:
    """The same stamps mean the same files."""
    return json.dumps(list(stamps))

"""What is known of each file of a source: its days, rows and times. Only new and changed files are opened to learn it.

The inventory is a cache in the home. Without it, or with a part of it, an ingest opens more files and does the same.
"""

import datetime
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipeline.data.cache_file import UNREADABLE, read_cache, write_cache
from pipeline.data.formats.files import SourceFile, Stamp, stamp
from pipeline.data.formats.reading import count_rows_of
from pipeline.data.formats.types import FILE, NOTHING
from pipeline.errors import DataError
from pipeline.extraction.config import EventTable, SourceConfig, matches_any
from pipeline.extraction.join import KEY, LEFT_OUT, OUTCOMES, REASON, SHOWN
from pipeline.extraction.opening import (
    KnownTypes,
    OpenSource,
    SourceContext,
    SourceFiles,
    SourceReader,
    fingerprint,
    stored_types,
)
from pipeline.extraction.samples import is_storable
from pipeline.extraction.sources import key_family
from storage.query import quote
from storage.reader import DAY

VERSION = 1
"""Changes with how rows are read or counted, so that everything is looked at again."""
MICROSECONDS = 1_000_000


Span = tuple[int, int]
"""First and last microsecond since 1970."""


class FileDay(NamedTuple):
    """The rows of a day in a file. Times are microseconds since 1970."""

    rows: int
    refused: int
    aside: int = 0
    """Sum of hashes of the rows that others may decide: refused ones of a joined log, repeated events."""
    first: int | None = None
    last: int | None = None
    """First and last time of the impressions that are not refused."""
    begin: int | None = None
    end: int | None = None
    """First and last time of all rows, if rows of other files may repeat them."""


class RowFile(NamedTuple):
    """A file of samples, of a feature log, or of events."""

    size: int
    modified: int
    rows: int
    """As counted in the file itself."""
    days: dict[datetime.date, FileDay]


class OutcomeFile(NamedTuple):
    """A file of an outcome log, with its first and last time, and the last one that was not in the future."""

    size: int
    modified: int
    first: int | None = None
    last: int | None = None
    seen: int | None = None


@dataclass
class Inventory:
    """The files of a source by address, and the types of their columns."""

    rows: dict[str, RowFile] = field(default_factory=dict)
    outcomes: dict[str, OutcomeFile] = field(default_factory=dict)
    types: KnownTypes = field(default_factory=KnownTypes)

    @classmethod
    def read(cls, path: Path) -> "Inventory":
        """Reads an inventory. One that is missing, damaged or of another version is empty."""
        try:
            found = read_cache(path)
            rows = {address: _parse(*one) for address, one in found["rows"].items()}
            outcomes = {address: OutcomeFile(*one) for address, one in found["outcomes"].items()}
            return cls(rows, outcomes, KnownTypes(*found["types"]))
        except UNREADABLE:
            return cls()

    def write(self, path: Path) -> None:
        """Writes the inventory, as a whole or not at all. Without a place for it there is none."""
        rows = {
            address: (*one[:3], {f"{day}": counts for day, counts in one.days.items()})
            for address, one in self.rows.items()
        }
        settled = {address: one for address, one in self.outcomes.items() if one.seen == one.last}  # else time tells
        found = {"rows": rows, "outcomes": settled, "types": (dict(self.types.rows), dict(self.types.outcomes))}
        write_cache(path, found, path.name.partition("-")[0])


def _parse(size: int, modified: int, rows: int, days: Mapping[str, Sequence[int]]) -> RowFile:
    return RowFile(
        size, modified, rows, {datetime.date.fromisoformat(day): FileDay(*counts) for day, counts in days.items()}
    )


def inventory_path(context: SourceContext) -> Path:
    """Returns the path of a source's inventory. It changes with all that decides what is known of a file."""
    what = [VERSION, definition_of(context), context.source.format, nearness(context)]
    return context.warehouse.home / "inventory" / f"{context.table}-{fingerprint(what)[:16]}.json.gz"


def definition_of(context: SourceContext) -> str:
    """Fingerprint of what the config says rows and labels are, wherever they come from."""
    if context.events is not None:  # whatever the path is called, the stamps name the files
        declared = context.events.model_dump(mode="json", exclude=undeclared_keys(context.events))
        return fingerprint(["events", declared])[:16]
    return fingerprint([_declared(context.source), context.schema.label, context.schema.weight])[:16]


def undeclared_keys(events: EventTable) -> set[str]:
    """Returns the keys of an event table that do not say what its rows are."""
    unset = {key for key in ("unique", "day_unit") if getattr(events, key) is None}
    return {"path", "format", "keep_days"} | unset


def _declared(source: SourceConfig) -> dict[str, Any]:
    """Returns the values of a source's config that say what its rows and labels are, wherever they come from."""
    places: Any = {"outcomes": {"path"}, "lookups": {"__all__": {"path", "refresh"}}}
    places |= dict.fromkeys(("path", "format", "generator"), True)
    return source.model_dump(mode="json", exclude_defaults=True, exclude=places)


def learn(reader: SourceReader, known: Inventory, warn: Callable[[str], None]) -> Inventory:
    """Opens what is needed to know all files of a source, and returns what is known then.

    Rows may repeat those of other files. A new file is therefore opened with those that lie so near to it in time.

    Args:
        known: What is known from earlier.
        warn: Called if all files have to be opened because of new ones.
    Raises:
        DataError: With the first file of which other rows were read than it has.
    """
    try:
        return _Learner(reader, known).learn()
    except _OtherTypesError as error:
        warn(f"all files are read: new ones have other types than earlier ones in columns {', '.join(error.columns)}")
        return _Learner(reader, Inventory()).learn()


class _OtherTypesError(Exception):
    def __init__(self, columns: Sequence[str]) -> None:
        super().__init__(*columns)
        self.columns = columns


class _Learner:
    def __init__(self, reader: SourceReader, known: Inventory) -> None:
        self.reader, self.context, self.files, self.known = reader, reader.context, reader.files, known
        reader.known = known.types
        self.stamps = {file: stamp(file) for file in [*self.files.rows, *self.files.outcomes]}
        self.rows = {str(file): one for file in self.files.rows if (one := self._old(file, known.rows))}
        self.outcomes = {str(file): one for file in self.files.outcomes if (one := self._old(file, known.outcomes))}
        self.new = [file for file in self.files.rows if str(file) not in self.rows]
        self.logs = [file for file in self.files.outcomes if str(file) not in self.outcomes]
        self.near = nearness(self.context)
        if self._may_have_lost_a_type():
            self._forget()

    def _may_have_lost_a_type(self) -> bool:
        """Whether a column, or its type, may be known of files alone that are gone or have changed."""
        lost = not self.rows or (not self.context.only and any(file not in self.rows for file in self.known.rows))
        warehouse, table, events = self.context.warehouse, self.context.table, self.context.events
        stored = {*warehouse.table(table).schema().as_arrow().names} if lost and warehouse.has_table(table) else set()
        chosen = ("*",) if events is None else events.columns
        return lost and any(
            name not in stored and kind != NOTHING and is_storable(kind) and matches_any(name, chosen)
            for name, kind in self.known.types.rows.items()
        )

    def _forget(self) -> None:
        self.known = Inventory()
        self.reader.known, self.rows, self.outcomes = self.known.types, {}, {}
        self.new, self.logs = [*self.files.rows], [*self.files.outcomes]

    def _old(self, file: SourceFile, known: Mapping[str, Any]) -> Any:
        """Returns what is known of a file, unless it has changed."""
        one = known.get(str(file))
        return one if one is not None and (one.size, one.modified) == self.stamps[file][1:] else None

    def learn(self) -> Inventory:
        if self.rows:  # otherwise all are opened, and an error says that all are empty
            self._note_empty()
        spans = self._gone()
        if not (self.new or self.logs or spans):
            return self._inventory(self.known.types)
        opened = {*map(str, self.new), *self._latest(), *self._needed(spans)}
        rows = self._open(opened or {str(self.files.rows[-1])})
        found = self._survey(rows)
        if self.near is not None:
            spans += spans_of(day for file in self.new for day in found[str(file)].values())
            if further := self._needed(spans) - found.keys():
                rows = self._open(found.keys() | further)
                found = self._survey(rows)
        self._refuse_other_types(rows.types)
        self._take(rows, found, spans)
        types = KnownTypes(
            _joined(self.known.types.rows, rows.types.rows), _joined(self.known.types.outcomes, rows.types.outcomes)
        )
        return self._inventory(types)

    def _inventory(self, types: KnownTypes) -> Inventory:
        self.reader.known = types
        others = self.known.rows if self.context.only else {}  # files of other days were not looked for
        found = Inventory({**others, **self.rows}, self.outcomes, types)
        own = _deciding(self.context) - {"*"} <= types.rows.keys()  # none is of a side table, which may change
        if own and found != self.known:
            found.write(inventory_path(self.context))
        return Inventory(self.rows, self.outcomes, types)

    def _note_empty(self) -> None:
        """Notes new files without rows. They are not opened: text without a line has no columns."""
        read = self.reader.decode([*self.new, *self.logs])
        for file in [file for file in self.new if read[file].rows == 0]:
            self.rows[str(file)] = RowFile(*self.stamps[file][1:], 0, {})
            self.new.remove(file)
        for file in [file for file in self.logs if read[file].rows == 0 and self.outcomes]:
            self.outcomes[str(file)] = OutcomeFile(*self.stamps[file][1:])
            self.logs.remove(file)

    def _gone(self) -> list[Span]:
        """Returns the times of files that are gone or have changed: others may have repeated their rows."""
        if self.near is None:
            return []
        gone = [one for address, one in self.known.rows.items() if address not in self.rows]
        return spans_of(day for one in gone for day in one.days.values())

    def _latest(self) -> set[str]:
        """Returns the known files that end last. Most new files follow them, or bring late outcomes of their rows."""
        ends = [day.end for one in self.rows.values() for day in one.days.values() if day.end is not None]
        if self.near is None or not ends:
            return set()
        return {*reached(self.rows, [(max(ends), max(ends))], self.near.before, 0)}

    def _touched(self, spans: Sequence[Span]) -> dict[str, set[datetime.date]]:
        """Returns known files -> their days with rows that may repeat rows of some times."""
        return {} if self.near is None else reached(self.rows, spans, 0, self.near.repeats)

    def _needed(self, spans: Sequence[Span]) -> set[str]:
        """Returns the known files to open because of rows of some times: all that decide what is touched."""
        if self.near is None or not spans:
            return set()
        touched = [self.rows[file].days[day] for file, days in self._touched(spans).items() for day in days]
        return {*reached(self.rows, [*spans, *spans_of(touched)], self.near.before, 0)}

    def _open(self, rows: Collection[str]) -> OpenSource:
        begins = [
            day.begin for file in rows if (one := self.rows.get(file)) for day in one.days.values()
            if day.begin is not None
        ]  # fmt: skip
        later = {
            address for address, one in self.outcomes.items()
            if begins and one.last is not None and one.last >= min(begins)
        }  # fmt: skip
        known = Inventory(self.rows, self.outcomes)
        return self.reader.rows(choose(self.files, rows, later | {*map(str, self.logs)}, known))

    def _survey(self, rows: OpenSource) -> dict[str, dict[datetime.date, FileDay]]:
        """Returns file -> day -> its rows, for the files that are open."""
        context = self.context
        aside, first, last, begin, end = "0::HUGEINT", "NULL", "NULL", "NULL", "NULL"
        if rows.join is not None:
            hashed = f"md5_number_lower(concat_ws(':', {KEY}, parse_filename(__file), __row))"
            aside = f"coalesce(sum(CASE WHEN __reason IS NOT NULL THEN {hashed} END), 0)"
            at = _microseconds(SHOWN)
            first, last = (f"{which}({at}) FILTER ({REASON} IS NULL)" for which in ("min", "max"))
            begin, end = f"min({at})", f"max({at})"
        elif context.events is not None and context.events.unique is not None:
            hashed = "md5_number_lower(concat_ws(':', parse_filename(__file), __row))"
            aside = f"coalesce(sum(CASE WHEN {LEFT_OUT} THEN {hashed} END), 0)"
            at = _microseconds(quote(context.events.time))
            begin, end = f"min({at})", f"max({at})"
        query = (
            f"SELECT __file, {DAY}, count(*), count(__reason), {aside}, {first}, {last}, {begin}, {end}"
            f" FROM {rows.view} GROUP BY __file, {DAY} ORDER BY ALL"
        )
        names = rows.names
        found: dict[str, dict[datetime.date, FileDay]] = {str(file): {} for file in rows.files.rows}
        for file, day, count, refused, hashes, *times in rows.connection.sql(query).fetchall():
            found[names[file]][day] = FileDay(count, refused, int(hashes), *times)
        return found

    def _take(
        self, rows: OpenSource, found: Mapping[str, Mapping[datetime.date, FileDay]], spans: Sequence[Span]
    ) -> None:
        """Takes over what was found of new files, and of known ones whose rows may repeat others now."""
        properties = self.context.warehouse.config.catalog
        for file in self.new:
            expected, counted = count_rows_of(rows.read[file], properties), found[str(file)]
            if (got := sum(day.rows for day in counted.values())) != expected:
                raise DataError(
                    f"file '{file.name}'", f"{expected} rows, as the file has", f"{got}",
                    "Run it again once the file is complete: it may have changed meanwhile.",
                )  # fmt: skip
            self.rows[str(file)] = RowFile(*self.stamps[file][1:], expected, dict(counted))
        touched = self._touched(spans)
        for address in touched.keys() & found.keys():
            one = self.rows[address]
            days = {
                day: found[address].get(day, old) if day in touched[address] else old for day, old in one.days.items()
            }
            self.rows[address] = one._replace(days=days)
        if rows.join is not None:
            self._take_outcomes(rows)

    def _take_outcomes(self, rows: OpenSource) -> None:
        assert self.context.source.outcomes is not None
        at, now = _microseconds(quote(self.context.source.outcomes.outcome_time)), time.time_ns() // 1_000
        query = f"SELECT {FILE}, min({at}), max({at}), max({at}) FILTER ({at} <= {now}) FROM {OUTCOMES} GROUP BY {FILE}"
        names = rows.names
        found = {names[file]: times for file, *times in rows.connection.sql(query).fetchall()}
        for file in self.logs:
            times = found.get(str(file), (None, None, None))
            self.outcomes[str(file)] = OutcomeFile(*self.stamps[file][1:], *times)

    def _refuse_other_types(self, found: KnownTypes) -> None:
        """Ends the attempt if columns have other types than in files that stay closed, and these types decide."""
        known, context = self.known.types, self.context
        stored, deciding = stored_types(context.warehouse, context.table), _deciding(context)
        chosen = ("*",) if context.events is None else context.events.columns

        def matters(name: str) -> bool:
            return name in deciding or "*" in deciding or (name not in stored and matches_any(name, chosen))

        other = [name for name in _differing(known.rows, found.rows) if matters(name)]
        if (logs := context.source.outcomes) is not None:
            amounts = {one.amount for one in logs.labels.values()}
            needed = {logs.on, logs.outcome_time, logs.action_column, *amounts}
            other += [name for name in _differing(known.outcomes, found.outcomes) if name in needed]
        if other:
            raise _OtherTypesError(other)


def _deciding(context: SourceContext) -> set[str]:
    """Returns the columns that decide the days of a file, and which of its rows are refused."""
    source, events = context.source, context.events
    if events is not None:
        return {*events.key, events.time, *(events.unique or ())}
    made = context.outcome_columns
    found = {context.schema.label, context.schema.weight, source.day_column} - {*made, None}
    return {name for name in found if name is not None} | (
        {source.outcomes.on, source.outcomes.feature_time} if source.outcomes else set()
    )


def _differing(known: Mapping[str, str], found: Mapping[str, str]) -> list[str]:
    """Returns the columns with different types. Whole numbers of different widths are alike."""

    def alike(one: str, other: str) -> bool:
        whole = key_family(one) == key_family(other) == "integers" and "BOOLEAN" not in (one, other)
        return one == other or NOTHING in (one, other) or whole

    return [name for name, kind in found.items() if name in known and not alike(kind, known[name])]


def _joined(known: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """Returns the types of all columns. A known one stays."""
    return {**found, **{name: kind for name, kind in known.items() if kind != NOTHING or name not in found}}


def _microseconds(column: str) -> str:
    return f"epoch_us(CAST({column} AS TIMESTAMP))"


class Nearness(NamedTuple):
    """How far before a row others may lie that matter to it, in microseconds."""

    repeats: int
    """Rows that it may repeat."""
    before: int
    """The same, and impressions whose outcomes may lie in its window."""


def nearness(context: SourceContext) -> Nearness | None:
    """Returns how near rows must be to matter to each other. None: none does."""
    repeats, outcomes = context.repeat_seconds * MICROSECONDS, context.source.outcomes
    if outcomes is not None:
        return Nearness(repeats, max(repeats, outcomes.longest_seconds * MICROSECONDS))
    return Nearness(repeats, repeats) if context.events is not None and context.events.unique is not None else None


def spans_of(days: Iterable[FileDay]) -> list[Span]:
    """Returns the spans of time of rows, those that overlap as one."""
    return _merge((day.begin, day.end) for day in days if day.begin is not None and day.end is not None)


def _merge(spans: Iterable[Span]) -> list[Span]:
    found: list[Span] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((begin, end))
    return found


def reached(
    files: Mapping[str, RowFile], spans: Sequence[Span], before: int, after: int
) -> dict[str, set[datetime.date]]:
    """Returns the files with rows in or near to spans of time -> the days of these rows.

    Args:
        before, after: How near, in microseconds.
    """
    wide = _merge((first - before, last + after) for first, last in spans)
    firsts, found = [first for first, _ in wide], defaultdict[str, set[datetime.date]](set)
    for file, one in files.items():
        for day, counts in one.days.items():
            if counts.begin is None or counts.end is None:
                continue
            place = bisect_right(firsts, counts.end) - 1
            if place >= 0 and wide[place][1] >= counts.begin:
                found[file].add(day)
    return dict(found)


def choose(files: SourceFiles, rows: Collection[str], outcomes: Collection[str], known: Inventory) -> SourceFiles:
    """Returns those of the files with some addresses, and of an outcome log at least one that has rows."""
    chosen = [file for file in files.outcomes if str(file) in outcomes]
    if not chosen:
        timed = [file for file in files.outcomes if (one := known.outcomes.get(str(file))) and one.last is not None]
        chosen = [*(timed or files.outcomes)][-1:]
    return SourceFiles([file for file in files.rows if str(file) in rows], chosen, files.lookups)


class Window(NamedTuple):
    """What an outcome log has of a day."""

    files: Sequence[str]
    """Files that may hold an outcome of its impressions."""
    is_open: bool


def windows_by_day(inventory: Inventory, longest_seconds: int) -> dict[datetime.date, Window]:
    """Returns day -> the outcome files that may hold outcomes of its impressions, and whether it is open.

    The times in the log decide both. A day is open until an outcome is as late as the end of the longest window of its
    last impression. Outcomes from the future are errors and close no day. Where times are local and ahead of UTC, days
    close by so much later.
    """
    spans: dict[datetime.date, tuple[int, int]] = {}
    for one in inventory.rows.values():
        for day, counts in one.days.items():
            if counts.first is not None and counts.last is not None:
                first, last = spans.get(day, (counts.first, counts.last))
                spans[day] = min(first, counts.first), max(last, counts.last)
    timed = {file: one for file, one in sorted(inventory.outcomes.items()) if one.last is not None}
    names = list(timed)
    firsts, lasts = (np.array([one[place] for one in timed.values()], np.int64) for place in (2, 3))
    seen = max((one.seen for one in timed.values() if one.seen is not None), default=None)
    found = {}
    for day, (first, last) in spans.items():
        end = last + longest_seconds * MICROSECONDS
        touching = np.flatnonzero((lasts >= first) & (firsts < end))
        found[day] = Window([names[place] for place in touching], seen is None or end > seen)
    return found


def stamp_of(address: str, file: RowFile | OutcomeFile) -> Stamp:
    """Returns the stamp of a known file."""
    return address.rpartition("/")[2], file.size, file.modified

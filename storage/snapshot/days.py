"""What a table's snapshots record about each day: its identity, its feature sources and its content.

Each commit records the days that it writes, in the summary of its snapshot and in the table's properties, which outlive
the snapshot. The properties have the last record of each day. Before our own expiry removes snapshots, the records of
files that a remaining snapshot has move there, too.
"""

import datetime
import hashlib
import json
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import lru_cache
from typing import Any

import orjson
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

IDENTITIES = "dlrm.days"
"""Snapshot summary: JSON of day -> identity of what was written. Finished work is recognised by it."""
NOTES = "dlrm.joined"
"""Snapshot summary: JSON of day -> column -> identity of the feature source it was materialized from."""
CONTENTS = "dlrm.contents"
"""Snapshot summary: JSON of day -> (hash of its files as written, hash that identifies their rows)."""


KEYS = (IDENTITIES, NOTES, CONTENTS)
EARLIER = "dlrm.earlier"
"""Table property: JSON list of [day, sequence number, key -> value]. The records of days as remaining snapshots of
earlier states have them, such as tagged ones."""


def identities(table: Table, names: Mapping[datetime.date, str]) -> dict[datetime.date, str]:
    """Returns day -> identity of the write that left its files. Days that another engine has changed are left out.

    Args:
        names: Day -> `hash_paths` of its files now. Each write has its own file names, so a table that was rolled back
            shows the earlier write.
    """
    return {day: found[IDENTITIES] for day, found in _records_of(table, names).items() if IDENTITIES in found}


def last_identities(table: Table) -> dict[datetime.date, str]:
    """Returns day -> identity of the last recorded write, whether or not its files are still there."""
    return {day: identity for day, (_, identity) in _newest(table, IDENTITIES).items()}


def notes(table: Table, names: Mapping[datetime.date, str]) -> dict[datetime.date, Any]:
    """Returns day -> the note of the write that left its files. `names` is as in `identities`."""
    return {day: found[NOTES] for day, found in _records_of(table, names).items() if NOTES in found}


def last_notes(table: Table) -> dict[datetime.date, Any]:
    """Returns day -> the note of the last recorded write. Days that were last written without a note are left out."""
    written = _newest(table, CONTENTS)
    return {day: note for day, (number, note) in _newest(table, NOTES).items() if number >= written.get(day, (0,))[0]}


def _newest(table: Table, key: str) -> dict[datetime.date, tuple[int, Any]]:
    """Returns day -> (sequence number of the last commit that recorded a value, that value)."""
    return {day: (number, values[key]) for day, number, values in _records(table) if key in values}


def _records_of(table: Table, names: Mapping[datetime.date, str]) -> dict[datetime.date, dict[str, Any]]:
    """Returns day -> values by key, as recorded by the write of its present files."""
    nothing = hash_paths([])
    return {
        day: values
        for day, _, values in _records(table)
        if CONTENTS in values and values[CONTENTS][0] == names.get(day, nothing)
    }


def _records(
    table: Table, snapshots: Iterable[Snapshot] | None = None
) -> list[tuple[datetime.date, int, dict[str, Any]]]:
    """Returns (day, sequence number, values by key) of writes that are still recorded, in order of the numbers.

    Args:
        snapshots: Takes the writes of these snapshots, and those in the table's properties. None: of all snapshots.
    """
    return _parse(
        table.properties.get(EARLIER, "[]"),
        tuple(table.properties.get(key, "{}") for key in KEYS),
        tuple(
            (one.sequence_number or 0, one.snapshot_id, tuple(_recorded(one, key) for key in KEYS))
            for one in (table.snapshots() if snapshots is None else snapshots)
        ),
    )


@lru_cache(maxsize=8)
def _parse(
    earlier: str, properties: tuple[str, ...], snapshots: tuple[tuple[int, int, tuple[str, ...]], ...]
) -> list[tuple[datetime.date, int, dict[str, Any]]]:
    """Parses the JSON of records. One ingest asks for those of a table ten times: they may be megabytes."""
    found: dict[tuple[str, int, int], dict[str, Any]] = {
        (day, number, 0): values for day, number, values in _load(earlier)
    }
    for place, key in enumerate(KEYS):
        for day, (number, value) in _load(properties[place]).items():
            found.setdefault((day, number, 0), {})[key] = value
        for number, snapshot_id, recorded in snapshots:
            for day, value in _load(recorded[place]).items():
                found.setdefault((day, number, snapshot_id), {})[key] = value
    ordered = sorted(found, key=lambda record: record[1])
    return [(datetime.date.fromisoformat(record[0]), record[1], found[record]) for record in ordered]


def _load(text: str) -> Any:
    """Parses JSON of names, hashes and stamps. orjson takes a quarter of the time, but refuses NaN."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return json.loads(text)


def row_hashes_by_files(table: Table) -> dict[str, str]:
    """Returns hash of files -> hash that identifies their rows, for all writes that are still recorded."""
    return dict(values[CONTENTS] for _, _, values in _records(table) if CONTENTS in values)


def to_summary(values: Mapping[str, Mapping[datetime.date, Any]]) -> dict[str, str]:
    """Encodes what a snapshot records about the days that it writes.

    Args:
        values: One of the keys above -> day -> value.
    """
    return {key: json.dumps({day.isoformat(): of[day] for day in sorted(of)}) for key, of in values.items() if of}


def add_to_properties(table: Table, values: Mapping[str, Mapping[datetime.date, Any]], number: int) -> dict[str, str]:
    """Encodes what a commit records as table properties, too. Another engine may expire its snapshot.

    A record that gives way, and whose own snapshot has expired, is kept for snapshots that still have its files.

    Args:
        values: As in `to_summary`.
        number: Sequence number of the commit.
    """
    there = {snapshot.sequence_number for snapshot in table.snapshots()}
    replaced = {day for of in values.values() for day in of}
    earlier = json.loads(table.properties.get(EARLIER, "[]"))
    last: dict[tuple[str, int], dict[str, Any]] = {}
    found = {}
    for key in values:
        kept = json.loads(table.properties.get(key, "{}"))
        for day in sorted(replaced & {datetime.date.fromisoformat(day) for day in kept}):
            at, value = kept[day.isoformat()]
            if at not in there:
                last.setdefault((day.isoformat(), at), {})[key] = value
        found[key] = kept | {day.isoformat(): (number, of) for day, of in values[key].items()}
    earlier += [record for (day, at), of in last.items() if (record := [day, at, of]) not in earlier]
    return {key: json.dumps(dict(sorted(of.items()))) for key, of in found.items() if of} | (
        {EARLIER: json.dumps(earlier)} if earlier else {}
    )


def to_properties(
    table: Table,
    names: Mapping[datetime.date, str],
    expiring: Collection[int],
    read_remaining: Callable[[], Collection[str]],
) -> dict[str, str]:
    """Encodes what snapshots record as table properties, which outlive them.

    For each day, takes the write that left its files, or the last one if another engine has changed the day. Also takes
    the writes of other files that a remaining snapshot has. They go with the last of these snapshots.

    Args:
        names: As in `identities`.
        expiring: Ids of the snapshots that are about to expire.
        read_remaining: Returns the `hash_paths` of all days in the other snapshots. Called if it matters.
    """
    kept = {key: _newest(table, key) for key in KEYS}
    nothing = hash_paths([])
    for day, number, values in _records(table):
        if CONTENTS in values and values[CONTENTS][0] == names.get(day, nothing):
            for key, value in values.items():
                kept[key][day] = (number, value)
    gone = [snapshot for snapshot in table.snapshots() if snapshot.snapshot_id in expiring]
    others = [
        (day, number, values)
        for day, number, values in _records(table, gone)
        if CONTENTS in values and any(kept[key].get(day) != (number, value) for key, value in values.items())
    ]
    remaining = read_remaining() if others else ()
    earlier = [(f"{day}", number, values) for day, number, values in others if values[CONTENTS][0] in remaining]
    return to_summary(kept) | ({EARLIER: json.dumps(earlier)} if earlier or EARLIER in table.properties else {})


def hash_paths(paths: Iterable[str]) -> str:
    """Returns a hash of file names, whatever their order."""
    return hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest()


def _recorded(snapshot: Snapshot, key: str) -> str:
    found = snapshot.summary.additional_properties if snapshot.summary else {}
    return found.get(key, "{}")

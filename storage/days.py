"""What a table's snapshots record about each day: its identity, its feature sources and its content.

Each commit records the days that it writes. Before snapshots expire, their records move to the table's properties.
"""

import datetime
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

IDENTITIES = "dlrm.days"
"""Snapshot summary: JSON of day -> identity of what was written. Finished work is recognised by it."""
NOTES = "dlrm.joined"
"""Snapshot summary: JSON of day -> column -> identity of the feature source it was backfilled from."""
CONTENTS = "dlrm.contents"
"""Snapshot summary: JSON of day -> (hash of its files as written, hash that identifies their rows)."""


def newest(table: Table, key: str) -> dict[datetime.date, tuple[int, Any]]:
    """Returns day -> (sequence number of the last commit that recorded a value, that value)."""
    saved = json.loads(table.properties.get(key, "{}"))
    found = {datetime.date.fromisoformat(day): (int(number), value) for day, (number, value) in saved.items()}
    for snapshot in table.snapshots():
        for text, value in _recorded(snapshot, key).items():
            day, number = datetime.date.fromisoformat(text), snapshot.sequence_number or 0
            if day not in found or found[day][0] <= number:
                found[day] = (number, value)
    return found


def identities(table: Table) -> dict[datetime.date, str]:
    """Returns day -> identity of what was last written."""
    return {day: identity for day, (_, identity) in newest(table, IDENTITIES).items()}


def notes(table: Table) -> dict[datetime.date, Any]:
    """Returns day -> the note of its last write. Days that were last written without a note are left out."""
    written = newest(table, CONTENTS)
    return {day: note for day, (number, note) in newest(table, NOTES).items() if number >= written.get(day, (0,))[0]}


def written_files(table: Table) -> dict[datetime.date, str]:
    """Returns day -> `hash_paths` of its files as they were last written."""
    return {day: files for day, (_, (files, _)) in newest(table, CONTENTS).items()}


def row_hashes_by_files(table: Table) -> dict[str, str]:
    """Returns hash of files -> hash that identifies their rows, for all writes that are still recorded."""
    return dict(_pairs(table))


def _pairs(table: Table) -> Iterator[tuple[str, str]]:
    for _, (files, rows) in json.loads(table.properties.get(CONTENTS, "{}")).values():
        yield files, rows
    for snapshot in table.snapshots():
        for files, rows in _recorded(snapshot, CONTENTS).values():
            yield files, rows


def to_summary(values: Mapping[str, Mapping[datetime.date, Any]]) -> dict[str, str]:
    """Encodes what a snapshot records about the days that it writes.

    Args:
        values: One of the keys above -> day -> value.
    """
    return {key: json.dumps({day.isoformat(): of[day] for day in sorted(of)}) for key, of in values.items() if of}


def to_properties(table: Table) -> dict[str, str]:
    """Encodes what all snapshots record as table properties, which outlive the snapshots."""
    return to_summary({key: newest(table, key) for key in (IDENTITIES, NOTES, CONTENTS)})


def hash_paths(paths: Iterable[str]) -> str:
    """Returns a hash of file names, whatever their order."""
    return hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest()


def _recorded(snapshot: Snapshot, key: str) -> dict[str, Any]:
    found = snapshot.summary.additional_properties if snapshot.summary else {}
    recorded: dict[str, Any] = json.loads(found.get(key, "{}"))
    return recorded

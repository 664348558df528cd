"""What a table's snapshots say of its days: as what they were written, made of what, and which rows they hold.

Each commit says it of the days that it writes; of expired snapshots the table's properties keep it.
"""

import datetime
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

IDENTITIES = "dlrm.days"
"""Snapshot summary: JSON of day -> identity of what was written, so that finished work is recognised."""
NOTES = "dlrm.joined"
"""Snapshot summary: JSON of day -> column -> identity of the side source that a back-fill wrote it from."""
CONTENTS = "dlrm.contents"
"""Snapshot summary: JSON of day -> its files as they were written (a hash), and what stands for their rows."""


def newest(table: Table, key: str) -> dict[datetime.date, tuple[int, Any]]:
    """Day -> sequence number of the last commit that said something of it, and what."""
    kept = json.loads(table.properties.get(key, "{}"))
    found = {datetime.date.fromisoformat(day): (int(number), value) for day, (number, value) in kept.items()}
    for snapshot in table.snapshots():
        for text, value in _said(snapshot, key).items():
            day, number = datetime.date.fromisoformat(text), snapshot.sequence_number or 0
            if day not in found or found[day][0] <= number:
                found[day] = (number, value)
    return found


def identities(table: Table) -> dict[datetime.date, str]:
    """Day -> as what it was last written."""
    return {day: identity for day, (_, identity) in newest(table, IDENTITIES).items()}


def notes(table: Table) -> dict[datetime.date, Any]:
    """Day -> what was noted when it was last written; days of which nothing was noted then are left out."""
    written = newest(table, CONTENTS)
    return {day: note for day, (number, note) in newest(table, NOTES).items() if number >= written.get(day, (0,))[0]}


def as_written(table: Table) -> dict[datetime.date, str]:
    """Day -> the hash of its files as they were last written; see `hash_of`."""
    return {day: files for day, (_, (files, _)) in newest(table, CONTENTS).items()}


def same_rows(table: Table) -> dict[str, str]:
    """Hash of files -> what stands for their rows, of all days ever written that are still known."""
    return dict(_pairs(table))


def _pairs(table: Table) -> Iterator[tuple[str, str]]:
    for _, (files, rows) in json.loads(table.properties.get(CONTENTS, "{}")).values():
        yield files, rows
    for snapshot in table.snapshots():
        for files, rows in _said(snapshot, CONTENTS).values():
            yield files, rows


def summary(values: Mapping[str, Mapping[datetime.date, Any]]) -> dict[str, str]:
    """What a snapshot says of the days that it writes.

    Args:
        values: One of the keys above -> day -> value.
    """
    return {key: json.dumps({day.isoformat(): of[day] for day in sorted(of)}) for key, of in values.items() if of}


def remembered(table: Table) -> dict[str, str]:
    """Properties that keep what snapshots say, for when they are gone."""
    return summary({key: newest(table, key) for key in (IDENTITIES, NOTES, CONTENTS)})


def hash_of(paths: Iterable[str]) -> str:
    """Stands for some files by their names."""
    return hashlib.sha256("\n".join(sorted(paths)).encode()).hexdigest()


def _said(snapshot: Snapshot, key: str) -> dict[str, Any]:
    found = snapshot.summary.additional_properties if snapshot.summary else {}
    said: dict[str, Any] = json.loads(found.get(key, "{}"))
    return said

"""What an ingest notes about each day it writes: the input files, and whether labels may still change."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import BaseModel

from pipeline.data.files import Stamp, stamp
from storage.days import notes
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse

INGEST = "ingest.input"
"""Key of the note among a day's notes. No column has such a name; the other keys are back-filled columns."""
MOST_STAMPS = 50
"""Most files of a kind that are noted by name: each commit reads the notes of all days."""


class InputFiles(BaseModel, frozen=True):
    """Files of one kind that a day was made from."""

    count: int
    bytes: int
    stamps: tuple[Stamp, ...]
    """Of the first MOST_STAMPS files."""

    @classmethod
    def of(cls, files: Sequence[str]) -> "InputFiles":
        """Reads the stamps of files."""
        stamps = tuple(stamp(Path(file)) for file in files)
        return cls(count=len(stamps), bytes=sum(size for _, size, _ in stamps), stamps=stamps[:MOST_STAMPS])

    def names_missing_in(self, other: "InputFiles") -> list[str]:
        """Returns the noted names that another list lacks."""
        there = {name for name, _, _ in other.stamps}
        return [] if other.count > len(other.stamps) else [name for name, _, _ in self.stamps if name not in there]


class DayNote(BaseModel, frozen=True):
    """The input of one day."""

    open: bool = False
    """Whether an attribution window ended after the newest outcome: outcomes may be missing."""
    rows: InputFiles
    """Files of samples, or of the feature log."""
    outcomes: InputFiles
    """Files of the outcome log that may hold outcomes of the day."""
    lookups: Mapping[str, str] = {}
    """Side table -> fingerprint of the stamps of its files."""


def day_notes(warehouse: Warehouse, snapshot: SnapshotRef) -> dict[datetime.date, DayNote]:
    """Returns day -> what the ingest noted about the rows that the snapshot has of it.

    Days of an earlier version of this code, or of another engine, are left out.
    """
    found = _notes(warehouse, snapshot)
    return {day: DayNote.model_validate(note[INGEST]) for day, note in found.items() if INGEST in note}


def open_days(warehouse: Warehouse, snapshot: SnapshotRef) -> set[datetime.date]:
    """Returns the days of a snapshot whose labels may still change: when they were written, an attribution window
    ended after the newest outcome."""
    return {day for day, note in day_notes(warehouse, snapshot).items() if note.open}


def backfilled_columns(warehouse: Warehouse, snapshot: SnapshotRef) -> dict[datetime.date, set[str]]:
    """Returns day -> the columns that a backfill has written into the rows that the snapshot has of it."""
    return {day: note.keys() - {INGEST} for day, note in _notes(warehouse, snapshot).items()}


def _notes(warehouse: Warehouse, snapshot: SnapshotRef) -> dict[datetime.date, dict[str, object]]:
    return notes(warehouse.table(snapshot.table), warehouse.day_names(snapshot))

"""What an ingest notes about each day it writes: the input files, and whether labels may still change."""

import datetime
from collections.abc import Collection, Mapping, Sequence

from pydantic import BaseModel, ValidationError

from pipeline.data.formats.files import Stamp
from pipeline.errors import DataError
from storage.reader import SnapshotRef
from storage.snapshot.days import notes
from storage.warehouse import Warehouse

INGEST = "ingest.input"
"""Key of the input in a day's note. The other keys are materialized columns. No column can have this name."""
MOST_STAMPS = 50
"""Most files of a kind that are noted by name, because each commit reads the notes of all days."""


class InputFiles(BaseModel, frozen=True):
    """The input files of one kind of a day."""

    count: int = 0
    bytes: int = 0
    stamps: tuple[Stamp, ...] = ()
    """Of the first MOST_STAMPS files."""

    @classmethod
    def of(cls, stamps: Sequence[Stamp]) -> "InputFiles":
        """Notes files by their stamps."""
        return cls(count=len(stamps), bytes=sum(size for _, size, _ in stamps), stamps=tuple(stamps[:MOST_STAMPS]))

    def names_missing_in(self, other: "InputFiles") -> list[str]:
        """Returns the noted names that another list lacks."""
        there = {name for name, _, _ in other.stamps}
        return [] if other.count > len(other.stamps) else [name for name, _, _ in self.stamps if name not in there]


class DayNote(BaseModel, frozen=True):
    """The input of one day. Notes of an earlier version lack fields that it did not have."""

    open: bool = False
    """Whether an attribution window ended after the newest outcome. Outcomes may be missing."""
    rows: InputFiles = InputFiles()
    """Files of samples, or of the feature log."""
    outcomes: InputFiles = InputFiles()
    """Files of the outcome log that may hold outcomes of the day."""
    lookups: Mapping[str, str] = {}
    """Side table -> fingerprint of the stamps of its files."""
    definition: str = ""
    """Fingerprint of the config that says what rows and labels are. Empty: not noted, so it is no config's."""
    refill: tuple[str, ...] = ()
    """Feature sources whose columns the ingest was to materialize in the day."""
    sources: Mapping[str, str] = {}
    """Feature source -> its state when the day was written, as `note_state`."""
    unfit: tuple[str, ...] = ()
    """Columns that nothing read when the day was written, with values that the table cannot have: they are null."""


def day_notes(
    warehouse: Warehouse, snapshot: SnapshotRef, days: Collection[datetime.date] | None = None
) -> dict[datetime.date, DayNote]:
    """Returns day -> the ingest's note about its rows in the snapshot.

    Leaves out days that another engine wrote.

    Args:
        days: The days to look at. None: all.

    Raises:
        DataError: If a note has another form, as a later version may write it.
    """
    found = _notes(warehouse, snapshot)
    return {
        day: _parse(day, snapshot, note[INGEST])
        for day, note in found.items()
        if INGEST in note and (days is None or day in days)
    }


def _parse(day: datetime.date, snapshot: SnapshotRef, note: object) -> DayNote:
    try:
        return DayNote.model_validate(note)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        raise DataError(
            f"note of day {day} of table '{snapshot.table}'", "the input of a day as this version notes it",
            f"{problem['input']!r} at '{'.'.join(map(str, problem['loc']))}'",
            "Use the version that wrote the day, or write it again: python -m flows.ingest CONFIG force=true.",
        ) from None  # fmt: skip


def open_days(warehouse: Warehouse, snapshot: SnapshotRef) -> set[datetime.date]:
    """Returns the open days of a snapshot. When they were written, an attribution window ended after the newest
    outcome, so their labels may still change."""
    return {day for day, note in day_notes(warehouse, snapshot).items() if note.open}


def materialized_columns(warehouse: Warehouse, snapshot: SnapshotRef) -> dict[datetime.date, set[str]]:
    """Returns day -> the columns that were materialized in its rows in the snapshot."""
    return {day: note.keys() - {INGEST} for day, note in _notes(warehouse, snapshot).items()}


def _notes(warehouse: Warehouse, snapshot: SnapshotRef) -> dict[datetime.date, dict[str, object]]:
    return notes(warehouse.table(snapshot.table), warehouse.day_names(snapshot))

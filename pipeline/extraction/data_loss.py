"""Finds what a day would lose if it were written again. Compares its input now with its version in the table."""

import datetime
import fnmatch
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pyarrow.compute as pc

from pipeline.data.day_notes import DayNote, InputFiles, materialized_columns
from pipeline.data.profile import profile_name, profiles
from pipeline.extraction.checks import Columns
from pipeline.extraction.config import ChecksConfig
from pipeline.extraction.days import SourceDay
from storage.reader import DAY, SnapshotRef
from storage.warehouse import Warehouse

DataLoss = tuple[str, str, str | None]
"""What was expected, what was found, and the column, or None if the loss is not of a column."""
NAMED = 3
"""Most missing files that are named."""


@dataclass(frozen=True)
class StoredDay:
    """A day as the table has it."""

    rows: int
    note: DayNote | None
    """None: another engine wrote the day."""
    columns: Columns
    """Stored statistics of these rows. Empty if there are none."""
    materialized: frozenset[str]
    """Columns that a materialization has written."""
    positives: int | None = None
    """Rows with label 1. None: not counted."""


def read_stored_days(
    warehouse: Warehouse,
    snapshot: SnapshotRef | None,
    days: Collection[datetime.date],
    notes: Mapping[datetime.date, DayNote],
) -> dict[datetime.date, StoredDay]:
    """Reads days as the table has them, without statistics. Leaves out days that it lacks.

    Args:
        snapshot: Of the table. None: it was never written.
        notes: Of its days.
    """
    if not days or snapshot is None:
        return {}
    rows, materialized = warehouse.day_rows(snapshot), materialized_columns(warehouse, snapshot)
    return {
        day: StoredDay(
            rows=rows[day],
            note=notes.get(day),
            columns={},
            materialized=frozenset(materialized.get(day, ())),
        )
        for day in days
        if rows.get(day)
    }


def add_statistics(
    warehouse: Warehouse,
    table: str,
    stored: Mapping[datetime.date, StoredDay],
    due: Collection[datetime.date],
    label: str | None,
) -> dict[datetime.date, StoredDay]:
    """Returns the stored days, with the statistics and the labels of 1 of those that are due."""
    wanted = [day for day in due if day in stored]
    found = _statistics(warehouse, table, wanted)
    positives = {day: _positives(columns, label) for day, columns in found.items()}
    unknown = [day for day in wanted if positives.get(day) is None]
    positives |= _count_positives(warehouse, table, unknown, label)
    return {day: replace(one, columns=found.get(day, {}), positives=positives.get(day)) for day, one in stored.items()}


def _count_positives(
    warehouse: Warehouse, table: str, days: Sequence[datetime.date], label: str | None
) -> dict[datetime.date, int | None]:
    """Counts the rows with label 1 of stored days."""
    if not days or label is None or label not in warehouse.schema(warehouse.current(table)).names:
        return {}
    reader = warehouse.reader(warehouse.current(table), [label])
    return {
        day: sum(pc.sum(pc.equal(reader.read(one)[label], 1)).as_py() or 0 for one in reader.fragments([day]))
        for day in days
    }


def find_losses(
    day: SourceDay,
    stored: StoredDay,
    new: Columns,
    fillable: Collection[str],
    config: ChecksConfig,
    label: str | None,
    generated: bool,
    there: tuple[Collection[str], Collection[str]],
) -> Iterator[DataLoss]:
    """Yields what a day would lose.

    Quarantined rows do not count as a loss, because the quarantine table has them and their share is limited. If the
    config has changed what rows and labels are, the two versions are not compared. Files that are gone still count.

    Args:
        new: Statistics of the rows to write: of the label alone, if the other columns were not measured.
        fillable: Columns that can be materialized again.
        generated: Whether the logs are generated. They lose nothing, because the config decides their content.
        there: Names of all files of the source, and of its outcome log. Under another config a day may need fewer.
    """
    for name in sorted(stored.materialized.difference(fillable)):
        yield "materialized values, as in the table", "no feature source for them in features.joined", name
    if generated:
        return
    if stored.note is not None and stored.note.definition != day.note.definition:
        yield from _gone_files("", stored.note.rows, there[0])
        yield from _gone_files("outcome ", stored.note.outcomes, there[1])
        return
    if stored.note is not None:
        yield from _lost_files("", stored.note.rows, day.note.rows)
        yield from _lost_files("outcome ", stored.note.outcomes, day.note.outcomes)
    kept = 1.0 - config.loss_share
    if day.kept + day.refused < kept * stored.rows:
        yield f"at least {kept * stored.rows:,.0f} rows, as in the table", f"{day.kept:,}", None
    old, now = stored.positives, _positives(new, label)
    if old is not None and (now or 0) + day.refused < kept * old:
        rate = f"label rate {old / stored.rows:.4f}"
        yield (
            f"at least {kept * old:,.0f} rows with label 1 ({rate}), as in the table",
            f"{now or 0:,} (label rate {(now or 0) / max(day.kept, 1):.4f})",
            None,
        )
    for name, before in sorted(stored.columns.items()) if new.keys() - {label} else ():
        if name == label or any(fnmatch.fnmatchcase(name, pattern) for pattern in config.skip):
            continue
        share, got = _coverage(before), _coverage(new.get(name))
        if (share > 0.0 and got == 0.0) or got < share - config.coverage_change:
            yield f"values in {share:.1%} of the rows, as in the table", f"{got:.1%}", name


def _lost_files(kind: str, before: InputFiles, now: InputFiles) -> Iterator[DataLoss]:
    if now.count < before.count:
        gone = before.names_missing_in(now)
        yield (
            f"{before.count} {kind}files, as when the table got the day",
            f"{now.count}{f', without {_list(gone)}' if gone else ''}",
            None,
        )


def _gone_files(kind: str, before: InputFiles, there: Collection[str]) -> Iterator[DataLoss]:
    gone = [name for name, _, _ in before.stamps if name not in there]
    if gone:
        yield f"the {kind}files that the table got the day from", f"a source without {_list(gone)}", None


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")


def _statistics(
    warehouse: Warehouse, table: str, days: Collection[datetime.date]
) -> dict[datetime.date, dict[str, dict[str, Any]]]:
    """Returns day -> column -> stored statistics, for days with statistics of the rows in the table."""
    name = profile_name(table)
    if not warehouse.has_table(name):
        return {}
    measured, written = warehouse.day_identities(name), warehouse.day_identities(table)
    same = [day for day in days if day in measured and measured[day] == written.get(day)]
    found: dict[datetime.date, dict[str, dict[str, Any]]] = {}
    for row in profiles(warehouse, table, same).to_pylist():
        found.setdefault(row[DAY], {})[row["column"]] = row
    return found


def _positives(columns: Columns, label: str | None) -> int | None:
    row = None if label is None else columns.get(label)
    return None if row is None or row["mean"] is None else round(row["mean"] * row["rows"])


def _coverage(row: Mapping[str, Any] | None) -> float:
    return 0.0 if row is None else float(row["present"] / row["rows"])

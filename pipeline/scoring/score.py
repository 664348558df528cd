"""Stage entry: warehouse days in, a table with a probability for each of their rows out."""

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel
from pyiceberg.expressions import BooleanExpression

from pipeline.data.formats.files import fingerprint
from pipeline.data.joined.reader import Reader, filter_schema, joined_schema, open_reader
from pipeline.data.joined.source import PinnedSource, contents_by_day, without_field_ids
from pipeline.data.selection import Selection, days_between
from pipeline.errors import ConfigError, DataError, EmptyDatasetError
from pipeline.scoring.config import PROBABILITY, VERSION, ScoringConfig
from pipeline.transforms.schema import unknown_column
from storage.filters import check_filter
from storage.reader import DAY, SnapshotRef
from storage.snapshot.writing import in_commits, replace_days
from storage.warehouse import Warehouse

SCORES = "scores"
"""Suffix of the table that holds the scores."""


class Model(Protocol):
    """A model that scores raw rows."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The raw columns it reads."""

    def score(self, rows: pa.Table) -> npt.NDArray[np.float64]:
        """Returns the probabilities of raw rows, float64 [N]."""


class ScoringWork(BaseModel, frozen=True):
    """Days that a model has to score, and days that are done."""

    source: SnapshotRef
    table: str
    """Table of the scores."""
    filter: str | None
    keep: tuple[str, ...]
    todo: Mapping[datetime.date, str]
    """Day -> identity of its scores: the day's rows with filter and kept columns, and the model."""
    rows: Mapping[datetime.date, int]
    """Rows of the days in `todo`."""
    done: tuple[datetime.date, ...]
    """Days that have their scores already, or no row to score."""
    earlier: int
    """How many of these have the scores of an earlier model."""
    joined: tuple[PinnedSource, ...] = ()
    """Feature sources of columns that the table does not have."""


class ScoringResult(BaseModel, frozen=True):
    """Totals of a scoring run."""

    rows: int
    mean_probability: float | None


def plan_scoring(
    config: ScoringConfig,
    warehouse: Warehouse,
    source: SnapshotRef,
    row_filter: str | None,
    model: str,
    start: datetime.date | None = None,
    end: datetime.date | None = None,
    force: bool = False,
    joined: tuple[PinnedSource, ...] = (),
    table: str | None = None,
) -> ScoringWork:
    """Plans which days of a snapshot to score. Reads only metadata and the filter's columns.

    A day without scores is due, and one whose rows, filter or kept columns have changed since. A day that an earlier
    model has scored is due only if `start` or `end` ask for it: a new model would score the whole history each time.

    Args:
        model: Identity of the model.
        start: First day. None: the table's.
        end: Last day. None: the table's.
        force: Scores days that are done, too.
        joined: Feature sources of columns that the table does not have.
        table: Table of the model's scores. None: that of the model with the table's name.
    Raises:
        ConfigError: If a column to keep, or one of the filter, is not in the table.
        EmptyDatasetError: If there is no day in the range, or no row to score.
    """
    schema, table = joined_schema(warehouse, source, joined), table or f"{source.table}_{SCORES}"
    for name in config.keep:
        if name not in schema.names:
            raise unknown_column("scoring.keep", name, schema.names)
    if row_filter is not None:
        check_filter(row_filter, filter_schema(warehouse, source, joined, row_filter))
    days = days_between(warehouse.day_rows(source), start, end, "days to score")
    present = warehouse.day_contents(source)
    shared, sides = [config.keep, row_filter], [contents_by_day(pinned, warehouse, source, days) for pinned in joined]
    rows_of = {day: fingerprint([present[day], *shared, *(side[day] for side in sides)]) for day in days}
    identities = {day: f"{rows_of[day]}-{fingerprint([model])}" for day in days}
    same = identities if start or end else {day: f"{rows_of[day]}-" for day in days}
    stored = warehouse.written_days(table)
    stale = [day for day in days if force or not stored.get(day, "").startswith(same[day])]
    rows = _count_rows(warehouse, source, row_filter, {day: days[day] for day in stale}, joined)
    todo = {day: identities[day] for day in stale if rows[day] or day in stored}
    if not todo and not stored:
        raise EmptyDatasetError(f"filter '{row_filter}'", "at least one row to score", "none", "Change the filter.")
    return ScoringWork(
        source=source,
        table=table,
        filter=row_filter,
        keep=config.keep,
        todo=todo,
        rows={day: rows[day] for day in todo},
        done=(done := tuple(day for day in days if day not in todo)),
        earlier=sum(day in stored and stored[day] != identities[day] for day in done),
        joined=joined,
    )


def score(
    config: ScoringConfig,
    warehouse: Warehouse,
    work: ScoringWork,
    model: Model,
    version: int,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ScoringResult:
    """Scores the planned days and writes them. It needs no more memory than the warehouse does to write.

    Args:
        version: Number of the model version, written with each score.
        report: Called with (done, total) while rows are scored.
    Raises:
        ConfigError: If the table lacks a column that the model reads. Nothing is read or written then.
        DataError: If a row's score is not a number. Earlier days stay written.
    """
    schema = joined_schema(warehouse, work.source, work.joined, model.columns)
    missing = [name for name in model.columns if name not in schema.names]
    if missing:
        raise ConfigError(
            f"table '{work.source.table}'", f"the columns that version {version} reads",
            f"none named {', '.join(missing)}", "Write them to the table, or name another version: version=N.",
        )  # fmt: skip
    columns = list(dict.fromkeys([*model.columns, *work.keep]))
    read = [DAY, *(name for name in columns if name != DAY)]
    reader = open_reader(warehouse, work.source, read, _expression(work.filter), work.joined)
    keep = [pa.field(name, without_field_ids(schema.field(name).type)) for name in work.keep]
    written = pa.schema(
        [pa.field(DAY, pa.date32()), *keep, pa.field(PROBABILITY, pa.float64()), pa.field(VERSION, pa.int64())]
    )
    count, total, sum_of_scores = 0, sum(work.rows.values()), 0.0

    def score_days(days: Sequence[datetime.date]) -> Iterator[pa.RecordBatch]:
        nonlocal count, sum_of_scores
        for batch in _batches(reader, days):
            scores = model.score(pa.Table.from_batches([batch]))
            if not np.isfinite(scores).all():
                row = int(np.flatnonzero(~np.isfinite(scores))[0])
                where = f"score of a row of {batch.column(DAY)[row]}"
                raise DataError(where, "a probability", f"{scores[row]}", "Check the model: version=N takes another.")
            versions = pa.array(np.full(len(scores), version))
            arrays = [batch.column(name).cast(written.field(name).type) for name in (DAY, *work.keep)]
            yield pa.RecordBatch.from_arrays([*arrays, pa.array(scores), versions], schema=written)
            count, sum_of_scores = count + len(scores), sum_of_scores + float(scores.sum())
            report(count, total)

    for days in in_commits(work.rows, work.rows.__getitem__, config.rows_per_commit):
        identities = {day: work.todo[day] for day in days}
        rows = sum(work.rows[day] for day in days)
        replace_days(warehouse, work.table, identities, written, score_days(days), rows)
    return ScoringResult(rows=count, mean_probability=sum_of_scores / count if count else None)


def _count_rows(
    warehouse: Warehouse,
    source: SnapshotRef,
    row_filter: str | None,
    rows: Mapping[datetime.date, int],
    joined: tuple[PinnedSource, ...],
) -> dict[datetime.date, int]:
    """Counts the rows of each day that the filter keeps, given the rows of whole days."""
    if row_filter is None:
        return dict(rows)
    counts = dict.fromkeys(rows, 0)
    if rows:
        reader = open_reader(warehouse, source, [DAY], _expression(row_filter), joined)
        for fragment in reader.fragments(rows):
            counts[fragment.day] += sum(batch.num_rows for batch in reader.batches(fragment))
    return counts


def _batches(reader: Reader, days: Sequence[datetime.date]) -> Iterator[pa.RecordBatch]:
    for fragment in reader.fragments(days):
        yield from (batch for batch in reader.batches(fragment) if batch.num_rows)


def _expression(row_filter: str | None) -> BooleanExpression | None:
    return Selection(days=(), filter=row_filter).expression()

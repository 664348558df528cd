"""Stage entry: warehouse days in, a probability for each of their rows out, in a table of its own."""

import datetime
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel
from pyiceberg.expressions import BooleanExpression

from pipeline.data.files import fingerprint
from pipeline.data.filters import check_filter
from pipeline.data.joined.reader import Reader, bare, filter_schema, reader_of, schema_of
from pipeline.data.joined.source import Pinned, contents
from pipeline.data.selection import Selection, days_between
from pipeline.errors import ConfigError, DataError, EmptyDatasetError
from pipeline.scoring.config import PROBABILITY, VERSION, ScoringConfig
from pipeline.transforms.schema import unknown_column
from storage.reader import DAY, SnapshotRef
from storage.warehouse import Warehouse

SCORES = "scores"
"""Suffix of the table that holds the scores."""


class Model(Protocol):
    """What gives the probabilities."""

    @property
    def columns(self) -> Mapping[str, str]:
        """The raw columns it reads."""

    def score(self, rows: pa.Table) -> npt.NDArray[np.float64]:
        """Probabilities of raw rows, float64 [N]."""


class ScoringWork(BaseModel, frozen=True):
    """Days that a model has to score, and what it may leave alone."""

    source: SnapshotRef
    table: str
    """Table of the scores."""
    filter: str | None
    keep: tuple[str, ...]
    todo: Mapping[datetime.date, str]
    """Day -> identity of its scores: the model, the day's rows, and what is taken of them."""
    rows: Mapping[datetime.date, int]
    """Rows of the days in `todo`."""
    done: tuple[datetime.date, ...]
    """Days whose scores stand there already, or that have no row to score."""
    joined: tuple[Pinned, ...] = ()
    """Side sources of columns that the table does not have."""


class ScoringResult(BaseModel, frozen=True):
    """What a scoring wrote."""

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
    again: bool = False,
    joined: tuple[Pinned, ...] = (),
) -> ScoringWork:
    """Which days of a snapshot are to be scored; nothing but metadata is read, and the filter's columns.

    Args:
        model: Tells the model from all others.
        start: First day; None: the table's.
        end: Last day; None: the table's.
        again: Scores days that are done, too.
        joined: Side sources of columns that the table does not have.
    Raises:
        ConfigError: If a column to keep, or one of the filter, is not in the table.
        EmptyDatasetError: If there is no day in the range, or no row to score.
    """
    schema, table = schema_of(warehouse, source, joined), f"{source.table}_{SCORES}"
    for name in config.keep:
        if name not in schema.names:
            raise unknown_column("scoring.keep", name, schema.names)
    if row_filter is not None:
        check_filter(row_filter, filter_schema(warehouse, source, joined))
    days = days_between(warehouse.day_rows(source), start, end, "days to score")
    stands, beside = warehouse.day_contents(source), [contents(pinned, warehouse) for pinned in joined]
    taken = [config.keep, row_filter, *beside]
    identities = {day: fingerprint([model, stands[day], *taken]) for day in days}
    stored = warehouse.written_days(table)
    stale = [day for day in days if again or stored.get(day) != identities[day]]
    rows = _counted(warehouse, source, row_filter, {day: days[day] for day in stale}, joined)
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
        done=tuple(day for day in days if day not in todo),
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
    """Writes the scores of the days to do; memory holds what the warehouse does while it writes.

    Args:
        version: Number of the model, kept beside each score.
        report: Called with (done, total) while rows are scored.
    Raises:
        ConfigError: If the table lacks a column that the model reads; nothing is read or written then.
        DataError: If a row's score is not a number; the days before stay written.
    """
    schema = schema_of(warehouse, work.source, work.joined)
    lacking = [name for name in model.columns if name not in schema.names]
    if lacking:
        raise ConfigError(
            f"table '{work.source.table}'", f"the columns that version {version} reads",
            f"none named {', '.join(lacking)}", "Ingest them, or name another version: version=N.",
        )  # fmt: skip
    columns = list(dict.fromkeys([*model.columns, *work.keep]))
    read = [DAY, *(name for name in columns if name != DAY)]
    reader = reader_of(warehouse, work.source, read, _expression(work.filter), work.joined)
    kept = [pa.field(name, bare(schema.field(name).type)) for name in work.keep]
    written = pa.schema(
        [pa.field(DAY, pa.date32()), *kept, pa.field(PROBABILITY, pa.float64()), pa.field(VERSION, pa.int64())]
    )
    count, total, sum_of_scores = 0, sum(work.rows.values()), 0.0

    def scored(days: Sequence[datetime.date]) -> Iterator[pa.RecordBatch]:
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

    for days in _groups(work.rows, config.rows_per_commit):
        identities = {day: work.todo[day] for day in days}
        rows = sum(work.rows[day] for day in days)
        warehouse.replace_days(work.table, identities, written, scored(days), rows)
    return ScoringResult(rows=count, mean_probability=sum_of_scores / count if count else None)


def _counted(
    warehouse: Warehouse,
    source: SnapshotRef,
    row_filter: str | None,
    rows: Mapping[datetime.date, int],
    joined: tuple[Pinned, ...],
) -> dict[datetime.date, int]:
    """Rows of each day that the filter keeps, given those of whole days."""
    if row_filter is None:
        return dict(rows)
    counts = dict.fromkeys(rows, 0)
    if rows:
        reader = reader_of(warehouse, source, [DAY], _expression(row_filter), joined)
        for fragment in reader.fragments(rows):
            counts[fragment.day] += sum(batch.num_rows for batch in reader.batches(fragment))
    return counts


def _batches(reader: Reader, days: Sequence[datetime.date]) -> Iterator[pa.RecordBatch]:
    for fragment in reader.fragments(days):
        yield from (batch for batch in reader.batches(fragment) if batch.num_rows)


def _groups(rows: Mapping[datetime.date, int], limit: int) -> Iterator[list[datetime.date]]:
    group: list[datetime.date] = []
    for day in rows:
        if group and sum(rows[other] for other in group) + rows[day] > limit:
            yield group
            group = []
        group.append(day)
    if group:
        yield group


def _expression(row_filter: str | None) -> BooleanExpression | None:
    return Selection(days=(), filter=row_filter).expression()

"""What ops learn from rows: moments, quantiles and vocabularies of all of them in one pass, by DuckDB."""

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import pyarrow as pa

from pipeline.transforms.column import Column
from pipeline.transforms.ops import AnyOp
from pipeline.transforms.ops.dense import Standardise
from pipeline.transforms.ops.discrete import Bucketize
from pipeline.transforms.ops.sparse import MapId
from pipeline.transforms.plan.schedule import Schedule, content_key
from storage.query import connect

if TYPE_CHECKING:
    import duckdb

Learner = Bucketize | MapId | Standardise
"""Ops that can be left without their numbers."""
MEMORY = "1GB"
"""What DuckDB may hold; it spills into its folder beyond."""
LARGEST = float(np.finfo(np.float32).max)
"""Numbers beyond, infinite and missing ones teach nothing: none of them can become a float32."""
STREAM = pa.schema({"op": pa.int32(), "moment": pa.float64(), "ranked": pa.float64(), "id": pa.int64()})
"""Values to learn from, whatever op they are for: each is in one of the last three columns."""
COLUMN = {Standardise: "moment", Bucketize: "ranked", MapId: "id"}
QUERY = """
    CREATE TEMP TABLE learned AS
    SELECT op, id, count(*) AS times, favg(moment) AS mean, stddev_pop(moment) AS std,
        min(coalesce(moment, ranked)) AS low, max(coalesce(moment, ranked)) AS high,
        approx_quantile(ranked, {fractions}) AS quantiles
    FROM stream
    GROUP BY GROUPING SETS ((op), (op, id))
    HAVING grouping(id) = 1 OR id IS NOT NULL
"""
"""A row for each op, where id is null, and one for each of its ids.

The set (op) has so few groups that its sums run over the rows in order; those of (op, id) may spill.
"""


def needs_fit(op: AnyOp) -> TypeGuard[Learner]:
    """Whether an op still has to learn its numbers."""
    return isinstance(op, Learner) and not op.fitted


def fit_ops(
    ops: Sequence[AnyOp],
    ready: Sequence[Learner],
    chunks: Callable[[], Iterable[pa.Table]],
    temporary: Path | None = None,
) -> dict[str, Learner]:
    """Output -> finished op, for the ops that are ready to learn: no op before them still has to.

    One pass over the chunks. DuckDB gets one thread, so that the values come in the order of the rows: the same rows
    teach the same numbers, bit for bit, however they are chunked.

    Args:
        temporary: Folder for what does not fit into memory; None takes one of the system's.
    """
    schedule = Schedule(ops, [op.inputs[0] for op in ready])
    alike: dict[tuple[str, str], list[Learner]] = {}
    for op in ready:
        alike.setdefault((schedule.canonical(op.inputs[0]), content_key(op)), []).append(op)
    firsts = [same[0] for same in alike.values()]
    fractions = sorted({share for op in firsts if isinstance(op, Bucketize) for share in _shares(op)})
    with (
        tempfile.TemporaryDirectory(prefix="fit-", dir=temporary) as folder,
        connect([], Path(folder), MEMORY, threads=1) as connection,
    ):
        _aggregate(connection, schedule, firsts, chunks, fractions)
        finished = [_finished(connection, number, op, fractions) for number, op in enumerate(firsts)]
    pairs = zip(finished, alike.values(), strict=True)
    return {op.output: done.bound(op.inputs, op.output) for done, same in pairs for op in same}


def _aggregate(
    connection: "duckdb.DuckDBPyConnection",
    schedule: Schedule,
    ops: Sequence[Learner],
    chunks: Callable[[], Iterable[pa.Table]],
    fractions: Sequence[float],
) -> None:
    """Fills the table `learned`."""
    failures: list[BaseException] = []

    def batches() -> Iterator[pa.RecordBatch]:
        try:
            for chunk in chunks():
                columns = schedule.run(chunk, Counter(), Counter())
                for number, op in enumerate(ops):
                    yield _batch(number, op, columns[op.inputs[0]])
        except BaseException as error:
            failures.append(error)
            raise

    connection.register("stream", pa.RecordBatchReader.from_batches(STREAM, batches()))
    try:
        connection.execute(QUERY.format(fractions=list(fractions) or [0.5]))
    except Exception:
        if failures:  # DuckDB knows only that the stream broke
            raise failures[0] from None
        raise


def _batch(number: int, op: Learner, column: Column) -> pa.RecordBatch:
    values: Any = column.values
    if not isinstance(op, MapId):
        values = values[np.abs(values) <= LARGEST]
    rows = len(values)
    arrays = {field.name: pa.nulls(rows, field.type) for field in STREAM}
    arrays |= {"op": pa.array(np.full(rows, number, np.int32)), COLUMN[type(op)]: pa.array(values)}
    return pa.record_batch(list(arrays.values()), schema=STREAM)


def _finished(connection: "duckdb.DuckDBPyConnection", number: int, op: Learner, fractions: Sequence[float]) -> Learner:
    """The op with what the table says about it; with harmless numbers where there were no values at all."""
    if isinstance(op, MapId):
        query = "SELECT id FROM learned WHERE op = ? AND id IS NOT NULL AND times >= ? ORDER BY times DESC, id LIMIT ?"
        ids = connection.execute(query, [number, op.min_count, op.size]).fetchall()
        return op.fit(tuple(id_ for (id_,) in ids))
    query = "SELECT mean, std, low, high, quantiles FROM learned WHERE op = ? AND id IS NULL"
    found = connection.execute(query, [number]).fetchall()
    mean, std, low, high, quantiles = found[0] if found else (0.0, 0.0, 0.0, 0.0, None)
    if isinstance(op, Bucketize):
        known = dict(zip(fractions, quantiles or [0.0] * len(fractions), strict=True))
        return op.fit(tuple(sorted({min(max(known[share], low), high) for share in _shares(op)})))
    constant = low == high  # has no spread at all, whatever the rounding
    return op.fit(low if constant else mean, 0.0 if constant else std)


def _shares(op: Bucketize) -> list[float]:
    """Shares of the rows below each border to learn."""
    assert op.quantiles is not None
    return [i / op.quantiles for i in range(1, op.quantiles)]

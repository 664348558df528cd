"""Fits ops: DuckDB computes moments, quantiles and vocabularies of all ops in one pass over the rows."""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

import numpy as np
import pyarrow as pa

from pipeline.transforms.column import Column
from pipeline.transforms.ops import PlannedOp
from pipeline.transforms.ops.dense import Standardise
from pipeline.transforms.ops.discrete import Bucketize
from pipeline.transforms.ops.sparse import MapId
from pipeline.transforms.plan.schedule import Schedule, content_key
from storage.query import connect
from storage.scratch import ScratchFolder

if TYPE_CHECKING:
    import duckdb

Learner = Bucketize | MapId | Standardise
"""Ops that a config may leave without numbers."""
MEMORY = "1GB"
"""Memory of DuckDB. Beyond it, DuckDB spills into its folder."""
LARGEST = float(np.finfo(np.float32).max)
"""Larger, infinite and missing numbers are not learned from: none of them fits a float32."""
STREAM = pa.schema({"op": pa.int32(), "moment": pa.float64(), "ranked": pa.float64(), "id": pa.int64()})
"""Values to learn from, for all ops. Each is in one of the last three columns."""
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
"""One row for each op (id is null) and one for each of its ids.

The set (op) has so few groups that its sums run over the rows in order. Those of (op, id) may spill.
"""


def needs_fit(op: PlannedOp) -> TypeGuard[Learner]:
    """Returns whether an op has yet to learn its numbers."""
    return isinstance(op, Learner) and not op.fitted


def fit_ops(
    ops: Sequence[PlannedOp],
    ready: Sequence[Learner],
    chunks: Callable[[], Iterable[pa.Table]],
    temporary: Path | None = None,
) -> dict[str, Learner]:
    """Fits the ops that are ready, those with no unfitted op before them: output -> fitted op.

    It makes one pass over the chunks. DuckDB gets one thread to see the values in the order of the rows: the same rows
    teach the same numbers, bit for bit, in any chunks.

    Args:
        temporary: Folder for data that does not fit into memory. None uses one of the system's.
    """
    schedule = Schedule(ops, [op.inputs[0] for op in ready])
    alike: dict[tuple[str, str], list[Learner]] = {}
    for op in ready:
        alike.setdefault((schedule.canonical(op.inputs[0]), content_key(op)), []).append(op)
    firsts = [same[0] for same in alike.values()]
    fractions = sorted({share for op in firsts if isinstance(op, Bucketize) for share in _shares(op)})
    with (
        ScratchFolder("dlrm-fit-", temporary) as folder,
        connect([], Path(folder), MEMORY, threads=1) as connection,
    ):
        _aggregate(connection, schedule, firsts, chunks, fractions)
        fitted = [_fit_op(connection, number, op, fractions) for number, op in enumerate(firsts)]
    pairs = zip(fitted, alike.values(), strict=True)
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


def _fit_op(connection: "duckdb.DuckDBPyConnection", number: int, op: Learner, fractions: Sequence[float]) -> Learner:
    """Returns the op with its numbers from the table, or with harmless numbers if it saw no values."""
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
    constant = low == high  # has no spread, whatever the rounding says
    return op.fit(low if constant else mean, 0.0 if constant else std)


def _shares(op: Bucketize) -> list[float]:
    """Returns the share of the rows below each border to learn."""
    assert op.quantiles is not None
    return [i / op.quantiles for i in range(1, op.quantiles)]

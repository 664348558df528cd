"""Sharding plans of embedding tables, made once before the ranks start. This module imports nothing heavy."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import BaseModel

from pipeline.training.config import ShardingType


class TableShard(BaseModel, frozen=True):
    """Shard of a table on one rank."""

    rank: int
    row: int
    """First row."""
    column: int
    """First column."""
    rows: int
    columns: int
    bytes: int
    """Memory that the planner predicts: weights, optimizer state, and inputs and outputs of a step."""
    milliseconds: float
    """Time per step that the planner predicts."""


class TableSharding(BaseModel, frozen=True):
    """Sharding of a table. A plan has the shardings of all tables. It is made once and is equal on every rank."""

    table: str
    rows: int
    width: int
    kind: ShardingType
    """Sharding type of the table."""
    kernel: str
    """dense: updated after the backward pass. fused: updated in it. fused_uvm, fused_uvm_caching: updated in it, with
    the table in host memory."""
    cache_load_factor: float | None = None
    """Share of the rows that fused_uvm_caching keeps on the device."""
    pieces: tuple[TableShard, ...]


ShardingPlan = tuple[TableSharding, ...]


def describe_plan(plan: ShardingPlan) -> list[dict[str, Any]]:
    """Returns the plan as rows of a table, with the predicted bytes and milliseconds per rank."""
    rows = []
    for table in plan:
        sums: dict[int, list[float]] = defaultdict(lambda: [0, 0.0])
        for piece in table.pieces:
            sums[piece.rank][0] += piece.bytes
            sums[piece.rank][1] += piece.milliseconds
        rows.append(
            {
                "table": table.table,
                "rows": table.rows,
                "width": table.width,
                "sharding": table.kind,
                "kernel": table.kernel,
                "ranks": sorted(sums),
                "bytes": [int(sums[rank][0]) for rank in sorted(sums)],
                "milliseconds": [sums[rank][1] for rank in sorted(sums)],
            }
        )
    return rows


def sum_per_rank(
    rows: Sequence[dict[str, Any]], what: Literal["bytes", "milliseconds"], world_size: int
) -> list[float]:
    """Sums the predictions of `describe_plan` over tables, per rank.

    Example:
        >>> sum_per_rank([{"ranks": [1], "bytes": [5]}, {"ranks": [0, 1], "bytes": [2, 3]}], "bytes", 2)
        [2, 8]
    """
    sums: list[float] = [0] * world_size
    for row in rows:
        for rank, value in zip(row["ranks"], row[what], strict=True):
            sums[rank] += value
    return sums

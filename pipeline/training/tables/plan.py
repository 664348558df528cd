"""Sharding plans of embedding tables, made once before the ranks start. This module imports nothing heavy."""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, FailFast, Field, model_validator

from pipeline.errors import ConfigError
from pipeline.training.config import ShardingType
from storage.artifacts import holding


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
    pieces: Annotated[tuple[TableShard, ...], FailFast()]


ShardingPlan = tuple[TableSharding, ...]
MOST_RANKS = 10_000
"""A stored plan that names a higher rank is damaged."""
KERNELS = ("dense", "fused", "fused_uvm", "fused_uvm_caching")


def check_plan(plan: ShardingPlan, tables: Mapping[str, tuple[int, int]], world_size: int, where: str) -> None:
    """Compares a plan that was stored with the tables that it is for.

    Args:
        tables: Table -> rows and width.
        where: Names the plan in an error.
    Raises:
        ConfigError: If it has other tables, leaves out a part of one, or names a rank or kernel that does not exist.
    """
    found = {table.table: (table.rows, table.width) for table in plan}
    wrong = [name for name in {**tables, **found} if tables.get(name) != found.get(name)]
    wrong += [table.table for table in plan if not _is_whole(table, world_size)]
    if wrong or len(found) < len(plan):
        actual = f"another one of table '{wrong[0]}'" if wrong else "a table twice"
        raise ConfigError(where, "a sharding plan of the model's tables", actual, "Do not trust it: train again.")


def _is_whole(table: TableSharding, world_size: int) -> bool:
    """Whether the pieces make up the table, on ranks that exist."""
    factor = table.cache_load_factor
    if table.kernel not in KERNELS or not (factor is None or 0.0 < factor <= 1.0):
        return False
    for piece in table.pieces:
        beyond = piece.row + piece.rows > table.rows or piece.column + piece.columns > table.width
        if beyond or min(piece.row, piece.column, piece.rows, piece.columns) < 0 or not 0 <= piece.rank < world_size:
            return False
    filled = [piece for piece in table.pieces if piece.rows and piece.columns]
    if table.kind == "data_parallel":
        return bool(filled) and all((piece.rows, piece.columns) == (table.rows, table.width) for piece in filled)
    bands: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for piece in filled:
        bands[piece.row, piece.rows].append((piece.column, piece.columns))
    return _fills(bands, table.rows) and all(_fills(columns, table.width) for columns in bands.values())


def _fills(spans: Iterable[tuple[int, int]], size: int) -> bool:
    """Whether spans of (start, length) fill [0, size) without a gap and without an overlap."""
    at = 0
    for start, length in sorted(spans):
        if start != at:
            return False
        at += length
    return at == size


class PlanRow(BaseModel, frozen=True):
    """A row of `describe_plan`."""

    table: str
    rows: int
    width: int
    sharding: str
    kernel: str
    ranks: tuple[Annotated[int, Field(ge=0, lt=MOST_RANKS)], ...]
    bytes: tuple[int, ...]
    milliseconds: tuple[float, ...]

    @model_validator(mode="after")
    def _check_lengths(self) -> Self:
        if not len(self.ranks) == len(self.bytes) == len(self.milliseconds):
            raise ValueError("a value for each rank is missing")
        return self


PlanRows = Annotated[tuple[Annotated[Mapping[str, Any], holding(PlanRow)], ...], FailFast()]
"""Tables by rank, as `describe_plan` returns them."""


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

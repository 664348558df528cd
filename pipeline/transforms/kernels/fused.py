"""First X, hash and clamp of lists of ids in one pass, equal bit for bit to the three ops one after the other."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from pipeline.transforms.column import Column
from pipeline.transforms.kernels.hashing import Ids, chain, mix
from pipeline.transforms.kernels.jit import compiled
from pipeline.transforms.ops.dense import Clamp
from pipeline.transforms.ops.op import ID_MAX, ID_MIN, Op
from pipeline.transforms.ops.sparse import FirstX, SigridHash

ORDER: dict[type[Op], int] = {FirstX: 0, SigridHash: 1, Clamp: 2}
"""Ops that can share a pass, in the order in which they can."""
BLOCK = 2_048
"""Ids copied before they are hashed: they are still in the processor's nearest cache then."""


def fusable(first: Op, second: Op) -> bool:
    """Whether an op that reads only another's output can run in that one's pass."""
    return type(first) in ORDER and type(second) in ORDER and ORDER[type(first)] < ORDER[type(second)]


def run_in_one_pass(ops: Sequence[Op], column: Column) -> tuple[Column, list[int]]:
    """The column that a chain of fusable ops makes, and how many values each of them changed."""
    assert column.offsets is not None
    limit, size, salt, low, high = ID_MAX, 0, 0, ID_MIN, ID_MAX
    for op in ops:
        if isinstance(op, FirstX):
            limit = op.limit
        elif isinstance(op, SigridHash):
            size, salt = op.size, op.salt
        elif isinstance(op, Clamp):
            low, high = op.id_bounds
    ids, offsets, outside = first_hash_clamp(column.values, column.offsets, limit, size, salt, low, high)
    changed = {FirstX: len(column.values) - len(ids), Clamp: outside}
    return Column(ids, offsets), [changed.get(type(op), 0) for op in ops]


@compiled
def first_hash_clamp(
    values: Ids, offsets: Ids, limit: int, size: int, salt: int, low: int, high: int
) -> tuple[Ids, Ids, int]:
    """The first `limit` ids of each list, hashed into [0, size) unless size is 0, held in [low, high].

    Lists that keep all their ids lie side by side and are copied as one stretch.

    Returns:
        (ids, offsets, ids that were outside [low, high])
    """
    rows = len(offsets) - 1
    starts = np.empty(rows + 1, np.int64)
    starts[0] = 0
    for i in range(rows):
        starts[i + 1] = starts[i] + min(offsets[i + 1] - offsets[i], limit)
    out = np.empty(starts[-1], np.int64)
    source = target = done = outside = 0
    for i in range(rows):
        kept = starts[i + 1] - starts[i]
        if kept < offsets[i + 1] - offsets[i] or starts[i + 1] - target >= BLOCK or i == rows - 1:
            stretch, stop = out[target : starts[i + 1]], offsets[i] + kept
            original = values[source:stop]
            for j in range(len(stretch)):
                stretch[j] = original[j]
            source, target = offsets[i + 1], starts[i + 1]
            if target - done >= BLOCK or i == rows - 1:
                outside += _hash_clamp(out[done:target], size, salt, low, high)
                done = target
    return out, starts, outside


@compiled
def _hash_clamp(ids: Ids, size: int, salt: int, low: int, high: int) -> int:
    """In place, in loops without a division or a branch, so that the compiler makes vector instructions of them."""
    if size == 1:
        ids[:] = 0
    elif size > 1:
        upper, inverse = np.uint64(salt), 1.0 / size
        for i in range(len(ids)):
            ids[i] = floored(np.int64(chain(upper, mix(ids[i]))), size, inverse)
    outside = 0
    if low > ID_MIN or high < ID_MAX:
        for i in range(len(ids)):
            held = min(max(ids[i], low), high)
            outside += held != ids[i]
            ids[i] = held
    return outside


@compiled
def floored(value: Any, size: int, inverse: float) -> Any:
    """value mod size, size above 1, without a division: the first quotient is off by 2**11 at most, the second by 1."""
    value -= np.int64(np.floor(np.float64(value) * inverse)) * size
    value -= np.int64(np.floor(np.float64(value) * inverse)) * size
    value = value + size if value < 0 else value
    return value - size if value >= size else value

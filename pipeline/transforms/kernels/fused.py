"""First X, hash and clamp of lists of ids in one pass. The bits equal those of the three ops in turn."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

from pipeline.transforms.column import Column
from pipeline.transforms.kernels.hashing import Ids, chain, mix, multiply_high
from pipeline.transforms.ops.dense import Clamp
from pipeline.transforms.ops.op import ID_MAX, ID_MIN, Op
from pipeline.transforms.ops.sparse import FirstX, SigridHash
from storage.compiled import compiled

ORDER: dict[type[Op], int] = {FirstX: 0, SigridHash: 1, Clamp: 2}
"""Ops that can share a pass, and their order in it."""
CONVERTS = bool(get_host_cpu_features().get("avx512dq")) and get_host_cpu_name().startswith("znver")
"""Whether vectors of float64 become int64 and back fast. AVX2 takes one number at a time. On Intel's processors with
AVX-512, where LLVM takes half vectors, the other loop is faster by a quarter (Ice Lake: 3.1 and 4.3 ns an id)."""
BLOCK = 2_048
"""Ids to copy before hashing them, few enough to stay in the processor's nearest cache."""


def fusable(first: Op, second: Op) -> bool:
    """Returns whether the second op, which reads only the output of the first, can run in its pass."""
    return type(first) in ORDER and type(second) in ORDER and ORDER[type(first)] < ORDER[type(second)]


def run_in_one_pass(ops: Sequence[Op], column: Column) -> tuple[Column, list[int]]:
    """Returns the column that a chain of fusable ops makes, and how many values each op changed."""
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
    """Keeps the first `limit` ids of each list, hashes them into [0, size) unless size is 0, and limits them.

    Neighbouring lists that keep all their ids are copied as one stretch.

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
    """Works in place, in loops without divisions and branches, which the compiler can vectorise (SIMD)."""
    if size == 1:
        ids[:] = 0
    elif size > 1 and CONVERTS:
        upper, inverse = np.uint64(salt), 1.0 / size
        for i in range(len(ids)):
            ids[i] = floored(np.int64(chain(upper, mix(ids[i]))), size, inverse)
    elif size > 1:
        upper = np.uint64(salt)
        for i in range(len(ids)):
            ids[i] = np.int64(chain(upper, mix(ids[i])))
        floor_all(ids, size)
    outside = 0
    if low > ID_MIN or high < ID_MAX:
        for i in range(len(ids)):
            held = min(max(ids[i], low), high)
            outside += held != ids[i]
            ids[i] = held
    return outside


@compiled
def floor_all(ids: Ids, size: int) -> None:
    """Replaces each id by id mod size, size above 1. It needs no conversions, so it is faster where those are slow.

    The sign bit is flipped to get an unsigned number, and the remainder of 2**63 is subtracted again. The quotient is
    too small by at most 1. Of a number and the one that is out of range, which wraps around, the smaller one is right.
    """
    divisor, top = np.uint64(size), np.uint64(1 << 63)
    inverse, rest = np.uint64(2**64 - 1) // divisor, top % divisor
    for i in range(len(ids)):
        value = np.uint64(ids[i]) ^ top
        value -= multiply_high(value, inverse) * divisor
        value = min(value, value - divisor) - rest
        ids[i] = np.int64(min(value, value + divisor))


@compiled
def floored(value: Any, size: int, inverse: float) -> Any:
    """Computes value mod size, size above 1, without a division.

    The first quotient is off by at most 2**11, the second by at most 1.
    """
    value -= np.int64(np.floor(np.float64(value) * inverse)) * size
    value -= np.int64(np.floor(np.float64(value) * inverse)) * size
    value = value + size if value < 0 else value
    return value - size if value >= size else value

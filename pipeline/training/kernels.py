"""The numba loops behind `NumbaBags`: pooling of table rows, and the exact update of the rows that a batch read.

Tables lie one behind the other in flat float32 arrays. Each loop runs on one thread and releases the interpreter lock.
"""

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

prefetch: Any
F = TypeVar("F", bound=Callable[..., Any])

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(4)
AHEAD = 8
"""Lookups between asking for a row and reading it. Without this the loops wait for memory half of the time."""
LINE = 16
"""float32 numbers of a cache line."""


def compiled(function: F) -> F:
    """A numba loop: kept on disk, without the interpreter lock; sums may be taken in vectors."""
    fast = {"reassoc", "contract", "nsz"}
    return cast(F, numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=fast)(function))


@intrinsic  # type: ignore[no-redef]
def prefetch(_: Any, array: Any, index: Any) -> Any:
    """Asks the processor to bring array[index] into its cache; any index is safe."""

    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        data = context.make_array(signature.args[0])(context, builder, arguments[0]).data
        byte = ir.IntType(8).as_pointer()
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        address = builder.bitcast(builder.gep(data, [arguments[1]]), byte)
        builder.call(function, [address, number(0), number(3), number(1)])  # to read, into every level, data
        return context.get_dummy_value()

    return types.void(array, types.intp), code


@compiled
def pool(
    weights: np.ndarray, features: np.ndarray, mean: bool, indices: np.ndarray, offsets: np.ndarray, out: np.ndarray,
    first: int, last: int,
) -> int:  # fmt: skip
    """Sums (or means) of the table rows of the bags [first, last) of every feature.

    Args:
        features: int64 [F, 4]: where the table begins in `weights`, its rows, its width, its first column of `out`.
        offsets: Bag b of feature f has the ids [offsets[f * B + b], offsets[f * B + b + 1]).
        out: float32 [B, all widths]; rows [first, last) are written.
    Returns:
        Ids that lie outside their table; they are left out.
    """
    bags = (len(offsets) - 1) // len(features)
    outside = 0
    for f in range(len(features)):
        origin, rows, width, column = features[f]
        final = offsets[(f + 1) * bags] - 1
        for b in range(first, last):
            start, stop = offsets[f * bags + b], offsets[f * bags + b + 1]
            vector = out[b, column : column + width]
            vector[:] = np.float32(0.0)
            for j in range(start, stop):
                coming = origin + indices[min(j + AHEAD, final)] * width
                for e in range(0, width, LINE):
                    prefetch(weights, coming + e)
                row = indices[j]
                if row < 0 or row >= rows:
                    outside += 1
                    continue
                source = weights[origin + row * width : origin + (row + 1) * width]
                for e in range(width):
                    vector[e] += source[e]
            if mean and stop - start > 1:
                share = np.float32(1.0) / np.float32(stop - start)
                for e in range(width):
                    vector[e] *= share
    return outside


@compiled
def update(
    kind: int, weights: np.ndarray, moment: np.ndarray, second: np.ndarray, settings: np.ndarray, tables: np.ndarray,
    members: np.ndarray, tasks: np.ndarray, mean: bool, indices: np.ndarray, offsets: np.ndarray, gradient: np.ndarray,
    head: np.ndarray, link: np.ndarray, bag: np.ndarray, scratch: np.ndarray,
) -> None:  # fmt: skip
    """One optimizer step on the rows that the batch read, each with its whole gradient (exact, not per lookup).

    The lookups of a row form a list in the order of the batch: `head` names its first, `link` the next. So the sum of a
    row's gradients has one order whatever the number of threads, and no sort is needed.

    Args:
        moment, second: State of the optimizer; a number a row for ROWWISE_ADAGRAD, else one an element.
        settings: float32: learning rate, eps, weight decay, limit of a gradient's elements, beta1, beta2, and Adam's
            bias corrections 1 - beta1^t and 1 - beta2^t.
        tables: int64 [T + 1, 5]: begin in `weights`, begin in `head` and row-wise state, rows, width, first of its
            `members`; the last row holds the number of members alone.
        members: int64 [F, 2]: features table by table, and their first column of `gradient`.
        tasks: int64 [N, 3]: table, part, mask: rows with `row & mask == part`.
        gradient: float32 [B, all widths], of the pooled vectors.
        head: int32, -1 for every row of every table; left so. link, bag: int32 [lookups], written over.
        scratch: float32, written over: room for the gradients of a table's features, and one row more.
    """
    bags = (len(offsets) - 1) // len(members)
    rate, eps, decay, limit = settings[0], settings[1], settings[2], settings[3]
    beta1, beta2, correct1, correct2 = settings[4], settings[5], settings[6], settings[7]
    one = np.float32(1.0)
    for n in range(len(tasks)):
        table, part, mask = tasks[n]
        origin, first_row, rows, width, first_member = tables[table]
        last_member = tables[table + 1, 4]
        # The table's gradients side by side: read once for each lookup, they had better be in the cache.
        places = (last_member - first_member) * bags
        slab = scratch[: places * width].reshape(places, width)
        total = scratch[places * width : (places + 1) * width]
        for m in range(last_member - 1, first_member - 1, -1):
            feature, column = members[m]
            for b in range(bags - 1, -1, -1):
                start, stop = offsets[feature * bags + b], offsets[feature * bags + b + 1]
                if stop == start:
                    continue
                place = (m - first_member) * bags + b
                share = one / np.float32(stop - start) if mean else one
                source, target = gradient[b, column : column + width], slab[place]
                for e in range(width):
                    target[e] = min(max(source[e] * share, -limit), limit)
                for j in range(stop - 1, start - 1, -1):
                    prefetch(head, first_row + indices[max(j - AHEAD, 0)])
                    row = indices[j]
                    if row & mask == part and 0 <= row < rows:
                        link[j] = head[first_row + row]
                        head[first_row + row] = j
                        bag[j] = place
        for m in range(first_member, last_member):
            feature = members[m, 0]
            final = offsets[(feature + 1) * bags] - 1
            for j in range(offsets[feature * bags], final + 1):
                coming = indices[min(j + AHEAD, final)]
                if coming & mask == part:
                    for e in range(0, width, LINE):
                        prefetch(weights, origin + coming * width + e)
                row = indices[j]
                if row & mask != part or row < 0 or row >= rows or head[first_row + row] != j:
                    continue
                head[first_row + row] = -1
                total[:] = slab[bag[j]]
                other = link[j]
                while other >= 0:
                    source = slab[bag[other]]
                    for e in range(width):
                        total[e] += source[e]
                    other = link[other]
                begin = origin + row * width
                values = weights[begin : begin + width]
                if decay != 0.0:
                    for e in range(width):
                        total[e] += decay * values[e]
                if kind == ROWWISE_ADAGRAD:
                    squares = np.float32(0.0)
                    for e in range(width):
                        squares += total[e] * total[e]
                    now = moment[first_row + row] + squares / np.float32(width)
                    moment[first_row + row] = now
                    step = rate / (np.sqrt(now) + eps)
                    for e in range(width):
                        values[e] -= step * total[e]
                elif kind == ADAGRAD:
                    state = moment[begin : begin + width]
                    for e in range(width):
                        state[e] += total[e] * total[e]
                        values[e] -= rate * total[e] / (np.sqrt(state[e]) + eps)
                elif kind == ADAM:
                    state, other_state = moment[begin : begin + width], second[begin : begin + width]
                    for e in range(width):
                        state[e] = beta1 * state[e] + (one - beta1) * total[e]
                        other_state[e] = beta2 * other_state[e] + (one - beta2) * total[e] * total[e]
                        values[e] -= rate * (state[e] / correct1) / (np.sqrt(other_state[e] / correct2) + eps)
                else:
                    for e in range(width):
                        values[e] -= rate * total[e]

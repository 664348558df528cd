"""The numba loops behind `NumbaBags`: pooling of table rows, and the exact update of the rows that a batch read.

Tables lie one behind the other in flat float32 arrays. Each loop runs on one thread and releases the interpreter lock.
"""

import numpy as np

from pipeline.training.tables.simd import LANES, across, load, plus, prefetch, spread, store, times, zero
from pipeline.transforms.kernels.jit import compiled_fast

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(4)
AHEAD = 8
"""Lookups between asking for a row and reading it. Without this the loops wait for memory half of the time."""
NEW, DONE = -1, -2
"""Rows that have no place among the sums: not yet, and no more."""
FOUR = 4 * LANES
"""Numbers that are added up in four registers."""


@compiled_fast
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
    bags, stride = (len(offsets) - 1) // len(features), out.shape[1]
    flat = out.reshape(-1)
    outside = 0
    for f in range(len(features)):
        origin, rows, width, column = features[f]
        final = offsets[(f + 1) * bags] - 1
        fours, ones = width // FOUR * FOUR, width // LANES * LANES
        for b in range(first, last):
            start, stop = offsets[f * bags + b], offsets[f * bags + b + 1]
            for j in range(start, stop):
                outside += indices[j] < 0 or indices[j] >= rows
            into = b * stride + column
            for e in range(0, fours, FOUR):
                sum0, sum1, sum2, sum3 = zero(), zero(), zero(), zero()
                for j in range(start, stop):
                    coming = origin + indices[min(j + AHEAD, final)] * width + e
                    for line in range(0, FOUR, LANES):
                        prefetch(weights, coming + line)
                    if 0 <= indices[j] < rows:
                        source = origin + indices[j] * width + e
                        sum0 = plus(sum0, load(weights, source))
                        sum1 = plus(sum1, load(weights, source + LANES))
                        sum2 = plus(sum2, load(weights, source + 2 * LANES))
                        sum3 = plus(sum3, load(weights, source + 3 * LANES))
                store(flat, into + e, sum0)
                store(flat, into + e + LANES, sum1)
                store(flat, into + e + 2 * LANES, sum2)
                store(flat, into + e + 3 * LANES, sum3)
            for e in range(fours, ones, LANES):
                sum0 = zero()
                for j in range(start, stop):
                    prefetch(weights, origin + indices[min(j + AHEAD, final)] * width + e)
                    if 0 <= indices[j] < rows:
                        sum0 = plus(sum0, load(weights, origin + indices[j] * width + e))
                store(flat, into + e, sum0)
            for e in range(ones, width):
                total = np.float32(0.0)
                for j in range(start, stop):
                    if 0 <= indices[j] < rows:
                        total += weights[origin + indices[j] * width + e]
                flat[into + e] = total
            if mean and stop - start > 1:
                share = np.float32(1.0) / np.float32(stop - start)
                for e in range(width):
                    flat[into + e] *= share
    return outside


@compiled_fast
def _add(sums: np.ndarray, begin: int, vector: np.ndarray) -> None:
    """sums[begin : begin + len(vector)] += vector."""
    width = len(vector)
    fours, ones = width // FOUR * FOUR, width // LANES * LANES
    for e in range(0, fours, FOUR):
        at = begin + e
        sum0, sum1 = load(sums, at), load(sums, at + LANES)
        sum2, sum3 = load(sums, at + 2 * LANES), load(sums, at + 3 * LANES)
        store(sums, at, plus(sum0, load(vector, e)))
        store(sums, at + LANES, plus(sum1, load(vector, e + LANES)))
        store(sums, at + 2 * LANES, plus(sum2, load(vector, e + 2 * LANES)))
        store(sums, at + 3 * LANES, plus(sum3, load(vector, e + 3 * LANES)))
    for e in range(fours, ones, LANES):
        store(sums, begin + e, plus(load(sums, begin + e), load(vector, e)))
    for e in range(ones, width):
        sums[begin + e] += vector[e]


@compiled_fast
def _step(
    kind: int, weights: np.ndarray, moment: np.ndarray, second: np.ndarray, settings: np.ndarray, row: int, begin: int,
    total: np.ndarray,
) -> None:  # fmt: skip
    """The optimizer on one row, whose weights begin at `begin`, with its gradient `total`; `row` counts all tables."""
    rate, eps, decay = settings[0], settings[1], settings[2]
    beta1, beta2, correct1, correct2 = settings[4], settings[5], settings[6], settings[7]
    one, width = np.float32(1.0), len(total)
    values = weights[begin : begin + width]
    if decay != 0.0:
        for e in range(width):
            total[e] += decay * values[e]
    if kind == ROWWISE_ADAGRAD:
        ones = width // LANES * LANES
        squares16 = zero()
        for e in range(0, ones, LANES):
            squares16 = plus(squares16, times(load(total, e), load(total, e)))
        squares = across(squares16)
        for e in range(ones, width):
            squares += total[e] * total[e]
        now = moment[row] + squares / np.float32(width)
        moment[row] = now
        step = -rate / (np.sqrt(now) + eps)
        for e in range(0, ones, LANES):
            store(values, e, plus(load(values, e), times(spread(step), load(total, e))))
        for e in range(ones, width):
            values[e] += step * total[e]
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


@compiled_fast
def update(
    kind: int, weights: np.ndarray, moment: np.ndarray, second: np.ndarray, settings: np.ndarray, tables: np.ndarray,
    members: np.ndarray, tasks: np.ndarray, mean: bool, indices: np.ndarray, offsets: np.ndarray, gradient: np.ndarray,
    stride: int, place: np.ndarray, rows_seen: np.ndarray, sums: np.ndarray,
) -> None:  # fmt: skip
    """One optimizer step on the rows that the batch read, each with its whole gradient (exact, not per lookup).

    A row gets a place among the sums when it is first seen. Its gradients are added up there in the order of the batch,
    whatever the number of threads, and no sort is needed. Where there are more rows than places, the rest follows in
    another round.

    Args:
        moment, second: State of the optimizer; a number a row for ROWWISE_ADAGRAD, else one an element.
        settings: float32: learning rate, eps, weight decay, limit of a gradient's elements, beta1, beta2, and Adam's
            bias corrections 1 - beta1^t and 1 - beta2^t.
        tables: int64 [T + 1, 5]: begin in `weights`, begin in `place` and row-wise state, rows, width, first of its
            `members`; the last row holds the number of members alone.
        members: int64 [F, 2]: features table by table, and their first column of `gradient`.
        tasks: int64 [N, 3]: table, part, mask: rows with `row & mask == part`.
        gradient: float32, of the pooled vectors: row b begins at b * stride.
        place: int32, NEW for every row of every table; left so.
        rows_seen: int64, sums: float32: written over; room for as many rows as `rows_seen` has, of any table.
    """
    bags = (len(offsets) - 1) // len(members)
    limit = settings[3]
    for n in range(len(tasks)):
        table, part, mask = tasks[n]
        origin, first_row, rows, width, first_member = tables[table]
        last_member = tables[table + 1, 4]
        vector = np.empty(width, np.float32)
        room = len(rows_seen)
        from_member, from_bag, after = first_member, 0, NEW
        while from_member < last_member:
            seen = 0
            next_member, next_bag = last_member, 0
            for m in range(from_member, last_member):
                feature, column = members[m]
                final = offsets[(feature + 1) * bags] - 1
                for b in range(from_bag if m == from_member else 0, bags):
                    start, stop = offsets[feature * bags + b], offsets[feature * bags + b + 1]
                    if stop == start:
                        continue
                    share = np.float32(1.0) / np.float32(stop - start) if mean else np.float32(1.0)
                    source = gradient[b * stride + column : b * stride + column + width]
                    for e in range(width):
                        vector[e] = source[e] * share
                    if limit < np.inf:
                        for e in range(width):
                            vector[e] = min(max(vector[e], -limit), limit)
                    coming_vector = (b + 1) * stride + column
                    for e in range(0, width, LANES):
                        prefetch(gradient, coming_vector + e)
                    for j in range(start, stop):
                        prefetch(place, first_row + indices[min(j + 2 * AHEAD, final)])
                        row = indices[j]
                        if row & mask != part or row < 0 or row >= rows:
                            continue
                        where = place[first_row + row]
                        if where >= 0:
                            _add(sums, where * width, vector)
                        elif where == NEW and seen < room:
                            place[first_row + row] = seen
                            rows_seen[seen] = row
                            sums[seen * width : (seen + 1) * width] = vector
                            seen += 1
                        elif where == NEW and next_member == last_member:
                            next_member, next_bag = m, b
            if next_member < last_member:
                after = DONE
            for k in range(seen):
                coming = rows_seen[min(k + AHEAD, seen - 1)]
                for e in range(0, width, LANES):
                    prefetch(weights, origin + coming * width + e)
                prefetch(moment, first_row + coming)
                row = rows_seen[k]
                place[first_row + row] = after
                _step(
                    kind, weights, moment, second, settings, first_row + row, origin + row * width,
                    sums[k * width : (k + 1) * width],
                )  # fmt: skip
            from_member, from_bag = next_member, next_bag
        for m in range(first_member, last_member if after == DONE else first_member):
            feature = members[m, 0]
            for j in range(offsets[feature * bags], offsets[(feature + 1) * bags]):
                row = indices[j]
                if row & mask == part and 0 <= row < rows:
                    place[first_row + row] = NEW

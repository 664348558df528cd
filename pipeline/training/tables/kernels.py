"""Numba loops of `NumbaBags`: pooling of table rows, and the exact update of the rows that a batch read.

Tables are stored one after the other in flat float32 arrays. Each loop runs on one thread without the GIL.
"""

from typing import NamedTuple

import numpy as np

from pipeline.training.tables.simd import VECTOR, add, broadcast, load, multiply, reduce_sum, store, zero
from storage.compiled import compiled, compiled_fast, inlined, prefetch

SGD, ADAGRAD, ROWWISE_ADAGRAD, ADAM = range(4)
PREFETCH_LOOKUPS = 8
"""Lookups between the prefetch of a row and its use. Without it the loops wait for memory half of the time."""
UNSEEN, DONE = -1, -2
"""Marks of rows without a slot: not seen yet in this update, and updated in an earlier round."""
FOUR = 4 * VECTOR
"""Numbers that are summed in four registers at a time."""


@compiled
def _sum_in_order(
    weights: np.ndarray, first: int, width: int, rows: int, indices: np.ndarray, start: int, stop: int
) -> np.float32:
    """Returns the sum of one column of the table rows of a bag, lookup by lookup, as the vectors of `pool` add.

    A loop that may reorder its sum would do so on some processors (AVX-512), and the column would have other bits than
    in a wider table.
    """
    total = np.float32(0.0)
    for j in range(start, stop):
        if 0 <= indices[j] < rows:
            total += weights[first + indices[j] * width]
    return total


@inlined
def _count_outside(indices: np.ndarray, start: int, stop: int, rows: int) -> int:
    """Returns how many of the ids [start, stop) lie outside a table. Read as unsigned, a negative one is very large."""
    count = 0
    for j in range(np.uint64(start), np.uint64(stop)):
        if np.uint64(indices[j]) >= np.uint64(rows):
            count += 1
    return count


@compiled_fast
def pool(
    weights: np.ndarray, features: np.ndarray, mean: bool, indices: np.ndarray, offsets: np.ndarray, out: np.ndarray,
    first: int, last: int,
) -> int:  # fmt: skip
    """Computes sums (or means) of the table rows of the bags [first, last) of every feature.

    Args:
        features: int64 [F, 4]: offset of the table in `weights`, its rows, its width, its first column in `out`.
        offsets: Bag b of feature f has the ids at [offsets[f * B + b], offsets[f * B + b + 1]).
        out: float32 [B, sum of widths]. Rows [first, last) are written.
    Returns:
        Number of ids outside their table. They are left out.
    """
    bags, stride = (len(offsets) - 1) // len(features), out.shape[1]
    flat = out.reshape(-1)
    outside, ahead = 0, np.uint64(PREFETCH_LOOKUPS)
    for f in range(len(features)):
        origin, rows, width, column = features[f]
        final, inside = np.uint64(offsets[(f + 1) * bags] - 1), np.uint64(rows)
        # In the loops below, counting would take a quarter of their time.
        outside += _count_outside(indices, offsets[f * bags + first], offsets[f * bags + last], rows)
        fours, ones = width // FOUR * FOUR, width // VECTOR * VECTOR
        for b in range(first, last):
            start, stop = offsets[f * bags + b], offsets[f * bags + b + 1]
            into = b * stride + column
            for e in range(0, fours, FOUR):
                sum0, sum1, sum2, sum3 = zero(), zero(), zero(), zero()
                for j in range(np.uint64(start), np.uint64(stop)):
                    coming = origin + indices[min(j + ahead, final)] * width + e
                    for line in range(0, FOUR, VECTOR):
                        prefetch(weights, coming + line)
                    row = indices[j]
                    if np.uint64(row) < inside:
                        source = origin + row * width + e
                        sum0 = add(sum0, load(weights, source))
                        sum1 = add(sum1, load(weights, source + VECTOR))
                        sum2 = add(sum2, load(weights, source + 2 * VECTOR))
                        sum3 = add(sum3, load(weights, source + 3 * VECTOR))
                store(flat, into + e, sum0)
                store(flat, into + e + VECTOR, sum1)
                store(flat, into + e + 2 * VECTOR, sum2)
                store(flat, into + e + 3 * VECTOR, sum3)
            for e in range(fours, ones, VECTOR):
                sum0 = zero()
                for j in range(np.uint64(start), np.uint64(stop)):
                    prefetch(weights, origin + indices[min(j + ahead, final)] * width + e)
                    row = indices[j]
                    if np.uint64(row) < inside:
                        sum0 = add(sum0, load(weights, origin + row * width + e))
                store(flat, into + e, sum0)
            for e in range(ones, width):
                flat[into + e] = _sum_in_order(weights, origin + e, width, rows, indices, start, stop)
            if mean and stop - start > 1:
                share = np.float32(1.0) / np.float32(stop - start)
                for e in range(width):
                    flat[into + e] *= share
    return outside


@compiled
def pool_weighted(
    weights: np.ndarray, features: np.ndarray, indices: np.ndarray, offsets: np.ndarray, id_weights: np.ndarray,
    out: np.ndarray, first: int, last: int,
) -> int:  # fmt: skip
    """Computes the sums of `pool` with each table row multiplied by the weight of its id, float32 [lookups].

    Products are rounded before they are added, so a column has the same bits in a table of any width.
    """
    bags, stride = (len(offsets) - 1) // len(features), out.shape[1]
    flat = out.reshape(-1)
    outside = 0
    for f in range(len(features)):
        origin, rows, width, column = features[f]
        final = offsets[(f + 1) * bags] - 1
        for b in range(first, last):
            into = flat[b * stride + column : b * stride + column + width]
            into[:] = 0.0
            for j in range(offsets[f * bags + b], offsets[f * bags + b + 1]):
                coming = origin + indices[min(j + PREFETCH_LOOKUPS, final)] * width
                for line in range(0, width, VECTOR):
                    prefetch(weights, coming + line)
                if not 0 <= indices[j] < rows:
                    outside += 1
                    continue
                source = origin + indices[j] * width
                row, weight = weights[source : source + width], id_weights[j]
                for e in range(width):
                    into[e] += weight * row[e]
    return outside


@compiled
def _scale(vector: np.ndarray, factor: np.float32, limit: np.float32, out: np.ndarray) -> None:
    """Rounds each product, as `pool_weighted` does, and clips it."""
    for e in range(len(vector)):
        out[e] = vector[e] * factor
    if limit < np.inf:
        for e in range(len(vector)):
            out[e] = min(max(out[e], -limit), limit)


@inlined
def _copy(vector: np.ndarray, sums: np.ndarray, begin: int) -> None:
    """Sets sums[begin : begin + width] to a vector of that width."""
    width = len(vector)
    ones = width // VECTOR * VECTOR
    for e in range(0, ones, VECTOR):
        store(sums, begin + e, load(vector, e))
    for e in range(ones, width):
        sums[begin + e] = vector[e]


@inlined
def _add(vector: np.ndarray, sums: np.ndarray, begin: int) -> None:
    """Adds a vector to sums[begin : begin + width]."""
    width = len(vector)
    fours, ones = width // FOUR * FOUR, width // VECTOR * VECTOR
    for e in range(0, fours, FOUR):
        at = begin + e
        sum0, sum1 = load(sums, at), load(sums, at + VECTOR)
        sum2, sum3 = load(sums, at + 2 * VECTOR), load(sums, at + 3 * VECTOR)
        store(sums, at, add(sum0, load(vector, e)))
        store(sums, at + VECTOR, add(sum1, load(vector, e + VECTOR)))
        store(sums, at + 2 * VECTOR, add(sum2, load(vector, e + 2 * VECTOR)))
        store(sums, at + 3 * VECTOR, add(sum3, load(vector, e + 3 * VECTOR)))
    for e in range(fours, ones, VECTOR):
        store(sums, begin + e, add(load(sums, begin + e), load(vector, e)))
    for e in range(ones, width):
        sums[begin + e] += vector[e]


@compiled_fast
def _step(
    kind: int, weights: np.ndarray, moment: np.ndarray, second: np.ndarray, settings: np.ndarray, origin: int,
    first_row: int, width: int, rows: np.ndarray, count: int, sums: np.ndarray,
) -> None:  # fmt: skip
    """Updates the rows rows[:count] of a table. The gradient of rows[k] is sums[k * width : (k + 1) * width].

    With a call for each row, and slices of the arrays, an update took 1.6 to 2 times as long. Where the compiler is to
    take vectors, indices are unsigned: numba checks a signed one for being negative.
    """
    rate, eps, decay = settings[0], settings[1], settings[2]
    beta1, beta2, correct1, correct2 = settings[4], settings[5], settings[6], settings[7]
    one, ones = np.float32(1.0), width // VECTOR * VECTOR
    for k in range(count):
        coming = rows[min(k + PREFETCH_LOOKUPS, count - 1)]
        for e in range(0, width, VECTOR):
            prefetch(weights, origin + coming * width + e)
            if kind in (ADAGRAD, ADAM):
                prefetch(moment, origin + coming * width + e)
            if kind == ADAM:
                prefetch(second, origin + coming * width + e)
        if kind == ROWWISE_ADAGRAD:
            prefetch(moment, first_row + coming)
        row, at, begin = first_row + rows[k], k * width, origin + rows[k] * width
        of_sums, of_row, numbers = np.uint64(at), np.uint64(begin), np.uint64(width)
        if decay != 0.0:
            for e in range(numbers):
                sums[of_sums + e] += decay * weights[of_row + e]
        if kind == ROWWISE_ADAGRAD:
            squares16 = zero()
            for e in range(0, ones, VECTOR):
                squares16 = add(squares16, multiply(load(sums, at + e), load(sums, at + e)))
            squares = reduce_sum(squares16)
            for e in range(ones, width):
                squares += sums[at + e] * sums[at + e]
            now = moment[row] + squares / np.float32(width)
            moment[row] = now
            step = -rate / (np.sqrt(now) + eps)
            for e in range(0, ones, VECTOR):
                store(weights, begin + e, add(load(weights, begin + e), multiply(broadcast(step), load(sums, at + e))))
            for e in range(ones, width):
                weights[begin + e] += step * sums[at + e]
        elif kind == ADAGRAD:
            for e in range(numbers):
                total = sums[of_sums + e]
                moment[of_row + e] += total * total
                weights[of_row + e] -= rate * total / (np.sqrt(moment[of_row + e]) + eps)
        elif kind == ADAM:
            for e in range(numbers):
                total = sums[of_sums + e]
                moment[of_row + e] = beta1 * moment[of_row + e] + (one - beta1) * total
                second[of_row + e] = beta2 * second[of_row + e] + (one - beta2) * total * total
                corrected = np.sqrt(second[of_row + e] / correct2)
                weights[of_row + e] -= rate * (moment[of_row + e] / correct1) / (corrected + eps)
        else:
            for e in range(numbers):
                weights[of_row + e] -= rate * sums[of_sums + e]


class Cursor(NamedTuple):
    """Bag of a table's features at which a round of `update` starts to read lookups."""

    member: int
    """Row of `members`. The row after the table's last member means that no lookup is left."""
    bag: int


@compiled_fast
def update(
    kind: int, weights: np.ndarray, moment: np.ndarray, second: np.ndarray, settings: np.ndarray, tables: np.ndarray,
    members: np.ndarray, tasks: np.ndarray, mean: bool, indices: np.ndarray, offsets: np.ndarray,
    id_weights: np.ndarray | None, gradient: np.ndarray, stride: int, slots: np.ndarray, rows_seen: np.ndarray,
    sums: np.ndarray,
) -> None:  # fmt: skip
    """Makes one optimizer step on each row that the batch read, with the whole gradient of the row (exact).

    The first lookup of a row gives it a slot in `sums`. Its gradients are summed there in the order of the batch,
    whatever the number of threads, so no sort is needed. If all slots are taken, the remaining rows follow in another
    round, which starts at the first lookup that found no slot. docs/internals/kernels.md has a picture.

    Args:
        moment, second: Optimizer state: one number per row for ROWWISE_ADAGRAD, else one per element.
        settings: float32: learning rate, eps, weight decay, limit of a gradient's elements, beta1, beta2, and Adam's
            bias corrections 1 - beta1^t and 1 - beta2^t.
        tables: int64 [T + 1, 5]: offset in `weights`, offset in `slots` and row-wise state, rows, width, first of its
            `members`. The last row holds only the number of members.
        members: int64 [F, 2]: features, ordered by table, and their first column in `gradient`.
        tasks: int64 [N, 3]: table, part, mask. A task updates the rows with `row & mask == part`.
        id_weights: float32 [lookups]. None: each id weighs 1. Numba compiles a loop of its own for it.
        gradient: float32, gradient of the pooled vectors. Row b starts at b * stride.
        slots: int32, row -> slot. UNSEEN for every row of every table, before and after.
        rows_seen: int64, slot -> row. Scratch memory; its length is the number of slots.
        sums: float32, slot -> gradient of the row. Scratch memory for that many rows of any table.
    """
    bags = (len(offsets) - 1) // len(members)
    limit = settings[3]
    for n in range(len(tasks)):
        table, part, mask = tasks[n]
        origin, first_row, rows, width, first_member = tables[table]
        end = Cursor(tables[table + 1, 4], 0)
        vector, scaled = np.empty(width, np.float32), np.empty(width, np.float32)
        room = len(rows_seen)
        begin, after = Cursor(first_member, 0), UNSEEN
        while begin.member < end.member:
            seen = 0
            resume = end  # the first bag with a row that found no slot
            for m in range(begin.member, end.member):
                feature, column = members[m]
                final = offsets[(feature + 1) * bags] - 1
                for b in range(begin.bag if m == begin.member else 0, bags):
                    start, stop = offsets[feature * bags + b], offsets[feature * bags + b + 1]
                    if stop == start:
                        continue
                    share = np.float32(1.0) / np.float32(stop - start) if mean else np.float32(1.0)
                    source = gradient[b * stride + column : b * stride + column + width]
                    for e in range(width):
                        vector[e] = source[e] * share
                    if limit < np.inf and id_weights is None:
                        for e in range(width):
                            vector[e] = min(max(vector[e], -limit), limit)
                    coming_vector = (b + 1) * stride + column
                    for e in range(0, width, VECTOR):
                        prefetch(gradient, coming_vector + e)
                    for j in range(start, stop):
                        prefetch(slots, first_row + indices[min(j + 2 * PREFETCH_LOOKUPS, final)])
                        row = indices[j]
                        if row & mask != part or row < 0 or row >= rows:
                            continue
                        slot = slots[first_row + row]
                        if slot >= 0:
                            if id_weights is None:
                                _add(vector, sums, slot * width)
                            else:
                                _scale(vector, id_weights[j], limit, scaled)
                                _add(scaled, sums, slot * width)
                        elif slot == UNSEEN and seen < room:
                            slots[first_row + row] = seen
                            rows_seen[seen] = row
                            if id_weights is None:
                                _copy(vector, sums, seen * width)
                            else:
                                _scale(vector, id_weights[j], limit, scaled)
                                _copy(scaled, sums, seen * width)
                            seen += 1
                        elif slot == UNSEEN and resume.member == end.member:
                            resume = Cursor(m, b)
            if resume.member < end.member:
                after = DONE  # later rounds skip these rows
            _step(kind, weights, moment, second, settings, origin, first_row, width, rows_seen, seen, sums)
            for k in range(seen):
                slots[first_row + rows_seen[k]] = after
            begin = resume
        for m in range(first_member, end.member if after == DONE else first_member):
            feature = members[m, 0]
            for j in range(offsets[feature * bags], offsets[(feature + 1) * bags]):
                row = indices[j]
                if row & mask == part and 0 <= row < rows:
                    slots[first_row + row] = UNSEEN

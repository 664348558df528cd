"""HalfBags: tables in fp16 on CPU, whose updates are rounded at random so that none is lost."""

import zlib
from typing import Any

import numpy as np
from fbgemm_gpu.split_embedding_configs import SparseType

from pipeline.training.tables import kernels
from pipeline.training.tables.bags import NOTHING, HeldTables, NumbaBags
from pipeline.transforms.kernels.hashing import chain, mix
from storage.compiled import compiled

LARGEST, SMALLEST_NORMAL, SMALLEST = 65_504.0, 2.0**-14, 2.0**-24
LOST = np.uint32((1 << 13) - 1)
"""Bits of a float32 that fp16 lacks."""


class HalfBags(NumbaBags):
    """Tables in fp16, with the optimizer's state in fp32.

    The rows of a batch are copied into fp32 tables that hold these rows alone. There the loops of `NumbaBags` work.
    After an update each number is rounded to one of its two neighbours in fp16, to the nearer one with the larger
    chance, so that the mean of the rounded numbers is the number. FBGEMM's kernel rounds to the nearest on CPU, and an
    update of less than half a step changes nothing. What is drawn depends on table, row, element and update alone: a
    resumed training repeats it, with any number of threads.

    Source:
        Gupta et al. 2015, arXiv:1502.02551, section 3 (stochastic rounding).
    """

    precision = SparseType.FP16

    def __init__(self, embedding_specs: list[Any], **settings: Any) -> None:
        super().__init__(embedding_specs, **settings)
        self.owner = np.array(self.feature_table_map)
        names = self.table_names or [f"{number}" for number in range(len(embedding_specs))]
        self.names = [zlib.crc32(name.encode()) for name in names]

    def hold(self, indices: np.ndarray, offsets: np.ndarray, state: bool) -> HeldTables:
        """See `NumbaBags`."""
        bags = (len(offsets) - 1) // len(self.features)
        owner = np.repeat(self.owner, np.diff(offsets[:: bags or 1])) if bags else self.owner[:0]
        _, first_row, rows, widths, _ = self.tables[:-1].T
        valid = (indices >= 0) & (indices < rows[owner])
        places, inverse = np.unique((first_row[owner] + indices)[valid], return_inverse=True)
        starts = np.searchsorted(places, np.append(first_row, first_row[-1] + rows[-1]))
        counts = np.diff(starts)
        copied = np.full(len(indices), -1, np.int64)  # ids outside stay outside
        copied[valid] = inverse - starts[owner[valid]]
        tables = self.tables.copy()
        tables[:-1, 0] = np.cumsum(counts * widths) - counts * widths
        tables[:-1, 1], tables[:-1, 2] = starts[:-1], counts
        features = self.features.copy()
        features[:, 0], features[:, 1] = tables[self.owner, 0], counts[self.owner]
        weights = np.empty(int((counts * widths).sum()), np.float32)
        held = HeldTables(weights, NOTHING, NOTHING, features, tables, copied, places)
        self._copy(held, held.weights, self._numbers("weights_host"), back=False)
        if not state or self.kind == kernels.SGD:
            return held
        if self.kind == kernels.ROWWISE_ADAGRAD:
            return held._replace(moment=self._numbers("momentum1_host")[places])
        held = held._replace(moment=np.empty_like(held.weights))
        self._copy(held, held.moment, self._numbers("momentum1_host"), back=False)
        if self.kind == kernels.ADAM:
            held = held._replace(second=np.empty_like(held.weights))
            self._copy(held, held.second, self._numbers("second"), back=False)
        return held

    def release(self, held: HeldTables) -> None:
        """See `NumbaBags`."""
        for table, name in enumerate(self.names):
            origin, first, count, width, _ = held.tables[table]
            rows = held.rows[first : first + count] - self.tables[table, 1]
            numbers = held.weights[origin : origin + count * width].reshape(count, width)
            round_half(numbers, numbers.view(np.uint32), rows, name, self.steps)
        self._copy(held, held.weights, self._numbers("weights_host"), back=True)
        if self.kind == kernels.ROWWISE_ADAGRAD:
            self._numbers("momentum1_host")[held.rows] = held.moment
        elif self.kind != kernels.SGD:
            self._copy(held, held.moment, self._numbers("momentum1_host"), back=True)
        if self.kind == kernels.ADAM:
            self._copy(held, held.second, self._numbers("second"), back=True)

    def _copy(self, held: HeldTables, copies: np.ndarray, whole: np.ndarray, back: bool) -> None:
        """Copies the rows of a batch from whole tables, or back into them."""
        for (origin, first, rows, width, _), (begin, start, count, _, _) in zip(
            self.tables[:-1].tolist(), held.tables[:-1].tolist(), strict=True
        ):
            table = whole[origin : origin + rows * width].reshape(rows, width)
            part = copies[begin : begin + count * width].reshape(count, width)
            places = held.rows[start : start + count] - first
            if back:
                table[places] = part
            else:
                part[:] = table[places]


@compiled
def round_half(numbers: np.ndarray, bits: np.ndarray, rows: np.ndarray, name: int, step: int) -> None:
    """Rounds numbers at random to neighbours in fp16. Those that fp16 has stay, and so do NaN and infinity.

    Args:
        numbers: float32 [N, width].
        bits: The same memory as uint32.
        rows: int64 [N], the row of each in its table.
        name: Of the table, as a number.
        step: Number of the update.
    """
    of_table = chain(mix(step), mix(name))
    for k in range(len(rows)):
        state: Any = np.int64(chain(of_table, mix(rows[k])))
        for e in range(numbers.shape[1]):
            drawn, number = mix(state + e), numbers[k, e]
            size = abs(number)
            if not np.isfinite(number):
                continue
            if size < SMALLEST_NORMAL:
                steps = np.float64(size) / SMALLEST
                below = np.floor(steps)
                above = np.float64(drawn >> np.uint64(32)) / 2.0**32 < steps - below
                numbers[k, e] = np.copysign((below + (1.0 if above else 0.0)) * SMALLEST, number)
                continue
            bits[k, e] = (bits[k, e] + (np.uint32(drawn) & LOST)) & ~LOST
            if abs(numbers[k, e]) > LARGEST:
                numbers[k, e] = np.copysign(LARGEST, number)

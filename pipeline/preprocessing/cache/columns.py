"""Turns transformed rows into columns to keep, and columns into the arrays of a chunk."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.preprocessing.cache.entries import RowColumn
from pipeline.preprocessing.cache.keys import LABEL, SESSION, WEIGHT, id_type
from pipeline.preprocessing.epoch import kernels
from pipeline.preprocessing.epoch.memory import Writer
from pipeline.transforms.plan.plan import Plan, TransformedRows

OTHERS = {LABEL: ("labels", "float32"), WEIGHT: ("weights", "float32"), SESSION: ("sessions", "int64")}
"""Column that is no feature -> its array in a chunk, and its type."""


class ColumnParts:
    """Collects the columns of one row group after another, chunk by chunk. Their memory is used again.

    Args:
        plan: The features to collect.
        others: Columns to collect that are no features.
    """

    def __init__(self, plan: Plan, others: Sequence[str]) -> None:
        self.plan = plan
        numbers = dict.fromkeys(plan.dense, "float32") | {name: OTHERS[name][1] for name in others}
        self.numbers = {name: _Buffer(dtype) for name, dtype in numbers.items()}
        self.ids = {feature.name: _Buffer(id_type(feature)) for feature in plan.sparse}
        self.lengths = {feature.name: _Buffer("uint32") for feature in plan.sparse}

    def clear(self) -> None:
        """Drops what was added, such as the part of a row group that a reader could read."""
        for buffer in (*self.numbers.values(), *self.ids.values(), *self.lengths.values()):
            buffer.take()

    def add(self, rows: TransformedRows, others: Mapping[str, npt.NDArray[Any]]) -> None:
        """Adds the features of some rows, and columns that are no features."""
        for i, name in enumerate(self.plan.dense):
            self.numbers[name].append(rows.dense[:, i])
        for feature, column in zip(self.plan.sparse, rows.sparse, strict=True):
            assert column.offsets is not None
            self.ids[feature.name].append(column.values)
            self.lengths[feature.name].append(np.diff(column.offsets))
        for name, values in others.items():
            self.numbers[name].append(values)

    def finish(self, counts: Mapping[str, Mapping[str, int]]) -> dict[str, RowColumn]:
        """Returns the columns. They are valid until the next call of `add`.

        Args:
            counts: Feature -> counts of its ops.
        """
        numbers = {name: RowColumn(buffer.take(), None, counts.get(name, {})) for name, buffer in self.numbers.items()}
        return numbers | {
            name: RowColumn(buffer.take(), shrink_lengths(self.lengths[name].take()), counts[name])
            for name, buffer in self.ids.items()
        }


def shrink_lengths(lengths: npt.NDArray[np.uint32]) -> npt.NDArray[Any] | None:
    """Returns lengths in the fewest bytes that hold them. None: all are 1.

    Example:
        >>> shrink_lengths(np.array([2, 0, 1], np.uint32))
        array([2, 0, 1], dtype=uint8)
        >>> shrink_lengths(np.array([1, 1], np.uint32)) is None
        True
    """
    if (lengths == 1).all():
        return None
    return lengths.astype(np.min_scalar_type(int(lengths.max())))


class _Buffer:
    """An array that grows."""

    def __init__(self, dtype: str) -> None:
        self.values, self.used = np.empty(0, dtype), 0

    def append(self, values: npt.NDArray[Any]) -> None:
        """Adds values, cut to the type of the array."""
        end = self.used + len(values)
        if end > len(self.values):
            grown = np.empty(max(end, 2 * len(self.values)), self.values.dtype)
            grown[: self.used] = self.values[: self.used]
            self.values = grown
        self.values[self.used : end] = values
        self.used = end

    def take(self) -> npt.NDArray[Any]:
        """Returns the values and begins anew."""
        taken, self.used = self.values[: self.used], 0
        return taken


def write_columns(
    chunk: int, plan: Plan, columns: Mapping[str, RowColumn], ids: str, writer: Writer
) -> npt.NDArray[np.float32]:
    """Writes the arrays of a chunk and returns its labels. See `Worker.transform_split`.

    Args:
        columns: Name -> column, of all features and of those of OTHERS that there are.
        ids: Type of ids.
    """
    rows = columns[LABEL].rows
    sparse = [columns[feature.name] for feature in plan.sparse]
    others = {name: array for name, array in OTHERS.items() if name in columns}
    out = writer.add(
        {
            f"{chunk}.dense": ("float32", (rows, len(plan.dense))),
            f"{chunk}.starts": ("int64", (len(sparse) * rows + 1,)),
            f"{chunk}.ids": (ids, (sum(len(column.values) for column in sparse),)),
        }
        | {f"{chunk}.{array}": (dtype, (rows,)) for array, dtype in others.values()}
    )
    for i, name in enumerate(plan.dense):
        out[f"{chunk}.dense"][:, i] = columns[name].values
    for name, (array, _) in others.items():
        out[f"{chunk}.{array}"][...] = columns[name].values
    starts, values, at = out[f"{chunk}.starts"], out[f"{chunk}.ids"], 0
    for f, column in enumerate(sparse):
        if column.lengths is None:
            starts[f * rows : (f + 1) * rows] = np.arange(at, at + rows)
        else:
            kernels.write_starts(column.lengths, starts, f * rows, at)
        values[at : at + len(column.values)] = column.values
        at += len(column.values)
    starts[-1] = at
    return out[f"{chunk}.labels"]

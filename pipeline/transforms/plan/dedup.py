"""Dedup (IKJT): makes a feature once for each run of rows in which the columns that it reads do not change."""

from collections.abc import Collection, Mapping
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.transforms.column import Column
from pipeline.transforms.kernels.hashing import Ids
from pipeline.transforms.ops.op import Counts
from pipeline.transforms.plan.plan import Plan, TransformedRows
from pipeline.transforms.plan.schedule import Seconds
from storage.compiled import compiled


class DedupedFeatures(NamedTuple):
    """Some features of N rows, made once for each of U runs of rows with equal columns.

    Shapes:
        columns: one Column of U lists per feature, in the order of the plan. inverse: int64 [N], the run of each row,
        ascending from 0 to U - 1.
    """

    columns: tuple[Column, ...]
    inverse: Ids


class DedupPlan:
    """A plan split into the features to make once for each run of equal rows, and all others.

    Ops are functions of a row, so the features are the same. Only the counts and seconds are those of fewer rows.

    Args:
        names: Sparse features to make once per run. A run ends when a column that they read changes.
    Source:
        Zhao et al. 2022, arXiv:2211.05239: grouped inverse keyed jagged tensors.
    """

    def __init__(self, plan: Plan, names: Collection[str]) -> None:
        chosen = tuple(feature for feature in plan.sparse if feature.name in names)
        others = tuple(feature for feature in plan.sparse if feature.name not in names)
        self.repeated = plan.model_copy(update={"dense": (), "sparse": chosen}).schedule
        self.others = plan.model_copy(update={"sparse": others})

    def apply(
        self, rows: pa.Table | pa.RecordBatch, sessions: Ids, counts: Counts, seconds: Seconds
    ) -> tuple[TransformedRows, DedupedFeatures]:
        """Returns the features of each raw row and those of each run.

        Args:
            sessions: int64 [N]. A run also ends with its session.
        Raises:
            DataError: If a column holds values of a kind that cannot be read as declared.
        """
        rows = self.others.with_absent_columns(rows)
        read = {name: self.repeated.read(rows, name, seconds) for name in self.repeated.raw}
        starts = run_starts(sessions, read)
        first = np.flatnonzero(starts)
        if len(first) < len(starts):
            read = {name: column.take(first) for name, column in read.items()}
        made = self.repeated.run(rows, counts, seconds, read)
        columns = tuple(made[name] for name in self.repeated.wanted)
        return self.others.apply(rows, counts, seconds), DedupedFeatures(columns, np.cumsum(starts) - 1)


def run_starts(sessions: Ids, columns: Mapping[str, Column]) -> npt.NDArray[np.bool_]:
    """Returns whether a row differs from the previous one in its session or any column, bool [N]. The first one does.

    Example:
        >>> column = Column(np.array([7, 8, 7, 8, 7]), np.array([0, 2, 4, 5, 5]))
        >>> run_starts(np.zeros(4, np.int64), {"ids": column}).tolist()
        [True, False, True, True]
    """
    begins = np.ones(len(sessions), bool)
    begins[1:] = sessions[1:] != sessions[:-1]
    for column in columns.values():
        bits = column.values.view(np.int64)  # numbers as bits too: NaN equals NaN
        if column.offsets is None:
            begins[1:] |= bits[1:] != bits[:-1]
        else:
            mark_changed_lists(bits, column.offsets, begins)
    return begins


@compiled
def mark_changed_lists(values: Ids, offsets: Ids, begins: npt.NDArray[np.bool_]) -> None:
    """Marks the lists that differ from the previous one."""
    for i in range(1, len(begins)):
        before, start, stop = offsets[i - 1], offsets[i], offsets[i + 1]
        if begins[i]:
            continue
        differ = stop - start != start - before
        j = 0
        while not differ and j < stop - start:
            differ = values[before + j] != values[start + j]
            j += 1
        begins[i] = differ

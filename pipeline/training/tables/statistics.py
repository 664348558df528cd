"""Use of the embedding tables, measured on a sample of the training rows for the sharding planner."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel
from torchrec.distributed.types import CacheStatistics

from models.config import SparseFeature
from pipeline.transforms.column import Column

SAMPLE_ROWS = 65_536
"""Training rows in the sample. Reading them takes about a second."""
LOAD_FACTORS = (0.0, 0.001, 0.01, 0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0)
"""Shares of a table in a cache at which miss rates are measured. Between them rates are interpolated linearly."""


class TableUse(BaseModel, frozen=True):
    """How the rows of a table are used in a step."""

    table: str
    ids_per_bag: tuple[float, ...]
    """Per feature: mean number of ids in a bag that is not empty, at least 1."""
    filled_share: tuple[float, ...]
    """Per feature: share of the rows with at least one id."""
    distinct_rows: float
    """Distinct rows of the table that a global batch reads."""
    miss_rates: tuple[float, ...]
    """Share of lookups that miss a cache of the most used rows, at LOAD_FACTORS."""


class MeasuredCache(CacheStatistics):
    """Use of a table in the form that TorchRec's planner reads for cached tables.

    Example:
        >>> use = TableUse(table="t", ids_per_bag=(1.0,), filled_share=(1.0,), distinct_rows=7.0,
        ...     miss_rates=tuple(1.0 - share for share in LOAD_FACTORS))
        >>> MeasuredCache(use).expected_miss_rate(0.25), round(MeasuredCache(use).cacheability, 3)
        (0.75, 0.5)
    """

    def __init__(self, use: TableUse) -> None:
        self.use = use

    @property
    def expected_lookups(self) -> float:
        """Distinct rows of a global batch."""
        return self.use.distinct_rows

    def expected_miss_rate(self, clf: float) -> float:
        """Returns the share of lookups that miss a cache of this share of the rows."""
        return float(np.interp(clf, LOAD_FACTORS, self.use.miss_rates))

    @property
    def cacheability(self) -> float:
        """Area under the curve of miss rates: 0 if few rows get all lookups, 1/2 if all rows are used equally."""
        return float(np.trapezoid(self.use.miss_rates, LOAD_FACTORS))


def measure_table_use(bags: Sequence[SparseFeature], columns: Sequence[Column], batch_rows: int) -> dict[str, TableUse]:
    """Measures the use of each table in a sample of rows.

    Args:
        columns: Ids of each bag over the same N rows.
        batch_rows: Rows of a global batch. A smaller sample counts as one batch.
    Example:
        >>> bag = SparseFeature("user", "user", 4, "sum")
        >>> use = measure_table_use([bag], [Column(np.array([3, 3, 1, 3]), np.array([0, 1, 3, 3, 4]))], 2)["user"]
        >>> use.ids_per_bag, use.filled_share, use.distinct_rows
        ((1.3333333333333333,), (0.75,), 1.5)
    """
    members: dict[str, list[int]] = {}
    for number, bag in enumerate(bags):
        members.setdefault(bag.table, []).append(number)
    found: dict[str, TableUse] = {}
    for table, numbers in members.items():
        lengths = [_lengths(columns[number]) for number in numbers]
        filled = [float(np.mean(counts > 0)) if len(counts) else 0.0 for counts in lengths]
        means = [float(counts[counts > 0].mean()) if counts.any() else 1.0 for counts in lengths]
        found[table] = TableUse(
            table=table, ids_per_bag=tuple(means), filled_share=tuple(filled),
            distinct_rows=_distinct([columns[number] for number in numbers], batch_rows),
            miss_rates=_miss_rates([columns[number] for number in numbers], bags[numbers[0]].rows),
        )  # fmt: skip
    return found


def _lengths(column: Column) -> npt.NDArray[np.int64]:
    assert column.offsets is not None
    return np.diff(column.offsets)


def _distinct(columns: Sequence[Column], batch_rows: int) -> float:
    rows = len(columns[0])
    batches = max(rows // batch_rows, 1)
    size = min(batch_rows, rows)
    counts = [
        len(np.unique(np.concatenate([column.slice(i * size, (i + 1) * size).values for column in columns])))
        for i in range(batches)
    ]
    return float(np.mean(counts)) if rows else 0.0


def _miss_rates(columns: Sequence[Column], rows: int) -> tuple[float, ...]:
    """Ranks rows by the first half of the sample and measures on the second, so the estimate is not biased."""
    half = len(columns[0]) // 2
    seen, tested = (
        np.concatenate([column.slice(start, stop).values for column in columns])
        for start, stop in ((0, half), (half, len(columns[0])))
    )
    if not len(tested):
        return tuple(1.0 - share for share in LOAD_FACTORS)
    ids, counts = np.unique(seen, return_counts=True)
    ranked = ids[np.argsort(-counts, kind="stable")]
    hits = np.concatenate([[0], np.cumsum(_hits(ranked, tested))]) / len(tested)
    unseen = max(rows - len(ranked), 1)
    rates = []
    for share in LOAD_FACTORS:
        cached = round(share * rows)
        spare = max(cached - len(ranked), 0) / unseen  # rows never seen share the free part of the cache
        rates.append(float((1.0 - hits[min(cached, len(ranked))]) * (1.0 - min(spare, 1.0))))
    return tuple(rates)


def _hits(ranked: npt.NDArray[np.int64], tested: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Returns how often each of the ranked rows is looked up."""
    ids, counts = np.unique(tested, return_counts=True)
    if not len(ranked):
        return np.empty(0, np.int64)
    at = np.minimum(np.searchsorted(ids, ranked), len(ids) - 1)
    hits: npt.NDArray[np.int64] = np.where(ids[at] == ranked, counts[at], 0)
    return hits

"""GAUC: how well rows are ranked within each group, such as a user. It works on disk: there may be many groups."""

import shutil
import uuid
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel

from storage.query import connect

STEPS = 1_000_000_000
"""AUCs are added up in whole steps of 1 / STEPS: DuckDB adds groups in any order, and the mean keeps its bits."""
QUERY = """
WITH ranked AS (
    SELECT unit, label, rank() OVER (PARTITION BY unit ORDER BY probability) AS first,
           count(*) OVER (PARTITION BY unit, probability) AS ties
    FROM read_parquet(?)
), units AS (
    SELECT count(*) AS n, sum(label) AS p, sum((2 * first + ties - 1) * label) AS doubled FROM ranked GROUP BY unit
)
SELECT count(*), sum(n), sum(CAST(round((doubled / 2 - p * (p + 1) / 2) / (p * (n - p)) * ?) AS HUGEINT) * n), sum(n)
FROM units WHERE p > 0 AND p < n
"""
BROKEN = "SELECT count(*) - count(*) FILTER (probability >= 0 AND probability <= 1) FROM read_parquet(?)"
"""To DuckDB, NaN is the largest number. A WHERE would skip files by statistics, which leave NaN out."""
WEIGHT_STEPS = 10_000
"""Weights are rounded to whole steps of 1 / WEIGHT_STEPS, for the same reason."""
WEIGHTED = """
WITH ranked AS (
    SELECT unit, label, weight, sum(weight * (1 - label)) OVER (PARTITION BY unit ORDER BY probability) AS upto,
           sum(weight * (1 - label)) OVER (PARTITION BY unit, probability) AS ties
    FROM read_parquet(?)
), units AS (
    SELECT count(*) AS n, sum(label) AS p, sum(weight) AS total, sum(weight * label) AS positive,
           sum(label * weight * (2 * upto - ties)) AS doubled
    FROM ranked GROUP BY unit
)
SELECT count(*), sum(n), sum(CAST(round(doubled / 2 / positive / (total - positive) * ?) AS HUGEINT) * total),
       sum(total)
FROM units WHERE p > 0 AND p < n
"""


class GroupedAuc(BaseModel, frozen=True):
    """Mean AUC over groups, each weighted by its rows or by the sum of their weights."""

    gauc: float | None
    """None: no group has labels of both kinds, or a row has no valid probability."""
    groups: int
    """Groups with labels of both kinds. The others have no AUC and do not count."""
    rows: int
    """Their rows."""
    broken: int = 0
    """Rows of any group whose prediction is no probability. They have no rank."""


class GroupedPredictions:
    """Predictions in files, to be grouped once all rows are scored.

    Source:
        Zhou et al. 2018, arXiv:1706.06978, section 6.3: the AUC of each user, weighted by impressions.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.writer: pq.ParquetWriter | None = None

    def add(
        self,
        groups: pa.ChunkedArray,
        labels: npt.NDArray[np.float64],
        probabilities: npt.NDArray[np.float64],
        weights: npt.NDArray[np.float64] | None = None,
    ) -> None:
        """Adds rows, with weights for all or for none. Rows without a group are dropped."""
        rows = pa.table({"unit": groups, "label": labels.astype(np.int64), "probability": probabilities})
        if weights is not None:
            rows = rows.append_column("weight", pa.array(np.rint(weights * WEIGHT_STEPS).astype(np.int64)))
        if self.writer is None:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.writer = pq.ParquetWriter(self.folder / f"{uuid.uuid4().hex}.parquet", rows.schema)
        self.writer.write_table(rows.filter(pc.is_valid(rows["unit"])))

    def close(self) -> None:
        """Closes the file. Its rows count from here on."""
        if self.writer is not None:
            self.writer.close()
            self.writer = None

    def auc(self) -> GroupedAuc:
        """Computes GAUC of all rows of the folder, and deletes the folder."""
        self.close()
        temporary = self.folder.with_name(self.folder.name + "-spill")
        try:
            with connect([self.folder] if self.folder.exists() else [], temporary, "1GB") as connection:
                files = [str(path.resolve()) for path in self.folder.glob("*.parquet")]
                weighted = bool(files) and "weight" in pq.read_schema(files[0]).names
                query = WEIGHTED if weighted else QUERY
                found = connection.execute(query, [files, STEPS]).fetchone() if files else None
                broken = connection.execute(BROKEN, [files]).fetchall()[0][0] if files else 0
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(self.folder, ignore_errors=True)
        groups, rows, total, weight = found if found is not None else (0, 0, 0, 0)
        gauc = int(total) / STEPS / int(weight) if rows and not broken else None
        return GroupedAuc(gauc=gauc, groups=groups, rows=int(rows or 0), broken=broken)

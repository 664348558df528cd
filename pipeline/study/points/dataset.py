"""Writes the rows of a workload to files that readers can read."""

from pathlib import Path

from pipeline.data.selection import Selection
from pipeline.preprocessing.dataset import DataSpec
from pipeline.study.points.config import Workload
from pipeline.study.points.table import DAY, LABEL, make_schema, write_workload
from pipeline.transforms.plan.plan import build_plan

EPOCH_BATCHES = 32
"""Batches of an epoch. With fewer, the start of an epoch would count too much."""
EPOCH_VALUES = 1 << 26
"""Most numbers and ids of an epoch, unless four batches have more. Writing them takes longer than measuring."""


def choose_rows(workload: Workload, batch_rows: int) -> int:
    """Returns the number of rows to read, epoch after epoch, while a point is measured.

    Example:
        >>> choose_rows(Workload(), 2_048), choose_rows(Workload(dense_features=4_096, sparse_features=128), 2_048)
        (65536, 12288)
    """
    most = EPOCH_VALUES // (workload.dense_features + workload.sparse_features * workload.lookups) // batch_rows
    return batch_rows * max(min(EPOCH_BATCHES, most), 4)


def write_dataset(workload: Workload, rows: int, folder: Path, seed: int) -> DataSpec:
    """Writes a table with this many rows below the folder, unless it exists. Returns how to read it."""
    warehouse, snapshot = write_workload(workload, rows, folder, seed)
    return DataSpec(
        warehouse=warehouse.config, home=str(folder), snapshot=snapshot, selection=Selection(days=(DAY,)),
        plan=build_plan(make_schema(workload), warehouse.schema(snapshot)), label=LABEL,
    )  # fmt: skip

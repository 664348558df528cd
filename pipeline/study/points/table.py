"""The rows of a workload in a table, for readers. They have to hash and truncate them, like rows of logs."""

import datetime
import hashlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa

from pipeline.data.selection import Selection
from pipeline.preprocessing.dataset import DataSpec
from pipeline.study.points.config import Workload
from pipeline.study.points.workload import draw_batches, table_sizes
from pipeline.transforms.ops.dense import FillNull, Standardise
from pipeline.transforms.ops.sparse import FirstX, SigridHash
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import DenseGroup, FeatureSchema, SparseGroup
from storage.config import WarehouseConfig
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

DAY = datetime.date(2025, 1, 6)
LABEL = "label"
LAYOUT = 1
"""Version of the generator. Increase it when the rows change, so that old tables are not reused."""
CHUNK_VALUES = 1 << 22
"""Numbers and ids per chunk and row group."""
MOST_ROWS = 65_536
"""Rows of a row group at most, as in other tables."""
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
    """Writes one day with this many rows to an embedded catalog in the folder, unless it is already there.

    Returns:
        How to read it.
    """
    inputs = f"{LAYOUT} {rows} {seed} {workload.model_dump_json()}"
    identity = hashlib.sha256(inputs.encode()).hexdigest()[:16]
    table = f"workload_{identity}"
    width = workload.dense_features + workload.sparse_features * workload.lookups
    group = max(min(CHUNK_VALUES // max(width, 1), MOST_ROWS), 1)
    warehouse = Warehouse(WarehouseConfig(row_group_rows=group, file_rows=4 * group), folder)
    if warehouse.written_days(table).get(DAY) == identity:
        snapshot = warehouse.current(table)
    else:
        uncut = workload.model_copy(update={"truncation": 2**31 - 1})
        schema, chunks = next(_chunks(uncut, 1, 1, seed)).schema, _chunks(uncut, rows, group, seed)
        snapshot = replace_days(warehouse, table, {DAY: identity}, schema, chunks, rows)
    return DataSpec(
        warehouse=warehouse.config, home=str(folder), snapshot=snapshot, selection=Selection(days=(DAY,)),
        plan=build_plan(make_schema(workload), warehouse.schema(snapshot)), label=LABEL,
    )  # fmt: skip


def make_schema(workload: Workload) -> FeatureSchema:
    """Makes the schema for reading the table: the features of `make_plan`, with lists truncated before hashing."""
    scaled = (Standardise(mean=0.0, std=1.0), FillNull())  # no change, but the usual cost
    dense = (DenseGroup(columns=("dense_*",), transforms=scaled),) if workload.dense_features else ()
    cut = FirstX(limit=workload.truncation)
    if workload.hash_spread is None:
        hashed: tuple[SparseGroup, ...] = (
            SparseGroup(columns=("sparse_*",), transforms=(cut, SigridHash(size=workload.hash_size))),
        )
    else:
        hashed = tuple(
            SparseGroup(columns=(f"sparse_{i}",), transforms=(cut, SigridHash(size=size)))
            for i, size in enumerate(table_sizes(workload))
        )
    return FeatureSchema(label=LABEL, dense=dense, sparse=hashed)


def _chunks(workload: Workload, rows: int, chunk_rows: int, seed: int) -> Iterator[pa.RecordBatch]:
    for number, start in enumerate(range(0, rows, chunk_rows)):
        yield _chunk(workload, min(chunk_rows, rows - start), seed + number)


def _chunk(workload: Workload, rows: int, seed: int) -> pa.RecordBatch:
    (batch,) = draw_batches(workload, rows, 1, seed)
    columns: dict[str, pa.Array] = {"day": pa.array([DAY] * rows, pa.date32())}
    columns[LABEL] = pa.array(batch.labels.numpy().astype(np.int32))
    columns |= {f"dense_{i}": pa.array(column) for i, column in enumerate(batch.dense.T.contiguous().numpy())}
    for name, lists in batch.sparse.to_dict().items():
        columns[name] = pa.ListArray.from_arrays(pa.array(lists.offsets().numpy(), pa.int32()), lists.values().numpy())
    return pa.record_batch(columns)

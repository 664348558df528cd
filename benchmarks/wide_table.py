"""Wide tables as in feature stores: a model reads only some of many columns. Reproducible by seed.

Source:
    Zhao et al. 2022, arXiv:2108.09373, table of features: the lists of its three models have 26.0, 25.6 and 19.6 ids on
    average. The paper does not give the shape of the distribution. A power law is assumed.
"""

import datetime
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.data.selection import Selection
from pipeline.preprocessing.dataset import DataSpec
from pipeline.transforms.ops.dense import FillNull, Log, Standardise
from pipeline.transforms.ops.sparse import FirstX, SigridHash
from pipeline.transforms.plan.plan import build_plan
from pipeline.transforms.schema import DenseGroup, FeatureSchema, SparseGroup
from storage.config import WarehouseConfig
from storage.reader import SnapshotRef
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

LIMIT, SIZE = 20, 100_000
"""Ids kept of each list, and rows of the embedding table they are hashed into."""
MEAN, STD = 1.25, 0.75
"""Parameters for `standardise`."""
DAY = datetime.date(2025, 1, 6)
LABEL = "label"
LAYOUT = 2
"""Increased when the generator changes, so that older folders are not reused."""
CHUNK_ROWS = 32_768
LONGEST = 1_000
"""Maximum ids of a list."""
WAREHOUSE = WarehouseConfig(file_rows=131_072)
"""The default layout with smaller files, which take less memory to write."""


@dataclass(frozen=True)
class Columns:
    """The columns of a table, apart from day and label.

    Args:
        table: Its name in the warehouse.
        lists: Number of lists of ids that are read.
        shortest: Minimum length of a list that is not empty. It decides the mean.
        numbers: Number of numeric columns that are read.
        unread: Number of columns that are not read, half of them numeric, half of them short lists.
    """

    table: str
    lists: int
    shortest: float
    numbers: int
    unread: int

    @property
    def list_names(self) -> tuple[str, ...]:
        """Names of the list columns that are read."""
        return tuple(f"list_{i}" for i in range(self.lists))

    @property
    def number_names(self) -> tuple[str, ...]:
        """Names of the numeric columns that are read."""
        return tuple(f"num_{i}" for i in range(self.numbers))


WIDE = Columns("wide", lists=26, shortest=4.65, numbers=13, unread=150)
"""Lists of 26 ids on average. `first_x` leaves 10."""
NARROW = Columns("narrow", lists=8, shortest=1.6, numbers=4, unread=0)
"""Fast to generate for many rows: lists of 10 ids on average. `first_x` leaves 5."""
LIST_COLUMNS, NUMBER_COLUMNS = WIDE.list_names, WIDE.number_names
READ = (*LIST_COLUMNS, *NUMBER_COLUMNS, LABEL)


@dataclass(frozen=True)
class WideTable:
    """A finished table in a folder.

    Args:
        folder: Home of its warehouse.
        rows: Number of rows.
        columns: Its columns.
        snapshot: Its only snapshot.
    """

    folder: Path
    rows: int
    columns: Columns
    snapshot: SnapshotRef

    @cached_property
    def warehouse(self) -> Warehouse:
        """Opens the warehouse that wrote it."""
        return Warehouse(WAREHOUSE, self.folder)

    @cached_property
    def spec(self) -> DataSpec:
        """Returns the spec: first_x and sigrid_hash for lists; log, standardise and fill_null for numbers."""
        lists, numbers = (
            (FirstX(limit=LIMIT), SigridHash(size=SIZE)),
            (Log(), Standardise(mean=MEAN, std=STD), FillNull()),
        )
        features = FeatureSchema(
            label=LABEL,
            dense=(DenseGroup(columns=self.columns.number_names, transforms=numbers),),
            sparse=(SparseGroup(columns=self.columns.list_names, transforms=lists),),
        )
        return DataSpec(
            warehouse=self.warehouse.config, home=str(self.folder), snapshot=self.snapshot,
            selection=Selection(days=(DAY,)), plan=build_plan(features, self.warehouse.schema(self.snapshot)),
            label=LABEL,
        )  # fmt: skip

    @cached_property
    def files(self) -> list[str]:
        """Returns the paths of its Parquet files, in table order."""
        fragments = self.warehouse.reader(self.snapshot, [LABEL]).fragments()
        return list(dict.fromkeys(fragment.path.removeprefix("file://") for fragment in fragments))


def wide_table(folder: Path, rows: int, columns: Columns = WIDE, seed: int = 1) -> WideTable:
    """Returns the table with this many rows. Makes it if the folder has no complete one."""
    made = folder / "complete.json"
    wanted = {"layout": LAYOUT, "rows": rows, "columns": asdict(columns), "seed": seed}
    if made.exists():
        found = json.loads(made.read_text(encoding="utf-8"))
        if {key: found.get(key) for key in wanted} == wanted:
            return WideTable(folder, rows, columns, SnapshotRef(table=columns.table, snapshot_id=found["snapshot_id"]))
        made.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    schema = _chunk(np.random.default_rng(seed), 1, columns).schema
    snapshot = replace_days(
        Warehouse(WAREHOUSE, folder),
        columns.table,
        {DAY: f"{LAYOUT} {rows} {seed}"},
        schema,
        _chunks(seed, rows, columns),
        rows,
    )
    made.write_text(json.dumps(wanted | {"snapshot_id": snapshot.snapshot_id}), encoding="utf-8")
    return WideTable(folder, rows, columns, snapshot)


def _chunks(seed: int, rows: int, columns: Columns) -> Iterator[pa.RecordBatch]:
    random = np.random.default_rng(seed)
    for start in range(0, rows, CHUNK_ROWS):
        yield _chunk(random, min(CHUNK_ROWS, rows - start), columns)


def _chunk(random: np.random.Generator, rows: int, columns: Columns) -> pa.RecordBatch:
    arrays: dict[str, pa.Array] = {"day": pa.array([DAY] * rows, pa.date32())}
    for i, name in enumerate(columns.list_names):
        arrays[name] = _lists(random, rows, columns.shortest, LONGEST, ids=10 ** (4 + i % 4))
    for name in columns.number_names:
        arrays[name] = _numbers(random, rows)
    for i in range(columns.unread):
        arrays[f"unread_{i}"] = _numbers(random, rows) if i % 2 else _lists(random, rows, 1.0, 10, ids=10_000)
    arrays[LABEL] = pa.array((random.random(rows) < 0.1).astype(np.int32))
    return pa.record_batch(arrays)


def _lists(random: np.random.Generator, rows: int, shortest: float, longest: int, ids: int) -> pa.Array:
    """Lists with lengths from a power law of exponent 1. One in ten is empty, one in a hundred null."""
    lengths = np.minimum(shortest / (1.0 - random.random(rows)), longest).astype(np.int32)
    lengths[random.random(rows) < 0.1] = 0
    absent = random.random(rows) < 0.01
    lengths[absent] = 0
    offsets = np.zeros(rows + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    values = pa.array(_zipf(random, int(offsets[-1]), ids))
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=pa.array(absent))


def _zipf(random: np.random.Generator, count: int, ids: int, exponent: float = 1.2) -> npt.NDArray[np.int64]:
    """Draws ids in [0, ids) with probability about (id + 1) ** -exponent, by the inverse of a power law."""
    power = 1.0 - exponent
    return (((ids**power - 1.0) * random.random(count) + 1.0) ** (1.0 / power)).astype(np.int64) - 1


def _numbers(random: np.random.Generator, rows: int) -> pa.Array:
    """Skewed numbers with two decimals, one in ten null."""
    return pa.array(np.round(random.lognormal(1.0, 1.0, rows), 2), mask=random.random(rows) < 0.1)

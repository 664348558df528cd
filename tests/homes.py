"""Small homes for tests: a workspace by a few keys of a config, days of a table, and logs of events."""

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import yaml

from pipeline.config import load
from pipeline.jobs.workspace import Workspace
from storage.config import WarehouseConfig
from storage.reader import SnapshotRef
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse

CONFIG = "configs/smoke.yaml"
LEARNER: dict[str, Any] = {
    "warehouse": {"row_group_rows": 150},
    "model": {"embedding_width": 4, "bottom_mlp": [8], "top_mlp": [8]},
    "training": {"batch_rows": 64, "epochs": 8, "dense_learning_rate": 0.02, "world_size": 1, "threads_per_rank": 1},
    "preprocessing": {"workers": 1},
    "evaluation": {"workers": 1, "importance_rows": None},
}
"""Sections of a config with which one rank learns some thousand rows in seconds."""
START = datetime.datetime(2025, 3, 1)


def open_smoke(overrides: Mapping[str, Any] | None = None, **keys: Any) -> Workspace:
    """A workspace of configs/smoke.yaml. Among `keys`, `training__epochs` is training.epochs."""
    return Workspace(load(CONFIG, {**(overrides or {}), **{key.replace("__", "."): keys[key] for key in keys}}))


def write_config(folder: Path, values: Mapping[str, Any]) -> str:
    """Writes a config below the folder, named like what it describes, and returns its path."""
    path = folder / f"{values['name']}.yaml"
    path.write_text(yaml.safe_dump(dict(values)), encoding="utf-8")
    return str(path)


def rows_of(day: datetime.date, count: int = 1, **columns: Any) -> pa.Table:
    """Rows of a day with these columns."""
    return pa.table({"day": pa.array([day] * count, pa.date32()), **columns})


def write_days(
    warehouse: Warehouse,
    *tables: pa.Table,
    name: str = "events",
    identity: str = "i",
    chunk_rows: int | None = None,
    **more: Any,
) -> SnapshotRef:
    """Replaces all days that occur in the rows, as an ingest does. `more` is passed on."""
    rows = pa.concat_tables(tables)
    days = dict.fromkeys(rows["day"].unique().to_pylist(), identity)
    return replace_days(warehouse, name, days, rows.schema, rows.to_batches(chunk_rows), rows.num_rows, **more)


def files_of(home: Path, table: str, *days: str) -> list[Path]:
    """Returns the data files of some days, as the table names them. Copies of a home write into its folders, too."""
    scan = Warehouse(WarehouseConfig(), home / "warehouse").table(table).scan()
    files = [Path(one.file.file_path.removeprefix("file://")) for one in scan.plan_files()]
    return sorted(file for file in files if file.parent.name.removeprefix("day=") in days)


def read_rows(
    warehouse: Warehouse, snapshot: SnapshotRef | str, columns: Sequence[str] | None = None, row_filter: Any = None
) -> pa.Table:
    """All rows of a snapshot, or of a table as it is now. Columns: all of them by default."""
    pinned = warehouse.current(snapshot) if isinstance(snapshot, str) else snapshot
    reader = warehouse.reader(pinned, columns or warehouse.schema(pinned).names, row_filter)
    return pa.concat_tables([reader.read(fragment) for fragment in reader.fragments()])


def moments(seconds: np.ndarray) -> pa.Array:
    """Times so many seconds after the start."""
    return pa.array([START + datetime.timedelta(seconds=int(one)) for one in seconds], pa.timestamp("us"))


def draw_events(day: int, rows: int, seed: int, users: int = 9, **columns: Any) -> pd.DataFrame:
    """Events or samples of a day in January 2024, of some users, no two at one time."""
    random = np.random.default_rng(seed)
    seconds = pd.to_timedelta(random.permutation(86_400)[:rows], unit="s")
    times = (pd.Timestamp(2024, 1, day) + seconds).astype("datetime64[us]")
    whose = pd.array(random.integers(0, users, rows), dtype="Int64")
    return pd.DataFrame({"user": whose, "at": times, "item": random.integers(0, 50, rows), **columns})

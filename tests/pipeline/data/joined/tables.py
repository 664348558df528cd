"""Rows in a table, and all rows of a reader."""

from typing import Any

import pyarrow as pa

from storage.reader import SnapshotRef
from storage.snapshot.writing import replace_days
from storage.warehouse import Warehouse


def stored(warehouse: Warehouse, rows: pa.Table, name: str = "t") -> SnapshotRef:
    days = dict.fromkeys(rows.column("day").unique().to_pylist(), "x")
    return replace_days(warehouse, name, days, rows.schema, rows.to_batches(), rows.num_rows)


def read(reader: Any) -> pa.Table:
    parts = [reader.read(fragment) for fragment in reader.fragments()]
    return pa.concat_tables([reader.empty(), *parts])

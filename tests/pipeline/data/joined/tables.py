"""Rows in a table, and all rows of a reader."""

from typing import Any

import pyarrow as pa

from storage.reader import SnapshotRef
from storage.warehouse import Warehouse
from tests.homes import write_days


def stored(warehouse: Warehouse, rows: pa.Table, name: str = "t") -> SnapshotRef:
    return write_days(warehouse, rows, name=name)


def read(reader: Any) -> pa.Table:
    parts = [reader.read(fragment) for fragment in reader.fragments()]
    return pa.concat_tables([reader.empty(), *parts])

"""What callers of storage configure and agree on. Imports nothing heavy."""

import re
from collections.abc import Mapping

from pydantic import BaseModel, PositiveInt

NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")
"""Names of tables and columns."""
DAY = "day"
"""The partition column of every table, an Iceberg date."""


class WarehouseConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where the tables are and how their files are written."""

    catalog: Mapping[str, str] = {}
    """Properties of a pyiceberg catalog (`type`, `uri`, `warehouse`, credentials); empty: SQLite and local files."""
    namespace: str = "dlrm"
    """Iceberg namespace that holds our tables."""
    codec: str = "zstd"
    """Parquet compression of new tables; existing tables keep their own layout."""
    row_group_rows: PositiveInt = 65_536
    """Rows of a Parquet row group in new tables: the unit of work of a reader."""
    file_rows: PositiveInt = 262_144
    """Rows held in memory while writing new tables; a day with more rows becomes several files."""

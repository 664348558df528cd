"""What callers of storage configure and agree on. Imports nothing heavy."""

import hashlib
import re
from collections.abc import Mapping
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pydantic import BaseModel, PositiveInt, field_validator

NAME = re.compile(r"^[A-Za-z_][A-Za-z0-9_]{0,127}$")
"""Names of tables and columns."""
DAY = "day"
"""The partition column of every table, an Iceberg date."""

SCHEMES = ("s3", "s3a", "gs")
"""Stores whose paths are a bucket and a key. pyiceberg knows the names of their properties."""
PARTS = ("features", "held", "profile", "quarantine", "scores")
"""Suffixes of the tables that belong to a table of samples, such as `ads_profile` to `ads`."""

LONGEST_LABEL = 30
"""Characters of a text that are shown in a name made of it."""


def find_owner(name: str) -> str | None:
    """Returns the table that a table belongs to by its name, or None for a table of samples.

    Example:
        >>> find_owner("ads_profile"), find_owner("ads")
        ('ads', None)
    """
    owner, _, part = name.rpartition("_")
    return owner if owner and part in PARTS else None


def name_apart(owner: str, what: str) -> str:
    """Returns a name for one of several things that belong to a table, such as a model that is trained on it.

    Args:
        what: Any text. Other text gives another name.
    Example:
        >>> name_apart("ads", "small model")
        'ads__small_model_3f529422'
    """
    label = re.sub(r"[^A-Za-z0-9]+", "_", what).strip("_")[:LONGEST_LABEL]
    return f"{owner}__{label}_{hashlib.sha256(what.encode()).hexdigest()[:8]}"


class StorageConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where trainings keep what another machine needs to continue them."""

    path: str | None = None
    """Address in an object store, such as s3://bucket/trainings, for checkpoints and exported weights. Ranks of Ray
    on several hosts then need no common folder, and any machine continues a training. None: they stay below `home`."""

    @field_validator("path")
    @classmethod
    def _known_store(cls, path: str | None) -> str | None:
        scheme, separator, rest = (path or "").partition("://")
        if path is not None and not (separator and scheme in SCHEMES and rest.strip("/")):
            known = " or ".join(f"{one}://bucket/folder" for one in SCHEMES)
            raise ValueError(f"an address such as {known}")
        return path


class TableConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """An Iceberg table that another engine writes. It is only read."""

    table: str
    """`namespace.table` in the catalog of `warehouse.catalog`. Or `catalog.namespace.table`: a catalog of that name in
    pyiceberg's own file or variables, or in the SQL database of `warehouse.catalog`."""
    branch: str | None = None
    """Branch or tag that is read. None: the table's main branch."""
    day_column: str = DAY
    """Column that gives the day: a date, a timestamp, text or a number such as 20250131."""
    day_zone: str = "UTC"
    """Time zone of the days of a timestamp with a zone, such as America/Los_Angeles."""
    date_format: tuple[str, ...] | None = None
    """strptime formats of text and numbers in the day column. The first that fits a value counts. None: ISO dates and
    timestamps, or numbers such as 20250131. A timestamp with a zone has its day in `day_zone`."""

    @field_validator("table")
    @classmethod
    def _has_namespace(cls, table: str) -> str:
        if len(parts := table.split(".")) < 2 or not all(parts):
            raise ValueError("a name such as namespace.table or catalog.namespace.table")
        return table

    @field_validator("day_zone")
    @classmethod
    def _known_zone(cls, zone: str) -> str:
        try:
            ZoneInfo(zone)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise ValueError("a time zone such as UTC or Europe/Berlin") from None
        return zone


class WarehouseConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where the tables are and how their files are written."""

    catalog: Mapping[str, str] = {}
    """Properties of a pyiceberg catalog (`type`, `uri`, `warehouse`), and access to object stores (`s3.endpoint` and so
    on). Without a catalog: SQLite and local files."""
    namespace: str = "dlrm"
    """Iceberg namespace that holds our tables."""
    tables: Mapping[str, TableConfig] = {}
    """Name -> a table of another engine, to join features from. It is only read. `source.table` names that of the
    samples."""
    codec: str = "zstd"
    """Parquet compression of new tables; existing tables keep their own layout."""
    row_group_rows: PositiveInt = 65_536
    """Rows of a Parquet row group in new tables: the unit of work of a reader."""
    file_rows: PositiveInt = 262_144
    """Rows held in memory while writing new tables; a day with more rows becomes several files."""

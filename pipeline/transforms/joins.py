"""Sources of columns that are joined to the rows: the newest values of a key, or its history, as of a row's time."""

import fnmatch
from typing import ClassVar, Self

from pydantic import BaseModel, NonNegativeInt, PositiveInt, model_validator

from pipeline.data.columns import Names
from pipeline.data.filters import check_filter
from pipeline.errors import ConfigError


class _Source(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Files or a table with columns to join by key."""

    section: ClassVar[str]
    """Name of its list in the config."""

    path: str | tuple[str, ...] | None = None
    """Parquet or CSV files: a path, a glob or a list of them. Relative paths start at the checkout, or at the
    current folder."""
    table: str | None = None
    """Another table of the warehouse, in place of files."""
    on: Names
    """Key columns, present in the rows and in the source."""
    columns: Names = ("*",)
    """Names or patterns of the columns to add."""
    prefix: str = ""
    """Prefix of the names of the added columns."""
    delay_seconds: NonNegativeInt = 0
    """Time that values take to arrive. A row reads the source as it was so long before the row's time. Needs
    `as_of`."""

    @model_validator(mode="after")
    def _one_source(self) -> Self:
        if (self.path is None) == (self.table is None):
            raise ConfigError(self.section, "either `path` or `table`", "both or neither", "Give exactly one.")
        return self

    @property
    def name(self) -> str:
        """Name of the source in logs and errors: the table or the paths."""
        return self.table or (self.path if isinstance(self.path, str) else ", ".join(self.path or ()))

    @property
    def place(self) -> str:
        """The source as an error names it."""
        return f"{self.section} '{self.name}'"

    def may_add(self, pattern: str) -> bool:
        """Whether a column that has this name or matches this pattern may be added."""
        names = [f"{self.prefix}{name}" for name in self.columns]
        return any(fnmatch.fnmatchcase(pattern, name) or fnmatch.fnmatchcase(name, pattern) for name in names)


class FeatureJoin(_Source):
    """A feature source: files or a table with columns that are joined to the rows by key.

    A key is unique in the source, or in each day of it (`day_column`), or has a row for each time at which its values
    changed (`valid_from`).
    """

    section: ClassVar[str] = "features.joined"

    day_column: str | None = None
    """Column of the source (date, timestamp or ISO text) with the day of the rows to join. A process then holds only
    the days that it reads. None joins the source to all days."""
    lag_days: NonNegativeInt = 0
    """Days between a row and the source's day that it reads. With 0, an aggregate over a day includes what happens
    after the row. 1 reads the day before. Needs `day_column`."""
    valid_from: str | None = None
    """Column of the source (timestamp or date) with the time since when a row's values hold. Each row then reads the
    newest values of its key that held at its time, and never later ones. Needs `as_of`."""
    as_of: str | None = None
    """Column of the rows (timestamp or date) with their time. Needs `valid_from`."""
    stored: bool = False
    """Whether `flows.enrich` has backfilled the columns. They are then read from the table and not joined."""

    @model_validator(mode="after")
    def _times_fit(self) -> Self:
        if self.table is not None and self.day_column not in (None, "day"):
            raise ConfigError(
                self.place, "day_column 'day', the partition column of a table, or none",
                f"'{self.day_column}'", "Correct day_column.",
            )  # fmt: skip
        if self.lag_days and self.day_column is None:
            raise ConfigError(self.place, "`day_column` with `lag_days`", "none", "Name the column of the day.")
        if (self.as_of is None) != (self.valid_from is None):
            raise ConfigError(self.place, "`as_of` together with `valid_from`", "one of them", "Add the other one.")
        if self.as_of is not None and self.day_column is not None:
            raise ConfigError(self.place, "`day_column` or `as_of`", "both", "Leave out one.")
        if self.delay_seconds and self.as_of is None:
            raise ConfigError(self.place, "`as_of` with `delay_seconds`", "none", "Name the column of the rows' time.")
        return self

    @property
    def time(self) -> str | None:
        """Column of the source with the time of its rows."""
        return self.valid_from


class History(_Source):
    """An event log from which the last events of a row's key, before the row's time, are cut when the row is read.

    Each added column is a list with a value for each event, the newest first, so that `first_x` keeps the newest. Of
    equal times, the event that comes later in the log counts as newer. The log is stored once, and each model cuts the
    columns and the length that it needs.

    Source:
        Versioned Late Materialization, arXiv 2604.24806.
    """

    section: ClassVar[str] = "features.histories"
    day_column: ClassVar[None] = None
    lag_days: ClassVar[int] = 0
    stored: ClassVar[bool] = False

    time: str
    """Column of the log (timestamp or date) with the time of an event."""
    as_of: str
    """Column of the rows (timestamp or date) with their time. A row reads only events before it, less
    `delay_seconds`."""
    last: PositiveInt = 100
    """Most events of a row: the newest ones."""
    where: str | None = None
    """Filter of the events, such as `action = 'finish'`. It counts before `last`."""

    @model_validator(mode="after")
    def _filter_reads(self) -> Self:
        if self.where is not None:
            check_filter(self.where, None)
        return self

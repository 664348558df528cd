"""Sources of columns that are joined to the rows: values, histories and windows of a key, as of a row's time."""

import fnmatch
import os.path
from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, model_validator

from pipeline.errors import ConfigError
from pipeline.marks import APART
from storage.filters import check_filter
from storage.names import MOST_SECONDS, Names, require_both_times


def share_files(*paths: str | tuple[str, ...] | None) -> bool:
    """Whether two spellings of paths have one in common, as far as they tell without the disk.

    Example:
        >>> share_files("logs/*.csv", ("./logs/*.csv", "more.csv")), share_files("logs/*.csv", None)
        (True, False)
    """
    one, other = ({*map(os.path.normpath, (path,) if isinstance(path, str) else path or ())} for path in paths)
    return not one.isdisjoint(other)


class _Source(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Files or a table with columns to join by key."""

    section: ClassVar[str]
    """Name of its list in the config."""

    path: str | tuple[str, ...] | None = None
    """Files of any format: a path, a glob or a list of them, relative ones as of `source.path`."""
    table: str | None = None
    """Another table of the warehouse, in place of files."""
    on: Names
    """Key columns, present in the rows and in the source."""
    columns: Names = ("*",)
    """Names or patterns of the columns to add."""
    prefix: str = ""
    """Prefix of the names of the added columns."""
    delay_seconds: int = Field(default=0, ge=0, le=MOST_SECONDS)
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

    def added_names(self) -> list[str]:
        """Returns names or patterns of the columns that are added."""
        return [f"{self.prefix}{name}" for name in self.columns]

    def may_add(self, pattern: str) -> bool:
        """Whether a column that has this name or matches this pattern may be added."""
        names = self.added_names()
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
    """Column of the rows (timestamp or date) with their time. A date of the rows is the beginning of its day, a date of
    the source the end of its day. Needs `valid_from`."""
    stored: Annotated[bool, APART] = False
    """Whether `flows.enrich` has materialized the columns. They are then read from the table and not joined."""

    @model_validator(mode="after")
    def _times_fit(self) -> Self:
        if self.table is not None and self.day_column not in (None, "day"):
            raise ConfigError(
                self.place, "day_column 'day', the partition column of a table, or none",
                f"'{self.day_column}'", "Correct day_column.",
            )  # fmt: skip
        if self.lag_days and self.day_column is None:
            raise ConfigError(self.place, "`day_column` with `lag_days`", "none", "Name the column of the day.")
        require_both_times(self.place, self.valid_from, self.as_of, self.delay_seconds)
        if self.as_of is not None and self.day_column is not None:
            raise ConfigError(self.place, "`day_column` or `as_of`", "both", "Leave out one.")
        return self

    @property
    def time(self) -> str | None:
        """Column of the source with the time of its rows."""
        return self.valid_from


class _EventLog(_Source):
    """A log of events that are read as of a row's time."""

    day_column: ClassVar[None] = None
    lag_days: ClassVar[int] = 0

    time: str
    """Column of the log (timestamp or date) with the time of an event."""
    as_of: str
    """Column of the rows (timestamp or date) with their time. A row reads only events before it, less
    `delay_seconds`. A date of the rows is the beginning of its day, a date of the log the end of its day."""
    where: str | None = None
    """Filter of the events, such as `action = 'finish'`. Only those that it keeps are seen."""
    stored: Annotated[bool, APART] = False
    """Whether `flows.enrich` has materialized the columns. They are then read from the table and not computed."""

    @model_validator(mode="after")
    def _filter_reads(self) -> Self:
        if self.where is not None:
            check_filter(self.where, None)
        return self


class History(_EventLog):
    """An event log from which the last events of a row's key, before the row's time, are cut when the row is read.

    Each added column is a list with a value for each event, the newest first, so that `first_x` keeps the newest. Of
    equal times, the event that comes later in the log counts as newer. The log is stored once, and each model cuts the
    columns and the length that it needs.

    Source:
        Versioned Late Materialization, arXiv 2604.24806.
    """

    section: ClassVar[str] = "features.histories"

    last: int = Field(default=100, ge=1, le=1_000_000)
    """Most events of a row: the newest ones."""


class EventWindow(_EventLog):
    """An event log of which the events of a row's key in spans of time before the row are counted, summed or averaged.

    Adds `count_SECONDS`, `COLUMN_sum_SECONDS` and `COLUMN_mean_SECONDS`, after `prefix`.
    """

    section: ClassVar[str] = "features.windows"

    columns: Names | tuple[()] = ()
    """Names or patterns of the columns to sum or average: numbers. Missing ones are left out."""
    seconds: tuple[Annotated[int, Field(ge=1, le=MOST_SECONDS)], ...] = Field(min_length=1)
    """Lengths of the windows, such as `[3600, 604800]`. Each ends `delay_seconds` before the row's time. An event at
    its start counts, one at its end does not."""
    take: tuple[Literal["count", "sum", "mean"], ...] = ("count",)
    """What to make of each window. count: number of events. sum and mean: of each column; without a number, the sum is
    0 and the mean is missing. The mean of a column of 0 and 1 is a rate."""

    @model_validator(mode="after")
    def _columns_fit(self) -> Self:
        summed = [one for one in self.take if one != "count"]
        if bool(summed) != bool(self.columns):
            found = "`columns` without them" if self.columns else f"take={summed[0]} without `columns`"
            raise ConfigError(self.place, "`columns` with take sum or mean", found, "Add what is missing.")
        return self

    def made(self, columns: Sequence[str]) -> dict[str, tuple[str | None, str, int]]:
        """Returns the added columns: name -> column of the log, what is taken of it, and seconds of the window.

        Args:
            columns: Those that `columns` names.
        Example:
            >>> clicks = EventWindow(path="clicks", on="user", time="time", as_of="at", seconds=[60], prefix="clicks_")
            >>> clicks.made([])
            {'clicks_count_60': (None, 'count', 60)}
        """
        found: dict[str, tuple[str | None, str, int]] = {}
        for take in self.take:
            for column in [None] if take == "count" else columns:
                for seconds in self.seconds:
                    name = take if column is None else f"{column}_{take}"
                    found[f"{self.prefix}{name}_{seconds}"] = (column, take, seconds)
        return found

    def added_names(self) -> list[str]:
        return list(self.made(self.columns))


AnySource = FeatureJoin | History | EventWindow

"""Config of the ingest: where rows come from, how they are labelled, checked and written."""

import datetime
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.extraction.generator.config import GeneratorConfig
from storage.config import DAY, TableConfig, WarehouseConfig
from storage.names import (
    MOST_SECONDS,
    MOST_WEIGHT,
    NAME,
    TRAILING_DAYS,
    Format,
    Names,
    require_both_times,
    without_folders,
)

WEIGHT = "sample_weight"
"""Column with the number of impressions that a row represents after negatives were downsampled."""
REPEAT_DAYS = 7
"""Default of `ingest.repeat_days`."""

TABLE_KEYS = ("table", "branch", "day_zone")
"""Keys of a source that is read as it is."""
Verdict = Literal["fail", "quarantine", "warn", "off"]
"""fail: the ingest stops. quarantine: the day is held back in its own table. warn: a line in the log."""
Rule = Literal[
    "losses",
    "future",
    "one_label",
    "unmatched",
    "constant",
    "vanished",
    "appeared",
    "changed_type",
    "coverage",
    "length",
    "label_rate",
    "rows",
    "duplicates",
    "drift",
]


class OutcomeLabel(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """One label column computed from the outcomes of an impression."""

    action: str | None = None
    """Value of `action_column` that counts. None: every outcome counts."""
    window_seconds: PositiveInt | None = None
    """Attribution window of this label. None: `source.outcomes.window_seconds`."""
    take: Literal["any", "count", "sum"] = "any"
    """any: 1 if there is an outcome, else 0. count: number of outcomes. sum: total of `amount`, 0 without outcomes."""
    amount: str | None = None
    """Numeric column to sum, with six decimals. A value that is not a number counts as 0."""

    @model_validator(mode="after")
    def _amount_needs_sum(self) -> Self:
        if (self.take == "sum") != (self.amount is not None):
            expected = "`amount` if and only if take=sum"
            found = f"take={self.take} {'without' if self.amount is None else 'with'} `amount`"
            remedy = "Add `amount`." if self.amount is None else "Remove `amount`, or set take=sum."
            raise ConfigError("source.outcomes.labels", expected, found, remedy)
        return self


class Outcomes(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """The outcome log. A feature row with an outcome inside the window gets label 1, every other row 0."""

    path: str | tuple[str, ...] | None = None
    """Files of the outcome log. None: the generator writes it."""
    on: str = "impression_id"
    """Key column of the impression in both logs."""
    feature_time: str = "event_time"
    """Timestamp column of the feature log."""
    outcome_time: str = "outcome_time"
    """Timestamp column of the outcome log."""
    window_seconds: PositiveInt = 3_600
    """Attribution window: an outcome counts if it happens at the feature row's time or less than this much later."""
    action_column: str = "action"
    """Column of the outcome log with the kind of outcome."""
    labels: Mapping[str, OutcomeLabel] = {}
    """Column -> the outcomes it is computed from. It must include `features.label`. Empty: any outcome sets
    `features.label` to 1."""
    keep_negatives: float | None = Field(default=None, ge=1.0 / MOST_WEIGHT, le=1.0)
    """Share of the impressions without any outcome to keep, chosen by a hash of the key. Column `sample_weight` holds
    how many impressions each row represents; `features.weight` must name it. None: keep all, without weights."""
    keep_seed: NonNegativeInt = 0
    """Another seed keeps other negatives."""

    @model_validator(mode="after")
    def _columns_are_distinct(self) -> Self:
        if self.feature_time == self.outcome_time == self.on:
            raise ConfigError(
                "source.outcomes", "key and time in different columns", f"'{self.on}' for all three",
                "Correct `on`, `feature_time` or `outcome_time`.",
            )  # fmt: skip
        for name in self.labels:
            if not NAME.fullmatch(name) or name.startswith("__") or name.lower() in (DAY, WEIGHT):
                expected = f"a name of letters, digits and _ that is not {DAY} or {WEIGHT} and does not start with __"
                raise ConfigError("source.outcomes.labels", expected, f"'{name}'", "Rename the label.")
        return self

    def labels_by_column(self, label: str) -> dict[str, OutcomeLabel]:
        """Returns column -> the outcomes it is computed from.

        Args:
            label: `features.label`.
        Raises:
            ConfigError: If `label` is not one of the columns, or is not 0 or 1.
        """
        made = dict(self.labels) or {label: OutcomeLabel()}
        if label not in made or made[label].take != "any":
            found = "no label of that name" if label not in made else f"take={made[label].take}"
            fitting = ", ".join(name for name in made if made[name].take == "any")
            raise ConfigError(
                f"source.outcomes.labels, features.label '{label}'", "a label that is 0 or 1 (take=any)", found,
                f"Set features.label to one of: {fitting}." if fitting else "Add a label with take=any.",
            )  # fmt: skip
        return made

    def columns(self, label: str) -> list[str]:
        """Returns the columns that the join adds to the feature log. None of them is known when a row is scored."""
        return [*self.labels_by_column(label), *([] if self.keep_negatives is None else [WEIGHT])]

    def window_of(self, label: OutcomeLabel) -> int:
        """Returns the attribution window of a label in seconds."""
        return label.window_seconds or self.window_seconds

    @property
    def longest_seconds(self) -> int:
        """The longest attribution window of all labels."""
        return max((self.window_of(label) for label in self.labels.values()), default=self.window_seconds)


class SideTable(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A side table. Its columns are added to every row with the same key."""

    path: str
    """Parquet, CSV or JSON lines file, or a glob."""
    on: Names
    """Key columns, in the rows and in the side table; unique in the side table."""
    refresh: Literal["new_days", "past_days"] = "new_days"
    """Which days get the values of a changed side table. new_days: only days that are written anyway. Past days keep
    their values. past_days: every day is written again, with values from its future unless `valid_from` is set."""
    valid_from: str | None = None
    """Column of the side table (timestamp or date) with the time since when a row's values hold. A key may then have a
    row for each change, and a row gets the newest values that held at its own time. Needs `as_of`."""
    as_of: str | None = None
    """Column of the rows (timestamp or date) with their time. A date of the rows is the beginning of its day, a date of
    the side table the end of its day. Needs `valid_from`."""
    delay_seconds: int = Field(default=0, ge=0, le=MOST_SECONDS)
    """Time that values take to arrive: a row gets those that held so long before its own time. Needs `as_of`."""

    @model_validator(mode="after")
    def _times_fit(self) -> Self:
        require_both_times(self.place, self.valid_from, self.as_of, self.delay_seconds)
        return self

    @property
    def place(self) -> str:
        """The side table as an error names it."""
        return f"source.lookups '{self.path}'"


class SourceConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Where rows come from."""

    path: str | tuple[str, ...] | None = None
    """Files of samples, or of the feature log: a path, a glob, or several. Relative paths start at the folder of the
    config's file, those of an override at the current folder. Or objects, such as `s3://logs/day=*/*.parquet`."""
    table: str | None = None
    """Iceberg table of another engine that is read as it is, without an ingest: `namespace.table` in the catalog of
    `warehouse.catalog`, or `catalog.namespace.table` of a catalog in pyiceberg's own file or variables, or in the same
    SQL database. Its rows are samples with a label of 0 or 1. `day_column` is `day` unless you name another."""
    branch: str | None = None
    """Branch or tag of `table`. None: its main branch."""
    format: Format = "auto"
    """auto: CSV, JSON lines or Avro by the file name, else Parquet. json: one object a line. criteo: tab-separated,
    no header. Text may be compressed with gzip."""
    day_column: str | None = None
    """Column that gives the day (date, timestamp or ISO text)."""
    date_format: Names | None = None
    """Format of text in the day column and in the times of both logs, such as `%m/%d/%Y`. Of several strptime formats,
    the first that fits a value counts. None: ISO dates and timestamps."""
    day_zone: str = "UTC"
    """Time zone of the days of `table`, for a day column that is a timestamp with a zone."""
    day_unit: Literal["seconds", "milliseconds", "microseconds"] | None = None
    """Unit of a day column that holds numbers: the time since 1970-01-01 in UTC. It also applies to numbers in the
    times of both logs and in `as_of`, which are stored as timestamps. None: they hold dates, timestamps or text."""
    day: datetime.date | None = None
    """The day of all rows, if the data has no day column."""
    rename: Mapping[str, str] = {}
    """Column of the files or side tables -> its name everywhere else. A name takes letters, digits and _."""
    positive: bool | int | float | str | None = None
    """Value of the label that counts as 1, such as `yes`; every other value counts as 0. None: labels are 0 or 1."""
    unlabelled: Literal["quarantine", "skip"] = "quarantine"
    """What happens to rows without a label (null or NaN). quarantine: they count as bad rows. skip: they
    are left out and counted, for data of which only a part is labelled."""
    outcomes: Outcomes | None = None
    """The log that labels the feature log. None: rows already have their label."""
    lookups: tuple[SideTable, ...] = ()
    """Side tables joined to the rows."""
    generator: GeneratorConfig | None = None
    """Generates the logs instead of reading files."""

    @model_validator(mode="after")
    def _names_one_source(self) -> Self:
        given = [f"`{name}`" for name in ("path", "table", "generator") if getattr(self, name) is not None]
        if len(given) != 1:
            found = " and ".join(given) or "none of them"
            raise ConfigError("source", "one of `path`, `table` and `generator`", found, "Give exactly one.")
        if self.table is not None:
            return self._fits_table()
        if (self.day_column is None) == (self.day is None):
            found = "neither" if self.day is None else "both"
            raise ConfigError("source", "either `day_column` or `day`", found, "Give exactly one.")
        for name in TABLE_KEYS:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(f"source.{name}", "`table` with it", "none", "Name a table, or leave it out.")
        if self.generator is not None and self.outcomes is None:
            raise ConfigError("source", "`outcomes` together with `generator`", "none", "Add `outcomes: {}`.")
        if self.generator is None and self.outcomes is not None and self.outcomes.path is None:
            raise ConfigError("source.outcomes", "`path` of the outcome log", "none", "Add it.")
        if self.day_unit is not None and self.day_column is None:
            raise ConfigError("source.day_unit", "`day_column` with it", "none", "Name the column of the time.")
        return self

    @model_validator(mode="after")
    def _has_a_label_to_read(self) -> Self:
        for name in ("positive", "unlabelled"):
            if self.outcomes is not None and getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(
                    f"source.{name}", "a label in the rows", "`outcomes`, which make it", "Leave out one."
                )
        return self

    def _fits_table(self) -> Self:
        """Refuses what would change the rows of a table that is read as it is."""
        changes = ("format", "day", "day_unit", "rename", "positive", "unlabelled", "outcomes", "lookups")
        for name in changes:
            if getattr(self, name) != type(self).model_fields[name].default:
                raise ConfigError(
                    f"source.{name} with source.table", "rows that are read as they are", "a change to them",
                    "Leave it out, or ingest the table's files with source.path.",
                )  # fmt: skip
        self.add_table(WarehouseConfig(), "samples")  # checks the values
        return self

    def add_table(self, warehouse: WarehouseConfig, name: str) -> WarehouseConfig:
        """Returns a warehouse with `table`, if there is one, under a name of ours."""
        if self.table is None:
            return warehouse
        found = TableConfig(
            table=self.table, branch=self.branch, day_column=self.day_column or DAY, day_zone=self.day_zone,
            date_format=self.date_format,
        )  # fmt: skip
        return warehouse.model_copy(update={"tables": {**warehouse.tables, name: found}})

    def ingested(self) -> dict[str, Any]:
        """Returns the values that say what an ingest reads, without the keys of `table` and the folders of files."""
        usual = {"unlabelled"} if self.unlabelled == "quarantine" else set()
        values = self.model_dump(mode="json", exclude=usual.union(TABLE_KEYS))
        for section in (values, values["outcomes"] or {}, *values["lookups"]):
            section["path"] = without_folders(section.get("path"))
        return values

    @model_validator(mode="after")
    def _new_names_fit(self) -> Self:
        for old, new in self.rename.items():
            if not NAME.fullmatch(new) or new.startswith("__"):
                raise ConfigError(
                    f"source.rename '{old}'", "a name of letters, digits and _", f"'{new}'", "Choose another name."
                )
        if len(set(self.rename.values())) < len(self.rename):
            raise ConfigError("source.rename", "a different name for each column", "a repeated one", "Change one.")
        return self

    def check_label(self, label: str, weight: str | None) -> None:
        """Refuses outcomes that do not give the label, or give a weight that nobody reads.

        Args:
            label: `features.label`.
            weight: `features.weight`.
        """
        if self.outcomes is not None:
            self.outcomes.labels_by_column(label)
            if self.outcomes.keep_negatives is not None and weight != WEIGHT:
                raise ConfigError(
                    "features.weight with source.outcomes.keep_negatives", WEIGHT, f"{weight}",
                    f"Set features.weight={WEIGHT}: a row kept stands for those left out.",
                )  # fmt: skip

    def outcome_columns(self, label: str) -> list[str]:
        """Returns the columns computed from outcomes.

        Args:
            label: `features.label`.
        """
        return [] if self.outcomes is None else self.outcomes.columns(label)


def matches_any(name: str, patterns: Iterable[str]) -> bool:
    """Tells whether a name is one of some names or patterns."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def names_in(value: object, without: Collection[str] = ()) -> Iterator[str]:
    """Yields all texts in the values of a config, and the words in them: they may name columns.

    Args:
        without: Keys to pass over, at any depth.
    Example:
        >>> sorted({*names_in(EventTable(path="a.csv", key="user", time="at", columns=["p*"]), {"path"})} - {"auto"})
        ['at', 'p', 'p*', 'user']
    """
    if isinstance(value, str):
        yield from (value, *re.findall(r"[A-Za-z_]\w*", value))
    elif isinstance(value, BaseModel):
        for key in type(value).model_fields.keys() - without:
            yield from names_in(getattr(value, key), without)
    elif isinstance(value, Mapping):
        for key, one in value.items():
            yield from names_in(key)
            yield from names_in(one, without)
    elif isinstance(value, Iterable):
        for one in value:
            yield from names_in(one, without)


class ChecksConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Rules that a day must keep before it is written. Each rule is set to fail, quarantine, warn or off.

    `losses` compares a day with what the table has of it. `future`, `one_label`, `unmatched` and `constant` need no
    other day. The other rules compare it with the days before it.
    """

    losses: Verdict = "quarantine"
    """A day that is written again would lose input files, rows, labels of 1, values of a column, or materialized
    columns. `force=true` writes it anyway."""
    future: Verdict = "quarantine"
    """A day that has not begun: after tomorrow, in UTC. Some clock is wrong."""
    one_label: Verdict = "fail"
    """All rows have the same label."""
    unmatched: Verdict = "fail"
    """Nearly all outcomes match no impression inside their window, or nearly all rows have a key that a side table, a
    joined feature, a history or a window lacks; see `matched_share`. Or no outcome has the action of a label."""
    constant: Verdict = "warn"
    """A feature without a value, or with the same one, in all rows of its first days."""
    vanished: Verdict = "warn"
    """A column that had values has none, or is gone."""
    appeared: Verdict = "warn"
    """A column has values for the first time, or is new."""
    changed_type: Verdict = "fail"
    """A column has values that its type in the table cannot hold, such as text or fractions among ids. Days with such
    values are held back or end the ingest: warn and off do not admit them. In a column that nothing in the config
    names, or that `skip` does, they are null, with a warning."""
    coverage: Verdict = "warn"
    """The share of rows in which a column has a value."""
    length: Verdict = "warn"
    """The mean length of a column's lists."""
    label_rate: Verdict = "warn"
    """The share of rows with label 1."""
    rows: Verdict = "warn"
    """The number of rows."""
    duplicates: Verdict = "warn"
    """Rows that repeat the `key` of another row of the day."""
    drift: Verdict = "warn"
    """The population stability index of a column's values."""

    key: str | None = None
    """Column that must be unique within a day. None: not checked. A log join sets repeated impressions aside anyway."""
    skip: tuple[str, ...] = ()
    """Columns, or patterns, that are not checked."""
    trailing_days: PositiveInt = TRAILING_DAYS
    """How many earlier days a day is compared with."""
    minimum_days: PositiveInt = 3
    """A day with fewer earlier days is not compared."""
    spread: PositiveFloat = 4.0
    """Accepted distance from the median in robust standard deviations (1.48 times the median absolute deviation)."""
    coverage_change: NonNegativeFloat = 0.1
    """Change that is always accepted, of the share itself."""
    length_change: NonNegativeFloat = 0.3
    """Change that is always accepted, relative to the median."""
    label_rate_change: NonNegativeFloat = 0.3
    """Change that is always accepted, relative to the median."""
    rows_change: NonNegativeFloat = 0.5
    """Change that is always accepted, relative to the median."""
    duplicate_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of a day's rows that may be duplicates."""
    loss_share: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of its rows and of its labels of 1 that a day may lose."""
    matched_share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Least share of the outcomes, and of the rows, that match. Of fewer than 5 outcomes or 20 rows, any may."""
    drift_limit: PositiveFloat = 0.25
    """Index that is always accepted. The index expected from chance alone is added to it. Below twice the largest index
    of the days before, a larger one is accepted, too. In a simulated year of ordinary days (weekends, seasons, restless
    shares) a column breaks the rule up to twice. Columns that no feature reads are not judged."""
    changed_share: float | None = Field(default=0.01, ge=0.0, le=1.0)
    """Share of an earlier day's rows in which a joined feature, history or window may have another value when it is
    computed again now. An ingest measures it and warns above it. None: not measured."""

    def outcome(self, rule: Rule) -> Verdict:
        """Returns what happens to a day that breaks the rule."""
        found: Verdict = getattr(self, rule)
        return found

    def skips(self, column: str) -> bool:
        """Tells whether `skip` names a column."""
        return matches_any(column, self.skip)


class IngestConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Which rows are accepted and how they are written."""

    max_quarantined_share: float = Field(default=0.01, ge=0.0, le=1.0)
    """Share of a day's rows that may be quarantined. A day above it fails the ingest."""
    rows_per_commit: PositiveInt = 5_000_000
    """Days are checked and written together up to this many rows; each group is one commit."""
    order_by: tuple[str, ...] = ()
    """Columns to sort a day's rows by, such as a session and a time. Empty: rows are not sorted."""
    other_sources: bool = False
    """Lets rows into a table whose rows came from files of another pattern. Files of other days, and those that a
    pattern covers, are of the same source."""
    profile: bool = True
    """Measure the columns of new days before they are written. Without it, the checks know rows and labels alone."""
    memory_bytes: PositiveInt | None = None
    """Memory of DuckDB for joins, sorts and statistics. Beyond it, DuckDB spills to disk. None: a quarter of the
    machine's memory, or of what its control group allows."""
    repeat_days: PositiveInt = REPEAT_DAYS
    """How far back a repeated impression, or an event that `unique` tells from others, is looked for. An ingest of a
    new day opens the files of so many days. A row that repeats one from before counts as a new one."""
    checks: ChecksConfig = ChecksConfig()


class EventTable(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A log of events that an ingest keeps as a table of the warehouse, for histories and windows to read.

    The table has a day for each day of `time`, in UTC, sorted by key and time. A day is written again when another file
    brings events of it.
    """

    path: str | tuple[str, ...] | None = None
    """Files of the log: a path, a glob, or several, as `source.path`. None: the generator writes it."""
    key: Names
    """Columns that say whose event it is, such as a user. An event without one of them, such as that of an anonymous
    visitor, is left out."""
    time: str
    """Timestamp or date of the event. It gives the event's day."""
    columns: Names = ("*",)
    """Names or patterns of the other columns to keep."""
    format: Literal["auto", "parquet", "csv", "json", "avro"] = "auto"
    """As `source.format`."""
    date_format: Names | None = None
    """As `source.date_format`, for text in `time`."""
    day_unit: Literal["seconds", "milliseconds", "microseconds"] | None = None
    """As `source.day_unit`, for numbers in `time`. It is stored as a timestamp."""
    rename: Mapping[str, str] = {}
    """As `source.rename`."""
    unique: Names | None = None
    """Columns that tell one event from another, such as its id; `*` for all. Of events that a log delivers more than
    once, the first row is kept, whatever files they are in. None: each row is an event."""
    keep_days: PositiveInt | None = None
    """How many days with events to keep: the newest that have begun. An ingest takes others out of the table. None:
    all."""

    @property
    def source(self) -> SourceConfig:
        """The log as a source of rows."""
        return SourceConfig(
            path=self.path, format=self.format, day_column=self.time, date_format=self.date_format,
            day_unit=self.day_unit, rename=self.rename,
        )  # fmt: skip


class LabelColumns(BaseModel, frozen=True, extra="ignore", use_attribute_docstrings=True):
    """The part of `features` that is known before any feature is declared. Other keys are ignored."""

    label: str = "label"
    """Column of 0 and 1."""
    weight: str | None = None
    """Column of the rows' weights. None: every row weighs the same."""


def refuse_outcomes(columns: Iterable[str], made: Sequence[str]) -> None:
    """Refuses outcomes as features.

    Raises:
        ConfigError: If a column is an outcome, because nobody knows it when the row is scored.
    """
    taken = [name for name in columns if name in made]
    if taken:
        raise ConfigError(
            "features", "features other than outcomes and weights", f"'{taken[0]}'", "Take it out of the patterns."
        )

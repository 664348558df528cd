"""Joins the feature log with outcomes inside a window. An impression becomes one sample, or is counted as refused."""

import datetime
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import duckdb
from pydantic import BaseModel

from pipeline.data.formats.reading import ReadableFile
from pipeline.data.formats.types import FILE, ISO_DAY, ROW, as_text
from pipeline.errors import ConfigError, DataError
from pipeline.extraction.config import WEIGHT, OutcomeLabel, Outcomes
from pipeline.extraction.sources import check_keys, create_view, has_zone, key_family, repeated_rows
from storage.arrow import differing_clocks
from storage.query import column_types, literal, quote

OUTCOMES = "outcomes"
"""View of the outcome log."""
KEY, SHOWN, REASON, LEFT_OUT = "__key", "__shown", "__unjoinable", "__left_out"
"""Columns of the joined view: impression, its time, why it is refused, and whether downsampling leaves it out."""
REPEATED = "impression is repeated"
DAY_SECONDS = 86_400
FEW_TIMES = 3
"""Fewer times may be midnight by chance."""
FEW_OUTCOMES = 5
"""Fewer outcomes may match nothing by chance."""
NAMED_ACTIONS = 5
"""Most actions that an error names."""


class LabelJoin(BaseModel, frozen=True):
    """How the outcomes of one label matched the impressions of the days written."""

    matched: int = 0
    """First outcomes inside the window: the number of positive impressions."""
    repeated: int = 0
    """Further outcomes of the same impression inside the window."""
    late: int = 0
    """Outcomes after the window."""
    early: int = 0
    """Outcomes before the impression."""
    unmatched: int = 0
    """Outcomes without a time, or of an impression that the feature log lacks; counted over the outcome files read."""


class Join:
    """Tables and views that give each impression its labels.

    Only key, time and action of both logs are joined, and only once. The result has one row for each impression with an
    outcome. It is small and stays in a table until samples are written. DuckDB spills all of it if memory is short.

    Attributes:
        whole: Whether all files of the outcome log are there. Otherwise an action may be in others.

    Args:
        source: View of the feature log, numbered.
        files: Files of the outcome log.
        label: `features.label`.
        formats: `source.date_format`.
        unit: `source.day_unit`.
        known: Column -> its type in files of the outcome log that are not opened.
    Raises:
        ConfigError: If a column is missing or has the wrong type, or the feature log has a column that the join adds.
    """

    def __init__(
        self,
        connection: duckdb.DuckDBPyConnection,
        source: str,
        outcomes: Outcomes,
        files: Sequence[ReadableFile],
        label: str,
        formats: Sequence[str] = (),
        unit: str | None = None,
        known: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.connection, self.source, self.config, self.whole = connection, source, outcomes, True
        self.made = outcomes.labels_by_column(label)
        times = [outcomes.outcome_time]
        where = "source.outcomes.path"
        create_view(
            connection, OUTCOMES, files, where, times=times, formats=formats, unit=unit, clocks=times, known=known
        )
        self._check(label)
        self.key, self.time = quote(outcomes.on), quote(outcomes.outcome_time)
        self.shown = quote(outcomes.feature_time)
        self.view = "labelled"
        self._create()

    def _create(self) -> None:
        """Creates the tables that are filled later."""
        counts = [f"CAST(0 AS BIGINT) AS n{i}, CAST(0 AS DOUBLE) AS v{i}" for i in range(len(self.made))]
        for table, columns in {
            "repeated": f"{FILE} AS file, {ROW} AS row",
            "found": ", ".join([f"{self.key} AS key, {self.shown} AS shown", *counts]),
        }.items():
            self.connection.execute(f"CREATE TABLE {table} AS SELECT {columns} FROM {self.source} WITH NO DATA")

    def _create_view(self, repeated: bool) -> None:
        """Creates the view over the tables.

        Args:
            repeated: Whether there are repeated impressions. A join that finds none still takes time.
        """
        labels = [_value(made, i) + f" AS {quote(name)}" for i, (name, made) in enumerate(self.made.items())]
        share, out = self.config.keep_negatives, "false"
        if share is not None:
            labels.append(f"CASE WHEN f.key IS NULL THEN {1.0 / share!r} ELSE 1.0 END::DOUBLE AS {WEIGHT}")
        if share is not None and share < 1.0:
            hashed = f"md5_number_lower(concat('{self.config.keep_seed}:', s.{self.key}))"
            out = f"f.key IS NULL AND {hashed} >= {int(share * 2**64)}::UBIGINT"
        reason = (
            f"CASE WHEN s.{self.key} IS NULL THEN {literal(f'{self.config.on} is null')}"
            f" WHEN s.{self.shown} IS NULL THEN {literal(f'{self.config.feature_time} is null')}"
            f"{f' WHEN r.row IS NOT NULL THEN {literal(REPEATED)}' if repeated else ''} END"
        )
        joined = f" LEFT JOIN repeated r ON r.file = s.{FILE} AND r.row = s.{ROW}" if repeated else ""
        self.connection.execute(
            f"CREATE VIEW labelled AS SELECT s.*, {', '.join(labels)}, s.{self.key} AS {KEY},"
            f" s.{self.shown} AS {SHOWN}, {reason} AS {REASON}, {out} AS {LEFT_OUT}"
            f" FROM {self.source} s LEFT JOIN found f ON f.key = s.{self.key} AND f.shown = s.{self.shown}{joined}"
        )

    def mark_repeated(self, seconds: int) -> None:
        """Creates the view, and marks the rows of impressions that the feature log repeats, except the first in time.

        Args:
            seconds: How long before a row another one may lie that it repeats.
        """
        repeated = repeated_rows(self.source, [self.config.on], False, self.config.feature_time, seconds)
        [(count,)] = self.connection.execute(f"INSERT INTO repeated {repeated}").fetchall()
        self._create_view(count > 0)

    def attribute(self, samples: str, days: str) -> None:
        """Finds the outcomes of the impressions of some days. From then on the view has their labels.

        Args:
            samples: The view, with its days.
            days: SQL condition on the day.
        """
        self.first, self.last = self.connection.sql(  # before the view has labels: they triple the time
            f"SELECT min({SHOWN}), max({SHOWN}) FROM {samples} WHERE {REASON} IS NULL AND {days}"
        ).fetchall()[0]
        extra = [f"{self._action('o.')} AS action"] if self._actions() else []
        amounts = {made.amount for made in self.made.values() if made.amount is not None}
        extra += [f"{_amount(f'o.{quote(name)}')} AS {quote('amount ' + name)}" for name in sorted(amounts)]
        self.connection.execute(
            f"CREATE TABLE attributed AS SELECT {', '.join(['s.key', 's.shown', f'o.{self.time} AS happened', *extra])}"
            f" FROM outcomes o LEFT JOIN (SELECT {KEY} AS key, {SHOWN} AS shown, {days} AS due FROM {samples} WHERE"
            f" {REASON} IS NULL) s ON s.key = o.{self.key} WHERE s.due IS NOT false"
        )
        found = []
        for made in self.made.values():
            inside = f"FILTER ({self._inside(made)})"
            summed = f"CAST(sum({quote(f'amount {made.amount}')}) {inside} AS DOUBLE)" if made.amount else "0.0"
            found.append(f"count(*) {inside}, {summed}")
        within = " OR ".join(f"({self._inside(made)})" for made in self.made.values())
        self.connection.execute(
            f"INSERT INTO found SELECT key, shown, {', '.join(found)} FROM attributed WHERE {within} GROUP BY 1, 2"
        )

    def count_outcomes(self) -> dict[str, LabelJoin]:
        """Returns label -> how its outcomes were matched. The counts add up to all outcomes considered."""
        result = {}
        for i, (name, made) in enumerate(self.made.items()):
            end = f"shown + to_seconds({self.config.window_of(made)})"
            inside, late, early, unmatched = self.connection.sql(
                f"SELECT count(*) FILTER ({self._inside(made)}), count(*) FILTER (happened >= {end}),"
                f" count(*) FILTER (happened < shown), count(*) FILTER (key IS NULL OR happened IS NULL)"
                f" FROM attributed WHERE {_of(made)}"
            ).fetchall()[0]
            matched = int(self.connection.sql(f"SELECT count(*) FROM found WHERE n{i} > 0").fetchall()[0][0])
            result[name] = LabelJoin(
                matched=matched, repeated=inside - matched, late=late, early=early, unmatched=unmatched
            )
        return result

    def find_unmatched(self, least: float) -> Iterator[tuple[str, str, str]]:
        """Yields label, what was expected of its outcomes, and what was found, if they match nearly nothing.

        Only outcomes that should match count: those of an impression of the attributed days, those without a time, and
        those without an impression whose time is that of the days.

        Args:
            least: Share of these outcomes that is to be inside the window.
        """
        shown = f"happened >= {_moment(self.first)} AND happened < {_moment(self.last)} + to_seconds({{}})"
        for name, made in self.made.items():
            near = f"key IS NOT NULL OR happened IS NULL OR ({shown.format(self.config.window_of(made))})"
            total, inside = self.connection.sql(
                f"SELECT count(*), count(*) FILTER ({self._inside(made)}) FROM attributed"
                f" WHERE {_of(made)} AND ({near})"
            ).fetchall()[0]
            if total >= FEW_OUTCOMES and inside < least * total:
                yield (
                    name, f"at least {least:.1%} of the outcomes of these impressions or this time inside the window",
                    f"{inside:,} of {total:,}",
                )  # fmt: skip
            if made.action is not None and self.whole:
                action = self._action()
                kinds = self.connection.sql(
                    f"SELECT {action}, count(*) FROM outcomes GROUP BY 1 ORDER BY 2 DESC, 1"
                ).fetchall()
                if sum(count for _, count in kinds) >= FEW_OUTCOMES and made.action not in {kind for kind, _ in kinds}:
                    known = ", ".join(f"{kind}" for kind, _ in kinds[:NAMED_ACTIONS])
                    yield name, f"outcomes with action '{made.action}'", f"none, but {known}"

    def _action(self, table: str = "") -> str:
        """SQL of the action as text: 1.0 is the action 1."""
        kind = column_types(self.connection, OUTCOMES)[self.config.action_column]
        return as_text(f"{table}{quote(self.config.action_column)}", kind)

    def _actions(self) -> bool:
        return any(made.action is not None for made in self.made.values())

    def _inside(self, made: OutcomeLabel) -> str:
        """SQL condition that an attributed outcome counts for the label."""
        end = f"shown + to_seconds({self.config.window_of(made)})"
        return f"{_of(made)} AND happened >= shown AND happened < {end}"

    def _check(self, label: str) -> None:
        config, source = self.config, self.source
        needed = {
            source: [config.on, config.feature_time],
            "outcomes": [
                config.on,
                config.outcome_time,
                *([config.action_column] if self._actions() else []),
                *(made.amount for made in self.made.values() if made.amount is not None),
            ],
        }
        kinds: dict[str, str] = {}
        dates: dict[str, bool | None] = {}
        zones: dict[str, bool | None] = {}
        for view, names in needed.items():
            known = column_types(self.connection, view)
            where = f"source.outcomes, {'feature log' if view == source else 'outcome log'}"
            absent = [name for name in names if name not in known]
            if absent:
                columns = ", ".join([name for name in known if name not in (FILE, ROW)][:8])
                raise ConfigError(where, f"column '{absent[0]}'", columns, "Correct the names.")
            if not known[names[1]].startswith(("TIMESTAMP", "DATE")):
                raise ConfigError(
                    where, f"timestamps in column '{names[1]}'", self._kind(view, names[1], known[names[1]]),
                    "Convert the column, name another, or set source.date_format if it is text.",
                )  # fmt: skip
            log = f"the {'feature' if view == source else 'outcome'} log"
            kinds[log.removeprefix("the ")] = known[config.on]
            column = f"column '{names[1]}' of {log}"
            dates[column] = self._has_dates(view, names[1], known[names[1]])
            zones[column] = has_zone(known[names[1]])
        check_keys("source.outcomes", config.on, kinds)
        self._refuse_dates(dates)
        self._refuse_amounts(known)
        self.clocks = differing_clocks("source.outcomes", zones)
        there = {name.lower(): name for name in self.connection.view(source).columns}
        taken = [there[name.lower()] for name in config.columns(label) if name.lower() in there]
        if taken:
            raise ConfigError(
                "source.outcomes",
                f"a feature log without '{taken[0]}'",
                "one that already has this column",
                "Rename the column or the label. Without source.outcomes, rows keep their own label.",
            )

    def _refuse_amounts(self, kinds: Mapping[str, str]) -> None:
        """Refuses amounts that cannot be summed: they would count as 0."""
        for name in sorted({made.amount for made in self.made.values() if made.amount is not None}):
            if key_family(kinds[name]) == "integers":
                continue
            bad = f"{quote(name)} IS NOT NULL AND {_amount(quote(name))} IS NULL"
            query = f"SELECT CAST({quote(name)} AS VARCHAR), {FILE} FROM {OUTCOMES} WHERE {bad} LIMIT 1"
            for value, file in self.connection.sql(query).fetchall():
                raise DataError(
                    f"column '{name}' of the outcome log", "amounts such as 9.99", f"'{value}' in '{Path(file).name}'",
                    "Write numbers with a point, or name another column.",
                )  # fmt: skip

    def _refuse_dates(self, dates: Mapping[str, bool | None]) -> None:
        """Refuses dates against times, and dates with windows of parts of a day."""
        of_dates = [column for column, given in dates.items() if given]
        of_times = [column for column, given in dates.items() if given is False]
        if of_dates and of_times:
            raise ConfigError(
                "source.outcomes", "times of day in both logs, or dates in both",
                f"dates in {of_dates[0]}, times in {of_times[0]}",
                "Write both with the time of day: a date does not tell whether an outcome came after its impression.",
            )  # fmt: skip
        parts = [made for made in self.made.values() if self.config.window_of(made) % DAY_SECONDS]
        if of_dates and parts:
            raise ConfigError(
                "source.outcomes.window_seconds with dates", f"whole days, multiples of {DAY_SECONDS}",
                f"{self.config.window_of(parts[0])}", "Correct it, or write both logs with the time of day.",
            )  # fmt: skip

    def _has_dates(self, view: str, column: str, kind: str) -> bool | None:
        """Whether a column has dates: by its type, or because all its times are midnight. None: too few to tell."""
        if kind == "DATE":
            return True
        time = quote(column)
        within = f"SELECT 1 FROM {view} WHERE {time} <> date_trunc('day', {time}) LIMIT 1"
        if self.connection.sql(within).fetchall():
            return False
        rows = self.connection.sql(f"SELECT 1 FROM {view} WHERE {time} IS NOT NULL LIMIT {FEW_TIMES}").fetchall()
        return True if len(rows) == FEW_TIMES else None

    def _kind(self, view: str, column: str, kind: str) -> str:
        """Describes the type of a column. For text, shows a value, if possible one that is not an ISO time."""
        if kind != "VARCHAR":
            return kind
        order = f"ORDER BY regexp_full_match({quote(column)}, '{ISO_DAY}') NULLS LAST LIMIT 1"
        found = self.connection.sql(f"SELECT {quote(column)} FROM {view} {order}").fetchall()
        return f"text such as '{found[0][0]}'" if found else "text"


def _amount(value: str) -> str:
    """SQL of a value as an amount, which sums exactly. Null: it is none."""
    return f"TRY_CAST({value} AS DECIMAL(38, 6))"


def _of(made: OutcomeLabel) -> str:
    """SQL condition that an outcome has the action of the label."""
    return "true" if made.action is None else f"action = {literal(made.action)}"


def _value(made: OutcomeLabel, number: int) -> str:
    """SQL expression of a row's label."""
    if made.take == "any":
        return f"CAST(coalesce(f.n{number}, 0) > 0 AS INTEGER)"
    return f"coalesce(f.n{number}, 0)" if made.take == "count" else f"coalesce(f.v{number}, 0.0)"


def _moment(time: datetime.datetime | datetime.date | None) -> str:
    """A time as an SQL literal."""
    return "NULL" if time is None else f"TIMESTAMP{'TZ' if getattr(time, 'tzinfo', None) else ''} '{time}'"

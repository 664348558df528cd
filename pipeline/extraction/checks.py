"""Checks a day before it is written: by itself, against the days before it, and against its version in the table."""

import datetime
import math
import statistics
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import pyarrow as pa
from pydantic import BaseModel

from pipeline.data.profile import add_drift
from pipeline.errors import DataError
from pipeline.extraction.absolute import find_constant, find_future, find_one_label
from pipeline.extraction.config import ChecksConfig, Rule, Verdict, matches_any
from storage.reader import DAY

Outcome = Literal["stored", "ok", "warn", "quarantine", "fail"]
"""What happens to a day. stored: the day is only there for comparison."""
SEVERITY: tuple[Outcome, ...] = ("fail", "quarantine", "warn")
NOISE = 38.0
"""Bound of drift times n m / (n + m) for 16 buckets of equally distributed values, kept in 999 of 1,000 cases."""

RISE = 2.0
"""A drift counts if it is this many times the largest one of the days before: weekdays and seasons drift, too."""


class CheckFinding(BaseModel, frozen=True):
    """A rule that a day breaks."""

    day: datetime.date
    rule: Rule
    outcome: Verdict
    column: str | None = None
    expected: str
    got: str

    @property
    def where(self) -> str:
        """Day, rule and column, for an error message."""
        column = f", column '{self.column}'" if self.column else ""
        return f"day {self.day}, rule {self.rule}{column}"


class DayCheck(BaseModel, frozen=True):
    """Numbers of a day and the bounds they were compared with. A stored day has no bounds."""

    day: datetime.date
    outcome: Outcome
    rows: int
    rows_band: tuple[float, float] | None = None
    label_rate: float | None = None
    label_rate_band: tuple[float, float] | None = None
    coverage: Mapping[str, float] = {}


class CheckResult(BaseModel, frozen=True):
    """Result of the checks on the days of an ingest."""

    days: tuple[DayCheck, ...] = ()
    findings: tuple[CheckFinding, ...] = ()

    @classmethod
    def of(cls, results: Sequence["CheckResult"]) -> "CheckResult":
        """Returns the results of several groups of days as one."""
        judged = [day for one in results for day in one.days if day.outcome != "stored"]
        stored = [day for one in results[:1] for day in one.days if day.outcome == "stored"]
        days = tuple(sorted([*judged, *stored], key=lambda day: day.day))
        return cls(days=days, findings=tuple(finding for one in results for finding in one.findings))

    @property
    def held_back(self) -> set[datetime.date]:
        """Days to hold back from the table."""
        return {day.day for day in self.days if day.outcome == "quarantine"}

    def counts(self) -> dict[str, int]:
        """Returns outcome -> number of days with it."""
        return dict(Counter(day.outcome for day in self.days if day.outcome != "stored"))

    def raise_failed(self, instead: str = "quarantine, warn or off", rename: str | None = None) -> None:
        """Raises if a day fails a check.

        Args:
            instead: Other verdicts of a rule, for the remedy.
            rename: Config key by which a column gets another name. None: there is none.
        Raises:
            DataError: With the first day that fails, its rule and column, and the number of other failures.
        """
        failed = [finding for finding in self.findings if finding.outcome == "fail"]
        if failed:
            first, more = failed[0], len(failed) - 1
            others = f" ({more} more)" if more else ""
            remedy = f"Correct the source, or set ingest.checks.{first.rule} to {instead}."
            if first.rule == "losses":
                remedy = "Restore the input, or write the day as it is now with force=true."
            if first.rule == "changed_type" and rename is not None:
                remedy = (
                    "A table's column keeps its type. Correct the source, hold such days back with"
                    f" ingest.checks.changed_type=quarantine, begin a new column with"
                    f' {rename}={{"{first.column}": "{first.column}_2"}} (null in all earlier days), or write all days'
                    " into another table with name=NAME."
                )
            raise DataError(first.where, first.expected, f"{first.got}{others}", remedy)


class KnownDays(NamedTuple):
    """What is known of new days beside their statistics."""

    counts: Mapping[datetime.date, int] = MappingProxyType({})
    """Day -> its rows. Days with statistics may be left out."""
    duplicates: Mapping[datetime.date, int] = MappingProxyType({})
    """Day -> rows that repeat the key of another row. A missing day has none."""
    found: Mapping[datetime.date, Sequence[CheckFinding]] = MappingProxyType({})
    """Day -> rules that it is known to break."""
    open: Collection[datetime.date] = ()
    """Days whose labels may still change."""
    features: Sequence[str] = ()
    """Names and patterns of the columns that features read. The drift of others is measured, not judged; none: all."""
    has_table: bool = False
    """Whether the table has days already, with or without statistics."""


Columns = dict[str, dict[str, Any]]
"""Column -> its statistics on one day."""


def check(
    measured: pa.Table,
    earlier: pa.Table,
    config: ChecksConfig,
    label: str | None,
    known: KnownDays,
) -> tuple[pa.Table, CheckResult]:
    """Checks each new day by itself and against the days before it.

    If a day is held back, later days are compared with the table's version of it, if there is one.

    Args:
        measured: Statistics of the new days.
        earlier: Stored statistics of other days, and of the new days as the table has them so far.
    Returns:
        The statistics of the new days with their drift, and the result of the checks.
    """
    fresh = sorted({*measured[DAY].to_pylist(), *known.counts})
    stored = {day: rows_of_day(earlier, day) for day in sorted(set(earlier[DAY].to_pylist()))}
    tables = {day: stored[day] for day in stored if day not in fresh}
    days = {day: columns_of_day(table) for day, table in tables.items()}
    checked = [_day(day, "stored", days[day], label) for day in days if fresh and day < fresh[-1]]
    absolute = _find_absolute(measured, stored, config, label, known)
    findings: list[CheckFinding] = []
    drifted: list[pa.Table] = []
    for day in fresh:
        past = [other for other in sorted(tables) if other < day][-config.trailing_days :]
        before = pa.concat_tables([measured.slice(0, 0), *(tables[other] for other in past)])
        table = add_drift(rows_of_day(measured, day), before, config.trailing_days)
        new, history = columns_of_day(table), [days[other] for other in past]
        bands = bounds(new, history, config, label) if len(history) >= config.minimum_days else {}
        repeated = known.duplicates.get(day, 0)
        found = [*known.found.get(day, ()), *absolute[day]]
        found += _findings(day, new, history, bands, config, label, repeated, known.features or ("*",))
        worst = worst_outcome(found)
        checked.append(_day(day, worst, new, label, bands, known.counts.get(day, 0)))
        findings += found
        drifted.append(table)
        kept = stored.get(day) if worst == "quarantine" else table  # the table keeps its rows of a held-back day
        if kept is not None:
            tables[day], days[day] = kept, columns_of_day(kept)
    whole = pa.concat_tables([measured.slice(0, 0), *drifted])
    return whole, CheckResult(days=tuple(sorted(checked, key=lambda one: one.day)), findings=tuple(findings))


def _find_absolute(
    measured: pa.Table,
    stored: Mapping[datetime.date, pa.Table],
    config: ChecksConfig,
    label: str | None,
    known: KnownDays,
) -> dict[datetime.date, list[CheckFinding]]:
    """Returns new day -> the rules it breaks that need no day before it.

    Args:
        stored: Day -> its statistics, of days that the table has.
    """
    fresh = sorted({*measured[DAY].to_pylist(), *known.counts})
    new = {day: columns_of_day(rows_of_day(measured, day)) for day in fresh}
    before = {day: columns_of_day(table) for day, table in stored.items()}
    past = {day: columns for day, columns in before.items() if day not in new}
    labels = {}
    for day, columns in {**past, **new}.items():
        if (rate := _rate(columns, label)) is not None:
            labels[day] = (_rows(columns), round(rate * _rows(columns)))
    seen = {name for columns in past.values() for name in columns}
    found: dict[datetime.date, list[CheckFinding]] = {}
    for day, columns in new.items():
        broken = [*find_future(day, _rows(columns) or known.counts.get(day, 0))]
        if not 0.0 < (_rate(before.get(day, {}), label) or 0.0) < 1.0:  # else `losses` compares the labels
            broken += find_one_label(day, labels, known.open, known.has_table)
        for name in sorted(columns.keys() - seen - {label}):
            if matches_any(name, known.features) and not config.skips(name):
                broken += find_constant(name, [other[name] for other in new.values() if name in other])
                seen.add(name)  # one finding for all days
        found[day] = [
            CheckFinding(day=day, rule=rule, outcome=outcome, column=column, expected=expected, got=got)
            for rule, expected, got, column in broken
            if (outcome := config.outcome(rule)) != "off"
        ]
    return found


def columns_of_day(statistics: pa.Table) -> Columns:
    """Returns the statistics of one day by column."""
    return {row["column"]: row for row in statistics.to_pylist()}


def worst_outcome(findings: Sequence[CheckFinding]) -> Outcome:
    """Returns what happens to a day with these findings."""
    return next((one for one in SEVERITY if any(finding.outcome == one for finding in findings)), "ok")


def bounds(
    new: Columns, past: Sequence[Columns], config: ChecksConfig, label: str | None
) -> dict[str, tuple[float, float]]:
    """Returns the bounds of the number of rows and of the label rate."""
    sizes = [float(_rows(day)) for day in past]
    middle = statistics.median(sizes)
    found = {"rows": band(sizes, config.rows_change * middle, math.sqrt(middle), config.spread)}
    rates = [rate for day in past if (rate := _rate(day, label)) is not None]
    if rates:
        middle = statistics.median(rates)
        noise = _noise(middle, _rows(new))
        low, high = band(rates, config.label_rate_change * middle, noise, config.spread)
        found["label_rate"] = (low, min(1.0, high))
    return found


def band(past: Sequence[float], accepted: float, noise: float, spread: float) -> tuple[float, float]:
    """Returns the lowest and highest value accepted after those of the past, neither below zero.

    Args:
        accepted: Distance from the median that is always accepted.
        noise: Standard deviation expected from chance alone.
    Example:
        >>> band([10.0, 11.0, 10.0, 30.0, 10.0], 1.5, 0.0, 4.0)
        (8.5, 11.5)
    """
    middle = statistics.median(past)
    scatter = 1.4826 * statistics.median([abs(value - middle) for value in past])
    half = max(accepted, spread * scatter, spread * noise)
    return max(0.0, middle - half), middle + half


def _findings(
    day: datetime.date,
    new: Columns,
    past: Sequence[Columns],
    limits: Mapping[str, tuple[float, float]],
    config: ChecksConfig,
    label: str | None,
    duplicates: int,
    read: Sequence[str],
) -> Iterator[CheckFinding]:
    """Yields the rules that a day breaks.

    Args:
        limits: Result of `bounds`; empty if there are too few days to compare with.
    """

    def finding(rule: Rule, expected: str, got: str, column: str | None = None) -> Iterator[CheckFinding]:
        outcome = config.outcome(rule)
        if outcome != "off":
            yield CheckFinding(day=day, rule=rule, outcome=outcome, column=column, expected=expected, got=got)

    rows = _rows(new)
    if duplicates > config.duplicate_share * rows:
        allowed = math.floor(config.duplicate_share * rows)
        yield from finding("duplicates", f"at most {allowed} rows with a repeated key", f"{duplicates} of {rows}")
    if not limits:
        return
    span = f"on the {len(past)} days before it"
    low, high = limits["rows"]
    if not low <= rows <= high:
        yield from finding("rows", f"{math.ceil(low)} to {math.floor(high)} as {span}", f"{rows}")
    rate = _rate(new, label)
    if rate is not None and "label_rate" in limits and not limits["label_rate"][0] <= rate <= limits["label_rate"][1]:
        low, high = limits["label_rate"]
        yield from finding("label_rate", f"{low:.4f} to {high:.4f} as {span}", f"{rate:.4f}")
    for name in sorted({*new, *(name for before in past for name in before)} - {label}):
        if not config.skips(name):
            known = [before[name] for before in past if name in before and before[name]["present"]]
            for rule, expected, got in _of_column(new.get(name), known, config, span):
                if rule != "drift" or matches_any(name, read):
                    yield from finding(rule, expected, got, name)


def _of_column(
    new: dict[str, Any] | None, known: Sequence[dict[str, Any]], config: ChecksConfig, span: str
) -> Iterator[tuple[Rule, str, str]]:
    """Yields the rules that a column breaks, as (rule, expected, got).

    Args:
        known: Statistics of the column on earlier days with values.
    """
    there = new is not None and new["present"] > 0
    if not known or not there or new is None:
        if there:
            yield "appeared", f"no values, as {span}", "values"
        elif known:
            yield "vanished", f"values, as {span}", "a column of nulls" if new else "no such column"
        return
    if _family(new["kind"]) != _family(known[-1]["kind"]):
        yield "changed_type", f"{known[-1]['kind']}, as {span}", new["kind"]
        return
    if len(known) < config.minimum_days:
        return
    past = [row["present"] / row["rows"] for row in known]
    middle, got = statistics.median(past), new["present"] / new["rows"]
    low, high = band(past, config.coverage_change, _noise(middle, new["rows"]), config.spread)
    if not low <= got <= high:
        yield "coverage", f"{low:.1%} to {min(1.0, high):.1%} of the rows, as {span}", f"{got:.1%}"
    lengths = [row["mean_length"] for row in known if row["mean_length"] is not None]
    if lengths and new["mean_length"] is not None:
        middle = statistics.median(lengths)
        noise = (
            2.0 * middle / math.sqrt(new["present"])
        )  # the deviation of list lengths is at most about twice their mean
        low, high = band(lengths, config.length_change * middle, noise, config.spread)
        if not low <= new["mean_length"] <= high:
            yield "length", f"{low:.2f} to {high:.2f} ids a list, as {span}", f"{new['mean_length']:.2f}"
    # A weekday has one value a day, and each day another. Lists of floats have neither a drift nor a number of values.
    alike = all((row["distinct"] or 0) <= 1 for row in [new, *known])
    if new["drift"] is not None and not alike:
        chance = NOISE * (1.0 / new["present"] + 1.0 / sum(row["present"] for row in known))
        usual = max((row["drift"] or 0.0 for row in known), default=0.0)
        limit = max(config.drift_limit + chance, RISE * usual)
        if new["drift"] > limit:
            expected = f"values spread as {span}: an index of at most {limit:.3f}"
            yield "drift", expected, f"{new['drift']:.3f}; compare the day's values with those of the days before"


def _day(
    day: datetime.date,
    outcome: Outcome,
    columns: Columns,
    label: str | None,
    limits: Mapping[str, tuple[float, float]] = MappingProxyType({}),
    rows: int = 0,
) -> DayCheck:
    return DayCheck(
        day=day,
        outcome=outcome,
        rows=_rows(columns) or rows,
        rows_band=limits.get("rows"),
        label_rate=_rate(columns, label),
        label_rate_band=limits.get("label_rate"),
        coverage={name: row["present"] / row["rows"] for name, row in columns.items() if name != label},
    )


def rows_of_day(statistics: pa.Table, day: datetime.date) -> pa.Table:
    """Returns the statistics of one day."""
    return statistics.filter(pa.compute.equal(statistics[DAY], pa.scalar(day, pa.date32())))


def _rows(columns: Columns) -> int:
    return next((int(row["rows"]) for row in columns.values()), 0)


def _rate(columns: Columns, label: str | None) -> float | None:
    return columns[label]["mean"] if label in columns else None


def _noise(share: float, rows: int) -> float:
    return math.sqrt(share * (1.0 - share) / rows)


def _family(kind: str) -> str:
    return "id" if kind == "number" else kind

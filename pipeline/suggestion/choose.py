"""Chooses how each column is used, and with which parameters. Every choice has its reason."""

import fnmatch
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from pipeline.data.alone import STRONG_AUC
from pipeline.errors import ConfigError
from pipeline.suggestion.facts import ColumnFacts, TableFacts, is_time
from pipeline.suggestion.shape import Shape, choose_shape
from pipeline.suggestion.splits import ChosenSplit
from storage.reader import DAY

LARGEST_TABLE = 1 << 22
"""Largest number of rows of an embedding table."""
SMALL_DISTINCT = 1 << 16
"""A table with up to this many ids gets four rows an id, a larger one two."""
MOST_MAPPED = 10_000
"""A column with more ids is hashed."""
FEW_IDS = 50
"""Integers with at most this many distinct values are categories."""
ROWS_AN_ID = 5
"""An id with fewer rows has too few to learn from."""
CALENDAR = 0.98
"""A column with a higher correlation with the day only says which day it is."""
OWN_DAYS = 1.5
"""Ids that occur on fewer days on average are those of a day."""
ROUGH = 6.0
"""Whole numbers are ids if neighbours differ in their label rate by more deviations than this."""
MOST_BUCKETED = 60
"""More numbers get no table each."""
EXACT = 2.0**53
"""Larger whole numbers are not all floats."""
PARTS = {"weekday": 21.0, "month": 400.0}
"""Days that a column of times spans before test rows that are later have known weekdays and months."""
SCALES = {"seconds": 1.0, "milliseconds": 1e3, "microseconds": 1e6}
LEAK_NAMES = ("*probability*", "true_*", "label_*", "*_label", "target", "prediction", "pctr", "pcvr")
USER_NAME = re.compile(r"(^|_)(user|customer|client|member|visitor|account|person|buyer|reader|viewer)", re.IGNORECASE)
ITEM_NAME = re.compile(
    r"(^|_)(item|product|article|movie|film|video|song|track|book|ad|campaign|sku|asin|listing|news|post|content)(?=$|s?_|id|\d)",
    re.IGNORECASE,
)
FEWEST_EVENTS = 5
"""Rows of a user, on average, from which a history of them is proposed."""
ID_NAME = re.compile(r"(^|_)(id|cat|code|type|category|user|item|hash|key)(?=$|_|\d)|id$", re.IGNORECASE)
TIME_NAME = re.compile(
    r"(^|_)(time|timestamp|ts|at|date|datetime|created|updated)($|_)|time$|timestamp$", re.IGNORECASE
)
COUNT_NAME = re.compile(
    r"(^|_)(num|n|int|count|cnt|age|days|hours|price|amount|total|sum|score)(?=$|_|\d)", re.IGNORECASE
)


@dataclass(frozen=True)
class Feature:
    """One feature that a column becomes."""

    use: Literal["dense", "sparse"]
    column: str
    """The column, or the derived one."""
    transforms: tuple[Mapping[str, Any], ...] = ()
    name: str = ""
    """Name of the feature, if it is not the column's."""
    list_of_ids: bool = False
    derived: Mapping[str, Any] | None = None
    """Op that makes the derived column."""


@dataclass(frozen=True)
class Choice:
    """How a column is used. A column may become several features, the main one first, or none."""

    fact: ColumnFacts
    why: str
    features: tuple[Feature, ...] = ()

    @property
    def use(self) -> Literal["dense", "sparse", "ignored"]:
        """Use of the main feature."""
        return self.features[0].use if self.features else "ignored"

    @property
    def transforms(self) -> tuple[Mapping[str, Any], ...]:
        """Transforms of the main feature."""
        return self.features[0].transforms if self.features else ()


@dataclass(frozen=True)
class Group:
    """Features with equal settings."""

    names: tuple[str, ...]
    """Columns, or patterns that match exactly them."""
    feature: Feature
    """One of them."""
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class ProposedHistory:
    """Columns from which a list of what a user did before can be made."""

    user: str
    item: Feature
    time: str
    timed: bool
    """Whether the time is a timestamp, as a history needs it."""


@dataclass(frozen=True)
class Suggestion:
    """The config sections that depend on the data."""

    label: str
    choices: tuple[Choice, ...]
    split: ChosenSplit
    shape: Shape
    groups: tuple[Group, ...]
    """Dense ones first."""
    history: ProposedHistory | None = None

    def of(self, use: str) -> list[Choice]:
        """Returns the columns of one use."""
        return [choice for choice in self.choices if choice.use == use]

    @property
    def notes(self) -> tuple[str, ...]:
        """What a person should look at: features that tell much of the label by themselves."""
        strong = [choice.fact for choice in self.choices if choice.features and choice.fact.alone.auc > STRONG_AUC]
        says = "by itself has an AUC of {:.2f}: keep it only if it is known before the label is"
        return tuple(f"'{fact.name}' {says.format(fact.alone.auc)}" for fact in strong)

    @property
    def derived(self) -> list[Mapping[str, Any]]:
        """Ops of derived columns."""
        return [one.derived for choice in self.choices for one in choice.features if one.derived is not None]


def suggest(
    observed: TableFacts,
    label: str,
    split: ChosenSplit,
    not_features: Mapping[str, str] | None = None,
    day_column: tuple[str, str | None] | None = None,
) -> Suggestion:
    """Suggests features and sizes for a table.

    Args:
        not_features: Column -> why it is not a feature, if that is known.
        day_column: Column that gives the day, and the unit of its numbers.
    Raises:
        ConfigError: If there is no column to learn from.
    """
    apart = dict(not_features or {}) | ({split.column: "the part of each row"} if split.column else {})
    names = [fact.name for fact in observed.facts]
    choices = [choose(fact, split, apart, day_column) for fact in observed.facts if fact.name not in (label, DAY)]
    choices = _with_buckets(choices, split.train_rows, {*names, DAY})
    tables = [one for choice in choices for one in choice.features if one.use == "sparse"]
    if not tables:
        numbers = sum(choice.use == "dense" for choice in choices)
        raise ConfigError(
            "suggestion", "a column to learn from", f"{numbers} usable of {len(choices)}", "Add columns to the rows."
        )
    ids = [
        choice.fact
        for choice in choices
        if any(one.use == "sparse" and not one.name and one.derived is None for one in choice.features)
    ]
    shape = choose_shape(ids, split.train_rows, split.validates)
    groups = _groups(choices, [*names, DAY])
    return Suggestion(label, tuple(choices), split, shape, groups, _find_history(choices, day_column))


def _find_history(choices: Sequence[Choice], day_column: tuple[str, str | None] | None) -> ProposedHistory | None:
    """Finds a user with several rows, an item and a time, judging by their names and types."""
    ids = [one for one in choices if one.use == "sparse" and one.fact.kind in ("id", "text", "number")]
    ids = [one for one in ids if one.fact.present >= FEWEST_EVENTS * one.fact.distinct and not one.features[0].derived]
    users, items = ([one for one in ids if name.search(one.fact.name)] for name in (USER_NAME, ITEM_NAME))
    given = None if day_column is None else day_column[0]
    times = [
        one.fact for one in choices if is_time(one.fact.type) or (one.fact.type != "DATE" and _time_unit(one.fact))
    ]
    times.sort(key=lambda fact: (not is_time(fact.type), fact.name != given))
    users = [one for one in users if one not in items]
    if not (users and items and times):
        return None
    user, item = (max(found, key=lambda one: one.fact.distinct) for found in (users, items))
    return ProposedHistory(user.fact.name, item.features[0], times[0].name, is_time(times[0].type))


HISTORY_LAST = 20
"""Events of a proposed history."""
HISTORY_DELAY_SECONDS = 3_600
"""After which an event counts as known."""


def _with_buckets(choices: Sequence[Choice], rows: int, taken: Collection[str]) -> list[Choice]:
    """Adds to each number its intervals as ids: tables learn steps and bends that a straight line cannot."""
    numbers = [choice for choice in choices if choice.use == "dense"]
    if len(numbers) > MOST_BUCKETED:
        return list(choices)
    quantiles = 16 if rows < 10_000 else 32 if rows < 1_000_000 else 64
    step = {"kind": "bucketize", "quantiles": quantiles}
    return [
        replace(
            choice,
            features=(*choice.features, Feature("sparse", choice.fact.name, (step,), name="{column}_bucket")),
        )
        if choice.use == "dense" and choice.fact.distinct > 2 and f"{choice.fact.name}_bucket" not in taken
        else choice
        for choice in choices
    ]


def choose(
    fact: ColumnFacts,
    split: ChosenSplit,
    not_features: Mapping[str, str] | None = None,
    day_column: tuple[str, str | None] | None = None,
) -> Choice:
    """Chooses how one column is used. The column that gives the day is a time like others, if it has one."""
    gives_day = day_column is not None and fact.name == day_column[0]
    unit = day_column[1] if gives_day and day_column is not None and day_column[1] else _time_unit(fact)
    if gives_day and split.by_time and not unit and not _is_time_or_date(fact):
        return Choice(fact, f"gives the column {DAY}")
    reason = _ignored(fact, not_features or {}, unit is not None)
    if reason is None and split.by_time and unit is None and abs(fact.by_day or 0.0) > CALENDAR:
        reason = f"follows the day (correlation {fact.by_day:.3f}): test days have values that no training day has"
    if reason is None and split.by_days and unit is None and _is_of_one_day(fact):
        reason = f"a value occurs on {fact.days_a_value:.1f} days: test days have values that no training day has"
    if reason is not None:
        return Choice(fact, reason)
    if unit is not None:
        return _time(fact, unit, split.by_time)
    if fact.kind not in ("number", "id"):
        return _sparse(fact, split)
    if not is_category(fact):
        return _dense(fact)
    ids, number = _sparse(fact, split), _dense(fact)
    if _is_named_id(fact) or fact.distinct <= FEW_IDS:
        return ids
    second = replace(number.features[0], name="{column}_number")
    return replace(ids, why=f"{ids.why}; also a number, {number.why}", features=(*ids.features, second))


def _time_unit(fact: ColumnFacts) -> str | None:
    """Returns the unit of a time or date. Empty: the column's type has it. None: it is neither."""
    if _is_time_or_date(fact):
        return ""
    low, high = fact.minimum or 0.0, fact.maximum or 0.0
    if fact.kind not in ("id", "number") or not TIME_NAME.search(fact.name) or fact.distinct < 3:
        return None
    return next((unit for unit, scale in SCALES.items() if 1e8 * scale < low <= high < 4.2e9 * scale), None)


def _is_time_or_date(fact: ColumnFacts) -> bool:
    return is_time(fact.type) or fact.type == "DATE"


def _time(fact: ColumnFacts, unit: str, by_time: bool) -> Choice:
    """Uses a time as its hour, weekday and month, and as a number where test rows are not later than training rows.

    Later test rows have a weekday or month of their own, unless the times span several of each.
    """
    low, high = fact.minimum or 0.0, fact.maximum or 0.0
    days = (high - low) / SCALES[unit] / 86_400.0 if unit else fact.days
    parts = [part for part, least in PARTS.items() if days >= (least if by_time else least / 10)]
    if fact.type != "DATE" and fact.hours != 1:
        parts = ["hour", *parts]
    features: list[Feature] = []
    for part in parts:
        op: dict[str, Any] = {"kind": "get_local_hour", "inputs": [fact.name], "output": f"{fact.name}_{part}"}
        op |= {"time_unit": unit} if unit else {}
        features.append(Feature("sparse", op["output"], derived=op | ({} if part == "hour" else {"part": part})))
    if not by_time and fact.present and fact.type != "DATE":
        steps: tuple[Mapping[str, Any], ...] = ({"kind": "standardise"}, {"kind": "fill_null"})
        features.append(Feature("dense", fact.name, steps))
    if not features:
        never = "" if fact.type == "DATE" else "a time of day that never changes; "
        return Choice(fact, f"{never}its date is later in test rows than in training rows")
    kept = "" if not by_time else "; its date is left out: test rows are later than training rows"
    named = "its " + ", ".join(parts) + " in UTC (time_zone changes it)" if parts else "a number"
    return Choice(fact, f"a time: {named}{kept}", tuple(features))


def _ignored(fact: ColumnFacts, not_features: Mapping[str, str], is_time: bool) -> str | None:
    """Why a column is not a feature. None: it is one."""
    if fact.name in not_features or fact.present == 0:
        return not_features.get(fact.name, "no values")
    if any(fnmatch.fnmatchcase(fact.name.lower(), pattern) for pattern in LEAK_NAMES):
        return "leaks the label, judging by its name"
    if fact.alone.leaks:
        return f"leaks the label: {fact.alone.words}"
    if is_time:
        return None
    if fact.kind == "other":
        return "lists of numbers"
    if fact.kind == "number" and _is_named_id(fact) and max(-(fact.minimum or 0.0), fact.maximum or 0.0) > EXACT:
        return "ids beyond 2^53 as floats, which are no longer exact: write them as integers or as text"
    if fact.distinct <= 1 and fact.kind != "ids":
        return "constant: one distinct value"
    ids = fact.kind == "text" or (fact.kind in ("id", "number") and is_category(fact))
    if ids and _has_few_rows_a_value(fact):
        if fact.readable == 1.0 and not ID_NAME.search(fact.name):
            return "numbers in text: write them as numbers"
        if fact.readable > 0.5 and not ID_NAME.search(fact.name):
            return (
                f"{fact.readable:.0%} of its values are numbers, others are text such as '{fact.word}': "
                "clean them, and it becomes a number"
            )
        return (
            f"about {max(1.0, fact.present / fact.distinct):.1f} rows an id: it identifies rows, too few to learn from"
        )
    return None


def _has_few_rows_a_value(fact: ColumnFacts) -> bool:
    return fact.present > 100 and fact.distinct * ROWS_AN_ID > fact.present


def _is_of_one_day(fact: ColumnFacts) -> bool:
    """Whether a column of ids has other values each day."""
    ids = fact.kind == "text" or (fact.kind in ("id", "number") and is_category(fact))
    return ids and fact.days_a_value is not None and fact.days_a_value < OWN_DAYS


def _is_named_id(fact: ColumnFacts) -> bool:
    """Whether the name is that of an id. The last word counts: `item_age` is an age, `count_id` an id."""
    return fact.type == "BOOLEAN" or _last_end(ID_NAME, fact.name) > _last_end(COUNT_NAME, fact.name)


def _last_end(pattern: re.Pattern[str], name: str) -> int:
    """Returns where the last match ends. 0: there is none."""
    return max((match.end() for match in pattern.finditer(name)), default=0)


def is_category(fact: ColumnFacts) -> bool:
    """Whether whole numbers are ids, judging by the name, else by their values and how the label depends on them."""
    if fact.kind == "number" and not fact.whole:
        return False
    if _is_named_id(fact):
        return True
    low, high = fact.minimum or 0.0, fact.maximum or 0.0
    span = high - low + 1
    even = abs((fact.mean or 0.0) - (low + high) / 2) < 0.1 * span  # most counts have a long tail
    if _has_few_rows_a_value(fact) and not even:
        return False
    if COUNT_NAME.search(fact.name) or low < 0 or (fact.kind == "number" and fact.distinct <= FEW_IDS):
        return fact.kind == "id" and fact.distinct <= 2
    if span > 2**31 or fact.distinct <= FEW_IDS:
        return True
    encoded = low <= 1 and fact.distinct > 0.9 * span and fact.distinct <= 10_000  # LabelEncoder counts from 0
    consecutive = fact.distinct > 1_000 and fact.distinct > 0.5 * span and even
    return encoded or consecutive or (fact.roughness or 0.0) > ROUGH


def _dense(fact: ColumnFacts) -> Choice:
    mean, deviation = fact.mean or 0.0, fact.deviation or 0.0
    low, high = fact.minimum or 0.0, fact.maximum or 0.0
    span = f"{low:.4g} to {high:.4g}, mean {mean:.4g}, deviation {deviation:.4g}, {fact.coverage:.0%} of rows"
    ops: list[dict[str, Any]] = [{"kind": "standardise"}]
    why = span
    if low >= 0 and high > 10 and (deviation > mean or high > 10 * mean):
        ops = [{"kind": "log"}, *ops]
        why = f"skewed: {span}"
    elif deviation > 0 and max(high - mean, mean - low) > 10 * deviation:
        ops = [*ops, {"kind": "clamp", "low": -5, "high": 5}]
        why = f"far outliers: {span}"
    return Choice(fact, why, (Feature("dense", fact.name, (*ops, {"kind": "fill_null"})),))


def _sparse(fact: ColumnFacts, split: ChosenSplit) -> Choice:
    """Gives each id a row of its own where they are few and stay the same, else hashes them."""
    size = table_rows(fact.distinct)
    share = f"{fact.coverage:.0%} of rows"
    capped = ", largest table suggested" if size == LARGEST_TABLE else ""
    why = f"about {fact.distinct:,} ids{capped}, {share}"
    hashed: dict[str, Any] = {"kind": "sigrid_hash", "size": size}
    if fact.distinct <= MOST_MAPPED and not split.by_time:
        # Ids of one training row, and unknown ones, share the last row.
        most = max(16, math.ceil(1.25 * fact.distinct))  # the count is about right
        hashed = {"kind": "map_id", "size": most, "min_count": 2, "unknown": most}
    if fact.kind != "ids":
        return Choice(fact, why, (Feature("sparse", fact.name, (hashed,)),))
    limit = fact.p99_length or 1
    limit = limit if limit <= 10 else 5 * math.ceil(limit / 5)
    lengths = f"lists of {fact.mean_length or 0:.1f} ids, 99 % up to {fact.p99_length}, longest {fact.max_length}"
    steps = ({"kind": "first_x", "limit": limit}, hashed)
    return Choice(fact, f"{why}, {lengths}", (Feature("sparse", fact.name, steps, list_of_ids=True),))


def table_rows(distinct: int) -> int:
    """Returns a power of two with room for new ids: four rows an id in small tables, two in large ones.

    Example:
        >>> table_rows(3), table_rows(1_000), table_rows(100_000), table_rows(10**9)
        (16, 4096, 262144, 4194304)
    """
    room = (4 if distinct <= SMALL_DISTINCT else 2) * max(1, distinct)
    return int(min(LARGEST_TABLE, max(16, 1 << math.ceil(math.log2(room)))))


def _groups(choices: Sequence[Choice], names: Sequence[str]) -> tuple[Group, ...]:
    """Groups features with equal settings, by pattern if one matches exactly their columns."""
    alike: dict[str, list[tuple[Feature, Choice]]] = {}
    for use in ("dense", "sparse"):
        for choice in choices:
            for one in choice.features:
                if one.use == use:
                    key = f"{use} {one.list_of_ids} {one.name} {one.transforms}"
                    alike.setdefault(key, []).append((one, choice))
    return tuple(
        Group(
            tuple(patterns([one.column for one, _ in group], names)),
            group[0][0],
            tuple(choice for _, choice in group),
        )
        for group in alike.values()
    )


def patterns(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """Returns patterns that match the wanted names and no others. A name without such a pattern is listed itself.

    Example:
        >>> patterns(["cat_a", "cat_b", "age"], ["age", "cat_a", "cat_b", "num_x"])
        ['cat_*', 'age']
        >>> patterns(["cat_a", "cat_b"], ["cat_a", "cat_b", "cat_c"])
        ['cat_a', 'cat_b']
    """
    found: dict[str, None] = {}
    for name in wanted:
        prefix = name.split("_")[0] + "_"
        taken = [other for other in names if other.startswith(prefix)]
        whole = "_" in name and len(taken) > 1 and set(taken) <= set(wanted)
        found[f"{prefix}*" if whole else name] = None
    return list(found)

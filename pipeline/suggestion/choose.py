"""Facts -> what each column is for, and with which numbers; every choice with its reason."""

import fnmatch
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.data.columns import NAME
from pipeline.errors import ConfigError
from pipeline.suggestion.facts import ColumnFacts, TableFacts
from storage.reader import DAY

LARGEST_TABLE = 1 << 22
"""Rows that an embedding table gets at most."""
SMALL_DISTINCT = 1 << 16
"""Up to so many ids a table has four rows for each, above it two."""
FEW_IDS = 50
"""Whole numbers of no more different values are categories."""
ROWS_AN_ID = 5
"""An id with fewer rows has nothing to learn from."""
LEAK = 0.95
"""Correlation with the label above which a column is taken for the label."""
LEAK_NAMES = ("*probability*", "true_*", "label_*", "*_label", "target", "prediction", "pctr", "pcvr")
ID_NAME = re.compile(r"(^|_)(id|cat|code|type|category|user|item|hash|key)($|_|\d)|id$", re.IGNORECASE)
COUNT_NAME = re.compile(
    r"(^|_)(num|n|int|count|cnt|age|days|hours|price|amount|total|sum|score)($|_|\d)", re.IGNORECASE
)


@dataclass(frozen=True)
class Choice:
    """What a column is for."""

    fact: ColumnFacts
    use: Literal["dense", "sparse", "ignored"]
    why: str
    transforms: tuple[Mapping[str, Any], ...] = ()
    list_of_ids: bool = False


@dataclass(frozen=True)
class Suggestion:
    """The sections of a config that depend on the data."""

    label: str
    choices: tuple[Choice, ...]
    split: Mapping[str, Any]
    split_why: str
    embedding_width: int
    width_why: str
    batch_rows: int
    groups: tuple[tuple[tuple[str, ...], tuple[Choice, ...]], ...]
    """(names or patterns, the columns they take), dense ones first."""

    def of(self, use: str) -> list[Choice]:
        """Columns of one use."""
        return [choice for choice in self.choices if choice.use == use]


def suggest(observed: TableFacts, label: str, apart: Mapping[str, str] | None = None) -> Suggestion:
    """A config's features, split and sizes for a table.

    Args:
        apart: Column -> why it is no feature, where that is known.
    Raises:
        ConfigError: If no column can be an id, or the label is constant.
    """
    known = {fact.name: fact for fact in observed.facts}
    if label not in known or known[label].distinct < 2:
        got = "a constant" if label in known else f"columns {', '.join(list(known)[:8])}"
        raise ConfigError(f"label '{label}'", "a column of 0 and 1", got, "Name another: label=COLUMN.")
    choices = [choose(fact, apart) for fact in observed.facts if fact.name not in (label, DAY)]
    sparse = [choice for choice in choices if choice.use == "sparse"]
    if not sparse:
        numbers = sum(choice.use == "dense" for choice in choices)
        raise ConfigError(
            "suggestion", "a column of ids, text or lists of ids", f"{numbers} columns of numbers alone",
            "Add one, or declare it by hand, with bucketize before it.",
        )  # fmt: skip
    split, split_why = _split(observed, sparse)
    width, width_why = _width(sparse)
    batch = min(4_096, max(256, 1 << round(math.log2(max(1, observed.rows / 40)))))
    groups = _groups(choices, [*known, DAY])
    return Suggestion(label, tuple(choices), split, split_why, width, width_why, batch, groups)


def choose(fact: ColumnFacts, apart: Mapping[str, str] | None = None) -> Choice:
    """What one column is for."""
    reason = _ignored(fact, apart or {})
    if reason is not None:
        return Choice(fact, "ignored", reason)
    if fact.kind == "number" or (fact.kind == "id" and not _is_category(fact)):
        return _dense(fact)
    return _sparse(fact)


def _ignored(fact: ColumnFacts, apart: Mapping[str, str]) -> str | None:
    """Why a column is no feature; None: it is one."""
    if not NAME.fullmatch(fact.name):
        return "no name that the warehouse takes; rename it"
    if fact.name in apart or fact.present == 0:
        return apart.get(fact.name, "no values")
    if any(fnmatch.fnmatchcase(fact.name.lower(), pattern) for pattern in LEAK_NAMES):
        return "told with the label, by its name"
    for what, value in (("its values go", fact.correlation), ("having a value goes", fact.presence)):
        if value is not None and abs(value) > LEAK:
            return f"{what} with the label, correlation {value:.3f}: told with it"
    if fact.kind == "other":
        return "lists of numbers" if fact.max_length else "a time; get_local_hour under `derived` makes hours of it"
    if fact.distinct <= 1 and fact.kind != "ids":
        return "one value in all rows that have one"
    ids = fact.kind == "text" or (fact.kind == "id" and _is_category(fact))
    if ids and fact.present > 100 and fact.distinct * ROWS_AN_ID > fact.present:
        return f"about {max(1.0, fact.present / fact.distinct):.1f} rows an id: names rows, nothing to learn from"
    return None


def _is_category(fact: ColumnFacts) -> bool:
    """Whether whole numbers are ids: by the name, else by how they lie."""
    if fact.type == "BOOLEAN" or ID_NAME.search(fact.name):
        return True
    low, high = fact.minimum or 0.0, fact.maximum or 0.0
    if high - low > 2**31 or fact.distinct <= 2:
        return True
    if COUNT_NAME.search(fact.name) or low < 0:
        return False
    if fact.distinct <= FEW_IDS:
        return True
    return fact.distinct > 1_000 and fact.distinct > 0.5 * (high - low + 1)  # ids are handed out one after the other


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
    return Choice(fact, "dense", why, (*ops, {"kind": "fill_null"}))


def _sparse(fact: ColumnFacts) -> Choice:
    size = table_rows(fact.distinct)
    share = f"{fact.coverage:.0%} of rows"
    capped = ", the largest that is suggested" if size == LARGEST_TABLE else ""
    why = f"about {fact.distinct:,} ids{capped}, {share}"
    hashed = {"kind": "sigrid_hash", "size": size}
    if fact.kind != "ids":
        return Choice(fact, "sparse", why, (hashed,))
    limit = first_ids(fact.p99_length or 1)
    lengths = f"lists of {fact.mean_length or 0:.1f} ids, 99 % up to {fact.p99_length}, longest {fact.max_length}"
    return Choice(fact, "sparse", f"{why}, {lengths}", ({"kind": "first_x", "limit": limit}, hashed), True)


def table_rows(distinct: int) -> int:
    """A power of two with room for ids to come: four rows an id in small tables, two in large ones.

    Example:
        >>> table_rows(3), table_rows(1_000), table_rows(100_000), table_rows(10**9)
        (16, 4096, 262144, 4194304)
    """
    room = (4 if distinct <= SMALL_DISTINCT else 2) * max(1, distinct)
    return int(min(LARGEST_TABLE, max(16, 1 << math.ceil(math.log2(room)))))


def first_ids(length: int) -> int:
    """A list's limit: the length that 99 of 100 keep, rounded up to a multiple of five above ten.

    Example:
        >>> first_ids(7), first_ids(41)
        (7, 45)
    """
    return length if length <= 10 else 5 * math.ceil(length / 5)


def _width(sparse: Sequence[Choice]) -> tuple[int, str]:
    most = max(choice.fact.distinct for choice in sparse)
    width = 8 if most <= 2_000 else 16 if most <= 200_000 else 32
    rows = sum(choice.transforms[-1]["size"] for choice in sparse)
    return (
        width,
        f"the largest column has about {most:,} ids; {rows:,} rows of tables, {rows * width * 4 / 2**20:,.1f} MiB",
    )


def _split(observed: TableFacts, used: Sequence[Choice]) -> tuple[dict[str, Any], str]:
    days = [day for day, _ in observed.days]
    if len(days) >= 2:
        *train, last = days
        valid: dict[str, Any] = {}
        why = f"{len(days)} days: the last one judges"
        if len(train) >= 2:
            *train, before = train
            valid, why = {"valid": [str(before)]}, f"{why}, the one before it stops"
        return {"days": {"train": [f"{train[0]}..{train[-1]}"], **valid, "test": [str(last)]}}, why
    keys = [choice for choice in used if choice.fact.kind in ("id", "text") and choice.fact.coverage > 0.99]
    if not keys:
        raise ConfigError("suggestion", "two days, or a column of ids in every row", "neither", "Name day_column=.")
    key = max(keys, key=lambda choice: choice.fact.distinct).fact
    shares = {"train": 0.8, "valid": 0.1, "test": 0.1}
    return {"hash": {"key": key.name, "shares": shares}}, f"one day: rows of one {key.name} stay together"


def _groups(choices: Sequence[Choice], names: Sequence[str]) -> tuple[tuple[tuple[str, ...], tuple[Choice, ...]], ...]:
    """Columns that share their settings, by pattern where one takes just them."""
    alike: dict[str, list[Choice]] = {}
    for use in ("dense", "sparse"):
        for choice in choices:
            if choice.use == use:
                alike.setdefault(f"{use} {choice.list_of_ids} {choice.transforms}", []).append(choice)
    return tuple((tuple(patterns([one.fact.name for one in group], names)), tuple(group)) for group in alike.values())


def patterns(wanted: Sequence[str], names: Sequence[str]) -> list[str]:
    """Patterns that take the wanted names and no others; names that share no such pattern stand for themselves.

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

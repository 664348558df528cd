"""Chooses how each column is used, and with which parameters. Every choice has its reason."""

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
"""Largest number of rows of an embedding table."""
SMALL_DISTINCT = 1 << 16
"""A table with up to this many ids gets four rows an id, a larger one two."""
FEW_IDS = 50
"""Integers with at most this many distinct values are categories."""
ROWS_AN_ID = 5
"""An id with fewer rows has too few to learn from."""
LEAK = 0.95
"""A column with a higher correlation with the label counts as a leak."""
LEAK_NAMES = ("*probability*", "true_*", "label_*", "*_label", "target", "prediction", "pctr", "pcvr")
ID_NAME = re.compile(r"(^|_)(id|cat|code|type|category|user|item|hash|key)($|_|\d)|id$", re.IGNORECASE)
COUNT_NAME = re.compile(
    r"(^|_)(num|n|int|count|cnt|age|days|hours|price|amount|total|sum|score)($|_|\d)", re.IGNORECASE
)


@dataclass(frozen=True)
class Choice:
    """How a column is used."""

    fact: ColumnFacts
    use: Literal["dense", "sparse", "ignored"]
    why: str
    transforms: tuple[Mapping[str, Any], ...] = ()
    list_of_ids: bool = False


@dataclass(frozen=True)
class Suggestion:
    """The config sections that depend on the data."""

    label: str
    choices: tuple[Choice, ...]
    split: Mapping[str, Any]
    split_why: str
    embedding_width: int
    width_why: str
    batch_rows: int
    groups: tuple[tuple[tuple[str, ...], tuple[Choice, ...]], ...]
    """(names or patterns, the columns they match), dense ones first."""

    def of(self, use: str) -> list[Choice]:
        """Returns the columns of one use."""
        return [choice for choice in self.choices if choice.use == use]


def suggest(observed: TableFacts, label: str, not_features: Mapping[str, str] | None = None) -> Suggestion:
    """Suggests features, split and sizes for a table.

    Args:
        not_features: Column -> why it is not a feature, if that is known.
    Raises:
        ConfigError: If no column can be an id, or the label is constant.
    """
    known = {fact.name: fact for fact in observed.facts}
    if label not in known or known[label].distinct < 2:
        got = "a constant" if label in known else f"columns {', '.join(list(known)[:8])}"
        raise ConfigError(f"label '{label}'", "a column of 0 and 1", got, "Name another: label=COLUMN.")
    choices = [choose(fact, not_features) for fact in observed.facts if fact.name not in (label, DAY)]
    sparse = [choice for choice in choices if choice.use == "sparse"]
    if not sparse:
        numbers = sum(choice.use == "dense" for choice in choices)
        raise ConfigError(
            "suggestion", "a column of ids, text or lists of ids", f"{numbers} columns of numbers alone",
            "Add one, or bucketize a number in features.sparse by hand.",
        )  # fmt: skip
    split, split_why = _split(observed, sparse)
    width, width_why = _width(sparse)
    batch = min(4_096, max(256, 1 << round(math.log2(max(1, observed.rows / 40)))))
    groups = _groups(choices, [*known, DAY])
    return Suggestion(label, tuple(choices), split, split_why, width, width_why, batch, groups)


def choose(fact: ColumnFacts, not_features: Mapping[str, str] | None = None) -> Choice:
    """Chooses how one column is used."""
    reason = _ignored(fact, not_features or {})
    if reason is not None:
        return Choice(fact, "ignored", reason)
    if fact.kind == "number" or (fact.kind == "id" and not _is_category(fact)):
        return _dense(fact)
    return _sparse(fact)


def _ignored(fact: ColumnFacts, not_features: Mapping[str, str]) -> str | None:
    """Why a column is not a feature. None: it is one."""
    if not NAME.fullmatch(fact.name):
        return "the warehouse does not accept this name; rename it"
    if fact.name in not_features or fact.present == 0:
        return not_features.get(fact.name, "no values")
    if any(fnmatch.fnmatchcase(fact.name.lower(), pattern) for pattern in LEAK_NAMES):
        return "leaks the label, judging by its name"
    for what, value in (("its values", fact.correlation), ("having a value", fact.presence)):
        if value is not None and abs(value) > LEAK:
            return f"leaks the label: correlation of {what} with it {value:.3f}"
    if fact.kind == "other":
        return "lists of numbers" if fact.max_length else "a time; get_local_hour under `derived` turns it into hours"
    if fact.distinct <= 1 and fact.kind != "ids":
        return "constant: one distinct value"
    ids = fact.kind == "text" or (fact.kind == "id" and _is_category(fact))
    if ids and fact.present > 100 and fact.distinct * ROWS_AN_ID > fact.present:
        return (
            f"about {max(1.0, fact.present / fact.distinct):.1f} rows an id: it identifies rows, too few to learn from"
        )
    return None


def _is_category(fact: ColumnFacts) -> bool:
    """Whether integers are ids, judging by the name, else by their distribution."""
    if fact.type == "BOOLEAN" or ID_NAME.search(fact.name):
        return True
    low, high = fact.minimum or 0.0, fact.maximum or 0.0
    if high - low > 2**31 or fact.distinct <= 2:
        return True
    if COUNT_NAME.search(fact.name) or low < 0:
        return False
    if fact.distinct <= FEW_IDS:
        return True
    return fact.distinct > 1_000 and fact.distinct > 0.5 * (high - low + 1)  # ids are assigned consecutively


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
    capped = ", largest table suggested" if size == LARGEST_TABLE else ""
    why = f"about {fact.distinct:,} ids{capped}, {share}"
    hashed = {"kind": "sigrid_hash", "size": size}
    if fact.kind != "ids":
        return Choice(fact, "sparse", why, (hashed,))
    limit = first_ids(fact.p99_length or 1)
    lengths = f"lists of {fact.mean_length or 0:.1f} ids, 99 % up to {fact.p99_length}, longest {fact.max_length}"
    return Choice(fact, "sparse", f"{why}, {lengths}", ({"kind": "first_x", "limit": limit}, hashed), True)


def table_rows(distinct: int) -> int:
    """Returns a power of two with room for new ids: four rows an id in small tables, two in large ones.

    Example:
        >>> table_rows(3), table_rows(1_000), table_rows(100_000), table_rows(10**9)
        (16, 4096, 262144, 4194304)
    """
    room = (4 if distinct <= SMALL_DISTINCT else 2) * max(1, distinct)
    return int(min(LARGEST_TABLE, max(16, 1 << math.ceil(math.log2(room)))))


def first_ids(length: int) -> int:
    """Returns the limit of a list: the 99th percentile of its length, rounded up to a multiple of five above ten.

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
        why = f"{len(days)} days: the last one tests"
        if len(train) >= 2:
            *train, before = train
            valid, why = {"valid": [str(before)]}, f"{why}, the one before it validates"
        return {"days": {"train": [f"{train[0]}..{train[-1]}"], **valid, "test": [str(last)]}}, why
    keys = [choice for choice in used if choice.fact.kind in ("id", "text") and choice.fact.coverage > 0.99]
    if not keys:
        raise ConfigError("suggestion", "two days, or a column of ids in every row", "neither", "Name day_column=.")
    key = max(keys, key=lambda choice: choice.fact.distinct).fact
    shares = {"train": 0.8, "valid": 0.1, "test": 0.1}
    return {"hash": {"key": key.name, "shares": shares}}, f"one day: rows of one {key.name} stay together"


def _groups(choices: Sequence[Choice], names: Sequence[str]) -> tuple[tuple[tuple[str, ...], tuple[Choice, ...]], ...]:
    """Groups columns with equal settings, by pattern if one matches exactly them."""
    alike: dict[str, list[Choice]] = {}
    for use in ("dense", "sparse"):
        for choice in choices:
            if choice.use == use:
                alike.setdefault(f"{use} {choice.list_of_ids} {choice.transforms}", []).append(choice)
    return tuple((tuple(patterns([one.fact.name for one in group], names)), tuple(group)) for group in alike.values())


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

"""Chooses a split in which every part has rows and both labels."""

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.data.config import PARTS, Part, SplitConfig
from pipeline.data.selection import select
from pipeline.errors import ConfigError, ContractError
from pipeline.suggestion.facts import ColumnFacts, DayFacts, TableFacts

WORDS: Mapping[Part, tuple[str, ...]] = {
    "train": ("train", "training", "trn"),
    "valid": ("valid", "validation", "val", "dev"),
    "test": ("test", "testing", "tst", "holdout", "eval"),
}
"""What people call the parts in a column."""
PART_SHARE = 0.1
"""Least share of the rows that validates, and that tests."""
TRAIN_SHARE = 0.3
"""Least share of the rows that trains."""
LABELS = 50
"""Rows of each label that a part should have, as far as there are so many in this share of all."""
LARGEST_KEY = 0.05
"""Largest share of the rows that may have one key: all of them are in one part."""
ONE_DAY = datetime.timedelta(days=1)
SMALL = 5_000
"""Fewer rows give larger shares to validation and test."""

RowKey = Callable[[], tuple[tuple[str, ...], float]]
"""Finds the columns that tell rows apart, and the largest share of equal rows."""


@dataclass(frozen=True)
class ChosenSplit:
    """A split, its reason, and what follows from it for the columns."""

    config: Mapping[str, Any]
    why: str
    train_rows: int
    """About as many."""
    by_time: bool = False
    """Whether test rows are later than training rows."""
    column: str | None = None
    """The column with the part of each row."""

    @property
    def by_days(self) -> bool:
        """Whether all rows of a day are in one part."""
        return "days" in self.config or "every_nth_day" in self.config

    @property
    def validates(self) -> bool:
        """Whether it has validation rows."""
        (kind, values), *_ = self.config.items()
        return (values["shares"] if kind == "hash" else values).get("valid") is not None


def choose_split(observed: TableFacts, given: SplitConfig | None, find_row_key: RowKey) -> ChosenSplit:
    """Chooses a split: the config's own, a column with the part, the last days, or row by row.

    Args:
        given: The config's own split.
    Raises:
        ConfigError: If too many rows are equal in all columns to be cut apart.
    """
    own = None if given is None else _keep(observed, given)
    split = own or _by_column(observed) or _by_days(observed.days)
    return split or _by_rows(observed, *find_row_key())


def _keep(observed: TableFacts, given: SplitConfig) -> ChosenSplit | None:
    """Returns the config's own split if it fits the rows."""
    config = given.model_dump(mode="json", exclude_defaults=True)
    column = given.column.name if given.column else None
    why = "as in the config"
    if given.column is not None:
        fact = next((one for one in observed.facts if one.name == column), None)
        parts = {part: getattr(given.column, part) for part in PARTS if getattr(given.column, part) is not None}
        if fact is None or any(not _has_both(observed, (fact.values or {}).get(of, (0, 0))) for of in parts.values()):
            return None
        assert fact.values is not None
        # As a column split writes it even where the names are its defaults: the file shows them.
        config["column"] = {"name": column, "valid": given.column.valid, **parts}
        return ChosenSplit(config, why, fact.values[given.column.train][0], column=column)
    counts = {day.day: (day.rows, day.positives) for day in observed.days}
    sizes: dict[Part, int] = {}
    for part in PARTS:
        try:
            chosen = select(given, part, list(counts), None)
        except ContractError:
            return None
        if chosen is not None:
            found = [counts[day] for day in chosen.days]
            sizes[part] = sum(rows for rows, _ in found)
            if not _has_both(observed, (sizes[part], sum(positives for _, positives in found))):
                return None
    share = 1.0
    if given.hash is not None:
        names = {one.name for one in observed.facts}
        share = given.hash.shares["train"]
        if not names.issuperset(given.hash.columns):
            return None
    return ChosenSplit(config, why, round(sizes["train"] * share), by_time=given.days is not None)


def _by_column(observed: TableFacts) -> ChosenSplit | None:
    """Returns a split by a text column that holds words for the parts."""
    for fact in observed.facts:
        found = _parts_of(fact)
        if found is not None and all(_has_both(observed, (fact.values or {})[value]) for value in found.values()):
            counts = ", ".join(f"{part} {(fact.values or {})[value][0]:,}" for part, value in found.items())
            config: dict[str, str | None] = {"name": fact.name, "valid": None}
            config.update({f"{part}": value for part, value in found.items()})
            rows = (fact.values or {})[found["train"]][0]
            return ChosenSplit({"column": config}, f"the column says the part: {counts} rows", rows, column=fact.name)
    return None


def _parts_of(fact: ColumnFacts) -> dict[Part, str] | None:
    """Returns part -> its value in a column, or None if the column does not hold the parts."""
    found: dict[Part, str] = {}
    for value in fact.values or {}:
        part = next((part for part, words in WORDS.items() if value.strip().casefold() in words), None)
        if part is None or part in found:
            return None
        found[part] = value
    return {part: found[part] for part in PARTS if part in found} if {"train", "test"} <= found.keys() else None


def _by_days(days: Sequence[DayFacts]) -> ChosenSplit | None:
    """Returns a split by the last days, or None if there are too few days or rows."""
    total, positives = sum(day.rows for day in days), sum(day.positives for day in days)
    observed = TableFacts((), tuple(days))
    end, cuts = len(days), []
    for _ in range(2):
        first = end
        while first > 0:
            first -= 1
            part = days[first:end]
            rows, hits = sum(day.rows for day in part), sum(day.positives for day in part)
            if rows >= PART_SHARE * total and _has_both(observed, (rows, hits)):
                break
        else:
            return None
        cuts.append((first, end))
        end = first
    train = days[:end]
    left = sum(day.rows for day in train)
    hits = sum(day.positives for day in train)
    if not train or left < TRAIN_SHARE * total or not 0 < hits < left or positives == 0:
        return None
    (test_first, test_end), (valid_first, valid_end) = cuts
    config = {
        "train": [_span(train[0].day, days[valid_first].day - ONE_DAY)],
        "valid": [_span(days[valid_first].day, days[test_first].day - ONE_DAY)],
        "test": [_span(days[test_first].day, days[-1].day)],
    }
    sizes = [sum(day.rows for day in part) for part in (train, days[valid_first:valid_end], days[test_first:])]
    why = f"{len(days)} days: the last {_count(test_end - test_first)} for the test, {_count(valid_end - valid_first)} "
    why += f"before for validation; {sizes[0]:,}, {sizes[1]:,} and {sizes[2]:,} rows"
    return ChosenSplit({"days": config}, why, left, by_time=True)


def _by_rows(observed: TableFacts, key: tuple[str, ...], largest: float) -> ChosenSplit:
    """Returns a split row by row, by a hash of the columns that tell rows apart."""
    if not key or largest > LARGEST_KEY:
        got = f"{largest:.0%} of the rows equal in {', '.join(key)}" if key else "no such columns"
        raise ConfigError(
            "suggestion, split", "days, a column with train/valid/test, or columns that tell rows apart", got,
            "Add a column that numbers the rows, or one with the values train, valid and test.",
        )  # fmt: skip
    rest = 0.2 if observed.rows < SMALL else PART_SHARE
    shares = {"train": round(1.0 - 2.0 * rest, 2), "valid": rest, "test": rest}
    days = f"{len(observed.days)} days are too few to split by" if len(observed.days) > 1 else "one day"
    why = f"{days}: each row by a hash of {', '.join(key)}, so rows of one user or item are in all parts"
    config = {"hash": {"key": key[0] if len(key) == 1 else list(key), "shares": shares}}
    return ChosenSplit(config, why, round(shares["train"] * observed.rows))


def _has_both(observed: TableFacts, part: tuple[int, int]) -> bool:
    """Whether (rows, rows with label 1) of a part hold enough of both labels."""
    rows, positives = part
    every = (observed.rows - observed.positives, observed.positives)
    least = [max(1, min(LABELS, round(0.02 * count))) for count in every]
    return rows - positives >= least[0] and positives >= least[1]


def _span(first: datetime.date, last: datetime.date) -> str:
    """Returns days of a part. It ends where the next one begins: a sample of the rows may lack days between them."""
    return f"{first}" if first == last else f"{first}..{last}"


def _count(days: int) -> str:
    return "one" if days == 1 else f"{days}"

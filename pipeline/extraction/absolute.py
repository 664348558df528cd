"""Rules that need no other day to compare with: what no day can be, and features that can teach nothing."""

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.data.joined.source import FeatureSource, pin_sources
from pipeline.data.present import last_possible_day
from pipeline.data.stored import to_key_form
from pipeline.errors import ConfigError, DataError, StorageError
from pipeline.extraction.config import Rule
from pipeline.transforms.joins import AnySource
from storage.warehouse import Warehouse

FEW_ROWS = 20
"""Fewer rows may have one label, and a feature one value, by chance."""
CHANCE = 1e-6
"""Least probability of a day with one label, if its rows are labelled as those of the other days."""

KEYS_MATCHED = 10_000
"""Rows whose keys are looked up in a feature source."""
KEY_SEPARATOR = pa.scalar("\x1f", pa.large_string())

Broken = tuple[Rule, str, str, str | None]
"""A rule that a day breaks, what was expected, what was found, and the column."""


def find_future(day: datetime.date, rows: int) -> Iterator[Broken]:
    """Yields the rule that a day which has not begun breaks."""
    last = last_possible_day()
    if day > last:
        yield "future", f"a day up to {last}", f"{rows:,} rows of a day that has not begun", None


def find_one_label(
    day: datetime.date,
    labels: Mapping[datetime.date, tuple[int, int]],
    open_days: Collection[datetime.date],
    has_table: bool,
) -> Iterator[Broken]:
    """Yields the rule that a day breaks whose rows all have one label.

    Where other days have both labels, it breaks the rule if that is no chance. An open day may still get its labels.

    Args:
        labels: Day -> its rows and those with label 1, of this day and of others.
        has_table: Whether the table has days already, whether or not they are among the others.
    """
    rows, positives = labels.get(day, (0, 0))
    if not rows or 0 < positives < rows:
        return
    others = [counts for other, counts in labels.items() if other != day]
    all_rows, all_positives = sum(count for count, _ in others), sum(count for _, count in others)
    if all_positives == (all_rows if positives else 0):
        broken = rows + all_rows >= FEW_ROWS and not (has_table and day in open_days)
    else:
        share = (all_positives + 1) / (all_rows + 2)
        broken = (share if positives else 1.0 - share) ** rows < CHANCE and day not in open_days
    if broken:
        yield "one_label", "rows of both labels", f"label {int(positives > 0)} in all {rows:,} rows", None


def find_few(what: str, matched: int, rows: int, least: float) -> Iterator[Broken]:
    """Yields the rule that rows break which match nearly nothing.

    Args:
        what: What they should match.
        least: Share of the rows that is to match.
    """
    if rows >= FEW_ROWS and matched < least * rows:
        yield "unmatched", f"at least {least:.1%} of the rows with a match in {what}", f"{matched:,} of {rows:,}", None


def open_sources(sources: Sequence[AnySource], root: Path, warehouse: Warehouse) -> Iterator[FeatureSource]:
    """Opens feature sources. Leaves out those that cannot be read yet: whoever joins them says what is wrong."""
    for source in sources:
        with suppress(ConfigError, DataError, StorageError):
            yield FeatureSource(pin_sources([source], root, warehouse)[0], warehouse)


def count_matched(source: FeatureSource, rows: pa.Table, least: float) -> int:
    """Returns how many rows have a key that a feature source has at any time. Stops counting at the share `least`.

    Args:
        rows: The keys, by their names in the rows.
    """
    where = source.pinned.where
    wanted = _joined_keys(
        [to_key_form(f"{where}, key '{name}'", rows[name].combine_chunks()) for name in source.source.on]
    )
    found = np.zeros(len(rows), bool)
    for part in source.rows(None, []):
        found |= pc.is_in(wanted, value_set=_joined_keys(part.keys)).to_numpy(zero_copy_only=False)
        if found.sum() >= least * len(rows):
            break
    return int(found.sum())


def _joined_keys(keys: Sequence[pa.Array]) -> pa.Array:
    """Joins the columns of a key to one of text. A key with a null is null."""
    return pc.binary_join_element_wise(*(pc.cast(key, pa.large_string()) for key in keys), KEY_SEPARATOR)


def find_constant(name: str, days: Sequence[Mapping[str, Any]]) -> Iterator[Broken]:
    """Yields the rule that a feature breaks without a value, or with the same one, in all rows.

    Args:
        days: Statistics of the column, of each new day.
    """
    rows, present = sum(one["rows"] for one in days), sum(one["present"] for one in days)
    if rows < FEW_ROWS:
        return
    if not present:
        yield "constant", "values", f"none in {rows:,} rows", name
    elif present == rows and len(values := {_only_value(one) for one in days}) == 1 and None not in values:
        yield "constant", "different values", f"the same one in all {rows:,} rows", name


def _only_value(one: Mapping[str, Any]) -> object:
    """Returns what tells the one value of a column from others, or None if it has several."""
    if one["distinct"] != 1 or one["mean_length"] is not None:
        return None
    return one["minimum"], one["maximum"], tuple(map(bool, one["histogram"] or ()))

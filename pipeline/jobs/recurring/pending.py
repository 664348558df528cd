"""Finds the days to train a champion on next: closed days in order, and learned days with other rows now."""

import datetime
from collections.abc import Collection, Mapping, Sequence

from pydantic import BaseModel

from pipeline.data.config import SplitConfig, day_span
from pipeline.data.present import newest_day

FEW_DAYS = 30
"""Up to so many changed days are trained on again incrementally, however few days the champion has learned."""


class PendingDays(BaseModel, frozen=True):
    """Days of a table that the champion has not learned with their present rows."""

    closed: tuple[datetime.date, ...]
    """Days after the champion's last one, in order, before the first open day."""
    open: tuple[datetime.date, ...]
    """All days of the table that may still get rows or labels."""
    waiting: tuple[datetime.date, ...]
    """Days after the first open one that are closed: days are learned in order."""
    changed: tuple[datetime.date, ...]
    """Days up to the champion's last one that it learned with other rows, or not at all because they came late."""
    newest: datetime.date | None
    """The newest closed day of the table."""
    rewritten: bool = False
    """Whether most of the learned days have changed, and more than a few."""


def find_pending(
    contents: Mapping[datetime.date, str],
    learned: Mapping[str, str],
    trained_to: datetime.date,
    open_days: Collection[datetime.date],
    split: SplitConfig,
) -> PendingDays:
    """Compares the days of a table with a champion's learned days.

    Args:
        contents: Day -> content of its rows now.
        learned: Day -> content of its rows when the champion learned it. Empty: not recorded.
        open_days: Days that are not closed.
        split: Its `hash.days` name the only days of the first model.
    Example:
        >>> from pipeline.data.config import HashSplit
        >>> day, split = datetime.date, SplitConfig(hash=HashSplit(key="user", shares={"train": 0.9, "test": 0.1}))
        >>> now = {day(2025, 1, number): "a" for number in (1, 2, 3, 4)}
        >>> found = find_pending(now, {"2025-01-01": "z"}, day(2025, 1, 1), [day(2025, 1, 3)], split)
        >>> [str(one) for part in (found.closed, found.open, found.waiting, found.changed) for one in part]
        ['2025-01-02', '2025-01-03', '2025-01-04', '2025-01-01']
    """
    new = sorted(day for day in contents if day > trained_to)
    first_open = next((number for number, day in enumerate(new) if day in open_days), len(new))
    first_learned = min(learned, default="9999")
    changed = [
        day
        for day in sorted(contents)
        if day <= trained_to and day not in open_days and f"{day}" >= first_learned
        and learned.get(f"{day}") != contents[day] and not _left_out(split, day)
    ]  # fmt: skip
    still_open = tuple(sorted(day for day in contents if day in open_days))
    newest = max(contents.keys() - set(still_open), default=None)
    rewritten = len(changed) > max(FEW_DAYS, len(learned) / 2)
    waiting = tuple(day for day in new[first_open:] if day not in open_days)
    return PendingDays(
        closed=tuple(new[:first_open]), open=still_open, waiting=waiting, changed=tuple(changed), newest=newest,
        rewritten=rewritten,
    )  # fmt: skip


def list_days(days: Sequence[datetime.date]) -> str:
    """Lists days for a log line: each of them, or the number and the ends of many.

    Example:
        >>> list_days([datetime.date(2025, 1, day) for day in (1, 2)])
        '2025-01-01, 2025-01-02'
        >>> list_days([datetime.date(2025, 1, day) for day in range(1, 15)])
        '14 days, from 2025-01-01 to 2025-01-14'
    """
    return ", ".join(map(str, days)) if len(days) <= 10 else f"{len(days)} days, from {days[0]} to {days[-1]}"


def find_open(
    days: Sequence[datetime.date], closed_after_hours: float | None, now: datetime.datetime
) -> set[datetime.date]:
    """Returns the days of a table that may still get rows.

    Args:
        closed_after_hours: Hours from the end of a day, in UTC, until it is closed. None: a later day closes it, once
            that has begun.
        now: In UTC.
    Example:
        >>> days = [datetime.date(2025, 1, 1), datetime.date(2025, 1, 2)]
        >>> now = datetime.datetime(2025, 1, 3, 5, tzinfo=datetime.UTC)
        >>> [sorted(map(str, find_open(days, hours, now))) for hours in (None, 4, 6)]
        [['2025-01-02'], [], ['2025-01-02']]
    """
    if closed_after_hours is None:
        newest = newest_day(days, now.date())
        return {day for day in days if newest is None or day >= newest}
    limit = now - datetime.timedelta(hours=closed_after_hours)
    return {day for day in days if _end_of(day) > limit}


def _end_of(day: datetime.date) -> datetime.datetime:
    return datetime.datetime.combine(day, datetime.time(), datetime.UTC) + datetime.timedelta(days=1)


def _left_out(split: SplitConfig, day: datetime.date) -> bool:
    """Whether the split leaves a day out, although it has later days."""
    if split.hash is None or split.hash.last_day is None or day > split.hash.last_day:
        return False
    spans = [day_span(text) for text in split.hash.days]
    return not any(first <= day <= last for first, last in spans)

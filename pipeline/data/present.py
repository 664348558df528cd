"""The present day. Rows never tell it: some clocks are wrong, and one such row would make its day the newest."""

import datetime
from collections.abc import Iterable

AHEAD_DAYS = 1
"""Days after today, in UTC, that rows may have: the time of a place is up to 14 hours ahead of UTC."""


def today() -> datetime.date:
    """Returns the present day in UTC."""
    return datetime.datetime.now(datetime.UTC).date()


def last_possible_day() -> datetime.date:
    """Returns the last day that a row can have. Rows of later days have a wrong time."""
    return today() + datetime.timedelta(days=AHEAD_DAYS)


def newest_day(days: Iterable[datetime.date], now: datetime.date | None = None) -> datetime.date | None:
    """Returns the newest of the days that have begun. None: none has.

    Args:
        now: None: today.
    Example:
        >>> days = [datetime.date(2025, 1, 3), datetime.date(2031, 1, 1)]
        >>> newest_day(days, now=datetime.date(2025, 1, 4))
        datetime.date(2025, 1, 3)
    """
    limit = now or today()
    return max((day for day in days if day <= limit), default=None)

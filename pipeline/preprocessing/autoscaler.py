"""How many workers it takes: as many as keep the trainer from waiting, and no more."""

import math
from dataclasses import dataclass

PERIOD_SECONDS = 2.0
"""How often the number is thought over."""
WAITING = 0.02
"""Share of a period that the trainer may wait before workers are added."""
SPARE = 1.3
"""One is let go only if those that stay have this much to spare, so that the number does not swing."""
QUIET_PERIODS = 5
"""Periods in a row in which workers were idle before one is let go."""


@dataclass
class Period:
    """What happened since the number was last thought over."""

    seconds: float
    wait_seconds: float
    """Time in which the trainer had nothing to train on."""
    rows: int
    """Rows the trainer took."""
    worked_seconds: float
    """Time of all workers at work."""
    worked_rows: int
    """Rows that workers have read."""
    idle: bool
    """Whether at some moment there was no work for a worker: all that may be held was read or on its way."""


class Autoscaler:
    """The number of workers, from what one delivers and what the trainer takes.

    Args:
        most: Bound for the number.
    Example:
        >>> autoscaler = Autoscaler(most=8)
        >>> autoscaler.after(Period(2.0, 1.5, 1_000, 2.0, 1_000, idle=False))
        4
    """

    def __init__(self, most: int) -> None:
        self.most, self.workers, self.quiet = most, 1, 0

    def after(self, period: Period) -> int:
        """Workers wanted after a period."""
        self.quiet = self.quiet + 1 if period.idle else 0
        needed = self._needed(period)
        if period.wait_seconds > WAITING * period.seconds:
            self.workers = min(max(math.ceil(needed or 0.0), self.workers + 1), self.most)
        elif self.quiet >= QUIET_PERIODS and needed is not None and needed * SPARE <= self.workers - 1:
            self.workers, self.quiet = self.workers - 1, 0
        return self.workers

    def _needed(self, period: Period) -> float | None:
        """Rows a second the trainer takes while it does not wait, over what a worker delivers."""
        busy = period.seconds - period.wait_seconds
        if not (period.rows and period.worked_rows and period.worked_seconds > 0.0 and busy > 0.0):
            return None
        return period.rows / busy / (period.worked_rows / period.worked_seconds)

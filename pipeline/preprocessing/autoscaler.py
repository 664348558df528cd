"""Chooses the number of workers: enough to keep the trainer from waiting, and no more."""

import math
from dataclasses import dataclass

PERIOD_SECONDS = 2.0
"""Time between two decisions."""
WAITING = 0.02
"""Add workers when the trainer waits for more than this share of a period."""
SPARE = 1.3
"""Remove a worker only if the others could deliver this many times what is needed. This keeps the number steady."""
QUIET_PERIODS = 5
"""Remove a worker only after this many periods in a row with an idle one."""


@dataclass
class Period:
    """What happened since the last decision."""

    seconds: float
    wait_seconds: float
    """Time in which the trainer had no batch."""
    rows: int
    """Rows that the trainer took."""
    worked_seconds: float
    """Working time of all workers together."""
    worked_rows: int
    """Rows that the workers read."""
    idle: bool
    """Whether a worker had no work at some moment, because everything that fits in memory was read or being read."""


class Autoscaler:
    """Derives the number of workers from what one worker delivers and what the trainer takes.

    Args:
        most: Upper bound of the number.
    Example:
        >>> autoscaler = Autoscaler(most=8)
        >>> autoscaler.after(Period(2.0, 1.5, 1_000, 2.0, 1_000, idle=False))
        4
    """

    def __init__(self, most: int) -> None:
        self.most, self.workers, self.quiet = most, 1, 0

    def after(self, period: Period) -> int:
        """Returns the number of workers wanted after a period."""
        self.quiet = self.quiet + 1 if period.idle else 0
        needed = self._needed(period)
        if period.wait_seconds > WAITING * period.seconds:
            self.workers = min(max(math.ceil(needed or 0.0), self.workers + 1), self.most)
        elif self.quiet >= QUIET_PERIODS and needed is not None and needed * SPARE <= self.workers - 1:
            self.workers, self.quiet = self.workers - 1, 0
        return self.workers

    def _needed(self, period: Period) -> float | None:
        """Divides the trainer's rows per second while it does not wait by the rows per second of one worker."""
        busy = period.seconds - period.wait_seconds
        if not (period.rows and period.worked_rows and period.worked_seconds > 0.0 and busy > 0.0):
            return None
        return period.rows / busy / (period.worked_rows / period.worked_seconds)

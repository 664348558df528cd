"""The simulated world: a clock, a queue of what happens when, and faults that strike by chance. One seed decides all."""

import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping


class BrokenPromise(AssertionError):
    """Something happened that must never happen."""


class World:
    """A clock that jumps from one event to the next.

    Args:
        faults: Kind of fault -> (how often it may strike, chance at each opportunity).
    Attributes:
        trace: What happened, for a person who repeats a schedule.
        struck: Kind of fault -> how often it struck.
    """

    def __init__(self, seed: int, faults: Mapping[str, tuple[int, float]] | None = None) -> None:
        self.random = random.Random(seed)
        self.now = 0.0
        self.trace: list[str] = []
        self.struck: Counter[str] = Counter()
        self.faults = dict(faults or {})
        self._coming: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedules an action."""
        heapq.heappush(self._coming, (self.now + seconds, next(self._number), action))

    def between(self, low: float, high: float) -> float:
        """Draws a number of seconds."""
        return self.random.uniform(low, high)

    def strikes(self, kind: str) -> bool:
        """Whether a fault happens now. Each kind happens a limited number of times, so every schedule can end."""
        left, chance = self.faults.get(kind, (0, 0.0))
        if left == 0 or self.random.random() >= chance:
            return False
        self.faults[kind] = (left - 1, chance)
        self.struck[kind] += 1
        self.note(f"fault: {kind}")
        return True

    def note(self, text: str) -> None:
        """Adds a line to the trace."""
        self.trace.append(f"{self.now:9.3f} {text}")

    def run(self, done: Callable[[], bool], patience: float, progress: Callable[[], object]) -> None:
        """Lets things happen until `done`.

        Args:
            patience: Longest time in seconds without any progress.
            progress: Returns a value that changes with progress.
        Raises:
            BrokenPromise: If nothing comes to an end.
        """
        since, last = self.now, progress()
        while not done():
            if not self._coming:
                raise BrokenPromise("nothing can happen any more, and the work is not done")
            self.now, _, action = heapq.heappop(self._coming)
            action()
            if (current := progress()) != last:
                since, last = self.now, current
            elif self.now - since > patience:
                raise BrokenPromise(f"no progress for {patience:.0f} s")


def require(true: object, what: str) -> None:
    """Raises if a promise is broken."""
    if not true:
        raise BrokenPromise(what)

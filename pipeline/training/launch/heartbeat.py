"""Heartbeat of a rank. The launcher uses it to detect ranks that hang."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

BEAT_SECONDS = 2.0
WAITING = "waiting for a batch"

Item = TypeVar("Item")


class Heartbeat:
    """Reports every few seconds what this process does, and a count that grows with every step of progress.

    A thread of its own sends the reports, so they also come while the process is busy. A count that stays the same
    means no progress.

    Args:
        emit: Takes `{"event": "alive", "count": .., "doing": ..}`. The thread calls it.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], seconds: float = BEAT_SECONDS) -> None:
        self.emit, self.seconds = emit, seconds
        self.count, self.doing = 0, "starting"
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def report(self, doing: str) -> None:
        """Counts progress and notes what the process does now."""
        self.count, self.doing = self.count + 1, doing

    def progress(self) -> None:
        """Counts progress of work beside what the process does."""
        self.count += 1

    def track(self, items: Iterator[Item], doing: str) -> Iterator[Item]:
        """Yields the items and reports the wait for each and the work on it."""
        while True:
            self.report(WAITING)
            try:
                item = next(items)
            except StopIteration:
                self.report(doing)
                return
            self.report(doing)
            yield item

    def _beat(self) -> None:
        pause = threading.Event()
        while not pause.wait(self.seconds):
            try:
                self.emit({"event": "alive", "count": self.count, "doing": self.doing})
            except (OSError, ValueError):  # the launcher is gone
                return

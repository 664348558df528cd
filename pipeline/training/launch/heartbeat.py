"""Signs of life of a rank, so that a group that hangs can be told from one that works."""

import threading
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

BEAT_SECONDS = 2.0
WAITING = "waiting for a batch"

Item = TypeVar("Item")


class Heartbeat:
    """Says every few seconds what this process does, and how often it has come further.

    A thread says it, so that it is said while the process is busy as well; whoever listens looks at the count.

    Args:
        emit: Takes `{"event": "alive", "count": .., "doing": ..}`; called by the thread.
    """

    def __init__(self, emit: Callable[[dict[str, Any]], None], seconds: float = BEAT_SECONDS) -> None:
        self.emit, self.seconds = emit, seconds
        self.count, self.doing = 0, "starting"
        self.thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self.thread.start()

    def report(self, doing: str) -> None:
        """Notes that something new has begun."""
        self.count, self.doing = self.count + 1, doing

    def track(self, items: Iterator[Item], doing: str) -> Iterator[Item]:
        """The items; notes the wait for each and the work on it."""
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
            except (OSError, ValueError):  # nobody listens any more
                return

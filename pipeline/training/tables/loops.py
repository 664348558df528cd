"""Runs numba loops on several threads. They are Python's, since the loops release the interpreter lock."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any


class LoopThreads:
    """Threads of a module that runs our own loops.

    Args:
        threads: Their number, with the calling one.
    Example:
        >>> LoopThreads(2).run(divmod, [(7, 2), (9, 4)])
        [(3, 1), (2, 1)]
    """

    def __init__(self, threads: int) -> None:
        self.pool = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def run(self, loop: Any, calls: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Makes one call on this thread and the others on the pool. Returns their results in order."""
        if self.pool is None:
            return [loop(*call) for call in calls]
        waiting = [self.pool.submit(loop, *call) for call in calls[1:]]
        mine = [loop(*call) for call in calls[:1]]
        return mine + [future.result() for future in waiting]

    def close(self) -> None:
        """Ends the threads."""
        if self.pool is not None:
            self.pool.shutdown()

"""The queue of one process: one request is scored at a time, in a thread, so that the others can be answered."""

import asyncio
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


class QueueFull(Exception):
    """The process holds as many requests as it may."""


class ScoringQueue:
    """Runs jobs one after another in a thread.

    Args:
        limit: Jobs that may wait or run.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.depth = 0
        """Jobs that wait or run."""
        self._jobs: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="scoring", daemon=True)
        self._thread.start()

    async def run(self, job: Callable[[], T], deadline: float) -> T:
        """Runs a job and returns its result.

        Args:
            deadline: Time of `time.monotonic`. A job that has not begun by then never does.
        Raises:
            QueueFull: If the queue is full.
            TimeoutError: If there is no result at the deadline.
        """
        if self.depth >= self.limit:
            raise QueueFull
        self.depth += 1
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        timer = loop.call_later(max(deadline - time.monotonic(), 0.0), _expire, future)
        self._jobs.put((job, future, loop, deadline))
        try:
            return await future
        finally:
            timer.cancel()

    def close(self) -> None:
        """Ends the thread after the jobs that wait."""
        self._jobs.put(None)

    def _work(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, future, loop, deadline = item
            result = error = None
            try:
                if future.cancelled() or time.monotonic() >= deadline:
                    raise TimeoutError
                result = job()
            except BaseException as caught:
                error = caught
            try:
                loop.call_soon_threadsafe(self._finish, future, result, error)
            except RuntimeError:  # the loop has ended
                return
            del item, job, future, result, error  # a version that is no longer served goes at once

    def _finish(self, future: "asyncio.Future[Any]", result: Any, error: BaseException | None) -> None:
        self.depth -= 1
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)


def _expire(future: "asyncio.Future[Any]") -> None:
    if not future.done():
        future.set_exception(TimeoutError())

"""MemoryBudget: the bytes that the rows and batches of a stream take, and whether more fit."""

from collections.abc import Callable
from typing import Any

READY_SHARE = 0.25
"""Share of the memory that batches may fill before a rank asks for them."""
BATCH_GROWTH = 2.0
"""A row of a batch takes at most this many times its bytes in a split, because ids are twice as wide."""

ResultHandle = Any
"""A result in the form in which its executor keeps it."""


class MemoryBudget:
    """Counts the bytes of a stream. Nothing else adds bytes.

    `used` are the bytes of all results that the stream holds. `coming` are the expected bytes of work that is being
    done or queued again. `ready` are the bytes of batches that no rank has taken yet, a part of `used`.

    Args:
        limit: Upper bound of `used`, which a group of batches that a rank waits for may exceed.
        free: Called with a result that is no longer needed.
    Attributes:
        row_bytes: Most bytes that a stored row took in a split so far. 0: unknown.
    """

    def __init__(self, limit: int, free: Callable[[ResultHandle], None]) -> None:
        self.limit, self.free = limit, free
        self.used = self.coming = self.ready = self.peak = 0
        self.row_bytes = 0.0

    def expect(self, change: int) -> None:
        """Adds the expected bytes of work, or takes away those of work that has ended."""
        self.coming += change

    def hold(self, change: int) -> None:
        """Adds the bytes of a result, or takes away those of a result that is gone with its worker."""
        self.used += change
        self.peak = max(self.peak, self.used)

    def offer(self, change: int) -> None:
        """Adds the bytes of batches that are ready, or takes away those of batches that are taken or gone."""
        self.ready += change

    def drop(self, memory: ResultHandle | None, size: int) -> None:
        """Frees a result, if there is one."""
        if memory is not None:
            self.used -= size
            self.free(memory)

    def learn(self, size: int, rows: int) -> None:
        """Learns from the bytes of a split what a stored row takes."""
        self.row_bytes = max(self.row_bytes, size / max(rows, 1))

    def split_bytes(self, rows: int) -> int:
        """Estimates the bytes of a split."""
        return int(rows * self.row_bytes)

    def batch_bytes(self, rows: int) -> int:
        """Estimates the bytes of batches."""
        return int(rows * self.row_bytes * BATCH_GROWTH)

    def fits(self, size: int) -> bool:
        """Returns whether more bytes fit beside all that is there or comes."""
        return self.used + self.coming + size <= self.limit

    def fits_early(self, size: int) -> bool:
        """Returns whether batches fit that no rank waits for."""
        return self.ready + size <= READY_SHARE * self.limit and self.fits(size)

"""Progress of long work: a bar on a terminal, a log line every few seconds elsewhere."""

import logging
import sys
import time
from types import TracebackType
from typing import Any, Self

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0
Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]


class Progress:
    """Bars by name, each made when it is first heard of.

    Args:
        logger: Takes the lines where there is no terminal.
        unit: What is counted.
    """

    def __init__(self, logger: Logger, unit: str = "rows") -> None:
        self.logger, self.unit = logger, unit
        self.terminal = sys.stderr.isatty()
        self.bars: dict[str, tqdm[Any]] = {}
        self.said: dict[str, float] = {}
        self.started: dict[str, float] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bar in self.bars.values():
            bar.close()

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Shows that `done` of `total` are through."""
        if self.terminal:
            bar = self.bars.setdefault(
                what, tqdm(total=total, desc=f"{what:>9}", unit=f" {self.unit}", unit_scale=True, dynamic_ncols=True)
            )
            bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)
            return
        now = time.monotonic()
        began = self.started.setdefault(what, now)
        if done >= total or now - self.said.get(what, began) >= SECONDS_BETWEEN_LINES:
            self.said[what] = now
            speed = f", {done / (now - began):,.0f} {self.unit}/s" if now - began > 0.5 else ""
            self.logger.info(
                "%s: %s of %s %s%s%s", what, f"{done:,}", f"{total:,}", self.unit, speed, f", {note}" if note else ""
            )

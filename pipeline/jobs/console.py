"""Progress of long work: a bar on a terminal, a log line every few seconds elsewhere, and a bar on the run's page."""

import contextvars
import logging
import sys
import threading
import time
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from prefect.artifacts import create_progress_artifact, update_progress_artifact
from tqdm import tqdm

from pipeline.jobs.training.summary import artifact_key

SECONDS_BETWEEN_LINES = 5.0
SECONDS_TO_END = 5.0
"""So long the last figures may take to reach the server; the work itself is over."""
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
        self.page = _Page(logger, unit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bar in self.bars.values():
            bar.close()
        self.page.close()

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Shows that `done` of `total` are through."""
        self.page.show(what, done, total, note)
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
            speed = f", {done / (now - began):,.0f} {self.unit}/s" if done > now - began > 0.5 else ""
            self.logger.info(
                "%s: %s of %s %s%s%s", what, f"{done:,}", f"{total:,}", self.unit, speed, f", {note}" if note else ""
            )


class _Page:
    """Progress artifacts of the run that this belongs to.

    A thread posts the newest figures: a server that is away holds up nobody, and what it cannot be told is left out.
    """

    def __init__(self, logger: Logger, unit: str) -> None:
        self.logger, self.unit = logger, unit
        self.newest: dict[str, tuple[float, str]] = {}
        self.posted: dict[str, tuple[float, str]] = {}
        self.made: dict[str, UUID] = {}
        self.ended = threading.Event()
        context = contextvars.copy_context()  # holds the run that the artifacts belong to
        self.thread = threading.Thread(target=context.run, args=(self._post_all,), daemon=True)

    def show(self, what: str, done: int, total: int, note: str) -> None:
        share = min(100.0 * done / total, 100.0) if total else 100.0
        self.newest[what] = (share, f"{done:,} of {total:,} {self.unit}{f', {note}' if note else ''}")
        if not self.thread.ident:
            self.thread.start()

    def close(self) -> None:
        self.ended.set()
        if self.thread.ident:
            self.thread.join(SECONDS_TO_END)

    def _post_all(self) -> None:
        over = False
        while not over:
            over = self.ended.wait(SECONDS_BETWEEN_LINES)
            for what, figures in dict(self.newest).items():
                if self.posted.get(what) != figures:
                    try:
                        self._post(what, *figures)
                        self.posted[what] = figures
                    except Exception as error:  # whatever keeps the server from taking it; the next ones may arrive
                        self.logger.debug("progress of %s is not on the run's page: %s", what, error)

    def _post(self, what: str, share: float, text: str) -> None:
        if what in self.made:
            update_progress_artifact(self.made[what], share, text)
        else:
            made: Any = create_progress_artifact(share, artifact_key("progress", what), text)
            self.made[what] = made

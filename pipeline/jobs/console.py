"""The console of a command: takes its log, progress and pages, and runs its steps.

Jobs import this module and no orchestrator. `flows/runtime/console.py` implements it with Prefect.
"""

import datetime
import functools
import logging
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, Self, TypeVar, cast

from tqdm import tqdm

SECONDS_BETWEEN_LINES = 5.0
"""Shortest time between two log lines about the same work."""
LONGEST_SILENCE = 600.0
QUIETER = 0.25
"""Share of the time since the beginning after which another line is due, so that long work writes few lines."""
Logger = logging.Logger | logging.LoggerAdapter[logging.Logger]
P = ParamSpec("P")
R = TypeVar("R")


UNITS = {"check": "days", "decode": "files", "download": "bytes", "keys": "row groups"}
"""Kind of work -> what it counts, where the work around it counts something else."""


class ProgressPage(Protocol):
    """Shows progress on the run's page."""

    def show(self, what: str, done: int, total: int, note: str) -> None:
        """Shows that `done` of `total` are done."""

    def close(self, done: bool) -> None:
        """Ends the bars: those of finished work go, others keep the last figures."""


class Progress:
    """Progress of long work: a bar on a terminal or log lines, and a bar on the run's page.

    Lines come after each tenth of the work and ever more rarely, at least every ten minutes.

    Args:
        logger: Takes the lines if there is no terminal. None: the page alone.
        unit: What is counted.
        page: Shows the same on a page.
    """

    def __init__(self, logger: Logger | None, unit: str = "rows", page: ProgressPage | None = None) -> None:
        self.logger, self.unit, self.page = logger, unit, page
        self.terminal = sys.stderr.isatty()
        self.bars: dict[str, tqdm[Any]] = {}
        self.began: dict[str, tuple[float, int]] = {}
        """Kind of work -> when it began, and how much was done then."""
        self.logged: dict[str, tuple[float, int]] = {}
        """Kind of work -> when it was logged last, and tenths that were done then."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for bar in self.bars.values():
            bar.close()
        if self.page is not None:
            self.page.close(error is None)

    def __call__(self, what: str, done: int, total: int, note: str = "") -> None:
        """Shows that `done` of `total` are done."""
        if self.page is not None:
            self.page.show(what, done, total, note)
        if self.logger is None:
            return
        if self.terminal:
            if what not in self.bars:  # each new bar is a line on the terminal
                unit = f" {UNITS.get(what, self.unit)}"
                self.bars[what] = tqdm(total=total, desc=f"{what:>9}", unit=unit, unit_scale=True, dynamic_ncols=True)
            bar = self.bars[what]
            bar.set_postfix_str(note, refresh=False)
            bar.update(done - bar.n)
            return
        now = time.monotonic()
        began, before = self.began.setdefault(what, (now, done))
        logged, tenths = self.logged.setdefault(what, (began, 10 * done // max(total, 1)))
        silence = now - logged
        longest = min(max(SECONDS_BETWEEN_LINES, QUIETER * (now - began)), LONGEST_SILENCE)
        new_tenth = silence >= SECONDS_BETWEEN_LINES and 10 * done // max(total, 1) > tenths
        if done >= total or silence >= longest or new_tenth:
            self.logged[what] = (now, 10 * done // max(total, 1))
            unit = UNITS.get(what, self.unit)
            parts = [f"{done:,} of {total:,} {unit}"]
            if done - before > now - began > 0.5:
                speed = (done - before) / (now - began)
                parts.append(f"{speed:,.0f} {unit}/s")
                parts += [f"{tqdm.format_interval((total - done) / speed)} to go"] if done < total else []
            parts += [note] if note else []
            share = f"{100 * done // total} %, " if 0 < done < total else ""
            self.logger.info("%s: %s%s", what, share, ", ".join(parts))


@dataclass(frozen=True)
class Step:
    """A part of a command that pages show separately."""

    name: str
    """May contain fields such as {name}, which the function's arguments fill."""
    makes: Literal["table", "model"] | None = None
    """What it writes. Pages show this as lineage."""
    reads: Literal["table"] | None = None


class Console:
    """Writes to Python's logging and runs steps as plain calls. Serves tests and commands without a server."""

    @property
    def log(self) -> Logger:
        """The log of the running step."""
        return logging.getLogger("dlrm")

    def progress(self, unit: str = "rows", quiet: bool = False) -> Progress:
        """Returns a progress bar.

        Args:
            unit: What is counted.
            quiet: Shows the bar on the run's page alone.
        """
        return Progress(None if quiet else self.log, unit)

    def run(self, step: Step, function: Callable[..., R], *args: Any, **kwargs: Any) -> R:
        """Runs a step."""
        return function(*args, **kwargs)

    def clear_history(self, before: datetime.datetime, dry_run: bool) -> int:
        """Removes the history of commands that ended before a moment. Returns their number.

        Args:
            dry_run: Only counts them.
        """
        return 0

    def show_text(self, kind: str, name: str, text: str, description: str = "") -> None:
        """Shows markdown on the run's page, under a key made of kind and name."""

    def show_table(self, kind: str, name: str, rows: Sequence[Mapping[str, Any]], description: str) -> None:
        """Shows rows as a table on the run's page."""

    def show_link(self, kind: str, name: str, address: str, text: str, description: str) -> None:
        """Shows a link on the run's page."""


class HasConsole(Protocol):
    """First argument of a step: a workspace, or an object that has one."""

    @property
    def console(self) -> Console:
        """The console that runs the step."""


H = TypeVar("H", bound=HasConsole)


def step(
    name: str, makes: Literal["table", "model"] | None = None, reads: Literal["table"] | None = None
) -> Callable[[Callable[Concatenate[H, P], R]], Callable[Concatenate[H, P], R]]:
    """Marks a function as a step. The console of its first argument runs it, Prefect's console as a task.

    Example:
        >>> from types import SimpleNamespace
        >>> @step("count")
        ... def count(workspace, rows):
        ...     return len(rows)
        >>> count(SimpleNamespace(console=Console()), [1, 2])
        2
    """
    marked = Step(name, makes, reads)

    def mark(function: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
        def run(holder: H, *args: P.args, **kwargs: P.kwargs) -> R:
            return holder.console.run(marked, function, holder, *args, **kwargs)

        functools.update_wrapper(run, function)
        return cast("Callable[Concatenate[H, P], R]", run)

    return mark


def one_line(error: BaseException) -> str:
    """Returns an error as one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def format_rows(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns rows as the lines of a text table.

    Example:
        >>> print(format_rows([{"table": "user", "ranks": [0, 1]}, {"table": "a", "ranks": [1]}]))
        table  ranks
        user   0 1
        a      1
    """
    lines = [list(rows[0])] if rows else []
    lines += [[_format_cell(value) for value in row.values()] for row in rows]
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))] if lines else []
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def _format_cell(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(_format_cell(item) for item in value)
    return f"{value:.3g}" if isinstance(value, float) else f"{value}"

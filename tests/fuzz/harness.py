"""One case of an input: a seed decides what is damaged. Whatever is not a right value or a refusal is a finding."""

import re
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from random import Random
from types import FrameType

from pipeline.errors import ContractError

SECONDS = 30.0
"""Most processor time of a case. DuckDB takes 10 to refuse a CSV file whose damaged header has 7,000 columns."""
WAIT_SECONDS = 300.0
"""Longest time of a case, however busy the machine is."""
MEMORY_BYTES = 1 << 30
"""Most memory that a case may take on top of what the process has before the first."""

Case = Callable[[Random], object]
"""Damages something and reads it. It returns, or raises ContractError if the reader refused."""
Input = Callable[[Path], AbstractContextManager[Case]]
"""Makes valid examples in a folder."""


class BrokenPromiseError(AssertionError):
    """A reader returned a wrong value."""


class TooLongError(BaseException):
    """A case takes too long. No reader may catch it."""


def require(true: object, what: str) -> None:
    """Raises if a reader broke a promise."""
    if not true:
        raise BrokenPromiseError(what)


def play(name: str, case: Case, number: int) -> str:
    """Plays one case and returns what the reader did: read or refused.

    Raises:
        BrokenPromiseError: If it did neither.
    """
    peak = _reset_peak()
    with _limited():
        try:
            case(Random(f"{name}:{number}"))
            done = "read"
        except ContractError as error:
            _check_sentence(error)
            done = "refused"
        except TooLongError:
            text = f"longer than {SECONDS:g} s of the processor or {WAIT_SECONDS:g} s"
            raise BrokenPromiseError(text) from None
    taken = _peak() - peak
    require(taken < MEMORY_BYTES, f"{taken >> 20} MiB of memory")
    return done


def _check_sentence(error: ContractError) -> None:
    text = str(error)
    parts = (error.where, error.expected, error.actual, error.remedy)
    require(
        all(isinstance(part, str) and part.strip() for part in parts),
        f"a part of the sentence is missing: {error!r:.300}",
    )
    require(error.remedy.endswith((".", "?")), f"a remedy that is no sentence: {error.remedy[:300]!r}")
    require(len(text) < 10_000, f"a sentence of {len(text)} characters: {text[:300]}")
    require(text.isprintable(), f"more than one line: {text[:300]!r}")


@contextmanager
def _limited() -> Iterator[None]:
    def stop(number: int, frame: FrameType | None) -> None:
        raise TooLongError

    limits = (
        (signal.ITIMER_PROF, signal.SIGPROF, SECONDS),
        (signal.ITIMER_REAL, signal.SIGALRM, WAIT_SECONDS),
    )
    before = [signal.signal(number, stop) for _, number, _ in limits]
    for timer, _, seconds in limits:
        signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        for (timer, number, _), handler in zip(limits, before, strict=True):
            signal.setitimer(timer, 0)
            signal.signal(number, handler)


def _reset_peak() -> int:
    """Makes the kernel forget the peak of this process's memory. Returns what it has now, in bytes."""
    Path("/proc/self/clear_refs").write_text("5")
    return _peak()


def _peak() -> int:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) << 10 if match else 0


def play_many(name: str, enter: Input, folder: Path, numbers: Iterable[int]) -> Counter[str]:
    """Plays some cases of an input and counts what the reader did.

    Raises:
        BrokenPromiseError: Of the first case that broke a promise. It says how to repeat it.
    """
    found: Counter[str] = Counter()
    folder.mkdir()
    with enter(folder) as case:
        for number in numbers:
            begun = time.perf_counter()
            try:
                found[play(name, case, number)] += 1
            except Exception as error:
                again = f"python -m tests.fuzz input={name} case={number}"
                raise BrokenPromiseError(f"{type(error).__name__}: {error}. Repeat it: {again}") from error
            found["ms"] += round(1e3 * (time.perf_counter() - begun))
    return found

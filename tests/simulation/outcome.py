"""What a schedule of the storage side did, and the folder that it does it in."""

import io
import sys
import tempfile
import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.simulation.disk import Killed
from tests.simulation.world import require


@dataclass
class Outcome:
    """What a schedule did."""

    faults: Counter[str]
    states: set[Any]
    sums: Counter[str]
    trace: list[str]


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields a folder in memory, if there is such a place, while nothing may fail aside.

    Raises:
        BrokenPromise: If a thread ended with an error in this block, or a traceback was printed.
    """
    memory, failed, printed = Path("/dev/shm"), list[str](), io.StringIO()

    def note(found: Any) -> None:
        if found.exc_value is not None and not isinstance(found.exc_value, Killed):
            failed.append("".join(traceback.format_exception(found.exc_value)))

    with (
        tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder,
        patch.object(threading, "excepthook", note),
        patch.object(sys, "unraisablehook", note),
        redirect_stderr(printed),
    ):
        yield Path(folder)
    failed += [text for text in [printed.getvalue()] if "Traceback" in text]
    require(not failed, f"{len(failed)} errors had no effect, the first is: {failed[:1]}")

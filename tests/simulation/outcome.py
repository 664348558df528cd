"""What a schedule of the storage side did, and the folder that it does it in."""

import tempfile
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass
class Outcome:
    """What a schedule did."""

    faults: Counter[str]
    states: set[Any]
    sums: Counter[str]
    trace: list[str]


@contextmanager
def scratch() -> Iterator[Path]:
    """Yields a folder in memory, if there is such a place."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        yield Path(folder)

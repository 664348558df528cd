"""Temporary folders that a killed process does not leave for ever: the next process to make one removes them."""

import contextlib
import fcntl
import os
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from pathlib import Path

SUFFIX = ".own"
"""Ending of the folders that are locked by their process."""


class ScratchFolder(tempfile.TemporaryDirectory[str]):
    """A temporary folder, deleted at the end or, if its process is killed, when the next one is made beside it.

    The process holds the kernel's lock of the folder while it lives, and so do processes that it forked. On a
    filesystem without locks a killed process leaves its folder.

    Args:
        prefix: Start of the folder's name. Folders with this start are cleared.
        parent: None takes the system's folder.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        place = Path(tempfile.gettempdir() if parent is None else parent)
        place.mkdir(parents=True, exist_ok=True)
        dead: dict[Path, int] = {}
        with _locking(place) as can_lock:  # nobody may see a folder between its creation and its lock
            if can_lock:
                dead = _lock_dead(place, prefix)
            super().__init__(SUFFIX if can_lock else "", prefix, place, ignore_cleanup_errors=True)
            own = _lock(Path(self.name)) if can_lock else None
        if own is not None:
            weakref.finalize(self, os.close, own)
        for folder, lock in dead.items():
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


@contextlib.contextmanager
def _locking(place: Path) -> Iterator[bool]:
    """Lets one process at a time make or clear folders of a place. Yields False if the place has no locks."""
    descriptor = os.open(place, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        locked = True
    except OSError:
        locked = False
    try:
        yield locked
    finally:
        os.close(descriptor)


def _lock_dead(place: Path, prefix: str) -> dict[Path, int]:
    """Locks the folders that no living process holds. Returns them with their locks."""
    found = {folder: _lock(folder) for folder in place.glob(f"{prefix}*{SUFFIX}")}
    return {folder: lock for folder, lock in found.items() if lock is not None}


def _lock(folder: Path) -> int | None:
    """Locks a folder and returns the descriptor that holds the lock, or None if another process has it."""
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:  # another user's, or gone
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor

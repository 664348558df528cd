"""Temporary folders that a killed process does not leave for ever: the next process to make one removes them."""

import fcntl
import os
import shutil
import tempfile
import weakref
from pathlib import Path

SUFFIX = ".own"
"""Ending of the folders that are locked by their process. They have it only once they are."""


class ScratchFolder:
    """A temporary folder, deleted at the end or, if its process is killed, when the next one is made beside it.

    The process holds the kernel's lock of the folder while it lives, and so do processes that it forked. On a
    filesystem without locks a killed process leaves its folder.

    Args:
        prefix: Start of the folder's name. Folders with this start are cleared.
        parent: None takes the system's folder.
    Attributes:
        name: Its path.
    """

    def __init__(self, prefix: str, parent: Path | None = None) -> None:
        place = Path(tempfile.gettempdir() if parent is None else parent)
        place.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp("", prefix, place))
        own = _lock(made)
        if own is not None:  # nobody takes it for a dead one before it is locked
            made = made.rename(f"{made}{SUFFIX}")
        self.name = str(made)
        self._end = weakref.finalize(self, _remove, self.name, own)
        for folder in place.glob(f"{prefix}*{SUFFIX}"):
            lock = _lock(folder)
            if lock is not None:  # no living process holds it
                _remove(str(folder), lock)

    def __enter__(self) -> str:
        return self.name

    def __exit__(self, *error: object) -> None:
        self.cleanup()

    def cleanup(self) -> None:
        """Deletes the folder."""
        self._end()


def _remove(folder: str, lock: int | None) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    if lock is not None:
        os.close(lock)


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

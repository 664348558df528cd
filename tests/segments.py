"""Segments of shared memory in /dev/shm that a process left behind."""

import os
from contextlib import suppress
from pathlib import Path


def segments() -> set[str]:
    """Returns their names. The folders there are scratch space."""
    return {one.name for one in os.scandir("/dev/shm") if one.is_file(follow_symlinks=False)}


def left_since(before: set[str]) -> set[str]:
    """Returns the new segments that no process has. Other tests, which run at the same time, have theirs."""
    found = segments() - before
    for maps in Path("/proc").glob("[0-9]*/maps") if found else ():
        with suppress(OSError):  # the process has ended meanwhile
            used = {line.rpartition("/dev/shm/")[2] for line in maps.read_text(errors="replace").splitlines()}
            found -= used
    return found

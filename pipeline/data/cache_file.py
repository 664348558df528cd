"""Files that remember what was learned of other files. Without them, or with damaged ones, it is learned again."""

import contextlib
import gzip
import json
import os
import time
import zlib
from pathlib import Path
from typing import Any

from storage.artifacts import atomic_file

KEPT_SECONDS = 30 * 86_400
"""How long a file that is not used any more is kept."""
UNREADABLE = (OSError, EOFError, zlib.error, ValueError, KeyError, IndexError, TypeError, AttributeError)
"""Errors of a file that is missing, damaged or of another version."""


def read_cache(path: Path) -> Any:
    """Returns what was written, or raises one of UNREADABLE."""
    content = path.read_bytes()
    with contextlib.suppress(OSError):  # another user's
        os.utime(path)  # it is in use
    return json.loads(gzip.decompress(content))


def write_cache(path: Path, content: object, family: str) -> None:
    """Writes a file as a whole or not at all, and deletes old ones whose names begin with `family`.

    Args:
        content: Anything that JSON can hold.
    """
    with contextlib.suppress(OSError), atomic_file(path) as draft:  # without room, the next command learns again
        draft.write_bytes(gzip.compress(json.dumps(content).encode(), 1))
    for other in path.parent.glob(f"{family}-*"):
        with contextlib.suppress(OSError):
            if time.time() - other.stat().st_mtime > KEPT_SECONDS:
                other.unlink()

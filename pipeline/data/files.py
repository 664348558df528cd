"""Files that a configuration names, and what tells one that was read before from one that has changed."""

import glob
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ConfigError

CSV = re.compile(r"\.csv(\.\w+)?$", re.IGNORECASE)
"""Names of CSV files, compressed ones too."""
Stamp = tuple[str, int, int]
"""Name, size and time of change of a file."""


def files_of(pattern: str | Sequence[str], root: Path, where: str) -> list[Path]:
    """Files that a path, a glob or several of them name, sorted by name.

    Raises:
        ConfigError: If there is none.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    names = [str(Path(text).expanduser()) for text in patterns]
    found = {root / path for name in names for path in [name, *glob.glob(name, root_dir=root, recursive=True)]}
    files = sorted({path.resolve() for path in found if path.is_file()})  # a file named twice is read once
    if not files:
        raise ConfigError(
            where, "at least one file", f"none at '{', '.join(patterns)}'", "Correct the path, or put the data there."
        )
    return files


def stamp(path: Path) -> Stamp:
    """What tells that a file is the one already read."""
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


def fingerprint(value: object) -> str:
    """What tells a value from others, by its JSON: 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

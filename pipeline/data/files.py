"""Finds configured files and detects changed ones."""

import glob
import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path

from pipeline.errors import ConfigError

CSV = re.compile(r"\.csv(\.\w+)?$", re.IGNORECASE)
"""Matches names of CSV files, including compressed ones."""
Stamp = tuple[str, int, int]
"""Name, size and modification time of a file."""


def find_files(pattern: str | Sequence[str], root: Path, where: str) -> list[Path]:
    """Finds the files of one or more paths or globs, sorted by name.

    Raises:
        ConfigError: If there are none.
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
    """Returns the stamp of a file, which changes with its content."""
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


def fingerprint(value: object) -> str:
    """Hashes the JSON of a value to 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

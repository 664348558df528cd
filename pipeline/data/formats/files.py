"""Finds configured files, local ones and those of object stores, and detects changed ones."""

import glob
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from pipeline.errors import ConfigError
from storage.names import Format
from storage.objects import ObjectFile, find_objects, is_address

CSV = re.compile(r"\.csv(\.\w+)?$", re.IGNORECASE)
"""Matches names of CSV files, including compressed ones."""
JSON = re.compile(r"\.(json|jsonl|ndjson)(\.\w+)?$", re.IGNORECASE)
"""Matches names of files of JSON lines, including compressed ones."""
AVRO = re.compile(r"\.avro$", re.IGNORECASE)
"""Matches names of Avro files. Their blocks are compressed, not the files."""
NAMED: Mapping[Format, re.Pattern[str]] = {"csv": CSV, "json": JSON, "avro": AVRO}
"""Format -> names of its files."""
Stamp = tuple[str, int, int]
"""Name, size and modification time of a file."""
SourceFile = Path | ObjectFile
"""A local file, or one of an object store."""


def folder_values(file: SourceFile) -> dict[str, str]:
    """Returns key -> value of the folders that a file is in.

    Example:
        >>> folder_values(Path("/logs/country=DE/day=2025-01-31/a.parquet"))
        {'country': 'DE', 'day': '2025-01-31'}
    """
    return dict(re.findall(r"(?:^|/)([^/=]+)=([^/]*)(?=/)", address_of(file)))


def find_files(
    pattern: str | Sequence[str], root: Path, where: str, properties: Mapping[str, str] = MappingProxyType({})
) -> list[SourceFile]:
    """Finds the files of one or more paths, addresses or globs, sorted by name. Local ones come first.

    Args:
        properties: Access to object stores: `warehouse.catalog`.
    Raises:
        ConfigError: If there are none.
        StorageError: If an object store cannot be listed.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    remote = sorted({one for text in patterns if is_address(text) for one in find_objects(text, properties)})
    names = [str(Path(text).expanduser()) for text in patterns if not is_address(text)]
    found = {root / path for name in names for path in [name, *glob.glob(name, root_dir=root, recursive=True)]}
    local = sorted({path.resolve() for path in found if path.is_file()})  # a file named twice is read once
    files: list[SourceFile] = [*local, *remote]
    if not files:
        raise ConfigError(
            where, "at least one file", f"none at '{', '.join(patterns)}'", "Correct the path, or put the data there."
        )
    return files


def form_of(file: SourceFile, form: Format) -> Format:
    """Returns the format of a file: the given one, or as its name says."""
    return next((one for one, names in NAMED.items() if names.search(file.name)), "parquet") if form == "auto" else form


def address_of(file: SourceFile) -> str:
    """Returns the absolute path of a local file, or the address of an object."""
    return str(file.resolve()) if isinstance(file, Path) else file.address


def stamp(path: SourceFile) -> Stamp:
    """Returns the stamp of a file, which changes with its content. That of an object is from when it was listed."""
    if isinstance(path, ObjectFile):
        return path.name, path.size, path.modified_ns
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


def fingerprint(value: object) -> str:
    """Hashes the JSON of a value to 16 hexadecimal digits."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:16]

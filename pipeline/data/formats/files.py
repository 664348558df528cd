"""Finds configured files, local ones and those of object stores, and detects changed ones."""

import glob
import hashlib
import json
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType

from pipeline.errors import ConfigError
from storage.names import Format
from storage.objects import ObjectFile, find_objects, is_address

CSV = re.compile(r"\.(csv|tsv)(\.\w+)?$", re.IGNORECASE)
"""Matches names of CSV files, including compressed ones."""
JSON = re.compile(r"\.(json|jsonl|ndjson)(\.\w+)?$", re.IGNORECASE)
"""Matches names of files of JSON lines, including compressed ones."""
AVRO = re.compile(r"\.avro$", re.IGNORECASE)
"""Matches names of Avro files. Their blocks are compressed, not the files."""
NAMED: Mapping[Format, re.Pattern[str]] = {"csv": CSV, "json": JSON, "avro": AVRO}
"""Format -> names of its files."""
HIDDEN = ("_", ".")
"""Starts of names that globs leave out."""
TABLES = {"_delta_log/*.json": "Delta", "metadata/*.metadata.json": "Iceberg", ".hoodie/hoodie.properties": "Hudi"}
"""Log of a table in its folder -> kind of the table."""
DEEPEST_TABLE = 5
"""How many folders up a file's table is looked for."""
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

    Files and folders whose names begin with `_` or `.` are hidden from globs, as Spark, Hive and Arrow hide them: they
    are not finished, or no data. A path names them if it has such a name itself.

    Args:
        properties: Access to object stores: `warehouse.catalog`.
    Raises:
        ConfigError: If there are none, or none at a path that is no glob, or a link leads nowhere, or a folder is a
            table of Delta, Iceberg or Hudi.
        StorageError: If an object store cannot be listed.
    """
    patterns = [pattern] if isinstance(pattern, str) else list(pattern)
    listed = {text: find_objects(text, properties) for text in patterns if is_address(text)}
    remote = sorted({one for text in listed for one in listed[text] if not _is_hidden(one.address, text)})
    names = [os.path.expanduser(text) for text in patterns if not is_address(text)]
    found = {os.path.join(root, name) for name in names}  # as text: a `Path` takes ten times as long
    for name in names:
        given = glob.glob(name, root_dir=root, recursive=True)
        found |= {os.path.join(root, path) for path in given if not _is_hidden(path, name)}
    folders = {folder: os.path.realpath(folder) for folder in {os.path.dirname(path) for path in found}}
    for path in found:
        if os.path.islink(path) and not os.path.exists(path):
            raise ConfigError(
                where, "files that are there", f"the link '{path}' to none at '{os.path.realpath(path)}'",
                "Fetch its content, or remove the link.",
            )  # fmt: skip
    real = {  # a file named twice is read once
        os.path.realpath(path)
        if os.path.islink(path)
        else os.path.join(folders[os.path.dirname(path)], os.path.basename(path))
        for path in found
        if os.path.isfile(path)
    }
    local = [Path(path) for path in sorted(real, key=lambda path: path.split("/"))]
    files: list[SourceFile] = [*local, *remote]
    places = {text: text for text in listed} | {name: os.path.join(root, name) for name in names}
    absent = [text for text in places if not (listed.get(text) or os.path.isfile(places[text]))]
    if files:  # a glob beside others may match nothing yet
        absent = [text for text in absent if not glob.has_magic(text)]
    if absent:
        got = f"none at '{', '.join(places[text] for text in absent)}'"
        raise ConfigError(where, "at least one file", got, "Correct the path, or put the data there.")
    _refuse_tables(where, [*local, *remote[:1]], properties)  # a listing of a store takes a while
    return files


def _is_hidden(path: str, pattern: str) -> bool:
    """Tells whether a part of a path that a glob found begins with _ or . though no part of the glob does."""
    given = {part for part in pattern.split("/") if part.startswith(HIDDEN)}
    hidden = [part for part in path.split("/") if part.startswith(HIDDEN)]
    return any(not any(fnmatch(part, one) for one in given) for part in hidden)


def _refuse_tables(where: str, files: Sequence[SourceFile], properties: Mapping[str, str]) -> None:
    """Refuses data files of a table: its log, and not the folder, says which of them count."""
    parents = dict.fromkeys(str(file).rpartition("/")[0] for file in files)
    folders = dict.fromkeys(folder for parent in parents for folder in _folders(parent))
    for folder in folders:
        for mark, kind in TABLES.items():
            found = find_objects(f"{folder}/{mark}", properties) if is_address(folder) else [*Path(folder).glob(mark)]
            if found:
                raise ConfigError(
                    where, "loose files", f"data files of the {kind} table '{folder}'",
                    "Read it as a table with source.table, or name a copy of its rows.",
                )  # fmt: skip


def _folders(parent: str) -> list[str]:
    """Returns the folders that the table of a file in a folder may have, nearest first."""
    parts = parent.split("/")
    least = 3 if is_address(parent) else 2  # below the bucket, or the root
    return ["/".join(parts[:end]) for end in range(len(parts), least - 1, -1)][:DEEPEST_TABLE]


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

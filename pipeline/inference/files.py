"""The files of a packed model, and whether they are still the registered ones."""

import time
from collections.abc import Mapping
from pathlib import Path

from pipeline.errors import RegistryError
from storage.artifacts import sha256

MODEL, PLAN, WEIGHTS = "model.json", "plan.json", "weights.safetensors"
"""Files of a packed model."""
PACKED = "artifacts/model"
"""Folder of the packed model among the files of a version."""
FILES = "files_sha256"
"""Tag of a version, and entry of its metadata: names and hashes of the packed files, to detect later damage."""
EXAMPLE = "serving_input_example.json"
"""File of a version: a body for /invocations, made of rows of the training."""
SETTLED_SECONDS = 2.0
"""Age from which the time of a file tells that nobody has written it since."""
_hashed: dict[tuple[int, int, int, int], str] = {}
"""Device, inode, size and time of a file -> its sha256."""


def check_files(where: str, folder: Path, hashes: Mapping[str, str]) -> None:
    """Compares the files of a packed model with their hashes.

    Raises:
        RegistryError: If a file has changed or is missing. Names it.
    """
    for name, digest in hashes.items():
        there = (folder / name).is_file()
        if not there or _hash(folder / name) != digest:
            remedy = "Restore them from a copy, or promote another version."
            found = f"{'another' if there else 'no'} {name}"
            raise RegistryError(where, "the files that were registered", found, remedy)


def hash_files(folder: Path) -> dict[str, str]:
    """Returns name -> sha256 of the files that `pack` wrote."""
    return {name: _hash(folder / name) for name in (MODEL, PLAN, WEIGHTS)}


def _hash(path: Path) -> str:
    """Returns the sha256 of a file, which is read once by this process under all its names.

    One that was written just now is read again: its time would not tell another write.
    """
    found = path.stat()
    stamp = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
    if stamp not in _hashed:
        digest = sha256(path)
        if time.time() - found.st_mtime < SETTLED_SECONDS:
            return digest
        _hashed[stamp] = digest
    return _hashed[stamp]

"""The version of code that makes files which are read later."""

import hashlib
import platform
from collections.abc import Iterable
from importlib.metadata import version

from pipeline.processes.process import PACKAGES


def hash_code(rooms: Iterable[str], libraries: Iterable[str]) -> str:
    """Returns a hash of the code below some folders, and of the libraries that it uses.

    Call it when the code is imported. Later, the files on the disk may be newer than what runs.
    """
    digest = hashlib.sha256(" ".join([platform.machine(), *map(version, libraries)]).encode())
    for path in sorted(path for room in rooms for path in (PACKAGES / room).rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(PACKAGES)} {len(content)}\n".encode() + content)
    return digest.hexdigest()

"""What a process computes with: our sources, the lock file and the packages. Processes of one job must agree on it."""

import hashlib
import importlib.metadata
import importlib.util
import platform
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from pydantic import BaseModel

from pipeline.errors import ConfigError
from pipeline.processes.process import PACKAGES
from storage.artifacts import hash_contents

ROOMS = ("pipeline", "storage", "models")
"""Folders with the code that ranks may import. Ray sends these to the machines of a cluster, each to a folder of its
own."""
COMPUTING = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numba", "numpy", "pyarrow", "duckdb")
"""Packages that the bits of a training depend on."""


class Build(BaseModel, frozen=True):
    """What a process computes with."""

    host: str
    sources: str
    """Hash of our source files."""
    lock: str | None
    """Hash of the lock file of the dependencies. None: this machine has none."""
    versions: Mapping[str, str]
    """Of Python and of the packages that compute."""

    def differences(self, other: "Build") -> dict[str, tuple[str, str]]:
        """Returns name -> the version here and that of another build, of what differs.

        Builds of a package for a processor and for a GPU count as the same. So does a missing lock file.
        """
        mine, theirs = ({"sources": one.sources, **_comparable(one.versions)} for one in (self, other))
        if self.lock and other.lock:
            mine, theirs = mine | {"lock file": self.lock}, theirs | {"lock file": other.lock}
        names = dict.fromkeys([*mine, *theirs])
        pairs = {name: (mine.get(name, "none"), theirs.get(name, "none")) for name in names}
        return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def _comparable(versions: Mapping[str, str]) -> dict[str, str]:
    return {name.removesuffix("-cpu"): version.partition("+")[0] for name, version in versions.items()}


def require_same(first: str, build: Build, others: Mapping[str, Build]) -> None:
    """Refuses processes that compute with other code or packages than the first one.

    Args:
        first: What the error calls the first process.
        others: Name -> build of each other process.
    Raises:
        ConfigError: Names the process, its host and what differs.
    """
    for name, other in others.items():
        found = build.differences(other)
        if found:
            want, got = (", ".join(f"{one} {pair[side]}" for one, pair in found.items()) for side in (0, 1))
            raise ConfigError(
                f"{name} on host {other.host}", f"the code and packages of {first} on host {build.host}, {want}", got,
                "Install the same commit and its requirements/ on all hosts.",
            )  # fmt: skip


@cache
def read_build() -> Build:
    """Returns what this process computes with, as it is at the first call. Call it when the code is imported."""
    versions = {"python": platform.python_version()} | read_packages()
    return Build(host=socket.gethostname(), sources=hash_sources(), lock=hash_lock(), versions=versions)


def read_packages() -> dict[str, str]:
    """Returns the versions of the installed packages that compute."""
    found = {}
    for package in COMPUTING:
        with suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def hash_sources() -> str:
    """Returns the hash of all source files, names and contents."""
    return hash_contents((name, path.read_bytes()) for name, path in _find_sources())[:16]


def _find_sources() -> Iterator[tuple[Path, Path]]:
    """Yields the name of each source file, which begins with its room, and its path."""
    for room in ROOMS:
        folder = PACKAGES / room
        found = None if folder.exists() else importlib.util.find_spec(room)
        if found is not None and found.submodule_search_locations:
            folder = Path(found.submodule_search_locations[0])
        yield from ((room / path.relative_to(folder), path) for path in folder.rglob("*.py"))


def hash_lock() -> str | None:
    """Returns the hash of the dependency lock file, or None if there is none."""
    lock = PACKAGES / "requirements" / "cpu.lock"
    return digest_of([lock.read_bytes()]) if lock.exists() else None


def digest_of(parts: Sequence[bytes]) -> str:
    """Returns a hash of bytes, 16 hexadecimal digits."""
    return hashlib.sha256(b"\n".join(parts)).hexdigest()[:16]

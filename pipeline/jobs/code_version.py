"""Versions of the code and of its dependencies."""

import importlib.metadata
import subprocess
from functools import cache
from pathlib import Path

from pydantic import BaseModel, TypeAdapter

from pipeline.processes.build import digest_of, hash_lock, hash_sources
from pipeline.processes.process import CHECKOUT, PACKAGES
from storage.artifacts import read_note, write_text

CODE = "code.json"
"""File in a run's folder: the versions of the code that trained it, in order."""
UNKNOWN = "unknown"


class CodeVersion(BaseModel, frozen=True):
    """A version of the code."""

    commit: str
    sources: str
    """Hash of all source files. It also tells uncommitted changes apart."""
    lock_hash: str
    """Of the dependencies."""


VERSIONS = TypeAdapter(tuple[CodeVersion, ...])


@cache
def read_code() -> CodeVersion:
    """Returns the version of the code on the disk at the first call. Call it when the code is imported."""
    return CodeVersion(commit=read_commit(), sources=hash_sources(), lock_hash=hash_lock_file())


def note_code(folder: Path, now: CodeVersion) -> tuple[CodeVersion, ...]:
    """Notes in a run's folder that this code now trains it. Returns all versions that have trained it."""
    known = noted_code(folder)
    if known[-1:] != (now,):
        known = (*known, now)
        write_text(folder / CODE, VERSIONS.dump_json(known, indent=2).decode())
    return known


def noted_code(folder: Path) -> tuple[CodeVersion, ...]:
    """Returns the versions of the code that trained a run."""
    path = folder / CODE
    return read_note(path, tuple[CodeVersion, ...]) if path.exists() else ()


def trained_by(folder: Path) -> CodeVersion:
    """Returns the version of the code that trained a run. If there are several, each field names all of them.

    A field is `unknown` if the run does not say it.
    """
    known = noted_code(folder) or (CodeVersion(commit=UNKNOWN, sources=UNKNOWN, lock_hash=UNKNOWN),)
    values = {name: dict.fromkeys(getattr(one, name) for one in known) for name in CodeVersion.model_fields}
    return CodeVersion(**{name: ", ".join(different) for name, different in values.items()})


def read_commit() -> str:
    """Returns the commit, with `+` if the working tree has changes outside of docs; `unknown` outside git."""
    if not CHECKOUT:  # an environment may lie inside another project's repository
        return UNKNOWN
    try:
        return _git("rev-parse", "HEAD")[:12] + ("+" if _git("status", "--porcelain", ":!docs") else "")
    except (OSError, subprocess.CalledProcessError):
        return UNKNOWN


def hash_lock_file() -> str:
    """Returns the hash of the dependency lock file. Without a lock, it is that of all installed versions."""
    found = {f"{one.name}=={one.version}" for one in importlib.metadata.distributions()}
    return hash_lock() or digest_of([one.encode() for one in sorted(found)])


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=PACKAGES, capture_output=True, text=True, check=True).stdout.strip()

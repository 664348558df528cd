"""The base of all our errors, and those of the warehouse."""

import difflib
import dis
import errno
import importlib
import inspect
import itertools
import os
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import Any, Self

SHORTAGES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
"""What the system says if a process cannot open more files, or gets no memory."""
MOVED = "If their folder was moved, move it back or link its old path to it; else put them back from a copy."
"""Remedy for files that are not where their names say."""
LONGEST_PART = 2_000
"""Characters of each part of a message."""


class ContractError(Exception):
    """Something is not as required. The message is one sentence and a remedy.

    Args:
        where: What is wrong, in the user's terms (a column, a config key, a file).
        expected: What was required.
        actual: What was found instead.
        remedy: What the reader can do about it.
    Example:
        >>> str(ContractError("bucketize on 'age'", "increasing borders", "[3, 1]", "Sort them."))
        "bucketize on 'age': expected increasing borders, got [3, 1]. Sort them."
    """

    def __init__(self, where: str, expected: str, actual: str, remedy: str) -> None:
        super().__init__(where, expected, actual, remedy)
        self.where, self.expected, self.actual, self.remedy = where, expected, actual, remedy

    @classmethod
    def of(cls, problem: str, remedy: str) -> Self:
        """Returns an error about a state, which the words expected and got do not fit.

        Example:
            >>> str(ContractError.of("the disk is full", "Free some space."))
            'the disk is full. Free some space.'
        """
        return cls("", problem, "", remedy)

    def __str__(self) -> str:
        where, expected, actual, remedy = map(_show, (self.where, self.expected, self.actual, self.remedy))
        if not where:
            return f"{expected}. {remedy}"
        return f"{where}: expected {expected}, got {actual}. {remedy}"


def is_shortage(error: Exception) -> bool:
    """Whether the machine lacks open files or memory, which says nothing about a file. Libraries wrap such errors.

    Example:
        >>> is_shortage(OSError(errno.EMFILE, "")), is_shortage(ValueError("IO Error: a.csv: Too many open files"))
        (True, True)
        >>> is_shortage(FileNotFoundError(errno.ENOENT, "No such file"))
        False
    """
    known = isinstance(error, MemoryError) or getattr(error, "errno", None) in SHORTAGES
    return known or any(os.strerror(code) in f"{error}" for code in SHORTAGES)


def machine_lacks(where: str, error: Exception) -> "StorageError":
    """Returns the error about files that cannot be read because of a shortage of the machine."""
    reason = f"{error}".split("\n")[0].rstrip(".")
    return StorageError(where, "open files and memory enough", reason, "Raise `ulimit -n`, or run less at once.")


class ConfigError(ContractError):
    """The configuration contradicts itself or its data."""


class StorageError(ContractError):
    """The warehouse cannot do what was asked."""


class EmptyDatasetError(StorageError):
    """A selection has no rows to train or evaluate on."""


class ConflictError(StorageError):
    """Another writer changed the same days at the same time. Nothing was written."""


class UnknownCommitError(StorageError):
    """The catalog did not say whether a commit took effect. Its files stay."""


class CorruptFileError(StorageError):
    """A data file of a snapshot is unreadable."""


@contextmanager
def reading_metadata(name: str) -> Iterator[None]:
    """Raises `StorageError` for what pyiceberg says about metadata: errors of JSON, Avro, zlib and Python.

    It tells metadata that are newer, absent, or no Iceberg from damaged ones. No remedy rolls a whole table back.

    Args:
        name: What the error calls the table.
    """
    from pyiceberg.exceptions import ResolveError, ValidationError  # imported here because configs import this module

    try:
        yield
    except (
        ResolveError, ValidationError, ValueError, LookupError, TypeError, AttributeError, EOFError, FileNotFoundError,
        SystemError, zlib.error,
    ) as error:  # fmt: skip
        raise _metadata_error(name, error) from error


def _metadata_error(name: str, error: Exception) -> StorageError:
    """Returns what is wrong with the metadata of a table."""
    from pydantic import ValidationError

    where, reason = f"metadata of table '{name}'", f"{type(error).__name__}: {error}"
    parsed = next((one for one in (error, error.__cause__) if isinstance(one, ValidationError)), None)
    for problem in () if parsed is None else parsed.errors(include_url=False):
        kind, given = problem["type"], problem["input"]
        if kind == "union_tag_invalid":
            return StorageError(
                f"format of table '{name}'", "version 1, 2 or 3", f"{problem['ctx']['tag']}",
                "Have its engine write a copy in version 2, and read that.",
            )  # fmt: skip
        if "schemas" in problem["loc"]:
            return StorageError(
                f"columns of table '{name}'", "types that this version of pyiceberg reads", f"{given!r}",
                "Have its engine write a copy without such columns, and read that.",
            )  # fmt: skip
        if "commitInfo" in given or "protocol" in given or kind == "union_tag_not_found":
            found = "a JSON file without format-version" if "format-version" not in given else reason
            return StorageError(
                where, "metadata of an Iceberg table", f"{found}, such as the log of a Delta table",
                "Have the catalog name the table's Iceberg metadata, or write it as an Iceberg table with its engine.",
            )  # fmt: skip
    if isinstance(error, FileNotFoundError):
        return StorageError(
            where, "the files that its catalog and its snapshots name", f"none: {error}",
            MOVED,
        )  # fmt: skip
    remedy = "Put them back from a copy. An earlier metadata file is a table without what was committed since."
    return StorageError(where, "files as they were written", reason, remedy)


@contextmanager
def importing_private(package: str, version: str) -> Iterator[None]:
    """Imports of private modules stand in its block, so that a module that has moved is one sentence, too.

    Args:
        version: How the version of the package begins.
    Raises:
        ContractError: Says which version is expected, and what is missing.
    """
    found = importlib.import_module(package).__version__
    try:
        if not found.startswith(version):
            raise _version_error(package, version, found)
        yield
    except ImportError as error:
        raise _version_error(package, version, f"{found}, where {error}") from error


def _version_error(package: str, version: str, found: str) -> ContractError:
    return ContractError(
        f"private names of {package}", f"version {version}x", found.rstrip("."), "Install the version of requirements/."
    )


def require_private(package: str, version: str, names: Mapping[Any, Sequence[str]]) -> None:
    """Checks that a package has the version whose private names are used, and all of them.

    A module `*_private.py` uses those of one package, and calls this when it is imported.

    Args:
        version: How its version begins.
        names: Module or class -> its private names. Those of a class may be attributes that only its methods set.
    Raises:
        ContractError: Says which version is expected, and which names are missing.
    """
    found = importlib.import_module(package).__version__
    missing = [f"{owner.__name__}.{name}" for owner in names for name in names[owner] if not _has(owner, name)]
    if missing or not found.startswith(version):
        raise _version_error(package, version, f"{found}{' without ' if missing else ''}{', '.join(missing)}")


def _has(owner: Any, name: str) -> bool:
    values = (value for kind in getattr(owner, "__mro__", ()) for value in vars(kind).values())
    methods = filter(inspect.isfunction, (inspect.unwrap(value) for value in values if inspect.isfunction(value)))
    return hasattr(owner, name) or any(name in _set_by(method.__code__) for method in methods)


def _set_by(code: CodeType) -> set[str]:
    """Returns the attributes that a method sets in its object."""
    steps = list(dis.get_instructions(code))
    own = code.co_varnames[:1]
    pairs = ((before.argval, step) for before, step in itertools.pairwise(steps) if step.opname == "STORE_ATTR")
    return {
        step.argval for before, step in pairs if own and own[0] in (before if isinstance(before, tuple) else (before,))
    }


def _show(text: str) -> str:
    """Escapes what a terminal or a log cannot show, and leaves out the middle of a long text."""
    if len(text) > LONGEST_PART:
        text = f"{text[: LONGEST_PART // 2]} ... {text[-LONGEST_PART // 2 :]}"
    if text.isprintable():
        return text
    return "".join(one if one.isprintable() else one.encode("unicode_escape").decode() for one in text)


def closest_names(name: str, known: Sequence[str]) -> str:
    """Lists known names for the remedy of an unknown one: up to three spelled alike, else the eight closest.

    Example:
        >>> closest_names("labl", ["user", "label"])
        'label'
        >>> closest_names("size", ["label", "prizes_won"])
        'prizes_won, label'
        >>> closest_names("x", [])
        'none'
    """
    alike = difflib.get_close_matches(name, known, n=3) or difflib.get_close_matches(name, known, n=8, cutoff=0.0)
    return ", ".join(alike) or "none"

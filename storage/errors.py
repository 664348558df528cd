"""The base of all our errors, and those of the warehouse."""

import difflib
import importlib
import inspect
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

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
    """Raises `StorageError` for what pyiceberg says about damaged metadata: errors of JSON, Avro, zlib and Python.

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
        raise StorageError(
            f"metadata of table '{name}'", "files as they were written", f"{type(error).__name__}: {error}",
            "Put them back from a copy, or register an earlier metadata file of the table with its catalog.",
        ) from error  # fmt: skip


def require_private(package: str, version: str, names: Mapping[Any, Sequence[str]]) -> None:
    """Checks that a package has the version whose private names are used, and all of them.

    A module `*_private.py` uses those of one package, and calls this when it is imported.

    Args:
        version: How its version begins.
        names: Module or class -> its private names. Those of a class may be attributes that only its methods name.
    Raises:
        ContractError: Says which version is expected, and which names are missing.
    """
    found = importlib.import_module(package).__version__
    missing = [f"{owner.__name__}.{name}" for owner in names for name in names[owner] if not _has(owner, name)]
    if missing or not found.startswith(version):
        raise ContractError(
            f"private names of {package}", f"version {version}x",
            f"{found}{' without ' if missing else ''}{', '.join(missing)}", "Install the version of requirements/.",
        )  # fmt: skip


def _has(owner: Any, name: str) -> bool:
    values = (value for kind in getattr(owner, "__mro__", ()) for value in vars(kind).values())
    methods = filter(inspect.isfunction, (inspect.unwrap(value) for value in values if inspect.isfunction(value)))
    return hasattr(owner, name) or any(name in method.__code__.co_names for method in methods)


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

"""Private names of other packages. A module `*_private.py` uses those of one package, and checks them when imported."""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from storage.errors import ContractError


def require_private(package: str, version: str, names: Mapping[Any, Sequence[str]]) -> None:
    """Checks that a package has the version whose private names are used, and all of them.

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

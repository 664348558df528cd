"""An environment with few packages: what a registered model meets where it is served."""

import ast
import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("pipeline", "storage", "models")
"""What is saved with a registered model."""


def run_with(requirements: Iterable[str], code: str) -> None:
    """Runs code in a process that cannot import what the product imports unless a requirement brings it.

    Args:
        requirements: As in a file for pip.
    """
    known = {_plain(requirement) for requirement in requirements}
    for name in [*known]:
        known |= _brought_by(name)
    owners = importlib.metadata.packages_distributions()
    absent = sorted(
        name for name in _imported() if name in owners and not {_plain(one) for one in owners[name]} & known
    )
    hide = f"import sys; sys.modules.update(dict.fromkeys({absent}))\n"
    subprocess.run([sys.executable, "-c", hide + code], check=True, cwd=ROOT)


@cache
def _imported() -> frozenset[str]:
    """Top-level modules that the saved packages import, anywhere."""
    found = set[str]()
    for path in (path for package in PACKAGES for path in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                found.add(node.module.split(".")[0])
    return frozenset(found - {*PACKAGES, *sys.stdlib_module_names})


@cache
def _brought_by(name: str) -> frozenset[str]:
    """Packages that pip installs with one, without its extras."""
    found, waiting = set[str](), [name]
    while waiting:
        try:
            needed = importlib.metadata.requires(waiting.pop()) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        new = {_plain(one) for one in needed if "extra ==" not in one} - found
        found |= new
        waiting += new
    return frozenset(found)


def _plain(requirement: str) -> str:
    match = re.match(r"[\w.-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match[0]).lower()

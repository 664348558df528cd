"""Private names of other packages are checked when the module that uses them is imported."""

import importlib
import re
from pathlib import Path

import pyiceberg
import pytest
from pyiceberg.io.pyarrow import PyArrowFile

from storage.errors import ContractError
from storage.private_names import require_private

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[fpsm]*/**/*_private.py"))


def test_names_that_are_there_are_accepted() -> None:
    """A method, an attribute that a constructor sets, and a function of a module."""
    require_private("pyiceberg", "0.", {PyArrowFile: ["_file_info", "_path"], pyiceberg: ["__doc__"]})


def test_names_that_are_gone_are_refused() -> None:
    with pytest.raises(ContractError) as caught:
        require_private("pyiceberg", "0.", {PyArrowFile: ["_path", "_gone"], pyiceberg: ["_lost"]})
    assert str(caught.value) == (
        f"private names of pyiceberg: expected version 0.x, got {pyiceberg.__version__} without PyArrowFile._gone, "
        "pyiceberg._lost. Install the version of requirements/."
    )


@pytest.mark.parametrize("path", MODULES)
def test_another_version_is_refused(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, name = Path(path).stem.removesuffix("_private"), path.removesuffix(".py").replace("/", ".")
    module = importlib.import_module(name)
    installed = importlib.import_module(package).__version__
    monkeypatch.setattr(f"{package}.__version__", "99.0")
    with pytest.raises(
        ContractError, match=rf"private names of {package}: expected version [\d.]+x, got 99.0"
    ) as caught:
        exec(compile((ROOT / path).read_text(), path, "exec"), dict(vars(module)))
    assert installed.startswith(re.findall(r"version ([\d.]+)x", str(caught.value))[0])

"""An error is one sentence with a remedy, and it crosses processes."""

import importlib
import pickle
import re
from pathlib import Path

import pyiceberg
import pytest
from pyiceberg.io.pyarrow import PyArrowFile

from storage.errors import (
    ConflictError,
    ContractError,
    CorruptFileError,
    EmptyDatasetError,
    StorageError,
    require_private,
)

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[fpsm]*/**/*_private.py"))
KINDS = [ContractError, StorageError, EmptyDatasetError, ConflictError, CorruptFileError]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_a_sentence_and_survives_pickling(kind: type[ContractError]) -> None:
    error = kind("column 'age'", "numbers", "text", "Clean it.")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is kind
    assert str(copy) == str(error) == "column 'age': expected numbers, got text. Clean it."
    assert (copy.where, copy.expected, copy.actual, copy.remedy) == ("column 'age'", "numbers", "text", "Clean it.")


def test_an_error_is_one_line_that_a_terminal_can_show() -> None:
    """What others wrote is part of it."""
    error = ContractError("column 'a\nb\x1b[31m'", "x" * 100_000, "\ud800 and \u202e, but é stays", "Clean it.")
    text = str(error)
    assert text.startswith("column 'a\\nb\\x1b[31m': expected xxx")
    assert text.endswith("xxx, got \\ud800 and \\u202e, but é stays. Clean it.")
    assert text.isprintable()
    assert len(text) < 3_000
    assert pickle.loads(pickle.dumps(error)).where == error.where


def test_every_storage_error_is_caught_as_one() -> None:
    assert all(issubclass(kind, StorageError) for kind in KINDS[1:])
    assert issubclass(StorageError, ContractError)


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

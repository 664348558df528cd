"""An error is one sentence with a remedy, and it crosses processes."""

import copy
import datetime
import importlib
import json
import pickle
import re
from pathlib import Path
from typing import Any

import pyiceberg
import pytest
from pyiceberg.io.pyarrow import PyArrowFile

from storage.config import WarehouseConfig
from storage.errors import (
    ConflictError,
    ContractError,
    CorruptFileError,
    EmptyDatasetError,
    StorageError,
    require_private,
)
from storage.warehouse import Warehouse
from tests.homes import rows_of, write_days

ROOT = Path(__file__).resolve().parents[2]
MODULES = sorted(str(path.relative_to(ROOT)) for path in ROOT.glob("[fpsm]*/**/*_private.py"))
KINDS = [ContractError, StorageError, EmptyDatasetError, ConflictError, CorruptFileError]


@pytest.mark.parametrize("kind", KINDS)
def test_an_error_is_a_sentence_and_survives_pickling(kind: type[ContractError]) -> None:
    error = kind("column 'age'", "numbers", "text", "Clean it.")
    copied = pickle.loads(pickle.dumps(error))
    assert type(copied) is kind
    assert str(copied) == str(error) == "column 'age': expected numbers, got text. Clean it."
    assert (copied.where, copied.expected, copied.actual, copied.remedy) == (
        "column 'age'",
        "numbers",
        "text",
        "Clean it.",
    )


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


class Owner:
    """Names attributes in several ways."""

    def __init__(self, other: Any) -> None:
        self._set: int = 1
        other._elsewhere = self._read  # type: ignore[attr-defined]
        _global()  # type: ignore[name-defined]  # noqa: F821


def test_only_what_a_class_has_or_sets_counts_as_there() -> None:
    """A name that a method merely mentions may be gone."""
    require_private("pyiceberg", "0.", {Owner: ["_set", "__init__"]})
    for name in ("_elsewhere", "_read", "_global"):
        with pytest.raises(ContractError, match=rf"without Owner\.{name}\."):
            require_private("pyiceberg", "0.", {Owner: [name]})


@pytest.mark.parametrize("path", MODULES)
def test_a_private_module_that_has_moved_is_one_sentence(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever of the imports fails."""
    package, source = Path(path).stem.removesuffix("_private"), (ROOT / path).read_text()
    imports = [line for line in source.splitlines() if re.match(rf"    from {package}\S* import ", line)]
    assert imports
    for line in imports:
        moved = re.sub(r"from \S+ import", f"from {package}.moved_away import", line)
        with pytest.raises(ContractError) as caught:
            exec(compile(source.replace(line, moved), path, "exec"), {"__name__": "other"})
        assert f"{caught.value}".startswith(f"private names of {package}: expected version ")
        assert f"No module named '{package}.moved_away'. Install" in f"{caught.value}"


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


METADATA = {
    "newer": (lambda old: {**old, "format-version": 4}, "format of table 'events': expected version 1, 2 or 3, got 4. "
              "Have its engine write a copy in version 2, and read that."),
    "variant": (lambda old: typed(old, "variant"), "columns of table 'events': expected types that this version of "
                "pyiceberg reads, got 'variant'. Have its engine write a copy without such columns, and read that."),
    "odd type": (lambda old: typed(old, {"type": "cube"}), "columns of table 'events': expected types that this version"),
    "Delta": (lambda old: {"commitInfo": {"timestamp": 1}}, "metadata of table 'events': expected metadata of an Iceberg "
              "table, got a JSON file without format-version, such as the log of a Delta table. Have the catalog name"),
    "Delta lines": (lambda old: '{"protocol": {"minReaderVersion": 1}}\n{"metaData": {}}\n', "such as the log of a Delta"),
    "Hudi": (lambda old: {"hoodie.table.name": "t"}, "metadata of table 'events': expected metadata of an Iceberg table"),
    "cut": (lambda old: json.dumps(old)[:-40], "metadata of table 'events': expected files as they were written, got"),
    "moved": (lambda old: None, "metadata of table 'events': expected the files that its catalog and its snapshots name, "
              "got none: "),
}  # fmt: skip


def typed(metadata: dict[str, Any], kind: Any) -> dict[str, Any]:
    changed = copy.deepcopy(metadata)
    changed["schemas"][0]["fields"][-1]["type"] = kind
    return changed


@pytest.mark.parametrize("case", METADATA)
def test_metadata_that_cannot_be_read_say_what_they_are(warehouse: Warehouse, home: Path, case: str) -> None:
    """No remedy tells to register an earlier state of a table that is whole."""
    change, said = METADATA[case]
    day = datetime.date(2024, 1, 1)
    write_days(warehouse, rows_of(day, x=[1]))
    place = Path(warehouse.table("events").metadata_location.removeprefix("file://"))
    made = change(json.loads(place.read_text()))
    place.unlink() if made is None else place.write_text(made if isinstance(made, str) else json.dumps(made))
    with pytest.raises(StorageError) as caught:
        Warehouse(WarehouseConfig(), home).current("events")
    assert f"{caught.value}".startswith(said) or said in f"{caught.value}"
    assert "register" not in f"{caught.value}"

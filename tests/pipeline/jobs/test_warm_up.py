"""What a command starts before it knows whether there is something to train."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pipeline.config import RunConfig, load
from pipeline.config.files import ROOT
from pipeline.jobs.warm_up import FINISHED, NOTED, FinishedNote


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with an embedded catalog."""
    monkeypatch.setenv("DLRM_HOME", f"{tmp_path}")
    (tmp_path / "warehouse").mkdir()
    (tmp_path / "warehouse" / "catalog.db").write_text("one")
    return tmp_path


def smoke(**overrides: Any) -> RunConfig:
    return load(ROOT / "configs/smoke.yaml", overrides)


def test_a_command_that_had_nothing_to_train_is_known(home: Path) -> None:
    assert not FinishedNote("train", smoke(), {}).holds()
    FinishedNote("train", smoke(), {"force": True}).write()
    assert FinishedNote("train", smoke(), {}).holds()


@pytest.mark.parametrize(
    ("command", "overrides", "parameters"),
    [
        ("train", {}, {"force": True}),
        ("train", {}, {"snapshot_id": 5}),
        ("train", {"seed": 7}, {}),
        ("end_to_end", {}, {}),
    ],
)
def test_another_command_is_not(
    home: Path, command: str, overrides: Mapping[str, Any], parameters: Mapping[str, Any]
) -> None:
    FinishedNote("train", smoke(), {}).write()
    assert not FinishedNote(command, smoke(**overrides), parameters).holds()


def test_a_change_of_the_catalog_ends_the_note(home: Path) -> None:
    FinishedNote("train", smoke(), {}).write()
    catalog = home / "warehouse" / "catalog.db"
    os.utime(catalog, ns=(0, catalog.stat().st_mtime_ns + 1))
    assert not FinishedNote("train", smoke(), {}).holds()


def test_another_catalog_may_change_unseen(home: Path) -> None:
    config = smoke(**{"warehouse.catalog": {"type": "rest", "uri": "http://127.0.0.1:1"}})
    FinishedNote("train", config, {}).write()
    assert not FinishedNote("train", config, {}).holds()
    assert not (home / FINISHED).exists()


def test_few_commands_are_noted_and_the_newest_stay(home: Path) -> None:
    for number in range(NOTED + 5):
        FinishedNote("train", smoke(), {"snapshot_id": number}).write()
    FinishedNote("train", smoke(), {"snapshot_id": NOTED + 4}).write()
    assert len((home / FINISHED).read_text().split()) == NOTED
    known = [FinishedNote("train", smoke(), {"snapshot_id": number}).holds() for number in range(NOTED + 5)]
    assert known == [False] * 5 + [True] * NOTED


def test_a_damaged_or_missing_note_costs_nothing_but_time(home: Path) -> None:
    (home / FINISHED).write_bytes(b"\xff\x00")
    assert not FinishedNote("train", smoke(), {}).holds()
    (home / FINISHED).unlink()
    (home / FINISHED).mkdir()
    FinishedNote("train", smoke(), {}).write()
    assert not FinishedNote("train", smoke(), {}).holds()


@pytest.mark.parametrize(("uri", "loaded"), [(None, True), ("http://127.0.0.1:9", False)])
def test_the_sql_store_of_mlflow_is_loaded_where_a_training_opens_it(uri: str | None, loaded: bool) -> None:
    code = f"""
import sys
from pipeline.jobs.warm_up import load_stores
from pipeline.registration.config import RegistrationConfig
load_stores(RegistrationConfig(tracking_uri={uri!r}))
print("mlflow.store.tracking.sqlalchemy_store" in sys.modules)
"""
    environment = {name: value for name, value in os.environ.items() if name != "MLFLOW_TRACKING_URI"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(loaded)

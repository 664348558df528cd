"""Names from outside that become paths: none of them leads out of its folder."""

from functools import partial
from pathlib import Path

import pytest

from flows.enrich import enrich
from pipeline.config import load
from pipeline.errors import ConfigError, ContractError, RegistryError, StorageError
from pipeline.jobs.recurring.day import ChampionVersion, find_start, list_aliased_folders
from pipeline.jobs.training.checkpoints import list_checkpoints
from pipeline.jobs.training.provenance import fetch_record
from pipeline.jobs.training.register import register_run
from pipeline.jobs.training.summary import write_report
from pipeline.jobs.workspace import Workspace
from tests.homes import CONFIG, open_smoke


def test_a_side_table_by_a_path(copied, command):
    words = ["features.joined=[{table: ../../x, on: cat_user}]"]
    code, result, _ = command(enrich, CONFIG, *words, home=copied)
    assert (code, result["error"].startswith("name '../../x': expected a name that matches")) == (1, True)


@pytest.mark.parametrize(
    "place", ["/etc/passwd", "file:///etc/passwd", "runs:/../x/record.json", "http://x/record.json"]
)
def test_a_record_elsewhere_is_not_fetched(copied, place):
    tracker = open_smoke().tracking
    tracker.client.set_model_version_tag("smoke", "1", "record", place)
    with pytest.raises(RegistryError, match="expected a record at runs:"):
        fetch_record(tracker, "smoke", 1)


@pytest.mark.parametrize("name", ["../mlflow", "/tmp", "..", "link"])
def test_the_champions_folder_must_be_a_run_folder(copied, name):
    config = load(CONFIG)
    (copied / "runs").mkdir()
    (copied / "runs" / "link").symlink_to(copied / "mlflow")
    Workspace(config).tracking.client.set_model_version_tag("smoke", "1", "run_folder", name)
    with pytest.raises(StorageError, match="expected one below"):
        list_aliased_folders(Workspace(config))
    champion = ChampionVersion(version=1, trained_to="2025-01-01", scratch_day="2025-01-01", run_folder=name)
    with pytest.raises(StorageError, match="expected one below"):
        find_start(Workspace(config), champion, None)


@pytest.mark.parametrize(
    "look", [partial(list_checkpoints, verify=False), register_run, partial(write_report, against=None)]
)
@pytest.mark.parametrize("run", ["../../x", "/etc/passwd", ".."])
def test_runs_by_a_path(tmp_path, monkeypatch, look, run):
    home = tmp_path / "home"
    monkeypatch.setenv("DLRM_HOME", str(home))
    before = written(home)
    with pytest.raises(ContractError):
        look(open_smoke(), run)
    assert written(home) == before


def written(home: Path) -> set[Path]:
    """Returns the reports and weights in a home, and those next to it that belong to no other test."""
    around = [*home.rglob("*"), *home.parent.glob("*"), *home.parent.glob("x/**/*"), *home.parent.parent.glob("x/**/*")]
    return {path for path in around if path.suffix in (".html", ".safetensors")}


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/b", "a\n", "a.b"])
def test_the_name_of_the_run_must_not_be_a_path(name):
    with pytest.raises(ConfigError, match="expected letters, digits and _"):
        load(CONFIG, {"name": name})

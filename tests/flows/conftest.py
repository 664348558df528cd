"""One Prefect server and one finished smoke run for all flow tests."""

import json
import logging
import shutil
import sqlite3
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import mlflow.tracking._tracking_service.utils as mlflow_client
import pytest
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.testing.utilities import prefect_test_harness
from prefect.utilities.callables import get_call_parameters

from flows.runtime import cli, flow
from flows.runtime.console import PrivateFlow
from pipeline.evaluation import plots
from tests.sharing import once, session_folder


@pytest.fixture(scope="session")
def prefect() -> Iterator[str]:
    """The address of a temporary Prefect server, which flows of tests that ask for it use."""
    with prefect_test_harness(server_startup_timeout=300):
        yield str(PREFECT_API_URL.value())


@pytest.fixture(autouse=True)
def without_server(request: pytest.FixtureRequest) -> Iterator[None]:
    """Hides that server from other tests: whether this process has one depends on which tests it was given."""
    with ExitStack() as stack:
        if "prefect" not in request.fixturenames:
            stack.enter_context(temporary_settings(restore_defaults={PREFECT_API_URL}))
        yield


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the smoke run writes to."""
    return session_folder(tmp_path_factory) / "smoke"


def _call(self: PrivateFlow, *args: Any, **options: Any) -> Any:
    return self.fn(**self.validate_parameters(get_call_parameters(self.fn, args, options)))


@contextmanager
def _plainly() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flow, "without_prefect", True)
        patch.setattr(PrivateFlow, "__call__", _call)
        patch.setattr(plots, "draw_run", lambda *_: {})
        yield


@pytest.fixture(scope="module")
def plainly() -> Any:
    """A context without Prefect and a training's figures: they cost more than a small training.

    Flows are plain functions, as in commands that only read. The smoke run has both Prefect and figures, and so have
    the commands that tests start.
    """
    return _plainly


@pytest.fixture
def plain() -> Iterator[None]:
    """That context for a test."""
    with _plainly():
        yield


def _run(
    flow: Any, words: tuple[str, ...], capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> tuple[int, dict[str, Any], str]:
    code = cli.main(flow, words)
    out, err = capfd.readouterr()
    return code, json.loads(out.strip().splitlines()[-1]), err + caplog.text


@pytest.fixture
def command(
    plain: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """Runs a flow as its command would, without Prefect. Returns (exit code, result line, what else was printed)."""
    monkeypatch.setattr(cli, "server_address", lambda: None)
    monkeypatch.setattr(cli, "start_server", lambda config, process: None)
    caplog.set_level(logging.INFO, "dlrm")

    def run(flow: Any, *words: str, home: Path) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setenv("DLRM_HOME", str(home))
        return _run(flow, words, capfd, caplog)

    return run


@pytest.fixture
def prefect_command(
    prefect: str, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The same with Prefect."""

    def run(flow: Any, *words: str, home: Path) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setenv("DLRM_HOME", str(home))
        return _run(flow, words, capfd, caplog)

    return run


def _read_assets(client: SyncPrefectClient) -> dict[str, list[str]]:
    """Asset -> those that it was made of, once the server has stored them all."""
    body = {"filter": {"event": {"name": ["prefect.asset.materialization.succeeded"]}}, "limit": 50}
    limit = time.monotonic() + 60
    while True:
        events = client.request("POST", "/events/filter", json=body).json()["events"]
        made = {one["resource"]["prefect.resource.id"]: one["related"] for one in events}
        if len(made) >= 2 or time.monotonic() > limit:
            return {name: [other["prefect.resource.id"] for other in related] for name, related in made.items()}
        time.sleep(0.5)


def _run_smoke(folder: Path) -> dict[str, Any]:
    """Runs configs/smoke.yaml end to end, and returns its result and what Prefect shows of it: key of an artifact -> texts, asset -> its sources."""
    from flows.end_to_end import end_to_end

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(folder))
        result = end_to_end(config="configs/smoke.yaml")
        with get_client(sync_client=True) as client:
            artifacts, assets = client.read_artifacts(), _read_assets(client)
    plots = {file.name for file in folder.rglob("plots/*.svg")}
    assert "placement.svg" in plots, f"a step that may fail did fail: see the log. Plots: {plots}"
    page = {one.key: [other.data for other in artifacts if other.key == one.key] for one in artifacts if one.key}
    return {"result": result, "page": page, "assets": assets}


@pytest.fixture(scope="session")
def smoke_run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The one smoke run of all test processes, on two ranks: `result`, `page` and `assets`."""

    def make(folder: Path) -> dict[str, Any]:
        request.getfixturevalue("prefect")
        return _run_smoke(folder)

    found: dict[str, Any] = once(tmp_path_factory, "smoke", make)[1]
    return found


@pytest.fixture(scope="session")
def smoke(smoke_run: dict[str, Any]) -> dict[str, Any]:
    """The result of the smoke run."""
    result: dict[str, Any] = smoke_run["result"]
    return result


@pytest.fixture(scope="session")
def page(smoke_run: dict[str, Any]) -> dict[str, list[str]]:
    """What Prefect's page of the smoke run showed: key of an artifact -> texts."""
    found: dict[str, list[str]] = smoke_run["page"]
    return found


@pytest.fixture
def at_home(smoke: dict[str, Any], home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The smoke run's folder as DLRM_HOME."""
    monkeypatch.setenv("DLRM_HOME", str(home))
    return home


@pytest.fixture(autouse=True)
def untouched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that changes the smoke run or registers beside it: other tests would depend on the order of tests."""
    yield
    if "smoke" in request.fixturenames:
        home, smoke = request.getfixturevalue("home"), request.getfixturevalue("smoke")
        with closing(sqlite3.connect(home / "mlflow" / "mlflow.db")) as registry:
            found = registry.execute("SELECT version FROM model_versions WHERE name = 'smoke'").fetchall()
        finished = home.with_suffix(".json").stat().st_mtime_ns
        artifacts = home / "mlflow" / "artifacts" / "smoke" / smoke["mlflow_run_id"]
        written = [file.name for file in artifacts.rglob("*") if file.is_file() and file.stat().st_mtime_ns > finished]
        assert (found, written) == ([(1,)], []), "the smoke run was changed: let the test use `copied`"


PLACES = (
    ("experiments", "artifact_location"),
    ("runs", "artifact_uri"),
    ("logged_models", "artifact_location"),
    ("model_versions", "storage_location"),
)
"""Columns of MLflow's database with absolute paths of artifacts."""


@pytest.fixture
def copied(smoke: dict[str, Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the smoke run's registry, artifacts and warehouse that a test may change."""
    for name in ("warehouse", "mlflow"):
        shutil.copytree(home / name, tmp_path / name)
    with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as registry:
        for table, column in PLACES:
            registry.execute(f"UPDATE {table} SET {column} = replace({column}, ?, ?)", (str(home), str(tmp_path)))
        registry.commit()
    monkeypatch.setattr(mlflow_client, "_artifact_repos_cache", OrderedDict())  # run -> folder, for all homes
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return tmp_path

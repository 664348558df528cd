"""One Prefect server and one finished smoke run for all flow tests."""

import json
import logging
import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from prefect.testing.utilities import prefect_test_harness
from prefect.utilities.callables import get_call_parameters

from flows.runtime import cli, flow
from flows.runtime.console import PrivateFlow
from pipeline.evaluation import plots


@pytest.fixture(scope="session")
def prefect() -> Iterator[None]:
    """A temporary Prefect server."""
    with prefect_test_harness(server_startup_timeout=300):
        yield


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the smoke run writes to."""
    return tmp_path_factory.mktemp("home")


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
    prefect: None, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
):
    """The same with Prefect."""

    def run(flow: Any, *words: str, home: Path) -> tuple[int, dict[str, Any], str]:
        monkeypatch.setenv("DLRM_HOME", str(home))
        return _run(flow, words, capfd, caplog)

    return run


@pytest.fixture(scope="session")
def smoke(prefect: None, home: Path) -> dict[str, Any]:
    """The result of configs/smoke.yaml end to end, on two ranks."""
    from flows.end_to_end import end_to_end

    before = os.environ.get("DLRM_HOME")
    os.environ["DLRM_HOME"] = str(home)
    try:
        result = end_to_end(config="configs/smoke.yaml")
    finally:
        os.environ.pop("DLRM_HOME") if before is None else os.environ.update(DLRM_HOME=before)
    plots = {file.name for file in home.rglob("plots/*.svg")}
    assert "placement.svg" in plots, f"a step that may fail did fail: see the log. Plots: {plots}"
    return result


@pytest.fixture(autouse=True)
def untouched(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test that registers a version next to the smoke run's: other tests would depend on the order of tests."""
    yield
    if "smoke" in request.fixturenames:
        with closing(sqlite3.connect(request.getfixturevalue("home") / "mlflow" / "mlflow.db")) as registry:
            found = registry.execute("SELECT version FROM model_versions WHERE name = 'smoke'").fetchall()
        assert found == [(1,)], "a version was registered next to the smoke run's: let the test use `copied`"


@pytest.fixture
def copied(smoke: dict[str, Any], home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the smoke run's registry and warehouse that a test may change.

    Artifacts are not copied: the registry names the smoke run's by absolute paths.
    """
    shutil.copytree(home / "warehouse", tmp_path / "warehouse")
    (tmp_path / "mlflow").mkdir()
    shutil.copy(home / "mlflow" / "mlflow.db", tmp_path / "mlflow")
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return tmp_path

"""A real MLflow server goes down before a training, during it, and when its model is registered."""

import os
import signal
import socket
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flows import ui
from flows.register import register
from flows.train import train
from pipeline.config import load
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHAMPION, find_holder

CONFIG = "configs/smoke.yaml"
RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class Server:
    """MLflow with a SQLite database. After a kill it restarts with the same address and database."""

    def __init__(self, folder: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.folder = folder
        self.address = f"http://127.0.0.1:{self.port}"
        self.running = None
        self.starter = ThreadPoolExecutor(1)  # the server ends with the thread that started it

    def start(self) -> None:
        stores = [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination",
            f"{self.folder}/artifacts",
        ]
        serve = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        line = ["mlflow", "server", *serve, *stores]
        self.running = self.starter.submit(ui.start, line, {}, self.folder / "server.log").result()
        ui.wait_for(self.running, f"{self.address}/health", self.folder / "server.log")

    def kill(self) -> None:
        if self.running is not None:
            os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait(30)
            self.running = None


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", found.address)
    yield found
    found.kill()


def when(happened: Callable[[], object], act: Callable[[], None]) -> threading.Thread:
    """Runs an action in a thread as soon as a condition is true."""

    def watch() -> None:
        limit = time.monotonic() + 200
        while not happened():
            assert time.monotonic() < limit
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_fault_29_down_at_start(copied, command, server, monkeypatch):
    monkeypatch.setenv(RETRIES, "1")
    code, result, log = command(train, CONFIG, "seed=5", home=copied)
    assert (code, result["status"]) == (1, "failed")
    assert result["error"] == (
        f"MLflow at {server.address}: expected an answer, got none. "
        "Start it, or name another: registration.tracking_uri or MLFLOW_TRACKING_URI."
    )
    assert "Traceback" not in log
    assert not (copied / "runs").exists()


@pytest.mark.slow
def test_fault_29_down_in_training_and_down_at_register(smoke, copied, command, server, monkeypatch):
    """Training continues without MLflow, which gets all steps later. After an outage at the end, use flows.register."""
    runs = copied / "runs"
    monkeypatch.setenv(RETRIES, "8")  # many retries, until the server is back
    server.start()

    def outage() -> None:
        server.kill()
        when(lambda: list(runs.glob("*/weights.safetensors")), server.start).join()

    def end() -> None:
        os.environ[RETRIES] = "1"
        server.kill()

    first = when(lambda: any(path.read_text() for path in runs.glob("*/metrics.jsonl")), outage)
    second = when(lambda: list(runs.glob("*/judged.json")), end)
    code, result, log = command(train, CONFIG, home=copied)
    first.join(), second.join()
    [folder] = runs.iterdir()
    assert (code, result["status"]) == (1, "failed"), log
    assert result["error"] == (
        f"MLflow at {server.address}: expected an answer, got none. The trained model is safe in '{folder}'; "
        f"once MLflow answers, finish it by python -m flows.register CONFIG run={folder.name}"
    )
    assert "Traceback" not in log
    server.start()
    tracker = Workspace(load(CONFIG)).tracking
    run_id = (folder / "mlflow_run_id").read_text()
    assert tracker.client.get_run(run_id).info.status == "RUNNING"  # nobody could end the run
    assert find_holder(tracker, "smoke") is None
    judged, weights = ((folder / name).stat().st_mtime_ns for name in ("judged.json", "weights.safetensors"))

    code, result, log = command(register, CONFIG, f"run={run_id}", home=copied)
    assert code == 0, log
    assert (result["status"], result["mlflow_run_id"]) == ("ok", run_id)
    assert result["model"] == {"name": "smoke", "version": 1, "alias": CHAMPION}
    assert result["train"]["weights_sha256"] == smoke["train"]["weights_sha256"]
    assert result["eval"]["ne"] == smoke["eval"]["ne"]
    assert judged == (folder / "judged.json").stat().st_mtime_ns
    assert weights == (folder / "weights.safetensors").stat().st_mtime_ns
    assert len(tracker.client.search_model_versions("name = 'smoke'")) == 1
    assert find_holder(tracker, "smoke") == 1
    [run] = tracker.client.search_runs([tracker.experiment_id])
    assert (run.info.run_id, run.info.status) == (run_id, "FINISHED")
    for name in ("train/ne_window", "input/stall_fraction_window"):
        assert [point.step for point in tracker.client.get_metric_history(run_id, name)] == [5, 10, 15, 20]
    with sqlite3.connect(server.folder / "server.db") as database:
        assert (
            database.execute(
                "select key, step from metrics where run_uuid = ? group by key, step having count(*) > 1", [run_id]
            ).fetchall()
            == []
        )

    code, again, _ = command(register, CONFIG, f"run={folder.name}", home=copied)
    assert (code, again["status"], again["model"]) == (0, "skipped", result["model"])


def test_an_unknown_run_is_refused(command, tmp_path):
    code, result, _ = command(register, CONFIG, "run=other", home=tmp_path)
    assert (code, result["error"]) == (
        1, f"argument 'run': expected a finished training in '{tmp_path}/runs', got other. Not registered yet: none.",
    )  # fmt: skip

"""A real MLflow server goes down before a training, during it, and when its model is registered."""

import os
import signal
import socket
import socketserver
import sqlite3
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from flows import ui
from flows.register import register
from flows.train import train
from pipeline.registration.aliases import CHAMPION, find_holder
from tests.homes import CONFIG, open_smoke
from tests.ports import free_port

RETRIES = "MLFLOW_HTTP_REQUEST_MAX_RETRIES"


class Relay(socketserver.BaseRequestHandler):
    """A connection to MLflow."""

    server: "Door"

    def handle(self) -> None:
        with suppress(OSError), socket.create_connection(("127.0.0.1", self.server.behind)) as other:
            self.server.connections += [self.request, other]
            if not self.server.open:  # it was shut meanwhile
                return
            answers = threading.Thread(target=self.pass_on, args=(other, self.request), daemon=True)
            answers.start()
            self.pass_on(self.request, other)
            answers.join()

    def pass_on(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while content := source.recv(1 << 16):
                target.sendall(content)
        cut(source, target)


class Door(socketserver.ThreadingTCPServer):
    """Passes connections on to a port. Shut, it refuses new ones, and those through it are cut."""

    allow_reuse_address = daemon_threads = True
    open = True

    def __init__(self, port: int, behind: int) -> None:
        self.behind = behind
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), Relay)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def shut(self) -> None:
        self.open = False
        self.shutdown()
        self.socket.close()
        cut(*self.connections)


def cut(*connections: socket.socket) -> None:
    for one in connections:
        with suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class Server:
    """MLflow with a SQLite database, behind an address that goes down with all its connections and comes back.

    For clients a killed server is no different: it may have done what it did not answer. The server itself starts once.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.port, self.behind = folder, free_port(), free_port()
        self.address = f"http://127.0.0.1:{self.port}"
        self.running: subprocess.Popen[bytes] | None = None
        self.door: Door | None = None
        self.starter = ThreadPoolExecutor(1)  # the server ends with the thread that started it

    def start(self) -> None:
        if self.running is None:
            stores = [
                "--backend-store-uri",
                f"sqlite:///{self.folder}/server.db",
                "--artifacts-destination",
                f"{self.folder}/artifacts",
            ]
            serve = ["--host", "127.0.0.1", "--port", str(self.behind), "--workers", "1"]
            line = ["mlflow", "server", *serve, *stores]
            self.running = self.starter.submit(ui.start, line, {}, self.folder / "server.log").result()
            ui.wait_for(self.running, f"http://127.0.0.1:{self.behind}/health", self.folder / "server.log")
        self.door = Door(self.port, self.behind)

    def go_down(self) -> None:
        if self.door is not None:
            self.door.shut()
            self.door = None

    def stop(self) -> None:
        self.go_down()
        if self.running is not None:
            os.killpg(self.running.pid, signal.SIGKILL)
            self.running.wait(30)


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    found = Server(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", found.address)
    yield found
    found.stop()


def when(happened: Callable[[], object], act: Callable[[], None]) -> threading.Thread:
    """Runs an action in a thread as soon as a condition is true."""

    def watch() -> None:
        limit = time.monotonic() + 400
        while not happened():
            assert time.monotonic() < limit
            time.sleep(0.01)
        act()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread


def test_down_at_start(copied, command, server, monkeypatch):
    monkeypatch.setenv(RETRIES, "1")
    code, result, log = command(train, CONFIG, "seed=5", home=copied)
    assert (code, result["status"]) == (1, "failed")
    assert result["error"] == (
        f"MLflow at {server.address}: expected an answer, got none. "
        "Start it, or name another: registration.tracking_uri or MLFLOW_TRACKING_URI."
    )
    assert "Traceback" not in log
    assert not (copied / "runs").exists()


@pytest.mark.nightly
def test_down_in_training_and_down_at_register(smoke, copied, command, server, monkeypatch):
    """Training continues without MLflow, which gets all steps later. After an outage at the end, use flows.register."""
    runs = copied / "runs"
    monkeypatch.setenv(RETRIES, "5")  # until the server is back
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "1")  # the longest pause is 16 s, not minutes
    server.start()

    def outage() -> None:
        server.go_down()
        when(lambda: list(runs.glob("*/weights.safetensors")), server.start).join()

    def end() -> None:
        os.environ[RETRIES] = "1"
        server.go_down()

    first = when(lambda: any(path.read_text() for path in runs.glob("*/metrics.jsonl")), outage)
    second = when(lambda: list(runs.glob("*/judged.json")), end)
    code, result, log = command(train, CONFIG, home=copied)
    first.join(), second.join()
    [folder] = runs.iterdir()
    assert (code, result["status"]) == (1, "failed"), log
    assert result["error"] == (
        f"MLflow at {server.address}: expected an answer, got none. The trained model is safe in '{folder}'; "
        f"once MLflow answers, finish it by python -m flows.register {CONFIG} run={folder.name}"
    )
    assert "Traceback" not in log
    server.start()
    tracker = open_smoke().tracking
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

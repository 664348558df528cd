"""Real servers on loopback: the UI command, and a deployment run by a worker."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(*command: str, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """A program with all that it starts; nothing of it is left afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
    family = psutil.Process(process.pid)
    try:
        yield process
    finally:
        children = family.children(recursive=True) if family.is_running() else []
        process.send_signal(signal.SIGINT)
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        for child in psutil.wait_procs(children, timeout=15)[1]:
            child.kill()


def wait_until(answers, what: str, log: Path, seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if answers():
            return
        time.sleep(0.3)
    raise AssertionError(f"{what} did not come up:\n{log.read_text()[-2000:]}")


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as response:
            return response.status == 200
    except OSError:
        return False


def environment(home: Path, **more: str) -> dict[str, str]:
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_TRACKING"))}
    return keep | {"DLRM_HOME": str(home), "PREFECT_HOME": str(home / "prefect"), "DO_NOT_TRACK": "1"} | more


def test_ui_starts_both_servers_and_stops_them(tmp_path):
    prefect, mlflow, log = free_port(), free_port(), tmp_path / "ui.log"
    words = ["-m", "flows.ui", str(tmp_path), f"prefect_port={prefect}", f"mlflow_port={mlflow}"]
    with running(sys.executable, *words, environment=environment(tmp_path), log=log) as process:
        wait_until(lambda: "MLflow   http" in log.read_text() or process.poll() is not None, "the UI", log)
        assert f"Prefect  http://127.0.0.1:{prefect}" in log.read_text()
        assert answers(f"http://127.0.0.1:{prefect}/api/health")
        assert answers(f"http://127.0.0.1:{mlflow}/health")
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert psutil.wait_procs(children, timeout=15)[1] == []


def test_ui_refuses_a_port_in_use(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = subprocess.run(
            [sys.executable, "-m", "flows.ui", str(tmp_path), f"prefect_port={port}", f"mlflow_port={free_port()}"],
            cwd=ROOT, env=environment(tmp_path), capture_output=True, text=True,
        )  # fmt: skip
    assert done.returncode == 1
    assert (
        done.stderr
        == f"error: port {port} for Prefect: expected a free port, got one in use. Stop it, or choose another: make ui PREFECT_PORT={port + 1}.\n"
    )


def test_a_worker_runs_the_sample_deployment(tmp_path):
    port, log = free_port(), tmp_path / "server.log"
    settings = environment(tmp_path, PREFECT_API_URL=f"http://127.0.0.1:{port}/api", PWD=str(ROOT))
    prefect = str(BIN / "prefect")

    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([prefect, *words], cwd=ROOT, env=settings, capture_output=True, text=True, timeout=400)

    server = environment(tmp_path, PREFECT_API_DATABASE_CONNECTION_URL=f"sqlite+aiosqlite:///{tmp_path}/prefect.db")
    with running(prefect, "server", "start", "--host", "127.0.0.1", "--port", str(port), environment=server, log=log):
        wait_until(lambda: answers(f"http://127.0.0.1:{port}/api/health"), "the server", log)
        assert run("work-pool", "create", "dlrm", "--type", "process", "--overwrite").returncode == 0
        deployed = run("--no-prompt", "deploy", "--all")
        assert deployed.returncode == 0, deployed.stdout + deployed.stderr
        with running(prefect, "worker", "start", "--pool", "dlrm", environment=settings, log=tmp_path / "worker.log"):
            done = run(
                "deployment", "run", "end-to-end/sample", "--watch", "--param", 'overrides={"training.world_size": 1}'
            )
            assert done.returncode == 0, done.stdout + done.stderr + (tmp_path / "worker.log").read_text()[-3000:]
            bad = run(
                "deployment", "run", "end-to-end/sample", "--watch", "--param", 'overrides={"training.epochs": "two"}'
            )
            assert bad.returncode == 1
        reports = artifacts(port)
        assert len(reports) == 1
        assert "| evaluation | " in reports[0]["data"]
        assert "champion" in reports[0]["data"]


def artifacts(port: int) -> list[dict]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/api/artifacts/filter", data=b"{}", headers={"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request) as response:
        return [artifact for artifact in json.load(response) if artifact["type"] == "markdown"]

"""The command `dlrm serve`: words, and the real server under load while its champion changes and a process dies."""

import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import mlflow
import pyarrow.parquet as pq
import pytest

from flows.serve import main, read_options
from pipeline.errors import ConfigError
from pipeline.processes.process import process_start
from pipeline.registration.aliases import move_alias
from tests.homes import open_smoke

ROOT = Path(__file__).resolve().parents[2]


def test_options_are_read_from_words():
    found = read_options(["port=80", "processes=3", "hosts=a.example,b.example", "log=rows", "version=2"])
    assert (found.port, found.processes, found.hosts, found.version) == (80, 3, ("a.example", "b.example"), 2)
    assert (found.host, str(found.log)) == ("127.0.0.1", "rows")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["prot=80"], "argument 'prot': expected a parameter of this flow (host, port,"),
        (["port=eighty"], "dlrm serve, key 'port': expected a valid integer"),
        (["training.epochs=2"], "argument 'training.epochs': expected one of host, port,"),
        (["processes=0"], "dlrm serve, key 'processes': expected greater than 0"),
    ],
)
def test_wrong_words_are_named(words, sentence):
    with pytest.raises(ConfigError) as caught:
        read_options(words)
    assert str(caught.value).startswith(sentence)


def test_a_home_without_models_is_refused_and_stays_empty(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(signal, "signal", lambda *words: None)
    assert main([]) == 1
    assert main(["demo", "port=0"]) == 1
    with socket.create_server(("127.0.0.1", 0)) as other:
        assert main(["demo", f"port={other.getsockname()[1]}"]) == 1
    first, second, third = capsys.readouterr().err.strip().splitlines()
    assert (
        first
        == "error: command line: expected the name of a model first, got nothing. Usage: dlrm serve NAME [key=value ...]"
    )
    assert second.startswith(f"error: model 'demo': expected a registry in {tmp_path}, got none. Train it first")
    assert "Address already in use. Stop what listens there" in third
    assert list(tmp_path.iterdir()) == []


class Server(NamedTuple):
    address: str
    process: subprocess.Popen[str]
    log: Path
    home: Path

    def ask(self, path: str, body: Any = None) -> tuple[dict[str, str], Any]:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.address + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            text = answer.read()
            return dict(answer.headers), json.loads(text) if answer.headers[
                "content-type"
            ] == "application/json" else text

    def children(self) -> list[int]:
        found = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        return [int(word) for word in found.split()]


@pytest.fixture
def server(copied, tmp_path) -> Iterator[Server]:
    """Two processes that serve the smoke run's version, from a copy of its registry."""
    words = ["-m", "flows.serve", "smoke", "port=0", "processes=2", "poll_seconds=0.2", f"log={tmp_path / 'rows'}"]
    log = tmp_path / "serve.log"
    with log.open("w") as output:
        process = subprocess.Popen([sys.executable, *words], cwd=ROOT, stdout=output, stderr=output, text=True)
    try:
        limit = time.monotonic() + 300
        while not (found := re.search(r"smoke version 1 .* answers at (\S+)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < limit, log.read_text()
            time.sleep(0.1)
        yield Server(found[1], process, log, copied)
    finally:
        process.kill()
        process.wait(30)


def test_damaged_weights_end_the_server(copied):
    """They are compared while it answers already: a large model is not waited for."""
    for weights in copied.glob("mlflow/artifacts/**/weights.safetensors"):
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
    words = [sys.executable, "-m", "flows.serve", "smoke", "port=0"]
    ended = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 1
    assert (
        "error: model 'smoke', version 1: expected the files that were registered, got another weights.safetensors."
        in ended.stderr
    )


def example(home: Path) -> dict[str, Any]:
    """The body that the registered version was saved with."""
    tracker = open_smoke().tracking
    path = mlflow.artifacts.download_artifacts(
        "models:/smoke/1/serving_input_example.json", dst_path=str(home / "example"), tracking_uri=tracker.uri
    )
    found: dict[str, Any] = json.loads(Path(path).read_text())
    return found


@pytest.mark.slow
def test_a_server_changes_its_version_replaces_a_process_and_loses_nothing(server):
    body = example(server.home)
    headers, expected = server.ask("/invocations", body)
    assert headers["x-model-version"] == "1"
    assert len(expected["predictions"]) == 3
    tables_are_shared(server.children())

    tracker = open_smoke().tracking
    first = tracker.client.get_model_version("smoke", "1")
    tracker.client.create_model_version("smoke", first.source, first.run_id, tags=first.tags, model_id=first.model_id)
    seen: list[tuple[str, Any]] = []
    errors: list[Exception] = []
    enough = threading.Event()

    def call() -> None:
        connection = http.client.HTTPConnection(server.address.removeprefix("http://"), timeout=60)
        try:
            while not enough.is_set():
                connection.request("POST", "/invocations", json.dumps(body), {"Content-Type": "application/json"})
                answer = connection.getresponse()
                seen.append((str(answer.headers["x-model-version"]), json.loads(answer.read())))
        except Exception as error:
            errors.append(error)

    callers = [threading.Thread(target=call) for _ in range(4)]
    for caller in callers:
        caller.start()
    move_alias(tracker, "smoke", "champion", 2, "person", "a test")
    limit = time.monotonic() + 240
    while sum(version == "2" for version, _ in seen) < 50:
        assert time.monotonic() < limit, server.log.read_text()
        assert not errors, errors
        time.sleep(0.05)
    enough.set()
    for caller in callers:
        caller.join(60)
    assert errors == []
    assert all(answer == expected for _, answer in seen)
    assert {version for version, _ in seen} == {"1", "2"}
    assert server.ask("/version")[1]["version"] == 2
    assert "smoke: version 2 answers, version 1 did" in server.log.read_text()

    dead = server.children()[0]
    os.kill(dead, signal.SIGKILL)
    limit = time.monotonic() + 240
    while (
        b'dlrm_ready_processes{model="smoke",version="2"} 2.0' not in server.ask("/metrics")[1]
        or dead in server.children()
    ):
        assert time.monotonic() < limit, server.log.read_text()
        time.sleep(0.1)
    assert server.ask("/invocations", body)[1] == expected

    pids = server.children()
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(60) == 0
    assert [process_start(pid) for pid in pids] == [None, None]
    assert "Traceback" not in server.log.read_text()
    assert "POST" not in server.log.read_text()
    rows = sum(pq.read_metadata(file).num_rows for file in (server.log.parent / "rows").glob("*.parquet"))
    assert rows >= 3  # a killed process loses what it had not written
    assert list((server.home / "tmp").iterdir()) == []


def tables_are_shared(pids: list[int]) -> None:
    """The weights' pages that both processes have read are the same memory, and nobody has a copy."""
    assert len(pids) == 2
    for pid in pids:
        maps = re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path(f"/proc/{pid}/smaps").read_text(), flags=re.MULTILINE)
        weights = [one for one in maps if one and "weights.safetensors" in one.splitlines()[0]]
        [sizes] = [dict(re.findall(r"^(\w+): +(\d+) kB", one, re.MULTILINE)) for one in weights]
        assert int(sizes["Anonymous"]) == 0  # a page of the file may be dirty: it was written a moment ago
        assert int(sizes["Shared_Clean"]) + int(sizes["Shared_Dirty"]) > 0

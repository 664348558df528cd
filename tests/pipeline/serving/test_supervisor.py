"""Processes of a server: replaced when they die, changed all at once or not at all, and gone with their parent."""

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pipeline.errors import ContractError, RegistryError
from pipeline.processes.process import process_start
from pipeline.serving import supervisor
from pipeline.serving.config import ServedVersion
from pipeline.serving.metrics import ServerMetrics
from pipeline.serving.supervisor import FetchedVersion, Supervisor

ROOT = Path(__file__).resolve().parents[3]
PROCESS = """
import json, os, socket, sys, time
from pathlib import Path
channel = socket.socket(fileno=int(sys.argv[4]))
state, number = Path(sys.argv[1]), 0
for line in channel.makefile():
    message = json.loads(line)
    answer = {"is": "prepared", "number": message["number"]}
    if message["do"] == "prepare":
        reason = (Path(message["folder"]) / "bad")
        if reason.exists():
            answer |= {"is": "failed", "reason": reason.read_text()}
    elif message["do"] == "swap":
        answer["is"] = "swapped"
        (state / str(os.getpid())).write_text(str(message["number"]))
    elif message["do"] == "drop":
        answer["is"] = "dropped"
    else:
        if message["do"] == "stale":
            (state / "stale").write_text(str(message["reason"]))
        continue
    hang = Path(message.get("folder", state / f"version-{message['number']}")) / f"hang-{message['do']}"
    hangs = hang.exists() and hang.read_text() in ("always", "once", str(os.getpid()))
    if hangs and (answer["is"] != "prepared" or message["number"] > 1):
        if hang.read_text() == "once":
            hang.unlink()
        if answer["is"] == "prepared":
            continue  # the load hangs, and nothing else does
        time.sleep(600)
    channel.sendall(json.dumps(answer).encode() + b"\\n")
"""
"""Does what a process of the server does, without a model: it writes the number of its version to a file."""


class Running:
    """A supervisor in a thread, with processes that load nothing."""

    def __init__(self, folder: Path, count: int, command: str = PROCESS) -> None:
        self.state, self.folder = folder / "state", folder
        self.state.mkdir()
        self.removed: list[int] = []
        self.error: BaseException | None = None
        self.ready = threading.Event()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.metrics = ServerMetrics()
        self.supervisor = Supervisor(
            [sys.executable, "-c", command, str(self.state)], dict(os.environ), count, self.listener, self.metrics
        )
        self.thread = threading.Thread(target=self.run, daemon=True)

    def version(self, number: int, bad: str | None = None) -> FetchedVersion:
        folder = self.folder / f"version-{number}"
        folder.mkdir()
        if bad is not None:
            (folder / "bad").write_text(bad)
        return FetchedVersion(number, ServedVersion(model="m", version=number, run_id="r", snapshot=None), folder)

    def run(self) -> None:
        try:
            with self.supervisor as supervisor:
                remove = lambda version: self.removed.append(version.number)  # noqa: E731
                supervisor.begin(self.version(1), self.ready.set, remove)
                supervisor.run()
        except BaseException as error:
            self.error = error

    def serving(self) -> list[str]:
        living = {str(server.process.pid) for server in self.supervisor.processes}
        return [file.read_text() for file in self.state.iterdir() if file.name in living]

    def stop(self) -> None:
        def interrupt() -> None:
            raise KeyboardInterrupt

        self.supervisor._begin_change = interrupt  # type: ignore[method-assign]
        self.thread.join(30)
        self.listener.close()


def until(holds: Callable[[], bool], seconds: float = 90.0) -> None:
    limit = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.fixture
def running(tmp_path) -> Iterator[Running]:
    one = Running(tmp_path, 2)
    one.thread.start()
    assert one.ready.wait(30), one.error
    yield one
    one.stop()


def test_all_processes_change_together(running):
    assert running.serving() == ["1", "1"]
    running.supervisor.offer(running.version(2))
    until(lambda: running.serving() == ["2", "2"] and running.removed == [1])
    slow, quick = (server.process.pid for server in running.supervisor.processes)
    version = running.version(3)
    (version.folder / "hang-prepare").write_text(f"{slow}")
    running.supervisor.offer(version)
    until(lambda: running.supervisor.change is not None and running.supervisor.change.waiting == {slow}, 20.0)
    time.sleep(0.2)  # long enough for a swap that came too early
    assert running.serving() == ["2", "2"], f"process {quick} waits for process {slow}"


def test_a_version_that_cannot_be_loaded_is_not_served(running, caplog):
    running.supervisor.offer(running.version(2, bad="its file is damaged."))
    until(lambda: running.removed == [2])
    assert running.serving() == ["1", "1"]
    until(lambda: b"dlrm_stale 1.0" in running.metrics.text())
    assert b"dlrm_reload_failures_total 1.0" in running.metrics.text()
    assert "m: version 2 cannot be served: its file is damaged. Version 1 goes on." in caplog.text
    running.supervisor.offer(running.version(3))
    until(lambda: running.serving() == ["3", "3"])
    until(lambda: b"dlrm_stale 0.0" in running.metrics.text())


def test_what_is_found_wrong_with_the_served_version_ends_the_server(running):
    first, second = running.supervisor.current, running.version(2)
    running.supervisor.offer(second)
    until(lambda: running.serving() == ["2", "2"])
    running.supervisor.fail(first, ContractError("version 1", "its files", "others", "Restore them."))
    time.sleep(0.5)  # longer than a look: a version that no longer answers ends nothing
    assert running.thread.is_alive()
    processes = [server.process for server in running.supervisor.processes]
    running.supervisor.fail(second, ContractError("version 2", "its files", "others", "Restore them."))
    running.thread.join(30)
    assert str(running.error) == "version 2: expected its files, got others. Restore them."
    assert all(process.poll() is not None for process in processes)


def test_a_dead_process_is_replaced_by_one_of_the_present_version(running):
    running.supervisor.offer(running.version(2))
    until(lambda: running.serving() == ["2", "2"])
    dead = running.supervisor.processes[0].process.pid
    os.kill(dead, signal.SIGKILL)
    until(lambda: dead not in [server.process.pid for server in running.supervisor.processes])
    until(lambda: running.serving() == ["2", "2"])
    assert b"dlrm_restarts_total 1.0" in running.metrics.text()


def stale(running: Running) -> bool:
    return b"dlrm_stale 1.0" in running.metrics.text()


def test_a_load_that_hangs_gives_up_the_change_and_kills_nobody(running, monkeypatch, caplog):
    monkeypatch.setattr(supervisor, "LOAD_SECONDS", 0.3)
    pids = [server.process.pid for server in running.supervisor.processes]
    version = running.version(2)
    (version.folder / "hang-prepare").write_text("always")
    running.supervisor.offer(version)
    until(lambda: running.removed == [2])
    assert "version 2 cannot be served: process" in caplog.text
    assert "has not loaded it within 0.3 s. Version 1 goes on." in caplog.text
    until(lambda: stale(running))
    until(lambda: "version 2" in (running.state / "stale").read_text())
    assert running.serving() == ["1", "1"]
    running.supervisor.offer(running.version(3))
    until(lambda: running.serving() == ["3", "3"])
    until(lambda: not stale(running))
    assert [server.process.pid for server in running.supervisor.processes] == pids


def test_a_process_that_answers_nothing_is_replaced_and_keeps_no_version(running, monkeypatch):
    monkeypatch.setattr(supervisor, "LOAD_SECONDS", 0.5)
    monkeypatch.setattr(supervisor, "ANSWER_SECONDS", 0.5)
    stopped = running.supervisor.processes[0].process.pid
    os.kill(stopped, signal.SIGSTOP)
    running.supervisor.offer(running.version(2))
    until(lambda: running.removed == [2])
    until(lambda: stopped not in [server.process.pid for server in running.supervisor.processes])
    monkeypatch.setattr(supervisor, "LOAD_SECONDS", 60.0)
    running.supervisor.offer(running.version(3))
    until(lambda: running.serving() == ["3", "3"])


def test_a_server_whose_first_load_hangs_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(supervisor, "LOAD_SECONDS", 0.5)
    one = Running(tmp_path, 1, "import time; time.sleep(600)")
    one.thread.start()
    one.thread.join(60)
    one.listener.close()
    assert str(one.error).startswith("a server process exited with code -9 before answering")


def test_no_process_outlives_the_server(running):
    pids = [server.process.pid for server in running.supervisor.processes]
    running.stop()
    assert isinstance(running.error, KeyboardInterrupt)
    assert [process_start(pid) for pid in pids] == [None, None]


@pytest.mark.parametrize(
    ("command", "sentence"),
    [
        ("raise SystemExit(7)", "a server process exited with code 7 before answering. See its output above."),
        (PROCESS.replace("reason.exists()", "True").replace("reason.read_text()", "'no plan'"), "model 'm' version 1 cannot be loaded: no plan. Restore"),
    ],
)  # fmt: skip
def test_a_server_that_never_answers_ends(tmp_path, command, sentence):
    one = Running(tmp_path, 1, command)
    one.thread.start()
    one.thread.join(30)
    assert isinstance(one.error, ContractError)
    assert str(one.error).startswith(sentence)
    assert one.supervisor.processes == [] or one.supervisor.processes[0].process.poll() is not None


def test_no_process_outlives_a_server_without_a_model(tmp_path):
    """Processes start before the registry is asked, which may know no such model."""
    one, processes = Running(tmp_path, 2), []
    supervisor = one.supervisor
    with pytest.raises(RegistryError, match="no such model"), supervisor:  # noqa: PT012
        processes += [server.process for server in supervisor.processes]
        raise RegistryError.of("no such model", "Train one.")
    one.listener.close()
    assert len(processes) == 2
    assert all(process.poll() is not None for process in processes)


def test_processes_end_with_a_killed_server(tmp_path):
    """The kernel ends a process whose server was killed; without a version it waits for ever otherwise."""
    code = """
import os, socket, subprocess, sys, time
ours, theirs = socket.socketpair()
listener = socket.create_server(("127.0.0.1", 0))
words = [sys.executable, "-m", "pipeline.jobs.serving.worker", "{}", "m", str(os.getpid()), str(listener.fileno()), str(theirs.fileno())]
child = subprocess.Popen(words, pass_fds=(listener.fileno(), theirs.fileno()), start_new_session=True)
print(child.pid, listener.getsockname()[1], flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    pid, port = map(int, parent.stdout.readline().split())
    caller = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    caller.request("GET", "/v2/health/ready")
    answer = caller.getresponse()
    assert (answer.status, json.loads(answer.read())) == (
        503,
        {"name": "m", "ready": False},
    )  # it answers before it has a version
    caller.close()
    parent.kill()
    parent.wait(30)
    until(
        lambda: process_start(pid) is None or Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    )

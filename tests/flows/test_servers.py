"""Real servers on loopback: the UI command, and a deployment run by a worker."""

import base64
import datetime
import importlib
import inspect
import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from prefect.settings import PREFECT_FLOWS_HEARTBEAT_FREQUENCY
from prefect.utilities.callables import parameter_schema

from flows import ui
from flows.runtime import access, cli
from flows.runtime.cli import prefect_settings
from flows.runtime.server import TemporaryServer, start_loading
from pipeline.errors import ConfigError
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent


@contextmanager
def running(*command: str, environment: dict[str, str], log: Path) -> Iterator[subprocess.Popen]:
    """Runs a program and ends it with everything that it started."""
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


def wait_until(answers, what: str, log: Path, seconds: float = 400.0) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        if answers():
            return
        time.sleep(0.3)
    raise AssertionError(f"{what} did not come up:\n{log.read_text()[-2000:]}")


def lives(process: psutil.Process) -> bool:
    """Whether a process runs. One that has ended may wait for a parent to take note of it."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=20) as response:
            return response.status == 200
    except OSError:
        return False


def environment(home: Path, **more: str) -> dict[str, str]:
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_TRACKING"))}
    return keep | {"DLRM_HOME": str(home), "PREFECT_HOME": str(home / "prefect"), "DO_NOT_TRACK": "1"} | more


def looked_for_tables(server: TemporaryServer) -> bool:
    """Asks a server for its settings."""
    secret = base64.b64encode(server.secret.encode()).decode()
    request = urllib.request.Request(f"{server.address}/admin/settings", headers={"Authorization": f"Basic {secret}"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        found: bool = json.load(answer)["server"]["database"]["migrate_on_start"]
    return found


@pytest.mark.nightly
def test_a_process_that_loads_a_server_ends_when_its_command_needs_none() -> None:
    process = start_loading()
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(60) == 0


@pytest.mark.nightly
def test_a_command_with_a_server_of_its_own_kills_the_process_that_loads_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "server_address", lambda: "http://127.0.0.1:9/api")
    process = start_loading()
    with pytest.raises(ConfigError, match="a running Prefect server"):
        cli.run("train", ["configs/smoke.yaml", f"home={tmp_path}"], process=process)
    assert process.wait(60) == -signal.SIGKILL


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["train", "end_to_end", "layout"])
def test_the_form_of_a_deployment_shows_what_the_function_takes(name: str) -> None:
    """Prefect makes the form of the flow; a command does without it."""
    made = getattr(importlib.import_module(f"flows.{name}"), name)
    plain = inspect.unwrap(made)
    expected = parameter_schema(plain)
    assert parameter_schema(made) == made.parameters == expected
    assert "preprocessing" in json.dumps(expected.model_dump())
    assert not hasattr(made, "__signature__")


@pytest.mark.nightly
def test_a_temporary_server_makes_tables_where_its_database_lacks_them(tmp_path: Path) -> None:
    made = []
    for _ in range(3):
        server = TemporaryServer(tmp_path)
        try:
            with prefect_settings(server):
                assert PREFECT_FLOWS_HEARTBEAT_FREQUENCY.value() is None  # else a run ends up to a second later
            made.append(looked_for_tables(server))
            secret = base64.b64encode(server.secret.encode()).decode()
            url, headers = f"{server.address}/flows/{uuid.uuid4()}", {"Authorization": f"Basic {secret}"}
            with pytest.raises(urllib.error.HTTPError, match="404"):  # 500: there is no table of flows
                urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60)
        finally:
            server.stop()
        if len(made) == 2:
            for path in tmp_path.glob("prefect.db*"):
                path.unlink()
    assert made == [True, False, True]


@pytest.mark.slow
def test_ui_starts_both_servers_and_stops_them(tmp_path):
    prefect, mlflow, log = free_port(), free_port(), tmp_path / "ui.log"
    words = ["-m", "flows.ui", str(tmp_path), f"prefect_port={prefect}", f"mlflow_port={mlflow}"]
    with running(sys.executable, *words, environment=environment(tmp_path), log=log) as process:
        wait_until(lambda: "MLflow   http" in log.read_text() or process.poll() is not None, "the UI", log)
        assert f"Prefect  http://127.0.0.1:{prefect}" in log.read_text()
        assert answers(f"http://127.0.0.1:{prefect}/api/health")
        assert answers(f"http://127.0.0.1:{mlflow}/health")
        secret = tmp_path / "prefect" / "auth"
        assert f"http://127.0.0.1:{prefect} asks for the text of {secret}" in log.read_text()
        assert secret.read_text().strip() not in log.read_text()
        children = psutil.Process(process.pid).children(recursive=True)
        assert children
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
        assert psutil.wait_procs(children, timeout=15)[1] == []


@pytest.mark.nightly
def test_both_servers_end_with_a_ui_that_is_killed(tmp_path):
    prefect, mlflow, log = free_port(), free_port(), tmp_path / "ui.log"
    words = ["-m", "flows.ui", str(tmp_path), f"prefect_port={prefect}", f"mlflow_port={mlflow}"]
    with running(sys.executable, *words, environment=environment(tmp_path), log=log) as process:
        wait_until(lambda: "MLflow   http" in log.read_text() or process.poll() is not None, "the UI", log)
        children = psutil.Process(process.pid).children(recursive=True)
        try:
            assert len(children) >= 2
            process.kill()
            until(lambda: not any(map(lives, children)), seconds=60)
        finally:
            for child in psutil.wait_procs(children, timeout=0)[1]:
                child.kill()


@pytest.mark.nightly
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
        == f"error: port {port} for Prefect is in use. Stop it, or choose another: make ui PREFECT_PORT={port + 1}.\n"
    )


class Deployed:
    """A Prefect server with everything that `make deploy` makes. It can be killed and restarted."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.address = f"http://127.0.0.1:{self.port}/api"
        self.settings = environment(folder, PREFECT_API_URL=self.address, PREFECT_WORKER_QUERY_SECONDS="2")
        self.database = folder / "prefect" / "prefect.db"
        self.headers: dict[str, str] = {}
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        words, more, log = ui.commands(self.folder, self.port, 1)[0]
        self.process = ui.start(words, environment(self.folder, **more), log)
        ui.wait_for(self.process, f"{self.address}/health", log)
        secret, client = access.read_secret(self.folder / "prefect"), str(uuid.uuid4())
        self.headers = {"Content-Type": "application/json"} | access.header(secret)
        token = self.ask(f"/csrf-token?client={client}")["token"]
        self.headers |= {"Prefect-Csrf-Client": client, "Prefect-Csrf-Token": token}

    def kill(self) -> None:
        assert self.process is not None
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(30)

    def ask(self, path: str, body: Any = None) -> Any:
        """Returns the API's answer. Posts a body if given.

        Retries on 503, which says that the database is locked. What is safe to repeat is asked again after 60 seconds
        without an answer: a server that has just been restarted has a queue of writers, and any may be starved.
        """
        data = None if body is None else json.dumps(body).encode()
        limit = time.monotonic() + 400
        while True:
            request = urllib.request.Request(self.address + path, data, self.headers)
            try:
                with urllib.request.urlopen(request, timeout=60) as answer:
                    return json.load(answer)
            except urllib.error.HTTPError as error:
                if error.code != 503 or time.monotonic() > limit:
                    raise
            except TimeoutError:
                safe = body is None or path.endswith("/filter") or "idempotency_key" in body
                if not safe or time.monotonic() > limit:
                    raise
            time.sleep(0.5)

    def order(self, deployment: str, **parameters: Any) -> str:
        """Starts a run of a deployment and returns its id."""
        found = self.ask(f"/deployments/name/{deployment}")["id"]
        body = {"parameters": parameters, "idempotency_key": str(uuid.uuid4())}
        return self.ask(f"/deployments/{found}/create_flow_run", body)["id"]

    def runs(self, deployment: str) -> list[dict[str, Any]]:
        found = self.ask(f"/deployments/name/{deployment}")["id"]
        return self.ask("/flow_runs/filter", {"deployments": {"id": {"any_": [found]}}, "sort": "START_TIME_DESC"})

    def state(self, run: str) -> str:
        return self.ask(f"/flow_runs/{run}")["state_type"]

    def history(self, run: str) -> list[str]:
        """Returns the names of the states that a run has had."""
        return [one["name"] for one in self.ask(f"/flow_run_states/?flow_run_id={run}")]

    def training(self, run: str) -> str:
        """Returns the state of the training inside an end-to-end run."""
        found = self.ask(
            "/flow_runs/filter", {"flow_runs": {"parent_flow_run_id": {"any_": [run]}}, "sort": "START_TIME_DESC"}
        )
        return next((one["state_type"] for one in found if one["name"].startswith("train ")), "none")

    def said(self, text: str) -> list[str]:
        found = self.ask("/logs/filter", {"sort": "TIMESTAMP_DESC", "limit": 200})
        return [line["message"] for line in found if text in line["message"]]

    def told(self) -> str:
        """Returns what a test that waited in vain wants to know: states of runs, and the end of the worker's log."""
        runs = self.ask("/flow_runs/filter", {"sort": "START_TIME_DESC", "limit": 20})
        states = [f"{one['name']}: {one['state_name']} {one['state'].get('message') or ''}" for one in runs]
        return "\n".join([*states, *self.said("")[::-1], (self.folder / "worker.log").read_text()[-4000:]])

    @contextmanager
    def worker(self, **more: str) -> Iterator[subprocess.Popen]:
        """A worker, with further variables."""
        log = self.folder / "worker.log"
        words = ("-m", "flows.runtime.access", str(BIN / "prefect"), "worker", "start", "--pool", "dlrm")
        with running(sys.executable, *words, environment=self.settings | more, log=log) as one:
            yield one


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    server = Deployed(tmp_path_factory.mktemp("deployed"))
    (server.folder / "prefect").mkdir()
    marked = ExitStack()
    marked.enter_context(access.serving(server.folder / "prefect", server.port))
    server.start()
    try:
        done = subprocess.run(
            [sys.executable, "-m", "flows.deploy", "setup", "chain=true", "silent_seconds=55", "pending_seconds=60"], cwd=ROOT, env=server.settings,
            capture_output=True, text=True, timeout=900,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        yield server
    finally:
        server.kill()
        marked.close()


def until(happened: Callable[[], Any], seconds: float = 400.0) -> Any:
    """Waits until a call returns something true, and returns that."""
    limit = time.monotonic() + seconds
    while time.monotonic() < limit:
        with suppress(TimeoutError):  # the server is busy
            if found := happened():
                return found
        time.sleep(1.0)  # each question costs the server a tenth of a second
    raise AssertionError("it did not come")


SMOKE, LONG = (
    "configs/smoke.yaml",
    {"training.world_size": 1, "training.epochs": 200, "training.checkpoint_every_steps": 5},
)


@pytest.mark.nightly
def test_a_zombie_is_found_its_slot_is_freed_and_the_next_run_starts(deployed):
    """Worker and flow are killed. A run that is cancelled then leaves no process."""
    pending = deployed.order("ingest/ingest")
    deployed.ask(f"/flow_runs/{pending}/set_state", {"state": {"type": "PENDING"}})  # as a dead worker leaves it
    checkpoints = lambda: set(deployed.folder.glob("runs/smoke-*/checkpoints/step-*"))  # noqa: E731
    before = checkpoints()
    with deployed.worker() as worker:
        first, second = (deployed.order("end-to-end/sample", overrides=LONG) for _ in range(2))
        try:
            until(lambda: checkpoints() - before)
        except AssertionError as error:
            raise AssertionError(deployed.told()) from error
        assert deployed.state(second) == "SCHEDULED"  # one training at a time
        family = psutil.Process(worker.pid).children(recursive=True)
        for process in (worker, next(one for one in family if "prefect.engine" in one.cmdline())):
            process.kill()
        killed = time.monotonic()
        until(lambda: not any(map(lives, family)), seconds=30)
    with deployed.worker() as worker:
        until(lambda: "AwaitingRetry" in deployed.history(first))  # it was found, and waits for the slot of the second
        assert time.monotonic() - killed < 120
        assert "Crashed" in deployed.history(first)
        until(lambda: deployed.training(first) == "CRASHED")
        until(lambda: deployed.said("resumed at step"))
        deployed.ask(f"/flow_runs/{first}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
        family = psutil.Process(worker.pid).children(recursive=True)
        assert any(one.name().startswith("dlrm rank") for one in family)
        deployed.ask(f"/flow_runs/{second}/set_state", {"state": {"type": "CANCELLING"}})
        until(lambda: not any(map(lives, family)))
        until(lambda: deployed.state(second) == "CANCELLED")
    until(lambda: deployed.state(pending) == "CRASHED")


@pytest.mark.nightly
@pytest.mark.timeout(1_500)
def test_a_config_of_ones_own_runs_by_cron_and_again_after_a_kill(deployed, tmp_path):
    """Deployed and started in shells without a variable. The worker has another checkout, and a home of its own.

    The run is due in six minutes: of one that is due in less than five, Prefect's automations learn after fifteen.
    """
    user, there = tmp_path / "user", tmp_path / "checkout"
    shell = {name: value for name, value in os.environ.items() if not name.startswith(("PREFECT_", "DLRM_"))}
    shell |= {"HOME": str(user)}
    own = tmp_path / "mine.yaml"
    own.write_text(
        f"base: {ROOT}/{SMOKE}\nname: mine\ntraining: {{world_size: 1, epochs: 200, checkpoint_every_steps: 5}}\n"
    )

    def dlrm(*words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "flows.deploy", *words], cwd=ROOT, env=shell | {"DLRM_HOME": str(deployed.folder)},
            capture_output=True, text=True, timeout=600,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout

    due = datetime.datetime.now(datetime.UTC) + datetime.timedelta(minutes=6.5)
    assert "(profile dlrm-" in dlrm(str(own), "flow=end_to_end", f"cron={due.minute} {due.hour} * * *")
    for room in ("flows", "pipeline", "storage", "models", "configs"):
        shutil.copytree(ROOT / room, there / room, ignore=shutil.ignore_patterns("__pycache__"))
    with (there / "flows" / "__init__.py").open("a") as module:
        module.write("\n__import__('pathlib').Path(__file__).with_name('imported').touch()\n")
    secret = access.read_secret(deployed.folder / "prefect")
    other = {"DLRM_HOME": str(tmp_path / "home"), "PYTHONPATH": str(there), "PREFECT_API_AUTH_STRING": secret}
    checkpoints = lambda: list(tmp_path.glob("home/runs/mine-*/checkpoints/step-*"))  # noqa: E731
    with deployed.worker(**other) as worker:
        until(checkpoints, seconds=900)
        assert (there / "flows" / "imported").exists()
        [run] = [one["id"] for one in deployed.runs("end-to-end/mine") if one["state_type"] == "RUNNING"]
        dlrm(str(own), "flow=end_to_end", "cron=0 5 * * *")
        assert "schedule     0 5 * * * UTC, next " in dlrm(str(own), "flow=end_to_end")  # which keeps the schedule
        family = psutil.Process(worker.pid).children(recursive=True)
        for process in (worker, next(one for one in family if "prefect.engine" in one.cmdline())):
            process.kill()
        killed = time.monotonic()
    with deployed.worker(**other):
        until(lambda: deployed.history(run).count("Running") == 2)
        assert time.monotonic() - killed < 120
        until(lambda: deployed.said("resumed at step"))
        deployed.ask(f"/flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}})
        until(lambda: deployed.state(run) == "CANCELLED")
    assert "removed end-to-end/mine" in dlrm("remove", "mine")
    words = [str(BIN / "prefect"), "deployment", "run", "train/train", "--param", f"config={SMOKE}"]
    done = subprocess.run(words, cwd=tmp_path, env=shell, capture_output=True, text=True, timeout=300)
    assert "Created flow run" in done.stdout, done.stderr


@pytest.mark.nightly
@pytest.mark.parametrize(
    "parameters",
    [{"force": "maybe"}, {"config": {"name": "a", "seed": "x"}}, {"config": {"training": {"epochs": 0}}}, {"config": {"colour": 1}}],
)  # fmt: skip
def test_parameters_of_a_wrong_kind_range_or_name_make_no_run(deployed, parameters):
    before = len(deployed.runs("train/train"))
    with pytest.raises(urllib.error.HTTPError, match="409"):
        deployed.order("train/train", **parameters)
    assert len(deployed.runs("train/train")) == before


@pytest.mark.nightly
def test_an_ingest_and_the_training_it_starts_outlive_the_server(deployed):
    """While a model trains, the database is locked for 30 seconds. Then the server is killed and restarted.

    Wrong overrides end a run before it does anything.
    """
    with deployed.worker():
        bad = deployed.order("ingest/ingest", config=SMOKE, overrides={"training.epochs": "two"})
        for _ in range(3):  # Prefect on SQLite may lose an event while it is busy: the next ingest starts the training
            ingest = deployed.order("ingest/ingest", config=SMOKE)
            until(partial(lambda one: deployed.state(one) == "COMPLETED", ingest))
            with suppress(AssertionError):
                until(lambda: deployed.runs("train/after-ingest"), seconds=60)
                break
        trainings = deployed.runs("train/after-ingest")  # two if the first event was not lost, but late
        assert [one["parameters"] for one in trainings] == [{"config": SMOKE, "overrides": {}}] * len(trainings)
        train = until(lambda: next((one for one in trainings if deployed.state(one["id"]) == "RUNNING"), None))
        with closing(sqlite3.connect(deployed.database, isolation_level=None)) as database:
            database.execute("begin immediate")
            time.sleep(30)  # the fault itself
        deployed.kill()
        deployed.start()
        # The server heard no heartbeat and may have marked the run CRASHED. Its true end replaces that.
        until(lambda: deployed.state(train["id"]) in ("COMPLETED", "FAILED"))
        assert deployed.state(train["id"]) == "COMPLETED", deployed.said("")
    assert deployed.state(bad) == "FAILED"
    report = next(one for one in deployed.ask("/artifacts/filter", {}) if one["key"] == "report-smoke")
    assert "- evaluation: NE " in report["data"]
    assert "champion" in report["data"]

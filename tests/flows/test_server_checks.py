"""What the doctor says about servers, their databases and stuck runs, with the remedy."""

import asyncio
import base64
import datetime
import http.server
import importlib.util
import os
import socket
import sqlite3
import threading
import uuid
from contextlib import closing
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from alembic.script import ScriptDirectory
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling, Pending, Scheduled

from flows.ingest import ingest
from flows.runtime import server_checks
from pipeline.jobs.outcome import MLFLOW_ADDRESS

HOUR = datetime.timedelta(hours=1)


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = server_checks.port_free("MLflow", port)
    assert (found.ok, found.found) == (False, "in use (MLflow)")
    assert f"make ui MLFLOW_PORT={port + 1}" in found.remedy


def test_a_server_that_does_not_answer():
    found = server_checks.reachable("PREFECT_API_URL", "/health", {"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    assert not found.ok
    assert found.remedy == "Start that server, or unset PREFECT_API_URL to run embedded."
    assert server_checks.reachable("PREFECT_API_URL", "/health", {}).ok


@pytest.fixture
def runs(prefect):
    """Returns runs by name: one taken by a worker, one an hour late, one due in an hour, and one cancelled."""

    async def make():
        now = datetime.datetime.now(datetime.UTC)
        states: dict[str, State] = {
            "handed": Pending(),
            "late": Scheduled(scheduled_time=now - HOUR),
            "due": Scheduled(scheduled_time=now + HOUR),
            "cancelled": Cancelling(),
        }
        async with get_client() as client:
            return {
                name: (await client.create_flow_run(ingest, name=f"{name} {uuid.uuid4()}", state=state))
                for name, state in states.items()
            }

    async def remove(made):
        async with get_client() as client:
            for run in made.values():
                await client.delete_flow_run(run.id)

    made = asyncio.run(make())
    yield made
    asyncio.run(remove(made))


def test_stuck_runs_are_named_with_their_remedy(runs):
    found = {check.name: check for check in server_checks.stuck_runs(environment(), Path("none"), patience_seconds=0.0)}
    handed = found[f"run '{runs['handed'].name}'"]
    assert (handed.ok, handed.found.endswith(", not started")) == (False, True)
    assert (
        handed.remedy
        == f"Its worker is gone. End it: `prefect flow-run cancel {runs['handed'].id}`, then run it again."
    )
    late = found[f"run '{runs['late'].name}'"]
    assert (late.ok, late.found.endswith(", no worker"), late.remedy) == (False, True, "Start one: `make worker`.")
    assert f"run '{runs['due'].name}'" not in found
    cancelled = found[f"run '{runs['cancelled'].name}'"]
    assert (cancelled.ok, cancelled.remedy) == (False, "End its process. Set it to Cancelled on its page.")


def test_a_run_that_was_just_taken_is_fine(runs):
    names = [check.name for check in server_checks.stuck_runs(environment(), Path("none"))]
    assert f"run '{runs['handed'].name}'" not in names
    assert f"run '{runs['late'].name}'" in names


@pytest.mark.parametrize("server", [{}, {"PREFECT_API_URL": "http://127.0.0.1:9/api"}])
def test_without_a_server_there_are_no_findings(server):
    assert server_checks.stuck_runs(server, Path("none")) == []


def environment() -> dict[str, str]:
    return {"PREFECT_API_URL": PREFECT_API_URL.value()}


def test_the_ports_are_those_of_make_ui(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        names = [(check.name, check.ok) for check in server_checks.ui_ports(tmp_path, None, (port, port + 1))]
        assert names[0] == (f"port {port}", False)
        assert names[1][0] == f"port {port + 1}"
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / MLFLOW_ADDRESS).write_text("http://127.0.0.1:5310\n")
    [running] = server_checks.ui_ports(tmp_path, "http://127.0.0.1:4310/api", (4200, 5000))
    assert (running.ok, running.found) == (True, "Prefect http://127.0.0.1:4310, MLflow http://127.0.0.1:5310")


@pytest.mark.parametrize(("step", "found"), [(-2, "of an earlier MLflow"), (None, "of a later MLflow")])
def test_a_database_of_another_mlflow_is_named(tmp_path, step, found):
    versions = server_checks.read_mlflow_versions()
    known = sorted(versions, key=lambda version: not versions[version])
    (tmp_path / "mlflow").mkdir()
    assert server_checks.mlflow_tables(tmp_path).ok
    for version in ("f00", known[-1]) if step is None else (known[step], known[-1]):
        with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num)")
            database.execute("DELETE FROM alembic_version")
            database.execute("INSERT INTO alembic_version VALUES (?)", [version])
        check = server_checks.mlflow_tables(tmp_path)
        assert check.ok is (version == known[-1])
        assert check.ok or check.found == found
        assert ("mlflow db upgrade" in check.remedy) is (found == "of an earlier MLflow" and not check.ok)


def test_the_newest_tables_of_mlflow_are_its_own_head():
    folder = Path(importlib.util.find_spec("mlflow").origin).parent / "store" / "db_migrations"
    newest = [version for version, followed in server_checks.read_mlflow_versions().items() if not followed]
    assert newest == [ScriptDirectory(str(folder)).get_current_head()]


def test_both_know_where_make_ui_leaves_its_address():
    assert server_checks.MLFLOW_ADDRESS == MLFLOW_ADDRESS


def test_the_login_in_an_address_is_sent_and_never_shown():
    """The right login gets an answer. A wrong one, and none, end with a sentence that does not show it."""

    class Login(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            right = self.headers.get("Authorization") == "Basic " + base64.b64encode(b"me:hunt/er2").decode()
            self.send_response(200 if right else 401)
            self.end_headers()

        def log_message(self, *words: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Login) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"127.0.0.1:{server.server_port}"
        for login, ok in (("me:hunt%2Fer2@", True), ("me:other@", False), ("", False)):
            name = "MLFLOW_TRACKING_URI"
            check = server_checks.reachable(name, "/health", {name: f"http://{login}{place}"})
            assert (check.ok, check.found.split()[0].rstrip(":")) == (ok, f"http://{place}")
            assert "hunt" not in f"{check}"
        server.shutdown()
    shown = server_checks.reachable(
        "MLFLOW_TRACKING_URI", "/", {"MLFLOW_TRACKING_URI": "postgresql://me:hunter2@host/db"}
    )
    assert shown.found == "postgresql://host/db"


class Registry(http.server.BaseHTTPRequestHandler):
    """What MLflow's server with its login answers to the questions of the doctor."""

    may_write = True
    status = 200
    asked: list[str]

    def do_GET(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        place = urlsplit(self.path).path.removeprefix("/api/2.0/mlflow/")
        self.asked.append(place)
        if self.headers.get("Authorization") != "Basic " + base64.b64encode(b"me:hunter2").decode():
            return self.answer(401, b"You are not authenticated.")
        if self.status != 200:
            return self.answer(self.status, b"away")
        if "set-" in place and not self.may_write:
            return self.answer(403, b"Permission denied")
        answers = {
            "/version": b"3.1.4",
            "registered-models/search": b'{"registered_models": [{"name": "m"}]}',
            "experiments/get-by-name": b'{"experiment": {"experiment_id": "7", "name": "e"}}',
        }
        return self.answer(200, answers.get(place, b"{}"))

    do_POST = do_GET

    def answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", f"{len(body)}")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *words: object) -> None:
        pass


@pytest.fixture
def registry(monkeypatch):
    """A server's address, and the class that decides what it answers."""
    kind = type("Own", (Registry,), {"asked": []})
    monkeypatch.setenv("MLFLOW_TRACKING_USERNAME", "me")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "hunter2")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), kind) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", kind
        server.shutdown()


def test_who_may_train_is_told_so(registry):
    address, kind = registry
    before = dict(os.environ)
    assert server_checks.reachable(
        "MLFLOW_TRACKING_URI", "/version", os.environ | {"MLFLOW_TRACKING_URI": address}
    ) == (server_checks.Check("MLFLOW_TRACKING_URI", True, f"{address} answers, version 3.1.4"))
    found = [(one.name, one.ok, one.found) for one in server_checks.mlflow_access(address, "e", "m")]
    assert found == [
        ("MLflow: login", True, "accepted, of me"),
        ("MLflow: experiment", True, "'e' can be written"),
        ("MLflow: model", True, "'m' can be written"),
    ]
    assert [one for one in kind.asked if "set-" in one] == [
        "experiments/set-experiment-tag", "registered-models/set-tag",
    ]  # fmt: skip
    assert dict(os.environ) == before


def test_who_may_only_read_learns_which_permission_lacks(registry):
    address, kind = registry
    kind.may_write = False
    login, experiment = server_checks.mlflow_access(address, "e", "m")
    assert login.ok
    assert (experiment.ok, experiment.found) == (
        False, "expected permission for experiments/set-experiment-tag, got a refusal",
    )  # fmt: skip
    assert experiment.remedy.startswith("Ask for it: READ scores and serves, EDIT trains and promotes")
    assert [one.ok for one in server_checks.mlflow_access(address)] == [True]


@pytest.mark.parametrize("status", [401, 500, 503])
def test_a_server_that_refuses_or_is_away_is_told(registry, monkeypatch, status):
    address, kind = registry
    if status == 401:
        monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "other!secret")
    kind.status = status
    [found] = server_checks.mlflow_access(address, "e", "m")
    assert (found.name, found.ok) == ("MLflow: login", False)
    assert ("MLFLOW_TRACKING_PASSWORD" in found.remedy) == (status == 401)
    assert "secret" not in f"{found}"
    assert "hunter2" not in f"{found}"
    assert len([one for one in kind.asked if "search" in one]) == 1  # not again for minutes

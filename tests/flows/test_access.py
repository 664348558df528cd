"""Loopback is no wall: our Prefect servers refuse what a web page or another user on this machine can send."""

import base64
import http.client
import http.server
import json
import os
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any, NamedTuple

import prefect.settings
import pytest
from prefect.settings import temporary_settings
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from flows import ui
from flows.runtime import access
from flows.runtime.environment import make_private
from flows.runtime.server import TemporaryServer, require_known_tables
from flows.runtime.server_checks import stuck_runs
from pipeline.config.files import ROOT
from pipeline.errors import ConfigError

EVIL = {"Origin": "https://evil.example"}
SHELL = {
    "name": "evil",
    "flow_id": "00000000-0000-0000-0000-000000000001",
    "pull_steps": [{"prefect.deployments.steps.run_shell_script": {"script": "touch /tmp/evil"}}],
}
SECONDS = 60.0


class Served(NamedTuple):
    """A server that runs, and the secret that it asks for."""

    port: int
    secret: str
    home: Path

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, dict[str, str], bytes]:
        """Returns status, headers and content. Headers as given: also those that a browser would set itself."""
        with closing(http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)) as connection:
            connection.request(method, path, None if body is None else json.dumps(body), headers)
            answer = connection.getresponse()
            return answer.status, {key.lower(): value for key, value in answer.getheaders()}, answer.read()

    def rows(self, table: str) -> int:
        with closing(sqlite3.connect(self.home / "prefect" / "prefect.db")) as database:
            return int(database.execute(f"SELECT count(*) FROM {table}").fetchone()[0])


def basic(secret: str) -> str:
    return f"Basic {base64.b64encode(secret.encode()).decode()}"


def clean_environment(home: Path, **more: str) -> dict[str, str]:
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_TRACKING"))}
    return keep | {"DLRM_HOME": str(home), "PREFECT_HOME": str(home / "profile")} | more


@pytest.fixture(scope="module")
def temporary(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    home = tmp_path_factory.mktemp("temporary")
    (home / "prefect").mkdir()
    server = TemporaryServer(home / "prefect")
    try:
        server.wait()
        yield Served(server.port, server.secret, home)
    finally:
        server.stop()


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """The Prefect server of `make ui`."""
    home = tmp_path_factory.mktemp("lasting")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command, environment, log = ui.commands(home, port, 1)[0]
    server = ui.start(command, environment, log)
    try:
        with access.serving(home / "prefect", port):
            ui.wait_for(server, f"http://127.0.0.1:{port}/api/health", log)
            yield Served(port, access.read_secret(home / "prefect"), home)
    finally:
        ui.stop([server])


@pytest.fixture(params=["temporary", pytest.param("lasting", marks=pytest.mark.nightly)])
def served(request: pytest.FixtureRequest) -> Served:
    found: Served = request.getfixturevalue(request.param)
    return found


def test_a_foreign_page_gets_no_leave_to_ask(served):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type,authorization"}
    status, headers, _ = served.ask("OPTIONS", "/api/deployments/", **EVIL, **asked)
    assert status == 400
    assert headers.get("access-control-allow-origin") in (None, f"http://127.0.0.1:{served.port}")
    status, headers, _ = served.ask("GET", "/api/admin/version", **EVIL)
    assert (status, headers.get("access-control-allow-origin")) == (401, None)


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
@pytest.mark.parametrize("more", [{}, {"Host": "evil.example"}, {"Authorization": basic("dlrm:guessed")}])
def test_a_foreign_page_makes_no_deployment(served, kind, more):
    """Without a preflight: a page can send text, or anything once its name resolves to this machine."""
    for path, body in (("/api/flows/", {"name": "evil"}), ("/api/deployments/", SHELL)):
        status, _, answer = served.ask("POST", path, body, **{"Content-Type": kind} | EVIL | more)
        assert status in (401, 403), answer
    assert served.rows("deployment") == 0


def test_csrf_alone_refuses_a_page_that_knows_the_secret(served):
    status, _, answer = served.ask("POST", "/api/flows/", {"name": "evil"}, Authorization=basic(served.secret), **EVIL)
    assert (status, json.loads(answer)["detail"]) == (403, "Missing CSRF token.")


def test_a_rebound_name_reads_nothing(served):
    for path in ("/api/admin/settings", "/api/admin/version", "/api/csrf-token?client=1"):
        status, _, answer = served.ask("GET", path, Host="evil.example")
        assert (status, json.loads(answer)) == (401, {"exception_message": "Unauthorized"}), path


@pytest.mark.parametrize("path", ["events/in", "events/out", "logs/out"])
@pytest.mark.parametrize("words", [["prefect"], None])
def test_a_foreign_page_opens_no_socket(served, path, words):
    """Browsers ask no leave for sockets."""

    def open_socket() -> None:
        address = f"ws://127.0.0.1:{served.port}/api/{path}"
        with connect(address, origin=EVIL["Origin"], subprotocols=words, open_timeout=SECONDS) as opened:
            opened.send(json.dumps({"type": "auth", "token": "dlrm:guessed"}))
            opened.recv(timeout=SECONDS)

    with pytest.raises((ConnectionClosed, InvalidStatus)):
        open_socket()


def test_who_knows_the_secret_is_answered(served):
    status, _, _ = served.ask("GET", "/api/admin/version", Authorization=basic(served.secret))
    assert status == 200


@pytest.mark.nightly
def test_the_pages_load_and_ask_for_the_secret(lasting):
    status, _, answer = lasting.ask("GET", "/ui-settings")
    settings = json.loads(answer)
    assert (status, settings["auth"], settings["csrf_enabled"]) == (200, "BASIC", True)
    for name in ("127.0.0.1", "localhost"):
        own = f"http://{name}:{lasting.port}"
        asked = {"Origin": own, "Access-Control-Request-Method": "POST"}
        status, headers, _ = lasting.ask("OPTIONS", "/api/deployments/", **asked)
        assert (status, headers["access-control-allow-origin"]) == (200, own)


@pytest.mark.nightly
def test_commands_authenticate_at_the_server_of_their_home_alone(lasting, tmp_path):
    address = f"http://127.0.0.1:{lasting.port}/api"

    def run(*words: str, home: Path, **more: str) -> subprocess.CompletedProcess[str]:
        environment = clean_environment(home, PREFECT_API_URL=address, **more)
        return subprocess.run([sys.executable, *words], cwd=ROOT, env=environment, capture_output=True, text=True)

    ingest = ("-m", "flows.ingest", "configs/smoke.yaml", "day=2025-01-06")
    done = run(*ingest, home=lasting.home)
    assert done.returncode == 0, done.stderr
    assert lasting.rows("flow_run") == 1
    written = [lasting.home / "prefect", *(lasting.home / "warehouse").rglob("*"), *(lasting.home / "logs").rglob("*")]
    assert len(written) > 5
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in written} == {0}
    prefect = str(Path(sys.executable).parent / "prefect")
    done = run(
        "-m", "flows.runtime.access", prefect, "work-pool", "create", "made", "--type", "process", home=lasting.home
    )
    assert done.returncode == 0, done.stderr
    assert lasting.rows("work_pool") == 1
    done = run(*ingest, home=tmp_path)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        f"error: server at {address}: expected its authentication string, got none. "
        "Set PREFECT_API_AUTH_STRING. For a server of `make ui`, use the text of the file that it names."
    )
    done = run("-m", "flows.deploy", home=tmp_path, PREFECT_API_AUTH_STRING="dlrm:guessed")
    assert "expected its authentication string, got another one" in done.stderr
    assert lasting.rows("flow_run") == 1
    [check] = stuck_runs({"PREFECT_API_URL": address}, tmp_path)
    assert (check.ok, check.found) == (False, f"{address} wants authentication")
    assert stuck_runs({"PREFECT_API_URL": address}, lasting.home) == []


def test_a_folder_of_an_older_home_becomes_private(tmp_path, monkeypatch):
    (tmp_path / "prefect").mkdir()
    for mode, umask, expected in ((0o755, "077", 0o700), (0o2775, "007", 0o2770), (0o700, "000", 0o700)):
        (tmp_path / "prefect").chmod(mode)
        monkeypatch.setenv("DLRM_UMASK", umask)
        make_private(tmp_path / "prefect")
        assert stat.S_IMODE((tmp_path / "prefect").stat().st_mode) == expected
    monkeypatch.setenv("DLRM_UMASK", "rwx")
    with pytest.raises(SystemExit, match="DLRM_UMASK: expected an octal number such as 007, got 'rwx'"):
        make_private(tmp_path / "prefect")


def test_the_secret_is_made_once_and_only_its_user_reads_it(tmp_path):
    before = os.umask(0)
    try:
        first = access.read_secret(tmp_path)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "auth").stat().st_mode) == 0o600
    assert access.read_secret(tmp_path) == first
    assert len(first) > 40
    assert [path.name for path in tmp_path.iterdir()] == ["auth"]


@pytest.fixture
def port() -> Iterator[int]:
    """A port at which this process listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield listener.getsockname()[1]


def test_who_binds_the_port_before_the_server_never_learns_the_secret(tmp_path, monkeypatch):
    """`make ui` marks a port before Prefect has bound it. The kernel knows whose process listens there."""
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    folder = tmp_path / "prefect"
    folder.mkdir()
    with socket.socket() as early:
        early.bind(("127.0.0.1", 0))
        number = early.getsockname()[1]
        address = f"http://127.0.0.1:{number}/api"
        with access.serving(folder, number):
            assert access.find_secret(address, tmp_path) is None, "nobody listens yet"
            early.listen()
            assert access.find_secret(address, tmp_path) == access.read_secret(folder)
        monkeypatch.setattr(os, "getuid", lambda: 4242)
        with access.serving(folder, number):  # of user 4242, and we have bound its port
            assert access.find_secret(address, tmp_path) is None
            assert access.find_own_server(tmp_path) is None


def test_another_server_never_learns_the_secret(tmp_path, monkeypatch, port):
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    folder = tmp_path / "prefect"
    folder.mkdir()
    with access.serving(folder, port):
        secret = access.find_secret(f"http://127.0.0.1:{port}/api", tmp_path)
        assert secret == access.read_secret(folder)
        others = [
            f"http://{place}/api"
            for place in ("127.0.0.1:1", f"localhost:{port}", f"[::1]:{port}", f"x.example:{port}")
        ]
        for other in (*others, "https://api.prefect.cloud/api"):
            assert access.find_secret(other, tmp_path) is None
        assert access.find_secret(f"http://127.0.0.1:{port}/api", tmp_path / "another home") is None
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", "mine:own")
        assert access.find_secret("http://prefect.example:4200/api", tmp_path) == "mine:own"
        monkeypatch.setenv("PREFECT_API_AUTH_STRING", secret)
        assert access.find_secret(f"http://127.0.0.1:{port}/api", tmp_path) == secret
        for other in others:
            with pytest.raises(ConfigError, match="expected a string for that server, got the one of this home"):
                access.find_secret(other, tmp_path)
        monkeypatch.delenv("PREFECT_API_AUTH_STRING")
    assert access.find_secret(f"http://127.0.0.1:{port}/api", tmp_path) is None, "whoever listens there now"


def test_the_string_of_a_user_replaces_that_of_the_home(tmp_path, monkeypatch, port):
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    own = temporary_settings({prefect.settings.PREFECT_SERVER_API_AUTH_STRING: "mine:own"})
    (tmp_path / "prefect").mkdir()
    with own, access.serving(tmp_path / "prefect", port):
        _, server, _ = ui.commands(tmp_path, 4200, 5000)[0]
        assert server["PREFECT_SERVER_API_AUTH_STRING"] == "mine:own"
        assert access.find_secret(f"http://127.0.0.1:{port}/api", tmp_path) == "mine:own"
        assert access.find_secret("http://127.0.0.1:1/api", tmp_path) is None


@pytest.mark.parametrize(
    ("given", "environment", "expected"),
    [
        ([], {}, ""),
        ([], {"DLRM_HOME": "/a"}, "/a"),
        (["HOME_FOLDER=/b"], {}, "/b"),
        (["HOME_FOLDER=/b"], {"DLRM_HOME": "/a"}, "/b"),
        (["HOME_FOLDER=.dlrm"], {"DLRM_HOME": "/a"}, ".dlrm"),
    ],
)
def test_every_target_of_make_has_the_home_of_the_servers(given, environment, expected):
    """A config's `home` counts where nobody has chosen another one."""
    command = ["make", "--no-print-directory", "--eval", 'probe: ; @echo "$(HOME_FOLDER) $$DLRM_HOME"', "probe", *given]
    outside = {key: value for key, value in os.environ.items() if key != "DLRM_HOME"} | environment
    done = subprocess.run(command, cwd=ROOT, env=outside, capture_output=True, text=True, check=True)
    assert done.stdout == f"{expected or '.dlrm'} {expected}\n"


class Refusing(http.server.BaseHTTPRequestHandler):
    """Answers as a server that wants something else than our authentication string."""

    def do_GET(self) -> None:
        self.send_response(401)
        self.end_headers()

    def log_message(self, *args: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "value"), [("PREFECT_API_KEY", "pnu_1"), ("PREFECT_CLIENT_CUSTOM_HEADERS", '{"X-Proxy": "1"}')]
)
@pytest.mark.parametrize("by", ["environment", "settings"])
def test_who_authenticates_in_another_way_is_not_refused(tmp_path, monkeypatch, name, value, by):
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server, ExitStack() as stack:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        address = f"http://127.0.0.1:{server.server_port}/api"
        with pytest.raises(ConfigError, match="expected its authentication string, got none"):
            access.check_access(address, None)
        if by == "environment":
            monkeypatch.setenv(name, value)
            modules = {key: module for key, module in sys.modules.items() if key != "prefect"}
            monkeypatch.setattr(sys, "modules", modules)  # as in a command that has not imported it yet
            monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
        else:
            given = json.loads(value) if value.startswith("{") else value
            stack.enter_context(temporary_settings({getattr(prefect.settings, name): given}))
        access.check_access(address, None)
        [check] = stuck_runs({"PREFECT_API_URL": address}, tmp_path)
        assert (check.ok, check.found.split(":")[0]) == (True, "unknown")


def test_a_worker_without_the_string_of_its_server_does_not_start(tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    monkeypatch.delenv("PREFECT_API_AUTH_STRING", raising=False)
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server, ExitStack() as stack:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        address = f"http://127.0.0.1:{server.server_port}/api"
        stack.enter_context(temporary_settings({prefect.settings.PREFECT_API_URL: address}))
        stack.callback(os.umask, os.umask(0o077))
        with pytest.raises(
            SystemExit, match=f"error: server at {address}: expected its authentication string, got none"
        ):
            access.main(["false"])


def test_a_secret_of_another_user_is_one_sentence(tmp_path, monkeypatch):
    access.secret_file(tmp_path)
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: (_ for _ in ()).throw(PermissionError))
    with pytest.raises(ConfigError, match="expected a readable file, got another user's"):
        access.read_secret(tmp_path)


def test_the_server_of_a_home_is_found_while_it_runs(tmp_path, monkeypatch):
    """`make deploy`, `make worker` and commands then need no PREFECT_API_URL."""
    (tmp_path / "prefect").mkdir()
    monkeypatch.setattr(access, "server_address", lambda: None)
    with http.server.HTTPServer(("127.0.0.1", 0), Refusing) as server, ExitStack() as stack:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        stack.callback(server.shutdown)
        address = f"http://127.0.0.1:{server.server_port}/api"
        with access.serving(tmp_path / "prefect", server.server_port):
            assert access.find_own_server(tmp_path) == address
            assert access.require_server(tmp_path) == address
            assert access.find_own_server(tmp_path / "another home") is None
        assert access.find_own_server(tmp_path) is None, "whoever listens there now"
    with access.serving(tmp_path / "prefect", server.server_port):
        assert access.find_own_server(tmp_path) is None, "it does not answer yet"
    with pytest.raises(ConfigError, match="PREFECT_API_URL: expected the address of a running server, got none"):
        access.require_server(tmp_path)


def test_a_server_that_does_not_run_is_one_sentence_with_a_remedy(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{probe.getsockname()[1]}/api"
    with pytest.raises(ConfigError) as refused, access.authenticated(address, tmp_path):
        pass
    assert str(refused.value) == (
        f"PREFECT_API_URL {address}: expected a running Prefect server, got no answer. Start it, as with `make ui`, "
        "or unset PREFECT_API_URL: commands then find or start one of their home."
    )


def test_the_database_of_a_newer_prefect_is_refused_at_once(tmp_path):
    """Its server would start for two minutes and write 2,000 lines."""
    require_known_tables(tmp_path)
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database, database:
        database.execute("CREATE TABLE alembic_version (version_num TEXT)")
        database.execute("INSERT INTO alembic_version VALUES ('f416ea180ae1')")
    require_known_tables(tmp_path)
    with closing(sqlite3.connect(tmp_path / "prefect.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = 'ffffffffffff'")
    with pytest.raises(ConfigError, match=r"got one of a later version\. Install that version, or move"):
        TemporaryServer(tmp_path)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("prefectport=1", "argument 'prefectport': expected one of prefect_port, mlflow_port, got 'prefectport'. Did you mean prefect_port?"),
        ("prefect_port=abc", "argument 'prefect_port': expected a port from 1 to 65535, got 'abc'. Correct it."),
    ],
)  # fmt: skip
def test_a_wrong_word_of_the_ui_is_refused(word, said):
    with pytest.raises(ConfigError) as refused:
        ui.read_ports([word])
    assert str(refused.value) == said


def test_an_address_that_is_none_is_one_sentence(tmp_path):
    with pytest.raises(ConfigError) as caught:
        access.find_secret("http://127.0.0.1:4200x/api", tmp_path)
    assert str(caught.value) == (
        "PREFECT_API_URL: expected the address of a server, got Port could not be cast to integer value as '4200x'. "
        "Correct it."
    )


def test_a_damaged_secret_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path))
    monkeypatch.delenv(access.SERVERS, raising=False)
    (tmp_path / "auth").write_bytes(b"dlrm:\xff")
    with pytest.raises(ConfigError, match=r"expected text, got other bytes\. Stop `make ui` and remove the file"):
        access.read_secret(tmp_path)


ENDLESS = b"HTTP/1.1 302 Found\r\nLocation: /x\r\nContent-Length: 99999999999999999999\r\n\r\n"


@pytest.mark.parametrize("says", [b"220 mail\r\n", ENDLESS], ids=["no HTTP", "a body without end"])
def test_a_port_of_another_service_says_nothing_about_access(says):
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            for _ in range(2):
                channel, _ = server.accept()
                with channel:
                    channel.recv(1 << 16)
                    channel.sendall(says)

        threading.Thread(target=answer, daemon=True).start()
        address = f"http://127.0.0.1:{server.getsockname()[1]}/api"
        access.check_access(address, "dlrm:\udcff")
        assert not access.answers(address)

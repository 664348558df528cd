"""The temporary Prefect server of a command that has no other, and its process: `python -m flows.runtime.server`."""

import importlib
import json
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import closing, suppress
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from flows.runtime.access import SERVERS, header, listens, make_secret, protect
from pipeline.errors import ConfigError
from pipeline.processes.process import die_with_parent, loading

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 120.0
STOP_SECONDS = 5.0
"""Time for the server to write what it holds. Then it is killed."""
TRIES, SECONDS_BETWEEN_TRIES = 200, 0.02
"""Of the server's request to itself."""
LIBRARIES = ("docket", "fastapi", "httpx", "jsonschema", "pydantic_settings", "sqlalchemy.ext.asyncio", "uvicorn")
"""What Prefect's server imports and what reads none of Prefect's settings."""
Process = subprocess.Popen[bytes]


def start_loading() -> Process:
    """Starts a process that loads libraries of Prefect's server, before anybody knows its home."""
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    # A terminal interrupts every process of the command. The server has to live until the flow has reported its
    # end: without an answer Prefect would wait for minutes. A new process inherits what is blocked.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-m", __spec__.name],
            env=os.environ | {"PYTHONPATH": paths}, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, preexec_fn=partial(die_with_parent, os.getpid()),
        )  # fmt: skip
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def require_known_tables(folder: Path) -> None:
    """Refuses the database of a newer Prefect. Its server would need minutes to fail.

    Args:
        folder: Of Prefect's data in a home.
    Raises:
        ConfigError: If this version of Prefect does not know the tables.
    """
    found = find_spec("prefect")
    if found is None or found.origin is None:  # flows.doctor says so
        return
    known = Path(found.origin).parent / "server" / "database" / "_migrations" / "versions" / "sqlite"
    for (number,) in _read_tables(folder):
        if not any(f'revision = "{number}"' in path.read_text(encoding="utf-8") for path in known.glob("*.py")):
            raise ConfigError(
                f"'{folder / 'prefect.db'}'", f"a database of Prefect {version('prefect')} or earlier",
                "one of a later version",
                "Install that version, or move the file away: it has the history of runs, but no data and no models.",
            )  # fmt: skip


def _read_tables(folder: Path) -> list[tuple[str]]:
    """Returns the versions of the tables in Prefect's database. One that is new or damaged has none."""
    path = folder / "prefect.db"
    if not path.exists():
        return []
    with closing(sqlite3.connect(path)) as database, suppress(sqlite3.Error):
        return database.execute("SELECT version_num FROM alembic_version").fetchall()
    return []


class TemporaryServer:
    """A Prefect server over the database of one `home`, which starts while the command imports its libraries.

    Prefect takes a second to find that the database has its tables already. The file `tables` says for which version
    of Prefect and of its tables a server has found that before.

    Args:
        folder: Folder of Prefect's data. The server's log lies there.
        process: One of `start_loading`, which becomes the server. None: it is started now.
    """

    def __init__(self, folder: Path, process: Process | None = None) -> None:
        self.folder, self.log = folder, folder / "server.log"
        self.tables = folder / "tables"
        self.secret = make_secret()
        require_known_tables(folder)
        self.process = self._start(process or start_loading())

    @property
    def settings(self) -> dict[str, str]:
        """Prefect's variables, for the server and its users. Users also need the secret."""
        database = f"sqlite+aiosqlite:///{self.folder.resolve()}/prefect.db"
        return {"PREFECT_HOME": str(self.folder), "PREFECT_API_DATABASE_CONNECTION_URL": database}

    @property
    def address(self) -> str:
        """Its API."""
        return f"http://{HOST}:{self.port}/api"

    def wait(self) -> None:
        """Waits until the server answers. Starts it once more if it ends, since its port may have been taken.

        Raises:
            ConfigError: If it does not answer in time.
        """
        limit, starts = time.monotonic() + START_SECONDS, 1
        while time.monotonic() < limit:
            if listens(os.getuid(), self.port):  # and nobody else has bound the port first
                with (
                    suppress(urllib.error.URLError, OSError),
                    urllib.request.urlopen(f"{self.address}/health", timeout=5),
                ):
                    self.tables.write_text(self._read_versions())
                    return
            if self.process.poll() is not None:
                if starts == 2:
                    break
                self.process, starts = self._start(start_loading()), 2
            time.sleep(0.05)
        self.stop()
        text = self.log.read_text(encoding="utf-8", errors="replace").strip()
        last = text.splitlines()[-1][:300] if text else "none"
        raise ConfigError(f"temporary Prefect server at {self.address}", "an answer", last, f"See {self.log}.")

    def stop(self) -> None:
        """Ends the server."""
        self.process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_SECONDS)
        if self.process.returncode is None:
            self.process.kill()
            self.process.wait()

    def _read_versions(self) -> str:
        """Returns the versions of Prefect and of the tables in its database. One that is new has no tables."""
        return f"{version('prefect')} {_read_tables(self.folder)}"

    def variables(self) -> dict[str, str]:
        """Returns the environment of the server, apart from what every process of the command has."""
        temporary = {
            "PREFECT_UI_ENABLED": "0",
            "PREFECT__SERVER_EPHEMERAL": "1",
            "PREFECT__SERVER_FINAL": "1",
            "PREFECT_SERVER_SERVICES_TRIGGERS_ENABLED": "false",  # automations are for the lasting server
        }
        if self.tables.exists() and self.tables.read_text() == self._read_versions():
            temporary |= {
                "PREFECT_API_DATABASE_MIGRATE_ON_START": "false",
                "PREFECT_API_BLOCKS_REGISTER_ON_START": "false",
            }
        guard = protect(self.secret, f"http://{HOST}:{self.port}")  # it serves no pages to browsers
        return self.settings | temporary | guard

    def _start(self, process: Process) -> Process:
        with socket.socket() as probe:
            probe.bind((HOST, 0))
            self.port = probe.getsockname()[1]
        options = ["--factory", "prefect.server.api.server:create_app", "--lifespan", "on"]
        options += ["--host", HOST, "--port", str(self.port), "--log-level", "error"]
        given = {
            "log": str(self.log),
            "environment": self.variables(),
            "address": self.address,
            "options": options,
        }
        assert process.stdin is not None
        with suppress(BrokenPipeError), process.stdin as pipe:  # `wait` sees that it has ended
            pipe.write(json.dumps(given).encode() + b"\n")
        return process


def main() -> None:
    """Loads libraries at once, then serves until it is terminated as the line in standard input says.

    The line is JSON with `log`, `environment`, `address` of the API and `options`, those of uvicorn. Without one, the
    process ends.
    """
    with loading():
        for name in LIBRARIES:
            with suppress(ImportError):  # the server imports it again, and its log has the error
                importlib.import_module(name)
        line = sys.stdin.readline()
        if not line:
            return
        given = json.loads(line)
        with open(given["log"], "wb") as log:
            os.dup2(log.fileno(), sys.stdout.fileno())
            os.dup2(log.fileno(), sys.stderr.fileno())
        os.environ.update(given["environment"])
        importlib.import_module("prefect.server.api.server")
        uvicorn = importlib.import_module("uvicorn")
    threading.Thread(target=ask_first, args=(given["address"], given["environment"][SERVERS]), daemon=True).start()
    uvicorn.main(given["options"])


def ask_first(address: str, secret: str) -> None:
    """Asks the server for its version. FastAPI prepares all routes at the first request that it looks up.

    This takes 0.3 s, in which the command may still import.

    Args:
        address: The API's.
    """
    request = urllib.request.Request(f"{address}/admin/version", headers=header(secret))
    with loading():
        for _ in range(TRIES):
            if listens(os.getuid(), urlsplit(address).port or 0):
                with suppress(OSError), urllib.request.urlopen(request, timeout=60):
                    return
            time.sleep(SECONDS_BETWEEN_TRIES)


if __name__ == "__main__":
    main()

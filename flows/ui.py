"""Runs a Prefect server and an MLflow UI on loopback over the data of one `home`. Ctrl-C stops both."""

import contextlib
import difflib
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from flows.deployments.profile import leave_profile, write_profile
from flows.runtime.access import HOST, SERVERS, protect, read_secret, read_setting, secret_file, serving
from flows.runtime.environment import make_private
from flows.runtime.front import run_main
from flows.runtime.server import require_known_tables
from pipeline.errors import ConfigError, ContractError
from pipeline.jobs.outcome import MLFLOW_ADDRESS
from pipeline.processes.process import die_with_parent

NAMES = (HOST, "localhost")
"""Of the pages, in a browser on this machine."""
START_SECONDS = 120.0
STOP_SECONDS = 10.0


def main(words: Sequence[str]) -> int:
    """Starts both servers and waits until one ends or a signal arrives."""
    home = Path(next((word for word in words if "=" not in word), os.environ.get("DLRM_HOME", ".dlrm"))).resolve()
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    servers: list[subprocess.Popen[bytes]] = []
    marked = contextlib.ExitStack()
    try:
        prefect_port, mlflow_port = read_ports(words)
        require_known_tables(home / "prefect")
        for name, port in (("Prefect", prefect_port), ("MLflow", mlflow_port)):
            free_port(name, port)
        servers = [start(*command) for command in commands(home, prefect_port, mlflow_port)]
        marked.enter_context(serving(home / "prefect", prefect_port))
        wait_for(servers[0], f"http://{HOST}:{prefect_port}/api/health", home / "ui" / "prefect.log")
        wait_for(servers[1], f"http://{HOST}:{mlflow_port}/health", home / "ui" / "mlflow.log")
        own = read_setting(SERVERS)
        secret = SERVERS if own else f"the text of {secret_file(home / 'prefect')}"
        print(f"Prefect  http://{HOST}:{prefect_port} asks for {secret}", flush=True)
        address = f"http://{HOST}:{mlflow_port}"
        (home / "ui" / MLFLOW_ADDRESS).write_text(f"{address}\n", encoding="utf-8")  # links of runs lead there
        print(f"MLflow   {address}/#/experiments has the runs, {address}/#/models the models", flush=True)
        print(f"runs of {home}; its commands, `make deploy` and `make worker` find this server", flush=True)
        api = f"http://{HOST}:{prefect_port}/api"
        print(write_profile(home, api, read_secret(home / "prefect")), flush=True)
        marked.callback(leave_profile, home, api)
        print(f"for other homes: export PREFECT_API_URL={api}", flush=True)
        print("Ctrl-C stops both", flush=True)
        while all(server.poll() is None for server in servers):
            time.sleep(0.5)
        print(f"error: a server ended unexpectedly; see its log in {home / 'ui'}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 0
    except ContractError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except OSError as error:
        remedy = "Name another home: make ui HOME_FOLDER=PATH."
        print(f"error: cannot write to home '{home}': {error.strerror}. {remedy}", file=sys.stderr)
        return 1
    finally:
        stop(servers)
        marked.close()


def read_ports(words: Sequence[str]) -> tuple[int, int]:
    """Reads the ports of Prefect and MLflow from the words of the command line.

    Raises:
        ConfigError: If a word is no known option, or its value is no port.

    Example:
        >>> read_ports([".dlrm", "mlflow_port=5300"])
        (4200, 5300)
    """
    ports = {"prefect_port": 4200, "mlflow_port": 5000}
    for key, text in (word.split("=", 1) for word in words if "=" in word):
        if key not in ports:
            close = difflib.get_close_matches(key, ports, n=1)
            remedy = f"Did you mean {close[0]}?" if close else "Correct it."
            raise ConfigError(f"argument '{key}'", f"one of {', '.join(ports)}", f"'{key}'", remedy)
        if not text.isdecimal() or not 0 < int(text) < 65_536:
            raise ConfigError(f"argument '{key}'", "a port from 1 to 65535", f"'{text}'", "Correct it.")
        ports[key] = int(text)
    return ports["prefect_port"], ports["mlflow_port"]


def commands(home: Path, prefect_port: int, mlflow_port: int) -> list[tuple[list[str], dict[str, str], Path]]:
    """Returns (command, environment, log) of each server. A database named in the environment replaces SQLite."""
    make_private(home / "prefect")
    (home / "mlflow" / "artifacts").mkdir(parents=True, exist_ok=True)
    (home / "ui").mkdir(parents=True, exist_ok=True)
    databases = {
        "PREFECT_API_DATABASE_CONNECTION_URL": f"sqlite+aiosqlite:///{home}/prefect/prefect.db",
        "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{home}/mlflow/mlflow.db",
    }
    databases = {name: os.environ.get(name, address) for name, address in databases.items()}
    prefect = {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_PROFILE": "ephemeral",
        "PREFECT_API_DATABASE_CONNECTION_URL": databases["PREFECT_API_DATABASE_CONNECTION_URL"],
        "PREFECT_UI_API_URL": f"http://{HOST}:{prefect_port}/api",
    } | protect(read_secret(home / "prefect"), *(f"http://{name}:{prefect_port}" for name in NAMES))
    serve = ["--host", HOST, "--port"]
    stores = ["--artifacts-destination", str(home / "mlflow" / "artifacts")]
    mlflow = {"MLFLOW_BACKEND_STORE_URI": databases["MLFLOW_BACKEND_STORE_URI"]}  # not an argument: others see those
    return [
        (["prefect", "server", "start", *serve, str(prefect_port)], prefect, home / "ui" / "prefect.log"),
        (["mlflow", "server", *serve, str(mlflow_port), "--workers", "1", *stores], mlflow, home / "ui" / "mlflow.log"),
    ]


def free_port(name: str, port: int) -> None:
    """Raises if something listens on the port."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            remedy = f"Stop it, or choose another: make ui {name.upper()}_PORT={port + 1}."
            raise ConfigError.of(f"port {port} for {name} is in use", remedy) from None


def start(command: list[str], environment: Mapping[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Starts a server in its own process group, to stop its child processes with it.

    The kernel asks it to end when this process ends, for whatever reason. MLflow's server then ends its own child.
    """
    program = str(Path(sys.executable).parent / command[0])
    with log.open("wb") as output:
        return subprocess.Popen(
            [program, *command[1:]], env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=output,
            stderr=subprocess.STDOUT, start_new_session=True,
            preexec_fn=partial(die_with_parent, os.getpid(), signal.SIGTERM),
        )  # fmt: skip


def wait_for(server: subprocess.Popen[bytes], address: str, log: Path) -> None:
    """Waits until the server answers.

    Raises:
        ConfigError: If the server ended or does not answer in time. It names the log.
    """
    limit = time.monotonic() + START_SECONDS
    while time.monotonic() < limit:
        if server.poll() is not None:
            break
        with contextlib.suppress(urllib.error.URLError, OSError), urllib.request.urlopen(address, timeout=2):
            return
        time.sleep(0.2)
    raise ConfigError.of(f"the server at {address} does not answer", f"See {log}.")


def stop(servers: list[subprocess.Popen[bytes]]) -> None:
    """Terminates the servers' process groups, then kills what is left."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        for server in servers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, number)
        limit = time.monotonic() + STOP_SECONDS
        for server in servers:
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(max(limit - time.monotonic(), 0.1))


if __name__ == "__main__":
    run_main("ui", main)

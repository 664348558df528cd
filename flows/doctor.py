"""Names what is wrong with this installation or with a hanging run, and the remedy.

Not a Prefect flow: Prefect may be what is broken.
"""

import datetime
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from flows.runtime.access import (
    VARIABLE,
    authenticates_otherwise,
    check_access,
    find_own_server,
    find_secret,
    header,
    read_setting,
)
from flows.runtime.environment import set_environment
from flows.runtime.server import require_known_tables
from pipeline.errors import ConfigError
from pipeline.processes import process

ROOT = Path(__file__).resolve().parent.parent
PINNED = {"torch": "2.13.0", "torchrec": "1.8.0"}
FBGEMM = "1.8.0"
FREE_BYTES = 2 * 1024**3
SHARED_BYTES = 64 * 1024**2
POOL = "dlrm"
PORTS = {"prefect": 4200, "mlflow": 5000}
"""Server -> its port in `make ui`, unless another is given."""
MLFLOW_ADDRESS = "mlflow_address"
"""File below `home/ui` in which `make ui` leaves where it shows MLflow."""
PATIENCE_SECONDS = 60.0
"""A worker polls for runs every 10 seconds, and a process takes about 20 to start."""
SETUP = "Run `make clean setup`."
MODULES = {
    "torch": "torch is broken.",
    "fbgemm_gpu": "fbgemm was built for another torch.",
    "torchrec": "torchrec does not fit torch or fbgemm.",
    "psutil": "MLflow's system metrics and the ending of stale runs need it.",
    "uvicorn": "Serving models and the UIs needs it.",
    "prefect, mlflow, pyiceberg, duckdb, numba": "One of them is broken.",
}
"""Modules that must import -> what is wrong if they do not."""
UNWRITABLE = {
    "home": "Set DLRM_HOME, or `home` in the config, to a folder that you may write to.",
    "HOME": "Set HOME to a folder that you may write to; Prefect and matplotlib keep settings there.",
    "kernel cache": "Set NUMBA_CACHE_DIR to a folder that you may write to.",
}


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def python_version(version: Sequence[Any]) -> Check:
    """Checks for Python 3.11 to 3.13. There are no fbgemm wheels for others."""
    ok = (3, 11) <= tuple(version[:2]) <= (3, 13)
    return Check(
        "python",
        ok,
        ".".join(map(str, version[:3])),
        "" if ok else "Install Python 3.11, 3.12 or 3.13, then `make clean setup`.",
    )


def find_other_python(root: Path = ROOT, packages: Sequence[str] = ("prefect", "torch")) -> Check | None:
    """Returns what is wrong if another Python than the project's runs this, and lacks the packages.

    All other checks would call that installation broken, although the project's may be sound.
    """
    if all(importlib.util.find_spec(name) for name in packages):
        return None
    own = root / ".venv" / "bin" / "python"
    if own.exists() and Path(sys.prefix).resolve() != own.parent.parent.resolve():
        remedy = "Run this with the project's Python: .venv/bin/python -m flows.doctor."
        return Check("python", False, f"{sys.executable} does not have the project's packages", remedy)
    if not own.exists() and sys.prefix == sys.base_prefix:
        return Check("python", False, f"{sys.executable} does not have the project's packages", "Run `make setup`.")
    return None


def versions(installed: Mapping[str, str]) -> list[Check]:
    """Checks that torch, torchrec and fbgemm fit together, and that only one build of fbgemm is installed."""
    checks = []
    for name, wanted in PINNED.items():
        found = installed.get(name, "absent")
        ok = found.split("+")[0] == wanted
        checks.append(Check(name, ok, found, "" if ok else f"{name} {wanted} is needed. {SETUP}"))
    builds = {name: installed[name] for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if name in installed}
    shown = ", ".join(f"{name} {version}" for name, version in builds.items()) or "absent"
    if len(builds) == 2:
        checks.append(Check("fbgemm", False, shown, f"Both builds own the module fbgemm_gpu; keep one. {SETUP}"))
    else:
        ok = bool(builds) and next(iter(builds.values())).split("+")[0] == FBGEMM
        checks.append(
            Check(
                "fbgemm",
                ok,
                shown,
                "" if ok else f"fbgemm-gpu-cpu (or fbgemm-gpu with CUDA) {FBGEMM} is needed. {SETUP}",
            )
        )
    return checks


def importable(module: str, why: str, python: str = sys.executable) -> Check:
    """Imports a module in its own process, because a broken library may crash the interpreter."""
    done = subprocess.run([python, "-W", "ignore", "-c", f"import {module}"], cwd=ROOT, capture_output=True, text=True)
    lines = done.stderr.strip().splitlines()
    found = "imports" if done.returncode == 0 else (lines[-1][:160] if lines else f"exit code {done.returncode}")
    return Check(f"import {module}", done.returncode == 0, found, "" if done.returncode == 0 else f"{why} {SETUP}")


def all_importable(modules: Mapping[str, str]) -> list[Check]:
    """Imports all modules in one process, which is much faster, and each in its own if that fails.

    Args:
        modules: Module -> what is wrong if it cannot be imported.
    """
    if importable(", ".join(modules), "").ok:
        return [Check(f"import {module}", True, "imports") for module in modules]
    return [importable(module, why) for module, why in modules.items()]


def writable(name: str, folder: Path, remedy: str) -> Check:
    """Checks that a file can be created in the folder, or in its nearest existing parent."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    try:
        with tempfile.NamedTemporaryFile(dir=place):
            pass
    except OSError as error:
        return Check(name, False, f"{place}: {error.strerror}", remedy)
    return Check(name, True, str(folder))


def space(name: str, folder: Path, needed: int, remedy: str) -> Check:
    """Checks that enough bytes are free."""
    place = next(parent for parent in (folder, *folder.parents) if parent.exists())
    free = shutil.disk_usage(place).free
    return Check(name, free >= needed, f"{free / 1024**3:.1f} GiB free", "" if free >= needed else remedy)


def port_free(name: str, port: int) -> Check:
    """Checks that `make ui` can listen on the port. It may be listening already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return Check(
                f"port {port}",
                False,
                f"in use ({name})",
                f"Fine if `make ui` is running; else `make ui {name.upper()}_PORT={port + 1}`.",
            )
    return Check(f"port {port}", True, "free")


def reachable(variable: str, path: str, environment: Mapping[str, str]) -> Check:
    """Checks that the server named in the environment answers. Without one, no network is needed."""
    address = environment.get(variable, "")
    if not address.startswith("http"):
        return Check(variable, True, address or "not set: embedded")
    try:
        with urllib.request.urlopen(address.rstrip("/") + path, timeout=5):
            return Check(variable, True, f"{address} answers")
    except (urllib.error.URLError, OSError, ValueError) as error:
        return Check(
            variable,
            False,
            f"{address}: {getattr(error, 'reason', error)}",
            f"Start that server, or unset {variable} to run embedded.",
        )


def loopback() -> Check:
    """Checks the network interface over which ranks connect."""
    names = [name for _, name in socket.if_nameindex()]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    ok = wanted in names
    return Check(
        "network interface",
        ok,
        ", ".join(names),
        "" if ok else f"Set GLOO_SOCKET_IFNAME to one of them; '{wanted}' is absent.",
    )


def locked_runs(home: Path) -> list[Check]:
    """Returns the trainings locked by a process, which are the ones to look at when a run hangs."""
    checks = []
    for lock in sorted((home / "runs").glob("*/lock")):
        done = subprocess.run([sys.executable, "-c", _TRY_LOCK, str(lock)], capture_output=True)
        if done.returncode == 1:
            remedy = (
                f"Wait for it. If it hangs, end it and look at {lock.parent}/rank-0.log. The same command resumes it."
            )
            checks.append(Check(f"run {lock.parent.name}", True, "a process is at work on it", remedy))
    return checks


_TRY_LOCK = """
import fcntl, sys
try:
    fcntl.flock(open(sys.argv[1]), fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    sys.exit(1)
"""


def prefect_tables(home: Path) -> Check:
    """Checks that this version of Prefect knows the tables of the home's database."""
    try:
        require_known_tables(home / "prefect")
    except ConfigError as error:
        return Check("Prefect's database", False, error.actual, error.remedy)
    return Check("Prefect's database", True, "of this version, an earlier one, or none yet")


def mlflow_tables(home: Path) -> Check:
    """Checks that the tables of the home's MLflow database are those of this version of MLflow."""
    path, name = home / "mlflow" / "mlflow.db", "MLflow's database"
    known = read_mlflow_versions()
    found: str | None = None
    if path.exists():
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database, suppress(sqlite3.Error):
            found = database.execute("SELECT version_num FROM alembic_version").fetchone()[0]
    if found is None or not known or found == known[-1]:
        return Check(name, True, "of this version, or none yet")
    if found in known:
        command = f"`.venv/bin/mlflow db upgrade sqlite:///{path}`"
        return Check(name, False, "of an earlier MLflow", f"Stop `make ui`, copy {path}, then {command}.")
    return Check(name, False, "of a later MLflow", "Install that version, or set DLRM_HOME to another folder.")


def read_mlflow_versions() -> list[str]:
    """Returns the versions of MLflow's tables that the installed MLflow knows, oldest first. Empty: it is absent."""
    spec = importlib.util.find_spec("mlflow")
    if spec is None or spec.origin is None:
        return []
    folder, after = Path(spec.origin).parent / "store" / "db_migrations" / "versions", {}
    for path in folder.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        values = dict(re.findall(r"^(revision|down_revision)[^=\n]*= [\"']?(\w+)", text, re.MULTILINE))
        if "revision" in values:
            after[values.get("down_revision", "None")] = values["revision"]
    found, last = [], "None"
    while last in after:
        last = after.pop(last)
        found.append(last)
    return found


def stuck_runs(environment: Mapping[str, str], home: Path, patience_seconds: float = PATIENCE_SECONDS) -> list[Check]:
    """Returns runs that are late, or that a worker took but did not start. Empty without a reachable server."""
    address = environment.get("PREFECT_API_URL", "").rstrip("/")
    if not address.startswith("http"):
        return []
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=patience_seconds)
    try:
        if authenticates_otherwise():
            return [Check("access to Prefect", True, f"unknown: {address} is asked with a key or headers of your own")]
        secret = find_secret(address, home) or read_setting(VARIABLE)
        check_access(address, secret)
        server = Server(address, secret)
        taken = server.read_runs("PENDING")
        late = server.read_runs("SCHEDULED", {"expected_start_time": {"before_": since.isoformat()}})
        ending = server.read_runs("CANCELLING")
        working = any(worker["status"] == "ONLINE" for worker in server.read_workers()) if late else True
    except ImportError as error:  # of Prefect, which a profile needs
        return [Check("access to Prefect", True, f"unknown: {error}")]
    except ConfigError as error:
        return [Check("access to Prefect", False, f"{address} wants authentication", error.remedy)]
    except OSError:
        return []  # reachable() reports that
    old = [run for run in [*taken, *ending] if datetime.datetime.fromisoformat(run["state"]["timestamp"]) <= since]
    return [*map(_describe_held_up, old), *(_late(run, working) for run in late)]


def _describe_held_up(run: Mapping[str, Any]) -> Check:
    if run["state"]["type"] == "CANCELLING":
        found = f"cancelled at {run['state']['timestamp']:.19}, not ended"
        return Check(f"run '{run['name']}'", False, found, "End its process. Set it to Cancelled on its page.")
    found = f"taken by a worker at {run['state']['timestamp']:.19}, not started"
    remedy = f"Its worker is gone. End it: `prefect flow-run cancel {run['id']}`, then run it again."
    return Check(f"run '{run['name']}'", False, found, remedy)


def _late(run: Mapping[str, Any], working: bool) -> Check:
    found = f"due at {run['expected_start_time']:.19}, queue '{run['work_queue_name']}'"
    if not working:
        return Check(f"run '{run['name']}'", False, f"{found}, no worker", "Start one: `make worker`.")
    remedy = "It waits for earlier runs in its queue. `make deploy TRAININGS=2` allows two at a time."
    return Check(f"run '{run['name']}'", True, found, remedy)


class Server:
    """Asks a Prefect server with the standard library only, because Prefect's client may be broken."""

    def __init__(self, address: str, secret: str | None) -> None:
        self.address, self.headers = address, {"Content-Type": "application/json"} | header(secret)
        client = str(uuid.uuid4())
        with suppress(urllib.error.HTTPError):  # the server asks for no such token
            token = self._ask(f"/csrf-token?client={client}")["token"]
            self.headers |= {"Prefect-Csrf-Client": client, "Prefect-Csrf-Token": token}

    def read_runs(self, state: str, more: Mapping[str, Any] | None = None) -> list[Any]:
        """Returns the runs in a state."""
        runs = {"state": {"type": {"any_": [state]}}, **(more or {})}
        found: list[Any] = self._ask("/flow_runs/filter", {"flow_runs": runs})
        return found

    def read_workers(self) -> list[Any]:
        """Returns the workers of our pool."""
        try:
            found: list[Any] = self._ask(f"/work_pools/{POOL}/workers/filter", {})
            return found
        except urllib.error.HTTPError as error:
            if error.code == 404:  # no such pool
                return []
            raise

    def _ask(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(
            urllib.request.Request(self.address + path, data, self.headers), timeout=5
        ) as answer:
            return json.load(answer)


def configuration(path: str) -> Check:
    """Validates the config file and finds its source files, in its own process because that needs the libraries."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TRY_CONFIG, path], cwd=ROOT, capture_output=True, text=True
    )  # fmt: skip
    found = done.stdout.strip().splitlines()[-1:] or done.stderr.strip().splitlines()[-1:] or ["no output"]
    return Check(
        f"config {path}", done.returncode == 0, found[0], "" if done.returncode == 0 else "Correct the config."
    )


_TRY_CONFIG = """
import sys
from pipeline.config import load
from pipeline.config.files import ROOT
from pipeline.errors import ContractError
from pipeline.data.files import find_files
try:
    config = load(sys.argv[1])
    if config.source.path is not None:
        files = find_files(config.source.path, ROOT, "source.path", config.warehouse.catalog)
        print(len(files), "source files", end=", ")
    print("valid")
except ContractError as error:
    print(error)
    sys.exit(1)
"""


def places(home: Path, cache: Path) -> dict[str, Path]:
    """Returns the folders that a run writes to."""
    return {"home": home, "HOME": Path.home(), "kernel cache": cache}


def installed_versions() -> dict[str, str]:
    """Returns the version of each installed distribution."""
    return {
        dist.metadata["Name"].lower().replace("_", "-"): dist.version for dist in importlib.metadata.distributions()
    }


def ui_ports(home: Path, own: str | None, ports: tuple[int, int]) -> list[Check]:
    """Checks the ports of `make ui`, or says where it runs.

    Args:
        own: Address of the Prefect server of this home. None: it runs none.
        ports: Of Prefect and MLflow.
    """
    if own is None:
        return [port_free("Prefect", ports[0]), port_free("MLflow", ports[1])]
    note = home / "ui" / MLFLOW_ADDRESS
    shown = note.read_text(encoding="utf-8").strip() if note.exists() else "starting"
    return [Check("make ui", True, f"Prefect {own.removesuffix('/api')}, MLflow {shown}")]


def examine(config: str | None, home: Path, ports: tuple[int, int] = (4200, 5000)) -> list[Check]:
    """Runs all checks, causes before their effects.

    Args:
        ports: Of Prefect and MLflow in `make ui`.
    """
    if other := find_other_python():
        return [other]
    cache = Path(os.environ.get("NUMBA_CACHE_DIR", ROOT / "pipeline" / "transforms"))
    own = find_own_server(home)
    environment = ({} if own is None else {"PREFECT_API_URL": own}) | os.environ
    checks: list[Callable[[], list[Check]]] = [
        lambda: [python_version(tuple(sys.version_info))],
        lambda: versions(installed_versions()),
        lambda: all_importable(MODULES),
        lambda: [writable(name, folder, UNWRITABLE[name]) for name, folder in places(home, cache).items()],
        lambda: [space("disk", home, FREE_BYTES, "Free some space, or move `home`.")],
        lambda: [space("/dev/shm", Path("/dev/shm"), SHARED_BYTES, "Give it more; in a container: --shm-size=1g.")],
        lambda: [loopback()],
        lambda: [reachable(name, "/health", environment) for name in ("PREFECT_API_URL", "MLFLOW_TRACKING_URI")],
        lambda: ui_ports(home, own, ports),
        lambda: locked_runs(home),
        lambda: [prefect_tables(home), mlflow_tables(home)],
        lambda: stuck_runs(environment, home),
        lambda: [configuration(config)] if config else [],
    ]
    return [check for make in checks for check in make()]


def main(words: Sequence[str]) -> int:
    """Prints a line for every check and, as the last line, one JSON object. Returns 1 if anything is wrong."""
    config = next((word for word in words if "=" not in word), None)
    home = process.ROOT / Path(os.environ.get("DLRM_HOME", ".dlrm")).expanduser()
    given = dict(word.split("=", 1) for word in words if "=" in word)
    prefect_port, mlflow_port = (int(given.get(f"{name}_port", port)) for name, port in PORTS.items())
    checks = examine(config, home, (prefect_port, mlflow_port))
    for check in checks:
        print(f"{'ok  ' if check.ok else 'BAD '} {check.name:20} {check.found}")
        if check.remedy:
            print(f"       -> {check.remedy}")
    # A port in use is not a failure, because it is usually `make ui` itself.
    wrong = [check for check in checks if not check.ok and not check.name.startswith("port ")]
    result = {"status": "failed" if wrong else "ok", "checks": [asdict(check) for check in checks]}
    if wrong:
        result["error"] = "; ".join(f"{check.name}: {check.found}. {check.remedy}" for check in wrong)
    print(json.dumps(result))
    return 1 if wrong else 0


if __name__ == "__main__":
    set_environment()
    sys.exit(main(sys.argv[1:]))

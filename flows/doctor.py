"""Names what is wrong with this installation or with a hanging run, and the remedy.

Not a Prefect flow: Prefect may be what is broken.
"""

import importlib.metadata
import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from flows.runtime.access import find_own_server, is_held
from flows.runtime.environment import set_environment
from flows.runtime.server_checks import (
    Check,
    judge,
    mlflow_access,
    mlflow_tables,
    prefect_tables,
    reachable,
    stuck_runs,
    ui_ports,
)
from pipeline.errors import ContractError
from pipeline.processes import process

ROOT = Path(__file__).resolve().parent.parent
PINNED = {"torch": "2.13.0", "torchrec": "1.8.0"}
FBGEMM = "1.8.0"
FREE_BYTES = 2 * 1024**3
SHARED_BYTES = 64 * 1024**2
PORTS = {"prefect": 4200, "mlflow": 5000}
"""Server -> its port in `make ui`, unless another is given."""
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


def python_version(version: Sequence[Any]) -> Check:
    """Checks for Python 3.11 to 3.13. There are no fbgemm wheels for others."""
    ok, found = (3, 11) <= tuple(version[:2]) <= (3, 13), ".".join(map(str, version[:3]))
    return judge("python", ok, found, "Install Python 3.11, 3.12 or 3.13, then `make clean setup`.")


def find_other_python(root: Path = ROOT, packages: Sequence[str] = ("prefect", "torch")) -> Check | None:
    """Returns what is wrong if another Python than the project's runs this, and lacks the packages.

    All other checks would call that installation broken, although the project's may be sound.
    """
    own, found = root / ".venv" / "bin" / "python", f"{sys.executable} does not have the project's packages"
    if all(importlib.util.find_spec(name) for name in packages):
        return None
    if own.exists() and Path(sys.prefix).resolve() != own.parent.parent.resolve():
        return Check("python", False, found, "Run this with the project's Python: .venv/bin/python -m flows.doctor.")
    if not own.exists() and sys.prefix == sys.base_prefix:
        return Check("python", False, found, "Run `make setup`.")
    return None


def versions(installed: Mapping[str, str]) -> list[Check]:
    """Checks that torch, torchrec and fbgemm fit together, and that only one build of fbgemm is installed."""
    found = {name: installed.get(name, "absent") for name in PINNED}
    checks = [
        judge(name, found[name].split("+")[0] == wanted, found[name], f"{name} {wanted} is needed. {SETUP}")
        for name, wanted in PINNED.items()
    ]
    builds = {name: installed[name] for name in ("fbgemm-gpu", "fbgemm-gpu-cpu") if name in installed}
    shown = ", ".join(f"{name} {version}" for name, version in builds.items()) or "absent"
    ok = [version.split("+")[0] for version in builds.values()] == [FBGEMM]
    wrong = f"fbgemm-gpu-cpu (or fbgemm-gpu with CUDA) {FBGEMM} is needed."
    if len(builds) == 2:
        wrong = "Both builds own the module fbgemm_gpu; keep one."
    return [*checks, judge("fbgemm", ok, shown, f"{wrong} {SETUP}")]


def importable(module: str, why: str, python: str = sys.executable) -> Check:
    """Imports a module in its own process, because a broken library may crash the interpreter."""
    done = subprocess.run([python, "-W", "ignore", "-c", f"import {module}"], cwd=ROOT, capture_output=True, text=True)
    lines, ok = done.stderr.strip().splitlines(), done.returncode == 0
    found = "imports" if ok else (lines[-1][:160] if lines else f"exit code {done.returncode}")
    return judge(f"import {module}", ok, found, f"{why} {SETUP}")


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
    place = _nearest(folder)
    try:
        with tempfile.NamedTemporaryFile(dir=place):
            return Check(name, True, str(folder))
    except OSError as error:
        return Check(name, False, f"{place}: {error.strerror}", remedy)


def space(name: str, folder: Path, needed: int, remedy: str) -> Check:
    """Checks that enough bytes are free."""
    free = shutil.disk_usage(_nearest(folder)).free
    return judge(name, free >= needed, f"{free / 1024**3:.1f} GiB free", remedy)


def _nearest(folder: Path) -> Path:
    return next(parent for parent in (folder, *folder.parents) if parent.exists())


def loopback() -> Check:
    """Checks the network interface over which ranks connect."""
    names = [name for _, name in socket.if_nameindex()]
    wanted = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    remedy = f"Set GLOO_SOCKET_IFNAME to one of them; '{wanted}' is absent."
    return judge("network interface", wanted in names, ", ".join(names), remedy)


def locked_runs(home: Path) -> list[Check]:
    """Returns the trainings locked by a process, which are the ones to look at when a run hangs."""
    remedy = "Wait for it. If it hangs, end it and look at {}/rank-0.log. The same command resumes it."
    return [
        Check(f"run {lock.parent.name}", True, "a process is at work on it", remedy.format(lock.parent))
        for lock in sorted((home / "runs").glob("*/lock"))
        if is_held(lock)
    ]


def registry(environment: Mapping[str, str], path: str | None) -> list[Check]:
    """Checks that the MLflow server answers, and that a training of the config may do there what it does.

    Args:
        path: Of the config. None: only the login is tried.
    """
    known, experiment, model = dict(environment), None, None
    if path:
        from pipeline.config import load

        with suppress(Exception):  # `configuration` reports it
            config = load(path)
            experiment, model = config.name, config.model_name
            known["MLFLOW_TRACKING_URI"] = config.registration.tracking_uri or known.get("MLFLOW_TRACKING_URI", "")
    found = reachable("MLFLOW_TRACKING_URI", "/version", known)
    return [found, *(mlflow_access(known.get("MLFLOW_TRACKING_URI", ""), experiment, model) if found.ok else [])]


def configuration(path: str) -> Check:
    """Validates the config file and finds its source files."""
    name, remedy = f"config {path}", "Correct the config."
    try:
        from pipeline.config import load
        from pipeline.config.files import ROOT
        from pipeline.data.formats.files import find_files

        config, found = load(path), "valid"
        if (source := config.source.path) is not None:
            files = find_files(source, ROOT, "source.path", config.warehouse.catalog)
            found = f"{len(files)} source files, valid"
        return Check(name, True, found)
    except ContractError as error:
        return Check(name, False, f"{error}", remedy)
    except Exception as error:  # of a library
        return Check(name, False, f"{type(error).__name__}: {error}", SETUP)


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
    installed = {
        one.metadata["Name"].lower().replace("_", "-"): one.version for one in importlib.metadata.distributions()
    }
    folders = {"home": home, "HOME": Path.home(), "kernel cache": cache}
    checks: list[Callable[[], list[Check]]] = [
        lambda: [python_version(tuple(sys.version_info))],
        lambda: versions(installed),
        lambda: all_importable(MODULES),
        lambda: [writable(name, folder, UNWRITABLE[name]) for name, folder in folders.items()],
        lambda: [space("disk", home, FREE_BYTES, "Free some space, or move `home`.")],
        lambda: [space("/dev/shm", Path("/dev/shm"), SHARED_BYTES, "Give it more; in a container: --shm-size=1g.")],
        lambda: [loopback()],
        lambda: [reachable("PREFECT_API_URL", "/health", environment)],
        lambda: registry(environment, config),
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

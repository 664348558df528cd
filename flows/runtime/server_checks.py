"""What `flows.doctor` checks about the servers of a home, their databases and their runs."""

import datetime
import importlib.util
import re
import socket
import sqlite3
import urllib.request
from collections.abc import Mapping
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from flows.runtime.access import answers, authenticated, authenticates_otherwise, header
from flows.runtime.server import require_known_tables
from pipeline.errors import ConfigError

POOL = "dlrm"
MLFLOW_ADDRESS = "mlflow_address"
"""File below `home/ui` in which `make ui` leaves where it shows MLflow."""
PATIENCE_SECONDS = 60.0
"""A worker polls for runs every 10 seconds, and a process takes about 20 to start."""


@dataclass(frozen=True)
class Check:
    """The result of one check."""

    name: str
    ok: bool
    found: str
    remedy: str = ""


def judge(name: str, ok: bool, found: str, remedy: str) -> Check:
    """Returns a check that names the remedy only if something is wrong."""
    return Check(name, ok, found, "" if ok else remedy)


def port_free(name: str, port: int) -> Check:
    """Checks that `make ui` can listen on the port. It may be listening already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
            return Check(f"port {port}", True, "free")
        except OSError:
            remedy = f"Fine if `make ui` is running; else `make ui {name.upper()}_PORT={port + 1}`."
            return Check(f"port {port}", False, f"in use ({name})", remedy)


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


def reachable(variable: str, path: str, environment: Mapping[str, str]) -> Check:
    """Checks that the server named in the environment answers. Without one, no network is needed.

    The user and password that an address may have are sent as a header, and never shown.
    """
    given = environment.get(variable, "")
    start, slashes, rest = given.partition("//")
    login, at, place = rest.rpartition("@")
    address = f"{start}{slashes}{place}"
    if not given.startswith("http"):
        return Check(variable, True, address or "not set: embedded")
    try:
        request = urllib.request.Request(address.rstrip("/") + path, headers=header(unquote(login) if at else None))
        with urllib.request.urlopen(request, timeout=5):
            return Check(variable, True, f"{address} answers")
    except (OSError, ValueError) as error:
        remedy = f"Start that server, or unset {variable} to run embedded."
        return Check(variable, False, f"{address}: {getattr(error, 'reason', error)}", remedy)


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
    if found is None or not known or known.get(found) is False:
        return Check(name, True, "of this version, or none yet")
    if found in known:
        command = f"`.venv/bin/mlflow db upgrade sqlite:///{path}`"
        return Check(name, False, "of an earlier MLflow", f"Stop `make ui`, copy {path}, then {command}.")
    return Check(name, False, "of a later MLflow", "Install that version, or set DLRM_HOME to another folder.")


def read_mlflow_versions() -> dict[str, bool]:
    """Returns each version of MLflow's tables that the installed MLflow knows -> whether another one follows it."""
    spec = importlib.util.find_spec("mlflow")
    folder = Path(spec.origin if spec and spec.origin else "").parent / "store" / "db_migrations" / "versions"
    text = "\n".join(path.read_text(encoding="utf-8") for path in folder.glob("*.py"))
    found = re.findall(r"^(revision|down_revision)\b[^=\n]*= [\"'](\w+)", text, re.MULTILINE)
    followed = {version for key, version in found if key == "down_revision"}
    return {version: version in followed for key, version in found if key == "revision"}


def stuck_runs(environment: Mapping[str, str], home: Path, patience_seconds: float = PATIENCE_SECONDS) -> list[Check]:
    """Returns runs that are late, or that a worker took but did not start. Empty without a reachable server."""
    address = environment.get("PREFECT_API_URL", "").rstrip("/")
    if not address.startswith("http") or not answers(address):
        return []  # reachable() reports that
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(seconds=patience_seconds)
    try:
        if authenticates_otherwise():
            return [Check("access to Prefect", True, f"unknown: {address} is asked with a key or headers of your own")]
        with authenticated(address, home):
            return _list_stuck_runs(since)
    except ConfigError as error:
        return [Check("access to Prefect", False, f"{address} wants authentication", error.remedy)]
    except Exception as error:  # of Prefect, which may be broken
        return [Check("access to Prefect", True, f"unknown: {type(error).__name__}: {error}")]


def _list_stuck_runs(since: datetime.datetime) -> list[Check]:
    from prefect.client.orchestration import get_client
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.exceptions import ObjectNotFound

    due = {"expected_start_time": {"before_": since}}
    with get_client(sync_client=True) as client:

        def read(*states: str, **more: Any) -> list[Any]:
            wanted = FlowRunFilter.model_validate({"state": {"type": {"any_": states}}, **more})
            return list(client.read_flow_runs(flow_run_filter=wanted))

        old = [run for run in read("PENDING", "CANCELLING") if run.state.timestamp <= since]
        late, working = read("SCHEDULED", **due), False
        with suppress(ObjectNotFound):  # no such pool
            working = client.read_work_pool(POOL).status != "NOT_READY"  # which says that no worker is online
    return [*map(_describe_held_up, old), *(_describe_late(run, working) for run in late)]


def _describe_held_up(run: Any) -> Check:
    since = f"{run.state.timestamp:%Y-%m-%dT%H:%M:%S}"
    if run.state.type == "CANCELLING":
        found, remedy = f"cancelled at {since}, not ended", "End its process. Set it to Cancelled on its page."
    else:
        found = f"taken by a worker at {since}, not started"
        remedy = f"Its worker is gone. End it: `prefect flow-run cancel {run.id}`, then run it again."
    return Check(f"run '{run.name}'", False, found, remedy)


def _describe_late(run: Any, working: bool) -> Check:
    found = f"due at {run.expected_start_time:%Y-%m-%dT%H:%M:%S}, queue '{run.work_queue_name}'"
    if not working:
        return Check(f"run '{run.name}'", False, f"{found}, no worker", "Start one: `make worker`.")
    remedy = "It waits for earlier runs in its queue. `make deploy TRAININGS=2` allows two at a time."
    return Check(f"run '{run.name}'", True, found, remedy)

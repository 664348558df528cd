"""What `flows.doctor` checks about the servers of a home, their databases and their runs."""

import datetime
import importlib.util
import os
import re
import socket
import sqlite3
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
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
ASKED = "mlflow.dlrm.doctor"
"""Tag that tells whether it can be set. MLflow's pages hide it."""
TIMEOUT_SECONDS = 5.0
"""How long a server may take to answer."""
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
        sent = header(unquote(login) if at else None)
        if not sent and variable == "MLFLOW_TRACKING_URI":
            sent = _mlflow_login(environment)
        request = urllib.request.Request(address.rstrip("/") + path, headers=sent)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            text = answer.read(20).decode(errors="replace") if path == "/version" else ""
        same = re.fullmatch(r"\d+\.\d+\S*", text)
        return Check(variable, True, f"{address} answers{f', version {text}' if same else ''}")
    except (OSError, ValueError) as error:
        remedy = f"Start that server, or unset {variable} to run embedded."
        return Check(variable, False, f"{address}: {getattr(error, 'reason', error)}", remedy)


def _mlflow_login(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns the header of the login that MLflow's client takes from variables."""
    if token := environment.get("MLFLOW_TRACKING_TOKEN"):
        return {"Authorization": f"Bearer {token}"}
    user, password = (environment.get(f"MLFLOW_TRACKING_{one}") for one in ("USERNAME", "PASSWORD"))
    return header(f"{user}:{password}" if user and password else None)


def mlflow_access(address: str, experiment: str | None = None, model: str | None = None) -> list[Check]:
    """Asks an MLflow server what a training asks it: may I log in, read, and write to this experiment and model?

    Writing sets a hidden tag. One check for each question, up to the first that is refused.

    Args:
        address: Of the server. Others, such as a database, are not asked.
        experiment: None: nothing is written.
        model: Of the registry.
    """
    if not address.startswith("http"):
        return []
    with _asking_once(address):
        import requests
        from mlflow.exceptions import MlflowException

        from pipeline.registration.tracking import explain

        done: list[Check] = []
        for name, ask in _list_questions(address, experiment, model):
            try:
                done.append(Check(f"MLflow: {name}", True, ask()))
            except (MlflowException, requests.RequestException) as error:
                told = explain(error)
                found = f"expected {told.expected}, got {told.actual}"
                return [*done, Check(f"MLflow: {name}", False, found, told.remedy)]
        return done


@contextmanager
def _asking_once(address: str) -> Iterator[None]:
    """Makes MLflow's client ask a server once, and wait for seconds: it would repeat a request for minutes."""
    patient = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": f"{TIMEOUT_SECONDS:g}"}
    patient["MLFLOW_TRACKING_URI"] = address
    before = {name: os.environ.get(name) for name in patient}
    os.environ.update(patient)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def _list_questions(address: str, experiment: str | None, model: str | None) -> list[tuple[str, Callable[[], str]]]:
    """Returns what to ask, each with its name."""
    from mlflow.tracking import MlflowClient

    client, now = MlflowClient(address), f"{socket.gethostname()} {datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M}"

    def log_in() -> str:
        client.search_registered_models(max_results=1)
        user = os.environ.get("MLFLOW_TRACKING_USERNAME")
        return "accepted" if user is None else f"accepted, of {user}"

    def write_experiment() -> str:
        found = client.get_experiment_by_name(f"{experiment}")
        if found is None:
            return f"'{experiment}' is not there; the first training makes it"
        client.set_experiment_tag(found.experiment_id, ASKED, now)
        return f"'{experiment}' can be written"

    def write_model() -> str:
        if not client.search_registered_models(f"name = '{model}'", max_results=1):
            return f"'{model}' is not there for this login; the first training makes it, or asks for EDIT"
        client.set_registered_model_tag(f"{model}", ASKED, now)
        return f"'{model}' can be written"

    named = [("experiment", write_experiment)] if experiment else []
    return [("login", log_in), *named, *([("model", write_model)] if model else [])]


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

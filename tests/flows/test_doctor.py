"""The doctor names every fault of an installation and every stuck run, with the remedy."""

import ast
import asyncio
import datetime
import importlib.util
import json
import socket
import sqlite3
import subprocess
import sys
import uuid
from contextlib import closing
from pathlib import Path

import pytest
from alembic.script import ScriptDirectory
from filelock import FileLock
from prefect.client.orchestration import get_client
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling, Pending, Scheduled

from flows import doctor
from flows.ingest import ingest
from pipeline.jobs.outcome import MLFLOW_ADDRESS

HOUR = datetime.timedelta(hours=1)
GOOD = {"torch": "2.13.0+cpu", "torchrec": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}


def wrong(checks: list[doctor.Check]) -> list[tuple[str, str, str]]:
    return [(check.name, check.found, check.remedy) for check in checks if not check.ok]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({}, []),
        ({"fbgemm-gpu": "1.8.0"}, [("fbgemm", "fbgemm-gpu 1.8.0, fbgemm-gpu-cpu 1.8.0", "Both builds own the module fbgemm_gpu; keep one. Run `make clean setup`.")]),
        ({"fbgemm-gpu-cpu": "1.4.0"}, [("fbgemm", "fbgemm-gpu-cpu 1.4.0", "fbgemm-gpu-cpu (or fbgemm-gpu with CUDA) 1.8.0 is needed. Run `make clean setup`.")]),
        ({"torch": "2.9.0"}, [("torch", "2.9.0", "torch 2.13.0 is needed. Run `make clean setup`.")]),
    ],
)  # fmt: skip
def test_versions(change, expected):
    assert wrong(doctor.versions(GOOD | change)) == expected


def test_a_missing_fbgemm():
    assert wrong(doctor.versions({"torch": "2.13.0", "torchrec": "1.8.0"}))[0][:2] == ("fbgemm", "absent")


@pytest.mark.parametrize(
    ("version", "ok"), [((3, 10, 1), False), ((3, 11, 0), True), ((3, 13, 9), True), ((3, 14, 0), False)]
)
def test_python(version, ok):
    assert doctor.python_version(version).ok is ok


def test_a_module_that_breaks_on_import_is_named(tmp_path, monkeypatch):
    (tmp_path / "wrong_abi.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    found = doctor.importable("wrong_abi", "fbgemm was built for another torch.")
    assert (found.ok, found.found) == (False, "ImportError: undefined symbol: _ZN3c10")
    assert found.remedy == "fbgemm was built for another torch. Run `make clean setup`."


def test_a_broken_module_is_named_among_others(tmp_path, monkeypatch):
    (tmp_path / "wrong_abi.py").write_text("raise ImportError('undefined symbol: _ZN3c10')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert wrong(doctor.all_importable({"json": "json is broken.", "csv": "csv is broken."})) == []
    [[name, found, remedy]] = wrong(doctor.all_importable({"json": "json is broken.", "wrong_abi": "Rebuild it."}))
    assert (name, found) == ("import wrong_abi", "ImportError: undefined symbol: _ZN3c10")
    assert remedy.startswith("Rebuild it.")


def test_a_missing_module_is_named():
    assert (
        doctor.importable("psutil_is_gone", "MLflow's system metrics need it.").found
        == "ModuleNotFoundError: No module named 'psutil_is_gone'"
    )


def test_a_folder_that_cannot_be_written():
    found = doctor.writable("home", Path("/proc/nowhere/home"), "Set DLRM_HOME.")
    assert not found.ok
    assert found.remedy == "Set DLRM_HOME."
    assert found.found.startswith("/proc: ")


def test_a_full_disk(tmp_path):
    assert doctor.space("disk", tmp_path, 2**60, "Free some space.").remedy == "Free some space."


def test_a_port_in_use():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        found = doctor.port_free("MLflow", port)
    assert (found.ok, found.found) == (False, "in use (MLflow)")
    assert f"make ui MLFLOW_PORT={port + 1}" in found.remedy


def test_a_server_that_does_not_answer():
    found = doctor.reachable("PREFECT_API_URL", "/health", {"PREFECT_API_URL": "http://127.0.0.1:9/api"})
    assert not found.ok
    assert found.remedy == "Start that server, or unset PREFECT_API_URL to run embedded."
    assert doctor.reachable("PREFECT_API_URL", "/health", {}).ok


def test_a_missing_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nic7")
    assert "'nic7' is absent" in doctor.loopback().remedy


def test_a_run_at_work_is_shown(tmp_path):
    (tmp_path / "runs" / "demo-1").mkdir(parents=True)
    with FileLock(tmp_path / "runs" / "demo-1" / "lock"):
        assert [check.name for check in doctor.locked_runs(tmp_path)] == ["run demo-1"]
    assert doctor.locked_runs(tmp_path) == []


def test_a_bad_filter_in_a_config_is_shown(tmp_path):
    (tmp_path / "bad.yaml").write_text(f"base: {doctor.ROOT}/configs/smoke.yaml\nfilter: '1=1; drop table x'\n")
    found = doctor.configuration(str(tmp_path / "bad.yaml"))
    assert not found.ok
    assert found.found.startswith("filter '1=1; drop table x': expected comparisons of columns with constants")


@pytest.fixture
def runs(prefect):
    """Returns runs by name: one taken by a worker, one an hour late, one due in an hour, and one cancelled."""

    async def make():
        now = datetime.datetime.now(datetime.UTC)
        states = {
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
    found = {check.name: check for check in doctor.stuck_runs(environment(), Path("none"), patience_seconds=0.0)}
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
    names = [check.name for check in doctor.stuck_runs(environment(), Path("none"))]
    assert f"run '{runs['handed'].name}'" not in names
    assert f"run '{runs['late'].name}'" in names


@pytest.mark.parametrize("server", [{}, {"PREFECT_API_URL": "http://127.0.0.1:9/api"}])
def test_without_a_server_there_are_no_findings(server):
    assert doctor.stuck_runs(server, Path("none")) == []


def environment() -> dict[str, str]:
    return {"PREFECT_API_URL": PREFECT_API_URL.value()}


def test_another_python_is_named_alone(tmp_path, monkeypatch, capsys):
    """Without the packages every check would fail, and its remedy would remove a sound environment."""
    absent = ("no_such_package",)
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    (tmp_path / ".venv" / "bin" / "python").touch()
    found = doctor.find_other_python(tmp_path, absent)
    assert (found.ok, found.remedy) == (False, "Run this with the project's Python: .venv/bin/python -m flows.doctor.")
    assert sys.executable in found.found
    assert doctor.find_other_python() is None
    monkeypatch.setattr(doctor, "find_other_python", lambda: found)
    assert doctor.main([]) == 1
    [check] = json.loads(capsys.readouterr().out.splitlines()[-1])["checks"]
    assert check["remedy"] == found.remedy


def test_an_old_python_is_named_without_a_traceback():
    """What it imports first must be readable for Python 3.9."""
    tree = ast.parse((doctor.ROOT / "flows" / "__init__.py").read_text(), feature_version=(3, 9))
    assert [node.names[0].name for node in tree.body if isinstance(node, ast.Import)] == ["sys"]
    script = "import sys; sys.version_info = (3, 9, 18); import flows.doctor"
    done = subprocess.run([sys.executable, "-c", script], cwd=doctor.ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (
        1,
        f"error: {sys.executable}: expected Python 3.11, 3.12 or 3.13, got 3.9.18. "
        "Use .venv/bin/python, which `make setup` makes.\n",
    )


def test_the_ports_are_those_of_make_ui(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        names = [(check.name, check.ok) for check in doctor.ui_ports(tmp_path, None, (port, port + 1))]
        assert names[0] == (f"port {port}", False)
        assert names[1][0] == f"port {port + 1}"
    (tmp_path / "ui").mkdir()
    (tmp_path / "ui" / MLFLOW_ADDRESS).write_text("http://127.0.0.1:5310\n")
    [running] = doctor.ui_ports(tmp_path, "http://127.0.0.1:4310/api", (4200, 5000))
    assert (running.ok, running.found) == (True, "Prefect http://127.0.0.1:4310, MLflow http://127.0.0.1:5310")


@pytest.mark.parametrize(("step", "found"), [(-2, "of an earlier MLflow"), (None, "of a later MLflow")])
def test_a_database_of_another_mlflow_is_named(tmp_path, step, found):
    known = doctor.read_mlflow_versions()
    (tmp_path / "mlflow").mkdir()
    assert doctor.mlflow_tables(tmp_path).ok
    for version in ("f00", known[-1]) if step is None else (known[step], known[-1]):
        with closing(sqlite3.connect(tmp_path / "mlflow" / "mlflow.db")) as database, database:
            database.execute("CREATE TABLE IF NOT EXISTS alembic_version (version_num)")
            database.execute("DELETE FROM alembic_version")
            database.execute("INSERT INTO alembic_version VALUES (?)", [version])
        check = doctor.mlflow_tables(tmp_path)
        assert check.ok is (version == known[-1])
        assert check.ok or check.found == found
        assert ("mlflow db upgrade" in check.remedy) is (found == "of an earlier MLflow" and not check.ok)


def test_the_newest_tables_of_mlflow_are_its_own_head():
    folder = Path(importlib.util.find_spec("mlflow").origin).parent / "store" / "db_migrations"
    assert doctor.read_mlflow_versions()[-1] == ScriptDirectory(str(folder)).get_current_head()


def test_both_know_where_make_ui_leaves_its_address():
    assert doctor.MLFLOW_ADDRESS == MLFLOW_ADDRESS


@pytest.mark.slow
def test_this_installation_is_sound(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    code = doctor.main(["configs/demo.yaml"])
    result = json.loads(capsys.readouterr().out.strip().splitlines()[-1])
    assert (code, result["status"], result.get("error")) == (0, "ok", None)

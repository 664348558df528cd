"""Runs left by dead processes, and an unreachable MLflow."""

import os
import socket
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import requests
from mlflow.entities import Experiment
from mlflow.exceptions import MlflowException, RestException
from mlflow.protos.databricks_pb2 import TEMPORARILY_UNAVAILABLE
from mlflow.tracking import MlflowClient
from pydantic import BaseModel

from pipeline.errors import AccessError, ConfigError, RegistryError, TrackingError
from pipeline.jobs.transient import is_transient
from pipeline.registration import tracking
from pipeline.registration.config import RegistrationConfig
from pipeline.registration.tracking import Tracker, explain, is_unreachable, reporting_unreachable


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    home = tmp_path_factory.mktemp("home")
    return Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{home}/mlflow.db"), home, "tracking")


def status(tracker: Tracker, run_id: str) -> str:
    return str(tracker.client.get_run(run_id).info.status)


def test_a_run_at_work_is_left_alone(tracker):
    run_id = tracker.start("at work", {}, {}, None)
    assert run_id not in tracker.reap()
    assert status(tracker, run_id) == "RUNNING"


@pytest.mark.parametrize(
    ("tags", "ended"),
    [
        ({"dlrm.pid": "999999999"}, True),
        ({"dlrm.started": "1000000000.00"}, True),  # another process has that number now
        ({"dlrm.host": "elsewhere", "dlrm.pid": "999999999"}, False),
        ({"dlrm.pid": "nonsense"}, False),
    ],
)
def test_runs_that_a_killed_process_left_are_ended(tracker, tags, ended):
    run_id = tracker.start("left", {}, {}, None)
    tracker.tag(run_id, tags)
    assert (run_id in tracker.reap()) == ended
    assert status(tracker, run_id) == ("KILLED" if ended else "RUNNING")


def test_a_process_that_nobody_has_waited_for_is_dead(tracker):
    run_id = tracker.start("left", {}, {}, None)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        started = psutil.Process(process.pid).create_time()
        tracker.tag(run_id, {"dlrm.pid": str(process.pid), "dlrm.started": f"{started:.2f}"})
        assert run_id not in tracker.reap()
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it is a zombie from here on
        assert tracker.reap() == [run_id]


def test_a_database_of_another_mlflow_is_named_with_the_command_that_upgrades_it(tracker, tmp_path):
    source = sqlite3.connect(tracker.uri.removeprefix("sqlite:///").partition("?")[0])
    with closing(source), closing(sqlite3.connect(tmp_path / "old.db")) as copy, copy:
        source.backup(copy)
        copy.execute("UPDATE alembic_version SET version_num = '728d730b5ebd'")
    with pytest.raises(RegistryError) as refused:
        Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{tmp_path}/old.db"), tmp_path, "tracking")
    assert "expected the tables of this MLflow, got those of another version. Copy it, then run: " in str(refused.value)
    assert str(refused.value).endswith(f".venv/bin/mlflow db upgrade 'sqlite:///{tmp_path}/old.db'")


def test_existing_values_are_not_logged_again(tracker):
    run_id = tracker.start("run", {}, {}, None)
    tracker.log(run_id, 20, {"eval_ne": 0.9, "undefined": None})
    tracker.log(run_id, 20, {"eval_ne": 0.9, "eval_auc": 0.7})
    points = tracker.client.get_metric_history(run_id, "eval/ne")
    assert [(point.step, point.value) for point in points] == [(20, 0.9)]
    assert tracker.client.get_run(run_id).data.metrics == {"eval/ne": 0.9, "eval/auc": 0.7}


def test_a_server_that_is_down_is_named_without_its_password(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(TrackingError) as error:
        Tracker(RegistrationConfig(tracking_uri=f"http://me:hunter2@127.0.0.1:{port}"), tmp_path, "away")
    assert str(error.value) == (
        f"MLflow at http://127.0.0.1:{port}: expected an answer, got none. "
        "Start it, or name another: registration.tracking_uri or MLFLOW_TRACKING_URI."
    )


@pytest.mark.parametrize(
    ("error", "away"),
    [
        (MlflowException("API request to http://x failed with exception refused"), True),
        (MlflowException("(sqlite3.OperationalError) database is locked", error_code=TEMPORARILY_UNAVAILABLE), True),
        (RestException({"error_code": "TEMPORARILY_UNAVAILABLE", "message": "locked"}), True),
        (RestException({"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no run"}), False),
        (MlflowException("no such alias"), False),
        (ValueError("API request to"), False),
    ],
)
def test_only_silence_counts_as_unreachable(error, away):
    assert is_unreachable(error) == away
    with pytest.raises(TrackingError if away else type(error)), reporting_unreachable("Wait."):
        raise error


@pytest.mark.parametrize(
    "error",
    [
        MlflowException("API request to endpoint /api failed with error code 403 != 200. Response body: '<html>'"),
        RestException({"error_code": "PERMISSION_DENIED", "message": "no"}),
    ],
)
def test_a_refusal_is_no_answer_about_the_registry(error):
    """Nothing may conclude from it that a version does not exist."""
    assert is_unreachable(error)
    with pytest.raises(AccessError) as caught, reporting_unreachable("Wait."):
        raise error
    assert f"{caught.value}".endswith(
        "got a refusal. Ask for it: READ scores and serves, EDIT trains and promotes, MANAGE removes. "
        "A proxy may want a login. Wait."
    )


def answered(status: int, endpoint: str, body: str) -> MlflowException:
    return MlflowException(
        f"API request to endpoint /api/2.0/mlflow/{endpoint} failed with error code {status} != 200. "
        f"Response body: '{body}'"
    )


@pytest.mark.parametrize(
    ("error", "kind", "sentence"),
    [
        (answered(401, "experiments/get-by-name", "You are not authenticated."), AccessError,
         "expected a login, got none that it takes. Set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"),
        (answered(403, "registered-models/alias", "Permission denied"), AccessError,
         "expected permission for registered-models/alias, got a refusal. Ask for it: READ scores and serves"),
        (answered(403, "experiments/get-by-name", "Invalid Host header - possible DNS rebinding attack detected"), AccessError,
         "expected a server that is asked by this name, got 'Invalid Host header - possible DNS rebinding attack "
         "detected'. Start the server with --allowed-hosts HOST:PORT, or MLFLOW_SERVER_ALLOWED_HOSTS."),
        (answered(413, "runs/log-batch", "<html>too large</html>"), RegistryError,
         "expected an answer to runs/log-batch, got 413 (<html>too large</html>). The server or a proxy"),
        (MlflowException("API request to http://x failed with exception HTTPConnectionPool: Max retries exceeded "
                         "(Caused by ResponseError('too many 500 error responses'))"), TrackingError,
         "expected an answer, got error 500. Run the same command again once it answers."),
        (MlflowException("API request to http://me:hunter2@x failed with exception refused"), TrackingError,
         "expected an answer, got none."),
        (RestException({"error_code": "INVALID_PARAMETER_VALUE", "message": "a name with /"}), RegistryError,
         "expected what was asked for, got INVALID_PARAMETER_VALUE: a name with /. See the server's log."),
        (requests.HTTPError("403 Client Error: Forbidden for url: http://x/api/2.0/mlflow-artifacts/artifacts/a",
                            response=SimpleNamespace(status_code=403)), AccessError, "got a refusal. Ask for it"),
    ],
)  # fmt: skip
def test_what_a_server_answered_is_one_sentence(error, kind, sentence):
    """Its status, to what, and what lacks. A refusal of the host's name is no wrong password."""
    told = explain(error)
    assert type(told) is kind
    assert sentence in str(told)
    assert "hunter2" not in str(told)
    assert is_transient(error) == (kind is TrackingError)


@pytest.mark.timeout(60)
def test_a_run_ends_although_system_metrics_cannot_be_sent(tracker, monkeypatch):
    """The sender hangs in a request to an unreachable MLflow."""
    back = threading.Event()
    monkeypatch.setattr(tracking.SystemMetricsMonitor, "finish", lambda self: back.wait(300))
    monkeypatch.setattr(tracking, "STOP_SECONDS", 0.05)
    run_id = tracker.start("run", {}, {}, None)
    with tracker.ending(run_id):
        pass
    back.set()
    assert tracker.client.get_run(run_id).info.status == "FINISHED"


class Logged(BaseModel):
    steps: int


def test_a_damaged_artifact_of_a_run_is_refused(tracker, tmp_path):
    run_id = tracker.start("damaged", {}, {}, None)
    for content in (b"{", b"[" * 100_000, b"[1]", b'{"steps": "many"}', b"\xff\xfe{}"):
        (tmp_path / "result.json").write_bytes(content)
        tracker.log_file(run_id, tmp_path / "result.json")
        with pytest.raises(RegistryError, match=run_id):
            tracker.read_record(run_id, "result.json", Logged)
        if content != b'{"steps": "many"}':
            with pytest.raises(RegistryError, match=run_id):
                tracker.load_result(run_id)


@pytest.mark.parametrize(
    ("host", "place", "warned"),
    [
        ("mlflow.team", "/mlruns/1", True),
        ("mlflow.team", "file:///mlruns/1", True),
        ("mlflow.team", "mlflow-artifacts:/1", False),
        ("mlflow.team", "s3://bucket/1", False),
        ("127.0.0.1", "/mlruns/1", False),
    ],
)
def test_files_that_stay_on_each_machine_are_warned_of(tmp_path, monkeypatch, caplog, host, place, warned):
    """A server that does not serve artifacts names a folder, which each client then writes on its own disk."""
    found = Experiment("1", "daily", place, "active")
    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda *_: found)
    Tracker(RegistrationConfig(tracking_uri=f"http://{host}:5000"), tmp_path, "daily")
    text = f"MLflow at http://{host}:5000 keeps files of experiment 'daily' in '/mlruns/1', which each machine has"
    assert any(text in one for one in caplog.messages) == warned


def test_who_may_not_make_an_experiment_is_told_so(tmp_path, monkeypatch):
    def refuse(*_: object, **__: object) -> None:
        raise MlflowException(
            "API request to endpoint /api/2.0/mlflow/experiments/create failed with error code 403 != 200"
        )

    monkeypatch.setattr(MlflowClient, "get_experiment_by_name", lambda *_: None)
    monkeypatch.setattr(MlflowClient, "create_experiment", refuse)
    with pytest.raises(AccessError, match="expected permission for experiments/create, got a refusal"):
        Tracker(RegistrationConfig(tracking_uri="http://mlflow.team:5000"), tmp_path, "daily")


def test_a_deleted_experiment_is_one_sentence_with_the_command_that_restores_it(tmp_path, monkeypatch):
    config = RegistrationConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db")
    number = Tracker(config, tmp_path, "gone").experiment_id
    Tracker(config, tmp_path, "other").client.delete_experiment(number)
    with pytest.raises(RegistryError) as caught:
        Tracker(config, tmp_path, "gone")
    command = (
        f"MLFLOW_TRACKING_URI='sqlite:///{tmp_path}/mlflow.db' .venv/bin/mlflow experiments restore "
        f"--experiment-id {number}"
    )
    assert str(caught.value) == (
        "MLflow experiment 'gone': expected one that can take runs, got a deleted one. "
        f"Restore it: {command}. Or give the config another name."
    )
    Tracker(config, tmp_path, "other").client.restore_experiment(number)
    assert Tracker(config, tmp_path, "gone").experiment_id == number


@pytest.mark.parametrize(
    ("uri", "error", "said"),
    [
        ("nonsense", ConfigError, "address of MLflow: expected one such as http://HOST:5000, .*, got 'nonsense'"),
        (
            "sqlite:///no/such/folder/x.db",
            ConfigError,
            "expected the folder '.*no/such/folder', got none. .* four slashes",
        ),
        ("ftp://host/x", ConfigError, "got 'ftp://host/x'. Correct registration.tracking_uri"),
        (
            "mysql+pymysql://u:secret@127.0.0.1/x",
            RegistryError,
            "expected the package .pymysql., got an environment without it",
        ),
    ],
)
def test_what_is_no_address_of_mlflow_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, error: type[Exception], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=said) as caught:
        Tracker(RegistrationConfig(tracking_uri=uri), tmp_path, "any")
    assert not (tmp_path / "no").exists()
    assert "secret" not in f"{caught.value}"

"""Metrics while MLflow is unreachable: kept, then sent in order, once each."""

import json
import sqlite3
import threading
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException

from pipeline.registration.config import RegistrationConfig
from pipeline.registration.journal import POINTS, SENT, Journal
from pipeline.registration.tracking import Tracker


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def tracker(home: Path) -> Tracker:
    return Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{home}/mlflow.db"), home, "journal")


@pytest.fixture
def run_id(tracker: Tracker) -> str:
    return tracker.start("run", {}, {}, None)


def stored(tracker: Tracker, run_id: str, name: str) -> list[tuple[int, float]]:
    """Every point of a metric as MLflow has it, repetitions included."""
    return [(point.step, point.value) for point in tracker.client.get_metric_history(run_id, name)]


def test_what_is_logged_arrives(tracker, run_id, tmp_path):
    said: list[str] = []
    with Journal(tracker, run_id, tmp_path, said.append) as journal:
        journal.log(5, {"ne": 0.9, "undefined": None})
        journal.log(10, {"ne": 0.8, "speed": 7.0})
    assert stored(tracker, run_id, "ne") == [(5, 0.9), (10, 0.8)]
    assert stored(tracker, run_id, "speed") == [(10, 7.0)]
    assert said == []


def test_a_step_that_is_trained_again_is_logged_once(tracker, run_id, tmp_path):
    with Journal(tracker, run_id, tmp_path, print) as journal:
        for step in (5, 10, 15):
            journal.log(step, {"ne": 1.0 / step})
    with (tmp_path / POINTS).open("a") as file:
        file.write('{"step": 20, "ti')  # killed during a write
    with Journal(tracker, run_id, tmp_path, print) as journal:
        for step in (10, 15, 20):
            journal.log(step, {"ne": 1.0 / step, "late": 1.0})
    assert stored(tracker, run_id, "ne") == [(step, 1.0 / step) for step in (5, 10, 15, 20)]
    assert [step for step, _ in stored(tracker, run_id, "late")] == [10, 15, 20]


def test_what_is_sent_again_is_one_point(tracker, run_id, tmp_path):
    """A server accepts a request and dies before it answers."""
    journal = Journal(tracker, run_id, tmp_path, print)
    for step in range(40):
        journal.log(step, {f"metric_{number}": float(step) for number in range(30)})
    journal.deliver()
    journal.mark.unlink()
    Journal(tracker, run_id, tmp_path, print).deliver()
    assert stored(tracker, run_id, "metric_29") == [(step, float(step)) for step in range(40)]


def test_another_run_gets_all_of_it(tracker, run_id, tmp_path):
    """Somebody has deleted the first run."""
    with Journal(tracker, run_id, tmp_path, print) as journal:
        journal.log(5, {"ne": 0.9})
    other = tracker.start("other", {}, {}, None)
    Journal(tracker, other, tmp_path, print).deliver()
    assert stored(tracker, other, "ne") == [(5, 0.9)]


def test_metrics_wait_for_an_unreachable_server(tracker, run_id, tmp_path, monkeypatch):
    monkeypatch.setattr("pipeline.registration.journal.RETRY_SECONDS", 0.01)
    said: list[str] = []
    failed, back = threading.Event(), threading.Event()
    send = tracker.client.log_batch

    def answer(*arguments, **values):
        if not back.is_set():
            failed.set()
            raise MlflowException("API request to http://127.0.0.1:1 failed with exception refused")
        send(*arguments, **values)

    monkeypatch.setattr(tracker.client, "log_batch", answer)
    with Journal(tracker, run_id, tmp_path, said.append) as journal:
        journal.log(5, {"ne": 0.9})
        assert failed.wait(30)
        journal.log(10, {"ne": 0.8})
        back.set()
    assert stored(tracker, run_id, "ne") == [(5, 0.9), (10, 0.8)]
    assert said == [
        "MLflow takes no metrics (API request to http://127.0.0.1:1 failed with exception refused); "
        f"they are kept in '{tmp_path / POINTS}' and sent later",
        "MLflow is back and has all metrics",
    ]


@pytest.mark.nightly
def test_a_locked_database_is_waited_for(tracker, home, run_id, tmp_path):
    """Logging and queries wait while another process has locked the database."""
    other = sqlite3.connect(home / "mlflow.db", isolation_level=None)
    other.execute("begin exclusive")
    asked, found = threading.Event(), []

    def ask() -> None:
        asked.set()
        tracker.tag(run_id, {"asked": "meanwhile"})
        found.append(tracker.client.get_run(run_id).data.tags["asked"])

    stage = threading.Thread(target=ask)
    with Journal(tracker, run_id, tmp_path, print) as journal:
        stage.start()
        for step in range(5, 30, 5):  # training is not delayed
            journal.log(step, {"ne": 1.0})
        assert asked.wait(30)
        stage.join(6.0)  # longer than SQLite's own timeout
        assert stage.is_alive()
        assert len((tmp_path / POINTS).read_text().splitlines()) == 5
        other.execute("rollback")
        other.close()
    stage.join(30)
    assert found == ["meanwhile"]
    journal.deliver()
    assert [step for step, _ in stored(tracker, run_id, "ne")] == [5, 10, 15, 20, 25]


def test_the_file_is_readable_by_eye(tracker, run_id, tmp_path):
    journal = Journal(tracker, run_id, tmp_path, print)
    journal.log(5, {"ne": 0.9})
    [line] = (tmp_path / POINTS).read_text().splitlines()
    assert {key: value for key, value in json.loads(line).items() if key != "time"} == {
        "step": 5,
        "metrics": {"ne": 0.9},
    }


def test_damaged_metrics_are_left_out_and_the_others_arrive(tracker, run_id, tmp_path):
    with Journal(tracker, run_id, tmp_path, print) as journal:
        journal.log(5, {"ne": 0.9})
    line = (tmp_path / POINTS).read_bytes()
    (tmp_path / POINTS).write_bytes(line + line.replace(b'"ne"', b'"n\xff') + line.replace(b"5", b"7", 1))
    (tmp_path / SENT).write_text(f'{{"run_id": "{run_id}", "bytes": {len(line) - 1}}}')  # not where a line ends
    said: list[str] = []
    with Journal(tracker, run_id, tmp_path, said.append) as journal:
        journal.log(10, {"ne": 0.7})
    assert sorted(set(stored(tracker, run_id, "ne"))) == [(5, 0.9), (7, 0.9), (10, 0.7)]
    assert said == [f"left out damaged metrics in '{tmp_path / POINTS}', before byte {2 * len(line) - 1:,}"]

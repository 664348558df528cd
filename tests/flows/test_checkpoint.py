"""The checkpoints of the smoke run on the command line, and killed flows."""

import os
import shutil
import sqlite3
import time

import psutil
import pytest
from safetensors.torch import load_file

from flows.checkpoint import checkpoint
from flows.train import train
from pipeline.config import load
from pipeline.jobs.training.job import resolve_job
from pipeline.jobs.workspace import Workspace
from tests.commands import killed, wait_for
from tests.digest import hash_weights
from tests.homes import CONFIG
from tests.segments import left_since, segments


@pytest.fixture
def run_name(smoke) -> str:
    return f"smoke-{smoke['identity'][:12]}-0"


def entries(result: dict, run: str) -> list[dict]:
    return [entry for entry in result["checkpoints"] if entry["run"] == run]


def test_list(command, home, smoke, run_name):
    code, result, log = command(checkpoint, CONFIG, f"run={run_name}", home=home)
    assert (code, result["status"], result["action"], result["damaged"]) == (0, "ok", "list", 0)
    lines = log[log.index("checkpoints:\n") :].splitlines()
    assert lines[1].split() == ["run", "name", "step", "time", "MB", "valid", "NE", "state"]
    assert lines[3].split()[:3] == [run_name, "best", "20"]
    assert lines[3].endswith(f"{smoke['train']['valid_ne']:.4f}    verified")
    assert [(entry["name"], entry["step"]) for entry in result["checkpoints"]] == [
        ("step-0000000020", 20),
        ("best", 20),
    ]
    for entry in result["checkpoints"]:
        folder = home / "runs" / run_name / "checkpoints" / entry["name"]
        assert entry["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
        assert (entry["state"], entry["error"]) == ("verified", None)
        assert entry["valid_ne"] == smoke["train"]["valid_ne"]


@pytest.mark.parametrize("step", ["newest", "best", "20"])
def test_export_is_the_registered_weights(command, home, smoke, run_name, step):
    """The export needs no ranks. It assembles whole tables, with the same bits as the export of two ranks."""
    code, result, _ = command(checkpoint, CONFIG, "action=export", f"step={step}", f"run={run_name}", home=home)
    assert (code, result["run"], result["step"]) == (0, run_name, 20)
    assert hash_weights(load_file(result["path"])) == smoke["train"]["weights_sha256"]
    assert result["bytes"] == os.path.getsize(result["path"])


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["action=export", "step=7"], "step '7': expected a checkpoint of 'smoke', got {run}/step-0000000020, {run}/best. Name one, or train first."),
        (["action=mend"], "argument 'action': expected 'list', 'verify' or 'export', got 'mend'. Correct the value."),
    ],
)  # fmt: skip
def test_unknown_steps_and_actions_are_refused(command, home, run_name, words, sentence):
    code, result, _ = command(checkpoint, CONFIG, *words, f"run={run_name}", home=home)
    assert (code, result["error"]) == (1, sentence.format(run=run_name))


def test_another_run_is_refused(command, tmp_path):
    code, result, _ = command(checkpoint, CONFIG, "run=other", home=tmp_path)
    assert (code, result["error"]) == (
        1, f"run 'other': expected a run of 'smoke' in '{tmp_path}/runs', got none. Name one of them.",
    )  # fmt: skip


def test_verify_names_what_is_damaged(command, home, tmp_path, run_name):
    shutil.copytree(home / "runs" / run_name, tmp_path / "runs" / run_name, ignore=shutil.ignore_patterns("exports"))
    assert command(checkpoint, CONFIG, "action=verify", home=tmp_path)[1]["status"] == "ok"
    shard = tmp_path / "runs" / run_name / "checkpoints" / "step-0000000020" / "__1_0.distcp"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(bytes(content))
    code, result, _ = command(checkpoint, CONFIG, "action=verify", home=tmp_path)
    assert (code, result["status"]) == (1, "failed")
    assert result["error"].startswith(
        "1 of 2 checkpoints of 'smoke': expected whole ones, got checkpoint 'step-0000000020': expected sha256 "
    )
    assert "of __1_0.distcp" in result["error"]
    code, result, _ = command(checkpoint, CONFIG, home=tmp_path)
    assert (code, result["damaged"]) == (0, 1)
    assert [entry["state"] for entry in result["checkpoints"]] == ["damaged", "verified"]
    code, result, _ = command(checkpoint, CONFIG, "action=export", home=tmp_path)
    assert (code, result["status"]) == (1, "failed")
    assert not (tmp_path / "runs" / run_name / "exports" / "step-0000000020.safetensors").exists()


@pytest.mark.nightly
def test_a_training_that_explodes_is_failed_and_not_registered(smoke, command, home, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(home))
    words = ["training.dense_optimizer=sgd", "training.dense_learning_rate=1e30", "training.world_size=1"]
    words += ["training.threads_per_rank=1", "preprocessing.executor=inline"]
    config = load(CONFIG, {word.split("=")[0]: word.split("=")[1] for word in words})
    versions = len(Workspace(config).tracking.client.search_model_versions("name = 'smoke'"))
    code, result, log = command(train, CONFIG, *words, home=home)
    assert (code, result["status"]) == (1, "failed")
    assert "finite" in result["error"]
    assert "go on from step" not in log
    job = resolve_job(Workspace(config), None, False)
    run_id = (home / "runs" / job.folder.split("/")[-1] / "mlflow_run_id").read_text()
    assert Workspace(config).tracking.client.get_run(run_id).info.status == "FAILED"
    assert len(Workspace(config).tracking.client.search_model_versions("name = 'smoke'")) == versions


def listening(processes: list[psutil.Process]) -> set[int]:
    return {
        connection.laddr.port
        for process in processes
        for connection in process.net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.slow
def test_nothing_outlives_a_killed_flow_and_the_next_resumes(smoke, command, home, tmp_path, monkeypatch, prefect):
    """Ranks, preprocessing workers and Prefect's temporary server end, with their ports and shared memory.

    The next flow is killed, too. MLflow has one run, and each step once.
    """
    shutil.copytree(home / "warehouse", tmp_path / "home" / "warehouse")
    words = [CONFIG, "training.checkpoint_every_steps=5", "training.log_every_steps=1"]
    (tmp_path / "temporary").mkdir()
    environment = os.environ | {"DLRM_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path / "temporary")}
    for name in ("MLFLOW_TRACKING_URI", "PREFECT_API_URL"):
        environment.pop(name, None)
    before = segments()
    with killed("train", *words, environment=environment, log=tmp_path / "first.log") as flow:
        runs = tmp_path / "home" / "runs"
        wait_for(lambda: list(runs.glob("*/checkpoints/step-*")), flow, tmp_path / "first.log")
        family = psutil.Process(flow.pid).children(recursive=True)
        ports = listening(family)
    assert any(ports)
    _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive, [process.cmdline() for process in alive]
    limit = time.monotonic() + 15
    while found := left_since(before):
        assert time.monotonic() < limit, found
        time.sleep(0.05)
    assert not list((tmp_path / "temporary").glob("dlrm-*"))
    environment["PREFECT_API_URL"] = prefect  # the other flow needs no server of its own
    with killed("train", *words, environment=environment, log=tmp_path / "second.log") as flow:
        query = "select value from tags where key = 'dlrm.pid'"
        pid = [(str(flow.pid),)]
        wait_for(lambda: stored(tmp_path / "home", query) == pid, flow, tmp_path / "second.log")
    params = stored(tmp_path / "home", "select key, value from params order by key")
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", ""
    )  # MLflow sets it for the whole process; it must not be the smoke run's
    code, result, log = command(train, *words, home=tmp_path / "home")
    assert (code, result["status"]) == (0, "ok"), log
    assert result["train"]["weights_sha256"] == smoke["train"]["weights_sha256"]
    assert "resumed at step" in log
    assert stored(tmp_path / "home", "select run_uuid, status from runs") == [(result["mlflow_run_id"], "FINISHED")]
    assert stored(tmp_path / "home", "select key, value from params order by key") == params
    assert stored(tmp_path / "home", "select key, step from metrics group by key, step having count(*) > 1") == []
    steps = stored(tmp_path / "home", "select step from metrics where key = 'train/ne_window' order by step")
    assert steps == [(step,) for step in range(1, 21)]


def stored(home, query: str) -> list[tuple]:
    """Queries MLflow's database."""
    with sqlite3.connect(home / "mlflow" / "mlflow.db") as database:
        return database.execute(query).fetchall()

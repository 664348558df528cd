"""Two homes without a common disk: a catalog in Postgres, logs and tables in S3. Nothing is written twice."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from pipeline.jobs.database_lock import database_lock
from storage.config import WarehouseConfig
from storage.warehouse import Warehouse
from tests.objects import Store, serving_objects
from tests.ports import free_port
from tests.postgres import serving_postgres

pytestmark = pytest.mark.timeout(900)
ROOT = Path(__file__).resolve().parents[2]
ROWS, DAYS = 400, ("2025-01-06", "2025-01-07", "2025-01-08")
EPOCHS = 30
"""Of ten steps. One training is killed while it saves a checkpoint, at step 100 or later."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    with serving_objects(tmp_path_factory.mktemp("store")) as one:
        folder, random = tmp_path_factory.mktemp("logs"), np.random.default_rng(3)
        for day in DAYS:
            rows = pd.DataFrame({"user": random.integers(0, 50, ROWS), "label": random.integers(0, 2, ROWS)})
            rows.assign(day=day).to_parquet(folder / f"{day}.parquet", index=False)
        one.upload(folder)
        yield one


@pytest.fixture(scope="module")
def catalog(store: Store) -> Iterator[dict[str, str]]:
    with serving_postgres() as address:
        yield store.properties | {"type": "sql", "uri": address, "warehouse": "s3://logs/tables"}


def run_on(home: Path, catalog: dict[str, str], flow: str = "ingest", *words: str) -> "subprocess.Popen[str]":
    """Runs the command as on a machine of its own."""
    config = {
        "name": "shared", "warehouse": {"catalog": catalog},
        "source": {"path": "s3://logs/*.parquet", "day_column": "day"},
        "features": {"sparse": [{"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": 100}]}]},
        "storage": {"path": "s3://logs/kept"}, "evaluation": {"importance_rows": None, "baselines": []},
        "model": {"interaction": "cat"},
        "training": {"world_size": 2, "batch_rows": 20, "epochs": EPOCHS, "checkpoint_every_steps": 50},
        "split": {"days": {part: [day] for part, day in zip(("train", "valid", "test"), DAYS, strict=True)}},
    }  # fmt: skip
    home.mkdir(exist_ok=True)
    (home / "shared.yaml").write_text(yaml.safe_dump(config))
    outside = {key: value for key, value in os.environ.items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    return subprocess.Popen(
        [sys.executable, "-m", f"flows.{flow}", str(home / "shared.yaml"), *words],
        cwd=ROOT, env=outside | {"DLRM_HOME": str(home)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


@pytest.mark.nightly
def test_two_ingests_of_the_same_days_write_them_once(catalog: dict[str, str], tmp_path: Path) -> None:
    warehouse = Warehouse(WarehouseConfig(catalog=catalog), tmp_path / "mine")
    engine = warehouse.catalog.engine  # type: ignore[attr-defined]
    with database_lock(engine, "dlrm: ingest of table 'shared'", pytest.fail):
        both = [run_on(tmp_path / name, catalog) for name in ("one", "two")]
        for process in both:  # each says that it waits, and for whom
            assert process.stderr is not None
            lines: list[str] = []
            while "waiting: " not in "".join(lines):
                lines.append(process.stderr.readline())
                assert lines[-1], lines
            assert f"another ingest of table 'shared' is running, process {os.getpid()} on " in lines[-1]
    ended = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], ended
    results = [json.loads(out.strip().splitlines()[-1]) for out, _ in ended]
    assert sorted(result["days_written"] for result in results) == [0, 3]
    snapshot = warehouse.current("shared")
    assert {result["snapshot_id"] for result in results} == {snapshot.snapshot_id}
    assert sum(fragment.rows for fragment in warehouse.reader(snapshot, ["user"]).fragments()) == 3 * ROWS
    assert len(warehouse.table("shared").snapshots()) == 1
    assert not list(tmp_path.rglob("*/warehouse/**/*.parquet")), "tables are in the store alone"


def last_line(process: "subprocess.Popen[str]") -> tuple[dict[str, Any], str]:
    out, said = process.communicate(timeout=400)
    assert process.returncode == 0, said
    return json.loads(out.strip().splitlines()[-1]), said


OWN = "name=moved"
"""A table of its own: other tests write the table of the config."""


@pytest.mark.nightly
def test_another_machine_continues_a_training_whose_machine_is_lost(
    catalog: dict[str, str], store: Store, tmp_path: Path
) -> None:
    """It ends with the weights of an undisturbed training, although the machines have no folder in common."""
    last_line(run_on(tmp_path / "ingest", catalog, "ingest", OWN))
    client = store.client()

    def kept() -> list[str]:
        found = client.list_objects_v2(Bucket=store.bucket, Prefix="kept/runs/moved-")
        return [one["Key"] for one in found.get("Contents", [])]

    with run_on(tmp_path / "lost", catalog, "train", OWN) as flow:
        try:
            limit = time.monotonic() + 300
            while not list(
                (tmp_path / "lost").glob("runs/*/checkpoints/.step-*[1-9][05]0.*")
            ):  # the one before is saved
                assert flow.poll() is None, flow.communicate()[1]
                assert time.monotonic() < limit
                time.sleep(0.005)
        finally:
            flow.kill()
    while (tmp_path / "lost").exists():  # its ranks may still say why they end
        assert time.monotonic() < limit
        shutil.rmtree(tmp_path / "lost", ignore_errors=True)
    found, said = last_line(run_on(tmp_path / "other", catalog, "train", OWN))
    assert "resumed at step" in said, said
    assert found["train"]["rows"] == EPOCHS * ROWS
    plain, _ = last_line(run_on(tmp_path / "plain", catalog, "train", OWN, "storage.path=null"))
    assert found["train"]["weights_sha256"] == plain["train"]["weights_sha256"]
    run = {key.split("/")[2] for key in kept()}
    assert len(run) == 1
    folder = f"kept/runs/{run.pop()}"
    shared = ("weights.safetensors", "probe.json", "snapshot.json", "code.json", "registered")
    assert {f"{folder}/{name}" for name in shared} <= set(kept())

    third = tmp_path / "third"  # a machine that has nothing of the training
    named = f"run={folder.rpartition('/')[2]}"
    listed, _ = last_line(run_on(third, catalog, "checkpoint", OWN, named))
    states = {entry["name"]: (entry["state"], entry["step"]) for entry in listed["checkpoints"]}
    assert states["best"][0] == "in the store"
    newest = max(step for state, step in states.values())
    assert newest == found["train"]["steps"]
    verified, _ = last_line(run_on(third, catalog, "checkpoint", OWN, "action=verify"))
    assert {entry["state"] for entry in verified["checkpoints"]} == {"verified"}
    exported, _ = last_line(run_on(third, catalog, "checkpoint", OWN, "action=export"))
    assert (exported["step"], exported["status"]) == (newest, "ok")
    assert Path(exported["path"]).is_relative_to(third)


@pytest.mark.nightly
def test_ranks_of_torchrun_keep_their_checkpoints_in_the_store(
    catalog: dict[str, str], store: Store, tmp_path: Path
) -> None:
    """They follow their training through its folder, by the command that it prints."""
    own = ("name=followed", "training.epochs=1", "preprocessing.executor=inline")
    last_line(run_on(tmp_path / "home", catalog, "ingest", *own))
    with run_on(tmp_path / "home", catalog, "train", *own, "training.launcher=external") as flow:
        try:
            assert flow.stderr is not None
            said = next(line for line in flow.stderr if "waiting for the ranks" in line)
            words = said.strip().rpartition("for example: torchrun ")[2].split()
            assert Path(words[-1]).parent.parent == tmp_path / "home" / "runs"
            start = [
                sys.executable,
                "-m",
                "torch.distributed.run",
                "--nproc-per-node=2",
                f"--master-port={free_port()}",
            ]
            ranks = subprocess.run(
                [*start, *words[-3:]], cwd=ROOT, env=os.environ | store.variables, capture_output=True
            )
            assert ranks.returncode == 0, ranks.stderr
            found, _ = last_line(flow)
        finally:
            flow.kill()
    plain, _ = last_line(run_on(tmp_path / "plain", catalog, "train", *own, "storage.path=null"))
    assert found["train"]["weights_sha256"] == plain["train"]["weights_sha256"]
    keys = [one["Key"] for one in store.client().list_objects_v2(Bucket="logs", Prefix="kept/")["Contents"]]
    assert any(key.startswith("kept/runs/followed-") and "/checkpoints/" in key for key in keys)

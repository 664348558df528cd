"""Estimates of a training, compared with the smoke run's own ranks, checkpoint and rows."""

import pytest

from flows.estimate import estimate
from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.jobs.workspace import Workspace
from pipeline.study.estimate import calibration, calibration_points, footprint
from pipeline.study.estimate.memory import RankMachine, derive_shape, estimate_checkpoint_bytes
from pipeline.study.points.config import Workload
from storage.errors import StorageError
from tests.homes import CONFIG, open_smoke

ROOM = RankMachine(memory_bytes=64 << 30, most_ranks=2)


@pytest.fixture(scope="module")
def measured(smoke, home):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DLRM_HOME", str(home))
        return footprint.measure_footprint(open_smoke(), None, None)


def test_a_rank_is_given_the_tables_that_a_real_rank_holds(smoke, measured):
    config = load(CONFIG)
    ranks = footprint.place_on_ranks(Workspace(config), measured, 2, ROOM, process_bytes=0)
    assert [one.tables for one in ranks.memory] == smoke["train"]["table_bytes"]
    assert ranks.fits
    assert not footprint.place_on_ranks(Workspace(config), measured, 2, ROOM, process_bytes=40 << 30).fits


def test_a_checkpoint_has_the_estimated_size(smoke, measured, home):
    config = load(CONFIG)
    folder = home / "runs" / f"smoke-{smoke['identity'][:12]}-0" / "checkpoints" / "best"
    found = sum(path.stat().st_size for path in folder.iterdir())
    shape = derive_shape(config.model, measured.dense, measured.bags)
    assert estimate_checkpoint_bytes(shape, config.training) == pytest.approx(found, rel=0.01)


def test_rows_are_counted_and_a_worker_is_measured(smoke, measured):
    assert measured.rows == smoke["train"]["rows"]
    assert measured.worker_rows_per_second > 0
    assert measured.snapshot_id == smoke["snapshot_id"]


def test_a_workload_needs_no_table(tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    workload = {"dense_features": 3, "sparse_features": 2, "hash_size": 50, "lookups": 4}
    config = load(CONFIG, {"training.batch_rows": 64})
    found = footprint.measure_footprint(Workspace(config), Workload(**workload), None)
    assert (found.dense, len(found.bags), found.rows) == (3, 2, None)
    assert found.uses["sparse_0"].ids_per_bag == (4.0,)
    _, whole = footprint.estimate_single_rank(Workspace(config), found, 0)
    assert whole.lookups == 2 * 4 * 64
    with pytest.raises(StorageError, match=r"Run `python -m flows.ingest` first"):
        footprint.measure_footprint(open_smoke(), None, None)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("cores: 4", "key 'cpu': expected Field required, got {'cores': 4}. Correct it."),
        ("cpu: x\ncores: 0", "key 'cores': expected greater than 0, got 0. Correct it."),
    ],
)
def test_an_invalid_machine_description_is_refused(text, sentence, tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_text(text)
    with pytest.raises(Exception, match="machine") as raised:
        footprint.load_machine(str(path))
    assert str(raised.value) == f"machine '{path}', {sentence}"


@pytest.mark.parametrize("content", [b"a: [", b"\xff", b"[1]", b"\0"])
def test_a_machine_description_that_is_no_yaml_mapping_is_refused(content, tmp_path):
    path = tmp_path / "machine.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=f"config '{path}': expected "):
        footprint.load_machine(str(path))


def test_the_example_of_a_machine_description_is_valid():
    machine = footprint.load_machine("configs/machines/epyc_9654.yaml")
    assert (machine.cores, machine.room.shared, machine.room.most_ranks) == (96, True, 96)


@pytest.mark.nightly
def test_the_flow_reports_everything(command, smoke, home, monkeypatch):
    """With few and small points the times are rough. The second call measures nothing."""
    for name in ("MOST_FLOP", "MOST_LOOKED_UP", "MOST_HELD"):
        monkeypatch.setattr(calibration_points, name, getattr(calibration_points, name) / 200)
    monkeypatch.setattr(
        calibration, "QUICK", calibration.QUICK.model_copy(update={"repeats": 2, "steps": 2, "warm_up_steps": 1})
    )
    words = ("points=6", "training.threads_per_rank=1")
    machine = "machine=configs/machines/epyc_9654.yaml"
    code, result, log = command(estimate, CONFIG, *words, machine, "measure=true", home=home)
    assert (code, result["status"]) == (0, "ok")
    assert result["train_rows"] == smoke["train"]["rows"]
    assert "memory of a rank" in log
    options = {option["ranks"]: option for option in result["machine"]["options"]}
    assert options[2]["table_bytes"] == smoke["train"]["table_bytes"]
    assert options[2]["fits"]
    assert result["machine"]["fewest_ranks"] == 1
    assert all(option["step_ms"] > 0 and option["workers"] >= 1 for option in options.values())
    assert result["described"]["measured"] is False
    assert {option["ranks"] for option in result["described"]["options"]} >= {1, 64}
    measured = result["measurement"]
    assert measured["ranks"] == 2
    assert measured["predicted_over_measured"] > 0
    assert measured["model_bytes"] < 3 * options[2]["rank_bytes"]
    client = open_smoke().tracking.client
    assert client.get_run(result["mlflow_run_id"]).data.metrics["checkpoint_bytes"] == result["checkpoint_bytes"]
    _, again, later = command(estimate, CONFIG, *words, home=home)
    assert "calibration of this machine: 6 points" in later
    assert again["prediction"] == result["prediction"]

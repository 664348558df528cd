"""A version's record, and the training that repeats it."""

import json

import pytest

from flows.replay import replay
from pipeline.config import load
from pipeline.errors import ConfigError, RegistryError, StorageError
from pipeline.jobs.training.provenance import RECORD, fetch_record, list_differences, override_recorded, restore_config
from pipeline.jobs.training.replay import pin_replay, replay_version
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import list_moves, list_versions
from tests.homes import CONFIG, open_smoke


@pytest.fixture
def record(smoke, at_home):
    return fetch_record(open_smoke().tracking, "smoke", 1)


def test_the_record_has_everything_that_a_training_needs(record, smoke, home):
    config = load(CONFIG)
    assert record.snapshot.model_dump() == {"table": "smoke", "snapshot_id": smoke["snapshot_id"]}
    refs = Workspace(config).warehouse.table("smoke").refs()
    assert refs[record.snapshot_tag].snapshot_id == smoke["snapshot_id"]
    assert restore_config(record, Workspace(config)) == config
    assert record.seeds == {"seed": config.seed, "source.generator.seed": config.source.generator.seed}
    assert record.weights_sha256 == smoke["train"]["weights_sha256"]
    assert (record.identity, record.commit) == (smoke["identity"], smoke["git_commit"])
    assert (record.world_size, record.device) == (2, "cpu")
    assert {part: [f"{day}" for day in rows.days] for part, rows in record.rows.items()} == {
        "train": ["2025-01-06", "2025-01-07"], "valid": ["2025-01-08"], "test": ["2025-01-09"],
    }  # fmt: skip
    assert record.threads_per_rank >= 1
    tags = Workspace(config).tracking.client.get_model_version("smoke", "1").tags
    assert (record.plan_hash, record.lock_hash) == (tags["plan_hash"], tags["lock_hash"])
    assert tags["record"] == f"runs:/{smoke['mlflow_run_id']}/{RECORD}"
    assert {"torch", "torchrec", "numba", "python", "processor"} <= record.versions.keys()
    assert {table.table for table in record.placement} == {table["table"] for table in sharding_plan(home, smoke)}


def sharding_plan(home, smoke):
    return json.loads(
        (next((home / "mlflow").rglob(f"{smoke['mlflow_run_id']}/artifacts/sharding_plan.json"))).read_text()
    )


def test_a_record_holds_no_password(record):
    assert "tracking_uri" not in record.config["registration"]
    assert "catalog" not in record.config["warehouse"]


@pytest.mark.parametrize(
    ("overrides", "key"),
    [
        ({"preprocessing.workers": 1, "training.world_size": 1}, "training.world_size"),
        ({"seed": 2}, "seed"),
        ({"preprocessing.shuffle_window_rows": 512}, "preprocessing.shuffle_window_rows"),
    ],
)
def test_keys_that_change_the_result_are_refused(overrides, key):
    with pytest.raises(ConfigError) as error:
        override_recorded(load(CONFIG), overrides)
    assert str(error.value) == (
        f"override '{key}': expected a key that does not change what is learned, such as preprocessing.workers, "
        f"got {overrides[key]}, which the version was not trained with. Leave it out."
    )


def test_keys_that_change_only_the_execution_are_accepted():
    config = override_recorded(load(CONFIG), {"preprocessing.workers": 1, "training.threads_per_rank": 1})
    assert (config.preprocessing.workers, config.training.threads_per_rank) == (1, 1)


def test_differences_are_described(record):
    clean = record.model_copy(update={"commit": "0123456789ab"})
    assert list_differences(clean, clean, clean.placement) == []
    now = clean.model_copy(
        update={"weights_sha256": "f00", "commit": "ba9876543210", "versions": record.versions | {"torch": "9.9"}}
    )
    moved = tuple(
        table.model_copy(update={"pieces": tuple(p.model_copy(update={"rank": 1 - p.rank}) for p in table.pieces)})
        for table in record.placement
    )
    assert list_differences(clean, now, moved) == [
        f"weights_sha256: {record.weights_sha256} recorded, f00 now",
        "commit: 0123456789ab recorded, ba9876543210 now",
        f"torch: {record.versions['torch']} recorded, 9.9 now",
        "placement: another sharding plan would be made now; the recorded one was used",
    ]
    dirty = record.model_copy(update={"commit": "0123456789ab+"})
    assert list_differences(dirty, dirty, dirty.placement) == ["commit: 0123456789ab+ had uncommitted changes"]


def test_a_version_without_a_record_is_refused(record, smoke, copied):
    tracker = open_smoke().tracking
    tracker.client.delete_model_version_tag("smoke", "1", "record")
    with pytest.raises(RegistryError, match=r"model 'smoke', version 1: expected a record of its training, got none\."):
        fetch_record(tracker, "smoke", 1)
    with pytest.raises(RegistryError, match="expected a version of the registry, got none"):
        fetch_record(tracker, "smoke", 99)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "argument 'version': expected the version to train again, got none. Add version=N."),
        (["version=1", "seed=2"], "override 'seed': expected a key that does not change what is learned, such as preprocessing.workers, got 2, which the version was not trained with. Leave it out."),
    ],
)  # fmt: skip
def test_an_impossible_replay_is_refused(smoke, command, home, words, sentence):
    code, result, _ = command(replay, CONFIG, *words, home=home)
    assert (code, result["error"]) == (1, sentence)
    assert not (home / "replays").exists()


def test_an_expired_snapshot_is_named(record):
    gone = record.model_copy(update={"snapshot": record.snapshot.model_copy(update={"snapshot_id": 7})})
    with pytest.raises(StorageError) as error:
        pin_replay(open_smoke(), gone, "smoke-1")
    assert str(error.value) == (
        "snapshot 7 of table 'smoke': expected a snapshot of the table, got none of that id. "
        "It may have expired. Use the current snapshot."
    )


def test_a_replay_names_the_version_that_is_gone(record, tmp_path, monkeypatch):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    workspace = open_smoke()
    tracker = workspace.tracking
    tracker.client.create_registered_model("smoke")
    for continues in (None, 1, 2):
        run_id = tracker.start("a day", {}, {}, None)
        tracker.log_json(run_id, record.model_copy(update={"continues": continues}).model_dump(mode="json"), RECORD)
        tags = {"record": f"runs:/{run_id}/{RECORD}", "run_folder": "cleared"}
        tracker.client.create_model_version("smoke", "somewhere", run_id, tags=tags)
    tracker.client.delete_model_version("smoke", "1")
    with pytest.raises(RegistryError) as error:
        replay_version(workspace, 3, {})
    assert str(error.value) == (
        "replay of model 'smoke', version 3: expected the versions that it continues, back to one with a checkpoint or "
        "from scratch, got no record of version 1. Retention has removed it, so this version cannot be replayed. Name "
        "a later one. To keep more: retention.runs_days, retention.versions_days, or recurring.scratch_every_days "
        "below them."
    )


@pytest.mark.slow
def test_a_replay_with_other_workers_has_the_same_weights(smoke, command, copied):
    tracker = open_smoke().tracking
    made = list_versions(tracker, "smoke")
    before = len(list_moves(tracker, "smoke")), tracker.client.get_registered_model("smoke").aliases
    workers = smoke["train"]["preprocessing"]["workers"] + 1
    words = [f"preprocessing.workers={workers}", "training.log_every_steps=10", "version=1"]
    code, result, log = command(replay, CONFIG, *words, home=copied)
    assert code == 0, log
    assert (result["status"], result["equal"]) == ("ok", True)
    assert result["weights_sha256"] == dict.fromkeys(("recorded", "replayed"), smoke["train"]["weights_sha256"])
    assert [line for line in result["differences"] if not line.startswith("commit")] == []
    assert result["train"]["preprocessing"]["workers"] == workers
    assert result["model"] == {"name": "smoke", "version": 1}
    assert (len(list_moves(tracker, "smoke")), tracker.client.get_registered_model("smoke").aliases) == before
    assert list_versions(tracker, "smoke") == made
    run = tracker.client.get_run(result["mlflow_run_id"])
    assert (run.info.status, run.info.run_name) == ("FINISHED", "replay of smoke version 1")
    assert (run.data.tags["dlrm.replay_of"], run.data.tags["dlrm.replay_equal"]) == ("smoke/1", "true")
    assert not (copied / "runs").exists()
    [folder] = (copied / "replays").iterdir()
    assert not (folder / "checkpoints").exists()

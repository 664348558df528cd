"""Finished work is not repeated unless its files are lost."""

import contextvars
import logging
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from flows.ingest import ingest
from pipeline.config import load
from pipeline.config.files import ROOT
from pipeline.data.joined.source import pin_sources
from pipeline.jobs.training import run
from pipeline.jobs.training.job import resolve_dataset, resolve_job, tag_inputs
from pipeline.jobs.workspace import Workspace
from pipeline.registration.versions import find_versions
from pipeline.transforms.joins import FeatureJoin
from storage.snapshot.days import IDENTITIES
from tests.homes import CONFIG, open_smoke

SMALL = {"source.generator.rows_per_day": 200, "source.generator.days": 2}


def test_a_second_training_of_a_model_waits_but_one_of_another_model_does_not(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    caplog.set_level(logging.INFO)
    order, moment = [], threading.Event()

    def second() -> None:
        with open_smoke().lock("training of model 'smoke'"):
            order.append("second")

    with open_smoke().lock("training of model 'smoke'"):
        with open_smoke().lock("training of model 'other'"):
            assert caplog.messages == []
        thread = threading.Thread(target=second)
        thread.start()
        while not caplog.messages:
            moment.wait(0.01)
        order.append("first")
    thread.join(10)
    assert order == ["first", "second"]
    assert caplog.messages == ["waiting: another training of model 'smoke' is running; this one starts when it ends"]


@pytest.fixture
def ingested(plain, tmp_path, monkeypatch):
    """Ingests a small table into its own folder and returns the result."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return lambda: ingest(config=CONFIG, overrides=SMALL)


def test_two_ingests_at_once_write_each_day_once(ingested):
    with ThreadPoolExecutor(2) as pool:
        results = list(pool.map(lambda context: context.run(ingested), [contextvars.copy_context() for _ in range(2)]))
    assert sorted(result["status"] for result in results) == ["ok", "skipped"]
    snapshots = open_smoke().warehouse.table("smoke").snapshots()
    assert len([one for one in snapshots if IDENTITIES in one.summary.additional_properties]) == 1


def test_side_tables_are_tagged_like_the_samples(ingested):
    snapshot, config = ingested()["snapshot_id"], load(CONFIG)
    warehouse, side = Workspace(config).warehouse, FeatureJoin(table="smoke_profile", on=("column",))
    for _ in range(2):
        tag_inputs(warehouse, "1234567890abcdef", warehouse.current("smoke"), pin_sources([side], ROOT, warehouse))
    held = {name: warehouse.current(name).snapshot_id for name in ("smoke", "smoke_profile")}
    assert held["smoke"] == snapshot
    for name, number in held.items():
        assert warehouse.table(name).refs()[f"train-1234567890ab-{number}"].snapshot_id == number


def test_finished_work_of_another_commit_says_so(at_home, monkeypatch, caplog):
    workspace = open_smoke()
    job = resolve_job(workspace, None, False)
    commit = run.load_result(workspace, job)["git_commit"]
    sentence = f"the code has changed since: that model is of commit {commit}"
    monkeypatch.setattr(run, "read_commit", lambda: commit)
    caplog.clear()
    assert run.load_result(workspace, job)["status"] == "skipped"
    assert sentence not in caplog.messages
    monkeypatch.setattr(run, "read_commit", lambda: "another")
    run.load_result(workspace, job)
    assert sentence in caplog.messages


def test_evaluation_rows_are_not_deduplicated(ingested):
    ingested()
    keys = {"preprocessing.session_column": "session_id", "preprocessing.deduplicate": ["list_*"]}
    config = load(CONFIG, keys | {"split.days": {"train": ["2025-01-06"], "test": ["2025-01-07"]}})
    _, data = resolve_dataset(Workspace(config), None)
    assert [data[part].shared for part in ("train", "test")] == [(7, 8, 9, 10, 11), ()]
    assert data["test"].session is None


@pytest.mark.nightly
@pytest.mark.parametrize("harm", [lambda file: file.unlink(), lambda file: file.write_bytes(file.read_bytes()[:-1])])
def test_a_day_with_a_lost_or_truncated_file_is_rewritten(ingested, tmp_path, harm):
    assert ingested()["days_written"] == 2
    [file] = (tmp_path / "warehouse" / "dlrm" / "smoke" / "data" / "day=2025-01-06").glob("*.parquet")
    harm(file)
    assert (lambda result: (result["days_written"], result["days_skipped"]))(ingested()) == (1, 1)
    assert ingested()["status"] == "skipped"
    rows = open_smoke().warehouse.day_rows(open_smoke().warehouse.current("smoke"))
    assert list(rows.values()) == [200, 200]


@pytest.mark.one_in(3)
@pytest.mark.parametrize("what", ["weights.safetensors", "model.json", "result.json"])
@pytest.mark.parametrize("harm", ["gone", "damaged"])
def test_a_version_with_lost_or_damaged_files_is_made_again(smoke, copied, what, harm):
    config = load(CONFIG)
    assert resolve_job(Workspace(config), None, False).done is not None
    tracker, found = Workspace(config).tracking, []
    for version, run_id in find_versions(tracker, "smoke", smoke["identity"]):
        model = tracker.client.get_model_version("smoke", str(version)).source.rpartition("/")[2]
        found += (copied / "mlflow").glob(f"**/{run_id if what == 'result.json' else model}/**/{what}")
    kept = {path: path.read_bytes() for path in found}
    assert kept
    try:
        for path, content in kept.items():
            path.unlink() if harm == "gone" else path.write_bytes(content[:-1] + b"\x00")
        assert resolve_job(Workspace(config), None, False).done is None
    finally:
        for path, content in kept.items():
            path.write_bytes(content)
    assert resolve_job(Workspace(config), None, False).done is not None

"""What `flows.clean` removes, and what it never does."""

import datetime
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlflow.exceptions import MlflowException

from pipeline.jobs.upkeep.clean import SCORES, _size, clean
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.cache.entries import RowColumn
from pipeline.preprocessing.cache.store import COLUMNS, ColumnStore
from pipeline.registration.aliases import CHALLENGER, CHAMPION, list_moves, list_spared, move_alias, rollback
from storage.config import name_apart
from storage.reader import SnapshotRef
from tests.homes import open_smoke, rows_of, write_days

AT_ONCE = 1e-9
"""Days."""
EVERYTHING = {
    "retention.runs_days": 1, "retention.versions_days": AT_ONCE, "retention.versions_kept": 0,
    "retention.mlflow_days": AT_ONCE, "retention.snapshots_days": AT_ONCE, "retention.leftovers_days": 1,
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return tmp_path


def test_only_what_removal_frees_counts(tmp_path: Path) -> None:
    """The weights of a run have a second name in its folder, and a third one in the registry."""
    (tmp_path / "run" / "model").mkdir(parents=True)
    (tmp_path / "run" / "weights").write_bytes(bytes(1_000))
    (tmp_path / "run" / "model" / "weights").hardlink_to(tmp_path / "run" / "weights")
    (tmp_path / "run" / "log").write_bytes(bytes(10))
    assert _size(tmp_path / "run") == 1_010
    (tmp_path / "registered").hardlink_to(tmp_path / "run" / "weights")
    assert (_size(tmp_path / "run"), _size(tmp_path / "registered")) == (10, 0)
    assert _size(tmp_path / "gone") == 0


def open_(**keys: Any) -> Workspace:
    return open_smoke(EVERYTHING, **keys)


def catalog(home: Path) -> dict[str, str]:
    """A catalog that several homes share."""
    return {"type": "sql", "uri": f"sqlite:///{home}/catalog.db", "warehouse": f"file://{home}/tables"}


def write_day(workspace: Workspace, rows: int) -> SnapshotRef:
    table = rows_of(datetime.date(2025, 1, 6), rows, user=list(range(rows)))
    return write_days(workspace.warehouse, table, name="smoke", identity=f"{rows}")


def train(workspace: Workspace, number: int, alias: str | None = None, model: str = "smoke") -> tuple[Path, str, str]:
    """Leaves what a training does: a tagged snapshot, a run's folder, an MLflow run with files, a version."""
    tracker, identity = workspace.tracking, f"{number:012}"
    snapshot = write_day(workspace, number)
    tag = f"train-{identity}-{snapshot.snapshot_id}"
    workspace.warehouse.tag(snapshot, tag)
    folder = workspace.home / "runs" / f"smoke-{identity}-0"
    (folder / "checkpoints").mkdir(parents=True)
    (folder / "weights.safetensors").write_bytes(bytes(1_000))
    run_id = tracker.start(f"training {number}", {}, {"mlflow.source.name": "flows.train"}, None)
    tracker.log_json(run_id, {"number": number}, "result.json")
    tracker.end(run_id, "FINISHED")
    if not tracker.client.search_registered_models(f"name = '{model}'"):
        tracker.client.create_registered_model(model)
    tags = {"identity": identity + "0" * 20, "run_folder": folder.name}
    version = tracker.client.create_model_version(model, "somewhere", run_id, tags=tags).version
    if alias is not None:
        tracker.client.set_registered_model_alias(model, alias, version)
    for path in (folder, *folder.rglob("*")):
        os.utime(path, (1e9, 1e9))
    return folder, run_id, tag


def tags_of(workspace: Workspace) -> set[str]:
    return set(workspace.warehouse.table("smoke").refs()) - {"main"}


def test_a_dry_run_lists_and_removes_nothing(home: Path) -> None:
    workspace = open_()
    left = [train(workspace, number) for number in (1, 2)]
    write_day(workspace, 3)
    result = clean(workspace, dry_run=True)
    assert (result["dry_run"], result["removed"]["versions"]["count"]) == (True, 2)
    assert result["removed"]["run folders"]["names"] == ("smoke-000000000001-0", "smoke-000000000002-0")
    assert result["bytes"] >= 2_000
    assert all(folder.exists() for folder, _, _ in left)
    assert tags_of(workspace) == {tag for _, _, tag in left}


def test_a_dry_run_counts_what_a_real_one_removes(home: Path) -> None:
    workspace = open_(retention__leftovers_days=AT_ONCE)
    for number in (1, 2, 3):
        train(workspace, number, "champion" if number == 2 else None)
    write_day(workspace, 4)
    verdict = home / "judged" / "smoke-2025-01-06.json"
    verdict.parent.mkdir()
    verdict.write_text("{}")
    for path in [*(home / "warehouse").rglob("*"), verdict]:
        os.utime(path, (1e9, 1e9))
    counts = [
        {kind: one["count"] for kind, one in clean(workspace, dry_run=dry_run)["removed"].items()}
        for dry_run in (True, False)
    ]
    assert counts[0] == counts[1]
    assert (counts[0]["tags of snapshots"], counts[0]["snapshots"], counts[0]["verdicts"]) == (2, 2, 1)
    assert counts[0]["files without a snapshot"] >= 2
    assert not verdict.exists()


def test_verdicts_of_other_models_and_young_ones_stay(home: Path) -> None:
    notes = [home / "judged" / f"{name}-2025-01-06.json" for name in ("smoke", "smoke-2", "other")]
    notes[0].parent.mkdir()
    for note in notes:
        note.write_text("{}")
    for note in notes[1:]:
        os.utime(note, (1e9, 1e9))
    clean(open_(), dry_run=False)
    assert all(note.exists() for note in notes)


def test_notes_of_each_night_go_with_its_runs(home: Path) -> None:
    old = [
        home / "reports" / "ingest-smoke-2025-01-01-2025-01-02" / "checks.json",
        home / "reports" / "consistency-smoke-2025-01-01-2025-01-02" / "served.json",
        home / "reads" / "smoke" / "20250101-050000-0123abcd.json",
        home / "plans" / "smoke" / "0123abcd.json",
    ]
    kept = [
        home / "reports" / "smoke-1.html",  # of flows.report: a person asked for it
        home / "reports" / "ingest-smoke_2-2025-01-01-2025-01-02" / "checks.json",
        home / "reads" / "other" / "20250101-050000-0123abcd.json",
        home / "plans" / "other" / "0123abcd.json",
    ]
    young = [
        home / "reports" / "ingest-smoke-2025-01-02-2025-01-02" / "checks.json",
        home / "reads" / "smoke" / "2.json",
    ]
    for path in (*old, *kept, *young):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("{}")
    for path in (*old, *kept):
        os.utime(path, (1e9, 1e9))
        os.utime(path.parent, (1e9, 1e9))
    clean(open_(retention__runs_days=None), dry_run=False)
    assert all(path.exists() for path in old)
    removed = clean(open_(), dry_run=False)["removed"]
    kinds = ("reports of ingests", "reports of consistency", "records of reads", "fitted plans")
    assert [removed[kind]["count"] for kind in kinds] == [1, 1, 1, 1]
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in (*kept, *young))


@pytest.mark.slow
def test_moves_of_aliases_go_but_those_that_rollbacks_need(home: Path) -> None:
    workspace = open_()
    tracker = workspace.tracking
    for number in range(1, 7):
        train(workspace, number)
    for number in range(1, 6):
        move_alias(tracker, "smoke", CHALLENGER, number + 1, "gate", "new")
        move_alias(tracker, "smoke", CHAMPION, number, "gate", "better")
    rollback(tracker, "smoke")  # to 4
    before = list_moves(tracker, "smoke")
    spared = {version.version for version in list_spared(tracker)}
    assert (
        clean(open_(retention__versions_kept=len(before) - 2), dry_run=False)["removed"]["moves of aliases"]["count"]
        == 2
    )
    assert clean(open_(retention__versions_days=None), dry_run=False)["removed"]["moves of aliases"]["count"] == 0
    assert list_moves(tracker, "smoke") == before[2:]
    clean(workspace, dry_run=False)
    left = list_moves(tracker, "smoke")
    assert 0 < len(left) < len(before) - 2
    assert {version.version for version in list_spared(tracker)} == spared
    assert [rollback(tracker, "smoke").version for _ in range(2)] == [3, 2]


def test_everything_that_is_not_kept_goes(home: Path) -> None:
    workspace = open_()
    left = [train(workspace, number) for number in (1, 2)]
    newest = write_day(workspace, 3)
    clean(workspace, dry_run=False)
    client, table = workspace.tracking.client, workspace.warehouse.table("smoke")
    assert (list((home / "runs").iterdir()), client.search_model_versions()) == ([], [])
    assert [one.snapshot_id for one in table.snapshots()] == [newest.snapshot_id]
    for _, run_id, _ in left:
        with pytest.raises(MlflowException, match="not found"):
            client.get_run(run_id)
    assert not list((home / "mlflow").rglob("result.json"))
    assert clean(workspace, dry_run=False)["status"] == "skipped"


def test_a_table_of_others_is_opened_once_for_all_tables_that_are_cleaned(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A company's catalog has thousands, each a request."""
    workspace = open_()
    table = rows_of(datetime.date(2025, 1, 6), 1, user=[1])
    for name in ("smoke", "smoke_scores", "theirs"):
        write_days(workspace.warehouse, table, name=name)
    catalog, opened = workspace.warehouse.catalog, list[str]()
    load_table = catalog.load_table
    monkeypatch.setattr(catalog, "load_table", lambda name: opened.append(name[-1]) or load_table(name))
    clean(workspace, dry_run=False)
    assert opened.count("theirs") == 1


def test_columns_that_no_run_has_used_for_long_go(home: Path) -> None:
    workspace = open_()
    write_day(workspace, 1)
    folder = workspace.warehouse.home / COLUMNS
    store = ColumnStore(folder, 1 << 20)
    for rows in ("old", "new"):
        store.save(rows, {"a": RowColumn(np.ones(10, np.float32))})
    os.utime(next((folder / "old").iterdir()), (0, 0))
    assert clean(workspace, dry_run=True)["removed"]["cached columns"]["count"] == 1
    assert clean(workspace, dry_run=False)["removed"]["cached columns"]["count"] == 1
    assert sorted(path.name for path in folder.iterdir()) == ["lock", "new"]
    assert store.load("new", ["a"])["a"].values.tolist() == [1.0] * 10


@pytest.mark.slow
def test_work_of_others_stays(home: Path) -> None:
    """A run that somebody made in the experiment by hand, and another team's table of features with our tag."""
    source = {"table": "stats", "on": "user"}
    workspace = open_(features__joined=[source])
    table = rows_of(datetime.date(2025, 1, 6), user=[1])
    kept = [write_days(workspace.warehouse, table, name="stats", identity=f"{number}") for number in range(2)]
    train(workspace, 1)
    tag = f"train-{1:012}-{kept[0].snapshot_id}"
    workspace.warehouse.tag(kept[0], tag)
    write_day(workspace, 2)
    client, tracker = workspace.tracking.client, workspace.tracking
    theirs = client.create_run(tracker.experiment_id).info.run_id
    client.set_terminated(theirs)
    clean(workspace, dry_run=False)
    stats = workspace.warehouse.table("stats")
    assert [one.snapshot_id for one in stats.snapshots()] == [one.snapshot_id for one in kept]
    assert set(stats.refs()) == {"main", tag}
    assert tags_of(workspace) == set(), "its tag on our own table goes"
    assert client.get_run(theirs).info.lifecycle_stage == "active"


def test_the_tags_of_another_home_of_the_catalog_stay(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither its versions nor its folders can be seen from here."""
    monkeypatch.delenv("DLRM_HOME")
    there = open_(home=f"{home}/theirs", warehouse__catalog=catalog(home))
    here = open_(home=f"{home}/ours", warehouse__catalog=catalog(home))
    _, _, theirs = train(there, 1)
    train(here, 2)
    write_day(here, 3)
    result = clean(here, dry_run=False)
    assert result["removed"]["tags of snapshots"]["count"] == 1
    assert tags_of(there) == {theirs}
    clean(there, dry_run=False)
    assert tags_of(there) == set()


def test_the_tag_of_another_config_that_joins_the_table_stays(home: Path) -> None:
    workspace = open_()
    folder, _, tag = train(workspace, 1)
    folder.rename(folder.with_name(folder.name.replace("smoke", "weekly")))
    write_day(workspace, 2)
    clean(workspace, dry_run=False)
    assert tags_of(workspace) == {tag}


def test_the_next_clean_drops_the_tags_that_a_killed_one_left(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = open_()
    train(workspace, 1)
    write_day(workspace, 2)
    with monkeypatch.context() as patch:
        patch.setattr("pipeline.jobs.upkeep.clean.drop_tags", lambda *_: pytest.fail("killed"))
        with pytest.raises(pytest.fail.Exception, match="killed"):
            clean(workspace, dry_run=False)
    assert len(tags_of(workspace)) == 1
    assert not workspace.tracking.client.search_model_versions()
    clean(workspace, dry_run=False)
    assert tags_of(workspace) == set()


def test_the_tag_of_a_search_goes_after_its_folder(home: Path) -> None:
    workspace = open_()
    snapshot = write_day(workspace, 1)
    tag = f"train-{1:012}-{snapshot.snapshot_id}"
    workspace.warehouse.tag(snapshot, tag)
    folder = home / "sweeps" / f"smoke-{1:012}-0"
    folder.mkdir(parents=True)
    write_day(workspace, 2)
    clean(workspace, dry_run=False)
    assert tags_of(workspace) == {tag}
    folder.rmdir()
    clean(workspace, dry_run=False)
    assert tags_of(workspace) == set()


@pytest.mark.parametrize("model", ["smoke", "weekly"])
def test_what_an_alias_of_any_model_names_stays_whole(home: Path, model: str) -> None:
    workspace = open_()
    train(workspace, 1)
    folder, run_id, tag = train(workspace, 2, "champion", model)
    train(workspace, 3)
    clean(workspace, dry_run=False)
    assert (folder / "weights.safetensors").exists()
    assert workspace.tracking.client.get_run(run_id).info.status == "FINISHED"
    assert workspace.tracking.read_json(run_id, "result.json") == {"number": 2}
    assert tags_of(workspace) == {tag}
    assert [path.name for path in (home / "runs").iterdir()] == [folder.name]


def test_a_champion_that_lost_its_alias_tonight_stays_for_a_rollback(home: Path) -> None:
    """Also its folder, which daily training would go on from."""
    workspace = open_()
    left = [train(workspace, number) for number in range(1, 6)]
    for number in (1, 2, 4, 5):
        move_alias(workspace.tracking, "smoke", CHAMPION, number, "gate", "better")
    clean(workspace, dry_run=False)
    assert [folder.exists() for folder, _, _ in left] == [False, True, False, True, True]
    assert [rollback(workspace.tracking, "smoke").version for _ in range(2)] == [4, 2]


def test_files_that_a_copy_of_a_version_shares_stay(home: Path) -> None:
    workspace = open_()
    tracker = workspace.tracking
    model = tracker.client.create_logged_model(tracker.experiment_id, "model")
    place = Path(model.artifact_location.removeprefix("file://"))
    place.mkdir(parents=True)
    (place / "weights").touch()
    for name in ("smoke", "production"):
        tracker.client.create_registered_model(name)
    tracker.client.create_model_version("smoke", f"models:/{model.model_id}", model_id=model.model_id)
    tracker.client.copy_model_version("models:/smoke/1", "production")
    write_day(workspace, 1)
    clean(workspace, dry_run=False)
    assert not tracker.client.search_model_versions("name = 'smoke'")
    assert (place / "weights").exists()


def test_the_newest_versions_stay_for_a_rollback(home: Path) -> None:
    workspace = open_(retention__versions_kept=2)
    left = [train(workspace, number) for number in (1, 2, 3)]
    clean(workspace, dry_run=False)
    versions = workspace.tracking.client.search_model_versions()
    assert sorted(int(version.version) for version in versions) == [2, 3]
    assert tags_of(workspace) == {tag for _, _, tag in left[1:]}


def test_young_work_and_work_in_progress_stay(home: Path) -> None:
    workspace = open_()
    folder, _, tag = train(workspace, 1)
    (folder / "weights.safetensors").touch()
    (home / "tmp" / "ingest-new").mkdir(parents=True)
    clean(workspace, dry_run=False)
    assert folder.exists()
    assert tags_of(workspace) == {tag}
    assert (home / "tmp" / "ingest-new").exists()


def test_spill_files_of_killed_work_go(home: Path) -> None:
    for root in ("tmp", "warehouse/tmp"):
        (home / root / "ingest-abc").mkdir(parents=True)
        (home / root / "ingest-abc" / "spill").write_bytes(bytes(100))
        for path in ((home / root / "ingest-abc"), (home / root / "ingest-abc" / "spill")):
            os.utime(path, (1e9, 1e9))
    workspace = open_()
    write_day(workspace, 1)
    assert clean(workspace, dry_run=False)["removed"]["temporary files"]["count"] == 2
    assert not list((home / "tmp").iterdir())


def test_none_keeps_a_kind_for_ever(home: Path) -> None:
    kinds = ("runs_days", "versions_days", "mlflow_days", "snapshots_days")
    workspace = open_(**{f"retention__{kind}": None for kind in kinds})
    folder, run_id, tag = train(workspace, 1)
    clean(workspace, dry_run=False)
    assert (folder.exists(), tags_of(workspace)) == (True, {tag})
    assert workspace.tracking.client.get_run(run_id)
    assert len(workspace.tracking.client.search_model_versions()) == 1


@pytest.mark.parametrize("model", ["small", "Small model", "模型"])
@pytest.mark.parametrize("version", [None, 3])
def test_tables_of_scores_of_any_model_belong_to_the_table_alone(model: str, version: int | None) -> None:
    for table in ("smoke", "my__smoke", "my_smoke"):
        key = name_apart(table, model)
        found = SCORES.fullmatch((key if version is None else name_apart(key, f"v{version}")) + "_scores")
        assert found is not None
        assert found["table"] == table
    assert not any(map(SCORES.fullmatch, ("smoke_scores", "smoke__v3_scores", "smoke__small_0123456_scores")))

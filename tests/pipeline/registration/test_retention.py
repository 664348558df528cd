"""Old MLflow runs are found until they are gone, and not again."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.registration import retention
from pipeline.registration.config import RegistrationConfig
from pipeline.registration.retention import list_all_versions, list_old_runs, list_old_versions, remove_run
from pipeline.registration.tracking import Tracker

LATER = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=1)


@pytest.fixture
def tracker(tmp_path: Path) -> Tracker:
    return Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{tmp_path}/mlflow.db"), tmp_path, "retention")


def ended(tracker: Tracker) -> str:
    run_id = tracker.start("r", {}, {"mlflow.source.name": "flows.train"}, None)
    tracker.log_json(run_id, {}, "result.json")
    tracker.end(run_id, "FINISHED")
    return run_id


def test_runs_of_a_database_are_erased_with_their_files_also_those_that_somebody_deleted(
    tracker: Tracker, tmp_path: Path
) -> None:
    first, second, spared = (ended(tracker) for _ in range(3))
    tracker.client.delete_run(first)
    found = list(list_old_runs(tracker, LATER))
    assert {run.info.run_id for run in found} == {first, second, spared}
    for run in found:
        if run.info.run_id != spared:
            remove_run(tracker, run)
    assert [run.info.run_id for run in list_old_runs(tracker, LATER)] == [spared]
    assert [path.parents[1].name for path in tmp_path.rglob("result.json")] == [spared]


def test_a_server_is_asked_for_runs_that_it_has_not_marked_as_deleted(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps them until its own `mlflow gc`: they were deleted again every night."""
    first, second = ended(tracker), ended(tracker)
    tracker.client.delete_run(first)
    server: Any = tracker
    monkeypatch.setattr(server, "uri", "http://mlflow.example")
    assert [run.info.run_id for run in list_old_runs(server, LATER)] == [second]


@pytest.mark.parametrize("kept", [1, 3, 8, 20])
def test_old_versions_are_those_that_a_list_of_all_says(
    kept: int, tracker: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the model alone. It asks for no more pages than it needs."""
    monkeypatch.setattr(retention, "PAGE", 2)
    tracker.client.create_registered_model("m")
    tracker.client.create_registered_model("other")
    for number in range(12):
        tracker.client.create_model_version("m" if number % 4 else "other", f"{tmp_path}/{number}")
    every = list_all_versions(tracker, "m")
    assert [int(one.version) for one in every] == list(range(1, 10))
    asked: list[str | None] = []
    search = tracker.client.search_model_versions
    monkeypatch.setattr(
        tracker.client, "search_model_versions", lambda *a, **k: asked.append(k["page_token"]) or search(*a, **k)
    )
    for border in (0, 4, 9):
        after = every[border].creation_timestamp if border < len(every) else every[-1].creation_timestamp + 1
        before = datetime.datetime.fromtimestamp(after / 1e3, datetime.UTC)
        old = [one.version for one in every[: max(0, len(every) - kept)] if one.creation_timestamp < after]
        asked.clear()
        assert [one.version for one in list_old_versions(tracker, "m", kept, before)] == old
        assert len(asked) <= (border + kept) // 2 + 2

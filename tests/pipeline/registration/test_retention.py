"""Old MLflow runs are found until they are gone, and not again."""

import datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.registration.config import RegistrationConfig
from pipeline.registration.retention import list_old_runs, remove_run
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
    found = list(list_old_runs(tracker, [spared], LATER))
    assert {run.info.run_id for run in found} == {first, second}
    for run in found:
        remove_run(tracker, run)
    assert list(list_old_runs(tracker, [spared], LATER)) == []
    assert [path.parents[1].name for path in tmp_path.rglob("result.json")] == [spared]


def test_a_server_is_asked_for_runs_that_it_has_not_marked_as_deleted(
    tracker: Tracker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It keeps them until its own `mlflow gc`: they were deleted again every night."""
    first, second = ended(tracker), ended(tracker)
    tracker.client.delete_run(first)
    server: Any = tracker
    monkeypatch.setattr(server, "uri", "http://mlflow.example")
    assert [run.info.run_id for run in list_old_runs(server, [], LATER)] == [second]

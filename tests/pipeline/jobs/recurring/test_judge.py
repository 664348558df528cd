"""A day's verdict where the registry has changed since it was made."""

import datetime
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.evaluation.gate import Verdict
from pipeline.jobs.recurring import judge
from pipeline.jobs.recurring.day import ChampionVersion, Today
from pipeline.jobs.recurring.judge import DayVerdict, judge_challenger
from pipeline.jobs.workspace import Workspace
from pipeline.registration.aliases import CHALLENGER, CHAMPION, find_holder, move_alias
from pipeline.registration.tracking import RESULT
from tests.homes import open_smoke, rows_of, write_days

DAY, BEFORE = datetime.date(2025, 1, 9), datetime.date(2025, 1, 8)
Scoring = Callable[[], None]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """Opens a workspace with a table of one day and two versions: the champion, and one that waits for its verdict."""
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    monkeypatch.setattr(judge, "write_pages", lambda *_: None)  # the runs hold no report
    found = open_smoke(name="toy")
    write_days(found.warehouse, rows_of(DAY, user=[1]), name="toy")
    register(found, 2)
    return found


def register(workspace: Workspace, versions: int) -> None:
    tracker = workspace.tracking
    tracker.client.create_registered_model("toy")
    for number in range(1, versions + 1):
        run_id = tracker.start("a training", {}, {}, None)
        tracker.log_json(run_id, {"train": {"steps": 1}, "model": {"name": "toy", "version": number}}, RESULT)
        tags = {"day": f"{BEFORE}", "trained_to": f"{BEFORE}", "trained_from": "1"}
        tracker.client.create_model_version("toy", "somewhere", run_id, tags=tags)
    move_alias(tracker, "toy", CHAMPION, 1, "gate", "")
    move_alias(tracker, "toy", CHALLENGER, 2, "gate", "")


def judge_day(workspace: Workspace, monkeypatch: pytest.MonkeyPatch, gate: str, meanwhile: Scoring) -> Verdict | None:
    """Judges version 2 on the day with champion 1. Scoring does something else, and leads to a decision of the gate."""
    champion = ChampionVersion(version=1, trained_to=BEFORE, scratch_day=BEFORE, run_folder="-")
    today = Today(
        day=DAY, champion=champion, snapshot=workspace.warehouse.current("toy"), new_days=(), new_rows=0,
        scratch_days=(), done=None, identity="-", rows=1, rewritten_days=0,
    )  # fmt: skip

    def score(*_: object) -> DayVerdict:
        meanwhile()
        found = Verdict.model_validate({"decision": gate, "reason": "NE differs.", "champion": 1})
        work = judge._name_work(workspace, today, 2, 1)
        return DayVerdict(day=DAY, challenger=2, champion=1, gate=found, quality={}, work=work)

    monkeypatch.setattr(judge, "_judge", score)
    verdict = judge_challenger(workspace, today, workspace.home / "models")
    return verdict.gate if verdict else None


def result_of(workspace: Workspace, version: int) -> dict[str, object]:
    tracker = workspace.tracking
    return tracker.load_result(str(tracker.client.get_model_version("toy", f"{version}").run_id))


@pytest.mark.parametrize("taken_away", [False, True])
def test_a_champion_that_a_person_moved_while_the_judge_scored_stays(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, taken_away: bool
) -> None:
    tracker = workspace.tracking
    tracker.client.create_model_version("toy", "somewhere")

    def intervene() -> None:
        if taken_away:
            tracker.client.delete_registered_model_alias("toy", CHAMPION)
        else:
            move_alias(tracker, "toy", CHAMPION, 3, "person", "a better one")

    gate = judge_day(workspace, monkeypatch, "promote", intervene)
    changed = "The champion was taken away" if taken_away else "Version 3 became champion"
    assert gate is not None
    assert (gate.decision, gate.reason) == ("hold", f"{changed} meanwhile. NE differs.")
    assert [find_holder(tracker, "toy", alias) for alias in (CHAMPION, CHALLENGER)] == [None if taken_away else 3, 2]
    result = result_of(workspace, 2)
    assert (result["gate"], result["model"]) == (gate.model_dump(), {"name": "toy", "version": 2, "alias": CHALLENGER})
    assert tracker.client.get_model_version("toy", "2").tags["gate"] == "hold"


@pytest.mark.parametrize("decision", ["promote", "hold", "reject"])
def test_a_challenger_that_a_person_promoted_while_the_judge_scored_stays_champion(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, decision: str
) -> None:
    tracker = workspace.tracking
    gate = judge_day(
        workspace, monkeypatch, decision, lambda: void(move_alias(tracker, "toy", CHAMPION, 2, "person", ""))
    )
    assert gate is not None
    assert gate.decision == decision
    assert [find_holder(tracker, "toy", alias) for alias in (CHAMPION, CHALLENGER)] == [2, None]
    assert result_of(workspace, 2)["model"] == {"name": "toy", "version": 2, "alias": CHAMPION}


def test_a_verdict_is_kept_for_the_same_work_only(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """A verdict on versions 1 and 2 is in the home. Then the registry counts anew, or the gate has another rule."""
    scored: list[str] = []

    def judge_once(where: Workspace, decision: str) -> int | None:
        judge_day(where, monkeypatch, decision, lambda: scored.append(decision))
        return find_holder(where.tracking, "toy")

    assert (judge_once(workspace, "hold"), scored) == (1, ["hold"])
    assert (judge_once(workspace, "promote"), scored) == (1, ["hold"])  # of an interrupted attempt
    stricter = open_smoke(name="toy", gate__level=0.01)
    assert (judge_once(stricter, "hold"), scored) == (1, ["hold", "hold"])
    workspace.tracking.client.delete_registered_model("toy")
    register(workspace, 2)
    assert (judge_once(stricter, "promote"), scored) == (2, ["hold", "hold", "promote"])


def void(_: object) -> None: ...

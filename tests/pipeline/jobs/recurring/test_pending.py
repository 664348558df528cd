"""Which days a champion is to be trained on next."""

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from pipeline.config import load
from pipeline.data.config import HashSplit, SplitConfig
from pipeline.data.day_notes import INGEST, DayNote, InputFiles
from pipeline.data.present import today
from pipeline.errors import keep_if_failed
from pipeline.evaluation.policy import Policy, decide
from pipeline.jobs.notify import list_messages
from pipeline.jobs.recurring import pending, run
from pipeline.jobs.recurring.day import Today, find_next_days, identity_of_day, pin_day
from pipeline.jobs.recurring.pending import find_open, find_pending
from pipeline.jobs.recurring.run import train_day, train_new_days
from pipeline.jobs.training.provenance import RECORD, Record
from pipeline.jobs.workspace import Workspace
from pipeline.registration.tracking import RESULT
from storage.layout.rewrite import rewrite_days
from tests.homes import open_smoke, write_days

SPLIT = {"hash": {"key": "user", "shares": {"train": 0.8, "test": 0.2}, "days": ["2025-01-01..2025-01-02"]}}


def january(day: int) -> datetime.date:
    return datetime.date(2025, 1, day)


@pytest.fixture
def workspace(tmp_path, monkeypatch) -> Workspace:
    monkeypatch.setenv("DLRM_HOME", str(tmp_path))
    return open_smoke({"name": "mornings", "split": SPLIT})


def write(workspace: Workspace, *days: int, rows: int = 5, still_open: bool = False) -> None:
    """Writes days with some rows, as an ingest does.

    Args:
        still_open: Notes that outcomes may be missing.
    """
    dates = [january(day) for day in days for _ in range(rows)]
    table = pa.table({"day": pa.array(dates, pa.date32()), "user": list(range(len(dates)))})
    none = InputFiles(count=0, bytes=0, stamps=())
    note = {INGEST: DayNote(open=still_open, rows=none, outcomes=none, definition="").model_dump(mode="json")}
    write_days(workspace.warehouse, table, name="mornings", identity=f"{rows}", notes=dict.fromkeys(dates, note))


def promote(workspace: Workspace, trained_to: int) -> None:
    """Registers a champion that has learned all days of the table up to one, as they are now."""
    warehouse, tracker, name = workspace.warehouse, workspace.tracking, workspace.config.model_name
    snapshot = warehouse.current("mornings")
    learned = {f"{day}": text for day, text in warehouse.day_contents(snapshot).items() if day <= january(trained_to)}
    empty: dict[str, Any] = {"seeds": {}, "config": {}, "versions": {}, "placement": ()}
    texts = dict.fromkeys(("snapshot_tag", "plan_hash", "device", "commit", "lock_hash", "weights_sha256"), "-")
    record = Record(identity="-", snapshot=snapshot, world_size=1, threads_per_rank=1, days=learned, **empty, **texts)
    run_id = tracker.start("a training", {}, {}, None)
    tracker.log_json(run_id, record.model_dump(mode="json"), RECORD)
    if not tracker.client.search_registered_models():
        tracker.client.create_registered_model(name)
    tags = {"trained_to": f"{january(trained_to)}", "scratch_day": "2025-01-01", "run_folder": "none"}
    tags |= {"record": f"runs:/{run_id}/{RECORD}"}
    version = tracker.client.create_model_version(name, "somewhere", run_id, tags=tags).version
    tracker.client.set_registered_model_alias(name, "champion", version)


def training_of(today: Today) -> str:
    return decide(Policy(), today.make_standing(0.9, 1.0), today.day).training


def test_every_row_of_every_day_is_trained_on_though_mornings_see_part_of_a_day(workspace: Workspace) -> None:
    """At 05:00 the table has a tenth of the running day. The next morning it has all of it."""
    write(workspace, 1, rows=40)
    promote(workspace, 1)
    trained: dict[int, int] = {}
    for morning in (3, 4, 5):
        write(workspace, morning - 1, rows=40)
        write(workspace, morning, rows=4)
        found = find_next_days(workspace)
        assert (found.open, found.changed) == ((january(morning),), ())
        for day in found.closed:
            trained[day.day] = pin_day(workspace, day, force=False).new_rows
            promote(workspace, day.day)
    assert trained == {2: 40, 3: 40, 4: 40}


@pytest.mark.parametrize("ahead", [1, 2, 5_000])
def test_a_row_of_the_future_closes_no_day(workspace: Workspace, ahead: int) -> None:
    """The running day has a tenth of its rows, and one row has a wrong clock."""
    day = datetime.timedelta(days=1)
    write(workspace, 1, rows=40)
    promote(workspace, 1)
    for count, date in ((40, today() - 2 * day), (40, today() - day), (4, today()), (1, today() + ahead * day)):
        rows = pa.table({"day": pa.array([date] * count, pa.date32()), "user": list(range(count))})
        write_days(workspace.warehouse, rows, name="mornings")
    found = find_next_days(workspace)
    assert found.closed == (today() - 2 * day, today() - day)
    assert (found.open, found.newest) == ((today(), today() + ahead * day), today() - day)


def test_a_day_of_the_future_closes_no_day_before_today() -> None:
    now = datetime.datetime(2025, 1, 9, 5, tzinfo=datetime.UTC)
    assert find_open([january(3), january(4), january(30)], None, now) == {january(4), january(30)}
    assert find_open([january(30)], None, now) == {january(30)}


def test_missed_days_are_caught_up_in_order(workspace: Workspace) -> None:
    write(workspace, 1, 2)
    promote(workspace, 2)
    write(workspace, 6, 4, 3, 5)
    assert find_next_days(workspace).closed == (january(3), january(4), january(5))


def test_days_wait_for_their_outcomes_unless_told(workspace: Workspace) -> None:
    write(workspace, 1, 2)
    promote(workspace, 2)
    write(workspace, 3, 5, 6)
    write(workspace, 4, still_open=True)
    found = find_next_days(workspace)
    assert (found.closed, found.open, found.waiting) == ((january(3),), (january(4), january(6)), (january(5),))
    assert pin_day(workspace, january(5), force=False).new_days == (january(3), january(5))
    told = Workspace(load(workspace.config, {"split.open_days": True}))
    assert find_next_days(told).closed == (january(3), january(4), january(5))
    assert find_next_days(told).waiting == ()


def test_a_run_says_which_closed_days_wait(workspace: Workspace, caplog: pytest.LogCaptureFixture) -> None:
    """It said that the champion had learned all closed days."""
    write(workspace, 1, 2)
    promote(workspace, 2)
    write(workspace, 4, 5, 6)
    write(workspace, 3, still_open=True)
    result = train_new_days(workspace, scratch=False, force=False)
    assert (result["status"], result["waiting_days"]) == ("skipped", ["2025-01-04", "2025-01-05"])
    assert "closed days wait for an open one before them: 2025-01-04, 2025-01-05" in caplog.text
    assert "has learned all days" not in caplog.text


def test_a_day_that_changed_after_it_was_learned_is_new_again(workspace: Workspace) -> None:
    write(workspace, 1, 2, 3, 4)
    promote(workspace, 4)
    write(workspace, 3, rows=9)
    write(workspace, 5, 6)
    assert find_next_days(workspace).changed == (january(3),)
    today = pin_day(workspace, january(5), force=False)
    assert (today.new_days, today.new_rows) == ((january(3), january(5)), 14)


def test_a_history_that_was_rewritten_is_learned_once_from_scratch(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pending, "FEW_DAYS", 1)
    write(workspace, 1, 2, 3, 4)
    promote(workspace, 4)
    write(workspace, 2, 3, rows=9)
    write(workspace, 5, 6)
    half = pin_day(workspace, january(5), force=False)
    assert (half.rewritten_days, training_of(half)) == (0, "incremental")
    write(workspace, 1, rows=9)
    most = pin_day(workspace, january(5), force=False)
    assert (most.rewritten_days, training_of(most)) == (3, "scratch")
    assert most.scratch_days == tuple(january(day) for day in range(1, 6))
    quiet = decide(Policy(every_days=None), most.make_standing(0.9, 1.0), january(5))
    assert quiet.training == "none", "the policy asks for no training"


@pytest.mark.parametrize(("learned", "changed", "rewritten"), [(40, 30, False), (40, 31, True), (1_000, 500, False)])
def test_a_few_changed_days_are_no_rewritten_history(learned: int, changed: int, rewritten: bool) -> None:
    days = [january(1) + datetime.timedelta(days=number) for number in range(learned)]
    now = {day: "other" if number < changed else "same" for number, day in enumerate(days)}
    split = SplitConfig(hash=HashSplit(key="user", shares={"train": 0.8, "test": 0.2}))
    found = find_pending(now, {f"{day}": "same" for day in days}, days[-1], [], split)
    assert (len(found.changed), found.rewritten) == (changed, rewritten)


def test_a_day_that_arrives_late_is_new(workspace: Workspace) -> None:
    write(workspace, 1, 2, 4)
    promote(workspace, 4)
    write(workspace, 3)
    assert find_next_days(workspace).changed == (january(3),)


def test_a_run_that_leaves_changed_days_for_later_is_not_skipped(workspace: Workspace) -> None:
    write(workspace, 1, 2, 3, 4)
    promote(workspace, 3)
    assert train_new_days(workspace, scratch=False, force=False)["status"] == "skipped"
    write(workspace, 2, rows=9)
    result = train_new_days(workspace, scratch=False, force=False)
    assert (result["status"], result["changed_days"], result["open_days"]) == ("ok", ["2025-01-02"], ["2025-01-04"])


def test_days_before_one_that_fails_are_told(workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    """As are days that were held back before the training, each once."""

    def work(workspace: Workspace, day: datetime.date, scratch: bool, force: bool) -> dict[str, Any]:
        if day == january(4):
            raise TimeoutError("no answer")
        gate = {"decision": "reject", "reason": "NE is higher."}
        return {"status": "ok", "day": f"{day}", "model": {"name": "days", "version": day.day}, "gate": gate}

    write(workspace, 1, 2, 3, 4, 5, 6)
    promote(workspace, 1)
    monkeypatch.setattr(run, "train_day", work)
    monkeypatch.setattr(run, "list_untested", lambda *_: [])
    with pytest.raises(TimeoutError) as caught, keep_if_failed(held=["2025-01-09"]):
        train_new_days(workspace, scratch=False, force=False)
    finished: Any = vars(caught.value)["finished"]
    found = [one for result in finished for one in list_messages("recurring", "days", result, (0.8, 1.25))]
    assert [(one.kind, one.cause) for one in found] == [
        ("rejection", "days 2"), ("rejection", "days 3"), ("held", "days 2025-01-09"),
    ]  # fmt: skip


def test_a_named_day_that_was_written_again_is_not_skipped(
    workspace: Workspace, caplog: pytest.LogCaptureFixture
) -> None:
    write(workspace, 1, 2, 3)
    promote(workspace, 3)
    tracker, name = workspace.tracking, workspace.config.model_name
    tracker.client.set_model_version_tag(name, "1", "identity", identity_of_day(workspace, january(3)))
    run_id = str(tracker.client.get_model_version(name, "1").run_id)
    tracker.log_json(run_id, {"status": "ok", "model": {"version": 1}}, RESULT)
    assert train_day(workspace, january(3), False, False) == {"status": "skipped", "model": {"version": 1}}
    write(workspace, 3, rows=9)
    found = train_day(workspace, january(3), False, False)
    assert found == {"status": "ok", "model": {"version": 1}, "changed_days": ["2025-01-03"]}
    assert "2025-01-03 changed after version 1 was trained on it; the next training takes it again" in caplog.text


def test_the_same_rows_in_other_files_are_not_new(workspace: Workspace, tmp_path: Path) -> None:
    write(workspace, 1, 2, 3)
    promote(workspace, 3)
    table = workspace.warehouse
    before = table.day_names(table.current("mornings"))
    rewrite_days(table, "mornings", [january(2)], tmp_path)
    assert table.day_names(table.current("mornings")) != before
    assert find_next_days(workspace).changed == ()


def test_days_that_the_config_leaves_out_are_not_new() -> None:
    split = SplitConfig(
        hash=HashSplit(key="user", shares={"train": 0.8, "test": 0.2}, days=("2025-01-01", "2025-01-03"))
    )
    contents = {january(day): "same" for day in range(1, 6)}
    found = find_pending(contents, {"2025-01-01": "same", "2025-01-03": "same"}, january(3), [january(5)], split)
    assert (found.changed, found.closed, found.newest) == ((), (january(4),), january(4))


def test_days_without_a_row_to_test_on_are_trained_on_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Else the first such day would end every night: here each of ten days has the one row of a user of its own."""
    monkeypatch.delenv("DLRM_HOME", raising=False)
    sparse = {"columns": ["user"], "transforms": [{"kind": "sigrid_hash", "size": 16}]}
    values = {"name": "mornings", "home": str(tmp_path), "source": {"path": "none.parquet", "day": "2025-01-01"}}
    values |= {"features": {"sparse": [sparse]}, "split": SPLIT, "model": {"interaction": "cat"}}
    space = Workspace(load(values))
    rows = [(1, user, user % 2) for user in range(40)] + [(day, 100 + day, 0) for day in range(2, 12)] + [(12, 0, 1)]
    days, users, labels = zip(*rows, strict=True)
    table = pa.table({"day": pa.array(map(january, days), pa.date32()), "user": users, "label": labels})
    write_days(space.warehouse, table, name="mornings")
    promote(space, 1)
    worked: list[datetime.date] = []

    def work(workspace: Workspace, day: datetime.date, scratch: bool, force: bool) -> dict[str, Any]:
        worked.append(day)
        return {"status": "ok", "day": f"{day}", "model": None}

    monkeypatch.setattr("pipeline.jobs.recurring.run.train_day", work)
    train_new_days(space, scratch=False, force=False)
    closed = [january(day) for day in range(2, 12)]
    untested = [day for day in closed if day not in worked]
    assert worked == sorted(worked)
    assert 0 < len(untested) < 10
    assert "no row is in the test part of " in caplog.text
    assert set(pin_day(space, worked[-1], force=False).new_days) == {day for day in closed if day <= worked[-1]}

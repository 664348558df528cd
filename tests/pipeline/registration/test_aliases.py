"""Moves of aliases and their records, one after another and two at once."""

import datetime
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
from mlflow.exceptions import MlflowException
from mlflow.store.model_registry.dbmodels.models import SqlModelVersion
from sqlalchemy import event

from pipeline.errors import RegistryError
from pipeline.registration import aliases
from pipeline.registration.aliases import (
    CHALLENGER,
    CHAMPION,
    MOVE,
    Move,
    choose_version,
    find_holder,
    list_moves,
    list_spared,
    lost_champion,
    move_alias,
    rollback,
)
from pipeline.registration.config import RegistrationConfig
from pipeline.registration.tracking import Tracker

COUNT = 4


@pytest.fixture(scope="module")
def tracker(tmp_path_factory: pytest.TempPathFactory) -> Tracker:
    home = tmp_path_factory.mktemp("home")
    return Tracker(RegistrationConfig(tracking_uri=f"sqlite:///{home}/mlflow.db"), home, "aliases")


@pytest.fixture
def name(tracker: Tracker, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A model with four versions."""
    found = request.node.name
    tracker.client.create_registered_model(found)
    for _ in range(COUNT):
        tracker.client.create_model_version(found, tmp_path.as_uri())
    return str(found)


def test_a_move_is_written_down(tracker, name):
    assert find_holder(tracker, name) is None
    first = move_alias(tracker, name, CHAMPION, 1, "gate", "the first")
    second = move_alias(tracker, name, CHAMPION, 3, "person", "it's by far the better one")
    assert find_holder(tracker, name) == 3
    assert list_moves(tracker, name) == [first, second]
    assert [(one.version, one.previous, one.by) for one in list_moves(tracker, name)] == [
        (1, None, "gate"),
        (3, 1, "person"),
    ]


def test_the_page_of_a_model_says_which_version_serves_and_why(tracker, name):
    """Its records are tags that MLflow's pages hide."""
    move_alias(tracker, name, CHAMPION, 1, "gate", "There is no champion yet.")
    move_alias(tracker, name, CHALLENGER, 3, "gate", "It may be chance.")
    made = move_alias(tracker, name, CHAMPION, 2, "person", "asked for | by ads")
    model = tracker.client.get_registered_model(name)
    first, _, *moves = model.description.splitlines()
    assert first.startswith("Version 2 is champion since ")
    assert first.endswith(" UTC, by the person: asked for | by ads Challenger: version 3.")
    assert moves[0].endswith(" UTC: version 2 is champion (before: 1), by the person: asked for | by ads")
    assert moves[2].endswith(" UTC: version 1 is champion, by the gate: There is no champion yet.")
    assert all(key.startswith("mlflow.") for key in model.tags)
    assert [one.version for one in list_moves(tracker, name)] == [1, 3, 2]
    assert list_moves(tracker, name)[-1] == made


def test_an_interrupted_move_does_no_harm(tracker, name, monkeypatch):
    """The move is recorded but not made: the champion stays, and a rollback goes to the one before it."""
    move_alias(tracker, name, CHAMPION, 1, "gate", "")
    move_alias(tracker, name, CHAMPION, 2, "gate", "")
    with monkeypatch.context() as cut:
        cut.setattr(tracker.client, "set_registered_model_alias", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            move_alias(tracker, name, CHAMPION, 3, "gate", "")
    assert find_holder(tracker, name) == 2
    assert rollback(tracker, name).version == 1


def test_the_champion_scores_unless_a_version_is_named(tracker, name):
    with pytest.raises(RegistryError) as caught:
        choose_version(tracker, name, None)
    assert str(caught.value) == (
        f"model '{name}': expected a champion, got none. Choose among versions 1, 2, 3, 4: python -m flows.promote "
        "CONFIG version=N. Or score with one of them: version=N."
    )
    with pytest.raises(RegistryError, match=r"Train the first one: python -m flows\.train CONFIG"):
        choose_version(tracker, "none of this name", None)
    move_alias(tracker, name, CHAMPION, 2, "gate", "")
    assert choose_version(tracker, name, None) == choose_version(tracker, name, 2)
    assert choose_version(tracker, name, None)[0] == 2
    before = choose_version(tracker, name, 3)
    tracker.client.set_model_version_tag(name, "3", "weights_sha256", "f" * 64)
    other = choose_version(tracker, name, 3)
    assert other[1] != before[1]
    tracker.client.set_model_version_tag(name, "3", "files_sha256", "{}")
    assert choose_version(tracker, name, 3)[1] != other[1], "other bytes score again"
    with pytest.raises(RegistryError) as caught:
        choose_version(tracker, name, 9)
    assert (
        str(caught.value) == f"model '{name}': expected a version among 1, 2, 3, 4, got 9. Name one of them: version=N."
    )


def test_a_challenger_that_becomes_champion_challenges_no_more(tracker, name):
    move_alias(tracker, name, CHAMPION, 1, "gate", "")
    move_alias(tracker, name, CHALLENGER, 2, "gate", "")
    assert find_holder(tracker, name, CHALLENGER) == 2
    move_alias(tracker, name, CHAMPION, 2, "person", "")
    assert (find_holder(tracker, name), find_holder(tracker, name, CHALLENGER)) == (2, None)


def test_rolling_back_goes_back_step_by_step(tracker, name):
    for version in (1, 3, 2):
        move_alias(tracker, name, CHAMPION, version, "gate", "")
    assert [rollback(tracker, name).version for _ in range(2)] == [3, 1]
    with pytest.raises(RegistryError) as caught:
        rollback(tracker, name)
    assert str(caught.value) == (
        f"model '{name}': expected a champion with one before it, got version 1, the first. Promote another: version=N."
    )
    assert find_holder(tracker, name) == 1
    move_alias(tracker, name, CHAMPION, 4, "gate", "")
    assert rollback(tracker, name).version == 1


def test_rollbacks_go_back_whatever_the_clock_says(tracker, name, monkeypatch):
    """The clock was ahead by a month when version 2 was promoted, and stands still from then on."""
    now = datetime.datetime(2025, 6, 1, tzinfo=datetime.UTC)
    times = iter([now, now + datetime.timedelta(days=30), now, now, now, now, now])
    clock = SimpleNamespace(now=lambda zone: next(times), strptime=datetime.datetime.strptime)
    monkeypatch.setattr(
        aliases, "datetime", SimpleNamespace(datetime=clock, UTC=datetime.UTC, timedelta=datetime.timedelta)
    )
    for version in (1, 2, 3, 4):
        move_alias(tracker, name, CHAMPION, version, "gate", "")
    assert [move.version for move in list_moves(tracker, name)] == [1, 2, 3, 4]
    assert [rollback(tracker, name).version for _ in range(3)] == [3, 2, 1]


def test_promoting_the_champion_again_is_no_move(tracker, name):
    moves = [move_alias(tracker, name, CHAMPION, version, "gate", "") for version in (1, 2, 3)]
    assert move_alias(tracker, name, CHAMPION, 3, "person", "to be sure") is None
    assert list_moves(tracker, name) == moves
    assert [rollback(tracker, name).version for _ in range(2)] == [2, 1]


def test_what_serves_is_kept_with_the_version_that_it_continues(tracker, name):
    """But not with the whole line before it."""
    for version in range(2, COUNT + 1):
        tracker.client.set_model_version_tag(name, str(version), "trained_from", str(version - 1))
    tracker.client.set_model_version_tag(name, "1", "trained_from", "scratch")
    move_alias(tracker, name, CHAMPION, 4, "gate", "the first")
    assert {int(one.version) for one in list_spared(tracker) if one.name == name} == {3, 4}
    tracker.client.delete_model_version(name, "3")
    assert {int(one.version) for one in list_spared(tracker) if one.name == name} == {4}


def test_a_rollback_changes_the_champion_also_where_it_was_once_recorded_as_its_own_predecessor(tracker, name):
    for version in (1, 2, 3):
        move_alias(tracker, name, CHAMPION, version, "gate", "")
    again = Move(time="2999-01-01T00-00-00.000000Z", alias=CHAMPION, version=3, previous=3, by="person", reason="")
    tracker.client.set_registered_model_tag(name, MOVE + again.time, again.model_dump_json())
    assert rollback(tracker, name).version == 2


def test_rollbacks_go_back_through_all_that_was_promoted(tracker, name):
    """1, 2, 3, then a person promotes 1 and 2 again: four steps back, none of them forward."""
    for version, by in ((1, "gate"), (2, "gate"), (3, "gate"), (1, "person"), (2, "person")):
        move_alias(tracker, name, CHAMPION, version, by, "")
    assert [rollback(tracker, name).version for _ in range(2)] == [1, 3]
    move_alias(tracker, name, CHAMPION, 4, "gate", "")
    assert [rollback(tracker, name).version for _ in range(3)] == [3, 2, 1]
    with pytest.raises(RegistryError, match="version 1, the first"):
        rollback(tracker, name)


def test_a_rollback_that_was_interrupted_does_no_harm(tracker, name, monkeypatch):
    for version in (1, 2, 3):
        move_alias(tracker, name, CHAMPION, version, "gate", "")
    with monkeypatch.context() as cut:
        cut.setattr(tracker.client, "set_registered_model_alias", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            rollback(tracker, name)
    assert [rollback(tracker, name).version for _ in range(2)] == [2, 1]


def test_an_alias_that_was_moved_by_other_means_is_rolled_back_too(tracker, name):
    for version in (1, 2):
        move_alias(tracker, name, CHAMPION, version, "gate", "")
    tracker.client.set_registered_model_alias(name, CHAMPION, "4")
    assert rollback(tracker, name).version == 2


def test_a_champion_whose_alias_is_gone_is_known(tracker, name):
    assert lost_champion(tracker, name) is None
    move_alias(tracker, name, CHALLENGER, 1, "gate", "")
    assert lost_champion(tracker, name) is None
    for version in (1, 2):
        move_alias(tracker, name, CHAMPION, version, "gate", "")
    assert lost_champion(tracker, name) is None
    tracker.client.delete_registered_model_alias(name, CHAMPION)
    assert lost_champion(tracker, name).startswith(f"version 2 was the last, and the alias '{CHAMPION}' is gone.")


@pytest.mark.parametrize("remove", [True, False])
def test_a_model_that_was_renamed_or_removed_had_a_champion(tracker, name, tmp_path, remove):
    """Its moves went with it. Another model's champion does not count, nor does a version that was only held."""
    other, model = f"other{name}", f"own{name}"
    for one in (other, model):
        tracker.client.create_registered_model(one)
    runs = [tracker.start(one, {}, {}, None) for one in (other, model)]
    tracker.client.create_model_version(other, tmp_path.as_uri(), runs[0])
    tracker.client.create_model_version(model, tmp_path.as_uri(), runs[1])
    tracker.end(runs[0], "FINISHED"), tracker.end(runs[1], "FINISHED")
    move_alias(tracker, other, CHAMPION, 1, "gate", "")
    move_alias(tracker, model, CHALLENGER, 1, "gate", "")
    tracker.client.delete_registered_model_alias(model, CHALLENGER)
    assert lost_champion(tracker, model) is None
    move_alias(tracker, model, CHAMPION, 1, "person", "")
    if remove:
        tracker.client.delete_registered_model(model)
    else:
        tracker.client.rename_registered_model(model, f"{model}2")
    assert lost_champion(tracker, model).startswith(f"that of MLflow run {runs[1][:8]} is not among the versions of")
    with pytest.raises(RegistryError, match=r"expected a champion, got none. That of MLflow run .* Was the model ren"):
        choose_version(tracker, model, None)


def test_the_champion_is_found_without_the_other_versions(tracker, name):
    """A server asks every few seconds, and a daily training leaves a version a day."""
    move_alias(tracker, name, CHAMPION, 2, "gate", "")
    loaded = []
    event.listen(SqlModelVersion, "load", lambda row, _: loaded.append(row.version))
    assert find_holder(tracker, name) == 2
    assert set(loaded) == {2}


def test_an_error_of_mlflow_does_not_mean_that_there_were_no_moves(tracker, name, monkeypatch):
    def unreachable(*_):
        raise MlflowException("API request failed: connection refused")

    for version in (1, 2):
        move_alias(tracker, name, CHAMPION, version, "gate", "")
    for call in ("get_registered_model", "get_model_version_by_alias"):
        monkeypatch.setattr(tracker.client, call, unreachable)
    for asked in (list_moves, lost_champion, rollback):
        with pytest.raises(MlflowException, match="connection refused"):
            asked(tracker, name)


def test_there_must_be_a_champion_to_roll_back(tracker, name):
    with pytest.raises(RegistryError, match="got no champion"):
        rollback(tracker, name)


def test_an_unknown_version_is_refused(tracker, name):
    move_alias(tracker, name, CHAMPION, 1, "gate", "")
    with pytest.raises(RegistryError) as caught:
        move_alias(tracker, name, CHAMPION, 9, "person", "")
    assert (
        str(caught.value) == f"model '{name}': expected a version among 1, 2, 3, 4, got 9. Name one of them: version=N."
    )
    assert find_holder(tracker, name) == 1
    assert len(list_moves(tracker, name)) == 1


def test_an_unknown_model_has_no_champion(tracker):
    assert find_holder(tracker, "nobody") is None
    assert list_moves(tracker, "nobody") == []


def test_two_promotions_at_once_leave_one_champion(tracker, name):
    move_alias(tracker, name, CHAMPION, 1, "gate", "")
    start = threading.Barrier(2)

    def promote(version: int) -> None:
        start.wait()
        move_alias(tracker, name, CHAMPION, version, "gate", "")

    threads = [threading.Thread(target=promote, args=(version,)) for version in (2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert find_holder(tracker, name) in (2, 3)
    assert sorted(one.version for one in list_moves(tracker, name)) == [1, 2, 3]


def test_a_damaged_record_of_a_move_is_named(tracker, name):
    """Left out, a rollback would go to another version."""
    move_alias(tracker, name, CHAMPION, 1, "person", "first")
    tracker.client.set_registered_model_tag(name, f"{MOVE}2", "{")
    with pytest.raises(RegistryError, match=f"tag '{MOVE}2' of model '{name}': expected the record of a move"):
        list_moves(tracker, name)
    tracker.client.delete_registered_model_tag(name, f"{MOVE}2")  # other tests list the moves of all models


def denied(endpoint: str) -> MlflowException:
    """What MLflow's client raises where its server has a login."""
    return MlflowException(
        f"API request to endpoint /api/2.0/mlflow/{endpoint} failed with error code 403 != 200. "
        "Response body: 'Permission denied'"
    )


def refuse(monkeypatch: pytest.MonkeyPatch, tracker: Tracker, method: str, endpoint: str) -> None:
    def ask(*args: object, **options: object) -> None:
        raise denied(endpoint)

    monkeypatch.setattr(tracker.client, method, ask)


def test_a_login_that_refuses_questions_about_a_model_that_is_not_there_is_no_refusal(tracker, name, monkeypatch):
    """Otherwise nobody but an administrator could register the first version. Those of a model that is there count."""
    refuse(monkeypatch, tracker, "get_model_version_by_alias", "registered-models/alias")
    refuse(monkeypatch, tracker, "get_registered_model", "registered-models/get")
    refuse(monkeypatch, tracker, "get_model_version", "model-versions/get")
    assert find_holder(tracker, "nobody") is None
    assert list_moves(tracker, "nobody") == []
    assert tracker.get_version("nobody", "1") is None
    for ask in (
        lambda: find_holder(tracker, name),
        lambda: list_moves(tracker, name),
        lambda: tracker.get_version(name, "1"),
    ):
        with pytest.raises(MlflowException, match="403"):
            ask()


def test_who_may_edit_but_not_manage_promotes_the_challenger(tracker, name, monkeypatch):
    """MLflow lets an editor set aliases, not remove them. The page of the model may be refused, too."""
    move_alias(tracker, name, CHAMPION, 1, "gate", "")
    move_alias(tracker, name, CHALLENGER, 2, "gate", "")
    refuse(monkeypatch, tracker, "delete_registered_model_alias", "registered-models/alias")
    refuse(monkeypatch, tracker, "update_registered_model", "registered-models/update")
    done = move_alias(tracker, name, CHAMPION, 2, "person", "asked for")
    assert done is not None
    assert find_holder(tracker, name) == 2
    assert aliases.find_challenger(tracker, name) is None
    assert "Challenger" not in aliases.describe_model(tracker, name)
    move_alias(tracker, name, CHALLENGER, 3, "gate", "")
    assert aliases.find_challenger(tracker, name) == 3
    aliases.end_challenge(tracker, name)  # it was rejected
    assert aliases.find_challenger(tracker, name) is None
    assert find_holder(tracker, name) == 2

"""Champion and challenger: aliases of versions. Every move is recorded with its time, reason and previous version."""

import datetime
import logging
from collections.abc import Mapping, Sequence
from typing import Literal

from mlflow.entities.model_registry import ModelVersion
from mlflow.exceptions import MlflowException
from pydantic import BaseModel, ValidationError

from pipeline.errors import RegistryError
from pipeline.inference.files import FILES
from pipeline.registration.tracking import Tracker, explain, is_denied
from pipeline.registration.versions import TRAINED_FROM

log = logging.getLogger("dlrm")
CHAMPION, CHALLENGER, REFERENCE = "champion", "challenger", "reference"
CHAMPION_OF = "champion_of"
"""Tag of an MLflow run whose version is or was champion: the name of the model then."""
UNSEEN = "A login of MLflow hides models without permission: then ask for READ."
MOVE = "mlflow.dlrm.move."
"""Prefix of the tags of a registered model that record moves. The time follows.

MLflow's pages hide tags that begin with `mlflow.`. The model's description shows the moves to people. Each move has a
tag of its own, so that two at once are both recorded.
"""
SHOWN_MOVES = 10
"""Moves in the description of a model."""
TIME = "%Y-%m-%dT%H-%M-%S.%fZ"

ROLLBACKS = 2
"""Number of champions before the present one that are kept, with their checkpoints."""


class Move(BaseModel, frozen=True):
    """The move of an alias to a version."""

    time: str
    """UTC."""
    alias: str
    version: int
    previous: int | None
    """Version that had the alias before."""
    by: Literal["gate", "person", "rollback"]
    reason: str


def find_holder(tracker: Tracker, name: str, alias: str = CHAMPION) -> int | None:
    """Returns the version with an alias. None: no version has it, or there is no such model.

    MLflow reads one version. Asked for the model, it would read all that the model has.
    """
    try:
        return int(tracker.client.get_model_version_by_alias(name, alias).version)
    except MlflowException as error:
        # An unreachable MLflow does not mean that there is no champion.
        if f"alias {alias} not found" not in error.message and not tracker.lacks_model(name, error):
            raise
        return None


def choose_version(tracker: Tracker, name: str, version: int | None) -> tuple[int, str]:
    """Returns the version to score with (None: the champion), and a text that identifies its files.

    Raises:
        RegistryError: If there is no such version, or no champion.
    """
    number = find_holder(tracker, name) if version is None else version
    if number is None:
        raise no_champion(tracker, name, "Or score with one of them: version=N.")
    found = tracker.get_version(name, str(number))
    if found is None:
        raise _no_version(tracker, name, number)
    tags = [found.tags.get(tag, "") for tag in ("weights_sha256", "weights", "plan_hash", FILES)]
    return number, " ".join([name, str(number), str(found.run_id), *tags])


def move_alias(
    tracker: Tracker, name: str, alias: str, version: int, by: Literal["gate", "person", "rollback"], reason: str
) -> Move | None:
    """Moves an alias to a version and records it. Of two concurrent moves the later one counts. Both are recorded.

    Returns None and records nothing if the version already has the alias.

    Raises:
        RegistryError: If there is no such version.
    """
    previous = find_holder(tracker, name, alias)
    found = tracker.get_version(name, str(version))
    if found is None:
        raise _no_version(tracker, name, version)
    done = None
    if previous != version:
        now = _next_time(list_moves(tracker, name))
        done = Move(time=now, alias=alias, version=version, previous=previous, by=by, reason=reason)
        # The record comes first. If the process dies in between, the alias stays, and a rollback skips the record.
        tracker.client.set_registered_model_tag(name, MOVE + now, done.model_dump_json())
        tracker.client.set_registered_model_alias(name, alias, str(version))
    if alias == CHAMPION and find_holder(tracker, name, CHALLENGER) == version:
        end_challenge(tracker, name)
    if done is not None:
        try:
            tracker.client.update_registered_model(name, describe_model(tracker, name))
            if alias == CHAMPION and found.run_id:  # one made by hand may have none
                tracker.tag(found.run_id, {CHAMPION_OF: name})
        except MlflowException as error:  # the alias has moved
            log.warning("the page of model '%s' is not up to date: %s", name, explain(error))
    return done


def end_challenge(tracker: Tracker, name: str) -> None:
    """Takes the alias of the challenger away. Without the permission for that, gives it to the champion.

    MLflow lets everybody who may edit a model set an alias, and those who may manage it remove one.
    """
    try:
        tracker.client.delete_registered_model_alias(name, CHALLENGER)
    except MlflowException as error:
        champion = find_holder(tracker, name)
        if not is_denied(error) or champion is None:
            raise
        tracker.client.set_registered_model_alias(name, CHALLENGER, str(champion))


def find_challenger(tracker: Tracker, name: str) -> int | None:
    """Returns the version that waits for a verdict. None: there is none; see `end_challenge`."""
    version = find_holder(tracker, name, CHALLENGER)
    return None if version is None or version == find_holder(tracker, name) else version


def describe_model(tracker: Tracker, name: str) -> str:
    """Returns markdown for a model's page: which version serves since when and why, and the last moves."""
    moves, version = list_moves(tracker, name), find_holder(tracker, name)
    made = next((one for one in reversed(moves) if (one.alias, one.version) == (CHAMPION, version)), None)
    text = "No version is champion." if version is None else f"Version {version} is champion."
    if made is not None:
        text = f"Version {version} is champion since {_show_time(made)}, by the {made.by}: {made.reason}"
    challenger = find_challenger(tracker, name)
    lines = [text if challenger is None else f"{text} Challenger: version {challenger}.", ""]
    for one in moves[: -SHOWN_MOVES - 1 : -1]:  # a list: MLflow's pages show tables without any space
        before = "" if one.previous is None else f" (before: {one.previous})"
        lines.append(
            f"- {_show_time(one)}: version {one.version} is {one.alias}{before}, by the {one.by}: {one.reason}"
        )
    return "\n".join(lines)


def _show_time(move: Move) -> str:
    return f"{datetime.datetime.strptime(move.time, TIME):%Y-%m-%d %H:%M} UTC"


def _next_time(moves: Sequence[Move]) -> str:
    """Returns the time of a new move: now, or just after the last one if the clock was ahead then."""
    now = datetime.datetime.now(datetime.UTC).strftime(TIME)
    if moves and moves[-1].time >= now:
        last = datetime.datetime.strptime(moves[-1].time, TIME)
        now = (last + datetime.timedelta(microseconds=1)).strftime(TIME)
    return now


def list_moves(tracker: Tracker, name: str) -> list[Move]:
    """Lists all moves of a model's aliases, oldest first.

    Raises:
        RegistryError: If the record of a move is damaged.
    """
    try:
        tags = tracker.client.get_registered_model(name).tags
    except MlflowException as error:
        if not tracker.lacks_model(name, error):  # an unreachable MLflow does not mean that there were no moves
            raise
        return []
    return [_read_move(name, key, tags[key]) for key in _list_keys(tags)]


def _list_keys(tags: Mapping[str, str]) -> list[str]:
    """Returns the tags that record moves, oldest first."""
    return sorted(key for key in tags if key.startswith(MOVE))


def _read_move(name: str, key: str, text: str) -> Move:
    try:
        return Move.model_validate_json(text)
    except ValidationError:
        where = f"tag '{key}' of model '{name}'"
        raise RegistryError(where, "the record of a move", "other text", "Remove the tag.") from None


def list_old_moves(tracker: Tracker, name: str, kept: int, before: datetime.datetime) -> list[str]:
    """Lists the tags of old moves, oldest first. Moves that lead to the champions that rollbacks go back to stay.

    Args:
        kept: Newest moves that stay at any age.
        before: Later ones stay.
    """
    moves, holder, limit = list_moves(tracker, name), find_holder(tracker, name), before.strftime(TIME)
    champions = _list_champions(moves, holder)[-1 - ROLLBACKS :]
    old = min(sum(move.time < limit for move in moves), len(moves) - kept)
    while old > 0 and _list_champions(moves[old:], holder)[-1 - ROLLBACKS :] != champions:
        old -= 1
    return _list_keys(tracker.client.get_registered_model(name).tags)[: max(old, 0)] if old > 0 else []


def lost_champion(tracker: Tracker, name: str) -> str | None:
    """Says what became of the champion of a model without one. None: the model has a champion, or never had one.

    A model that somebody has renamed or removed in MLflow takes its moves along. Its runs are still there.
    """
    if find_holder(tracker, name) is not None:
        return None
    last = next((move.version for move in reversed(list_moves(tracker, name)) if move.alias == CHAMPION), None)
    if last is not None:
        return (
            f"version {last} was the last, and the alias '{CHAMPION}' is gone. "
            "Name one: python -m flows.promote CONFIG version=N."
        )
    run = tracker.find_finished({CHAMPION_OF: name})
    return run and (
        f"that of MLflow run {run[:8]} is not among the versions of '{name}'. Was the model renamed or removed? Give "
        "it that name again, or choose a version: python -m flows.promote CONFIG version=N."
    )


def rollback(tracker: Tracker, name: str) -> Move:
    """Makes the previous champion the champion again. A second rollback goes back one more.

    Raises:
        RegistryError: If there is none.
    """
    version = find_holder(tracker, name)
    champions = _list_champions(list_moves(tracker, name), version)
    if version is None or len(champions) < 2:
        present = "no champion" if version is None else f"version {version}, the first"
        raise RegistryError(f"model '{name}'", "a champion with one before it", present, "Promote another: version=N.")
    done = move_alias(tracker, name, CHAMPION, champions[-2], "rollback", f"rolled back from version {version}")
    assert done is not None, "neighbours in the list differ"
    return done


def _list_champions(moves: Sequence[Move], version: int | None) -> list[int]:
    """Returns the champion and the earlier ones that no rollback has taken back, oldest first.

    Args:
        moves: Moves of all aliases, oldest first.
        version: The champion.
    """
    moves = [move for move in moves if move.alias == CHAMPION and move.version != move.previous]
    held = [*(move.previous for move in moves[1:]), version]
    champions = [move.previous for move in moves[:1] if move.previous is not None]
    for move, holder in zip(moves, held, strict=False):
        if holder is not None and holder == move.previous:
            continue  # the move was recorded and not made
        if move.by == "rollback" and move.version in champions[:-1]:
            champions.pop()
            while champions[-1] != move.version:
                champions.pop()
        else:
            champions.append(move.version)
        if holder is not None and holder != champions[-1]:
            champions.append(holder)  # moved by other means
    return champions


def list_aliased(tracker: Tracker) -> list[ModelVersion]:
    """Lists the versions of all models that have an alias, with their tags."""
    found: list[ModelVersion] = []
    token: str | None = None
    while token != "":
        page = tracker.client.search_registered_models(page_token=token)
        named = ((model.name, version) for model in page for version in set(model.aliases.values()))
        found += [tracker.client.get_model_version(*one) for one in named]
        token = page.token or ""
    return found


def list_spared(tracker: Tracker) -> list[ModelVersion]:
    """Lists the versions that nothing may remove, with their tags.

    These are all versions with an alias, and the `ROLLBACKS` champions of each model before the present one. Also the
    version that each of these continues: a replay starts from its checkpoint.
    """
    aliased = list_aliased(tracker)
    spared = {(version.name, int(version.version)): version for version in aliased}
    for name in {version.name for version in aliased}:
        champions = _list_champions(list_moves(tracker, name), find_holder(tracker, name))
        for number in champions[-1 - ROLLBACKS :]:
            version = tracker.get_version(name, str(number))
            if version is not None:
                spared[name, number] = version
    for (name, _), version in list(spared.items()):
        continued = version.tags.get(TRAINED_FROM, "")
        before = tracker.get_version(name, continued) if continued.isdecimal() else None
        if before is not None:
            spared[name, int(before.version)] = before
    return list(spared.values())


def no_champion(tracker: Tracker, name: str, otherwise: str = "") -> RegistryError:
    """Returns the error that a model has no champion.

    Args:
        otherwise: What else can be done with a version.
    """
    remedy = f"Train the first one: python -m flows.train CONFIG. {UNSEEN}"
    if known := list_versions(tracker, name):
        named = ", ".join(str(number) for number in known)
        remedy = f"Choose among versions {named}: python -m flows.promote CONFIG version=N. {otherwise}".rstrip()
    elif lost := lost_champion(tracker, name):
        remedy = f"{lost[0].upper()}{lost[1:]}"
    return RegistryError(f"model '{name}'", "a champion", "none", remedy)


def _no_version(tracker: Tracker, name: str, version: int) -> RegistryError:
    known = ", ".join(str(number) for number in list_versions(tracker, name))
    if not known:
        return RegistryError(
            f"model '{name}'", "a version in the registry", "none", f"Correct the name, or train it. {UNSEEN}"
        )
    return RegistryError(f"model '{name}'", f"a version among {known}", f"{version}", "Name one of them: version=N.")


def list_versions(tracker: Tracker, name: str) -> list[int]:
    """Lists the versions of a model, oldest first."""
    found = tracker.client.search_model_versions(f"name = '{name}'")
    return sorted(int(version.version) for version in found)

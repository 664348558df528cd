"""Ranks on hosts without a common folder report through an object store. tests/hosts runs real ones."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from pipeline.errors import DataError, TrainingError
from pipeline.sealed import Letterbox
from pipeline.training.config import TrainConfig
from pipeline.training.launch import external_store
from pipeline.training.launch.external import follow_ranks
from pipeline.training.launch.external_store import FollowedRank, StoreGroup
from pipeline.training.launch.processes import Event, Limits
from storage.objects import ObjectFolder
from tests.objects import Store, serving_objects

pytestmark = pytest.mark.slow
Play = Callable[[], object]
SECRET = "label-of-a-secret"
SPEC = TrainConfig(labels={"zone": SECRET}, launcher="ray", world_size=2)
"""In place of a specification."""
RESULT = {"event": "result", "rows": 7}


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Store]:
    """Keeps all versions of all objects, also of those that are removed."""
    with serving_objects(tmp_path_factory.mktemp("store")) as one:
        one.client().put_bucket_versioning(Bucket=one.bucket, VersioningConfiguration={"Status": "Enabled"})
        yield one


@pytest.fixture
def folder(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ObjectFolder:
    """The training's folder in the store. Ranks have access to it by their environment."""
    for name, value in store.variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(external_store, "PERIOD_SECONDS", 0.1)
    return ObjectFolder(f"s3://{store.bucket}/{tmp_path.name}", store.properties)


@pytest.fixture
def follow(folder: ObjectFolder, tmp_path: Path) -> Callable[..., tuple[Event, list[Event]]]:
    """(play, limits) -> result and events of ranks that `play` plays. Its errors become those of the training."""

    def run(play: Play, **limits: int) -> tuple[Event, list[Event]]:
        events: list[Event] = []
        failed: list[BaseException] = []

        def check() -> None:
            if failed:
                raise failed[0]

        def act() -> None:
            try:
                play()
            except BaseException as error:
                failed.append(error)

        def handle(event: Event) -> None:
            events.append(event)
            if event["event"] == "awaited":
                threading.Thread(target=act).start()

        given = Limits(**{"deadline_seconds": 60, **limits}, check=check)
        group = partial(StoreGroup, store=folder)
        return follow_ranks("module", SPEC, tmp_path, 2, 1, given, handle, tmp_path, make_group=group), events

    return run


def send(folder: ObjectFolder, *events: dict[str, Any]) -> FollowedRank:
    """Plays rank 0."""
    rank = FollowedRank(folder.address, 0)
    assert json.loads(rank.fetch_spec()) == SPEC.model_dump(mode="json")
    with rank.open_events() as emit:
        for event in events:
            emit(event)
            time.sleep(0.01)  # some share an object, some do not
    return rank


def versions(store: Store, folder: ObjectFolder) -> dict[str, list[bytes]]:
    """Key -> all that was ever written there."""
    client, prefix = store.client(), folder.address.removeprefix(f"s3://{store.bucket}/")
    found: dict[str, list[bytes]] = {}
    for page in client.get_paginator("list_object_versions").paginate(Bucket=store.bucket, Prefix=f"{prefix}/"):
        for one in page.get("Versions", []):
            content = client.get_object(Bucket=store.bucket, Key=one["Key"], VersionId=one["VersionId"])["Body"].read()
            found.setdefault(one["Key"].removeprefix(f"{prefix}/"), []).append(content)
    return found


def test_events_of_rank_0_arrive_in_order_and_nothing_stays(
    folder: ObjectFolder, follow: Callable[..., Any], store: Store, tmp_path: Path
) -> None:
    reported = [{"event": "metrics", "step": step, "text": "ä\u2028"} for step in range(200)]

    def play() -> None:
        other = FollowedRank(folder.address, 1)
        assert other.fetch_spec() == (tmp_path / "spec.json").read_text()
        with other.open_events() as emit:
            emit({"event": "of another rank"})
        send(folder, *reported, RESULT)

    result, events = follow(play)
    assert result == {**RESULT, "restarts": 0}
    assert events[1:-1] == reported
    assert events[0]["command"] == (
        "torchrun --nnodes=2 --nproc-per-node=1 --node-rank=N --master-addr=ADDRESS --master-port=29500 "
        f"-m module {folder.address}"
    )
    assert folder.names() == []
    written = versions(store, folder)
    assert len([name for name in written if "/events/" in name]) > 3


def test_the_specification_was_never_readable_in_the_store(
    folder: ObjectFolder, follow: Callable[..., Any], store: Store, tmp_path: Path
) -> None:
    """Neither by its text nor with the key of another rank."""
    follow(lambda: send(folder, RESULT))
    text = (tmp_path / "spec.json").read_text()
    assert SECRET in text
    written = versions(store, folder)
    sealed = [content for name, contents in written.items() if "/specs/" in name for content in contents if content]
    assert len(sealed) == 1
    for contents in written.values():
        for content in contents:
            assert SECRET.encode() not in content
    with pytest.raises(ValueError, match=r"[Dd]ecrypt"):
        Letterbox().open((sealed[0][:384], sealed[0][384:]))


def test_what_an_earlier_training_left_is_ignored(folder: ObjectFolder, follow: Callable[..., Any]) -> None:
    error = json.dumps(["DataError", "t", "rows", "none", "Write some."]).encode()
    folder.write("ranks/training", b"0" * 32)
    for name in ("keys/0-a", "specs/0-a", "events/0-a/00000000", "error-0.json"):
        folder.write(f"ranks/{'0' * 32}/{name}", error)

    def play() -> None:
        for name in ("specs/0-b", "events/0-b/00000000", "error-0.json"):  # late, by ranks of that training
            folder.write(f"ranks/{'0' * 32}/{name}", error)
        send(folder, RESULT)

    result, events = follow(play)
    assert ([event["event"] for event in events], result["rows"]) == (["awaited", "result"], 7)
    assert folder.names() == []


def test_processes_that_replace_others_get_the_specification_and_go_on(
    folder: ObjectFolder, follow: Callable[..., Any]
) -> None:
    """As torchrun restarts them. A process that ended before its key was answered confuses nobody."""

    def play() -> None:
        send(folder, {"event": "saved", "step": 3})
        ended = FollowedRank(folder.address, 0)
        ended.own.write(f"keys/{ended.name}", Letterbox().public)
        send(folder, {"event": "resumed", "step": 3}, RESULT)

    assert [event["event"] for event in follow(play)[1]] == ["awaited", "saved", "resumed", "result"]


def test_the_error_of_a_rank_arrives_after_the_events_before_it(
    folder: ObjectFolder, follow: Callable[..., Any]
) -> None:
    error, events = DataError("t", "rows", "none", "Write some."), []

    def play() -> None:
        send(folder, {"event": "metrics"}).report(error)

    with pytest.raises(DataError) as caught:
        events.extend(follow(play)[1])
    assert str(caught.value) == str(error)
    assert folder.names() == []


def test_ranks_that_have_not_begun_do_not_hang_and_others_do(folder: ObjectFolder, follow: Callable[..., Any]) -> None:
    with pytest.raises(TrainingError, match=r"training.deadline_seconds=2,"):
        follow(lambda: None, deadline_seconds=2, hang_seconds=1)
    with pytest.raises(TrainingError, match=r"training.hang_seconds=1,"):
        follow(lambda: send(folder, {"event": "start"}), hang_seconds=1)


def test_ranks_that_no_training_follows_are_refused(
    folder: ObjectFolder, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    sentence = (
        f"ranks of {folder.address}: expected a training that follows them, got none. Start the training first, then the "
        "ranks by the command that it prints."
    )
    with pytest.raises(TrainingError) as caught:
        FollowedRank(folder.address, 0)
    assert str(caught.value) == sentence
    monkeypatch.setattr(external_store, "ANSWER_SECONDS", 1.0)
    folder.write("ranks/training", b"of a training that was killed")
    with pytest.raises(TrainingError) as caught:
        FollowedRank(folder.address, 0).fetch_spec()
    assert str(caught.value) == sentence


def test_ranks_end_when_the_training_that_follows_them_has_ended_or_a_newer_one_follows_others(
    folder: ObjectFolder, follow: Callable[..., Any]
) -> None:
    left: list[FollowedRank] = []

    def emit_until_it_fails(rank: FollowedRank) -> None:
        with rank.open_events() as emit:
            limit = time.monotonic() + 90
            while time.monotonic() < limit:
                emit({"event": "metrics"})
                time.sleep(0.05)

    follow(lambda: left.append(send(folder, RESULT)))
    (rank,) = left
    with pytest.raises(BrokenPipeError, match="the training of these ranks has ended"):
        emit_until_it_fails(rank)

    def play() -> None:
        with pytest.raises(BrokenPipeError, match="the training of these ranks has ended"):
            emit_until_it_fails(rank)
        rank.report(DataError("t", "rows", "none", "Of a rank that is not followed."))
        send(folder, RESULT)

    assert [event["event"] for event in follow(play)[1]] == ["awaited", "result"]
    assert folder.names() == []


def test_a_training_that_a_newer_one_has_replaced_leaves_its_place_alone(
    folder: ObjectFolder, follow: Callable[..., Any]
) -> None:
    def play() -> None:
        folder.write("ranks/training", b"newer")

    with pytest.raises(TrainingError, match=r"training.deadline_seconds=2,"):
        follow(play, deadline_seconds=2)
    assert folder.read("ranks/training") == b"newer"


@pytest.mark.skipif("os.environ.get('DLRM_TEST_STORE') == 'ceph'")
def test_a_store_that_does_not_answer_for_twenty_seconds_ends_nobody(
    folder: ObjectFolder, follow: Callable[..., Any], store: Store
) -> None:
    port = int(store.endpoint.rpartition(":")[2])
    (server,) = (one for one in psutil.Process().children() if port in {c.laddr.port for c in one.net_connections()})
    reported = [{"event": "metrics", "step": step} for step in range(220)]

    def play() -> None:
        rank = FollowedRank(folder.address, 0)
        rank.fetch_spec()
        with rank.open_events() as emit:
            for number, event in enumerate(reported):
                if number == 10:
                    server.suspend()
                if number == 210:
                    server.resume()
                emit(event)
                time.sleep(0.1)
            emit(RESULT)

    try:
        result, events = follow(play, deadline_seconds=150)
    finally:
        server.resume()
    assert (result["rows"], events[1:-1]) == (7, reported)
    assert folder.names() == []

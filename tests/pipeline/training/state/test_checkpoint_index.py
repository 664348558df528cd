"""Two trainings with the same checkpoints in a store: the last to claim them has them, and nothing of it is lost."""

import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from pipeline.errors import TrainingError
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoint import BEST, PROGRESS
from pipeline.training.state.checkpoint_index import INDEX, CheckpointIndex, Manifest
from pipeline.training.state.checkpoints import StoredCheckpoints
from storage import objects
from storage.objects import ObjectFolder
from tests.objects import Store
from tests.pipeline.training.state.drawn import tensors

pytestmark = pytest.mark.usefixtures("device")
TAKEN = r"^checkpoints in s3://logs/.*: expected no other writer, got another training or attempt, which has taken"


@pytest.fixture
def address(store: Store, request: pytest.FixtureRequest) -> str:
    name = "".join(one if one.isalnum() else "-" for one in request.node.name)
    return f"s3://{store.bucket}/{name}"


def save(kept: StoredCheckpoints, name: str, seed: int) -> None:
    kept.save(name, tensors(seed), {"steps": seed}, {})


def seed_of(folder: Path) -> int:
    """Compares the weights of a checkpoint bit for bit with those of its seed, which it returns."""
    seed, found = checkpoint.read_progress(folder)["steps"], tensors(0)
    checkpoint.load(folder, found, {})
    assert found["model/weight"].equal(tensors(seed)["model/weight"])
    return int(seed)


class Interrupted(ObjectFolder):
    """Does something else before a method is called for the first time."""

    moment, other = "", staticmethod(lambda: None)

    def _reach(self, moment: str) -> None:
        if self.moment == moment:
            self.moment = ""
            self.other()

    def put(self, path: Path, name: str) -> None:
        self._reach("before the shards")
        super().put(path, name)

    def read(self, name: str) -> bytes | None:
        self._reach("before the index is read")
        return super().read(name)

    def swap(self, name: str, before: bytes | None, content: bytes) -> bool:
        self._reach("before the index is written")
        return super().swap(name, before, content)


@pytest.fixture(params=["on a condition", "compared first"])
def writes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """With boto3, and as where it is not installed."""
    if request.param == "compared first":
        monkeypatch.setattr(objects, "_boto3_client", lambda properties: None)


MOMENTS = ("before the shards", "before the index is read", "before the index is written")
NAMES = ("step-0000000002", BEST)


@pytest.mark.nightly
@pytest.mark.usefixtures("writes")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("moment", MOMENTS)
def test_what_was_taken_over_while_it_was_saved_is_refused_and_harms_nothing(
    store: Store, address: str, tmp_path: Path, moment: str, name: str
) -> None:
    slow = Interrupted(address, store.properties)
    check_taken_over(store, address, tmp_path, name, slow, lambda other: arm(slow, moment, other))


def arm(folder: Interrupted, moment: str, other: Callable[[], None]) -> None:
    folder.moment, folder.other = moment, other


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_a_store_refuses_what_was_taken_over_since_it_was_compared(
    store: Store, address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The moment between reading and writing that only the store itself can close."""

    def between(other: Callable[[], None]) -> None:
        client, waiting = objects._s3_client(address, store.properties), [other]
        real = client.put_object

        def put_object(**request: Any) -> Any:
            if waiting:
                waiting.pop()()
            return real(**request)

        monkeypatch.setattr(client, "put_object", put_object)

    check_taken_over(store, address, tmp_path, name, ObjectFolder(address, store.properties), between)


def check_taken_over(
    store: Store,
    address: str,
    tmp_path: Path,
    name: str,
    folder: ObjectFolder,
    arrange: Callable[[Callable[[], None]], None],
) -> None:
    plain = ObjectFolder(address, store.properties)
    CheckpointIndex(plain, "a").claim()
    loser = StoredCheckpoints(tmp_path / "a", folder, "a")
    assert loser.find_latest(pytest.fail) is None
    save(loser, "step-0000000001", 1)
    save(loser, BEST, 1)
    winner = StoredCheckpoints(tmp_path / "b", plain, "b")

    def take_over() -> None:
        CheckpointIndex(plain, "b").claim()
        assert winner.find_latest(pytest.fail) == "step-0000000001"
        assert seed_of(winner.fetch(BEST)) == 1
        for one in ("step-0000000002", "step-0000000003", BEST):
            save(winner, one, 7)

    arrange(take_over)
    with pytest.raises(TrainingError, match=TAKEN):
        save(loser, name, 2)
    check_intact(store, address, tmp_path / "x")
    with pytest.raises(TrainingError, match=TAKEN):
        save(loser, "step-0000000009", 9)
    loser.prune(1, "step-0000000002")  # it would remove the winner's later checkpoint
    loser.remove(BEST)
    with pytest.raises(TrainingError, match=TAKEN):  # its ranks are restarted
        StoredCheckpoints(tmp_path / "a", plain, "a").find_latest(pytest.fail)
    check_intact(store, address, tmp_path / "y")
    save(winner, "step-0000000004", 8)


def check_intact(store: Store, address: str, folder: Path) -> None:
    """Only what the winner has is there, whole."""
    kept = StoredCheckpoints(folder, ObjectFolder(address, store.properties))
    assert kept.names() == [f"step-{step:010d}" for step in (1, 2, 3)] + [BEST]
    assert [seed_of(kept.fetch(name)) for name in kept.names()] == [1, 7, 7, 7]
    listed = store.client().list_objects_v2(Bucket=store.bucket, Prefix=address.partition(f"{store.bucket}/")[2] + "/")
    there = {one["Key"].split("/")[1] for one in listed["Contents"]} - {"", INDEX}
    assert sorted(there) == sorted(manifest.at for manifest in kept.index.read().values())


@pytest.mark.nightly
@pytest.mark.usefixtures("writes")
def test_a_restart_saves_the_same_steps_again_and_ranks_of_the_attempt_before_it_are_refused(
    store: Store, address: str, tmp_path: Path
) -> None:
    folder = ObjectFolder(address, store.properties)
    CheckpointIndex(folder, "a").claim()
    first, second = (StoredCheckpoints(tmp_path / name, folder, "a") for name in ("first", "second"))
    assert first.find_latest(pytest.fail) is None
    for name in ("step-0000000001", "step-0000000002", BEST):
        save(first, name, 1)
    assert second.find_latest(pytest.fail) == "step-0000000002"
    for name in ("step-0000000002", BEST):
        save(second, name, 2)
    with pytest.raises(TrainingError, match=TAKEN):
        save(first, BEST, 3)
    assert {name: seed_of(second.fetch(name)) for name in second.names()} == {
        "step-0000000001": 1, "step-0000000002": 2, BEST: 2,
    }  # fmt: skip


@pytest.mark.nightly
def test_a_training_that_has_claimed_nothing_gets_nothing(store: Store, address: str, tmp_path: Path) -> None:
    folder = ObjectFolder(address, store.properties)
    with pytest.raises(TrainingError, match=TAKEN):
        StoredCheckpoints(tmp_path, folder, "a").find_latest(pytest.fail)
    with pytest.raises(TrainingError, match=TAKEN):
        CheckpointIndex(folder, "a").add(BEST, Manifest(at=f"{BEST}-{0:032x}", files={}))
    assert folder.names() == []


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("DLRM_TEST_STORE") != "ceph", reason="moto compares and writes in two steps")
def test_what_one_of_many_writers_has_added_is_never_lost(store: Store, address: str) -> None:
    """Each claims the index again and again, and adds to it until it is refused."""
    added: list[str] = []
    refused: list[str] = []

    def write(number: int) -> None:
        folder = ObjectFolder(address, store.properties)
        for turn in range(8):
            index = CheckpointIndex(folder, f"{number}")
            index.claim()
            for one in range(4):
                name = f"{number}-{turn}-{one}"
                try:
                    index.add(name, Manifest(at=f"{BEST}-{0:032x}", files={PROGRESS: name}))
                except TrainingError:
                    refused.append(name)
                    break
                added.append(name)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert refused
    assert added
    assert sorted(CheckpointIndex(ObjectFolder(address, store.properties)).read()) == sorted(added)


class Memory:
    """A store in memory, which needs no server."""

    address = "s3://logs/memory"

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}

    def read(self, name: str) -> bytes | None:
        return self.files.get(name)

    def swap(self, name: str, before: bytes | None, content: bytes) -> bool:
        if self.files.get(name) != before:
            return False
        self.files[name] = content
        return True


EMPTY = Manifest(at=f"{BEST}-{0:032x}", files={})


def attempt(store: Any, training: str | None) -> CheckpointIndex:
    return CheckpointIndex(store, training)


@pytest.mark.parametrize("who", ["no one", "another training", "an attempt before", "an attempt that has not opened"])
@pytest.mark.parametrize("what", ["add", "drop"])
def test_only_the_attempt_that_opened_the_index_last_writes_it(who: str, what: str) -> None:
    store = Memory()
    earlier = attempt(store, "one")
    earlier.claim()
    earlier.open()
    earlier.add("step-1", EMPTY)
    now = attempt(store, "one")
    assert now.open().keys() == {"step-1"}
    others = {
        "no one": attempt(store, None), "another training": attempt(store, "two"), "an attempt before": earlier,
        "an attempt that has not opened": attempt(store, "one"),
    }  # fmt: skip
    before = store.files[INDEX]
    with pytest.raises(TrainingError, match=TAKEN):
        others[who].add("step-2", EMPTY) if what == "add" else others[who].drop(["step-1"])
    if who in ("no one", "another training"):
        with pytest.raises(TrainingError, match=TAKEN):
            others[who].open()
    assert store.files[INDEX] == before
    now.add("step-2", EMPTY)
    assert now.read().keys() == {"step-1", "step-2"}
    attempt(store, "two").claim()
    for writes in (lambda: now.add("step-3", EMPTY), lambda: now.drop(["step-1"]), now.open):
        with pytest.raises(TrainingError, match=TAKEN):
            writes()
    assert now.read().keys() == {"step-1", "step-2"}


@pytest.mark.parametrize("name", ["../outside", "/etc/passwd", "a/b", "..", ""])
def test_files_of_an_index_name_no_folder(name: str) -> None:
    """They become paths where a checkpoint is copied to."""
    with pytest.raises(ValidationError):
        Manifest(at=f"step-0000000001-{'0' * 32}", files={name: "0" * 64})
    Manifest(at=f"step-0000000001-{'0' * 32}", files={".metadata": "0" * 64, "__0_0.distcp": "1" * 64})

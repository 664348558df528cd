"""Checkpoints of an S3 server: whole or absent, verified, replaced at once, and copied once to a host."""

import json
import threading
import time
from pathlib import Path

import pytest
import torch

from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoint import BEST, CheckpointError
from pipeline.training.state.checkpoint_index import INDEX
from pipeline.training.state.checkpoints import StoredCheckpoints
from storage.errors import StorageError
from storage.objects import ObjectFolder
from tests.objects import Store
from tests.pipeline.training.state.drawn import tensors

pytestmark = pytest.mark.usefixtures("device")
IDENTITY = {"plan": "a"}


@pytest.fixture
def folder(store: Store, request: pytest.FixtureRequest) -> ObjectFolder:
    return ObjectFolder(f"s3://{store.bucket}/{request.node.name}", store.properties)


@pytest.fixture
def kept(folder: ObjectFolder, tmp_path: Path) -> StoredCheckpoints:
    one = StoredCheckpoints(tmp_path / "here", folder)
    one.find_latest(pytest.fail)
    return one


def save(kept: StoredCheckpoints, *steps: int, name: str | None = None) -> None:
    for step in steps:
        kept.save(name or f"step-{step:010d}", tensors(step), {"steps": step}, IDENTITY)


def weights(folder: Path) -> torch.Tensor:
    found = tensors(0)
    checkpoint.load(folder, found, IDENTITY)
    return found["model/weight"]


@pytest.mark.slow
def test_another_host_reads_what_was_saved(kept: StoredCheckpoints, folder: ObjectFolder, tmp_path: Path) -> None:
    save(kept, 1, 2)
    assert [path.name for path in (tmp_path / "here").iterdir()] == []  # a host keeps no part of what it saved
    other = StoredCheckpoints(tmp_path / "there", folder)
    assert other.find_latest(pytest.fail) == "step-0000000002"
    copy = other.fetch("step-0000000002")
    checkpoint.verify(copy)
    assert weights(copy).equal(tensors(2)["model/weight"])
    assert checkpoint.read_progress(copy) == {"steps": 2}
    with pytest.raises(CheckpointError, match="plan: expected b, got a"):
        checkpoint.load(copy, tensors(0), {"plan": "b"})
    before = copy.stat().st_ino
    assert other.fetch("step-0000000002").stat().st_ino == before  # it is not copied again
    (copy / ".metadata").write_bytes(b"")
    assert weights(other.fetch("step-0000000002")).equal(tensors(2)["model/weight"])  # unless it is damaged
    other.fetch("step-0000000001")
    assert [path.name for path in checkpoint.list_checkpoints(tmp_path / "there")] == ["step-0000000001"]


@pytest.mark.nightly
def test_a_training_that_began_without_the_store_is_not_restarted_without_a_word(kept: StoredCheckpoints) -> None:
    checkpoint.save(kept.folder / "step-0000000004", tensors(4), {"steps": 4}, IDENTITY)
    with pytest.raises(CheckpointError, match=r"Finish this training with the storage\.path that it began with"):
        kept.find_latest(pytest.fail)


@pytest.mark.nightly
def test_a_checkpoint_is_replaced_at_once_and_old_files_go(
    kept: StoredCheckpoints, folder: ObjectFolder, tmp_path: Path
) -> None:
    save(kept, 1, name=BEST)
    before = folder.names()
    save(kept, 7, name=BEST)
    assert len(folder.names()) == len(before)
    assert set(folder.names()) & set(before) == {INDEX}
    assert weights(StoredCheckpoints(tmp_path / "there", folder).fetch(BEST)).equal(tensors(7)["model/weight"])


@pytest.mark.slow
def test_the_newest_stay_and_those_of_abandoned_steps_go(kept: StoredCheckpoints, folder: ObjectFolder) -> None:
    save(kept, 1, 2, 9)
    save(kept, 1, name=BEST)
    save(kept, 3)
    kept.prune(2, "step-0000000003")
    assert kept.names() == ["step-0000000002", "step-0000000003", BEST]
    left = {one.partition("/")[0].rpartition("-")[0] for one in folder.names() if one != INDEX}
    assert left == set(kept.names())


@pytest.mark.nightly
@pytest.mark.parametrize("damage", ["a file is gone", "a file is shorter", "not in the index"])
def test_what_is_damaged_or_half_written_is_never_read(
    kept: StoredCheckpoints, folder: ObjectFolder, damage: str
) -> None:
    save(kept, 1)
    index = folder.read(INDEX)
    save(kept, 2)
    shard = next(one for one in folder.names() if one.endswith(".distcp") and one.startswith("step-0000000002"))
    if damage == "a file is gone":
        folder.remove(shard)
    elif damage == "a file is shorter":
        content = folder.read(shard)
        assert content
        folder.write(shard, content[:-1])
    else:
        assert index
        folder.write(INDEX, index)
    told: list[str] = []
    assert kept.find_latest(lambda error: told.append(str(error))) == "step-0000000001"
    assert weights(kept.fetch("step-0000000001")).equal(tensors(1)["model/weight"])
    if damage == "not in the index":
        assert told == []
        assert not [one for one in folder.names() if one.startswith("step-0000000002")]  # its leftovers are gone
    else:
        assert len(told) == 1
        assert told[0].startswith("checkpoint 'step-0000000002' in the store: expected ")


@pytest.mark.nightly
def test_an_index_names_no_file_outside_its_folders(kept: StoredCheckpoints, folder: ObjectFolder) -> None:
    save(kept, 1)
    index = json.loads(folder.read(INDEX) or b"")
    index["checkpoints"]["step-0000000001"]["files"] = {"../../x": "0"}
    folder.write(INDEX, json.dumps(index).encode())
    refused = r"^file 's3://.*/index\.json': expected a list of checkpoints, got other"
    with pytest.raises(StorageError, match=refused):
        kept.fetch("step-0000000001")
    index["checkpoints"]["step-0000000001"] |= {"files": {}, "at": ""}  # removing that folder would remove all
    folder.write(INDEX, json.dumps(index).encode())
    with pytest.raises(StorageError, match=refused):
        kept.remove("step-0000000001") or kept.find_latest(pytest.fail)
    assert len(folder.names()) > 1


@pytest.mark.nightly
def test_a_lost_store_fails_the_save_on_every_rank_and_keeps_what_is_there(
    kept: StoredCheckpoints, folder: ObjectFolder, tmp_path: Path
) -> None:
    save(kept, 1)
    away = {**folder.properties, "s3.endpoint": "http://127.0.0.1:9", "s3.connect-timeout": "1"}
    lost = StoredCheckpoints(tmp_path / "lost", ObjectFolder(folder.address, away))
    with pytest.raises(CheckpointError, match=r"'step-0000000002' of rank 0 on host .*: expected to be written to s3:"):
        save(lost, 2)
    assert not list((tmp_path / "lost").iterdir())
    assert kept.find_latest(pytest.fail) == "step-0000000001"


@pytest.mark.nightly
def test_ranks_of_one_host_copy_a_checkpoint_once(
    kept: StoredCheckpoints, folder: ObjectFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(kept, 1)
    fetched: list[str] = []

    def fetch(self: ObjectFolder, name: str, path: Path) -> None:
        fetched.append(name)
        time.sleep(0.05)
        real(self, name, path)

    real = ObjectFolder.fetch
    monkeypatch.setattr(ObjectFolder, "fetch", fetch)
    found: list[Path] = []
    ranks = [
        threading.Thread(
            target=lambda: found.append(StoredCheckpoints(tmp_path / "x", folder).fetch("step-0000000001"))
        )
        for _ in range(3)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert len(found) == 3
    assert len(fetched) == len(set(fetched)) == len(folder.names()) - 1

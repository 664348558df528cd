"""Checkpoints are whole or passed over, fit or are refused by name, and never run code."""

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pipeline import checkpoint
from pipeline.checkpoint import CheckpointError
from storage.artifacts import sha256

pytestmark = pytest.mark.usefixtures("device")
PROGRESS = {"steps": 3, "position": {"epoch": 0, "batches": 3}}


def tensors(seed: int = 0) -> dict[str, Any]:
    random = torch.Generator().manual_seed(seed)
    return {
        "model/top.weight": torch.randn(4, 3, generator=random),
        "dense/top.weight/step": torch.tensor(float(seed)),
        "model/half": torch.randn(5, generator=random).bfloat16(),
        "model/count": torch.arange(seed, seed + 4),
    }


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three checkpoints: steps 1, 2, 10."""
    for step in (1, 2, 10):
        checkpoint.save(tmp_path / f"step-{step:010d}", tensors(step), PROGRESS | {"steps": step})
    return tmp_path


def name(folder: Path | None) -> str | None:
    return folder and folder.name


def seal(folder: Path) -> None:
    """Makes the manifest agree with whatever is there: what a forger would do."""
    files = {path.name: sha256(path) for path in folder.iterdir() if path.name != checkpoint.MANIFEST}
    (folder / checkpoint.MANIFEST).write_text(json.dumps(files))


def test_round_trip(root: Path) -> None:
    folder = checkpoint.latest(root)
    assert name(folder) == "step-0000000010"
    assert folder is not None
    found = {key: torch.zeros_like(value) for key, value in tensors().items()}
    checkpoint.load(folder, found)
    assert all(found[key].equal(value) for key, value in tensors(10).items())
    assert checkpoint.read_progress(folder) == PROGRESS | {"steps": 10}
    assert checkpoint.stored_tensors(folder) == {key: tuple(value.shape) for key, value in tensors().items()}
    assert not list(root.glob(".*"))


def test_saving_again_replaces(root: Path) -> None:
    folder = root / "step-0000000010"
    checkpoint.save(folder, tensors(77), PROGRESS)
    checkpoint.verify(folder)
    found = tensors()
    checkpoint.load(folder, found)
    assert found["model/top.weight"].equal(tensors(77)["model/top.weight"])


def flip_a_bit(folder: Path) -> None:
    shard = folder / "__0_0.distcp"
    content = bytearray(shard.read_bytes())
    content[len(content) // 2] ^= 1
    shard.write_bytes(bytes(content))


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "killed before the manifest": (
        lambda folder: (folder / "manifest.json").unlink(),
        "expected a readable manifest, got none",
    ),
    "half a manifest": (
        lambda folder: (folder / "manifest.json").write_text('{"a": '),
        "expected a readable manifest, got none",
    ),
    "another manifest": (
        lambda folder: (folder / "manifest.json").write_text("[1]"),
        "expected a readable manifest, got none",
    ),
    "flipped bit": (flip_a_bit, r"expected sha256 \w{12}\.\. of __0_0\.distcp, got \w{12}\.\."),
    "deleted shard": (
        lambda folder: (folder / "__0_0.distcp").unlink(),
        r"expected files \['\.metadata', '__0_0\.distcp', 'progress\.json'\], got \['\.metadata', 'progress\.json'\]",
    ),
    "added file": (lambda folder: (folder / "more").touch(), r"expected files .*, got .*'more'"),
    "emptied metadata": (lambda folder: (folder / ".metadata").write_bytes(b""), r"of \.metadata, got"),
    "other progress": (lambda folder: (folder / "progress.json").write_text("{}"), r"of progress\.json, got"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over(root: Path, damage: str) -> None:
    spoil, message = DAMAGE[damage]
    spoil(root / "step-0000000010")
    with pytest.raises(CheckpointError, match=rf"^checkpoint 'step-0000000010': .*{message}"):
        checkpoint.verify(root / "step-0000000010")
    assert name(checkpoint.latest(root)) == "step-0000000002"
    spoil(root / "step-0000000002")
    assert name(checkpoint.latest(root)) == "step-0000000001"
    spoil(root / "step-0000000001")
    assert checkpoint.latest(root) is None


def test_temporary_and_foreign_folders_do_not_disturb(root: Path) -> None:
    shutil.copytree(root / "step-0000000002", root / ".step-0000000011.tmp")
    shutil.copytree(root / "step-0000000002", root / "step-99")
    shutil.copytree(root / "step-0000000002", root / "best")
    assert name(checkpoint.latest(root)) == "step-0000000010"
    checkpoint.save(root / "step-0000000011", tensors(11), PROGRESS)
    assert name(checkpoint.latest(root)) == "step-0000000011"
    assert not (root / ".step-0000000011.tmp").exists()


def test_pruning_keeps_the_newest(root: Path) -> None:
    (root / "best").mkdir()
    checkpoint.prune(root, keep=2)
    assert sorted(path.name for path in root.iterdir()) == ["best", "step-0000000002", "step-0000000010"]


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.latest(tmp_path / "absent") is None


@pytest.mark.parametrize("part", ["save", "write_json", "seal_folder"])
def test_a_failed_save_leaves_the_old_one_and_no_rubbish(
    root: Path, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    before = {path.name: sha256(path) for path in (root / "step-0000000010").iterdir()}
    monkeypatch.setattr(dcp if part == "save" else checkpoint, part, full)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.save(root / "step-0000000010", tensors(5), PROGRESS)
    assert str(caught.value) == (
        "checkpoint 'step-0000000010': expected to be written, got No space left on device. "
        f"Make room, or mend '{root}'; earlier checkpoints are kept."
    )
    assert {path.name: sha256(path) for path in (root / "step-0000000010").iterdir()} == before
    assert not list(root.glob(".*"))


@pytest.mark.parametrize(
    ("changed", "stored"),
    [({"model/top.weight": torch.zeros(5, 3)}, "(4, 3)"), ({"model/new": torch.zeros(5, 3)}, "no such tensor")],
)
def test_what_does_not_fit_is_named(root: Path, changed: dict[str, torch.Tensor], stored: str) -> None:
    wanted = tensors() | changed
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(root / "step-0000000010", wanted)
    assert str(caught.value) == (
        f"checkpoint 'step-0000000010', tensor '{next(iter(changed))}': expected shape (5, 3), got {stored}. "
        "Train with the configuration that wrote it, or start again with again=true."
    )
    assert wanted["dense/top.weight/step"] == 0.0  # nothing was loaded in part


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, canary: Path) -> None:
        self.canary = canary

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.canary}'",)


def test_a_payload_as_metadata_is_not_run(root: Path, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", root / "step-0000000010"
    (folder / ".metadata").write_bytes(pickle.dumps(Payload(canary)))
    seal(folder)
    checkpoint.verify(folder)
    for use in (lambda: checkpoint.load(folder, tensors()), lambda: checkpoint.stored_tensors(folder)):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert str(caught.value) == (
            "checkpoint 'step-0000000010', file .metadata: expected the classes of torch.distributed.checkpoint, "
            "got posix.system. Do not use this checkpoint."
        )
    assert not canary.exists()
    pickle.loads((folder / ".metadata").read_bytes())  # the payload is a live one
    assert canary.exists()


@pytest.mark.parametrize(
    "attack", ["builtins getattr", "builtins eval", "torch load", "torch.serialization load", "torch hub"]
)
def test_no_way_round_by_names_close_to_the_admitted(root: Path, attack: str) -> None:
    module, member = attack.split()
    folder = root / "step-0000000010"
    (folder / ".metadata").write_bytes(f"c{module}\n{member}\n.".encode())
    seal(folder)
    with pytest.raises(CheckpointError, match=rf"got {module}\.{member}\. Do not use"):
        checkpoint.load(folder, tensors())


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"state_dict_metadata": {}})])
def test_metadata_that_is_none_of_dcp_is_refused(root: Path, content: bytes) -> None:
    folder = root / "step-0000000010"
    (folder / ".metadata").write_bytes(content)
    seal(folder)
    with pytest.raises(CheckpointError, match=r"file \.metadata: expected the classes"):
        checkpoint.load(folder, tensors())


def test_a_payload_as_weights_is_not_run(root: Path, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", root / "step-0000000010"
    shard = folder / "__0_0.distcp"
    shard.write_bytes(pickle.dumps(Payload(canary)).ljust(shard.stat().st_size, b"\0"))
    seal(folder)
    with pytest.raises(
        CheckpointError, match=r"'step-0000000010': expected shards as DCP writes them, got .*Do not use"
    ):
        checkpoint.load(folder, tensors())
    assert not canary.exists()


def test_admitted_is_what_dcp_writes(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No class is let in that a real .metadata does not need."""
    seen: set[tuple[str, str]] = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, member: str) -> Any:
            seen.add((module.replace("pathlib._local", "pathlib"), member))
            return super().find_class(module, member)

    with (root / "step-0000000010" / ".metadata").open("rb") as file:
        Listing(file).load()
    dtypes = {("torch", "float32"), ("torch", "bfloat16"), ("torch", "int64")}
    assert seen == checkpoint._ADMITTED | dtypes

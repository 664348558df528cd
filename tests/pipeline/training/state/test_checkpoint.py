"""Damaged checkpoints are skipped, foreign ones are refused by name, and none ever runs code."""

import errno
import json
import os
import pickle
import resource
import shutil
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from pipeline.errors import TrainingError
from pipeline.training.state import checkpoint
from pipeline.training.state.async_checkpoint import AsyncCheckpointer
from pipeline.training.state.checkpoint import CheckpointError
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.state.progress import load_progress
from storage.artifacts import sha256
from storage.errors import StorageError

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
    return folder.name if folder else None


def seal(folder: Path) -> None:
    """Makes the manifest agree with the files, as a forger would."""
    files = {path.name: sha256(path) for path in folder.iterdir() if path.name != checkpoint.MANIFEST}
    (folder / checkpoint.MANIFEST).write_text(json.dumps(files))


def test_round_trip(root: Path) -> None:
    folder = checkpoint.find_latest(root)
    assert name(folder) == "step-0000000010"
    assert folder is not None
    found = {key: torch.zeros_like(value) for key, value in tensors().items()}
    checkpoint.load(folder, found)
    assert all(found[key].equal(value) for key, value in tensors(10).items())
    assert checkpoint.read_progress(folder) == PROGRESS | {"steps": 10}
    assert checkpoint.stored_shapes(folder) == {key: tuple(value.shape) for key, value in tensors().items()}
    assert not list(root.glob(".*"))


def test_saving_again_replaces(root: Path) -> None:
    folder = root / "step-0000000010"
    checkpoint.save(folder, tensors(77), PROGRESS)
    checkpoint.verify(folder)
    found = tensors()
    checkpoint.load(folder, found)
    assert checkpoint.describe(folder)["state"] == "verified"
    assert found["model/top.weight"].equal(tensors(77)["model/top.weight"])


PROGRESS_NOTES: list[bytes] = [
    b"{",
    b"\xff",
    b"[]",
    b'{"progress": 5}',
    b'{"progress": {"steps": "many"}}',
    b"[" * 100_000,
]


@pytest.mark.parametrize("notes", PROGRESS_NOTES, ids=lambda notes: notes[:40].decode(errors="replace"))
def test_a_forged_progress_is_refused(notes: bytes, root: Path) -> None:
    folder = root / "step-0000000010"
    (folder / checkpoint.PROGRESS).write_bytes(notes)
    seal(folder)
    checkpoint.verify(folder)
    with pytest.raises(CheckpointError, match=r"^checkpoint 'step-0000000010'.*progress"):
        load_progress(folder)


@pytest.mark.parametrize("size", [-1, 2**62])
def test_forged_shapes_are_refused(size: int, root: Path) -> None:
    folder = root / "step-0000000010"
    with (folder / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.state_dict_metadata["model/count"].size = torch.Size([size])
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    with pytest.raises(CheckpointError, match=r"^checkpoint 'step-0000000010'"):
        checkpoint.export(folder)


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
def test_a_damaged_checkpoint_is_skipped(root: Path, damage: str) -> None:
    spoil, message = DAMAGE[damage]
    spoil(root / "step-0000000010")
    with pytest.raises(CheckpointError, match=rf"^checkpoint 'step-0000000010': .*{message}"):
        checkpoint.verify(root / "step-0000000010")
    assert name(checkpoint.find_latest(root)) == "step-0000000002"
    spoil(root / "step-0000000002")
    assert name(checkpoint.find_latest(root)) == "step-0000000001"
    spoil(root / "step-0000000001")
    assert checkpoint.find_latest(root) is None


def test_temporary_and_foreign_folders_do_not_disturb(root: Path) -> None:
    shutil.copytree(root / "step-0000000002", root / ".step-0000000011.tmp")
    shutil.copytree(root / "step-0000000002", root / "step-99")
    shutil.copytree(root / "step-0000000002", root / "best")
    assert name(checkpoint.find_latest(root)) == "step-0000000010"
    checkpoint.save(root / "step-0000000011", tensors(11), PROGRESS)
    assert name(checkpoint.find_latest(root)) == "step-0000000011"
    assert not (root / ".step-0000000011.tmp").exists()


def test_pruning_keeps_the_newest(root: Path) -> None:
    (root / "best").mkdir()
    checkpoint.prune(root, 2, root / "step-0000000010")
    assert sorted(path.name for path in root.iterdir()) == ["best", "step-0000000002", "step-0000000010"]


def test_pruning_keeps_the_one_just_saved_and_no_damaged_one_of_a_later_step(root: Path) -> None:
    """A training that could not resume from step 10 has saved step 2."""
    checkpoint.prune(root, 1, root / "step-0000000002")
    assert [path.name for path in root.iterdir()] == ["step-0000000002"]


def test_no_folder_no_checkpoint(tmp_path: Path) -> None:
    assert checkpoint.find_latest(tmp_path / "absent") is None


@pytest.mark.parametrize("part", ["save", "write_json", "seal_folder"])
def test_a_failed_save_leaves_the_old_one_and_nothing_else(
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
        f"Free disk space or repair '{root}'. Earlier checkpoints are kept."
    )
    assert {path.name: sha256(path) for path in (root / "step-0000000010").iterdir()} == before
    assert not list(root.glob(".*"))


@pytest.mark.parametrize(
    ("changed", "stored"),
    [({"model/top.weight": torch.zeros(5, 3)}, "(4, 3)"), ({"model/new": torch.zeros(5, 3)}, "no such tensor")],
)
def test_a_tensor_that_does_not_fit_is_named(root: Path, changed: dict[str, torch.Tensor], stored: str) -> None:
    wanted = tensors() | changed
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(root / "step-0000000010", wanted)
    assert str(caught.value) == (
        f"checkpoint 'step-0000000010', tensor '{next(iter(changed))}': expected shape (5, 3), got {stored}. "
        "Train with the configuration that wrote it, or start again: force=true (flows.recurring: scratch=true)."
    )
    assert wanted["dense/top.weight/step"] == 0.0  # nothing was loaded, not even in part


def test_an_unexpected_tensor_is_an_error(root: Path) -> None:
    wanted = tensors()
    del wanted["model/half"]
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(root / "step-0000000010", wanted)
    assert str(caught.value) == (
        "checkpoint 'step-0000000010', tensor 'model/half': expected no such tensor, got (5,). "
        "Train with the configuration that wrote it, or start again: force=true (flows.recurring: scratch=true)."
    )


@pytest.mark.parametrize(
    ("wanted", "sentence"),
    [
        ({"plan": "b", "optimizer": "adam"}, "plan: expected b, got a. Train"),
        ({"plan": "a", "optimizer": "sgd"}, "optimizer: expected sgd, got adam. Train"),
        ({"plan": "a"}, "optimizer: expected none, got adam. Train"),
        ({"plan": "a", "optimizer": "adam", "table": "x"}, "table: expected x, got none. Train"),
    ],
)
def test_another_identity_is_refused(tmp_path: Path, wanted: dict[str, str], sentence: str) -> None:
    folder, identity = tmp_path / "step-0000000001", {"plan": "a", "optimizer": "adam"}
    checkpoint.save(folder, tensors(), PROGRESS, identity)
    checkpoint.load(folder, tensors(1), identity)
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(folder, tensors(), wanted)
    assert str(caught.value).startswith(f"checkpoint 'step-0000000001', {sentence}")


class Gate:
    """Holds DCP's writes until it is opened, and counts concurrent ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.opened = threading.Event()
        self.writing = self.most = 0
        self.save = dcp.save
        monkeypatch.setattr(dcp, "save", self)

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        self.writing += 1
        self.most = max(self.most, self.writing)
        assert self.opened.wait(30)
        try:
            return self.save(*arguments, **named)
        finally:
            self.writing -= 1


def test_a_background_save_keeps_the_values_from_its_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, state, folder, sealed = Gate(monkeypatch), tensors(3), tmp_path / "step-0000000003", list[str]()
    with AsyncCheckpointer(True, Checkpoints(tmp_path)) as checkpointer:
        checkpointer.save(folder.name, state, PROGRESS, {}, lambda: sealed.append("sealed"))
        for tensor in state.values():
            tensor.zero_()
        assert (folder.exists(), sealed) == (False, [])
        gate.opened.set()
    assert sealed == ["sealed"]
    found = tensors()
    checkpoint.load(folder, found)
    assert all(found[key].equal(value) for key, value in tensors(3).items())


def test_one_save_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate = Gate(monkeypatch)
    threading.Timer(0.2, gate.opened.set).start()
    with AsyncCheckpointer(True, Checkpoints(tmp_path)) as checkpointer:
        for step in (1, 2, 3):
            checkpointer.save(f"step-000000000{step}", tensors(step), PROGRESS, {})
    assert gate.most == 1
    for step in (1, 2, 3):  # although the next save overwrites the copy
        found = tensors()
        checkpoint.load(tmp_path / f"step-000000000{step}", found)
        assert all(found[key].equal(value) for key, value in tensors(step).items())


@pytest.mark.parametrize("call", ["check", "wait", "save", "end"])
def test_an_error_in_the_background_is_raised_by_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "seal_folder", full)
    checkpointer = AsyncCheckpointer(True, Checkpoints(tmp_path))
    checkpointer.save("step-0000000001", tensors(), PROGRESS, {})
    assert checkpointer.thread is not None
    checkpointer.thread.join()
    calls: dict[str, Callable[[], object]] = {
        "check": checkpointer.check,
        "wait": checkpointer.wait,
        "save": lambda: checkpointer.save("step-0000000002", tensors(), PROGRESS, {}),
        "end": lambda: checkpointer.__exit__(None, None, None),
    }
    with pytest.raises(CheckpointError, match="expected to be written, got No space left on device"):
        calls[call]()
    checkpointer.wait()  # it is raised once
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("background", [True, False])
def test_weights_that_are_not_finite_are_not_saved(tmp_path: Path, background: bool) -> None:
    state = tensors() | {"tables/x": torch.tensor([1.0, float("nan")])}
    with pytest.raises(TrainingError, match=r"weights at step 3, 'tables/x': expected finite numbers, got inf or nan"):  # noqa: SIM117
        with AsyncCheckpointer(background, Checkpoints(tmp_path)) as checkpointer:
            checkpointer.save("step-0000000003", state, PROGRESS, {})
    assert not list(tmp_path.iterdir())


def test_the_error_that_ends_training_takes_precedence(tmp_path: Path) -> None:
    begun = threading.Event()

    class Late(Checkpoints):
        def save(self, *arguments: Any, **named: Any) -> None:
            assert begun.wait(30)
            super().save(*arguments, **named)

    checkpointer = AsyncCheckpointer(True, Late(tmp_path))
    checkpointer.save("step-0000000003", {"x": torch.tensor([float("nan")])}, PROGRESS, {})
    begun.set()
    checkpointer.__exit__(KeyError, KeyError(), None)  # raises nothing of its own
    assert checkpointer.thread is not None
    assert not checkpointer.thread.is_alive()


def test_the_second_copy_reuses_memory(tmp_path: Path) -> None:
    with AsyncCheckpointer(True, Checkpoints(tmp_path)) as checkpointer:
        checkpointer.save("step-0000000001", tensors(1), PROGRESS, {})
        before = {name: copy.data_ptr() for name, copy in checkpointer.copies.items()}
        checkpointer.save("step-0000000002", tensors(2), PROGRESS, {})
        assert {name: copy.data_ptr() for name, copy in checkpointer.copies.items()} == before


def test_export_is_the_whole_weights(root: Path) -> None:
    weights = checkpoint.export(root / "step-0000000010")
    expected = {name[6:]: value for name, value in tensors(10).items() if name.startswith("model/")}
    assert weights.keys() == expected.keys() == {"top.weight", "half", "count"}
    assert all(weights[name].equal(value) and weights[name].dtype == value.dtype for name, value in expected.items())


def test_export_takes_the_mean_where_there_is_one(tmp_path: Path) -> None:
    state = tensors(1) | {"average/top.weight": torch.ones(4, 3)}
    checkpoint.save(tmp_path / "step-0000000001", state, {"averaged": 2})
    checkpoint.save(tmp_path / "step-0000000002", state, {"averaged": 0})
    assert checkpoint.export(tmp_path / "step-0000000001")["top.weight"].equal(torch.ones(4, 3))
    assert checkpoint.export(tmp_path / "step-0000000002")["top.weight"].equal(tensors(1)["model/top.weight"])


def test_a_damaged_checkpoint_is_not_exported(root: Path) -> None:
    flip_a_bit(root / "step-0000000010")
    with pytest.raises(CheckpointError, match=r"expected sha256 \w{12}\.\. of __0_0\.distcp"):
        checkpoint.export(root / "step-0000000010")


def test_a_checkpoint_is_described(root: Path) -> None:
    folder = root / "step-0000000011"
    checkpoint.save(folder, tensors(), {"steps": 11, "validated_step": 11, "valid_ne": 0.8})
    entry = checkpoint.describe(folder)
    assert (entry["name"], entry["step"], entry["valid_ne"], entry["state"]) == (folder.name, 11, 0.8, "verified")
    assert entry["bytes"] == sum(path.stat().st_size for path in folder.iterdir())
    assert checkpoint.describe(root / "step-0000000010")["valid_ne"] is None
    flip_a_bit(folder)
    entry = checkpoint.describe(folder)
    assert (entry["state"], entry["step"], entry["valid_ne"]) == ("damaged", 11, None)
    assert "__0_0.distcp" in entry["error"]


def test_a_checkpoint_that_was_being_replaced_comes_back(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a training that keeps one checkpoint would start again from nothing."""
    folder, replace = root / "step-0000000010", Path.replace

    def fail(old: Path, new: Path) -> Path:
        if old.name == f".{folder.name}.tmp":
            raise OSError(errno.EIO, "Input/output error")
        return replace(old, new)

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.save(folder, tensors(2), PROGRESS)
    assert checkpoint.list_checkpoints(root)[-1] != folder
    checkpoint.remove_partial(root)
    assert checkpoint.find_latest(root) == folder
    assert checkpoint.export(folder)["half"].equal(tensors(10)["model/half"])
    assert not list(root.glob(".*"))


def test_leftovers_of_interrupted_saves_are_removed(root: Path) -> None:
    for name_of_rubbish in (".step-0000000011.tmp", ".best.0a1b.tmp"):
        shutil.copytree(root / "step-0000000002", root / name_of_rubbish)
    checkpoint.remove_partial(root)
    assert len(list(root.iterdir())) == 3
    checkpoint.remove_partial(root / "absent")


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
    for use in (lambda: checkpoint.load(folder, tensors()), lambda: checkpoint.stored_shapes(folder)):
        with pytest.raises(CheckpointError) as caught:
            use()
        assert str(caught.value) == (
            "checkpoint 'step-0000000010', file .metadata: expected only classes of torch.distributed.checkpoint, "
            "got posix.system. Do not use this checkpoint."
        )
    assert not canary.exists()
    pickle.loads((folder / ".metadata").read_bytes())  # the payload works
    assert canary.exists()


@pytest.mark.parametrize(
    "attack", ["builtins getattr", "builtins eval", "torch load", "torch.serialization load", "torch hub"]
)
def test_names_close_to_the_allowed_ones_are_refused(root: Path, attack: str) -> None:
    module, member = attack.split()
    folder = root / "step-0000000010"
    (folder / ".metadata").write_bytes(f"c{module}\n{member}\n.".encode())
    seal(folder)
    with pytest.raises(CheckpointError, match=rf"got {module}\.{member}\. Do not use"):
        checkpoint.load(folder, tensors())


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"state_dict_metadata": {}})])
def test_metadata_that_is_not_from_dcp_is_refused(root: Path, content: bytes) -> None:
    folder = root / "step-0000000010"
    (folder / ".metadata").write_bytes(content)
    seal(folder)
    with pytest.raises(CheckpointError, match=r"file \.metadata: expected only classes"):
        checkpoint.load(folder, tensors())


def test_a_payload_as_weights_is_not_run(root: Path, tmp_path: Path) -> None:
    canary, folder = tmp_path / "canary", root / "step-0000000010"
    shard = folder / "__0_0.distcp"
    shard.write_bytes(pickle.dumps(Payload(canary)).ljust(shard.stat().st_size, b"\0"))
    seal(folder)
    with pytest.raises(CheckpointError, match=r"'step-0000000010': expected readable shards, got .*Do not use"):
        checkpoint.load(folder, tensors())
    assert not canary.exists()


def test_exactly_the_classes_that_dcp_writes_are_allowed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real .metadata needs every allowed class."""
    seen: set[tuple[str, str]] = set()

    class Listing(pickle.Unpickler):
        def find_class(self, module: str, member: str) -> Any:
            seen.add((module.replace("pathlib._local", "pathlib"), member))
            return super().find_class(module, member)

    with (root / "step-0000000010" / ".metadata").open("rb") as file:
        Listing(file).load()
    dtypes = {("torch", "float32"), ("torch", "bfloat16"), ("torch", "int64")}
    assert seen == checkpoint._ADMITTED | dtypes


@pytest.mark.parametrize("place", ["../other/__0_0.distcp", "/tmp/x", "..", "linked"])
def test_shards_outside_the_checkpoint_are_not_read(root: Path, tmp_path: Path, place: str) -> None:
    """The metadata name another place, and the manifest agrees with them."""
    folder = root / "step-0000000010"
    shutil.copytree(folder, root / "other")
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = place
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    seal(folder)
    (folder / "linked").symlink_to(root / "other" / "__0_0.distcp")
    for read in (checkpoint.stored_shapes, lambda path: checkpoint.read_whole(path, "model/")):
        with pytest.raises(CheckpointError, match="expected shards inside its folder, got name"):
            read(folder)


def test_a_checkpoint_of_links_is_skipped(root: Path) -> None:
    folder, other = root / "step-0000000010", root / "elsewhere"
    other.mkdir()
    for path in list(folder.iterdir()):
        path.rename(other / path.name)
        path.symlink_to(other / path.name)
    with pytest.raises(CheckpointError, match="expected regular files, got links: "):
        checkpoint.verify(folder)
    assert name(checkpoint.find_latest(root)) == "step-0000000002"


def test_a_checkpoint_that_cannot_be_opened_for_now_is_not_a_damaged_one(root: Path) -> None:
    """Else the training would go on from an older one."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = len(os.listdir("/proc/self/fd")) - 1
    resource.setrlimit(resource.RLIMIT_NOFILE, (taken, limits[1]))
    try:
        with ExitStack() as stack:
            with suppress(OSError):
                while True:
                    stack.enter_context(open(os.devnull, encoding="utf-8"))
            with pytest.raises(StorageError) as refused:
                checkpoint.verify(root / "step-0000000010")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert not isinstance(refused.value, CheckpointError)
    assert "Too many open files" in str(refused.value)
    assert name(checkpoint.find_latest(root)) == "step-0000000010"

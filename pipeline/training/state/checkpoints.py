"""The checkpoints of one training: in a folder that all ranks see, or in an object store."""

import json
import shutil
import socket
import uuid
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from filelock import FileLock
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter

from pipeline.errors import ContractError, TrainingError
from pipeline.training.state import checkpoint
from pipeline.training.state.checkpoint import (
    BEST,
    MANIFEST,
    PROGRESS,
    STEP,
    CheckpointError,
    Identity,
    find_cause,
    gather_objects,
    require_finite,
)
from pipeline.training.state.checkpoint_index import INDEX, CheckpointIndex, Manifest
from storage.artifacts import inside, seal_folder, sha256, write_json
from storage.errors import StorageError
from storage.objects import ObjectFolder

Damaged = Callable[[CheckpointError], None]


class Checkpoints:
    """Checkpoints in a folder that all ranks see.

    Args:
        folder: Where they are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def save(
        self,
        name: str,
        tensors: Mapping[str, Any],
        progress: Mapping[str, Any],
        identity: Identity,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Writes a checkpoint. All ranks call it together. See `checkpoint.save`."""
        checkpoint.save(self.folder / name, tensors, progress, identity, group)

    def find_latest(self, damaged: Damaged) -> str | None:
        """Returns the name of the newest checkpoint that verifies. Removes leftovers of interrupted saves.

        Args:
            damaged: Called with the error of each checkpoint that does not verify.
        """
        checkpoint.remove_partial(self.folder)
        found = checkpoint.find_latest(self.folder, damaged)
        return None if found is None else found.name

    def fetch(self, name: str, known: bool = False) -> Path:
        """Returns the folder of a checkpoint on this machine.

        Args:
            known: `find_latest` has just verified it.
        Raises:
            CheckpointError: If it is not known and does not verify.
        """
        folder = self.folder / name
        if not known:
            checkpoint.verify(folder)
        return folder

    def share(self, name: str) -> None:
        """Lets all ranks fetch a checkpoint that this one has written alone."""

    def remove(self, name: str) -> None:
        """Removes a checkpoint. All ranks call it together, when none needs it any more."""
        if dist.get_rank() == 0:
            shutil.rmtree(self.folder / name, ignore_errors=True)

    def prune(self, keep: int, newest: str) -> None:
        """Removes all but the newest. See `checkpoint.prune`."""
        checkpoint.prune(self.folder, keep, self.folder / newest)


class StoredCheckpoints(Checkpoints):
    """Checkpoints in an object store. Ranks on several hosts need no common folder.

    Each rank writes its shards into a temporary folder of its host and copies them to the store. Rank 0 adds the
    checkpoint to the index when all have. A host that reads a checkpoint copies the whole of it into its own folder
    first. Whoever writes calls `find_latest` first, on rank 0.

    Args:
        folder: Folder of this host for copies.
        store: Where the checkpoints are.
        claim: Token with which the training has claimed them; see `CheckpointIndex`.
    """

    def __init__(self, folder: Path, store: ObjectFolder, claim: str | None = None) -> None:
        super().__init__(folder)
        self.store, self.index = store, CheckpointIndex(store, claim)

    def save(
        self,
        name: str,
        tensors: Mapping[str, Any],
        progress: Mapping[str, Any],
        identity: Identity,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """Writes a checkpoint. All ranks call it together, each with its shards.

        A reader finds either the complete checkpoint or the one that it replaces.

        Raises:
            TrainingError: On every rank, if a number is not finite, or another training has taken the checkpoints over.
                Nothing is written then.
            CheckpointError: On every rank, if one cannot write its part.
        """
        require_finite(tensors, f"weights at step {progress.get('steps')}", group)
        rank = dist.get_rank()
        temporary = self.folder / f".{name}.rank-{rank}.tmp"  # ranks of one host share the folder
        place = f"{name}-{gather_objects(uuid.uuid4().hex, group)[0]}"

        def begin() -> None:
            for old in self.folder.glob(f".*.rank-{rank}.tmp"):  # of a rank that was killed
                shutil.rmtree(old, ignore_errors=True)
            temporary.mkdir(parents=True)

        def write() -> None:
            dcp.save(dict(tensors), storage_writer=FileSystemWriter(str(temporary)), process_group=group)

        def put() -> dict[str, str]:
            if rank == 0:
                write_json(temporary / PROGRESS, {"progress": dict(progress), "identity": dict(identity)})
            files = {path.name: sha256(path) for path in sorted(temporary.iterdir())}
            for file in files:
                self.store.put(temporary / file, f"{place}/{file}")
            return files

        def publish() -> None:
            if rank == 0:
                whole = {file: digest for found in parts for file, digest in found.items()}
                self._publish(name, Manifest(at=place, files=whole))

        try:
            self._on_all_ranks(name, group, begin)
            self._on_all_ranks(name, group, write)
            parts = self._on_all_ranks(name, group, put)
        except CheckpointError:
            if rank == 0:
                self._discard(place)
            raise
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self._on_all_ranks(name, group, publish)  # if the store fails now, the index may have changed: the files stay

    def _on_all_ranks(self, name: str, group: dist.ProcessGroup | None, do: Callable[[], Any]) -> list[Any]:
        """Does something on every rank and returns the results by rank. If it fails on one, all raise its error.

        DCP fails on all ranks if one fails. The error is that of the rank that failed, and names its host.
        """
        done: Any = None
        failure: ContractError | None = None
        guilty = True
        try:
            done = do()
        except TrainingError as error:
            failure = error
        except (OSError, StorageError, CheckpointException) as error:
            guilty = not isinstance(error, CheckpointException) or dist.get_rank() in error.failures
            cause = error if isinstance(error, StorageError) else find_cause(error)
            place, remedy = f"'{self.folder}'", "Free disk space there, or repair the folder."
            if isinstance(error, StorageError):
                place, remedy = self.store.address, "Check the store."
            failure = CheckpointError(
                f"checkpoint '{name}' of rank {dist.get_rank()} on host '{socket.gethostname()}'",
                f"to be written to {place}", _first_line(cause), f"{remedy} Earlier checkpoints are kept.",
            )  # fmt: skip
        parts = gather_objects((done, failure, guilty), group)
        raised = [one for one in parts if one[1] is not None]
        if raised:
            raise next((error for _, error, guilty in raised if guilty), raised[0][1])
        return [result for result, _, _ in parts]

    def _publish(self, name: str, manifest: Manifest) -> None:
        """Adds a checkpoint whose files are there, then removes those of the one that it replaces."""
        try:
            replaced = self.index.add(name, manifest)
        except TrainingError:
            self._discard(manifest.at)
            raise
        if replaced is not None:
            self._discard(replaced.at)

    def _discard(self, place: str) -> None:
        """Removes what nobody needs any more. Fails without a word: the next save or start tries again."""
        with suppress(StorageError):
            self.store.remove(place)

    def find_latest(self, damaged: Damaged) -> str | None:
        """Returns the name of the newest checkpoint that verifies, and copies it here. Removes leftovers.

        Args:
            damaged: Called with the error of each checkpoint that does not verify.
        Raises:
            TrainingError: If another training has claimed the checkpoints.
        """
        checkpoint.remove_partial(self.folder)
        whole = _steps(self._open())
        if not whole and (here := checkpoint.list_checkpoints(self.folder)):
            raise CheckpointError(
                f"checkpoints in '{self.folder}'", f"none, or others in {self.store.address}, too", here[-1].name,
                "Finish this training with the storage.path that it began with, or remove the folder to start again.",
            )  # fmt: skip
        for name in reversed(whole):
            try:
                self.fetch(name)
            except CheckpointError as error:
                damaged(error)
                continue
            return name
        return None

    def _open(self) -> Mapping[str, Manifest]:
        """Opens the index for writing, and removes files that it does not name: no one can add them any more."""
        there = {
            file.partition("/")[0] for file in self.store.names()
        }  # listed before: later ones may be a successor's
        known = self.index.open()
        for place in there - {manifest.at.partition("/")[0] for manifest in known.values()} - {INDEX}:
            self._discard(place)
        return known

    def fetch(self, name: str, known: bool = False) -> Path:
        """Copies a checkpoint to this machine, unless it is there, and returns its verified folder.

        Earlier copies of checkpoints of steps are removed.

        Args:
            known: Of no use here: each host verifies its own copy.
        Raises:
            CheckpointError: If the store does not have it, or it is damaged.
        """
        folder = inside(self.folder, name)
        self.folder.mkdir(parents=True, exist_ok=True)
        with FileLock(self.folder / ".fetch.lock"):  # ranks of one host share the copy
            manifest = self._read(name)
            if self._is_copy(folder, manifest):
                return folder
            for old in checkpoint.list_checkpoints(self.folder) if STEP.match(name) else ():
                shutil.rmtree(old, ignore_errors=True)
            temporary = self.folder / f".{name}.{uuid.uuid4().hex}.tmp"
            temporary.mkdir()
            try:
                for file, digest in manifest.files.items():
                    self._fetch_file(name, f"{manifest.at}/{file}", inside(temporary, file), digest)
                write_json(temporary / MANIFEST, dict(manifest.files))
                seal_folder(temporary, folder)
            except OSError as error:
                raise CheckpointError(
                    f"checkpoint '{name}' on host '{socket.gethostname()}'", f"to be copied to '{self.folder}'",
                    _first_line(error), "Free disk space there, or repair the folder.",
                ) from None  # fmt: skip
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        return folder

    def names(self) -> list[str]:
        """Returns the names of the checkpoints in the store: steps, oldest first, and the best one."""
        known = self.index.read()
        return [*_steps(known), *([BEST] if BEST in known else [])]

    def describe(self, name: str) -> dict[str, Any]:
        """Describes a checkpoint as `checkpoint.describe` does, from its small files. It is not verified."""
        try:
            content = self.store.read(f"{self._read(name).at}/{PROGRESS}")
            progress, error = json.loads(content or b"")["progress"], None
        except (CheckpointError, ValueError, LookupError, TypeError) as damage:
            progress, error = {}, str(damage) if isinstance(damage, CheckpointError) else f"{PROGRESS} is damaged"
        validated = progress.get("validated_step") == progress.get("steps")
        return {
            "name": name, "step": progress.get("steps"), "time": None, "bytes": None,
            "valid_ne": progress.get("valid_ne") if validated else None,
            "state": "in the store" if error is None else "damaged", "error": error,
        }  # fmt: skip

    def fetch_served(self) -> None:
        """Copies the newest checkpoint that verifies and the best one to this machine.

        Raises:
            CheckpointError: If the best one is damaged.
        """
        known = self.index.read()
        for name in reversed(_steps(known)):
            with suppress(CheckpointError):
                self.fetch(name)
                break
        if BEST in known:
            self.fetch(BEST)

    def _read(self, name: str) -> Manifest:
        manifest = self.index.read().get(name)
        if manifest is None:
            raise _damaged(name, "its files", "none")
        return manifest

    def _is_copy(self, folder: Path, manifest: Manifest) -> bool:
        try:
            known = json.loads((folder / MANIFEST).read_bytes())
            if known == dict(manifest.files):
                checkpoint.verify(folder)
                return True
        except (OSError, ValueError, CheckpointError):
            pass
        return False

    def _fetch_file(self, name: str, source: str, target: Path, digest: str) -> None:
        try:
            self.store.fetch(source, target)
        except FileNotFoundError:
            raise _damaged(name, f"file {target.name}", "none") from None
        if (actual := sha256(target)) != digest:
            raise _damaged(name, f"sha256 {digest[:12]}.. of {target.name}", f"{actual[:12]}..")

    def share(self, name: str) -> None:
        """Copies a checkpoint of this host to the store.

        Raises:
            StorageError: If the store is not there, or refuses.
        """
        files, place = json.loads((self.folder / name / MANIFEST).read_bytes()), f"{name}-{uuid.uuid4().hex}"
        for file in files:
            self.store.put(self.folder / name / file, f"{place}/{file}")
        self._publish(name, Manifest(at=place, files=files))

    def remove(self, name: str) -> None:
        """Removes a checkpoint from the store and from all hosts. All ranks call it together."""
        if dist.get_rank() == 0:
            self._drop([name])
        shutil.rmtree(self.folder / name, ignore_errors=True)

    def prune(self, keep: int, newest: str) -> None:
        """Removes all but `keep` checkpoints: the newest one and those before it."""
        with suppress(StorageError):
            names = _steps(self.index.read())
            kept = [name for name in names if name <= newest][-keep:]
            self._drop([name for name in names if name not in kept])

    def _drop(self, names: Collection[str]) -> None:
        """Removes checkpoints. Those that another training has taken over stay, and the next save says so."""
        with suppress(StorageError, TrainingError):
            for manifest in self.index.drop(names) if names else ():
                self._discard(manifest.at)


def _steps(known: Mapping[str, Manifest]) -> list[str]:
    """Returns the names of the checkpoints of steps, oldest first."""
    return sorted(name for name in known if STEP.match(name))


def _first_line(cause: BaseException) -> str:
    text = f"{getattr(cause, 'strerror', None) or cause}"
    return text.split("\n")[0].rstrip(".") or type(cause).__name__


def _damaged(name: str, expected: str, actual: str) -> CheckpointError:
    return CheckpointError(f"checkpoint '{name}' in the store", expected, actual, "Use another checkpoint.")

"""Checkpoints: written aside, sealed by a manifest, renamed in one step, verified before they are read."""

import json
import pickle
import re
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from pipeline.errors import ContractError
from storage.artifacts import seal_folder, sha256, write_json

MANIFEST = "manifest.json"
PROGRESS = "progress.json"
STEP = re.compile(r"^step-(\d{10})$")

# The classes in a .metadata as DCP's own writer makes it; anything else in that pickle is refused.
_ADMITTED = {
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "Metadata"),
    ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
    ("torch.distributed.checkpoint.metadata", "StorageMeta"),
    ("torch.distributed.checkpoint.metadata", "TensorProperties"),
    ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
}


class CheckpointError(ContractError):
    """A checkpoint is damaged or does not fit the model."""


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's classes and nothing else, so that a forged file cannot run code."""

    def find_class(self, module: str, name: str) -> Any:
        module = "pathlib" if module == "pathlib._local" else module  # its name in files written by Python 3.13
        if (module, name) in _ADMITTED:
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


class _SafeReader(FileSystemReader):
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        folder = Path(str(self.path))
        try:
            with (folder / ".metadata").open("rb") as file:
                metadata: Metadata = _MetadataUnpickler(file).load()
            metadata.storage_meta = metadata.storage_meta or StorageMeta()
        except Exception as error:  # bytes that are no pickle raise almost anything
            raise CheckpointError(
                f"checkpoint '{folder.name}', file .metadata", "the classes of torch.distributed.checkpoint",
                f"{error}", "Do not use this checkpoint.",
            ) from None  # fmt: skip
        metadata.storage_meta.load_id = self.load_id
        return metadata


def save(folder: Path, tensors: dict[str, Any], progress: dict[str, Any]) -> None:
    """Writes a checkpoint; called by all ranks together, with the shards that each holds.

    A reader finds the whole checkpoint under `folder` or none of it.

    Args:
        tensors: Name -> tensor or ShardedTensor; nothing else, so that loading never unpickles values.
        progress: JSON values, equal on every rank.
    """
    temporary = folder.parent / f".{folder.name}.tmp"
    first = dist.get_rank() == 0
    if first:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    dist.barrier()
    try:
        dcp.save(tensors, storage_writer=FileSystemWriter(str(temporary)))  # type: ignore[attr-defined]
        if first:
            write_json(temporary / PROGRESS, progress)
            files = sorted(path for path in temporary.iterdir() if path.is_file())
            write_json(temporary / MANIFEST, {path.name: sha256(path) for path in files})
            seal_folder(temporary, folder)
    finally:
        if first:  # a full disk must not be left fuller
            shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier()


def verify(folder: Path) -> None:
    """Checks every file against the manifest.

    Raises:
        CheckpointError: If the manifest is absent, or a file is missing, added or changed.
    """
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        raise _damaged(folder, "a readable manifest", "none") from None
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    if present != manifest.keys():
        raise _damaged(folder, f"files {sorted(manifest)}", f"{sorted(present)}")
    for name, digest in manifest.items():
        if (actual := sha256(folder / name)) != digest:
            raise _damaged(folder, f"sha256 {digest[:12]}.. of {name}", f"{actual[:12]}..")


def read_progress(folder: Path) -> dict[str, Any]:
    """The JSON values saved with a verified checkpoint."""
    progress: dict[str, Any] = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    return progress


def load(folder: Path, tensors: dict[str, Any]) -> None:
    """Reads a verified checkpoint into the given tensors, in place, under any placement of the shards.

    Raises:
        CheckpointError: If a tensor is absent or has another shape, and names it; if a shard cannot be read.
    """
    stored = stored_tensors(folder)
    for name, tensor in tensors.items():
        size = tuple(tensor.size())
        if name not in stored or stored[name] != size:
            raise CheckpointError(
                f"checkpoint '{folder.name}', tensor '{name}'", f"shape {size}",
                f"{stored.get(name, 'no such tensor')}",
                "Train with the configuration that wrote it, or start again with again=true.",
            )  # fmt: skip
    try:
        dcp.load(tensors, storage_reader=_SafeReader(str(folder)))  # type: ignore[attr-defined]
    except CheckpointException as error:  # not an Exception: it would pass by every handler above
        reason = f"{next(iter(error.failures.values()))[0]}".split("\n")[0].rstrip(".")
        raise CheckpointError(
            f"checkpoint '{folder.name}'", "shards as DCP writes them", reason, "Do not use this checkpoint."
        ) from None


def stored_tensors(folder: Path) -> dict[str, tuple[int, ...]]:
    """Name -> shape of what a checkpoint holds."""
    metadata = _SafeReader(str(folder)).read_metadata()
    return {
        name: tuple(entry.size)
        for name, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }


def latest(root: Path) -> Path | None:
    """The newest checkpoint of `root` that verifies; damaged ones are passed over."""
    for folder in reversed(checkpoints(root)):
        try:
            verify(folder)
        except CheckpointError:
            continue
        return folder
    return None


def checkpoints(root: Path) -> list[Path]:
    """Checkpoints by step, oldest first."""
    return sorted(folder for folder in root.glob("step-*") if STEP.match(folder.name))


def prune(root: Path, keep: int) -> None:
    """Removes all but the newest `keep` checkpoints."""
    for folder in checkpoints(root)[:-keep]:
        shutil.rmtree(folder, ignore_errors=True)


def full_state(tensors: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """Whole tensors put together from the shards, on rank 0; None elsewhere. Called by all ranks together."""
    whole: dict[str, torch.Tensor] = {}
    first = dist.get_rank() == 0
    for name, tensor in tensors.items():
        if hasattr(tensor, "local_shards"):
            out = torch.empty(tuple(tensor.size()), dtype=tensor.dtype) if first else None
            tensor.gather(dst=0, out=out)
        else:
            out = tensor.detach().cpu().clone()
        if first and out is not None:
            whole[name] = out
    return whole if first else None


def _damaged(folder: Path, expected: str, actual: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint '{folder.name}'", expected, actual, "An older checkpoint will be used if there is one."
    )

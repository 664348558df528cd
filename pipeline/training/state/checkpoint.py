"""Checkpoints: written to a temporary folder, sealed by a manifest, renamed atomically, verified before reading.

They contain no random generator state. Row order and dropout are functions of seed, epoch, step and rank.
"""

import datetime
import json
import math
import pickle
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

from pipeline.errors import ContractError, NotFiniteError
from storage.artifacts import inside, seal_folder, sha256, write_json
from storage.errors import StorageError, is_shortage, machine_lacks

TRUNCATED = re.compile("unexpected pos|failed writing")
"""Messages of torch.save on a full disk. It hides the original error."""
MANIFEST = "manifest.json"
BEST = "best"
"""Name of the checkpoint with the lowest validation NE."""
PROGRESS = "progress.json"
STEP = re.compile(r"^step-(\d{10})$")
REPLACED = re.compile(r"^\.(.+)\.[0-9a-f]{32}\.tmp$")
"""What `seal_folder` calls a folder until another has its name."""
LOWER = (
    "Clamp dense columns with far outliers (kind: clamp), or lower the learning rates; "
    "the last good checkpoint is kept."
)

Identity = Mapping[str, str]
"""What a checkpoint belongs to, as name -> value; for example the hash of the preprocessing plan."""

# Classes in the .metadata that DCP's writer makes. The unpickler refuses all others.
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
    """Unpickles only DCP's classes, so a forged file cannot run code."""

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
        except Exception as error:  # invalid pickles raise almost any exception
            raise CheckpointError(
                f"checkpoint '{folder.name}', file .metadata", "only classes of torch.distributed.checkpoint",
                f"{error}".rstrip("."), "Do not use this checkpoint.",
            ) from None  # fmt: skip
        metadata.storage_meta.load_id = self.load_id
        for place in (metadata.storage_data or {}).values():
            try:
                inside(folder, place.relative_path)
            except StorageError as error:
                raise _damaged(folder, "shards inside its folder", f"{error}") from None
        return metadata


def save(
    folder: Path,
    tensors: Mapping[str, Any],
    progress: Mapping[str, Any],
    identity: Identity | None = None,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Writes a checkpoint. All ranks call it together, each with its shards.

    A reader finds either the complete checkpoint under `folder` or nothing.

    Args:
        tensors: Name -> tensor or ShardedTensor. Nothing else is allowed, so loading never unpickles values.
        progress: JSON values, equal on every rank. Errors quote its `steps`.
        group: Process group of all ranks that can send CPU tensors. None: the default group.
    Raises:
        TrainingError: On every rank, if a number is not finite. Nothing is written then.
        CheckpointError: If the files cannot be written.
    """
    require_finite(tensors, f"weights at step {progress.get('steps')}", group)
    temporary = folder.parent / f".{folder.name}.tmp"
    first = dist.get_rank() == 0
    try:
        if first:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        dist.barrier(group=group)
        writer = FileSystemWriter(str(temporary))
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)
        if first:
            _seal(temporary, folder, progress, identity)
    except (OSError, CheckpointException) as error:
        cause = find_cause(error)
        if not isinstance(cause, OSError):  # for example a lost rank
            raise RuntimeError(f"checkpoint '{folder.name}' was not written: {cause}") from None
        raise CheckpointError(
            f"checkpoint '{folder.name}'", "to be written", cause.strerror or str(cause),
            f"Free disk space or repair '{folder.parent}'. Earlier checkpoints are kept.",
        ) from None  # fmt: skip
    finally:
        if first:  # frees the space on a full disk
            shutil.rmtree(temporary, ignore_errors=True)
    dist.barrier(group=group)


def find_cause(error: OSError | CheckpointException) -> BaseException:
    """Returns the error of the rank that failed first."""
    cause = error if isinstance(error, OSError) else next(iter(error.failures.values()))[0]
    if isinstance(cause, RuntimeError) and TRUNCATED.search(str(cause)):
        return OSError("a truncated file, as on a full disk")
    return cause


def require_finite(tensors: Mapping[str, Any], where: str, group: dist.ProcessGroup | None = None) -> None:
    """Checks that all numbers are finite before they are saved.

    Raises:
        TrainingError: On every rank, if any rank has a number that is not finite. Names the first such tensor.
    """
    bad = next((name for name in sorted(tensors) if not _finite(tensors[name])), None)
    found = [name for name in gather_objects(bad, group) if name is not None]
    if found:
        raise NotFiniteError(f"{where}, '{min(found)}'", "finite numbers", "inf or nan", LOWER)


def gather_objects(value: Any, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Returns the values of all ranks, by rank. All ranks call it together."""
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values


def _finite(tensor: Any) -> bool:
    """Whether all numbers are finite. A sum tells without allocating a mask as large as a table."""
    return all(math.isfinite(part.sum(dtype=torch.float64).item()) for part in local_parts(tensor))


def local_parts(tensor: Any) -> list[torch.Tensor]:
    """Returns the parts of a tensor on this rank: its shards, or the whole tensor."""
    return [shard.tensor for shard in tensor.local_shards()] if hasattr(tensor, "local_shards") else [tensor]


def verify(folder: Path) -> None:
    """Checks every file against the manifest.

    Raises:
        CheckpointError: If the manifest is missing, or a file is missing, added or changed.
    """
    try:
        manifest = dict(json.loads((folder / MANIFEST).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        if is_shortage(error):  # else an older checkpoint would be loaded
            raise machine_lacks(f"checkpoint '{folder.name}'", error) from error
        raise _damaged(folder, "a readable manifest", "none") from None
    present = {path.name for path in folder.iterdir()} - {MANIFEST}
    if linked := sorted(path.name for path in folder.iterdir() if path.is_symlink()):
        raise _damaged(folder, "regular files", f"links: {', '.join(linked)}")
    if present != manifest.keys():
        raise _damaged(folder, f"files {sorted(manifest)}", f"{sorted(present)}")
    for name, digest in manifest.items():
        if (actual := sha256(folder / name)) != digest:
            raise _damaged(folder, f"sha256 {digest[:12]}.. of {name}", f"{actual[:12]}..")


def read_progress(folder: Path) -> dict[str, Any]:
    """Returns the progress saved with a verified checkpoint, as JSON values."""
    return _notes(folder, "progress")


def _notes(folder: Path, part: str) -> dict[str, Any]:
    try:
        notes = json.loads((folder / PROGRESS).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        if is_shortage(error):
            raise machine_lacks(f"checkpoint '{folder.name}'", error) from error
        notes = None
    if not isinstance(notes, dict) or not isinstance(notes.get(part, {}), dict):
        raise _damaged(folder, f"the {part} in {PROGRESS}", "other content")
    values: dict[str, Any] = notes.get(part, {})
    return values


def load(
    folder: Path, tensors: dict[str, Any], identity: Identity | None = None, optional: tuple[str, ...] = ()
) -> None:
    """Reads a verified checkpoint into the given tensors, in place. The sharding may differ from the saved one.

    All ranks call it together, each with the tensors of which it has a part.

    Args:
        optional: Prefixes of the names of stored tensors that may be missing in `tensors`.
    Raises:
        CheckpointError: If shapes, identity or the sets of tensors differ, which is checked before anything is
            read. The error names the first difference. Also if a shard cannot be read.
    """
    stored = stored_shapes(folder)
    wanted = whole_shapes(tensors)
    for name in sorted(wanted.keys() & stored.keys()):
        if wanted[name] != stored[name]:
            raise _unfit(folder, f"tensor '{name}'", f"shape {wanted[name]}", f"{stored[name]}")
    require_identity(folder, identity or {})
    for name in sorted(wanted.keys() ^ stored.keys()):
        if name in stored and name.startswith(optional):
            continue
        expected = f"shape {wanted[name]}" if name in wanted else "no such tensor"
        raise _unfit(folder, f"tensor '{name}'", expected, f"{stored.get(name, 'no such tensor')}")
    with _reading(folder):
        dcp.load(tensors, storage_reader=_SafeReader(str(folder)))


@contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Turns every error about shards into one of ours."""
    try:
        yield
    except ContractError:
        raise
    except (Exception, CheckpointException) as error:  # the latter is a BaseException, which callers do not catch
        first = next(iter(error.failures.values()))[0] if isinstance(error, CheckpointException) else error
        reason = f"{first}".split("\n")[0].rstrip(".") or type(first).__name__
        raise CheckpointError(
            f"checkpoint '{folder.name}'", "readable shards", reason, "Do not use this checkpoint."
        ) from None


def whole_shapes(tensors: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of the whole tensor, for tensors on any rank. All ranks call it together."""
    shapes: dict[str, tuple[int, ...]] = {}
    for part in gather_objects({name: tuple(tensor.size()) for name, tensor in tensors.items()}):
        shapes |= part
    return shapes


def require_identity(folder: Path, identity: Identity) -> None:
    """Raises if a checkpoint belongs to something else.

    Raises:
        CheckpointError: Names the first difference.
    """
    known = _notes(folder, "identity")
    for key in sorted(known.keys() | identity.keys()):
        if identity.get(key) != known.get(key):
            raise _unfit(folder, key, identity.get(key, "none"), f"{known.get(key, 'none')}" or "nothing")


def _unfit(folder: Path, what: str, expected: str, actual: str) -> CheckpointError:
    return CheckpointError(
        f"checkpoint '{folder.name}', {what}", expected, actual,
        "Train with the configuration that wrote it, or start again: force=true (flows.recurring: scratch=true).",
    )  # fmt: skip


def export(folder: Path) -> dict[str, torch.Tensor]:
    """Returns the whole weights of a checkpoint under the model's names. Needs only this process.

    If training averaged the weights, this is their mean: what was validated and would be registered.

    Raises:
        CheckpointError: If it is damaged.
    """
    verify(folder)
    prefix = served_prefix(folder)
    return {name.removeprefix(prefix): tensor for name, tensor in read_whole(folder, prefix).items()}


def served_prefix(folder: Path) -> str:
    """Returns the name prefix of the weights that would be registered from a verified checkpoint."""
    return "average/" if read_progress(folder).get("averaged") else "model/"


def read_whole(folder: Path, *prefixes: str) -> dict[str, torch.Tensor]:
    """Returns the whole tensors of a verified checkpoint with one of the prefixes. Needs only this process.

    Raises:
        CheckpointError: If they cannot be read.
    """
    with _reading(folder):
        metadata = _SafeReader(str(folder)).read_metadata()
        tensors = {
            name: torch.empty(entry.size, dtype=entry.properties.dtype)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata) and name.startswith(prefixes)
        }
        dcp.load(tensors, storage_reader=_SafeReader(str(folder)), no_dist=True)
    return tensors


def write_whole(
    folder: Path, tensors: Mapping[str, torch.Tensor], progress: Mapping[str, Any], identity: Identity
) -> None:
    """Writes whole tensors as a checkpoint. Needs only this process. See `save`."""
    temporary = folder.parent / f".{folder.name}.tmp"
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        dcp.save(dict(tensors), storage_writer=FileSystemWriter(str(temporary)), no_dist=True)
        _seal(temporary, folder, progress, identity)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _seal(temporary: Path, folder: Path, progress: Mapping[str, Any], identity: Identity | None) -> None:
    """Adds progress and manifest to the files of a checkpoint and renames it."""
    write_json(temporary / PROGRESS, {"progress": dict(progress), "identity": dict(identity or {})})
    files = sorted(path for path in temporary.iterdir() if path.is_file())
    write_json(temporary / MANIFEST, {path.name: sha256(path) for path in files})
    seal_folder(temporary, folder)


def describe(folder: Path) -> dict[str, Any]:
    """Describes a checkpoint: name, step, time, bytes, NE of a validation at that step, and whether it verifies."""
    try:
        verify(folder)
        progress, error = read_progress(folder), None
    except CheckpointError as damage:
        progress, error = {}, str(damage)
    match = STEP.match(folder.name)
    files = [path.stat() for path in folder.iterdir() if path.is_file()]
    time_saved = datetime.datetime.fromtimestamp(max((file.st_mtime for file in files), default=0.0), datetime.UTC)
    validated = progress.get("validated_step") == progress.get("steps")
    return {
        "name": folder.name,
        "step": progress.get("steps", int(match[1]) if match else None),
        "time": time_saved.isoformat(timespec="seconds"),
        "bytes": sum(file.st_size for file in files),
        "valid_ne": progress.get("valid_ne") if validated else None,
        "state": "verified" if error is None else "damaged",
        "error": error,
    }


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Returns name -> shape of the tensors in a checkpoint."""
    with _reading(folder):
        metadata = _SafeReader(str(folder)).read_metadata()
        return {
            name: tuple(entry.size)
            for name, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }


def find_latest(root: Path, damaged: Callable[[CheckpointError], None] = lambda error: None) -> Path | None:
    """Finds the newest checkpoint of `root` that verifies.

    Args:
        damaged: Called with the error of each checkpoint that does not verify.
    """
    for folder in reversed(list_checkpoints(root)):
        try:
            verify(folder)
        except CheckpointError as error:
            damaged(error)
            continue
        return folder
    return None


def find_served(root: Path) -> Path | None:
    """Finds the checkpoint that a finished training has exported: the best one, or else the last. None if it is gone.

    Raises:
        CheckpointError: If the best one is damaged. The last one would be another model.
    """
    last = find_latest(root)
    if last is None or not read_progress(last).get("finished"):
        return None
    if read_progress(last).get("best_step") is None:
        return last
    verify(root / BEST)
    return root / BEST


def list_checkpoints(root: Path) -> list[Path]:
    """Lists checkpoints by step, oldest first."""
    return sorted(folder for folder in root.glob("step-*") if STEP.match(folder.name))


def prune(root: Path, keep: int, newest: Path) -> None:
    """Removes all but `keep` checkpoints: the newest one and those before it.

    Args:
        newest: The one just saved. Those of later steps are damaged: training would have resumed from them.
    """
    folders = list_checkpoints(root)
    kept = [folder for folder in folders if folder.name <= newest.name][-keep:]
    for folder in folders:
        if folder not in kept:
            shutil.rmtree(folder, ignore_errors=True)


def remove_partial(root: Path) -> None:
    """Removes the leftovers of interrupted saves. Puts back a checkpoint that one of them was replacing."""
    for folder in root.glob(".*.tmp"):
        name = REPLACED.match(folder.name)
        if name is not None and not (root / name[1]).exists() and _is_whole(folder):
            folder.rename(root / name[1])
        else:
            shutil.rmtree(folder, ignore_errors=True)


def _is_whole(folder: Path) -> bool:
    try:
        verify(folder)
    except CheckpointError:
        return False
    return True


def full_state(tensors: dict[str, Any]) -> dict[str, torch.Tensor] | None:
    """Gathers whole tensors on rank 0; returns None on other ranks. All ranks call it together."""
    found = {name: whole for name, whole in gather_whole(tensors) if whole is not None}
    return found if dist.get_rank() == 0 else None


def gather_whole(tensors: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor | None]]:
    """Yields each whole tensor, on the CPU of rank 0; None on other ranks. All ranks iterate together."""
    first = dist.get_rank() == 0
    for name, tensor in tensors.items():
        if hasattr(tensor, "local_shards"):
            yield name, _gather_shards(tensor)
        else:
            yield name, tensor.detach().cpu().clone() if first else None


def _gather_shards(tensor: Any) -> torch.Tensor | None:
    """Sends the shards of a tensor to rank 0, one after another, and returns the whole there.

    The tensor's own `gather` would take memory for a shard of the largest size on each rank, and for one of each rank
    on rank 0.
    """
    rank, where = dist.get_rank(), "cuda" if dist.get_backend() == "nccl" else "cpu"
    own = {tuple(shard.metadata.shard_offsets): shard.tensor.detach() for shard in tensor.local_shards()}
    whole = torch.empty(tuple(tensor.size()), dtype=tensor.dtype) if rank == 0 else None
    for part in tensor.metadata().shards_metadata:
        owner = part.placement.rank()
        if whole is not None:
            shard = own.get(tuple(part.shard_offsets))
            if shard is None:
                shard = torch.empty(part.shard_sizes, dtype=tensor.dtype, device=where)
                dist.recv(shard, owner)
            spans = zip(part.shard_offsets, part.shard_sizes, strict=True)
            whole[tuple(slice(start, start + size) for start, size in spans)] = shard.cpu()
            del shard
        elif owner == rank:
            dist.send(own[tuple(part.shard_offsets)].contiguous(), 0)
    return whole


def _damaged(folder: Path, expected: str, actual: str) -> CheckpointError:
    return CheckpointError(f"checkpoint '{folder.name}'", expected, actual, "Use another checkpoint.")

"""AsyncCheckpointer: checkpoints in the background, so that training stands still for a copy of its state alone."""

import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharding_spec import ShardMetadata

from pipeline.training.state.checkpoint import STEP, Identity, local_parts, save


class AsyncCheckpointer:
    """Saves one checkpoint at a time; in the background, so that training stands still for a copy of its state alone.

    A `with` block ends when nothing is being written any more. Methods are called by all ranks together. What goes
    wrong in the background is raised by the next call of any method. Ranks speak over a group of their own:
    collectives of the background must not mix with those of training.

    Args:
        background: Takes memory for one more copy of this rank's tensors on the host, from the first save on.
    Attributes:
        blocked_seconds: Time that callers have stood still.
    """

    def __init__(self, background: bool) -> None:
        self.background = background
        self.group: dist.ProcessGroup | None = None
        self.votes: dist.ProcessGroup | None = None
        self.copies: dict[str, Any] = {}
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.blocked_seconds = self.told_seconds = 0.0
        self.seconds: float | None = None
        self.last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self.thread is not None:  # what ended the block is told, not what its end may have broken
            self.thread.join()

    def due(self, every_seconds: float | None) -> bool:
        """Whether so long has passed since the last call of `save` for a step; rank 0's clock decides for all."""
        if every_seconds is None:
            return False
        self.votes = self.votes or dist.new_group(backend="gloo")
        vote = torch.tensor(int(time.monotonic() - self.last >= every_seconds))
        dist.broadcast(vote, 0, group=self.votes)
        return bool(vote)

    def save(
        self,
        folder: Path,
        tensors: Mapping[str, Any],
        progress: Mapping[str, Any],
        identity: Identity,
        sealed: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes a checkpoint of the tensors as they are now; waits for an earlier one first.

        Args:
            sealed: Called on rank 0 once the checkpoint is whole, maybe by another thread.
        Raises:
            ContractError: See function `save`; of this checkpoint, or of the one before.
        """
        begun = time.perf_counter()
        self.wait()
        if STEP.match(folder.name):
            self.last = time.monotonic()
        self.group = self.group or dist.new_group(backend="gloo")
        arguments = (folder, progress, identity, sealed)
        if self.background:
            self.copies = {name: _host_copy(tensor, self.copies.get(name)) for name, tensor in tensors.items()}
            self.thread = threading.Thread(target=self._write, args=(self.copies, *arguments), name="checkpoint")
            self.thread.start()
        else:
            self._write(tensors, *arguments)
        self.blocked_seconds += time.perf_counter() - begun
        self.check()

    def check(self) -> None:
        """Raises what went wrong in the background, without waiting for it."""
        failure, self.failure = self.failure, None
        if failure is not None:
            raise failure

    def wait(self) -> None:
        """Returns once nothing is being written."""
        begun = time.perf_counter()
        if self.thread is not None:
            self.thread.join()
            self.thread = None
            self.blocked_seconds += time.perf_counter() - begun
        self.check()

    def take_times(self) -> dict[str, float]:
        """Metrics since the last call: seconds that training stood still for, and that the last save took."""
        if self.seconds is None:
            return {}
        times = {"checkpoint_seconds": self.seconds}
        times["checkpoint_blocked_seconds"] = self.blocked_seconds - self.told_seconds
        self.seconds, self.told_seconds = None, self.blocked_seconds
        return times

    def _write(
        self,
        tensors: Mapping[str, Any],
        folder: Path,
        progress: Mapping[str, Any],
        identity: Identity,
        sealed: Callable[[], None],
    ) -> None:
        begun = time.perf_counter()
        try:
            save(folder, tensors, progress, identity, self.group)
            if dist.get_rank() == 0:
                sealed()
            self.seconds = time.perf_counter() - begun
        except BaseException as failure:  # raised where training can hear it
            self.failure = failure


def _host_copy(tensor: Any, copy: Any) -> Any:
    """The tensor, or this rank's shards of it, in host memory; an earlier copy of it is written over."""
    if copy is None:
        copy = _empty_on_host(tensor)
    for new, now in zip(local_parts(copy), local_parts(tensor), strict=True):
        new.copy_(now.detach())
    return copy


def _empty_on_host(tensor: Any) -> Any:
    if not hasattr(tensor, "local_shards"):
        return torch.empty_like(tensor, device="cpu", memory_format=torch.contiguous_format, requires_grad=False)
    known = tensor.metadata()
    shards = [_on_host(shard) for shard in known.shards_metadata]
    own = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in tensor.local_shards()}
    copies = [
        Shard(torch.empty_like(own[tuple(shard.shard_offsets)], device="cpu"), shard)
        for shard in shards
        if tuple(shard.shard_offsets) in own
    ]
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        copies, ShardedTensorMetadata(shards, known.size, known.tensor_properties), process_group=tensor._process_group
    )


def _on_host(shard: ShardMetadata) -> ShardMetadata:
    rank = shard.placement.rank()  # type: ignore[union-attr]
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, placement=f"rank:{rank}/cpu")

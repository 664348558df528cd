"""AsyncCheckpointer: writes checkpoints in the background. Training pauses only to copy its state."""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from pipeline.training.state.checkpoint import STEP, Identity, local_parts
from pipeline.training.state.checkpoints import Checkpoints
from pipeline.training.tables.torch_private import Shard, ShardedTensorMetadata, ShardMetadata, join_shards


class AsyncCheckpointer:
    """Writes one checkpoint at a time, if wanted in the background. Then training pauses only to copy its state.

    A `with` block ends when nothing is being written any more. All ranks call methods together. The next call of any
    method raises an error of the background. Ranks use a separate process group for checkpoints, because collectives
    of the background must not mix with those of training.

    Args:
        background: Writes in a thread. From the first save on, this takes host memory for one more copy of this
            rank's tensors.
        checkpoints: Where they go.
    Attributes:
        blocked_seconds: Time that callers have waited.
    """

    def __init__(self, background: bool, checkpoints: Checkpoints) -> None:
        self.background, self.checkpoints = background, checkpoints
        self.group: dist.ProcessGroup | None = None
        self.votes: dist.ProcessGroup | None = None
        self.copies: dict[str, Any] = {}
        self.thread: threading.Thread | None = None
        self.failure: BaseException | None = None
        self.blocked_seconds = self.reported_seconds = 0.0
        self.seconds: float | None = None
        self.last = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.wait()
        elif self.thread is not None:  # the first error matters, not one that it caused here
            self.thread.join()
        self.copies = {}  # as large as model and optimizer; what comes after the training may need the memory

    def due(self, every_seconds: float | None) -> bool:
        """Whether this much time has passed since the last `save` of a step. Rank 0's clock decides for all."""
        if every_seconds is None:
            return False
        self.votes = self.votes or dist.new_group(backend="gloo")
        vote = torch.tensor(int(time.monotonic() - self.last >= every_seconds))
        dist.broadcast(vote, 0, group=self.votes)
        return bool(vote)

    def save(
        self,
        name: str,
        tensors: Mapping[str, Any],
        progress: Mapping[str, Any],
        identity: Identity,
        sealed: Callable[[], None] = lambda: None,
    ) -> None:
        """Writes a checkpoint of the current tensors. Waits for an earlier one first.

        Args:
            sealed: Called on rank 0 when the checkpoint is complete, possibly by another thread.
        Raises:
            ContractError: See `Checkpoints.save`. The error is of this checkpoint or of the previous one.
        """
        begun = time.perf_counter()
        self.wait()
        if STEP.match(name):
            self.last = time.monotonic()
        self.group = self.group or dist.new_group(backend="gloo")
        arguments = (name, progress, identity, sealed)
        if self.background:
            self.copies = {name: _host_copy(tensor, self.copies.get(name)) for name, tensor in tensors.items()}
            self.thread = threading.Thread(target=self._write, args=(self.copies, *arguments), name="checkpoint")
            self.thread.start()
        else:
            self._write(tensors, *arguments)
        self.blocked_seconds += time.perf_counter() - begun
        self.check()

    def check(self) -> None:
        """Raises an error of the background. Does not wait for it to finish."""
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
        """Returns metrics since the last call: seconds that training was blocked, and duration of the last save."""
        if self.seconds is None:
            return {}
        times = {"checkpoint_seconds": self.seconds}
        times["checkpoint_blocked_seconds"] = self.blocked_seconds - self.reported_seconds
        self.seconds, self.reported_seconds = None, self.blocked_seconds
        return times

    def _write(
        self,
        tensors: Mapping[str, Any],
        name: str,
        progress: Mapping[str, Any],
        identity: Identity,
        sealed: Callable[[], None],
    ) -> None:
        begun = time.perf_counter()
        try:
            self.checkpoints.save(name, tensors, progress, identity, self.group)
            if dist.get_rank() == 0:
                sealed()
            self.seconds = time.perf_counter() - begun
        except BaseException as failure:  # raised later, in the training thread
            self.failure = failure


def _host_copy(tensor: Any, copy: Any) -> Any:
    """Copies a tensor, or this rank's shards of it, to host memory. Overwrites an earlier copy."""
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
    return join_shards(copies, ShardedTensorMetadata(shards, known.size, known.tensor_properties), tensor)


def _on_host(shard: ShardMetadata) -> ShardMetadata:
    rank = shard.placement.rank()  # type: ignore[union-attr]
    return ShardMetadata(shard.shard_offsets, shard.shard_sizes, placement=f"rank:{rank}/cpu")

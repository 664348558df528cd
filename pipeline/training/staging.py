"""Copies batches to a CUDA device while earlier ones are trained."""

import queue
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from models.dlrm import SharedFeatures
from pipeline.data.batch import Batch
from pipeline.training.tables.torchrec_private import configs_of

AHEAD = 2
"""Batches on the device beside the one that is trained."""
ALIGNMENT = 256
"""The byte of a packed batch at which an array begins is a multiple of this, as CUDA allocates memory."""


def move_batches(batches: Iterator[Batch], device: torch.device, model: DistributedModelParallel) -> Iterator[Batch]:
    """Yields the batches on a device. On CUDA a thread reads and copies the next ones meanwhile.

    Args:
        model: The model that they are for. If its tables have fewer than 2^31 rows, half the bytes of ids are sent.
    """
    if device.type != "cuda":
        return (batch.to(device) for batch in batches)
    tables = configs_of(get_unwrapped_module(model).embeddings)
    return StagedBatches(batches, device, max(table.num_embeddings for table in tables) < 2**31).iterate()


class StagedBatches:
    """Batches on their way to a CUDA device, at most `AHEAD` of them.

    A thread packs each batch into page-locked memory and starts one copy on a stream of its own. Batches come in the
    order of the iterator, which this thread alone uses. Their `times.wait` is how long the trainer waited.

    Args:
        batches: Batches in host memory. One is read before the next is asked for.
        narrow: Sends ids in 32 bits.
    """

    def __init__(self, batches: Iterator[Batch], device: torch.device, narrow: bool) -> None:
        self.batches, self.device, self.narrow = batches, device, narrow
        self.ready: queue.Queue[tuple[Batch, torch.cuda.Event] | BaseException | None] = queue.Queue(AHEAD)
        self.stopped = threading.Event()
        self.thread = threading.Thread(target=self._copy_all, name="staging", daemon=True)

    def iterate(self) -> Iterator[Batch]:
        """Yields the batches for the current stream. Ends the thread when it is exhausted or closed.

        Raises:
            BaseException: What the iterator raised.
        """
        self.thread.start()
        try:
            while True:
                begun = time.perf_counter()
                item = self.ready.get()
                waited = time.perf_counter() - begun
                if item is None:
                    return
                if isinstance(item, BaseException):
                    raise item
                batch, copied = item
                stream = torch.cuda.current_stream(self.device)
                stream.wait_event(copied)
                for tensor in (batch.dense, batch.sparse, batch.shared and batch.shared.inverse_B):
                    if tensor is not None:
                        tensor.record_stream(stream)  # its memory is reused only after the step
                yield replace(batch, times=batch.times.model_copy(update={"wait": waited}))
        finally:
            self._stop()

    def _stop(self) -> None:
        self.stopped.set()
        while self.thread.is_alive():  # it may wait for room, or for the service
            try:
                self.ready.get(timeout=0.05)
            except queue.Empty:
                continue

    def _copy_all(self) -> None:
        end: BaseException | None = None
        try:
            torch.cuda.set_device(self.device)
            stream = torch.cuda.Stream(self.device)
            slots = [_Slot() for _ in range(2)]  # one is filled while the other is sent
            for number, batch in enumerate(self.batches):
                slot = slots[number % len(slots)]
                with torch.cuda.stream(stream):
                    copy = slot.send(batch, self.device, self.narrow)
                self.ready.put((copy, slot.sent))
                if self.stopped.is_set():
                    break
        except BaseException as error:
            end = error
        finally:
            close = getattr(self.batches, "close", lambda: None)
            close()
        if not self.stopped.is_set():
            self.ready.put(end)


class _Slot:
    """Page-locked memory for one batch, reused when its copy has ended."""

    def __init__(self) -> None:
        self.memory = torch.empty(0, dtype=torch.uint8)
        self.sent = torch.cuda.Event()

    def send(self, batch: Batch, device: torch.device, narrow: bool) -> Batch:
        """Packs a batch and starts its copy on the current stream."""
        self.sent.synchronize()
        packed = Packed.of(batch, narrow)
        if len(self.memory) < packed.size:
            self.memory = torch.empty(packed.size * 5 // 4, dtype=torch.uint8, pin_memory=True)
        packed.write(self.memory)
        memory = torch.empty(packed.size, dtype=torch.uint8, device=device)
        memory.copy_(self.memory[: packed.size], non_blocking=True)
        copy = packed.read(memory)
        copy.sparse.offsets()  # computed here, and kept
        self.sent = torch.cuda.Event()
        self.sent.record()
        return copy


@dataclass(frozen=True)
class Packed:
    """Layout of a batch in one piece of memory.

    Example:
        >>> from pipeline.data.position import Position
        >>> ids = KeyedJaggedTensor(["a"], torch.tensor([7, 8]), lengths=torch.tensor([2], dtype=torch.int32))
        >>> batch = Batch(torch.ones(1, 3), ids, torch.ones(1), torch.ones(1), Position(), 1)
        >>> packed = Packed.of(batch, narrow=True)
        >>> memory = torch.empty(packed.size, dtype=torch.uint8)
        >>> packed.write(memory)
        >>> packed.read(memory).sparse.values()
        tensor([7, 8])
    """

    batch: Batch
    arrays: tuple[torch.Tensor, ...]
    kinds: tuple[torch.dtype, ...]
    starts: tuple[int, ...]
    size: int
    """Bytes."""

    @classmethod
    def of(cls, batch: Batch, narrow: bool) -> "Packed":
        """Lays out a batch in host memory; `narrow` stores its ids in 32 bits."""
        sparse, shared = batch.sparse, batch.shared
        optional = (sparse.weights_or_none(), None if shared is None else shared.inverse_B)
        arrays = [batch.dense, batch.labels, batch.weights, sparse.lengths(), sparse.values()]
        kinds = [array.dtype for array in arrays[:-1]] + [torch.int32 if narrow else torch.int64]
        for array in optional:
            if array is not None:
                arrays.append(array)
                kinds.append(array.dtype)
        starts, size = [], 0
        for array, kind in zip(arrays, kinds, strict=True):
            starts.append(size)
            size += -(-array.numel() * kind.itemsize // ALIGNMENT) * ALIGNMENT
        return cls(batch, tuple(arrays), tuple(kinds), tuple(starts), size)

    def write(self, memory: torch.Tensor) -> None:
        """Copies the batch into memory, uint8 [size or more]."""
        for array, place in zip(self.arrays, self._places(memory), strict=True):
            place.copy_(array)

    def read(self, memory: torch.Tensor) -> Batch:
        """Returns the batch in memory that was written, or in a copy of it, uint8 [size]. It shares that memory."""
        dense, labels, weights, lengths, values, *rest = self._places(memory)
        before = self.batch
        of_ids = rest.pop(0) if before.sparse.weights_or_none() is not None else None
        sparse = KeyedJaggedTensor(before.sparse.keys(), values.long(), of_ids, lengths)
        shared = before.shared and SharedFeatures(rest[0], before.shared.features)
        return replace(before, dense=dense, sparse=sparse, labels=labels, weights=weights, shared=shared)

    def _places(self, memory: torch.Tensor) -> list[Any]:
        return [
            memory[start : start + array.numel() * kind.itemsize].view(kind).view(array.shape)
            for array, kind, start in zip(self.arrays, self.kinds, self.starts, strict=True)
        ]

"""Input-dist prefetch: sends the ids of the next batch to the ranks with their tables while this batch is trained."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.batch import Batch


class InputDistPrefetcher:
    """Sends the ids of the next batch in two parts: their counts before this batch's forward pass, the ids after it.

    All ranks call it alike. TorchRec's TrainPipelineSparseDist does the same, but its tracer only takes models with one
    argument, and it runs the optimizers itself.

    Args:
        model: Its tables get a forward pass that uses prefetched ids, and sends other ids as usual.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self.tables: Any = get_unwrapped_module(model).embeddings
        self.default_forward = self.tables.forward
        self.tables.forward = self._forward
        self.announced: tuple[KeyedJaggedTensor, Any, Any] | None = None
        self.sent: tuple[KeyedJaggedTensor, Any, Any] | None = None

    def announce(self, batch: Batch | None) -> None:
        """Sends the other ranks the id counts of a batch. None: there is no batch."""
        if batch is not None:
            context = self.tables.create_context()
            self.announced = batch.sparse, context, self.tables.input_dist(context, batch.sparse)

    def send(self) -> None:
        """Sends the ids of the announced batch."""
        if self.announced is not None:
            sparse, context, counts = self.announced
            self.announced, self.sent = None, (sparse, context, counts.wait())

    def drain(self) -> None:
        """Waits for ids in flight and drops them, because training ends before their batch."""
        self.send()
        if self.sent is not None:
            self.sent[2].wait()
            self.sent = None

    def _forward(self, sparse: KeyedJaggedTensor) -> Any:
        if self.sent is None or self.sent[0] is not sparse:
            return self.default_forward(sparse)
        (_, context, ids), self.sent = self.sent, None
        return self.tables.compute_and_output_dist(context, ids.wait())


def with_next(batches: Iterator[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Yields each batch with the next one, or with None for the last.

    Example:
        >>> list(with_next(iter("abc")))
        [('a', 'b'), ('b', 'c'), ('c', None)]
    """

    def ended() -> Iterator[Batch | None]:
        yield from batches
        yield None

    for batch, following in pairwise(ended()):
        assert batch is not None
        yield batch, following

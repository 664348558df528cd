"""Input-dist prefetch: sends the ids of the next batch to the ranks with their tables while this batch is trained."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from pipeline.data.batch import Batch


class InputDistPrefetcher:
    """Sends ids in two parts: how many go where, before the forward pass of the batch before; the ids, behind it.

    Called by all ranks alike. It is what TorchRec's TrainPipelineSparseDist does, whose tracer takes models of one
    argument alone, and which wants to run the optimizers itself.

    Args:
        model: Its tables get a forward pass that takes ids which were sent ahead; others go their usual way.
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self.tables: Any = get_unwrapped_module(model).embeddings
        self.usual = self.tables.forward
        self.tables.forward = self._forward
        self.announced: tuple[KeyedJaggedTensor, Any, Any] | None = None
        self.sent: tuple[KeyedJaggedTensor, Any, Any] | None = None

    def announce(self, batch: Batch | None) -> None:
        """Tells the other ranks how many ids of a batch will come; None: there is none."""
        if batch is not None:
            context = self.tables.create_context()
            self.announced = batch.sparse, context, self.tables.input_dist(context, batch.sparse)

    def send(self) -> None:
        """Sends the ids of the batch that was announced."""
        if self.announced is not None:
            sparse, context, counts = self.announced
            self.announced, self.sent = None, (sparse, context, counts.wait())

    def settle(self) -> None:
        """Waits for what is on its way, and forgets it: training ends before that batch."""
        self.send()
        if self.sent is not None:
            self.sent[2].wait()
            self.sent = None

    def _forward(self, sparse: KeyedJaggedTensor) -> Any:
        if self.sent is None or self.sent[0] is not sparse:
            return self.usual(sparse)
        (_, context, ids), self.sent = self.sent, None
        return self.tables.compute_and_output_dist(context, ids.wait())


def with_next(batches: Iterator[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
    """Each batch with the one behind it; None behind the last.

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

"""Chooses while a rank trains whether its steps use all of its threads or one."""

import statistics
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from pipeline.data.batch import Batch
from pipeline.training.config import TrainConfig
from pipeline.training.dense import has_dropout
from pipeline.training.loss import dense_precision
from pipeline.training.optim import replicated_tables
from pipeline.training.tables.bags import NumbaBags
from pipeline.training.tables.sharding import iter_lookups

FIRST_STEPS = 16
"""Steps before the first trial. The first ones load and compile."""
TRIAL_STEPS = 9
"""Steps that are timed with each number of threads."""
TRIAL_SHARE = 0.01
"""Share of the training's time that trials may take."""
GAIN = 1.15
"""How many times as fast another number of threads must be to be taken."""
MOST_ROWS = 32_768
"""Rows of a batch above which PyTorch sums the loss in parts, one for each thread, so that its bits depend on them."""
Say = Callable[[int, float, float], None]
"""Called with (threads from now on, median seconds of a step before, median seconds now)."""


class ThreadChooser:
    """Times some steps with all threads and with one every now and then, and takes what is faster.

    Threads of a step wait for one another many times. If other work holds a processor, each wait lasts until that
    work is interrupted, and one thread is many times faster. Small steps may gain nothing from threads at all.

    Args:
        most: All threads.
        use: Sets the number of threads.
        say: Told of each change.
    Example:
        >>> chooser = ThreadChooser(2, lambda threads: None, lambda threads, before, now: print(threads))
        >>> for step in range(60):
        ...     chooser.after_step(0.036 if chooser.threads == 2 else 0.003, lambda: True)
        1
    """

    def __init__(self, most: int, use: Callable[[int], None], say: Say) -> None:
        self.most, self.use, self.say = most, use, say
        self.may_change: bool | None = None
        """Whether weights do not depend on the number of threads. None: not known yet."""
        self.threads = most
        """Of the next step, if its batch is full."""
        self.chosen = self.used = most
        self.fixed = False
        """Whether this step has all threads, whatever is chosen."""
        self.recent: deque[float] = deque(maxlen=TRIAL_STEPS)
        """Seconds of the last steps with the chosen number."""
        self.trial: list[float] = []
        self.steps_left, self.seconds_left = FIRST_STEPS, 0.0
        """Until the next trial."""

    def begin(self, full: bool) -> None:
        """Sets the threads of what comes now.

        Args:
            full: Whether it is a step with a full batch. Anything else, such as the last batch of an epoch, always has
                all threads: weights were not compared for as many rows.
        """
        self.fixed = not full
        self._set(self.most if self.fixed else self.threads)

    def after_step(self, seconds: float, has_same_bits: Callable[[], bool]) -> None:
        """Takes the time of a step with a full batch, and sets the threads of the next one.

        Args:
            has_same_bits: Called once, before the first trial. If it returns False, there are no trials.
        """
        if self.fixed:
            return
        if self.threads != self.chosen:
            self.trial.append(seconds)
            if len(self.trial) > TRIAL_STEPS:
                self._end_trial()
            return
        self.recent.append(seconds)
        self.steps_left -= 1
        self.seconds_left -= seconds
        if self.steps_left > 0 or self.seconds_left > 0.0 or self.may_change is False:
            return
        if self.may_change is None:
            self.may_change = has_same_bits()
        if self.may_change:
            self._use(1 if self.chosen == self.most else self.most)

    def restore(self) -> None:
        """Uses all threads again, for work that is no step."""
        self.chosen, self.trial = self.most, []
        self._use(self.most)

    def _end_trial(self) -> None:
        timed = self.trial[1:]  # the first step wakes or ends threads
        before, now = statistics.median(self.recent), statistics.median(timed)
        if now * GAIN < before:
            self.chosen = self.threads
            self.recent.extend(timed)
            self.say(self.chosen, before, now)
        self.steps_left, self.seconds_left = TRIAL_STEPS, sum(self.trial) / TRIAL_SHARE
        self.trial = []
        self._use(self.chosen)

    def _use(self, threads: int) -> None:
        self.threads = threads
        self._set(threads)

    def _set(self, threads: int) -> None:
        if threads != self.used:
            self.used = threads
            self.use(threads)


def choose_threads(
    model: DistributedModelParallel, config: TrainConfig, device: torch.device, say: Say
) -> ThreadChooser | None:
    """Returns what chooses a rank's threads. None: their number is fixed.

    It is fixed if the config says it, for several ranks, which share the processors, and where weights depend on it:
    with norms of gradients, random numbers, very large batches, compiled code, and tables that our kernel does not
    update.
    """
    most = torch.get_num_threads()
    given = most == 1 or config.threads_per_rank is not None or config.lanes is not None or config.compile
    if given or device.type != "cpu" or config.sync != "synchronous" or dist.get_world_size() > 1:
        return None
    draws = has_dropout(model)
    inside = [module for lookup in iter_lookups(model) for module in lookup.modules()]
    tables = [module for module in inside if isinstance(module, SplitTableBatchedEmbeddingBagsCodegen)]
    ours = [table for table in tables if isinstance(table, NumbaBags)]
    if draws or config.dense_gradient_norm is not None or config.batch_rows > MOST_ROWS:
        return None
    if len(ours) < len(tables) or not ours or replicated_tables(model):
        return None

    def use(threads: int) -> None:
        torch.set_num_threads(threads)
        for table in ours:
            table.threads = threads

    return ThreadChooser(most, use, say)


def has_same_bits(
    model: DistributedModelParallel, config: TrainConfig, dense: Sequence[nn.Parameter], batch: Batch, most: int
) -> bool:
    """Whether logits and gradients of the dense part are the same, bit for bit, with one thread as with all.

    Libraries of matrix products may cut sums into one part for each thread, which rounds them in another way, for some
    numbers of rows and not for others. So this holds for batches of as many rows only. The model stays as it is.
    """
    if batch.shared is not None:
        return False
    inner: Any = get_unwrapped_module(model)
    with torch.no_grad():
        pooled_BFE = inner.pool(batch.sparse)

    def differentiate() -> list[torch.Tensor]:
        vectors_BFE = pooled_BFE.detach().requires_grad_()
        with dense_precision(config, vectors_BFE.device):
            logits: torch.Tensor = inner.score(batch.dense, vectors_BFE)
        return [logits, *torch.autograd.grad(logits.float(), [*dense, vectors_BFE], batch.labels - 0.5)]

    found = []
    try:
        for threads in (1, most):
            torch.set_num_threads(threads)
            found.append(differentiate())
    finally:
        torch.set_num_threads(most)
    return all(torch.equal(one, other) for one, other in zip(*found, strict=True))

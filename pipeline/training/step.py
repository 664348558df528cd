"""TrainStep: an update of a rank's model from a batch. Each kind of step is one class."""

from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F

from pipeline.data.batch import Batch
from pipeline.training.learner import Learner
from pipeline.training.loss import logits_of, loss_sums
from pipeline.training.state.progress import LossSums, TrainingProgress
from pipeline.training.tables.prefetch import InputDistPrefetcher, with_next


class TrainStep(ABC):
    """Makes the steps of a training: forward, backward, update. Adds up the losses of the rows before their update.

    The loss is the mean over the GLOBAL batch, not this rank's rows. If rows have weights, it is the weighted mean, so
    learning rates keep their meaning.

    Args:
        learner: What the steps update.
        seed: Random numbers depend only on it, the step and the rank, so a resumed run repeats them.
    """

    def __init__(self, learner: Learner, seed: int) -> None:
        self.learner, self.config, self.seed = learner, learner.config, seed
        self.sums = torch.zeros(4, dtype=torch.float64, device=learner.device)
        """Since the last `take_sums`; see `loss_sums`."""
        half = self.config.table_precision == "fp16"
        self.reseeds = learner.draws or (half and learner.device.type == "cuda")  # FBGEMM rounds at random there
        several = self.config.sync == "synchronous" and dist.get_world_size() > 1
        self.prefetcher = InputDistPrefetcher(learner.model) if self.config.send_ids_ahead and several else None

    def feed(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
        """Yields batches on this rank's device, each with the next one if its ids are prefetched."""
        return ((batch, None) for batch in batches) if self.prefetcher is None else with_next(batches)

    def train(self, batch: Batch, coming: Batch | None, progress: TrainingProgress) -> bool:
        """Makes a step. Returns whether it did: all ranks may leave the batch out.

        Args:
            coming: The next batch, if its ids are prefetched.
            progress: Before this step.
        """
        if self.reseeds:
            words = [self.seed, progress.steps, dist.get_rank()]
            torch.manual_seed(int(np.random.SeedSequence(words).generate_state(1)[0]))
        self.learner.begin_step(progress)
        if self.prefetcher is not None:
            self.prefetcher.announce(coming)
        return self.update(batch, progress)

    @abstractmethod
    def update(self, batch: Batch, progress: TrainingProgress) -> bool:
        """Does the work of `train`. Between forward and backward pass, it calls `send_ids` and then `skips`."""

    def send_ids(self) -> None:
        """Sends the ids of the next batch if they are prefetched."""
        if self.prefetcher is not None:
            self.prefetcher.send()

    def skips(self, losses: torch.Tensor) -> bool:
        """Whether to leave the batch out. All ranks agree before the backward pass, which updates the tables."""
        if self.config.on_nonfinite == "stop":  # the trainer checks the loss before it saves anything
            return False
        bad = (~losses.isfinite()).any().to(torch.int32)
        dist.all_reduce(bad, dist.ReduceOp.MAX)
        return bool(bad.item())

    def take_sums(self) -> LossSums:
        """Returns and resets the loss sums of all ranks."""
        total = self.sums.clone()
        dist.all_reduce(total)
        self.sums.zero_()
        return LossSums.of(total)

    def end(self) -> None:
        """Ends the work for a next batch, which does not come."""
        if self.prefetcher is not None:
            self.prefetcher.drain()


class WholeStep(TrainStep):
    """Trains this rank's rows in one piece. DDP averages the dense gradients over the ranks."""

    def update(self, batch: Batch, progress: TrainingProgress) -> bool:
        """See `TrainStep`."""
        logits = logits_of(self.learner.model, batch, self.config)
        self.send_ids()
        losses = F.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="none")
        if self.skips(losses.detach()):
            return False
        # Gradients are averaged over ranks, so the mean over all rows needs the factor world_size.
        losses.backward(torch.full_like(losses, dist.get_world_size() / batch.whole))
        self.learner.update_dense()
        self.sums += loss_sums(logits.detach(), losses.detach(), batch.labels, batch.weights)
        return True

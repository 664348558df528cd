"""What a training measures of itself: seconds of its steps, and the loss of rows that it does not train on."""

import statistics
import time
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.data.batch import Batch
from pipeline.data.position import Times
from pipeline.training.config import TrainConfig
from pipeline.training.lanes import Lanes
from pipeline.training.loss import logits_of, loss_sums
from pipeline.training.staging import move_batches
from pipeline.training.state.progress import LossSums

RECENT_STEPS = 256
"""Number of last steps with times in memory."""


class StepTimes:
    """Seconds of the steps since the last report, and the times of their batches, for which the steps waited."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.batches: list[Times] = []
        self.recent: deque[float] = deque(maxlen=RECENT_STEPS)

    def add(self, seconds: float, batch: Times) -> None:
        """Adds a step."""
        self.batches.append(batch)
        self.recent.append(seconds)
        self.seconds += seconds

    @property
    def median(self) -> float:
        """Median seconds of the last steps. The first steps take longer."""
        return statistics.median(self.recent) if self.recent else 0.0

    def await_device(self, device: torch.device) -> None:
        """Waits until a CUDA device has finished its steps, and counts the wait as time of these steps."""
        if device.type == "cuda":
            start = time.perf_counter()
            torch.cuda.synchronize(device)
            self.seconds += time.perf_counter() - start

    def take(self) -> tuple[float, float, dict[str, float]]:
        """Returns and resets what was added: (seconds of steps and waits, those of waits, metrics of the batches)."""
        if not self.batches:
            return 0.0, 0.0, {}
        waited = sum(times.wait for times in self.batches)
        busy = self.seconds + waited
        means = {
            f"batch_{name}_seconds": float(np.mean([getattr(times, name) for times in self.batches]))
            for name in Times.model_fields
        }
        self.seconds, self.batches = 0.0, []
        return busy, waited, means | {"stall_fraction_window": waited / busy if busy else 0.0}


def evaluate_sums(
    model: DistributedModelParallel, batches: Iterator[Batch], device: torch.device, config: TrainConfig
) -> LossSums:
    """Returns the loss sums of all ranks over some batches. Does not change the model."""
    if config.lanes is not None:
        return LossSums.of(Lanes(model, config, ()).evaluate(batches))
    total = torch.zeros(4, dtype=torch.float64, device=device)
    for batch in move_batches(batches, device, model):
        logits = logits_of(model, batch, config)
        losses = F.binary_cross_entropy_with_logits(logits, batch.labels, weight=batch.weights, reduction="none")
        total += loss_sums(logits, losses, batch.labels, batch.weights)
    dist.all_reduce(total)
    return LossSums.of(total)

"""Asynchronous training: a baseline on the CPUs of one machine.

All ranks look up and update one copy of the embedding tables, without locks. The dense weights are shared in the same
way (`hogwild`), or each rank has its own weights, tied to a shared center (`easgd`). Ranks synchronize at the same step
to validate and to save. Between these points, no rank waits for another.
"""

import fcntl
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.data.batch import Batch
from pipeline.training.config import TrainConfig
from pipeline.training.learner import Learner
from pipeline.training.optim import dense_parameters
from pipeline.training.state.progress import LossSums, TrainingProgress
from pipeline.training.step import WholeStep
from pipeline.training.tables.bags import NumbaBags
from pipeline.training.tables.shared import share_memory


def share_tensor(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Copies rank 0's values to memory shared by all ranks. Returns it with its descriptor. All ranks call it together.

    The memory has no name, so it is freed with the last process that maps it, however that process ends.

    Raises:
        OSError: If some rank is on another machine.
    """
    shared = share_memory(max(tensor.nbytes, 1))
    if shared is None:
        raise OSError("ranks that train asynchronously must be processes of one machine, and share its /proc")
    memory, fd = shared
    common = memory[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)
    if dist.get_rank() == 0:
        common.copy_(tensor.detach())
    dist.barrier()
    return common, fd


class SharedBags(NumbaBags):
    """Tables and optimizer state in memory that all ranks share, updated without locks.

    If two ranks update a row at the same time, an update may be lost. With sparse gradients that is rare. Each rank has
    its own scratch memory for summing gradients.

    Source:
        Recht et al. 2011, Hogwild!, section 2; Acun et al. 2020, arXiv:2011.05497, on asynchronous CPU training.
    """

    def __init__(self, embedding_specs: list[Any], **settings: Any) -> None:
        super().__init__(embedding_specs, **settings)
        for name in ("weights_host", "momentum1_host"):
            mine = getattr(self, name, None)
            if mine is not None:
                mine.data, fd = share_tensor(mine)
                os.close(fd)
        self.second, fd = share_tensor(self.second)
        os.close(fd)


class SharedLearner(Learner):
    """A learner that works at its own pace. The module says what is shared.

    hogwild: all ranks share dense weights and the state of one optimizer, and step it without locks. easgd: each rank
    has its own. Every `easgd_period_steps`, the rank moves towards the center and the center towards the rank. The
    center is validated, saved and exported.

    A resumed `easgd` training starts all ranks from the center and rank 0's optimizer state. Like all asynchronous
    training, it repeats neither bits nor the order of updates.

    Args:
        model: Its tables are `SharedBags`, sharded as for one rank.
    Source:
        Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, algorithm 1 (asynchronous EASGD); Recht et al. 2011, Hogwild!
    """

    def __init__(self, model: DistributedModelParallel, config: TrainConfig, device: torch.device) -> None:
        super().__init__(model, config, device)
        self.elastic = config.sync == "easgd"
        self.make_dense_state()
        weights = dense_parameters(model)
        slots = {
            f"dense/{name}/{slot}": value.zero_()
            for name, parameter in weights
            for slot, value in self.optimizer.state[parameter].items()
            if isinstance(value, torch.Tensor)
        }
        self.own: dict[str, torch.Tensor] = {f"model/{name}": parameter for name, parameter in weights} | slots
        """Checkpoint name -> dense weight or optimizer state that this rank steps."""
        flat, self.lock = share_tensor(torch.cat([tensor.detach().reshape(-1) for tensor in self.own.values()]))
        parts = flat.split([tensor.numel() for tensor in self.own.values()])
        self.common = {name: part.view_as(own) for (name, own), part in zip(self.own.items(), parts, strict=True)}
        """Checkpoint name -> the shared copy of it."""
        if not self.elastic:
            for name, tensor in self.own.items():
                tensor.data = self.common[name]

    @torch.no_grad()
    def exchange(self) -> None:
        """Moves this rank and the center towards each other by the same amount. One rank at a time."""
        fcntl.lockf(self.lock, fcntl.LOCK_EX)  # the lock is released if its process dies
        for name, own in self._weights():
            difference = self.config.moving_rate * (own - self.common[name])
            own -= difference
            self.common[name] += difference
        fcntl.lockf(self.lock, fcntl.LOCK_UN)

    def meet(self) -> None:
        """All ranks synchronize. The shared copy then has rank 0's optimizer state."""
        if self.elastic and dist.get_rank() == 0:
            for name, own in self.own.items():
                if name.startswith("dense/"):
                    self.common[name].copy_(own)
        dist.barrier()

    @contextmanager
    def serving(self, averaged: bool) -> Iterator[None]:
        """Gives the model the shared weights inside the block. All ranks synchronize."""
        dist.barrier()
        kept = {name: own.detach().clone() for name, own in self._weights()} if self.elastic else {}
        self.adopt()
        yield
        with torch.no_grad():
            for name, value in kept.items():
                self.own[name].copy_(value)
        dist.barrier()

    def serve(self, averaged: bool) -> None:
        """See `Learner`. The model of each rank ends with the shared weights."""
        self.adopt()

    def state(self) -> dict[str, Any]:
        """See `Learner`. The dense part is the shared copy."""
        return super().state() | self.common

    def after_load(self) -> None:
        """See `Learner`. All ranks start from the shared copy."""
        super().after_load()
        dist.barrier()
        self.adopt(optimizer=True)

    def export(self, path: Path | None, written: Callable[[], None] = lambda: None) -> str | None:
        """See `Learner`. Every rank has all weights."""
        return super().export(path, written) if dist.get_rank() == 0 else None

    def close(self) -> None:
        """Releases the shared memory, as the end of the process would."""
        os.close(self.lock)

    @torch.no_grad()
    def adopt(self, optimizer: bool = False) -> None:
        """Replaces this rank's weights by the shared ones, and optionally its optimizer state."""
        if self.elastic:
            for name, own in self.own.items() if optimizer else self._weights():
                own.copy_(self.common[name])

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, own) for name, own in self.own.items() if name.startswith("model/")]


class SharedStep(WholeStep):
    """Trains a rank's share of each batch. The gradient is only of this rank's rows."""

    learner: SharedLearner

    def __init__(self, learner: SharedLearner, seed: int) -> None:
        super().__init__(learner, seed)
        self.by_rank, fd = share_tensor(torch.zeros(dist.get_world_size(), 4, dtype=torch.float64))
        os.close(fd)
        self.sums = self.by_rank[dist.get_rank()]
        self.taken = torch.zeros(4, dtype=torch.float64)

    def update(self, batch: Batch, progress: TrainingProgress) -> bool:
        """See `TrainStep`. With easgd, a rank and the center meet after some steps."""
        trained = super().update(batch, progress)
        if self.learner.elastic and (progress.steps + 1) % self.config.easgd_period_steps == 0:
            self.learner.exchange()
        return trained

    def take_sums(self) -> LossSums:
        """Returns the sums of all ranks since the last call. Between two synchronizations, some rows may be missing."""
        total = self.by_rank.sum(0)
        window, self.taken = total - self.taken, total
        return LossSums.of(window)

"""Asynchronous training: a baseline on the CPUs of one machine.

All ranks look up and update one copy of the embedding tables, without locks. The dense weights are shared in the same
way (`hogwild`), or each rank has its own weights, tied to a shared center (`easgd`). Ranks synchronize at the same step
to validate and to save. Between these points, no rank waits for another.
"""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.data.batch import Batch
from pipeline.training.optim import dense_parameters
from pipeline.training.state.async_checkpoint import AsyncCheckpointer
from pipeline.training.tables.bags import NumbaBags
from pipeline.training.tables.shared import share_memory
from pipeline.training.trainer import Trainer


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


class AsyncTrainer(Trainer):
    """Trains a rank's share of each batch at its own pace. The module says what is shared.

    hogwild: all ranks share dense weights and the state of one optimizer, and step it without locks. easgd: each rank
    has its own. Every `easgd_period_steps`, the rank moves towards the center and the center towards the rank. The
    center is validated, saved and exported.

    A resumed `easgd` training starts all ranks from the center and rank 0's optimizer state. Like all asynchronous
    training, it repeats neither bits nor the order of updates.

    Args:
        As `Trainer`. The tables of the model are `SharedBags`, sharded as for one rank.
    Source:
        Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, algorithm 1 (asynchronous EASGD); Recht et al. 2011, Hogwild!
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.checkpointer = AsyncCheckpointer(False, self.checkpoints)  # each rank would copy all tables
        self.elastic = self.config.sync == "easgd"
        self.sums, fd = share_tensor(torch.zeros(dist.get_world_size(), 4, dtype=torch.float64))
        os.close(fd)
        self.window = self.sums[dist.get_rank()]
        self.taken = torch.zeros(4, dtype=torch.float64)
        self.make_dense_state()
        weights = dense_parameters(self.model)
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

    def train_step(self, batch: Batch, coming: Batch | None = None) -> None:
        """See `Trainer`. The gradient is only of this rank's rows."""
        super().train_step(batch, coming)
        if self.elastic and (self.progress.steps + 1) % self.config.easgd_period_steps == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """Moves this rank and the center towards each other by the same amount. One rank at a time."""
        fcntl.lockf(self.lock, fcntl.LOCK_EX)  # the lock is released if its process dies
        for name, own in self._weights():
            difference = self.config.moving_rate * (own - self.common[name])
            own -= difference
            self.common[name] += difference
        fcntl.lockf(self.lock, fcntl.LOCK_UN)

    def end_epoch(self) -> None:
        """See `Trainer`. All ranks synchronize."""
        dist.barrier()
        super().end_epoch()
        dist.barrier()  # keeps rows of the next epoch out of these sums

    def log(self) -> None:
        """Reports the work of all ranks, on rank 0 at its own steps."""
        if dist.get_rank() == 0:
            super().log()
        else:
            self.step_seconds, self.times = 0.0, []

    def total_window(self) -> torch.Tensor:
        """Returns the sums of all ranks since the last call. Between two synchronizations, some rows may be missing."""
        total = self.sums.sum(0)
        window, self.taken = total - self.taken, total
        return window

    def validate(self) -> None:
        """Validates the shared weights. All ranks synchronize."""
        dist.barrier()
        kept = {name: own.detach().clone() for name, own in self._weights()} if self.elastic else {}
        self.adopt()
        super().validate()
        with torch.no_grad():
            for name, value in kept.items():
                self.own[name].copy_(value)
        dist.barrier()

    def close(self) -> None:
        """Releases the shared memory, as the end of the process would."""
        os.close(self.lock)

    def state(self) -> dict[str, Any]:
        """See `Trainer`. The dense part is the shared copy."""
        return super().state() | self.common

    def save(self, name: str | None = None) -> None:
        """See `Trainer`. All ranks synchronize."""
        if self.elastic and dist.get_rank() == 0:
            for key, own in self.own.items():
                if key.startswith("dense/"):
                    self.common[key].copy_(own)
        dist.barrier()
        super().save(name)

    def load(self, folder: Path) -> None:
        """See `Trainer`. All ranks start from the shared copy."""
        super().load(folder)
        dist.barrier()
        self.adopt(optimizer=True)

    def start_from(self, folder: Path) -> None:
        """See `Trainer`. All ranks start from the shared copy."""
        super().start_from(folder)
        dist.barrier()
        self.adopt(optimizer=True)

    def finish(self) -> None:
        """See `Trainer`. The model of each rank ends with the shared weights."""
        super().finish()
        self.adopt()

    def export(self, path: Path | None, written: Callable[[], None] = lambda: None) -> str | None:
        """See `Trainer`. Every rank has all weights."""
        return super().export(path, written) if dist.get_rank() == 0 else None

    @torch.no_grad()
    def adopt(self, optimizer: bool = False) -> None:
        """Replaces this rank's weights by the shared ones, and optionally its optimizer state."""
        if self.elastic:
            for name, own in self.own.items() if optimizer else self._weights():
                own.copy_(self.common[name])

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, own) for name, own in self.own.items() if name.startswith("model/")]

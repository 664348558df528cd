"""Training without lock-step: the asynchronous baseline, on the processors of one machine.

All ranks look up and update one copy of the embedding tables, without locks. The dense weights are shared in the same
way (`hogwild`), or each rank has its own and a shared centre holds them together (`easgd`). Ranks meet where something
is kept or judged, at the same step; between two meetings none waits for another.
"""

import fcntl
import mmap
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pipeline.data.batch import Batch
from pipeline.training.optim import dense_parameters
from pipeline.training.state.async_checkpoint import AsyncCheckpointer
from pipeline.training.tables.bags import NumbaBags
from pipeline.training.trainer import Trainer


def shared(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Rank 0's values in memory that all ranks write to, and its descriptor; called by all ranks together.

    The memory has no name: it is gone with the last process that maps it, whatever ends that.
    """
    fd = os.memfd_create("dlrm-shared", os.MFD_CLOEXEC) if dist.get_rank() == 0 else -1
    size = max(tensor.nbytes, 1)
    if fd >= 0:
        os.ftruncate(fd, size)
    place = torch.tensor([os.getpid(), fd])
    dist.broadcast(place, 0)
    if fd < 0:
        process, number = place.tolist()
        fd = os.open(f"/proc/{process}/fd/{number}", os.O_RDWR | os.O_CLOEXEC)
    memory = torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)[: tensor.nbytes]
    common = memory.view(tensor.dtype).view(tensor.shape)
    if dist.get_rank() == 0:
        common.copy_(tensor.detach())
    dist.barrier()
    return common, fd


class SharedBags(NumbaBags):
    """Tables and their optimizer state in memory that all ranks share, updated without locks.

    Two ranks that update one row at the same moment may lose an update; with sparse gradients that is rare. What a
    rank notes down while it adds up its gradients is its own.

    Source:
        Recht et al. 2011, Hogwild!, section 2; Acun et al. 2020, arXiv:2011.05497, on asynchronous CPU training.
    """

    def __init__(self, embedding_specs: list[Any], **settings: Any) -> None:
        super().__init__(embedding_specs, **settings)
        for name in ("weights_host", "momentum1_host"):
            mine = getattr(self, name, None)
            if mine is not None:
                mine.data, fd = shared(mine)
                os.close(fd)
        self.second, fd = shared(self.second)
        os.close(fd)


class AsyncTrainer(Trainer):
    """A rank that trains its share of each batch at its own pace; see the module for what is shared.

    hogwild: dense weights and the state of their optimizer are one copy for all ranks: one optimizer, which the ranks
    step in turn without locks. easgd: both are a rank's own; every `easgd_period_steps` the rank moves towards the
    centre, and the centre towards it. The centre is what is judged, kept and exported.

    A resumed training starts all ranks of `easgd` from the centre and rank 0's optimizer state. It repeats neither
    bits nor the order of updates; nothing asynchronous does.

    Args:
        As `Trainer`. The model's tables are `SharedBags`, placed as for one rank.
    Source:
        Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, algorithm 1 (asynchronous EASGD); Recht et al. 2011, Hogwild!
    """

    def __init__(self, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self.checkpointer = AsyncCheckpointer(background=False)  # each rank would copy all tables
        self.elastic = self.config.sync == "easgd"
        self.sums, fd = shared(torch.zeros(dist.get_world_size(), 4, dtype=torch.float64))
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
        """Dense weights and their optimizer's state as this rank steps them, by their names in a checkpoint."""
        flat, self.lock = shared(torch.cat([tensor.detach().reshape(-1) for tensor in self.own.values()]))
        parts = flat.split([tensor.numel() for tensor in self.own.values()])
        self.common = {name: part.view_as(own) for (name, own), part in zip(self.own.items(), parts, strict=True)}
        """The same as all ranks see them."""
        if not self.elastic:
            for name, tensor in self.own.items():
                tensor.data = self.common[name]

    def train_step(self, batch: Batch, coming: Batch | None = None) -> None:
        """See `Trainer`; the gradient is that of this rank's rows alone."""
        super().train_step(batch, coming)
        if self.elastic and (self.progress.steps + 1) % self.config.easgd_period_steps == 0:
            self.exchange()

    @torch.no_grad()
    def exchange(self) -> None:
        """This rank and the centre move towards each other by the same difference. One rank at a time."""
        fcntl.lockf(self.lock, fcntl.LOCK_EX)  # falls with the process that holds it
        for name, own in self._weights():
            difference = self.config.moving_rate * (own - self.common[name])
            own -= difference
            self.common[name] += difference
        fcntl.lockf(self.lock, fcntl.LOCK_UN)

    def end_epoch(self) -> None:
        """See `Trainer`; all ranks meet."""
        dist.barrier()
        super().end_epoch()
        dist.barrier()  # rows of the next epoch are not in the sums of this one

    def log(self) -> None:
        """Rank 0 reports what all ranks have done, at its own steps."""
        if dist.get_rank() == 0:
            super().log()
        else:
            self.step_seconds, self.times = 0.0, []

    def total_window(self) -> torch.Tensor:
        """Sums of all ranks since the last call; of rows on their way between two meetings some may be missing."""
        total = self.sums.sum(0)
        window, self.taken = total - self.taken, total
        return window

    def validate(self) -> None:
        """Judges the shared weights; all ranks meet."""
        dist.barrier()
        kept = {name: own.detach().clone() for name, own in self._weights()} if self.elastic else {}
        self.adopt()
        super().validate()
        with torch.no_grad():
            for name, value in kept.items():
                self.own[name].copy_(value)
        dist.barrier()

    def close(self) -> None:
        """Lets go of the shared memory, as the end of the process would."""
        os.close(self.lock)

    def state(self) -> dict[str, Any]:
        """See `Trainer`; of the dense part, what is shared."""
        return super().state() | self.common

    def save(self, name: str | None = None) -> None:
        """See `Trainer`; all ranks meet."""
        if self.elastic and dist.get_rank() == 0:
            for key, own in self.own.items():
                if key.startswith("dense/"):
                    self.common[key].copy_(own)
        dist.barrier()
        super().save(name)

    def load(self, folder: Path) -> None:
        """See `Trainer`; all ranks start from what is shared."""
        super().load(folder)
        dist.barrier()
        self.adopt(optimizer=True)

    def start_from(self, folder: Path) -> None:
        """See `Trainer`; all ranks start from what is shared."""
        super().start_from(folder)
        dist.barrier()
        self.adopt(optimizer=True)

    def finish(self) -> None:
        """See `Trainer`; the model of each rank ends with the shared weights."""
        super().finish()
        self.adopt()

    def export_weights(self) -> dict[str, torch.Tensor] | None:
        """See `Trainer`; every rank has all weights."""
        return super().export_weights() if dist.get_rank() == 0 else None

    @torch.no_grad()
    def adopt(self, optimizer: bool = False) -> None:
        """Puts the shared weights in the place of a rank's own, and the optimizer's state if so wished."""
        if self.elastic:
            for name, own in self.own.items() if optimizer else self._weights():
                own.copy_(self.common[name])

    def _weights(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, own) for name, own in self.own.items() if name.startswith("model/")]

"""Lanes: fixed parts of the global batch, with gradients added in one fixed order. Weights depend on the data alone.

A sum of floats depends on its order, and a matrix product on its number of rows and threads. So the dense part runs
each lane by itself, on one thread, from memory of its own, and the gradients of all lanes are added from the first lane
to the last, wherever they were computed. The tables need no lanes: a bag is pooled by itself, and a row of a table adds
its gradients in the order of the global batch (docs/internals/kernels.md).

Shape letters: L lanes of this rank, N lanes of all ranks, W ranks, B rows of this rank, F vectors, E width, P numbers.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.distributed.comm_ops import get_gradient_division, set_gradient_division
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from pipeline.data.batch import Batch
from pipeline.training.config import TrainConfig
from pipeline.training.dense import has_dropout
from pipeline.training.learner import Learner
from pipeline.training.loss import dense_precision, loss_sums
from pipeline.training.state.progress import LossSums, TrainingProgress
from pipeline.training.step import TrainStep


class LaneResults(NamedTuple):
    """What the lanes of a rank computed.

    Shapes:
        pooled_BFE: the pooled vectors, float32 [B, F, E], with the graph that leads to the tables.
        pooled_gradient_BFE: gradient of their loss, float32 [B, F, E]; 0 for padding.
        gradients_LP: dense gradients, flat, float32 [L, P]. losses: losses of all rows of the lanes, float32.
        sums: see `loss_sums`, float64 [L, 4].
    """

    pooled_BFE: torch.Tensor
    pooled_gradient_BFE: torch.Tensor
    gradients_LP: torch.Tensor
    losses: torch.Tensor
    sums: torch.Tensor


class Lanes:
    """This rank's lanes of each global batch: of lanes 0 to N - 1, rank r has r * N / W to (r + 1) * N / W - 1.

    Lane l of a batch of T rows has the rows l * T // N to (l + 1) * T // N - 1. That is how ranks share a batch, so
    each lane lies on one rank. In a small batch some lanes have no row.

    Args:
        model: The sharded model. Its DDP wrapper is passed by, since it would average the gradients.
        dense: All parameters except the tables.
    Raises:
        ValueError: If N is no multiple of W.
    Source:
        Li et al. 2023, EasyScale, SC '23, arXiv:2208.14228 (workers whose work does not depend on their place).
    """

    def __init__(self, model: DistributedModelParallel, config: TrainConfig, dense: Sequence[nn.Parameter]) -> None:
        assert config.lanes is not None
        self.ranks, self.rank, self.number = dist.get_world_size(), dist.get_rank(), config.lanes
        if self.number % self.ranks:
            raise ValueError(f"{self.number} lanes are no multiple of {self.ranks} ranks")
        count = self.number // self.ranks
        self.own = range(self.rank * count, (self.rank + 1) * count)
        self.config, self.dense = config, list(dense)
        self.inner: Any = get_unwrapped_module(model)
        draws = has_dropout(model)
        threads = 1 if draws else min(torch.get_num_threads(), count)  # random numbers come from one generator
        self.threads = ThreadPoolExecutor(threads, initializer=torch.set_num_threads, initargs=(1,))

    def pool(self, batch: Batch) -> torch.Tensor:
        """Looks up the tables for all rows of this rank: float32 [B, F, E]."""
        with undivided_gradients():
            vectors_BFE: torch.Tensor = self.inner.pool(batch.sparse)
        return vectors_BFE

    def differentiate(self, pooled_BFE: torch.Tensor, batch: Batch, seed: Callable[[int], int] | None) -> LaneResults:
        """Runs forward and backward pass of the dense part, lane by lane.

        Args:
            seed: Lane -> seed of its random numbers. None: it draws none.
        """
        gradient_BFE = torch.zeros_like(pooled_BFE)
        gradients_LP = pooled_BFE.new_zeros(len(self.own), sum(parameter.numel() for parameter in self.dense))
        sums = torch.zeros(len(self.own), 4, dtype=torch.float64)

        def run(at: int, rows: slice) -> torch.Tensor:
            if seed is not None:
                torch.manual_seed(seed(self.own[at]))
            vectors = own_memory(pooled_BFE.detach(), rows).requires_grad_()
            logits, losses = self.score(vectors, batch, rows)
            scale = torch.full_like(losses, 1.0 / batch.whole)
            *dense, of_vectors = torch.autograd.grad(losses, [*self.dense, vectors], scale)
            gradient_BFE[rows] = of_vectors
            torch.cat([gradient.reshape(-1) for gradient in dense], out=gradients_LP[at])
            sums[at] = loss_sums(logits.detach(), losses.detach(), batch.labels[rows], batch.weights[rows])
            return losses.detach()

        losses = torch.cat(self._map(run, batch) or [torch.zeros(0)])
        return LaneResults(pooled_BFE, gradient_BFE, gradients_LP, losses, sums)

    def update_tables(self, results: LaneResults) -> None:
        """Runs the backward pass of the tables, which updates them."""
        with undivided_gradients():
            torch.autograd.backward(results.pooled_BFE, results.pooled_gradient_BFE)

    def set_gradients(self, results: LaneResults) -> None:
        """Gives the dense parameters the sum of all lanes' gradients."""
        total_P = self.add(results.gradients_LP)
        pieces = total_P.split([parameter.numel() for parameter in self.dense])
        for parameter, piece in zip(self.dense, pieces, strict=True):
            parameter.grad = piece.view_as(parameter)

    def evaluate(self, batches: Iterator[Batch]) -> torch.Tensor:
        """Returns the loss sums of all ranks over some batches, float64 [4]; see `loss_sums`."""
        totals = torch.zeros(len(self.own), 4, dtype=torch.float64)
        with one_thread():
            for batch in batches:
                self._evaluate_batch(batch.plain, totals)
        return self.add(totals)

    def _evaluate_batch(self, batch: Batch, totals: torch.Tensor) -> None:
        pooled_BFE = self.pool(batch)

        def run(at: int, rows: slice) -> None:
            with torch.no_grad():  # it holds for one thread
                logits, losses = self.score(own_memory(pooled_BFE, rows), batch, rows)
                totals[at] += loss_sums(logits, losses, batch.labels[rows], batch.weights[rows])

        self._map(run, batch)

    def score(self, vectors: torch.Tensor, batch: Batch, rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns logits and weighted losses of a lane's rows, float32 [rows]."""
        with dense_precision(self.config, vectors.device):
            logits = self.inner.score(own_memory(batch.dense, rows), vectors).float()
        weights = batch.weights[rows]
        return logits, F.binary_cross_entropy_with_logits(logits, batch.labels[rows], weight=weights, reduction="none")

    def add(self, values_LP: torch.Tensor) -> torch.Tensor:
        """Adds a vector of each lane in the order of the lanes: [L, P] on each rank -> [P], the same on all.

        Each rank adds its part of the numbers for all lanes. With one lane a rank, it sends no more than an all-reduce.
        """
        if self.ranks == 1:
            return add_in_order(values_LP)
        numbers = values_LP.shape[1]
        padded = F.pad(values_LP, (0, -numbers % self.ranks))
        sent_WLP = padded.unflatten(1, (self.ranks, -1)).transpose(0, 1).contiguous()
        received_WLP = torch.empty_like(sent_WLP)
        dist.all_to_all_single(received_WLP, sent_WLP)
        part = add_in_order(received_WLP.flatten(0, 1))
        whole = part.new_empty(self.ranks * len(part))
        dist.all_gather_into_tensor(whole, part)
        return whole[:numbers]

    def cut(self, batch: Batch) -> list[slice]:
        """Returns the rows of each lane among this rank's."""
        bounds = [lane * batch.global_rows // self.number for lane in range(self.own.start, self.own.stop + 1)]
        return [slice(low - bounds[0], high - bounds[0]) for low, high in itertools.pairwise(bounds)]

    def _map(self, run: Callable[[int, slice], Any], batch: Batch) -> list[Any]:
        """Runs the lanes that have rows on this rank's threads. Returns their results in the order of the lanes."""
        lanes = [(at, rows) for at, rows in enumerate(self.cut(batch)) if rows.start < rows.stop]
        return list(self.threads.map(run, *zip(*lanes, strict=True))) if lanes else []


class LaneStep(TrainStep):
    """Trains this rank's rows lane by lane, on one thread beside those of the lanes."""

    def __init__(self, learner: Learner, seed: int) -> None:
        super().__init__(learner, seed)
        self.lanes = Lanes(learner.model, learner.config, learner.dense)
        self.sums = torch.zeros(len(self.lanes.own), 4, dtype=torch.float64)
        """Of each lane."""
        self.reseeds = False  # each lane has a seed

    def feed(self, batches: Iterator[Batch]) -> Iterator[tuple[Batch, Batch | None]]:
        """See `TrainStep`. A list that rows share would add their gradients first, but only if they share a rank."""
        return super().feed(batch.plain for batch in batches)

    def update(self, batch: Batch, progress: TrainingProgress) -> bool:
        """See `TrainStep`."""
        batch = batch.plain
        with one_thread():
            pooled_BFE = self.lanes.pool(batch)
            self.send_ids()
            seed = partial(lane_seed, self.seed, progress.steps) if self.learner.draws else None
            results = self.lanes.differentiate(pooled_BFE, batch, seed)
            if self.skips(results.losses):
                return False
            self.lanes.update_tables(results)
            self.lanes.set_gradients(results)
            self.learner.update_dense()
            self.sums += results.sums
        return True

    def take_sums(self) -> LossSums:
        """See `TrainStep`. The lanes are added in their order."""
        total = self.lanes.add(self.sums)
        self.sums.zero_()
        return LossSums.of(total)


def add_in_order(values_NP: torch.Tensor) -> torch.Tensor:
    """Adds vectors from the first to the last.

    Example:
        >>> add_in_order(torch.tensor([[1.0], [1e8], [-1e8]]))
        tensor([0.])
    """
    total_P = values_NP[0].clone()
    for value_P in values_NP[1:]:
        total_P += value_P
    return total_P


def own_memory(tensor: torch.Tensor, rows: slice) -> torch.Tensor:
    """Copies rows to memory of their own: the order in a matrix product may depend on the address of its numbers."""
    return tensor[rows].clone()


def lane_seed(seed: int, step: int, lane: int) -> int:
    """Returns the seed of a lane's random numbers in a step.

    Example:
        >>> lane_seed(1, 2, 3) == lane_seed(1, 2, 3) != lane_seed(1, 2, 4)
        True
    """
    return int(np.random.SeedSequence([seed, step, lane]).generate_state(1)[0])


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs PyTorch's operators inside the block on one thread: sums depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def undivided_gradients() -> Iterator[None]:
    """Keeps TorchRec from dividing gradients of pooled vectors by the number of ranks, which would round them."""
    before = get_gradient_division()
    set_gradient_division(False)
    try:
        yield
    finally:
        set_gradient_division(before)

"""The dense part of a step on CUDA as one graph, which the host launches at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from pipeline.data.batch import Batch
from pipeline.training.config import TrainConfig
from pipeline.training.loss import dense_precision, loss_sums

WARM_UP = 3
"""Passes before the capture, in which libraries choose their algorithms and take their memory."""


class DenseResults(NamedTuple):
    """What the dense part of a step computed. The next step overwrites it.

    Shapes:
        losses: weighted losses, float32 [B]. sums: see `loss_sums`, float64 [4]. pooled_gradient_BFE: gradient of the
        loss, float32 [B, F, E]. gradients: those of the dense parameters.
    """

    losses: torch.Tensor
    sums: torch.Tensor
    pooled_gradient_BFE: torch.Tensor
    gradients: tuple[torch.Tensor, ...]


class DenseGraph:
    """Forward and backward pass of everything but the tables, captured as a CUDA graph.

    In a small step most time goes into launching kernels one by one. The graph launches the same kernels, so results
    are the same bit for bit. It is captured for the first whole batch and takes batches of as many rows.

    Args:
        dense: All parameters except the tables. Their memory must stay where it is.
    Source:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, model: DistributedModelParallel, config: TrainConfig, dense: list[nn.Parameter]) -> None:
        self.inner: Any = get_unwrapped_module(model)
        self.config, self.dense = config, dense
        self.inputs: list[torch.Tensor] = []
        """Memory of the graph's inputs: pooled vectors, dense columns, labels, weights. Empty before the capture."""
        self.replay: Callable[[], DenseResults] = self._capture

    def fits(self, batch: Batch) -> bool:
        """Whether the graph takes this batch."""
        if batch.shared is not None:
            return False
        if not self.inputs:  # the last batch of an epoch is smaller
            return batch.global_rows == self.config.batch_rows
        return self.inputs[1].shape == batch.dense.shape

    def differentiate(self, pooled_BFE: torch.Tensor, batch: Batch) -> DenseResults:
        """Returns losses and gradients of the batch.

        Shapes:
            pooled_BFE: pooled vectors of the tables, float32 [B, F, E].
        """
        given = [pooled_BFE.detach(), batch.dense, batch.labels, batch.weights]
        scale = 1.0 / batch.whole
        if not self.inputs:
            self.inputs = [tensor.clone() for tensor in given]
            self.scales, self.scale = torch.full_like(batch.labels, scale), scale
        else:
            torch._foreach_copy_(self.inputs, given)
        if scale != self.scale:
            self.scales.fill_(scale)
            self.scale = scale
        return self.replay()

    def _capture(self) -> DenseResults:
        beside = torch.cuda.Stream()
        beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(beside):
            for _ in range(WARM_UP):
                self._differentiate()
        torch.cuda.current_stream().wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # another thread copies batches meanwhile
            results = self._differentiate()

        def replay() -> DenseResults:
            graph.replay()
            return results

        self.replay = replay
        return replay()

    def _differentiate(self) -> DenseResults:
        pooled, dense_BD, labels, weights = self.inputs
        pooled_BFE = pooled.detach().requires_grad_()
        with dense_precision(self.config, dense_BD.device):
            logits = self.inner.score(dense_BD, pooled_BFE).float()
        losses = F.binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="none")
        *dense, of_vectors = torch.autograd.grad(losses, [*self.dense, pooled_BFE], self.scales)
        sums = loss_sums(logits.detach(), losses.detach(), labels, weights)
        return DenseResults(losses.detach(), sums, of_vectors, tuple(dense))


def build_graph(
    model: DistributedModelParallel, config: TrainConfig, dense: list[nn.Parameter], device: torch.device, draws: bool
) -> DenseGraph | None:
    """Returns the graph of a rank that trains alone on CUDA. None: its steps launch kernels one by one.

    Dropout draws new numbers at every step, which a graph would not. DDP, which averages the gradients of several
    ranks, makes the default stream wait for every backward pass. A capture forbids that.

    Args:
        draws: Whether the model has dropout.
    """
    fitting = device.type == "cuda" and dist.get_world_size() == 1 and not draws
    return DenseGraph(model, config, dense) if fitting and config.cuda_graph else None

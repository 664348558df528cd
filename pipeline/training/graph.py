"""The dense part of a step on CUDA as one graph, which the host launches at once."""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from pipeline.data.batch import Batch
from pipeline.training.config import TrainConfig
from pipeline.training.learner import Learner
from pipeline.training.loss import dense_precision, loss_sums
from pipeline.training.state.progress import TrainingProgress
from pipeline.training.step import WholeStep

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

    Several ranks average the gradients after each launch, in one piece; see `begin_average`. DDP's averages cannot be
    part of a graph. DDP also keeps nodes for its parameters, because of which a backward pass would make the default
    stream wait for the captured one. A capture forbids that. So the graph of several ranks has tensors of its own that
    share the memory of the parameters.

    Args:
        dense: All parameters except the tables. Their memory must stay where it is.
    Source:
        https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs
    """

    def __init__(self, model: DistributedModelParallel, config: TrainConfig, dense: list[nn.Parameter]) -> None:
        self.inner: Any = get_unwrapped_module(model)
        self.config, self.ranks = config, dist.get_world_size()
        self.scorer = _Scorer(self.inner)
        self.dense: list[torch.Tensor] = list(dense)
        """What the graph differentiates by."""
        self.replaced: dict[str, torch.Tensor] = {}
        if self.ranks > 1:
            self.dense = [parameter.detach().requires_grad_() for parameter in dense]
            names = {id(parameter): name for name, parameter in self.scorer.named_parameters()}
            self.replaced = {names[id(one)]: own for one, own in zip(dense, self.dense, strict=True)}
        self.flat = torch.empty(0)
        """Gradients of the dense parameters of several ranks in one piece."""
        self.inputs: list[torch.Tensor] = []
        """Memory of the graph's inputs: pooled vectors, dense columns, labels, weights. Empty before the capture."""
        self.replay: Callable[[], DenseResults] = self._capture

    def fits(self, batch: Batch) -> bool:
        """Whether the graph takes this batch. Ranks agree, since their shares are padded to equal numbers of rows."""
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
        scale = self.ranks / batch.whole  # gradients are averaged, and the loss is a mean over the rows of all ranks
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

    def begin_average(self) -> Callable[[], object]:
        """Begins to average the gradients over the ranks, which call it together. Returns what waits for the end."""
        if self.ranks == 1:
            return lambda: None
        self.flat.div_(self.ranks)  # before the sum, as DDP does
        work = dist.all_reduce(self.flat, async_op=True)
        assert work is not None
        return work.wait

    def _differentiate(self) -> DenseResults:
        pooled, dense_BD, labels, weights = self.inputs
        pooled_BFE = pooled.detach().requires_grad_()
        with dense_precision(self.config, dense_BD.device):
            logits = functional_call(self.scorer, self.replaced, (dense_BD, pooled_BFE)).float()
        losses = F.binary_cross_entropy_with_logits(logits, labels, weight=weights, reduction="none")
        *dense, of_vectors = torch.autograd.grad(losses, [*self.dense, pooled_BFE], self.scales)
        if self.ranks > 1:
            self.flat = torch.cat([gradient.reshape(-1) for gradient in dense])
            parts = self.flat.split([gradient.numel() for gradient in dense])
            dense = [part.view_as(gradient) for part, gradient in zip(parts, dense, strict=True)]
        sums = loss_sums(logits.detach(), losses.detach(), labels, weights)
        return DenseResults(losses.detach(), sums, of_vectors, tuple(dense))


class _Scorer(nn.Module):
    """The model without its tables as a module, whose parameters `functional_call` replaces."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, dense_BD: torch.Tensor, pooled_BFE: torch.Tensor) -> torch.Tensor:
        logits_B: torch.Tensor = self.inner.score(dense_BD, pooled_BFE)
        return logits_B


class GraphStep(WholeStep):
    """Trains the rows as `WholeStep` does, with the dense part as one CUDA graph. Results are the same bit for bit."""

    def __init__(self, learner: Learner, seed: int) -> None:
        super().__init__(learner, seed)
        self.graph = DenseGraph(learner.model, learner.config, learner.dense)

    def update(self, batch: Batch, progress: TrainingProgress) -> bool:
        """See `TrainStep`."""
        graph, dense = self.graph, self.learner.dense
        if not graph.fits(batch):
            return super().update(batch, progress)
        pooled_BFE = graph.inner.pool(batch.sparse)
        results = graph.differentiate(pooled_BFE, batch)
        self.send_ids()
        if self.skips(results.losses):
            return False
        average = graph.begin_average()
        pooled_BFE.backward(results.pooled_gradient_BFE)  # updates the tables
        average()
        for parameter, gradient in zip(dense, results.gradients, strict=True):
            parameter.grad = gradient
        self.learner.update_dense()
        self.sums += results.sums
        return True


def can_capture(learner: Learner) -> bool:
    """Whether the dense part can be a graph. Otherwise steps launch kernels one by one.

    Dropout draws new numbers at every step, which a graph would not. Compiled code reads the parameters themselves,
    which a graph of several ranks must not.
    """
    config = learner.config
    fitting = not learner.draws and not (config.compile and dist.get_world_size() > 1)
    return config.cuda_graph and fitting and learner.device.type == "cuda"

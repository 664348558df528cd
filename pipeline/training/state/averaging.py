"""Running mean of the weights over the last part of training."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from pipeline.training.state.checkpoint import local_parts
from pipeline.training.tables.cached import drop_cache, flush_cache
from pipeline.training.tables.torch_private import Shard, join_shards


class WeightAverage:
    """Mean of all weights, dense and tables. Each rank averages its own shards.

    Args:
        model: The sharded model. The mean takes memory for one more copy of its weights.
    Source:
        Izmailov et al. 2018, arXiv:1803.05407, section 3.1 (stochastic weight averaging).
    """

    def __init__(self, model: DistributedModelParallel) -> None:
        self.model = model
        self.weights: dict[str, Any] = model.state_dict()
        self.means = {name: _zeros_like(tensor) for name, tensor in self.weights.items()}

    def take(self, count: int) -> None:
        """Adds the current weights to the mean as sample number `count`, counted from 1."""
        flush_cache(self.model)
        with torch.no_grad():
            for mean, now in self._pairs():
                mean += (now - mean) / count

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Gives the model the mean weights inside the block and its own weights afterwards."""
        flush_cache(self.model)
        own = [now.clone() for _, now in self._pairs()]
        self.apply()
        try:
            yield
        finally:
            with torch.no_grad():
                for kept, (_, now) in zip(own, self._pairs(), strict=True):
                    now.copy_(kept)
            drop_cache(self.model)

    def apply(self) -> None:
        """Copies the mean weights into the model."""
        with torch.no_grad():
            for mean, now in self._pairs():
                now.copy_(mean)
        drop_cache(self.model)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for name, tensor in self.weights.items():
            yield from zip(local_parts(self.means[name]), local_parts(tensor), strict=True)


def _zeros_like(tensor: Any) -> Any:
    if not hasattr(tensor, "local_shards"):
        return torch.zeros_like(tensor)
    shards = [Shard(torch.zeros_like(shard.tensor), shard.metadata) for shard in tensor.local_shards()]
    return join_shards(shards, tensor.metadata(), tensor)

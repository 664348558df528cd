"""What PyTorch gives under private names only: parts of sharded tensors, and oneDNN's linear layer."""

from typing import Any

import torch

from storage.errors import importing_private, require_private

with importing_private("torch", "2.13."):
    from torch import distributed
    from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor
    from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
    from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata

__all__ = ["EnumerableShardingSpec", "Shard", "ShardMetadata", "ShardedTensorMetadata"]

require_private(
    "torch", "2.13.", {
        distributed: ["_remote_device"],
        ShardedTensor: ["_init_from_local_shards_and_global_metadata", "_process_group"],
    },
)  # fmt: skip
if torch.backends.mkldnn.is_available():
    require_private("torch", "2.13.", {torch.ops.mkldnn: ["_linear_pointwise"]})
RemoteDevice = distributed._remote_device


def join_shards(shards: list[Shard], metadata: ShardedTensorMetadata, like: Any) -> ShardedTensor:
    """Makes a sharded tensor of this rank's shards, for the ranks of another one."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        shards, metadata, process_group=like._process_group
    )


def multiply_onednn(inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Returns the result of a linear layer by oneDNN, float32 [B, inputs] -> [B, outputs]."""
    out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(inputs, weight, bias, "none", [], "")
    return out

"""Embedding tables -> TorchRec plan and sharded model."""

from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.planners import HeuristicalStorageReservation
from torchrec.distributed.planner.types import ParameterConstraints
from torchrec.distributed.types import ModuleSharder, ShardingEnv, ShardingPlan, ShardingType

from pipeline.errors import TrainingError

Sharding = Literal["auto", "table_wise", "row_wise"]

KINDS: dict[Sharding, list[str]] = {
    # data_parallel is left out: with an optimizer in the backward pass its replicas drift apart silently on CPU.
    "auto": [ShardingType.TABLE_WISE.value, ShardingType.ROW_WISE.value],
    "table_wise": [ShardingType.TABLE_WISE.value],
    "row_wise": [ShardingType.ROW_WISE.value],
}


class BagSharder(EmbeddingBagCollectionSharder):
    """The stock sharder offers row-wise placement on CUDA only; on CPU it gives the same results."""

    def __init__(self, kinds: list[str]) -> None:
        super().__init__()
        self.kinds = kinds

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Kinds of placement that may be planned."""
        return self.kinds

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Tables are updated in the backward pass, on every device."""
        return ["fused"]


def make_plan(
    model: nn.Module, sharding: Sharding, world_size: int, batch_rows: int, device: torch.device
) -> ShardingPlan:
    """The planner's placement of the model's tables; a function of its arguments, so every rank makes the same.

    Raises:
        TrainingError: If no placement of that kind fits.
    """
    kinds = KINDS[sharding]
    tables = [config.name for config in _collection(model).embedding_bag_configs()]
    planner = EmbeddingShardingPlanner(
        topology=Topology(world_size=world_size, compute_device=device.type, local_world_size=world_size),
        batch_size=max(batch_rows // world_size, 1),
        storage_reservation=HeuristicalStorageReservation(percentage=0.15),
        constraints={name: ParameterConstraints(sharding_types=kinds, compute_kernels=["fused"]) for name in tables},
    )
    try:
        return planner.plan(model, sharders(sharding))
    except Exception as error:  # the planner raises several kinds of its own
        raise TrainingError(
            f"training.sharding '{sharding}'", f"a placement of {len(tables)} tables on {world_size} ranks",
            str(error).split("\n")[0].rstrip("."), "Take fewer ranks, smaller tables, or `auto`.",
        ) from error  # fmt: skip


def sharders(sharding: Sharding) -> list[ModuleSharder[Any]]:
    """Sharders that a plan of this kind needs."""
    return [BagSharder(KINDS[sharding])]  # type: ignore[list-item]


def shard(model: nn.Module, plan: ShardingPlan, sharding: Sharding, device: torch.device) -> DistributedModelParallel:
    """The model with its tables placed as planned and its dense part replicated."""
    return DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(dist.group.WORLD),  # type: ignore[arg-type]
        device=device,
        plan=plan,
        sharders=sharders(sharding),
    )


def describe(plan: ShardingPlan) -> list[dict[str, Any]]:
    """The plan as rows: table, kind of placement, ranks."""
    return [
        {
            "table": name,
            "sharding": parameter.sharding_type,
            "kernel": parameter.compute_kernel,
            "ranks": parameter.ranks,
        }
        for module in plan.plan.values()
        for name, parameter in module.items()  # type: ignore[attr-defined]
    ]


def _collection(model: nn.Module) -> Any:
    return model.get_submodule("embeddings")

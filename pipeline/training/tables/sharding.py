"""Shards a model by a plan of its embedding tables."""

from collections.abc import Iterator
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm import get_local_size, get_topology_group_world_size
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder, ShardedEmbeddingBagCollection
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs_registry
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import (
    CacheParams,
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
)
from torchrec.distributed.types import ShardingPlan as TorchRecPlan

from pipeline.errors import TrainingError
from pipeline.training.config import HOST_SHARDING, Precision, ShardingType, TableMemory
from pipeline.training.tables.plan import ShardingPlan, TableSharding
from pipeline.training.tables.torch_private import EnumerableShardingSpec, RemoteDevice, ShardMetadata
from pipeline.training.tables.torchrec_private import divide_lengths_once, look_up_locally, lookups_of

KERNELS: dict[TableMemory, str] = {"device": "fused", "uvm": "fused_uvm", "uvm_caching": "fused_uvm_caching"}


class BagSharder(EmbeddingBagCollectionSharder):
    """Sharder that offers every sharding type on CPU too. TorchRec's offers row-wise types only on CUDA.

    Args:
        kernel: Compute kernel of all tables except copies.
        codecs: Communication operation -> codec of the data that it sends. None sends it unchanged.
    """

    def __init__(self, kernel: str = "fused", codecs: dict[str, Any] | None = None) -> None:
        super().__init__(qcomm_codecs_registry=codecs)
        self.kernel = kernel

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Returns the sharding types that may be planned."""
        return list(get_args(ShardingType))

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Returns the kernel of a table: dense for copies, which need averaged gradients, else the fused one."""
        return ["dense" if sharding_type == "data_parallel" else self.kernel]


def apply_plan(
    model: nn.Module,
    plan: ShardingPlan,
    device: torch.device,
    vectors: Precision = "fp32",
    gradients: Precision = "fp32",
    group: dist.ProcessGroup | None = None,
) -> DistributedModelParallel:
    """Shards the tables of a model as planned and replicates its dense part.

    Args:
        vectors, gradients: Data types in which ranks exchange pooled vectors and their gradients.
        group: Ranks of the plan. None: all.
    """
    torchrec_plan = to_torchrec(plan, device)
    alone = dist.get_world_size(group) == 1
    _require_whole_hosts(plan, dist.get_world_size(group))
    if group is not None:
        for table in torchrec_plan.plan["embeddings"].values():
            for part in table.sharding_spec.shards:  # a shard is placed by its global rank
                rank = dist.get_global_rank(group, part.placement.rank())
                part.placement = RemoteDevice(f"rank:{rank}/{part.placement.device()}")
    sent = QCommsConfig(CommType[vectors.upper()], CommType[gradients.upper()])
    sharded = DistributedModelParallel(
        module=model,
        env=ShardingEnv.from_process_group(group or dist.group.WORLD),
        device=device,
        plan=torchrec_plan,
        sharders=[BagSharder(codecs=get_qcomm_codecs_registry(sent, device=device))],
        init_data_parallel=not alone,  # a single rank has no gradients to average
    )
    if alone:
        sharded.module.to(device)
    whole = {table.table for table in plan if table.kind not in ("row_wise", "table_row_wise")}
    for module in sharded.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            divide_lengths_once(module, whole)
            if alone and {table.kind for table in plan} == {"table_wise"}:
                look_up_locally(module)
    return sharded


def _require_whole_hosts(plan: ShardingPlan, world_size: int) -> None:
    """Refuses a plan for other hosts. TorchRec would lay out its shards in its own way."""
    for table in plan:
        if table.kind not in HOST_SHARDING:
            continue
        size = get_topology_group_world_size(world_size)
        for column in {piece.column for piece in table.pieces}:
            ranks = [piece.rank for piece in table.pieces if piece.column == column]
            if ranks[0] % size or ranks != list(range(ranks[0], ranks[0] + size)):
                raise TrainingError(
                    f"sharding plan of table '{table.table}'", f"rows divided among all {size} ranks of a host",
                    f"among ranks {', '.join(map(str, ranks))}", "Set training.hosts to the hosts of the ranks.",
                )  # fmt: skip


def iter_lookups(model: nn.Module) -> Iterator[Any]:
    """Yields TorchRec's modules that hold this rank's tables. `model.modules()` lacks them."""
    for module in model.modules():
        if isinstance(module, ShardedEmbeddingBagCollection):
            for lookup in lookups_of(module):
                yield lookup.module if isinstance(lookup, DistributedDataParallel) else lookup


def to_torchrec(plan: ShardingPlan, device: torch.device) -> TorchRecPlan:
    """Converts a plan to TorchRec's."""
    tables = {
        table.table: ParameterSharding(
            sharding_type=table.kind,
            compute_kernel=table.kernel,
            ranks=[piece.rank for piece in table.pieces],
            sharding_spec=None if table.kind == "data_parallel" else _spec(table, device),
            cache_params=None if table.cache_load_factor is None else CacheParams(load_factor=table.cache_load_factor),
        )
        for table in plan
    }
    return TorchRecPlan({"embeddings": EmbeddingModuleShardingPlan(tables)})


def _spec(table: TableSharding, device: torch.device) -> EnumerableShardingSpec:
    def place(rank: int) -> str:
        return f"rank:{rank}/cuda:{rank % get_local_size()}" if device.type == "cuda" else f"rank:{rank}/cpu"

    return EnumerableShardingSpec(
        [
            ShardMetadata(
                shard_offsets=[piece.row, piece.column],
                shard_sizes=[piece.rows, piece.columns],
                placement=place(piece.rank),
            )
            for piece in table.pieces
        ]
    )

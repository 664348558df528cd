"""A model, placed: tables on their ranks with their kernel and optimizer, one initial state whatever the placement."""

import copy

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from models.dlrm import DLRM
from pipeline.training.asynchronous import SharedBags
from pipeline.training.config import TrainConfig
from pipeline.training.optim import fill_tables, fuse_table_optimizer, init_tables
from pipeline.training.tables.bags import NumbaBags, use_table_kernel
from pipeline.training.tables.planner import plan_sharding
from pipeline.training.tables.sharding import ShardingPlan, apply_plan, to_torchrec


def shard_model(
    model: DLRM,
    config: TrainConfig,
    device: torch.device,
    seed: int,
    half_width: float | None,
    placement: ShardingPlan | None = None,
    drawn: bool = True,
) -> tuple[DistributedModelParallel, ShardingPlan]:
    """The model on this rank, ready to train, and where its tables lie; called by all ranks together.

    Args:
        model: Its tables on the device `meta`. It is used up.
        half_width: Initial numbers of tables lie in [-this, this]; None: 1 / sqrt(rows of the table).
        placement: None places without knowing how tables are used.
        drawn: Whether initial numbers of tables are drawn; where only time counts they are all alike, which is sooner.
    """
    # The planner leaves marks on the model that it is given.
    placement = placement or plan_sharding(copy.deepcopy(model), config.for_sharding, device.type)
    for table in model.embeddings.embedding_bag_configs():
        table.init_fn = _left_alone  # TorchRec would draw numbers that are drawn again below
    fuse_table_optimizer(model, config, to_torchrec(placement, device))
    lockstep = config.sync == "synchronous"
    group = None if lockstep else dist.new_subgroups(1)[0]  # each rank has all tables, in memory that all share
    with use_table_kernel(config, device, NumbaBags if lockstep else SharedBags):
        whole = apply_plan(model, placement, device, config.vector_communication, config.gradient_communication, group)
    if config.compile:
        inner = get_unwrapped_module(whole)
        inner.score = torch.compile(inner.score)
    if drawn:
        init_tables(whole, seed, half_width)
    else:
        fill_tables(whole)
    return whole, placement


def _left_alone(weight: torch.Tensor) -> None:
    """An initialisation that does nothing."""

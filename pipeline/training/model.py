"""A model, placed: tables on their ranks with their kernel and optimizer, one initial state whatever the placement."""

import copy

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from models.dlrm import DLRM
from pipeline.training.asynchronous import SharedBags
from pipeline.training.bags import NumbaBags, table_kernel
from pipeline.training.config import TrainConfig
from pipeline.training.optim import fuse_table_optimizer, init_tables
from pipeline.training.planner import place
from pipeline.training.sharding import Placement, shard, sharding_plan


def sharded(
    model: DLRM,
    config: TrainConfig,
    device: torch.device,
    seed: int,
    half_width: float | None,
    placement: Placement | None = None,
) -> tuple[DistributedModelParallel, Placement]:
    """The model on this rank, ready to train, and where its tables lie; called by all ranks together.

    Args:
        model: Its tables on the device `meta`. It is used up.
        half_width: Initial numbers of tables lie in [-this, this]; None: 1 / sqrt(rows of the table).
        placement: None places without knowing how tables are used.
    """
    # The planner leaves marks on the model that it is given.
    placement = placement or place(copy.deepcopy(model), config.for_placement, device.type)
    fuse_table_optimizer(model, config, sharding_plan(placement, device))
    lockstep = config.sync == "synchronous"
    group = None if lockstep else dist.new_subgroups(1)[0]  # each rank has all tables, in memory that all share
    with table_kernel(config, device, NumbaBags if lockstep else SharedBags):
        whole = shard(model, placement, device, config.vector_communication, config.gradient_communication, group)
    if config.compile:
        inner = get_unwrapped_module(whole)
        inner.score = torch.compile(inner.score)
    init_tables(whole, seed, half_width)
    return whole, placement

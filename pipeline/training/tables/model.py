"""Builds the sharded model of a rank. Its initial state does not depend on the sharding plan."""

import copy

import torch
import torch.distributed as dist
from torchrec.distributed.model_parallel import DistributedModelParallel, get_unwrapped_module

from models.dlrm import DLRM
from pipeline.training.asynchronous import SharedBags
from pipeline.training.config import TrainConfig
from pipeline.training.dense import use_cpu_modules
from pipeline.training.optim import fill_tables, fuse_table_optimizer, init_tables
from pipeline.training.tables.bags import NumbaBags, use_table_kernel, uses_fbgemm
from pipeline.training.tables.half import HalfBags
from pipeline.training.tables.plan import ShardingPlan
from pipeline.training.tables.planner import plan_sharding
from pipeline.training.tables.sharding import apply_plan, to_torchrec
from pipeline.training.tables.shared import share_exchange


def shard_model(
    model: DLRM,
    config: TrainConfig,
    device: torch.device,
    seed: int,
    half_width: float | None,
    plan: ShardingPlan | None = None,
    random_tables: bool = True,
) -> tuple[DistributedModelParallel, ShardingPlan]:
    """Shards a model for training on this rank. All ranks call it together.

    Args:
        model: Has its tables on the device `meta`. It must not be used afterwards.
        half_width: Initial values of tables lie in [-this, this]. None: 1 / sqrt(rows of the table).
        plan: Sharding plan. None makes one, without measured use of the tables.
        random_tables: Draws random initial values for tables. False fills them with a constant, which is faster and
            does for measuring time.
    Returns:
        The sharded model and its sharding plan.
    """
    # The planner changes the model that it is given.
    plan = plan or plan_sharding(copy.deepcopy(model), config.for_sharding, device.type)
    for table in model.embeddings.embedding_bag_configs():
        table.init_fn = lambda weight: None  # TorchRec would draw values that are drawn again below
    fuse_table_optimizer(model, config, to_torchrec(plan, device))
    lockstep = config.sync == "synchronous"
    group = None if lockstep else dist.new_subgroups(1)[0]  # each rank has all tables, in shared memory
    half = config.table_precision == "fp16"
    with use_table_kernel(config, device, HalfBags if half else NumbaBags if lockstep else SharedBags):
        whole = apply_plan(model, plan, device, config.vector_communication, config.gradient_communication, group)
    exact = (config.vector_communication, config.gradient_communication) == ("fp32", "fp32")
    if lockstep and dist.get_world_size() > 1 and exact and not half and not uses_fbgemm(config, device.type):
        share_exchange(whole, model.names)
    inner = get_unwrapped_module(whole)
    if config.compile:
        inner.score = torch.compile(inner.score)
    elif device.type == "cpu":
        use_cpu_modules(inner, bf16=config.dense_precision == "bf16")
    if random_tables:
        init_tables(whole, seed, half_width)
    else:
        fill_tables(whole)
    return whole, plan

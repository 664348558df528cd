"""Tables, their use and a machine -> a placement; what cannot be placed is refused with the reason."""

import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Literal

import psutil
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.planner.partitioners import GreedyPerfPartitioner, MemoryBalancedPartitioner
from torchrec.distributed.planner.proposers import (
    DynamicProgrammingProposer,
    EmbeddingOffloadScaleupProposer,
    GreedyProposer,
    GridSearchProposer,
    UniformProposer,
)
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import (
    ParameterConstraints,
    Partitioner,
    PlannerError,
    Proposer,
    ShardingOption,
)
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType

from models.dlrm import DLRM
from pipeline.errors import ConfigError, TrainingError
from pipeline.training.config import COLUMN_SHARDING, ROW_SHARDING, TrainConfig, requested_sharding_type
from pipeline.training.optim import TABLE_OPTIMIZERS
from pipeline.training.tables.bags import require_fbgemm, uses_fbgemm
from pipeline.training.tables.partitioner import LargestDifferencing
from pipeline.training.tables.sharding import KERNELS, BagSharder, ShardingPlan, TableShard, TableSharding
from pipeline.training.tables.statistics import MeasuredCache, TableUse

AUTO_SHARDING_TYPES = ("data_parallel", "table_wise", "row_wise")
"""Kinds that auto chooses from; cuts of columns need another optimizer, on one machine table_row_wise is row_wise."""
GRID_PROPOSALS = 1_000
"""All combinations of kinds are tried where there are no more than these."""
CACHE_SHARE = 0.2
"""Share of the rows on the device that uvm_caching begins with; the planner makes it more where memory is left."""
WHERE = "training.sharding"


def plan_sharding(
    model: DLRM, config: TrainConfig, device: str, uses: Mapping[str, TableUse] | None = None
) -> ShardingPlan:
    """The placement of a model's tables, a function of the arguments and of the machine's memory.

    Args:
        model: Its tables may be on the device `meta`; it is not to be sharded afterwards.
        uses: Measured use by table; None: TorchRec's guesses, one id a bag.
    Raises:
        ConfigError: If the device, the number of ranks or the tables rule out what is asked for.
        TrainingError: If it does not fit.
    """
    tables = model.embeddings.embedding_bag_configs()
    kinds = {table.name: requested_sharding_type(config.sharding, table.name) for table in tables}
    require_trainable(model, config, device, kinds)
    for parameter in model.embeddings.parameters():
        parameter._optimizer_classes = [TABLE_OPTIMIZERS[config.table_optimizer]]  # type: ignore[attr-defined]
    constraints = {
        table.name: _constraints(kinds[table.name], table, config, device, (uses or {}).get(table.name))
        for table in tables
    }
    with _quiet():
        options = _best(model, config, device, constraints)
    return tuple(_written_down(options[table.name]) for table in tables)


def _best(
    model: DLRM, config: TrainConfig, device: str, constraints: dict[str, ParameterConstraints]
) -> dict[str, ShardingOption]:
    topology = _topology(config, device)
    rows = max(config.batch_rows // config.world_size, 1)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=rows,
        enumerator=_Enumerator(topology, rows, constraints),
        storage_reservation=HeuristicalStorageReservation(percentage=0.15),
        constraints=constraints,
        proposer=_proposers(config, device),
        partitioner=_partitioner(config),
        debug=False,
    )
    try:
        planner.plan(model, [BagSharder(KERNELS[config.table_memory])])  # type: ignore[list-item]
    except PlannerError as error:
        raise TrainingError(
            f"{WHERE} {_shown(config)}", f"{len(constraints)} tables that fit on {config.world_size} ranks",
            _reason(planner, model, config, device),
            "Take smaller tables, more memory (training.memory_per_rank_bytes), or `auto`.",
        ) from error  # fmt: skip
    return {option.name: option for option in planner._best_plan or []}


def require_trainable(model: DLRM, config: TrainConfig, device: str, kinds: Mapping[str, str]) -> None:
    """Refuses what cannot train, or would train something else.

    Raises:
        ConfigError: Names the table and the reason.
    """
    for pattern in () if isinstance(config.sharding, str) else [p for rule in config.sharding for p in rule.tables]:
        if not any(fnmatchcase(table, pattern) for table in kinds):
            known = ", ".join(kinds)
            raise ConfigError(f"{WHERE}, rule '{pattern}'", f"a table among {known}", "none", "Correct the pattern.")
    if config.table_memory != "device" and device == "cpu":
        raise ConfigError(
            f"training.table_memory '{config.table_memory}'", "a CUDA device, whose memory it extends", "cpu",
            "Set it to `device`.",
        )  # fmt: skip
    if uses_fbgemm(config, device):
        require_fbgemm(config, device)
    for key in ("vector_communication", "gradient_communication"):
        if getattr(config, key) == "bf16" and device == "cpu":
            raise ConfigError(f"training.{key}", "fp32 or fp16 on CPU, where gloo has no bf16", "bf16", "Take fp16.")
    if config.partitioner == "memory_balanced" and device == "cpu":
        raise ConfigError(
            "training.partitioner 'memory_balanced'", "CUDA devices, whose memory it balances", "cpu",
            "Take `greedy` or `largest_differencing`.",
        )  # fmt: skip
    for table in model.embeddings.embedding_bag_configs():
        kind, where = kinds[table.name], f"{WHERE} '{kinds[table.name]}' of table '{table.name}'"
        if kind in ROW_SHARDING and not _row_for_each(table.num_embeddings, config.world_size):
            raise ConfigError(
                where, f"a row for each of {config.world_size} ranks", f"{table.num_embeddings} rows, cut in parts of "
                f"{-(-table.num_embeddings // config.world_size)}",
                "Take `table_wise` for this table, or fewer ranks.",
            )  # fmt: skip
        if kind == "data_parallel" and (reason := _why_no_copies(config)):
            raise ConfigError(where, *reason, "Take another kind for this table.")
        if kind == "grid_shard" and table.pooling == PoolingType.MEAN:
            raise ConfigError(
                where, "sum pooling", "mean pooling, which TorchRec takes of each part of the rows and adds up",
                "Take `table_row_wise` or `column_wise` for this table.",
            )  # fmt: skip
        if kind in COLUMN_SHARDING and _columns(table.embedding_dim, config.world_size) is None:
            raise ConfigError(
                where, "an embedding_width that can be cut in parts of a multiple of 4 columns, one for each of "
                f"{config.world_size} ranks or fewer", f"{table.embedding_dim}",
                "Change model.embedding_width, or take `table_wise`.",
            )  # fmt: skip


def _row_for_each(rows: int, ranks: int) -> bool:
    """Whether the parts that TorchRec cuts leave no rank without a row, which FBGEMM does not bear on CPU.

    Example:
        >>> _row_for_each(7, 4), _row_for_each(5, 4)
        (True, False)
    """
    return -(-rows // ranks) * (ranks - 1) < rows


def _columns(width: int, ranks: int) -> int | None:
    """Columns of a part: a multiple of 4 that divides the width, one part for each rank or fewer; None: there is none.

    Example:
        >>> [_columns(*case) for case in ((16, 2), (16, 4), (16, 8), (24, 2), (64, 3), (8, 1), (10, 2), (4, 2))]
        [8, 4, 4, 12, 32, 8, None, None]
    """
    if ranks == 1:
        return width
    return next((part for part in range(4, width, 4) if width % part == 0 and part * ranks >= width), None)


def _why_no_copies(config: TrainConfig) -> tuple[str, str] | None:
    """(expected, got) where copies of a table would not train as its other placements do."""
    if config.table_gradient_limit is not None:
        got = f"{config.table_gradient_limit}, which is for the gradients of bags: copies know their sums alone"
        return "no table_gradient_limit", got
    if config.table_precision != "fp32":
        got = f"{config.table_precision}, in which copies would keep their optimizer's state as well"
        return "table_precision fp32", got
    return None


def _constraints(
    kind: str, table: EmbeddingBagConfig, config: TrainConfig, device: str, use: TableUse | None
) -> ParameterConstraints:
    cached = config.table_memory == "uvm_caching"
    alone = config.world_size == 1  # then a cut only adds work: on the demo's tables a step took twice as long
    choice = [
        kind for kind in AUTO_SHARDING_TYPES
        if kind not in ROW_SHARDING or (not alone and _row_for_each(table.num_embeddings, config.world_size))
    ]  # fmt: skip
    if device == "cpu" or _why_no_copies(config):  # on CPU they are an order of magnitude slower
        choice.remove("data_parallel")
    width = table.embedding_dim
    stats = None if use is None else MeasuredCache(use)
    constraints = ParameterConstraints(
        sharding_types=choice if kind == "auto" else [kind],
        min_partition=_columns(width, config.world_size) if kind in COLUMN_SHARDING else None,
        cache_params=CacheParams(load_factor=CACHE_SHARE, stats=stats) if cached else None,
    )
    if use is not None:
        constraints.pooling_factors = list(use.ids_per_bag)
        constraints.num_poolings = list(use.filled_share)
        constraints.batch_sizes = [max(config.batch_rows // config.world_size, 1)] * len(use.ids_per_bag)
    return constraints


def _topology(config: TrainConfig, device: str) -> Topology:
    share = psutil.virtual_memory().total // config.world_size
    host, memory = share, None
    if device == "cuda":
        memory = config.memory_per_rank_bytes or torch.cuda.get_device_properties(0).total_memory
    else:
        host = config.memory_per_rank_bytes or share
    return Topology(
        world_size=config.world_size, local_world_size=config.world_size, compute_device=device,
        hbm_cap=memory, ddr_cap=host,
    )  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Keeps out of the log what TorchRec tells its own authors, and errors that are told better here."""
    loggers = [logging.getLogger(name) for name in (None, "torchrec", "MethodLogger-NullHandler")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _proposers(config: TrainConfig, device: str) -> list[Proposer]:
    proposers = [
        GridSearchProposer(GRID_PROPOSALS),
        GreedyProposer(),
        GreedyProposer(use_depth=False),
        UniformProposer(),
    ]
    if device == "cuda":  # it weighs device memory, of which a CPU has none
        proposers.append(DynamicProgrammingProposer())
    if config.table_memory == "uvm_caching":
        proposers.append(EmbeddingOffloadScaleupProposer())
    return proposers


def _partitioner(config: TrainConfig) -> Partitioner:
    if config.partitioner == "largest_differencing":
        return LargestDifferencing()
    return MemoryBalancedPartitioner() if config.partitioner == "memory_balanced" else GreedyPerfPartitioner()


class _Enumerator(EmbeddingEnumerator):
    """Lists kinds in a fixed order: the stock one takes that of a set of strings, which differs between processes."""

    def _filter_sharding_types(self, name: str, allowed_sharding_types: list[str], sharder_key: str = "") -> list[str]:
        kinds = self._constraints[name].sharding_types or []
        return [kind for kind in kinds if kind in allowed_sharding_types]


def _written_down(option: ShardingOption) -> TableSharding:
    rows, width = option.tensor.shape
    cache = option.cache_params.load_factor if option.cache_params is not None else None
    return TableSharding(
        table=option.name, rows=rows, width=width, kind=option.sharding_type, kernel=option.compute_kernel,
        cache_load_factor=cache if option.compute_kernel == "fused_uvm_caching" else None,
        pieces=tuple(
            TableShard(
                rank=shard.rank, row=shard.offset[0], column=shard.offset[1], rows=shard.size[0],
                columns=shard.size[1], bytes=shard.storage.hbm + shard.storage.ddr, milliseconds=shard.perf.total,
            )
            for shard in option.shards
        ),
    )  # fmt: skip


def _shown(config: TrainConfig) -> str:
    return f"'{config.sharding}'" if isinstance(config.sharding, str) else "with rules"


def _reason(planner: EmbeddingShardingPlanner, model: DLRM, config: TrainConfig, device: str) -> str:
    """The least that the tables need, against what is left for them."""
    kind: Literal["hbm", "ddr"] = "hbm" if device == "cuda" else "ddr"
    space = planner._enumerator.enumerate(model, [BagSharder(KERNELS[config.table_memory])])
    least: dict[str, int] = {}
    for option in space:
        need = getattr(option.total_storage, kind)
        least[option.name] = min(need, least.get(option.name, need))
    left = planner._storage_reservation.last_reserved_topology
    there = f", {getattr(left.devices[0].storage, kind) / 1e9:,.3g} GB a rank are left for them" if left else ""
    return f"{sum(least.values()) / 1e9:,.3g} GB of tables with optimizer and buffers{there}"


def busiest(values: Sequence[float]) -> float:
    """The largest share, as a multiple of the mean; 1 is perfect balance.

    Example:
        >>> busiest([2.0, 4.0])
        1.3333333333333333
    """
    mean = sum(values) / len(values)
    return max(values) / mean if mean else 1.0

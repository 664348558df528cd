"""Plans the sharding of tables from their use and the machine, and refuses settings that cannot work."""

import logging
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Literal

import psutil
import torch
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.planner.constants import CROSS_NODE_BANDWIDTH
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
from pipeline.training.config import (
    COLUMN_SHARDING,
    HOST_SHARDING,
    ROW_SHARDING,
    TrainConfig,
    requested_sharding_type,
)
from pipeline.training.optim import TABLE_OPTIMIZERS
from pipeline.training.support import INEXACT_REASON
from pipeline.training.tables.bags import require_fbgemm, uses_fbgemm
from pipeline.training.tables.partitioner import LargestDifferencing
from pipeline.training.tables.plan import ShardingPlan, TableShard, TableSharding
from pipeline.training.tables.sharding import KERNELS, BagSharder
from pipeline.training.tables.statistics import MeasuredCache, TableUse
from pipeline.training.tables.torchrec_private import mark_optimizer, options_of

AUTO_SHARDING_TYPES = ("data_parallel", "table_wise", "row_wise", "table_row_wise")
"""Types that auto chooses from. Column sharding needs another optimizer. On one host, table_row_wise is row_wise; with
one rank on each, it is table_wise."""
GRID_PROPOSALS = 1_000
"""Tries all combinations of sharding types if there are at most this many."""
CACHE_SHARE = 0.2
"""Initial share of the rows that uvm_caching keeps on the device. The planner raises it if memory is left."""
WHERE = "training.sharding"


def plan_sharding(
    model: DLRM, config: TrainConfig, device: str, uses: Mapping[str, TableUse] | None = None
) -> ShardingPlan:
    """Plans the sharding of a model's tables. The plan depends only on the arguments and the machine's memory.

    Args:
        model: Its tables may be on the device `meta`. It must not be sharded afterwards.
        uses: Table -> measured use. None: TorchRec's default of one id per bag.
    Raises:
        ConfigError: If the device, the number of ranks or the tables rule out the configured sharding.
        TrainingError: If the tables do not fit into memory.
    """
    tables = model.embeddings.embedding_bag_configs()
    kinds = {table.name: requested_sharding_type(config.sharding, table.name) for table in tables}
    require_trainable(model, config, device, kinds)
    for parameter in model.embeddings.parameters():
        mark_optimizer(parameter, TABLE_OPTIMIZERS[config.table_optimizer])
    constraints = {
        table.name: _constraints(kinds[table.name], table, config, device, (uses or {}).get(table.name))
        for table in tables
    }
    with _quiet():
        options = _find_best(model, config, device, constraints)
    return tuple(_to_table_sharding(options[table.name]) for table in tables)


def _find_best(
    model: DLRM, config: TrainConfig, device: str, constraints: dict[str, ParameterConstraints]
) -> dict[str, ShardingOption]:
    topology = _topology(config, device)
    rows = max(config.batch_rows // config.world_size, 1)
    enumerator, reservation = _Enumerator(topology, rows, constraints), HeuristicalStorageReservation(percentage=0.15)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=rows,
        enumerator=enumerator,
        storage_reservation=reservation,
        constraints=constraints,
        proposer=_proposers(config, device),
        partitioner=_partitioner(config),
        debug=False,
    )
    try:
        planner.plan(model, [BagSharder(KERNELS[config.table_memory])])
    except PlannerError as error:
        raise TrainingError(
            f"{WHERE} {_describe_setting(config)}", f"{len(constraints)} tables that fit on {config.world_size} ranks",
            _reason(enumerator, reservation, model, config, device),
            "Use smaller tables, more memory (training.memory_per_rank_bytes), or `auto`.",
        ) from error  # fmt: skip
    return {option.name: option for option in options_of(planner)}


def require_trainable(model: DLRM, config: TrainConfig, device: str, kinds: Mapping[str, str]) -> None:
    """Refuses shardings that cannot train, or would train differently.

    Raises:
        ConfigError: Names the table and the reason.
    """
    for pattern in () if isinstance(config.sharding, str) else [p for rule in config.sharding for p in rule.tables]:
        if not any(fnmatchcase(table, pattern) for table in kinds):
            known = ", ".join(kinds)
            raise ConfigError(
                f"{WHERE}, rule '{pattern}'",
                f"a pattern that matches one of the tables {known}",
                "no match",
                "Correct the pattern.",
            )
    if config.table_memory != "device" and device == "cpu":
        raise ConfigError(
            f"training.table_memory '{config.table_memory}'", "a CUDA device", "cpu",
            "Set it to `device`.",
        )  # fmt: skip
    if uses_fbgemm(config, device):
        require_fbgemm(config, device)
    for key in ("vector_communication", "gradient_communication"):
        if getattr(config, key) == "bf16" and device == "cpu":
            raise ConfigError(
                f"training.{key}", "fp32 or fp16 on CPU, since gloo does not support bf16", "bf16", "Set it to fp16."
            )
    if config.partitioner == "memory_balanced" and device == "cpu":
        raise ConfigError(
            "training.partitioner 'memory_balanced'", "CUDA devices", "cpu",
            "Set it to `greedy` or `largest_differencing`.",
        )  # fmt: skip
    for table in model.embeddings.embedding_bag_configs():
        kind, where = kinds[table.name], f"{WHERE} '{kinds[table.name]}' of table '{table.name}'"
        ranks = _row_ranks(kind, config)
        if kind in ROW_SHARDING and not _row_for_each(table.num_embeddings, ranks):
            raise ConfigError(
                where, f"at least one row on each of {ranks} ranks",
                f"{table.num_embeddings} rows in shards of {-(-table.num_embeddings // ranks)}",
                "Set `table_wise` for this table, or use fewer ranks.",
            )  # fmt: skip
        if kind == "data_parallel" and (reason := _why_no_copies(config)):
            raise ConfigError(where, *reason, "Choose another sharding type for this table.")
        if kind == "grid_shard" and table.pooling == PoolingType.MEAN:
            raise ConfigError(
                where, "sum pooling", "mean pooling, which TorchRec would compute per shard and then sum",
                "Set `table_row_wise` or `column_wise` for this table.",
            )  # fmt: skip
        most = _column_shards(kind, config)
        if kind in COLUMN_SHARDING and _columns(table.embedding_dim, most) is None:
            raise ConfigError(
                where, f"an embedding_width that splits into at most {most} equal shards of a multiple of "
                "4 columns", f"{table.embedding_dim}",
                "Change model.embedding_width, or set `table_wise`.",
            )  # fmt: skip


def _row_ranks(kind: str, config: TrainConfig) -> int:
    """Returns the ranks that the rows of a table are divided among."""
    return config.ranks_per_host if kind in HOST_SHARDING else config.world_size


def _column_shards(kind: str, config: TrainConfig) -> int:
    """Returns the most shards that the columns of a table are cut into: one per rank, or per host of a grid."""
    if kind == "grid_shard" and config.hosts > 1:
        return config.hosts
    return config.ranks_per_host if kind == "table_column_wise" else config.world_size


def _row_for_each(rows: int, ranks: int) -> bool:
    """Whether TorchRec's row shards give every rank a row. FBGEMM fails on CPU otherwise.

    Example:
        >>> _row_for_each(7, 4), _row_for_each(5, 4)
        (True, False)
    """
    return -(-rows // ranks) * (ranks - 1) < rows


def _columns(width: int, most: int) -> int | None:
    """Returns the columns of a shard: a multiple of 4 that divides the width into at most so many shards, or None.

    Example:
        >>> [_columns(*case) for case in ((16, 2), (16, 4), (16, 8), (24, 2), (64, 3), (8, 1), (10, 2), (4, 2))]
        [8, 4, 4, 12, 32, 8, None, None]
    """
    if most == 1:
        return width
    return next((part for part in range(4, width, 4) if width % part == 0 and part * most >= width), None)


def _why_no_copies(config: TrainConfig) -> tuple[str, str] | None:
    """Returns (expected, got) if copies of a table would not train like its other shardings, else None."""
    if config.table_gradient_limit is not None:
        got = f"{config.table_gradient_limit}, which clips gradients of bags, while copies only know their sums"
        return "no table_gradient_limit", got
    if config.table_precision != "fp32":
        got = f"{config.table_precision}, in which copies would also keep their optimizer state"
        return "table_precision fp32", got
    return None


def _is_worth_cutting(rows: int, kind: str, config: TrainConfig) -> bool:
    """Whether auto may divide a table's rows in this way."""
    ranks = _row_ranks(kind, config)
    if ranks == 1:  # it then only adds work: on the demo's tables a step took twice as long
        return False
    return _row_for_each(rows, ranks) and (config.hosts > 1 or kind not in HOST_SHARDING)


def _constraints(
    kind: str, table: EmbeddingBagConfig, config: TrainConfig, device: str, use: TableUse | None
) -> ParameterConstraints:
    cached = config.table_memory == "uvm_caching"
    choice = [
        auto for auto in AUTO_SHARDING_TYPES
        if auto not in ROW_SHARDING or _is_worth_cutting(table.num_embeddings, auto, config)
    ]  # fmt: skip
    if device == "cpu" or _why_no_copies(config):  # on CPU copies are ten times slower
        choice.remove("data_parallel")
    if config.lanes is not None:
        choice = [kind for kind in choice if kind not in INEXACT_REASON]
    width = table.embedding_dim
    stats = None if use is None else MeasuredCache(use)
    constraints = ParameterConstraints(
        sharding_types=choice if kind == "auto" else [kind],
        min_partition=_columns(width, _column_shards(kind, config)) if kind in COLUMN_SHARDING else None,
        cache_params=CacheParams(load_factor=CACHE_SHARE, stats=stats) if cached else None,
    )
    if use is not None:
        constraints.pooling_factors = list(use.ids_per_bag)
        constraints.num_poolings = list(use.filled_share)
        constraints.batch_sizes = [max(config.batch_rows // config.world_size, 1)] * len(use.ids_per_bag)
    return constraints


def _topology(config: TrainConfig, device: str) -> Topology:
    share = psutil.virtual_memory().total // config.ranks_per_host
    host, memory = share, None
    if device == "cuda":
        memory = config.memory_per_rank_bytes or _device_memory()
    else:
        host = config.memory_per_rank_bytes or share
    network = CROSS_NODE_BANDWIDTH
    if config.hosts > 1 and config.network_bytes_per_second is not None:
        network = config.network_bytes_per_second / config.ranks_per_host / 1e3  # bytes of a rank in a millisecond
    return Topology(
        world_size=config.world_size, local_world_size=config.ranks_per_host, compute_device=device,
        hbm_cap=memory, ddr_cap=host, inter_host_bw=network,
    )  # fmt: skip


def _device_memory() -> int:
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    raise ConfigError(
        "training.memory_per_rank_bytes", "the memory of a rank's device", "None, and no CUDA device here to look at",
        "Set it.",
    )  # fmt: skip


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences TorchRec's internal log lines and its errors, which are raised in other words here."""
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
    if device == "cuda":  # it optimizes the use of device memory
        proposers.append(DynamicProgrammingProposer())
    if config.table_memory == "uvm_caching":
        proposers.append(EmbeddingOffloadScaleupProposer())
    return proposers


def _partitioner(config: TrainConfig) -> Partitioner:
    if config.partitioner == "largest_differencing":
        return LargestDifferencing()
    return MemoryBalancedPartitioner() if config.partitioner == "memory_balanced" else GreedyPerfPartitioner()


class _Enumerator(EmbeddingEnumerator):
    """Lists sharding types in a fixed order. TorchRec's has the order of a set, which differs between processes."""

    def _filter_sharding_types(self, name: str, allowed_sharding_types: list[str], sharder_key: str = "") -> list[str]:
        kinds = self._constraints[name].sharding_types or []
        return [kind for kind in kinds if kind in allowed_sharding_types]


def _to_table_sharding(option: ShardingOption) -> TableSharding:
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


def _describe_setting(config: TrainConfig) -> str:
    return f"'{config.sharding}'" if isinstance(config.sharding, str) else "with rules"


def _reason(
    enumerator: EmbeddingEnumerator,
    reservation: HeuristicalStorageReservation,
    model: DLRM,
    config: TrainConfig,
    device: str,
) -> str:
    """Compares the least memory that the tables need with what is left for them."""
    kind: Literal["hbm", "ddr"] = "hbm" if device == "cuda" else "ddr"
    space = enumerator.enumerate(model, [BagSharder(KERNELS[config.table_memory])])
    least: dict[str, int] = {}
    for option in space:
        need = getattr(option.total_storage, kind)
        least[option.name] = min(need, least.get(option.name, need))
    left = reservation.last_reserved_topology
    there = f", with {getattr(left.devices[0].storage, kind) / 1e9:,.3g} GB per rank left for them" if left else ""
    return f"{sum(least.values()) / 1e9:,.3g} GB of tables with optimizer and buffers{there}"

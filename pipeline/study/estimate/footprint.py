"""The footprint of a model: what is known of it and its rows before training, and what its ranks would hold."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError
from torchrec.modules.embedding_configs import DataType

from models.config import SparseFeature
from models.dlrm import DLRM
from models.tables import module_name
from pipeline.config.files import read_yaml
from pipeline.errors import ConfigError
from pipeline.jobs.console import step
from pipeline.jobs.training.job import prepare_rows
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.worker import Worker
from pipeline.study.estimate.memory import (
    DescribedMachine,
    ModelShape,
    RankMachine,
    RankMemory,
    TablePart,
    derive_shape,
    estimate_memory,
    has_room,
)
from pipeline.study.measure.cost import TableLoad, count_load
from pipeline.study.measure.results import Load
from pipeline.study.points import workload
from pipeline.study.points.config import Workload
from pipeline.training.config import TrainConfig
from pipeline.training.tables.plan import ShardingPlan
from pipeline.training.tables.planner import plan_sharding
from pipeline.training.tables.statistics import SAMPLE_ROWS, TableUse, measure_table_use
from pipeline.transforms.column import Column

SAMPLED_BATCHES = 4
"""Batches of a workload that the use of its tables is measured on."""
WORKER_SECONDS = 2.0
"""How long the speed of one worker is measured."""


@dataclass(frozen=True)
class ModelFootprint:
    """A model, and statistics of its training rows."""

    dense: int
    bags: Sequence[SparseFeature]
    uses: Mapping[str, TableUse]
    rows: int | None
    """Training rows of the table. None: a workload in place of a table."""
    snapshot_id: int | None
    worker_rows_per_second: float | None
    """Of one preprocessing worker."""
    shape: ModelShape


@step("measure the data")
def measure_footprint(workspace: Workspace, shape: Workload | None, snapshot_id: int | None) -> ModelFootprint:
    """Measures the use of the tables on the first training rows or on drawn batches. Safe to repeat: it only reads.

    Raises:
        TableError: If there is neither a table nor a workload.
    """
    config = workspace.config
    if shape is not None:
        plan = workload.make_plan(shape)
        bags = plan.sparse
        batches = workload.draw_batches(shape, config.training.batch_rows, SAMPLED_BATCHES, config.seed)
        columns = [_column([batch.sparse[bag.name] for batch in batches]) for bag in bags]
        uses = measure_table_use(bags, columns, config.training.batch_rows)
        whole = derive_shape(config.model, len(plan.dense), bags)
        return ModelFootprint(len(plan.dense), bags, uses, None, None, None, whole)
    snapshot, data, rows = prepare_rows(workspace, snapshot_id)
    plan = data.plan
    uses = measure_table_use(plan.sparse, Worker(data).sample(SAMPLE_ROWS), config.training.batch_rows)
    return ModelFootprint(
        len(plan.dense), plan.sparse, uses, rows, snapshot.snapshot_id, measure_worker_speed(workspace, data),
        derive_shape(config.model, len(plan.dense), plan.sparse),
    )  # fmt: skip


def _column(parts: Sequence[Any]) -> Column:
    values = np.concatenate([part.values().numpy() for part in parts])
    lengths = np.concatenate([part.lengths().numpy() for part in parts])
    return Column(values.astype(np.int64), np.concatenate([[0], np.cumsum(lengths)]))


def measure_worker_speed(workspace: Workspace, data: DataSpec) -> float:
    """Returns rows per second of one preprocessing worker, measured on the first shuffle blocks of an epoch."""
    config = workspace.config
    window = min(config.preprocessing.shuffle_window_rows, config.preprocessing.split_rows)
    whole = config.preprocessing.model_copy(update={"on_corrupt": "fail"})  # nobody would hear of lost rows
    source = InlineSource({"train": data}, whole)
    reader = Client(source, ("train", data), config.training.batch_rows, config.seed, window)
    began, rows, seconds = time.perf_counter(), 0, 0.0
    for batch in reader.batches():
        rows += batch.global_rows
        seconds += batch.times.extract + batch.times.transform
        if time.perf_counter() - began > WORKER_SECONDS:
            break
    return rows / seconds


def load_machine(path: str) -> DescribedMachine:
    """Loads the machine that a YAML file describes.

    Raises:
        ConfigError: If the file is wrong. Names the key.
    """
    try:
        return DescribedMachine.model_validate(read_yaml(Path(path)))
    except ValidationError as error:
        first = error.errors()[0]
        key, reason = ".".join(map(str, first["loc"])), first["msg"].removeprefix("Input should be ")
        raise ConfigError(f"machine '{path}', key '{key}'", reason, f"{first['input']!r:.60}", "Correct it.") from None


@dataclass(frozen=True)
class PlacedModel:
    """The model on a number of ranks of a machine."""

    load: Load
    memory: list[RankMemory]
    """Of each rank."""
    fits: bool


def place_on_ranks(
    workspace: Workspace, footprint: ModelFootprint, world_size: int, room: RankMachine, process_bytes: int
) -> PlacedModel:
    """Shards the tables, and estimates the memory of each rank.

    Raises:
        ContractError: If the tables cannot be sharded on this number of ranks.
    """
    training = set_world_size(workspace.config.training, world_size)
    memory = room.memory_bytes if not room.shared else room.memory_bytes // world_size
    planned = training.model_copy(update={"memory_per_rank_bytes": memory}).for_sharding
    kind = DataType.FP16 if training.table_precision == "fp16" else DataType.FP32
    model = DLRM(workspace.config.model, footprint.dense, footprint.bags, "meta", kind)
    placement = plan_sharding(model, planned, "cpu" if room.shared else "cuda", footprint.uses)
    load = count_step_load(workspace, footprint, training, placement)
    parts: list[list[TablePart]] = [[] for _ in range(world_size)]
    for table in placement:
        for piece in table.pieces:
            copied = table.kind == "data_parallel"
            parts[piece.rank].append(TablePart(rows=piece.rows, columns=piece.columns, copied=copied))
    rows, threads = -(-training.batch_rows // world_size), max(room.most_ranks // world_size, 1)
    batch, threads = (rows, load.sample_bytes), training.threads_per_rank or threads
    ranks = [estimate_memory(footprint.shape, training, own, *batch, process_bytes, threads) for own in parts]
    return PlacedModel(load, ranks, has_room(ranks, room, estimate_service_bytes(workspace, load)))


def estimate_single_rank(
    workspace: Workspace, footprint: ModelFootprint, process_bytes: int
) -> tuple[RankMemory, Load]:
    """Estimates memory and load of the model on a single rank, even if it does not fit."""
    training = set_world_size(workspace.config.training, 1)
    load = count_step_load(workspace, footprint, training, ())
    batch = (training.batch_rows, load.sample_bytes)
    return estimate_memory(footprint.shape, training, footprint.shape.parts, *batch, process_bytes), load


def set_world_size(training: TrainConfig, world_size: int) -> TrainConfig:
    """Returns the training with another number of ranks, all on one host.

    Raises:
        ConfigError: If the other settings do not allow it.
    """
    changes = {"world_size": world_size, "hosts": 1, "least_ranks": None}
    try:
        return TrainConfig.model_validate(training.model_dump() | changes)
    except ValidationError as error:
        raise ConfigError("training.world_size", error.errors()[0]["msg"], f"{world_size}", "Change it.") from None


def count_step_load(
    workspace: Workspace, footprint: ModelFootprint, training: TrainConfig, placement: ShardingPlan
) -> Load:
    """Counts the work of a step."""
    kinds = {table.table: table.kind for table in placement}
    members: dict[str, list[SparseFeature]] = {}
    for bag in footprint.bags:
        members.setdefault(bag.table, []).append(bag)
    uses = []
    for table, bags in members.items():
        use = footprint.uses[table]
        lookups = sum(ids * filled for ids, filled in zip(use.ids_per_bag, use.filled_share, strict=True))
        kind = kinds.get(module_name(table), "table_wise")
        uses.append(TableLoad(bags[0].rows, lookups, use.distinct_rows, len(bags), kind))
    return count_load(workspace.config.model, footprint.dense, uses, training)


def estimate_service_bytes(workspace: Workspace, load: Load) -> int:
    """Estimates the bytes of rows and batches between storage and ranks: two shuffle blocks, at most the limit."""
    preprocessing = workspace.config.preprocessing
    ahead = 2 * max(preprocessing.shuffle_window_rows, preprocessing.most_workers * preprocessing.split_rows)
    return min(preprocessing.memory, round(2 * ahead * load.sample_bytes))

"""The sharded model of a rank, and the batches that it reads."""

import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol, Self, TypeVar

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.modules.embedding_configs import DataType

from models.config import DLRMConfig
from models.dlrm import DLRM
from pipeline.data.batch import Batch
from pipeline.jobs.training.rank.group import takes_cuda
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.client import BatchSource, Client
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.worker import Worker
from pipeline.training.config import TrainConfig
from pipeline.training.tables.model import shard_model
from pipeline.training.tables.plan import ShardingPlan, describe_plan
from pipeline.training.tables.planner import plan_sharding
from pipeline.training.tables.statistics import SAMPLE_ROWS, TableUse, measure_table_use
from pipeline.transforms.plan.plan import Plan


class ModelSpec(Protocol):
    """What building a model and reading its batches needs."""

    @property
    def model(self) -> DLRMConfig: ...

    @property
    def training(self) -> TrainConfig: ...

    @property
    def preprocessing(self) -> PreprocessingConfig: ...

    @property
    def plan(self) -> Plan: ...

    @property
    def placement(self) -> ShardingPlan | None: ...

    @property
    def seed(self) -> int: ...

    def model_copy(self, *, update: Mapping[str, Any] | None = None) -> Self: ...


Described = TypeVar("Described", bound=ModelSpec)


def build_model(
    spec: ModelSpec, world_size: int, device: torch.device, drawn: bool = True
) -> tuple[DistributedModelParallel, list[dict[str, Any]]]:
    """Builds the sharded model. Returns it with its sharding plan as rows.

    The initial state is the same for every sharding plan and world size.

    Args:
        drawn: See `shard_model`.
    """
    torch.manual_seed(spec.seed)
    training = spec.training.model_copy(update={"world_size": world_size})
    model, placement = shard_model(
        build_unsharded(spec), training, device, spec.seed, spec.model.embedding_init, spec.placement, drawn
    )
    kind = {} if training.sync == "synchronous" else {"sharding": "shared"}
    return model, [row | kind for row in describe_plan(placement)]


def build_unsharded(spec: ModelSpec) -> DLRM:
    """Builds the model on the meta device: its tables take no memory."""
    kind = DataType.FP16 if spec.training.table_precision == "fp16" else DataType.FP32
    return DLRM(spec.model, len(spec.plan.dense), spec.plan.sparse, "meta", kind)


def add_sharding_plan(spec: Described, uses: Mapping[str, TableUse]) -> Described:
    """Returns the spec with the sharding plan of its tables. It is made before the ranks start: all use the same.

    Raises:
        ContractError: If the tables cannot be sharded as the config says.
    """
    device = "cuda" if takes_cuda(spec.training) else "cpu"
    return spec.model_copy(
        update={"placement": plan_sharding(build_unsharded(spec), spec.training.for_sharding, device, uses)}
    )


def measure_uses(spec: RankSpec) -> dict[str, TableUse]:
    """Measures the use of the tables on the first training rows of the snapshot. Always the same sample."""
    rows = Worker(spec.train).sample(SAMPLE_ROWS)
    return measure_table_use(spec.train.plan.sparse, rows, spec.training.batch_rows)


def keep_batches(reader: Client, kept: bool) -> Callable[[], Iterator[Batch]]:
    """Returns a function that iterates over the reader's batches.

    Args:
        kept: Reads the batches once and keeps them in memory.
    """
    if not kept:
        return reader.batches
    batches: list[Batch] = []

    def iterate() -> Iterator[Batch]:
        if not batches:
            batches.extend(reader.batches())
        return iter(batches)

    return iterate


def open_client(spec: ModelSpec, source: BatchSource, name: str, data: DataSpec, rank: int, shuffled: bool) -> Client:
    """Returns this rank's client for a selection of rows."""
    window = spec.preprocessing.shuffle_window_rows if shuffled else None
    return Client(
        source, (name, data), spec.training.batch_rows, spec.seed, window, rank, spec.training.world_size,
        attempt=int(os.environ.get("DLRM_ATTEMPT", "0")),
    )  # fmt: skip

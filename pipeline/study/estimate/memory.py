"""Estimates from shapes and a speed: memory of a rank, checkpoint size, ranks, workers and time."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import BaseModel, PositiveFloat, PositiveInt, model_validator

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.errors import ConfigError
from pipeline.study.measure.cost import BYTES, MOMENTS, count_row_bytes

FLOAT = 4
"""Bytes per number."""
RECORD_BYTES = 1_840
"""Bytes of a tensor in a checkpoint besides its numbers: the record's header and the metadata entry."""
TRANSIENT = 1.3
"""Factor on the kept activations for temporary ones. Measured."""
STEP_BYTES = 25 << 20
"""Memory that libraries allocate in the first step of any model. Measured."""
SCRATCH_BYTES = 16 << 20
"""Memory per thread of the CPU kernel for row gradients. Less for smaller tables."""
BATCHES_HELD = 3
"""Batches that a rank holds: the current one, its copy in TorchRec's order, and the next one."""


class ModelShape(BaseModel, frozen=True):
    """Sizes of a model."""

    tables: Mapping[str, tuple[int, int]]
    """Table -> rows, width."""
    weights: Mapping[str, tuple[int, ...]]
    """Name -> shape of the dense weights."""
    row_numbers: int
    """Numbers per row that the forward pass keeps for the backward pass."""

    @property
    def dense_parameters(self) -> int:
        """Number of dense parameters."""
        return sum(math.prod(shape) for shape in self.weights.values())


def derive_shape(config: DLRMConfig, num_dense: int, bags: Sequence[SparseFeature]) -> ModelShape:
    """Derives the sizes of a model on the meta device, without allocating it.

    Example:
        >>> features = [SparseFeature("a", "t", 9, "sum"), SparseFeature("b", "t", 9, "sum")]
        >>> derive_shape(DLRMConfig(embedding_width=4, top_mlp=()), 0, features)
        ModelShape(tables={'t': (9, 4)}, weights={'logit.weight': (1, 5), 'logit.bias': (1,)}, row_numbers=34)
    """
    with torch.device("meta"):
        model = DLRM(config, num_dense, bags, "meta")
    tables = {
        table.name: (table.num_embeddings, table.embedding_dim) for table in model.embeddings.embedding_bag_configs()
    }
    weights = {
        name: tuple(value.shape) for name, value in model.named_parameters() if not name.startswith("embeddings.")
    }
    features, width = len(bags) + (1 if num_dense else 0), config.embedding_width
    vectors, out = features * width, model.interaction.width_out
    kept = num_dense + 2 * vectors + 2 * out + sum(config.top_mlp)
    kept += sum(config.bottom_mlp) + width if num_dense else 0
    if config.interaction == "dot":
        kept += 2 * features * features  # all products and their gradients
    elif config.interaction == "dcn":
        kept += 5 * config.cross_layers * vectors
    return ModelShape(tables=tables, weights=weights, row_numbers=kept)


class MemorySetup(BaseModel, frozen=True):
    """Settings that determine what training keeps besides the weights."""

    table_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd", "adam"] = "rowwise_adagrad"
    table_precision: Literal["fp32", "fp16"] = "fp32"
    dense_optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    average: bool = False
    """Whether training keeps a running mean of the weights."""
    background: bool = True
    """Whether checkpoints are written from a copy while training continues."""


class TablePart(BaseModel, frozen=True):
    """Part of a table on a rank."""

    rows: int
    columns: int
    copied: bool = False
    """Whether all ranks hold the same part. It then has a gradient and is written once."""

    @property
    def numbers(self) -> int:
        """Number of weights."""
        return self.rows * self.columns


class RankMemory(BaseModel, frozen=True):
    """Memory of a rank in bytes, by use."""

    process: int
    """Python and its libraries."""
    tables: int
    """Table weights and optimizer state."""
    dense: int
    """Dense weights, gradients and optimizer state."""
    average: int
    activations: int
    batches: int
    kernel: int
    """Row lists and row gradients of the CPU kernel, and gradients of copied tables."""
    checkpoint: int
    """Copy for the asynchronous checkpoint."""

    @property
    def state(self) -> int:
        """Memory that grows with the model."""
        return self.tables + self.dense + self.average + self.kernel + self.checkpoint

    @property
    def total(self) -> int:
        """Total memory."""
        return self.process + self.state + self.activations + self.batches


def count_table_bytes(part: TablePart, kept: MemorySetup) -> int:
    """Counts the bytes of a table part and its optimizer state.

    Example:
        >>> part = TablePart(rows=10, columns=4)
        >>> count_table_bytes(part, MemorySetup()), count_table_bytes(part, MemorySetup(table_optimizer="adam"))
        (200, 480)
    """
    return part.rows * sum(count_row_bytes(part.columns, kept.table_precision, kept.table_optimizer))


def estimate_memory(
    shape: ModelShape,
    kept: MemorySetup,
    parts: Sequence[TablePart],
    rows: int,
    sample_bytes: float,
    process_bytes: int,
    threads: int = 1,
) -> RankMemory:
    """Estimates the memory of a rank on a CPU.

    Args:
        parts: Table parts on this rank.
        rows: Rows of its share of a batch.
        sample_bytes: Bytes of a row as it reaches the model.
        process_bytes: Measured memory of a rank before it has a model.
        threads: Threads of the rank.
    """
    weights = FLOAT * shape.dense_parameters
    tables = sum(count_table_bytes(part, kept) for part in parts)
    moments = MOMENTS[kept.dense_optimizer] * weights
    average = weights + sum(_weight_bytes(part, kept) for part in parts) if kept.average else 0
    return RankMemory(
        process=process_bytes,
        tables=tables,
        dense=2 * weights + moments,
        average=average,
        activations=STEP_BYTES + round(TRANSIENT * FLOAT * rows * shape.row_numbers),
        batches=round(BATCHES_HELD * rows * sample_bytes),
        kernel=threads * min(SCRATCH_BYTES, FLOAT * max((part.numbers for part in parts), default=0))
        + sum(FLOAT * (part.numbers if part.copied else part.rows) for part in parts),
        checkpoint=tables + weights + moments + average if kept.background else 0,
    )


def estimate_checkpoint_bytes(shape: ModelShape, kept: MemorySetup, parts: Sequence[TablePart] | None = None) -> int:
    """Estimates the bytes of a checkpoint's files.

    Args:
        parts: Table parts of all ranks. None: each table is whole.
    """
    found = (
        [TablePart(rows=rows, columns=width) for rows, width in shape.tables.values()] if parts is None else list(parts)
    )
    records = len(found) * (1 + bool(kept.table_optimizer != "sgd") + (kept.table_optimizer == "adam"))
    size = sum(count_table_bytes(part, kept) for part in found)
    moments = MOMENTS[kept.dense_optimizer]
    names = len(shape.weights)
    records += names * (1 + moments + bool(moments))  # besides moments, the number of updates
    size += FLOAT * (shape.dense_parameters * (1 + moments) + names * bool(moments))
    if kept.average:
        records += len(found) + names
        size += FLOAT * shape.dense_parameters + sum(_weight_bytes(part, kept) for part in found)
    return size + RECORD_BYTES * records


class RankMachine(BaseModel, frozen=True):
    """Limits of a machine on the number of ranks."""

    memory_bytes: int
    """Memory of the machine if ranks share it, otherwise of one device."""
    shared: bool = True
    most_ranks: int
    """Number of cores or devices."""


def has_room(ranks: Sequence[RankMemory], machine: RankMachine, others_bytes: int = 0) -> bool:
    """Whether these ranks fit on the machine together.

    Args:
        others_bytes: Memory of the preprocessing service, if it shares the memory of the ranks.
    """
    if len(ranks) > machine.most_ranks:
        return False
    if machine.shared:
        return sum(rank.total for rank in ranks) + others_bytes <= machine.memory_bytes
    return max(rank.total for rank in ranks) <= machine.memory_bytes


def count_machines(whole: RankMemory, machine: RankMachine, others_bytes: int = 0) -> int | None:
    """Counts the machines or devices that the model needs if its state is split evenly.

    Args:
        whole: Memory of a single rank with the whole model.
    Returns:
        None if the part that cannot be split is already too large.
    Example:
        >>> rank = dict(process=10, tables=80, dense=0, average=0, activations=0, batches=0, kernel=0, checkpoint=0)
        >>> count_machines(RankMemory(**rank), RankMachine(memory_bytes=50, most_ranks=1))
        2
    """
    parted = whole.tables + whole.kernel + min(whole.checkpoint, whole.tables)
    left = machine.memory_bytes - (whole.total - parted) - (others_bytes if machine.shared else 0)
    return max(math.ceil(parted / left), 1) if left > 0 else None


def count_workers(rows_per_second: float, worker_rows_per_second: float) -> int:
    """Counts the preprocessing workers that keep training supplied.

    Example:
        >>> count_workers(45_000.0, 20_000.0)
        3
    """
    return max(math.ceil(rows_per_second / worker_rows_per_second), 1)


def estimate_fed_speed(speed: float, worker: float, cores: int, devices: bool) -> float:
    """Estimates the rows per second of training with preprocessing on the same machine.

    Args:
        speed: Rows per second of training alone, on all cores or on devices.
        worker: Rows per second of one preprocessing worker, which occupies one core.
        devices: Whether ranks run on devices and leave the cores to the workers.
    Example:
        >>> estimate_fed_speed(100.0, 50.0, 2, devices=False), estimate_fed_speed(100.0, 40.0, 2, devices=True)
        (50.0, 80.0)
    """
    return min(speed, cores * worker) if devices else 1 / (1 / speed + 1 / (cores * worker))


def estimate_epoch_seconds(rows: int, batch_rows: int, step_milliseconds: float) -> float:
    """Estimates the seconds of an epoch. The last batch counts as a whole one.

    Example:
        >>> estimate_epoch_seconds(1_001, 100, 20.0)
        0.22
    """
    return math.ceil(rows / batch_rows) * step_milliseconds / 1e3


def _weight_bytes(part: TablePart, kept: MemorySetup) -> int:
    return BYTES[kept.table_precision] * part.numbers


class DescribedMachine(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A machine that is not at hand, with its peak rates from a data sheet or a measurement elsewhere."""

    cpu: str
    """Display name."""
    cores: PositiveInt
    memory_bytes: PositiveInt
    fp32_gflops: PositiveFloat
    """Rate of float32 matrix products, on all cores or on one device."""
    bf16_gflops: PositiveFloat
    read_gb_per_second: PositiveFloat
    """Sequential memory reads, on all cores or on one device."""
    random_gb_per_second: PositiveFloat
    """Random reads of rows of 64 float32 numbers, on all cores or on one device."""
    devices: PositiveInt | None = None
    """CUDA devices, one per rank. None: ranks run on the cores."""
    device_memory_bytes: PositiveInt | None = None
    """Memory of each device."""

    @model_validator(mode="after")
    def _devices_have_memory(self) -> Self:
        if (self.devices is None) != (self.device_memory_bytes is None):
            given = "one of them"
            raise ConfigError("devices and device_memory_bytes", "both or none", given, "Add the other.")
        return self

    @property
    def room(self) -> RankMachine:
        """Limits on the number of ranks."""
        if self.devices is not None and self.device_memory_bytes is not None:
            return RankMachine(memory_bytes=self.device_memory_bytes, shared=False, most_ranks=self.devices)
        return RankMachine(memory_bytes=self.memory_bytes, most_ranks=self.cores)

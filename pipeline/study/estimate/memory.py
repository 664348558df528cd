"""Estimates from shapes and a speed: memory of a rank, checkpoint size, ranks, workers and time."""

import math
from collections.abc import Mapping, Sequence
from typing import Self

import torch
from pydantic import BaseModel, PositiveInt, model_validator

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.errors import ConfigError
from pipeline.study.measure.cost import BYTES, MOMENTS, count_row_bytes
from pipeline.study.measure.machine import Ceilings
from pipeline.training.config import TrainConfig

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

    @property
    def parts(self) -> "list[TablePart]":
        """The whole tables."""
        return [TablePart(rows=rows, columns=width) for rows, width in self.tables.values()]


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
    def total(self) -> int:
        """Total memory."""
        return sum(getattr(self, use) for use in type(self).model_fields)


def count_table_bytes(part: TablePart, training: TrainConfig) -> int:
    """Counts the bytes of a table part and its optimizer state.

    Example:
        >>> part = TablePart(rows=10, columns=4)
        >>> count_table_bytes(part, TrainConfig()), count_table_bytes(part, TrainConfig(table_optimizer="adam"))
        (200, 480)
    """
    return part.rows * sum(count_row_bytes(part.columns, training.table_precision, training.table_optimizer))


def estimate_memory(
    shape: ModelShape,
    training: TrainConfig,
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
    """
    weights = FLOAT * shape.dense_parameters
    tables = sum(count_table_bytes(part, training) for part in parts)
    moments = MOMENTS[training.dense_optimizer] * weights
    average = weights + sum(_weight_bytes(part, training) for part in parts) if training.averages else 0
    return RankMemory(
        process=process_bytes,
        tables=tables,
        dense=2 * weights + moments,
        average=average,
        activations=STEP_BYTES + round(TRANSIENT * FLOAT * rows * shape.row_numbers),
        batches=round(BATCHES_HELD * rows * sample_bytes),
        kernel=threads * min(SCRATCH_BYTES, FLOAT * max((part.numbers for part in parts), default=0))
        + sum(FLOAT * (part.numbers if part.copied else part.rows) for part in parts),
        checkpoint=tables + weights + moments + average if training.checkpoint_async else 0,
    )


def estimate_checkpoint_bytes(shape: ModelShape, training: TrainConfig) -> int:
    """Estimates the bytes of a checkpoint's files. Each table is written once."""
    tables, names, moments = shape.parts, len(shape.weights), MOMENTS[training.dense_optimizer]
    records = len(tables) * {"sgd": 1, "adam": 3}.get(training.table_optimizer, 2)
    records += names * (1 + moments + bool(moments))  # besides moments, the number of updates
    size = sum(count_table_bytes(part, training) for part in tables)
    size += FLOAT * (shape.dense_parameters * (1 + moments) + names * bool(moments))
    if training.averages:
        records += len(tables) + names
        size += FLOAT * shape.dense_parameters + sum(_weight_bytes(part, training) for part in tables)
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


def _weight_bytes(part: TablePart, training: TrainConfig) -> int:
    return BYTES[training.table_precision] * part.numbers


class DescribedMachine(Ceilings, frozen=True, extra="forbid"):
    """A machine that is not at hand, with its peak rates from a data sheet or a measurement elsewhere."""

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

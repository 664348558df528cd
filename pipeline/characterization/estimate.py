"""What a model takes: memory of a rank, checkpoints, ranks, workers, time; worked out from shapes and a speed."""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import BaseModel, PositiveFloat, PositiveInt, model_validator

from models.config import DLRMConfig, SparseFeature
from models.dlrm import DLRM
from pipeline.characterization.cost import BYTES, MOMENTS, count_row_bytes
from pipeline.errors import ConfigError

FLOAT = 4
"""Bytes of a number."""
RECORD_BYTES = 1_840
"""What a checkpoint says of each tensor beside its numbers: the head of its record, and its entry in the metadata."""
TRANSIENT = 1.3
"""Times the activations that are kept: what is there for a moment beside them. By measurement."""
STEP_BYTES = 25 << 20
"""What the first step of any model takes: libraries begin to work. By measurement."""
SCRATCH_BYTES = 16 << 20
"""Of each thread of the CPU kernel, for gradients of rows; less where a table is smaller."""
BATCHES_HELD = 3
"""Batches that a rank holds: the one it trains, its copy in TorchRec's order, the next one."""


class ModelShape(BaseModel, frozen=True):
    """What a model holds."""

    tables: Mapping[str, tuple[int, int]]
    """Table -> rows, width."""
    weights: Mapping[str, tuple[int, ...]]
    """Everything but the tables, by name."""
    row_numbers: int
    """Numbers that the forward pass keeps of a row until the backward pass has used them."""

    @property
    def dense_parameters(self) -> int:
        """Numbers of everything but the tables."""
        return sum(math.prod(shape) for shape in self.weights.values())


def derive_shape(config: DLRMConfig, num_dense: int, bags: Sequence[SparseFeature]) -> ModelShape:
    """The shape of a model that takes no memory.

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
        kept += 2 * features * features  # all products, and their gradients
    elif config.interaction == "dcn":
        kept += 5 * config.cross_layers * vectors
    return ModelShape(tables=tables, weights=weights, row_numbers=kept)


class MemorySetup(BaseModel, frozen=True):
    """What a training keeps beside the weights."""

    table_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd", "adam"] = "rowwise_adagrad"
    table_precision: Literal["fp32", "fp16"] = "fp32"
    dense_optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    average: bool = False
    """The running mean of the weights."""
    background: bool = True
    """Checkpoints are written from a copy, while training goes on."""


class TablePart(BaseModel, frozen=True):
    """What a rank holds of a table."""

    rows: int
    columns: int
    copied: bool = False
    """All ranks hold the same: it has a gradient, and is written once."""

    @property
    def numbers(self) -> int:
        """Of its weights."""
        return self.rows * self.columns


class RankMemory(BaseModel, frozen=True):
    """Bytes of a rank, by what they are for."""

    process: int
    """Python and its libraries."""
    tables: int
    """Their weights and their optimizer's state."""
    dense: int
    """Everything but the tables: weights, gradients, optimizer."""
    average: int
    activations: int
    batches: int
    kernel: int
    """The CPU kernel's list of rows and gradients of rows, and gradients of copied tables."""
    checkpoint: int
    """The copy that is written."""

    @property
    def state(self) -> int:
        """What grows with the model: a checkpoint of it, and what is kept twice."""
        return self.tables + self.dense + self.average + self.kernel + self.checkpoint

    @property
    def total(self) -> int:
        """All of it."""
        return self.process + self.state + self.activations + self.batches


def count_table_bytes(part: TablePart, kept: MemorySetup) -> int:
    """Weights of a part of a table, and its optimizer's state.

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
    """What a rank on a CPU needs.

    Args:
        parts: Of the tables, that this rank holds.
        rows: Rows of its share of a batch.
        sample_bytes: Of a row as it reaches the model.
        process_bytes: Of a rank before it has a model; measured.
        threads: Of the rank.
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
    """Bytes of a checkpoint's files.

    Args:
        parts: Of the tables, of all ranks; None: each table whole.
    """
    found = (
        [TablePart(rows=rows, columns=width) for rows, width in shape.tables.values()] if parts is None else list(parts)
    )
    records = len(found) * (1 + bool(kept.table_optimizer != "sgd") + (kept.table_optimizer == "adam"))
    size = sum(count_table_bytes(part, kept) for part in found)
    moments = MOMENTS[kept.dense_optimizer]
    names = len(shape.weights)
    records += names * (1 + moments + bool(moments))  # beside moments, the number of updates
    size += FLOAT * (shape.dense_parameters * (1 + moments) + names * bool(moments))
    if kept.average:
        records += len(found) + names
        size += FLOAT * shape.dense_parameters + sum(_weight_bytes(part, kept) for part in found)
    return size + RECORD_BYTES * records


class RankMachine(BaseModel, frozen=True):
    """What of a machine decides how many ranks have room."""

    memory_bytes: int
    """Of the machine, which its ranks share; of a device, where each rank has one."""
    shared: bool = True
    most_ranks: int
    """Cores or devices."""


def has_room(ranks: Sequence[RankMemory], machine: RankMachine, others_bytes: int = 0) -> bool:
    """Whether a machine can hold these ranks together.

    Args:
        others_bytes: Of the preprocessing service, where all share one memory.
    """
    if len(ranks) > machine.most_ranks:
        return False
    if machine.shared:
        return sum(rank.total for rank in ranks) + others_bytes <= machine.memory_bytes
    return max(rank.total for rank in ranks) <= machine.memory_bytes


def count_machines(whole: RankMemory, machine: RankMachine, others_bytes: int = 0) -> int | None:
    """How many such machines or devices the model needs, each with an even part of its state.

    Args:
        whole: Of a single rank.
    Returns:
        None: what does not shrink with their number is too large already.
    Example:
        >>> rank = dict(process=10, tables=80, dense=0, average=0, activations=0, batches=0, kernel=0, checkpoint=0)
        >>> count_machines(RankMemory(**rank), RankMachine(memory_bytes=50, most_ranks=1))
        2
    """
    parted = whole.tables + whole.kernel + min(whole.checkpoint, whole.tables)
    left = machine.memory_bytes - (whole.total - parted) - (others_bytes if machine.shared else 0)
    return max(math.ceil(parted / left), 1) if left > 0 else None


def count_workers(rows_per_second: float, worker_rows_per_second: float) -> int:
    """Preprocessing workers that keep a training supplied.

    Example:
        >>> count_workers(45_000.0, 20_000.0)
        3
    """
    return max(math.ceil(rows_per_second / worker_rows_per_second), 1)


def estimate_fed_speed(speed: float, worker: float, cores: int, devices: bool) -> float:
    """Rows per second of a training whose batches are made on the same machine.

    Args:
        speed: Rows per second with batches there in time, by all cores or by devices.
        worker: Rows per second of one preprocessing worker, which has one core busy.
        devices: Ranks run on devices: workers have the cores to themselves.
    Example:
        >>> estimate_fed_speed(100.0, 50.0, 2, devices=False), estimate_fed_speed(100.0, 40.0, 2, devices=True)
        (50.0, 80.0)
    """
    return min(speed, cores * worker) if devices else 1 / (1 / speed + 1 / (cores * worker))


def estimate_epoch_seconds(rows: int, batch_rows: int, step_milliseconds: float) -> float:
    """Time of a pass over the rows, the last batch as long as the others.

    Example:
        >>> estimate_epoch_seconds(1_001, 100, 20.0)
        0.22
    """
    return math.ceil(rows / batch_rows) * step_milliseconds / 1e3


def _weight_bytes(part: TablePart, kept: MemorySetup) -> int:
    return BYTES[kept.table_precision] * part.numbers


class DescribedMachine(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A machine that is not there: its ceilings, by a data sheet or by somebody's measurement."""

    cpu: str
    """Name, for people."""
    cores: PositiveInt
    memory_bytes: PositiveInt
    fp32_gflops: PositiveFloat
    """Matrix products of float32 numbers, with all cores; of one device where there are some."""
    bf16_gflops: PositiveFloat
    read_gb_per_second: PositiveFloat
    """Memory read from end to end, with all cores; of one device where there are some."""
    random_gb_per_second: PositiveFloat
    """Rows of 64 float32 numbers read at random, with all cores; of one device where there are some."""
    devices: PositiveInt | None = None
    """CUDA devices, one for each rank. None: ranks run on the cores."""
    device_memory_bytes: PositiveInt | None = None
    """Of each device."""

    @model_validator(mode="after")
    def _devices_have_memory(self) -> Self:
        if (self.devices is None) != (self.device_memory_bytes is None):
            given = "one of them"
            raise ConfigError("devices and device_memory_bytes", "both or none", given, "Add the other.")
        return self

    @property
    def room(self) -> RankMachine:
        """What decides how many ranks it can hold."""
        if self.devices is not None and self.device_memory_bytes is not None:
            return RankMachine(memory_bytes=self.device_memory_bytes, shared=False, most_ranks=self.devices)
        return RankMachine(memory_bytes=self.memory_bytes, most_ranks=self.cores)

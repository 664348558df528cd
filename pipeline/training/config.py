"""TrainConfig: how long, how fast and how often to train, and how to shard the embedding tables."""

import math
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.marks import APART, PLACEMENT
from pipeline.training.support import require_support

ShardingType = Literal[
    "data_parallel",
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
]
COLUMN_SHARDING = {"column_wise", "table_column_wise", "grid_shard"}
"""Sharding types that cut the columns of a table."""
ROW_SHARDING = {"row_wise", "table_row_wise", "grid_shard"}
"""Sharding types that cut the rows of a table: a bag's vectors come from several ranks and are added up."""
HOST_SHARDING = {"table_row_wise", "grid_shard"}
"""Sharding types that cut the rows of a table among the ranks of one host."""
TableMemory = Literal["device", "uvm", "uvm_caching"]
SPANS = {
    "warmup": "warmup_steps",
    "decay": "decay_steps",
    "validate_every": "validate_every_steps",
    "average_from": "average_from_step",
}
"""Span in epochs -> the same span in steps."""
Precision = Literal["fp32", "fp16", "bf16"]


class ShardingRule(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Sharding type of some tables."""

    tables: tuple[str, ...] = Field(min_length=1)
    """Names of tables, or patterns such as `cat_*`."""
    kind: Literal["auto"] | ShardingType
    """Sharding type of these tables; auto leaves the choice to the planner."""


Sharding = Literal["auto"] | ShardingType | Annotated[tuple[ShardingRule, ...], Field(min_length=1)]


def requested_sharding_types(sharding: Sharding) -> set[str]:
    """Returns all sharding types that a setting names.

    Example:
        >>> requested_sharding_types((ShardingRule(tables=("cat_*",), kind="row_wise"),))
        {'row_wise'}
    """
    return {sharding} if isinstance(sharding, str) else {rule.kind for rule in sharding}


def requested_sharding_type(sharding: Sharding, table: str) -> str:
    """Returns the sharding type of the first rule that matches a table; auto if none does.

    Example:
        >>> requested_sharding_type((ShardingRule(tables=("cat_*",), kind="row_wise"),), "cat_user")
        'row_wise'
        >>> requested_sharding_type((ShardingRule(tables=("cat_*",), kind="row_wise"),), "list_items")
        'auto'
    """
    if isinstance(sharding, str):
        return sharding
    matching = (rule.kind for rule in sharding if any(fnmatchcase(table, pattern) for pattern in rule.tables))
    return next(matching, "auto")


class TrainConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Training. Sizes are rows of the global batch, spans are steps (updates) or epochs."""

    world_size: Annotated[PositiveInt, PLACEMENT] = 2
    """Number of ranks, one process each."""
    hosts: Annotated[PositiveInt, PLACEMENT] = 1
    """Hosts that the ranks are on, as many on each and those of a host one after another. Several need launcher ray or
    external. The sharding planner then counts what crosses the network, and `table_row_wise` and `grid_shard` divide
    the rows of a table among the ranks of one host. 1: one host, or several that the planner does not know."""
    network_bytes_per_second: Annotated[PositiveFloat | None, PLACEMENT] = None
    """Bytes that a host sends over the network in a second, shared by its ranks. The sharding planner weighs it against
    TorchRec's figure within a host, 640 GB, also on CPU. Only with several hosts. None: TorchRec's, 13.4 GB per rank.
    """
    launcher: Annotated[Literal["processes", "ray", "external"], APART] = "processes"
    """What starts the ranks. processes: processes on this machine. ray: Ray Train workers on the cluster at
    `preprocessing.ray_address`; without an address, on a temporary local cluster. external: torchrun or SLURM, by a
    command that the training prints; it then follows the ranks through files in its folder, which their hosts share."""
    resources: Annotated[Mapping[str, PositiveFloat], APART] = {}
    """What Ray reserves for each rank besides processors, such as `{gpu_host: 1}`: name of a resource -> amount. Ranks
    run on nodes that have it. Only with launcher ray."""
    labels: Annotated[Mapping[str, str], APART] = {}
    """Labels of the nodes for ranks, as Ray selects them: `{zone: eu-1}`, `{kind: "in(big, huge)"}`, `{kind: "!spot"}`.
    Only with launcher ray."""
    sharding: Annotated[Sharding, PLACEMENT] = "auto"
    """Sharding of the embedding tables: auto (TorchRec's planner chooses), one sharding type for all tables, or rules.
    The first rule that matches a table decides. Tables that no rule matches are planned as auto."""
    partitioner: Annotated[Literal["greedy", "memory_balanced", "largest_differencing"], PLACEMENT] = "greedy"
    """How the planner assigns shards to ranks. greedy: TorchRec's default. memory_balanced: TorchRec's, balances device
    memory (CUDA only). largest_differencing: ours; its slowest rank is never expected to be slower than with greedy."""
    table_memory: TableMemory = "device"
    """Where tables are stored. device: on the device. uvm: in host memory, accessed from the device. uvm_caching: in
    host memory with a cache on the device. The last two need CUDA."""
    memory_per_rank_bytes: Annotated[PositiveInt | None, PLACEMENT] = None
    """Memory that the planner may use per rank. None: the device's memory; on CPU, an equal share of its host's."""
    sync: Literal["synchronous", "easgd", "hogwild"] = "synchronous"
    """How ranks keep the dense weights equal. synchronous: averages gradients at every step, one update per batch. The
    other two are baselines for the CPUs of one machine. Their ranks do not wait for one another: each updates with its
    own share of the batch, and all share the tables. hogwild: ranks also share the dense weights. easgd: each rank has
    its own dense weights, tied to a common center. Both pause while a checkpoint is written."""
    easgd_period_steps: PositiveInt = 10
    """Steps between two exchanges of a rank's dense weights with the center."""
    easgd_rate: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of their difference by which rank and center move towards each other. None: 0.9 / world_size."""
    device: Annotated[Literal["auto", "cpu", "cuda"], APART] = "auto"
    """auto: CUDA if launcher is processes and this machine has one device for every rank, else CPU. With cuda, Ray
    reserves a GPU for each rank."""
    threads_per_rank: Annotated[PositiveInt | None, APART] = None
    """CPU threads for tensor operations. None: an equal share of the cores. One rank alone then times now and then what
    a step takes with one thread, and uses one while that is faster, where the weights do not depend on it."""
    lanes: PositiveInt | None = None
    """Cuts each global batch into this many lanes, a multiple of `world_size`, and adds their gradients in one order.
    The weights then are the same bit for bit for every world size that divides this number, every sharding plan that is
    not refused and every number of threads, on CPUs of one kind. None: the last bits depend on these."""
    least_ranks: Annotated[PositiveInt | None, APART] = None
    """Fewest ranks with which a training on a Ray cluster continues when hosts are lost and not replaced within a
    minute. The weights stay the same, so it needs `lanes`. None: it waits for `world_size` ranks."""
    batch_rows: PositiveInt = 2_048
    """Rows of a step over all ranks."""
    epochs: PositiveInt = 1
    """Passes over the training rows; early stopping may end sooner."""
    max_steps: PositiveInt | None = None
    """Updates to make in total; a resumed run counts those already made. None: `epochs` decides."""
    embedding_kernel: Annotated[Literal["auto", "fbgemm", "numba"], PLACEMENT] = "auto"
    """Kernel that looks up and updates tables. numba: ours, for CPU. auto: ours where possible, else FBGEMM's.
    Tables in fp16 on CPU have ours whatever this says."""
    table_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd", "adam"] = "rowwise_adagrad"
    """Exact optimizer of the tables. Rows that a batch does not read stay unchanged, with adam too."""
    table_learning_rate: PositiveFloat = 0.05
    """Learning rate of the tables that `table_learning_rates` does not match."""
    table_learning_rates: Mapping[str, PositiveFloat] = {}
    """Pattern of table names, such as `cat_user*` -> learning rate; the first match decides."""
    table_weight_decay: NonNegativeFloat = 0.0
    """L2 penalty on the rows of a batch; FBGEMM's kernel does not support it on CPU."""
    table_gradient_limit: PositiveFloat | None = None
    """Clips each element of a bag's gradient to [-this, this] before it reaches the rows. None: no clipping."""
    table_precision: Literal["fp32", "fp16"] = "fp32"
    """Data type of the tables. fp16 halves their memory. Updates are rounded to fp16 at random, so that small ones
    count in the mean. Exported weights are fp32."""
    dense_optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    """Optimizer of all parameters except the tables. adamw decays weights apart from the gradient, the others through
    it."""
    dense_learning_rate: PositiveFloat = 1e-3
    dense_weight_decay: NonNegativeFloat = 0.0
    dense_gradient_norm: PositiveFloat | None = None
    """Clips the global norm of all gradients except those of the tables. None: no clipping."""
    dense_precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products outside the tables run in bfloat16 (autocast); weights stay fp32."""
    compile: bool = False
    """Compiles everything except the tables (torch.compile, needs a C++ compiler). This takes about a minute and pays
    off in long trainings."""
    cuda_graph: Annotated[bool, APART] = True
    """On CUDA, a rank launches everything except the tables and the optimizers as one CUDA graph. Results of up to two
    ranks are the same bit for bit; sums over more may be added in another order. Without effect with dropout, shared
    lists (`deduplicate`), or `compile` on several ranks."""
    vector_communication: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Data type of the pooled vectors that ranks exchange; gloo does not support bf16. On CPU, fp32 alone goes through
    shared memory."""
    gradient_communication: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Data type of the gradients of pooled vectors that ranks exchange; gloo does not support bf16. On CPU, fp32 alone
    goes through shared memory."""
    send_ids_ahead: Annotated[bool, APART] = False
    """Prefetches the input distribution: ids of the next batch are sent to the ranks that hold their tables while this
    batch is trained. Results are the same bit for bit. It gains nothing between ranks that share memory."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which both learning rates rise from 0."""
    decay_steps: PositiveInt | None = None
    """Step at which both learning rates have fallen linearly to `decay_floor` of their start. None: no decay."""
    decay_floor: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the learning rates left after the decay."""
    log_every_steps: Annotated[PositiveInt, APART] = 50
    warmup: PositiveFloat | None = None
    """In place of `warmup_steps`, in epochs: 0.5 is half of the first."""
    decay: PositiveFloat | None = None
    """In place of `decay_steps`, in epochs."""
    validate_every_steps: PositiveInt | None = None
    """None validates after each epoch."""
    validate_every: PositiveFloat | None = None
    """In place of `validate_every_steps`, in epochs: 0.25 validates four times in each."""
    patience: PositiveInt | None = None
    """Stops training after this many validations without a better NE. None: no early stopping."""
    average_from_step: PositiveInt | None = None
    """Averages the weights from this step on; validation and export use the mean. None: the last weights."""
    average_from: PositiveFloat | None = None
    """In place of `average_from_step`, in epochs: 0.5 averages from the middle of the first."""
    average_every_steps: PositiveInt = 16
    """Steps between two samples of the mean."""
    checkpoint_every_steps: Annotated[PositiveInt | None, APART] = 1_000
    """None writes one checkpoint, at the end."""
    checkpoint_every_seconds: Annotated[PositiveInt | None, APART] = None
    """Also writes a checkpoint after this long without one, by rank 0's clock. None: steps alone decide."""
    checkpoint_async: Annotated[bool, APART] = True
    """Writes checkpoint files in the background; training pauses only to copy its state. Each rank needs memory for one
    more copy of its weights and optimizer state."""
    keep_checkpoints: Annotated[PositiveInt, APART] = 2
    """Newest checkpoints to keep, in addition to the best one."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What to do if the loss is not finite. stop: ends training and keeps the last good checkpoint. skip: all ranks
    leave the batch out and count it. Ten such batches in a row end training in either case."""
    restart_limit: Annotated[NonNegativeInt, APART] = 3
    """How often dead or hung ranks are restarted from the same checkpoint; a newer checkpoint resets the count."""
    hang_seconds: Annotated[PositiveInt | None, APART] = 600
    """Restarts ranks that finish neither a step nor a validation batch for this long. Time spent waiting for
    preprocessing does not count while preprocessing makes progress. None: waits without limit."""
    deadline_seconds: Annotated[PositiveInt | None, APART] = None
    """Fails the training after this long, restarts included. None: no limit."""

    @model_validator(mode="after")
    def _one_unit(self) -> Self:
        for share, steps in SPANS.items():
            if getattr(self, share) is not None and getattr(self, steps):
                raise ConfigError(
                    f"training.{share}", f"{share} or {steps}", "both", "Leave out one: they are the same span."
                )
        if self.decay is not None and self.decay <= (self.warmup or 0.0):
            raise ConfigError("training.decay", f"more than warmup={self.warmup}", f"{self.decay}", "Raise decay.")
        return self

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                "training.decay_steps",
                f"more than warmup_steps={self.warmup_steps}",
                f"{self.decay_steps}",
                "Raise decay_steps.",
            )
        if self.embedding_kernel == "numba" and (self.table_precision != "fp32" or self.device == "cuda"):
            raise ConfigError(
                "training.embedding_kernel", "fbgemm or auto with fp16 tables or on CUDA", "numba",
                "Set embedding_kernel: auto.",
            )  # fmt: skip
        self._require_hosts()
        require_support(self, requested_sharding_types(self.sharding))
        if self.least_ranks is not None and self.world_size > self.least_ranks and len(self.rank_numbers) == 1:
            fitting = [n for n in range(1, self.world_size) if (self.lanes or 1) % n == 0]
            raise ConfigError(
                "training.least_ranks", f"{fitting[-1]} or less, the next divisor of lanes={self.lanes}",
                f"{self.least_ranks}", "Lower it, or leave it out.",
            )  # fmt: skip
        by_column = sorted(requested_sharding_types(self.sharding) & COLUMN_SHARDING)
        if by_column and self.table_optimizer == "rowwise_adagrad":
            raise ConfigError(
                f"training.sharding '{by_column[0]}'", "an element-wise table optimizer",
                "rowwise_adagrad, which would keep one moment per column shard and so train differently",
                "Set table_optimizer: adagrad.",
            )  # fmt: skip
        if self.batch_rows < self.world_size:
            raise ConfigError(
                "training.batch_rows", f"at least world_size={self.world_size}, one row per rank", f"{self.batch_rows}",
                "Raise batch_rows.",
            )  # fmt: skip
        return self

    def _require_hosts(self) -> None:
        """Refuses hosts on which the ranks cannot be."""
        if self.world_size % self.hosts:
            raise ConfigError(
                "training.hosts", f"a divisor of world_size={self.world_size}", f"{self.hosts}",
                "Change one of them: each host has as many ranks.",
            )  # fmt: skip
        if self.hosts > 1 and self.launcher == "processes":
            raise ConfigError(
                f"training.hosts with launcher={self.launcher}", "1, since processes are on this machine",
                f"{self.hosts}", "Leave it out, or set launcher: ray or external.",
            )  # fmt: skip

    @property
    def rank_numbers(self) -> tuple[int, ...]:
        """Numbers of ranks with which the training may run, the largest first.

        Example:
            >>> TrainConfig(world_size=4, launcher="ray", lanes=8, least_ranks=1).rank_numbers
            (4, 2, 1)
        """
        if self.least_ranks is None or self.lanes is None:
            return (self.world_size,)
        return tuple(n for n in range(self.world_size, self.least_ranks - 1, -1) if self.lanes % n == 0)

    @property
    def ray_resources(self) -> dict[str, float]:
        """What Ray reserves for each rank besides processors.

        Example:
            >>> TrainConfig(device="cuda", resources={"gpu_host": 1}).ray_resources
            {'gpu_host': 1.0, 'GPU': 1.0}
        """
        return dict(self.resources) | ({"GPU": 1.0} if self.device == "cuda" else {})

    @property
    def ranks_per_host(self) -> int:
        """Number of ranks on each host.

        Example:
            >>> TrainConfig(world_size=8, hosts=2, launcher="external").ranks_per_host
            4
        """
        return self.world_size // self.hosts

    @property
    def on_one_host(self) -> "TrainConfig":
        """The config for ranks that are processes of this machine, whatever the launcher."""
        return self.model_copy(update={"hosts": 1, "least_ranks": None})

    @property
    def averages(self) -> bool:
        """Whether the weights are averaged."""
        return self.average_from_step is not None or self.average_from is not None

    @property
    def counts_epochs(self) -> bool:
        """Whether a span is given in epochs."""
        return any(getattr(self, share) is not None for share in SPANS)

    def in_steps(self, rows: int) -> "TrainConfig":
        """Returns the config with all spans in steps.

        Args:
            rows: Training rows of an epoch.
        Example:
            >>> TrainConfig(average_from=0.5, validate_every=0.01, batch_rows=100).in_steps(1_050).average_from_step
            6
        """
        steps = math.ceil(rows / self.batch_rows)
        given = {name: getattr(self, name) for name in SPANS if getattr(self, name) is not None}
        found = {SPANS[name]: max(1, round(span * steps)) for name, span in given.items()}
        if "decay_steps" in found:
            found["decay_steps"] = max(found["decay_steps"], found.get("warmup_steps", self.warmup_steps) + 1)
        return TrainConfig.model_validate({**self.model_dump(), **dict.fromkeys(given), **found}) if given else self

    @property
    def for_sharding(self) -> "TrainConfig":
        """The config to plan table sharding with. Asynchronous ranks each use all tables, as a single rank would."""
        single = {"world_size": 1, "sharding": "table_wise", "batch_rows": self.batch_rows // self.world_size}
        return self if self.sync == "synchronous" else self.model_copy(update=single)

    @property
    def moving_rate(self) -> float:
        """The moving rate of EASGD, by default as its authors set it.

        Source:
            Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, section 5: beta = 0.9, divided among the workers.
        """
        return self.easgd_rate or 0.9 / self.world_size

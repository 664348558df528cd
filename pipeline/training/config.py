"""TrainConfig: how long, how fast, how often."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.training.tables.sharding import COLUMN_KINDS, Sharding, TableMemory, asked_kinds


class TrainConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Sizes are rows of the global batch, spans are steps (updates)."""

    world_size: PositiveInt = 2
    """Ranks: one process each."""
    launcher: Literal["processes", "ray"] = "processes"
    """What starts the ranks: processes of this machine; ray: workers of Ray Train, on CPUs of the cluster at
    `preprocessing.ray_address`, or of one on this machine where there is none."""
    sharding: Sharding = "auto"
    """Placement of the embedding tables: auto (TorchRec's planner chooses), one kind for all, or rules; the first that
    names a table counts, and auto places those that none names."""
    partitioner: Literal["greedy", "memory_balanced", "largest_differencing"] = "greedy"
    """How the planner spreads tables over ranks: TorchRec's greedy way, its way that evens out device memory (CUDA), or
    by largest differencing, whose slowest rank is never expected to be slower than with greedy."""
    table_memory: TableMemory = "device"
    """Where the tables lie: on the device; uvm: in the host's memory, used from the device; uvm_caching: with a cache
    on the device. The last two need CUDA."""
    memory_per_rank_bytes: PositiveInt | None = None
    """Memory that a plan may count on for each rank; None: the device's, on CPU an equal share of the machine's."""
    sync: Literal["synchronous", "easgd", "hogwild"] = "synchronous"
    """How ranks keep the dense part alike. synchronous: averaged gradients at every step, one update a batch. The rest
    are baselines for CPUs of one machine whose ranks do not wait for one another: each makes an update of its share of
    the batch, on tables that all share; hogwild: on dense weights that all share, too; easgd: on its own, tied to a
    centre. They stand still while a checkpoint is written."""
    easgd_period_steps: PositiveInt = 10
    """Steps between two meetings of a rank's dense weights with the centre."""
    easgd_rate: float | None = Field(default=None, gt=0.0, le=1.0)
    """How far both move towards each other, as a share of their difference; None: 0.9 / world_size."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: CUDA where there is one for every rank, else CPU."""
    threads_per_rank: PositiveInt | None = None
    """Threads of tensor arithmetic; None: the cores shared out evenly."""
    batch_rows: PositiveInt = 2_048
    """Rows of a step over all ranks."""
    epochs: PositiveInt = 1
    """Passes over the training rows; early stopping may end sooner."""
    max_steps: PositiveInt | None = None
    """Updates to make in total; a resumed run counts those already made. None: as the epochs say."""
    embedding_kernel: Literal["auto", "fbgemm", "numba"] = "auto"
    """What looks up and updates tables. numba: ours, for CPU; auto: ours where it can, else FBGEMM's."""
    table_optimizer: Literal["rowwise_adagrad", "adagrad", "sgd", "adam"] = "rowwise_adagrad"
    """Exact optimizer of the tables: rows that a batch does not read stay as they are, under adam too."""
    table_learning_rate: PositiveFloat = 0.05
    """Of all embedding tables that `table_learning_rates` does not name."""
    table_learning_rates: Mapping[str, PositiveFloat] = {}
    """Pattern of table names, such as `cat_user*` -> learning rate; the first that fits counts."""
    table_weight_decay: NonNegativeFloat = 0.0
    """L2 penalty on the rows of a batch; FBGEMM has none on CPU."""
    table_gradient_limit: PositiveFloat | None = None
    """Each element of a bag's gradient is cut to [-this, this] before it reaches the rows. None: it is not."""
    table_precision: Literal["fp32", "fp16"] = "fp32"
    """Numbers of the tables; fp16 halves their memory and needs FBGEMM's kernel. Exported weights are fp32."""
    dense_optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    """Optimizer of everything but the tables; adamw decays weights apart from the gradient, the others through it."""
    dense_learning_rate: PositiveFloat = 1e-3
    dense_weight_decay: NonNegativeFloat = 0.0
    dense_gradient_norm: PositiveFloat | None = None
    """The gradients of everything but the tables are scaled down to this norm together. None: they are not."""
    dense_precision: Literal["fp32", "bf16"] = "fp32"
    """bf16: matrix products of everything but the tables in bfloat16 (autocast); weights stay fp32."""
    compile: bool = False
    """Compiles everything but the tables (torch.compile; needs a C++ compiler): worth its minute in long trainings."""
    vector_communication: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Numbers in which ranks send each other pooled vectors; gloo has no bf16."""
    gradient_communication: Literal["fp32", "fp16", "bf16"] = "fp32"
    """Numbers in which ranks send each other the gradients of pooled vectors; gloo has no bf16."""
    send_ids_ahead: bool = False
    """Ids of the next batch go to the ranks that hold their tables while this one is trained: the same bits, sooner."""
    warmup_steps: NonNegativeInt = 0
    """Steps over which both learning rates rise from 0."""
    decay_steps: PositiveInt | None = None
    """Step at which both learning rates have fallen linearly to `decay_floor` of their start; None: they stay."""
    decay_floor: float = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the learning rates left after the decay."""
    log_every_steps: PositiveInt = 50
    validate_every_steps: PositiveInt | None = None
    """None validates after each epoch."""
    patience: PositiveInt | None = None
    """Validations without a better NE before training stops; None: never."""
    average_from_step: PositiveInt | None = None
    """From here on the mean of the weights is kept; validation and export take it. None: the last weights."""
    average_every_steps: PositiveInt = 16
    """Steps between two weights of the mean."""
    checkpoint_every_steps: PositiveInt | None = 1_000
    """None writes none before the end."""
    checkpoint_every_seconds: PositiveInt | None = None
    """Another checkpoint after this long without one, by rank 0's clock; None: as the steps say."""
    checkpoint_async: bool = True
    """Files are written while training goes on, which stops only to copy its state: takes memory for one more copy of
    each rank's weights and optimizer state."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept, beside the best one."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """What happens where the loss is not finite: training ends with the last good checkpoint kept, or the batch is left
    out by all ranks and counted. Ten such batches in a row end training in any case."""
    restart_limit: NonNegativeInt = 3
    """How often dead or hung ranks are started again from the same checkpoint; a newer one begins the count anew."""
    hang_seconds: PositiveInt | None = 600
    """Ranks that make no step and no batch of validation for so long are ended and started again; time in which they
    wait for preprocessing that makes headway does not count. None: they are waited for."""
    deadline_seconds: PositiveInt | None = None
    """Training, with all restarts, is ended as failed after this long; None: no limit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                "training.decay_steps",
                f"more than warmup_steps={self.warmup_steps}",
                f"{self.decay_steps}",
                "Raise it.",
            )
        if self.embedding_kernel == "numba" and (self.table_precision != "fp32" or self.device == "cuda"):
            raise ConfigError(
                "training.embedding_kernel", "fbgemm or auto, for fp16 tables and for CUDA", "numba", "Correct it."
            )
        if self.launcher == "ray" and self.device == "cuda":
            raise ConfigError(
                "training.device with launcher=ray", "auto or cpu: its ranks have no CUDA devices", "cuda",
                "Take launcher=processes.",
            )  # fmt: skip
        if self.sync != "synchronous":
            self._require_shareable()
        cut = sorted(asked_kinds(self.sharding) & COLUMN_KINDS)
        if cut and self.table_optimizer == "rowwise_adagrad":
            raise ConfigError(
                f"training.sharding '{cut[0]}'", "an optimizer that works on each number by itself",
                "rowwise_adagrad, which would keep one moment for each cut of a row: another optimizer",
                "Set table_optimizer: adagrad.",
            )  # fmt: skip
        if self.batch_rows < self.world_size:
            needed = f"at least world_size={self.world_size}, one row a rank"
            raise ConfigError("training.batch_rows", needed, f"{self.batch_rows}", "Raise it.")
        return self

    def _require_shareable(self) -> None:
        """Refuses what does not go with ranks that share their tables and do not wait for one another."""
        alone, remedy = f"with sync={self.sync}", "Change it, or take sync=synchronous."
        rules = {
            "launcher": (self.launcher == "processes", "processes: tables are shared in one machine's memory"),
            "device": (self.device != "cuda", "auto or cpu: tables are shared in the machine's memory"),
            "sharding": (
                self.sharding in ("auto", "table_wise"),
                "auto or table_wise: ranks have all tables whole",
            ),
            "embedding_kernel": (
                self.embedding_kernel != "fbgemm",
                "auto or numba: FBGEMM's shares nothing",
            ),
            "table_precision": (self.table_precision == "fp32", "fp32: our kernel has no other"),
            "vector_communication": (self.vector_communication == "fp32", "fp32: no vectors are sent"),
            "gradient_communication": (self.gradient_communication == "fp32", "fp32: no gradients are sent"),
            "on_nonfinite": (self.on_nonfinite == "stop", "stop: ranks do not meet to agree on a batch to leave out"),
            "checkpoint_every_seconds": (self.checkpoint_every_seconds is None, "none: ranks meet by steps"),
            "average_from_step": (self.average_from_step is None, "none: weights are never at one step"),
        }
        for key, (fits, expected) in rules.items():
            if not fits:
                raise ConfigError(f"training.{key} {alone}", expected, f"{getattr(self, key)}", remedy)

    @property
    def for_placement(self) -> "TrainConfig":
        """What decides where tables lie: without lock-step each rank has them all, as if it were alone."""
        alone = {"world_size": 1, "sharding": "table_wise", "batch_rows": self.batch_rows // self.world_size}
        return self if self.sync == "synchronous" else self.model_copy(update=alone)

    @property
    def moving_rate(self) -> float:
        """The moving rate of EASGD, by default as its authors set it.

        Source:
            Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, section 5: beta = 0.9, shared out among the workers.
        """
        return self.easgd_rate or 0.9 / self.world_size

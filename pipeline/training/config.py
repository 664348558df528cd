"""TrainConfig: how long, how fast, how often."""

from typing import Literal, Self

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.training.sharding import Sharding


class TrainConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Sizes are rows of the global batch, spans are steps (updates)."""

    world_size: PositiveInt = 2
    """Ranks: one process each."""
    sharding: Sharding = "auto"
    """Placement of the embedding tables; auto lets TorchRec's planner choose."""
    sync: Literal["synchronous"] = "synchronous"
    """How ranks keep the dense part alike: averaged gradients at every step."""
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
    table_learning_rate: PositiveFloat = 0.05
    """Of the fused exact row-wise Adagrad on embedding tables."""
    table_weight_decay: NonNegativeFloat = 0.0
    """L2 penalty on the rows of a batch."""
    dense_optimizer: Literal["adam", "adamw", "adagrad", "sgd"] = "adam"
    """Optimizer of everything but the tables; adamw decays weights apart from the gradient, the others through it."""
    dense_learning_rate: PositiveFloat = 1e-3
    dense_weight_decay: NonNegativeFloat = 0.0
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
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints kept, beside the best one."""
    deadline_seconds: PositiveInt | None = None
    """Training is ended as failed after this long; None: no limit."""

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ConfigError(
                "training.decay_steps",
                f"more than warmup_steps={self.warmup_steps}",
                f"{self.decay_steps}",
                "Raise it.",
            )
        if self.batch_rows < self.world_size:
            needed = f"at least world_size={self.world_size}, one row a rank"
            raise ConfigError("training.batch_rows", needed, f"{self.batch_rows}", "Raise it.")
        return self

"""PreprocessingConfig."""

from typing import Annotated, Literal, Self

import psutil
from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError


class PreprocessingConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How rows become batches. Nothing here but `shuffle_window_rows` and `session_column` changes a model."""

    executor: Literal["inline", "process", "ray"] = "process"
    """Where workers run: `process` on this machine, `ray` on a Ray cluster, `inline` in each rank (for debugging)."""
    workers: Literal["auto"] | PositiveInt = "auto"
    """Workers of all ranks together; auto adds workers while the trainer waits and removes idle ones."""
    max_workers: PositiveInt | None = None
    """Most workers that auto may start; none: one for each processor core."""
    shuffle_window_rows: PositiveInt = 262_144
    """Rows that are shuffled together and held in memory; row groups are permuted over the whole epoch before."""
    split_rows: PositiveInt = 65_536
    """Small row groups are read together up to this many rows; what one worker does at a time."""
    session_column: str | None = None
    """Sessions are shuffled as a whole: neighbouring rows with an equal value here stay together. None: single rows."""
    deduplicate: tuple[str, ...] = ()
    """Sparse features (or patterns of them) that are made, kept and looked up once for neighbouring rows of a session,
    as long as none of the columns that they read changes."""
    memory_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Bound for rows and batches between storage and trainer; none: a quarter of the machine's memory."""
    attempts: PositiveInt = 3
    """How often a split is tried before it counts as corrupt."""
    on_corrupt: Literal["fail", "quarantine"] = "fail"
    """What becomes of a split that cannot be read: an error, or it is left out and its rows are listed and counted."""
    lease_seconds: PositiveFloat = 120.0
    """How long a worker may be silent over one split before it is replaced and the split is done again."""
    restart_limit: NonNegativeInt = 16
    """Workers that are replaced after they died or fell silent; the next one ends the run."""
    ray_address: str | None = None
    """Address of a Ray cluster; none starts one on this machine."""

    @model_validator(mode="after")
    def _sessions_repeat(self) -> Self:
        if self.deduplicate and self.session_column is None:
            raise ConfigError(
                "preprocessing.deduplicate", "preprocessing.session_column beside it",
                "none: rows that are shuffled one by one have nothing in common with their neighbours",
                "Name the column of sessions.",
            )  # fmt: skip
        return self

    @property
    def most_workers(self) -> int:
        """Workers at most, whatever happens."""
        if self.workers != "auto":
            return self.workers
        return self.max_workers or len(psutil.Process().cpu_affinity())

    @property
    def memory(self) -> int:
        """The memory bound in bytes."""
        return self.memory_bytes or psutil.virtual_memory().total // 4

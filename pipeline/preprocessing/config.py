"""PreprocessingConfig."""

import os
from collections.abc import Mapping
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.marks import LEARNED


class PreprocessingConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How rows become batches. Only `shuffle_window_rows` and `session_column` change a model."""

    executor: Literal["inline", "process", "ray"] = "process"
    """Where workers run: `process` on this machine, `ray` on a Ray cluster, `inline` in each rank (for debugging)."""
    transport: Literal["auto", "memory", "network"] = "auto"
    """How batches get from workers to ranks. `memory`: in shared memory of this machine. `network`: each worker keeps
    what it has made and serves it over Arrow Flight. auto: memory, unless workers or ranks run on a Ray cluster."""
    connections: PositiveInt = 32
    """Workers that make batches, with `network`: a rank is connected to these, and stays so. Further workers read rows
    for them, which then travel once more."""
    host: str | None = None
    """This machine's address for workers and ranks of other machines, with `network`. None: the one from which the
    Ray cluster is reached, and without a cluster 127.0.0.1."""
    workers: Literal["auto"] | PositiveInt = "auto"
    """Workers of all ranks together. auto adds workers while the trainer waits and removes idle ones."""
    max_workers: PositiveInt | None = None
    """Upper bound of workers under auto. None: one for each processor core of this machine, or of the Ray cluster."""
    shuffle_window_rows: Annotated[PositiveInt, LEARNED] = 262_144
    """Rows that are shuffled together, in memory. Row groups are permuted over the whole epoch first."""
    split_rows: PositiveInt = 65_536
    """Rows of a work unit, which one worker reads at once. Small row groups are read together up to this many rows."""
    session_column: Annotated[str | None, LEARNED] = None
    """Shuffles sessions as a whole: neighbouring rows with an equal value in this column stay together. A row
    without a value is a session of its own. None shuffles single rows."""
    deduplicate: tuple[str, ...] = ()
    """Sparse features, or patterns of them, that are made, kept and looked up once for neighbouring rows of a session
    while the columns that they read are equal."""
    memory_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Upper bound of the rows and batches between storage and trainer. None: a quarter of the machine's memory."""
    cache_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    """Upper bound of a cache of finished columns, the folder `cache` beside the tables. All runs of the home share it:
    epochs, trials, candidates, policies of a backtest. A column that is there is not read, decoded and transformed
    again. What was used last stays. None: no cache. With `deduplicate`, none is used."""
    attempts: PositiveInt = 3
    """Attempts at a work unit before it counts as corrupt."""
    on_corrupt: Literal["fail", "quarantine"] = "fail"
    """What happens to a row group that cannot be read. `fail` ends the run, and refuses a checkpoint with lost rows.
    `quarantine` skips the row group, lists it and counts its rows."""
    lease_seconds: PositiveFloat = 120.0
    """A worker that is silent for this long on one work unit is replaced, and the unit is repeated."""
    restart_limit: NonNegativeInt = 16
    """Maximum number of workers to replace after they died or hung. One more ends the run."""
    ray_address: str | None = None
    """Address of a Ray cluster. None starts one on this machine."""
    resources: Mapping[str, PositiveFloat] = {}
    """What Ray reserves for each worker besides a processor, such as `{cpu_host: 1}`: name of a resource -> amount.
    Workers run on nodes that have it. Only with executor ray."""
    labels: Mapping[str, str] = {}
    """Labels of the nodes for workers, as in `training.labels`. Only with executor ray."""

    @model_validator(mode="after")
    def _check_sessions(self) -> Self:
        if self.deduplicate and self.session_column is None:
            raise ConfigError(
                "preprocessing.deduplicate", "preprocessing.session_column to be set as well",
                "None: rows that are shuffled one by one have no neighbours of the same session",
                "Set it to the column of sessions.",
            )  # fmt: skip
        return self

    @model_validator(mode="after")
    def _check_transport(self) -> Self:
        if self.executor == "inline" and self.transport == "network":
            raise ConfigError(
                "preprocessing.transport 'network'", "an executor with workers", "inline: each rank reads for itself",
                "Set preprocessing.executor=process or ray.",
            )  # fmt: skip
        return self

    @property
    def uses_network(self) -> bool:
        """Whether batches travel over the network."""
        cluster = self.executor == "ray" and self.ray_address is not None
        return self.transport == "network" or (self.transport == "auto" and cluster)

    @property
    def most_workers(self) -> int:
        """The upper bound of workers."""
        if self.workers != "auto":
            return self.workers
        return self.max_workers or len(os.sched_getaffinity(0))

    @property
    def memory(self) -> int:
        """The memory bound in bytes."""
        return self.memory_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4

"""Results of a study: the measurement of each point and its load."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal, Self

from pydantic import BaseModel

from pipeline.study.points.points import StudyPoint

PHASES = ("embedding", "interaction", "mlp", "communication", "optimizer", "wait", "other")
"""Phases of a step. embedding: lookups and the table update, which is fused with the gradient. communication: ids,
vectors and gradients between ranks. optimizer: the dense optimizer. wait: for the batch. other: the loss, and Python in
between."""


class Spread(BaseModel, frozen=True):
    """Median and range of the repeats."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Summarises at least one value.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.0, high=3.0)
        """
        return cls(median=median(values), low=min(values), high=max(values))


class Load(BaseModel, frozen=True):
    """Work of one step of the global batch, counted from the model and the batches. See `cost.py`."""

    rows: int
    """Rows of the global batch."""
    mlp_flop: float
    """Forward and backward pass of bottom MLP, top MLP and cross layers."""
    interaction_flop: float
    lookups: float
    """Ids looked up."""
    distinct_rows: float
    """Table rows that are updated."""
    embedding_bytes: float
    """Bytes read and written in tables and their optimizer state."""
    dense_bytes: float
    """Bytes read and written for dense weights, gradients, moments and activations."""
    communication_bytes: float
    """Bytes sent between ranks."""
    dense_parameters: int
    sparse_features: int
    layers: int
    """Linear and cross layers."""
    sample_bytes: float
    """Bytes of a row as it reaches the model: dense columns, ids, lengths, label."""
    embedding_width: int
    """Numbers per table row."""
    activation_bytes: float = 0.0
    """The part of `dense_bytes` due to activations."""

    @property
    def flop(self) -> float:
        """Operations of a step."""
        return self.mlp_flop + self.interaction_flop + 2.0 * self.lookups  # last term: lower bound for summing vectors

    @property
    def bytes(self) -> float:
        """Memory traffic of a step."""
        return self.embedding_bytes + self.dense_bytes


class Measurement(BaseModel, frozen=True):
    """Measurement of one point on one machine."""

    rows_per_second: Spread
    step_ms: Spread
    """Time of the slowest rank, including waiting."""
    split_ms: Mapping[str, float]
    """PHASES -> milliseconds of a step on rank 0. They add up to the step."""
    outside_share: float | None
    """Share of a step in Python, outside compiled kernels, by torch.profiler on rank 0. None: unknown."""
    peak_bytes: int
    """Peak resident memory of a rank, including what was there before the point."""
    model_bytes: int
    """Peak resident memory of a rank above its level before the model was built."""
    load: Load
    rows_per_second_per_core: float
    device: str
    repeats: int

    @property
    def gflop_per_second(self) -> float:
        """Operations per time of a step."""
        return 1e-6 * self.load.flop / self.step_ms.median

    @property
    def gb_per_second(self) -> float:
        """Memory traffic per time of a step."""
        return 1e-6 * self.load.bytes / self.step_ms.median

    def share(self, phase: str) -> float:
        """Share of a phase in a step."""
        return self.split_ms.get(phase, 0.0) / (sum(self.split_ms.values()) or 1.0)

    def flat(self) -> dict[str, float]:
        """Returns all numbers by name, as columns in MLflow."""
        spreads = {"rows_per_second": self.rows_per_second, "step_ms": self.step_ms}
        found = {f"{name}_{end}": value for name, one in spreads.items() for end, value in one.model_dump().items()}
        found = {name.removesuffix("_median"): value for name, value in found.items()}
        found |= {f"ms_{phase}": value for phase, value in self.split_ms.items()}
        found |= {"bytes_per_sample": self.load.sample_bytes, "flop_per_sample": self.load.flop / self.load.rows}
        found |= {"gflop_per_second": self.gflop_per_second, "gb_per_second": self.gb_per_second}
        plain = {"outside_share", "peak_bytes", "model_bytes", "rows_per_second_per_core"}
        return found | self.model_dump(include=plain, exclude_none=True)


class PointResult(BaseModel, frozen=True):
    """A point of a study with its outcome."""

    point: StudyPoint
    state: Literal["measured", "left out", "failed"]
    reason: str | None = None
    """Why it was left out or failed."""
    measurement: Measurement | None = None
    quality: Mapping[str, float] | None = None
    """Quality study: `ne` with the learning rates of the config, `tuned_ne` with those of the sweep."""
    mlflow_run_id: str | None = None


class StudyResults(BaseModel, frozen=True):
    """A study with everything that its figures and texts need."""

    name: str
    experiment: str | None
    config: Mapping[str, Any]
    """Config of the study, without the values of the axes."""
    machine: Mapping[str, Any]
    """`machine.Machine` as JSON: processor, cores, memory, ceilings."""
    commit: str
    versions: Mapping[str, str]
    results: tuple[PointResult, ...]

    @property
    def measured(self) -> list[PointResult]:
        """Results that have a measurement."""
        return [result for result in self.results if result.measurement is not None]

    @property
    def measurements(self) -> list[Measurement]:
        """The measurements of these."""
        return [result.measurement for result in self.results if result.measurement is not None]

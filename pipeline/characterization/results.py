"""What is known of a point once it is measured."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any, Literal, Self

from pydantic import BaseModel

from pipeline.characterization.points import StudyPoint

PHASES = ("embedding", "interaction", "mlp", "communication", "optimizer", "wait", "other")
"""Where the time of a step goes. embedding: lookups, and the update of the tables, which is fused with their gradient.
communication: ids, vectors and gradients between ranks. optimizer: of everything but the tables. wait: for the batch.
other: the loss, and Python between all these."""


class Spread(BaseModel, frozen=True):
    """Median of the repeats, and how far they lie apart."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Of at least one value.

        Example:
            >>> Spread.of([3.0, 1.0, 2.0])
            Spread(median=2.0, low=1.0, high=3.0)
        """
        return cls(median=median(values), low=min(values), high=max(values))


class Load(BaseModel, frozen=True):
    """What one step of the global batch asks of a machine, counted from the model and the batches; see `cost.py`."""

    rows: int
    """Rows of the global batch."""
    mlp_flop: float
    """Forward and backward, of bottom MLP, top MLP and cross layers."""
    interaction_flop: float
    lookups: float
    """Ids looked up."""
    distinct_rows: float
    """Rows of tables that are updated."""
    embedding_bytes: float
    """Read and written in tables and their optimizer's state."""
    dense_bytes: float
    """Read and written of weights, gradients and moments of everything but the tables, and of its activations."""
    communication_bytes: float
    """Sent between ranks."""
    dense_parameters: int
    sparse_features: int
    layers: int
    """Linear and cross layers."""
    sample_bytes: float
    """A row as it reaches the model: numbers, ids, lengths, label."""
    embedding_width: int
    """Numbers of a table's row."""
    activation_bytes: float = 0.0
    """Those of `dense_bytes` that are no parameters."""

    @property
    def flop(self) -> float:
        """Of a step."""
        return self.mlp_flop + self.interaction_flop + 2.0 * self.lookups  # the last: lower bound, sums of vectors

    @property
    def bytes(self) -> float:
        """Of a step, to and from memory."""
        return self.embedding_bytes + self.dense_bytes


class Measurement(BaseModel, frozen=True):
    """One point on one machine."""

    rows_per_second: Spread
    step_ms: Spread
    """Of the slowest rank, waiting included."""
    split_ms: Mapping[str, float]
    """PHASES -> milliseconds of a step, on rank 0; they add up to the step."""
    outside_share: float | None
    """Share of a step outside of compiled kernels, that is in Python; by torch.profiler on rank 0. None: not known."""
    peak_bytes: int
    """Largest resident memory of a rank, what the point found there included."""
    model_bytes: int
    """Largest resident memory of a rank above what it had before the model was built."""
    load: Load
    watts: float | None
    """Mean power of the machine's processors or devices meanwhile; None: it cannot be read."""
    rows_per_second_per_core: float
    device: str
    repeats: int

    @property
    def gflop_per_second(self) -> float:
        """Operations of `load` over the time of a step."""
        return 1e-6 * self.load.flop / self.step_ms.median

    @property
    def gb_per_second(self) -> float:
        """Bytes of `load` over the time of a step."""
        return 1e-6 * self.load.bytes / self.step_ms.median

    def flat(self) -> dict[str, float]:
        """All figures by name, as MLflow's columns."""
        spreads = {"rows_per_second": self.rows_per_second, "step_ms": self.step_ms}
        found = {f"{name}_{end}": value for name, one in spreads.items() for end, value in one.model_dump().items()}
        found = {name.removesuffix("_median"): value for name, value in found.items()}
        found |= {f"ms_{phase}": value for phase, value in self.split_ms.items()}
        found |= {"bytes_per_sample": self.load.sample_bytes, "flop_per_sample": self.load.flop / self.load.rows}
        found |= {"gflop_per_second": self.gflop_per_second, "gb_per_second": self.gb_per_second}
        plain = {"outside_share", "peak_bytes", "model_bytes", "watts", "rows_per_second_per_core"}
        found |= self.model_dump(include=plain, exclude_none=True)
        if self.watts:
            found["rows_per_second_per_watt"] = self.rows_per_second.median / self.watts
        return found


class PointResult(BaseModel, frozen=True):
    """A point of a study and what came out."""

    point: StudyPoint
    state: Literal["measured", "left out", "failed"]
    reason: str | None = None
    """Why it was left out or failed."""
    measurement: Measurement | None = None
    quality: Mapping[str, float] | None = None
    """Of a study of quality: `ne` with the config's learning rates, `tuned_ne` with those of its sweep."""
    mlflow_run_id: str | None = None


class StudyResults(BaseModel, frozen=True):
    """A study with all that a figure or a text says of it."""

    name: str
    experiment: str | None
    config: Mapping[str, Any]
    """The study's config, without the axes' values put in."""
    machine: Mapping[str, Any]
    """`machine.Machine` as JSON: processor, cores, memory, ceilings."""
    commit: str
    versions: Mapping[str, str]
    results: tuple[PointResult, ...]

    @property
    def measured(self) -> list[PointResult]:
        """Those with a measurement."""
        return [result for result in self.results if result.measurement is not None]

"""EvaluationConfig and GateConfig: how a model is evaluated, and when it replaces the champion."""

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Literal, Self

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError

BaselineName = Literal["rate", "logistic", "boosting"]


class EvaluationConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """How a model is evaluated."""

    slices: tuple[str, ...] = ()
    """Columns to slice the rows by. A column has at most 1,000 values."""
    slice_values: PositiveInt = 12
    """How many of the most frequent values of a slice column to report."""
    small_slice_rows: NonNegativeInt = 1_000
    """Slices with fewer rows are marked as small, and the gate ignores them: their metrics are mostly noise."""
    level: float = Field(0.05, gt=0.0, lt=0.5)
    """Chance that the interval of a slice's NE misses the true NE."""
    group_by: str | None = None
    """Column to group rows by for GAUC, such as the user's id. Rows without a value are left out of GAUC."""
    true_probability: str | None = None
    """Column with the true probability of the label, if the data has one. Its NE is the floor for every model."""
    importance_rows: PositiveInt | None = 16_384
    """Approximate number of evaluation rows, spread over all, to estimate feature importance on. None: it is not
    estimated."""
    droppable_ne_loss: PositiveFloat = 0.0005
    """A feature could be dropped if the upper bound of its NE loss is below this."""
    baselines: tuple[BaselineName, ...] = ()
    """Simple models to compare with on the same rows, through the same transforms. rate: the mean label of the training
    rows. logistic: logistic regression. boosting: gradient boosting, to which many ids are numbers: their code, and
    rows and mean label of other training rows. They train on at most 200,000 rows; validation rows stop boosting."""
    workers: PositiveInt = 1
    """Processes that score the evaluation rows on this machine. The metrics have the same bits for any number of them.
    On a given Ray cluster, many rows are scored by one process for each of its processors instead."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns to read in addition to the model's."""
        named = [*self.slices, self.true_probability, self.group_by]
        return tuple(dict.fromkeys(name for name in named if name is not None))


def require_installed(baselines: Sequence[BaselineName]) -> None:
    """Refuses baselines that need scikit-learn where it is not installed, before anything trains.

    Raises:
        ConfigError: Names the remedy.
    """
    if set(baselines) - {"rate"} and find_spec("sklearn") is None:
        raise ConfigError(
            "evaluation.baselines", "rate alone without scikit-learn", ", ".join(baselines),
            "Install scikit-learn, or leave out logistic and boosting.",
        )  # fmt: skip


class GateConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a new version replaces the champion."""

    resample_by: str | None = None
    """Unit of resampling: `row`, `day`, or a column such as the user's id. None: `day` from 5 days on, otherwise `row`.
    With `row`, the interval covers no other days. A row without a value in the column is a unit of its own."""
    level: float = Field(0.05, gt=0.0, lt=0.5)
    """Chance that two models of equal quality are called different."""
    rule: Literal["better", "not_worse"] = "better"
    """What a challenger must be with confidence. not_worse: a challenger that may be equal is promoted, too. It suits
    models trained on each new day: a day has too few rows to tell two models apart."""
    least_gain: NonNegativeFloat = 0.0
    """Share of the champion's NE by which the challenger's NE must be lower, such as 0.001."""
    calibration_low: PositiveFloat = 0.8
    """A challenger with a lower calibration beyond chance is rejected. If the champion's is too low on the same rows,
    too, only a challenger that is further off by more than a bound is rejected."""
    calibration_high: PositiveFloat = 1.25
    """The same for a higher calibration."""
    slice_loss: NonNegativeFloat = 0.01
    """Share of a slice's NE that may be lost. A challenger that loses more with confidence is rejected. Small slices
    do not count."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.rule == "not_worse" and self.least_gain:
            raise ConfigError("gate.least_gain with rule=not_worse", "0", f"{self.least_gain:g}", "Leave out one.")
        if self.calibration_low >= self.calibration_high:
            raise ConfigError(
                "gate.calibration_low", f"less than calibration_high, {self.calibration_high}",
                f"{self.calibration_low}", "Correct one of them.",
            )  # fmt: skip
        return self

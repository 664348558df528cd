"""What a model is evaluated by, and when it takes the champion's place."""

from typing import Literal, Self

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt, model_validator

from pipeline.errors import ConfigError


class EvaluationConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What a model is judged by."""

    slices: tuple[str, ...] = ()
    """Columns whose values part the rows into slices; at most 1,000 values each."""
    slice_values: PositiveInt = 12
    """Most frequent values shown of a slice column."""
    small_slice_rows: NonNegativeInt = 1_000
    """Slices of fewer rows are marked as small and do not count for the gate: their numbers are mostly chance."""
    level: float = Field(0.05, gt=0.0, lt=0.5)
    """Chance that the interval of a slice's NE leaves out the truth."""
    group_by: str | None = None
    """Column, such as the user's id, in whose groups rows are ranked for GAUC."""
    true_probability: str | None = None
    """Column with the true probability of the label, where the data has one: its NE is the floor of every model."""
    importance_rows: PositiveInt | None = 16_384
    """About so many evaluation rows, spread over all, say what each feature is worth. None: it is not looked at."""
    droppable_ne_loss: PositiveFloat = 0.0005
    """A feature whose loss costs less NE than this for sure could be dropped."""
    workers: PositiveInt = 1
    """Processes that score the evaluation rows; what they find adds up to the same bits, whoever scored which."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Columns read beside the model's."""
        named = [*self.slices, self.true_probability, self.group_by]
        return tuple(dict.fromkeys(name for name in named if name is not None))


class GateConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """When a new version takes the champion's place."""

    resample_by: str | None = None
    """What is drawn by chance: `row`, `day`, or a column such as the user's id. None: day from 20 days on, else row."""
    level: float = Field(0.05, gt=0.0, lt=0.5)
    """How often two models of equal quality may be called different."""
    rule: Literal["better", "not_worse"] = "better"
    """What a challenger must be beyond chance. not_worse: one whose NE may be equal takes the place, too: for models
    that are trained on each new day, whose few rows can tell two of them apart only rarely."""
    least_gain: NonNegativeFloat = 0.0
    """Share of the champion's NE by which the challenger's must be lower, such as 0.001."""
    calibration_low: PositiveFloat = 0.8
    """A challenger below is rejected, unless the champion is further off."""
    calibration_high: PositiveFloat = 1.25
    slice_loss: NonNegativeFloat = 0.01
    """Share of a slice's NE that may be lost there; more, and beyond chance, rejects. Small slices decide nothing."""

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

"""Outcomes: what becomes a label of an impression, and which of the rows without one are kept."""

from collections.abc import Mapping
from typing import Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.errors import ConfigError
from pipeline.transforms.schema import MOST_WEIGHT, NAME
from storage.reader import DAY

WEIGHT = "sample_weight"
"""Column with the number of impressions that a row stands for, where negatives are thinned out."""


class Outcome(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """One column made of the outcomes of an impression."""

    action: str | None = None
    """Value of `action_column` that counts; None: any outcome does."""
    window_seconds: PositiveInt | None = None
    """Attribution window of its own; None: that of all."""
    take: Literal["any", "count", "sum"] = "any"
    """any: 1 if there is one, else 0. count: how many there are. sum: of `amount`, 0 where there is none."""
    amount: str | None = None
    """Column of numbers that is summed up, with six decimals; what is no number counts as 0."""

    @model_validator(mode="after")
    def _summed(self) -> Self:
        if (self.take == "sum") != (self.amount is not None):
            expected = "`amount` with take=sum, and only there"
            raise ConfigError("source.outcomes.labels", expected, f"take={self.take}", "Correct it.")
        return self


class Outcomes(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A log of outcomes; a feature row with one inside the window gets label 1, the others 0."""

    path: str | tuple[str, ...] | None = None
    """Files of the outcome log; None where the generator writes it."""
    on: str = "impression_id"
    """Column that names the impression in both logs."""
    feature_time: str = "event_time"
    """Timestamp column of the feature log."""
    outcome_time: str = "outcome_time"
    """Timestamp column of the outcome log."""
    window_seconds: PositiveInt = 3_600
    """Attribution window: an outcome counts from the feature row's time on, until this much later."""
    action_column: str = "action"
    """Column of the outcome log that tells kinds of outcomes apart."""
    labels: Mapping[str, Outcome] = {}
    """Column -> the outcomes it is made of, `features.label` among them; none: any outcome makes `features.label` 1."""
    keep_negatives: float | None = Field(default=None, ge=1.0 / MOST_WEIGHT, le=1.0)
    """Share of the impressions without any outcome that is kept; each then stands for several, as column
    `sample_weight` says, which `features.weight` must name. A hash of the key chooses. None: all, without weights."""
    keep_seed: NonNegativeInt = 0
    """Another one keeps other negatives."""

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.feature_time == self.outcome_time == self.on:
            raise ConfigError(
                "source.outcomes", "key and time in different columns", f"'{self.on}' for all", "Correct them."
            )
        for name in self.labels:
            if not NAME.fullmatch(name) or name.startswith("__") or name.lower() in (DAY, WEIGHT):
                expected = f"letters, digits and _, other than {DAY}, {WEIGHT} and __..."
                raise ConfigError("source.outcomes.labels", expected, f"'{name}'", "Rename the label.")
        return self

    def made(self, label: str) -> dict[str, Outcome]:
        """Column -> what it is made of.

        Args:
            label: `features.label`.
        Raises:
            ConfigError: If that is not among them, or not 0 or 1.
        """
        made = dict(self.labels) or {label: Outcome()}
        if label not in made or made[label].take != "any":
            found = "none of that name" if label not in made else f"take={made[label].take}"
            fitting = ", ".join(name for name in made if made[name].take == "any") or "none of them fits"
            raise ConfigError(
                f"source.outcomes.labels, features.label '{label}'", "a label that is 0 or 1", found,
                f"Name one in features.label: {fitting}.",
            )  # fmt: skip
        return made

    def columns(self, label: str) -> list[str]:
        """Columns that the join adds to the feature log: none of them is known when a row is scored."""
        return [*self.made(label), *([] if self.keep_negatives is None else [WEIGHT])]

    def window_of(self, outcome: Outcome) -> int:
        """Seconds of the window of one of them."""
        return outcome.window_seconds or self.window_seconds

    @property
    def longest_seconds(self) -> int:
        """The longest window."""
        return max((self.window_of(outcome) for outcome in self.labels.values()), default=self.window_seconds)

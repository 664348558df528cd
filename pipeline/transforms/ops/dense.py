"""Ops that keep the kind of their values: normalisation, bounds and missing values."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, FiniteFloat, PositiveFloat, model_validator

from pipeline.errors import ConfigError
from pipeline.transforms.ops.op import Counts, Op, as_id

if TYPE_CHECKING:
    from pipeline.transforms.column import Column


class BoxCox(Op):
    """Power transform: x -> ((x + shift)^power - 1) / power, log(x + shift) at power 0.

    Source:
        Box and Cox 1964; arXiv:2108.09373, table 11.
    """

    reads, makes = ("dense",), "dense"
    kind: Literal["box_cox"] = "box_cox"
    power: FiniteFloat
    shift: FiniteFloat = 0.0
    invalid: FiniteFloat = 0.0
    """Replaces an x if x + shift is at or below 0 or infinite. Such values are counted."""

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.dense import box_cox

        (column,) = columns
        values, bad = box_cox(column.values, self.power, self.shift, self.invalid)
        self.count(counts, bad)
        return Column(values)


class Clamp(Op):
    """Limits numbers or ids to [low, high]. Missing values stay missing."""

    reads, makes = ("either",), "same"
    in_place = True
    kind: Literal["clamp"] = "clamp"
    low: FiniteFloat
    high: FiniteFloat

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.low > self.high:
            raise ConfigError("clamp", "low <= high", f"[{self.low}, {self.high}]", "Swap them.")
        return self

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.dense import clamp
        from pipeline.transforms.kernels.sparse import clamp_ids

        (column,) = columns
        if column.offsets is None:
            values, outside = clamp(column.values, self.low, self.high)
            result = Column(values)
        else:
            ids, outside = clamp_ids(column.values, *self.id_bounds)
            result = Column(ids, column.offsets)
        self.count(counts, outside)
        return result

    def ids_below(self, *limits: int | None) -> int | None:
        (limit,) = limits
        low, high = self.id_bounds
        if low < 0 or high < 0:
            return None
        return high + 1 if limit is None else max(min(limit, high + 1), low + 1)

    @property
    def id_bounds(self) -> tuple[int, int]:
        """The bounds for ids: `low` rounded up and `high` rounded down."""
        return as_id(math.ceil(self.low)), as_id(math.floor(self.high))


class FillNull(Op):
    """Replaces a missing number, or a missing or empty list of ids, by a constant."""

    reads, makes = ("either",), "same"
    kind: Literal["fill_null"] = "fill_null"
    value: FiniteFloat = 0.0

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.dense import fill
        from pipeline.transforms.kernels.sparse import fill_lists

        (column,) = columns
        if column.offsets is None:
            values, filled = fill(column.values, self.value)
            result = Column(values)
        else:
            ids, offsets, filled = fill_lists(column.values, column.offsets, as_id(self.value))
            result = Column(ids, offsets)
        self.count(counts, filled)
        return result

    def ids_below(self, *limits: int | None) -> int | None:
        (limit,) = limits
        return None if limit is None or self.value < 0 else max(limit, as_id(self.value) + 1)


class Log(Op):
    """log(1 + x) of a count. An x below 0 becomes 0 and is counted."""

    reads, makes = ("dense",), "dense"
    kind: Literal["log"] = "log"

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        import numpy as np

        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.dense import clamp

        (column,) = columns
        values, outside = clamp(column.values, 0.0, math.inf)
        self.count(counts, outside)
        return Column(np.log1p(values))


class Logit(Op):
    """Log-odds of a probability: p -> log(p / (1 - p)), p limited to [eps, 1 - eps].

    Source:
        Zhao et al. 2022, arXiv:2108.09373, table 11.
    """

    reads, makes = ("dense",), "dense"
    kind: Literal["logit"] = "logit"
    eps: float = Field(default=1e-6, ge=1e-15, lt=0.5)
    invalid: FiniteFloat = 0.0
    """Replaces a p outside [0, 1]. Such values are counted."""

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.dense import logit

        (column,) = columns
        values, bad = logit(column.values, self.eps, self.invalid)
        self.count(counts, bad)
        return Column(values)


class Standardise(Op):
    """x -> (x - mean) / std. Without numbers in the config it learns them from the training rows."""

    reads, makes, learns = ("dense",), "dense", "moments"
    kind: Literal["standardise"] = "standardise"
    mean: FiniteFloat | None = None
    std: PositiveFloat | None = None

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if (self.mean is None) != (self.std is None):
            raise ConfigError(
                "standardise", "both mean and std, or neither", "one of them", "Give the other, or leave both out."
            )
        return self

    @property
    def fitted(self) -> bool:
        """Whether it has its numbers."""
        return self.mean is not None

    def fit(self, mean: float, std: float) -> "Standardise":
        """Returns a fitted op. A constant column is only shifted."""
        return self.model_copy(update={"mean": mean, "std": std if std > 0.0 else 1.0})

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        import numpy as np

        from pipeline.transforms.column import Column

        (column,) = columns
        if self.mean is None or self.std is None:
            raise ConfigError(f"standardise on '{self.output}'", "a fitted mean and std", "none", "Fit the plan first.")
        with np.errstate(over="ignore"):  # the plan counts what is infinite after the last op
            return Column((column.values - self.mean) / self.std)

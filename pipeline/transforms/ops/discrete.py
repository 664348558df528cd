"""Ops that turn a number into an id."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from pipeline.errors import ConfigError
from pipeline.transforms.ops import zones
from pipeline.transforms.ops.op import VALUE, Counts, Index, Op, PerOp, Reads

if TYPE_CHECKING:
    from pipeline.transforms.column import Column

DAY_SECONDS = 86_400
PER_SECOND = {"seconds": 1, "milliseconds": 1_000, "microseconds": 1_000_000}
SECONDS = {"seconds": 1, "minutes": 60, "hours": 3_600}


class Bucketize(Op):
    """Turns a number into the index of its interval: ids 0 to len(borders). A missing number has no id.

    A border belongs to the interval on its left, as in TorchArrow. Without borders in the config it learns them from
    the training rows: the quantiles that split them into intervals of about equally many rows.

    Raises:
        ConfigError: If there are neither borders nor quantiles, or borders that do not increase or are too many.
    Source:
        arXiv:2108.09373, table 11.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> Bucketize(borders=(2, 5, 10)).apply([Column(np.array([1.0, 2.0, 11.0]))], Counts()).values.tolist()
        [0, 0, 3]
    """

    reads, makes, learns = ("dense",), "sparse", "quantiles"
    kind: Literal["bucketize"] = "bucketize"
    borders: Annotated[tuple[FiniteFloat, ...], Field(min_length=1)] | None = None
    """Increasing numbers. None learns them."""
    quantiles: int | None = Field(default=None, ge=2, le=1 << 20)
    """Number of intervals to learn, one more than borders. It bounds the ids even if equal numbers leave fewer."""

    @model_validator(mode="after")
    def _usable(self) -> Self:
        where = "bucketize" if self.output == VALUE else f"bucketize on '{self.inputs[0]}'"
        if self.borders is None:
            if self.quantiles is None:
                raise ConfigError(where, "borders, or quantiles to learn them", "neither", "Give one of them.")
            return self
        if any(a >= b for a, b in zip(self.borders, self.borders[1:], strict=False)):
            raise ConfigError(where, "increasing borders", str(list(self.borders)), "Sort them.")
        if self.quantiles is not None and len(self.borders) >= self.quantiles:
            raise ConfigError(
                where,
                f"at most {self.quantiles - 1} borders for {self.quantiles} quantiles",
                f"{len(self.borders)}",
                "Leave out one of the two.",
            )
        return self

    @property
    def fitted(self) -> bool:
        return self.borders is not None

    def fit(self, borders: tuple[float, ...]) -> "Bucketize":
        """Returns a fitted op. Equal numbers cannot be separated, so there may be fewer borders than requested."""
        return Bucketize.model_validate({**self.model_dump(), "borders": borders})

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        import numpy as np

        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.dense import bucketize

        (column,) = columns
        if self.borders is None:
            raise ConfigError(f"bucketize on '{self.output}'", "fitted borders", "none", "Fit the plan first.")
        return Column(*bucketize(column.values, np.array(self.borders)))

    def ids_below(self, *limits: int | None) -> int | None:
        return len(self.borders or ()) + 1 if self.quantiles is None else self.quantiles


PARTS = {"hour": 24, "weekday": 7, "month": 12}
"""Parts of a local time, in the order of the kernel -> how many there are."""


def _with_offset(op: "GetLocalHour") -> Reads:
    return ("dense",) if op.offset_unit is None else ("dense", "dense")


class GetLocalHour(Op):
    """Turns the time of an event into the hour, 0 to 23, on the user's clock, or another part: a list of one id.

    The first input is the time since 1970-01-01 00:00 UTC. The time zone is one of three: an offset of each row in a
    second input, one offset for all rows, or a zone of the IANA database on this machine, daylight saving time
    included. A missing time or offset has no id. Neither has an invalid time (infinite, beyond 2^53, or in a named
    zone before 1900 or after 2099) or an offset of more than a day. Invalid values are counted.

    Raises:
        ConfigError: If more than one kind of time zone is given, or a zone is not known.
    Source:
        arXiv:2108.09373, table 11.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> noon = Column(np.array([1_720_000_800.0, 1_704_110_400.0]))  # 10:00 UTC in July, 12:00 UTC in January
        >>> GetLocalHour(time_zone="Europe/Berlin").apply([noon], Counts()).values.tolist()
        [12, 13]
        >>> GetLocalHour(part="weekday").apply([noon], Counts()).values.tolist()
        [2, 0]
    """

    reads = PerOp[Reads](("dense",), _with_offset)
    makes = "sparse"
    kind: Literal["get_local_hour"] = "get_local_hour"
    part: Literal["hour", "weekday", "month"] = "hour"
    """weekday: 0 (Monday) to 6. month: 0 (January) to 11."""
    time_unit: Literal["seconds", "milliseconds", "microseconds"] = "seconds"
    """Unit of times that are numbers. Timestamps and dates have their own unit."""
    offset_seconds: int = Field(default=0, ge=-DAY_SECONDS, le=DAY_SECONDS)
    """Local time minus UTC, for all rows: 7200 is UTC+2."""
    offset_unit: Literal["seconds", "minutes", "hours"] | None = None
    """Unit of the second input, local time minus UTC of each row. None: there is no second input."""
    time_zone: str | None = None
    """A zone of the IANA database for all rows, such as Europe/Berlin. None uses the offset."""

    @model_validator(mode="after")
    def _one_zone(self) -> Self:
        given = {"offset_seconds": self.offset_seconds, "offset_unit": self.offset_unit, "time_zone": self.time_zone}
        chosen = [name for name, value in given.items() if value]
        where = f"get_local_hour on '{self.output}'"
        if len(chosen) > 1:
            raise ConfigError(where, "one kind of time zone", " and ".join(chosen), "Leave out the others.")
        if self.time_zone is not None:
            zones.check_zone(where, self.time_zone)
        return self

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        import numpy as np

        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.dense import local_hours

        time, *shifts = columns
        table = (
            zones.fixed_offset(self.offset_seconds) if self.time_zone is None else zones.zone_offsets(self.time_zone)
        )
        shift = shifts[0].values if shifts else np.empty(0)
        unit, per_second = SECONDS[self.offset_unit or "seconds"], PER_SECOND[self.time_unit]
        ids, offsets, bad = local_hours(
            time.values, per_second, shift, unit, table.since, table.offsets, table.until, list(PARTS).index(self.part)
        )
        self.count(counts, bad)
        return Column(ids, offsets)

    def ids_below(self, *limits: int | None) -> int | None:
        return PARTS[self.part]


class Onehot(Op):
    """Turns a whole number in [0, size) into an id. Its table row is the product of a one-hot vector and the table.

    A missing number has no id. Any other number (negative, too large, a fraction, infinite) is counted.

    Source:
        arXiv:2108.09373, table 11.
    Example:
        >>> import numpy as np
        >>> from pipeline.transforms.column import Column
        >>> Onehot(size=3).apply([Column(np.array([2.0, 0.0, 3.0]))], Counts()).values.tolist()
        [2, 0]
    """

    reads, makes = ("dense",), "sparse"
    kind: Literal["onehot"] = "onehot"
    size: int = Field(gt=0, le=1 << 53)
    """Classes, numbered from 0."""
    invalid: Index | None = None
    """Id of any other number. `size` gives them an id of their own, None no id."""

    def apply(self, columns: Sequence["Column"], counts: Counts) -> "Column":
        from pipeline.transforms.column import Column
        from pipeline.transforms.kernels.dense import onehot

        (column,) = columns
        invalid = -1 if self.invalid is None else self.invalid
        ids, offsets, bad = onehot(column.values, self.size, invalid)
        self.count(counts, bad)
        return Column(ids, offsets)

    def ids_below(self, *limits: int | None) -> int | None:
        return self.size if self.invalid is None else max(self.size, self.invalid + 1)

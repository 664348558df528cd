"""Disjoint train, validation and test splits, as configs."""

import datetime
from typing import Annotated, Literal, Self

from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, NonNegativeInt, PositiveInt, model_validator

from pipeline.errors import ConfigError

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")
DayText = Annotated[str, BeforeValidator(str)]  # YAML reads 2013-01-31 as a date


class DaysSplit(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Days by name: dates, or ranges such as 2013-01-01..2013-01-31 with both ends included."""

    train: tuple[DayText, ...] = Field(min_length=1)
    valid: tuple[DayText, ...] = ()
    test: tuple[DayText, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        spans = [(part, text, *day_span(text)) for part in PARTS for text in getattr(self, part)]
        for i, (part, text, first, last) in enumerate(spans):
            for other, other_text, other_first, other_last in spans[:i]:
                if part != other and first <= other_last and other_first <= last:
                    raise ConfigError(
                        f"split.days.{part} '{text}'",
                        f"days outside split.days.{other}",
                        f"'{other_text}', which shares days",
                        "Every row may be in one part only. Change one of them.",
                    )
        return self


class NthDaySplit(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Day of the year modulo n. Days that are neither valid nor test train."""

    n: PositiveInt
    valid: NonNegativeInt | None = None
    test: NonNegativeInt

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        if self.valid == self.test or max(self.valid or 0, self.test) >= self.n:
            given = f"{self.test}" if self.valid is None else f"{self.valid} and {self.test}"
            raise ConfigError("split.every_nth_day", f"different remainders below {self.n}", given, "Change them.")
        return self


class ColumnSplit(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """A text column with the part of each row."""

    name: str
    train: str = "train"
    valid: str | None = "valid"
    test: str = "test"

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        if len({self.train, self.valid, self.test}) < 3:
            raise ConfigError(
                "split.column", "three different values", f"{self.train}, {self.valid}, {self.test}", "Change one."
            )
        return self


class HashSplit(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Rows with the same key stay together. A stable hash assigns keys to parts.

    Rows without a value in any key column are not one key. Each goes to a part by its place among the rows that the
    filter passes. Writing a day anew, or another filter, may move them to other parts, but not the rows with a key.
    """

    key: str | tuple[str, ...]
    """Integer or text column such as the user, or several columns that form the key together."""
    shares: dict[Part, FiniteFloat]
    """Share of the keys in each part. The sum is at most 1."""
    days: tuple[DayText, ...] = ()
    """Dates, or ranges such as 2013-01-01..2013-01-31, to take rows from. Empty: all days."""

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        shares = self.shares.values()
        if not {"train", "test"} <= self.shares.keys() or min(shares) <= 0.0 or sum(shares) > 1.0 + 1e-9:
            raise ConfigError(
                "split.hash.shares",
                "positive shares of train and test with a sum of at most 1",
                f"{self.shares}",
                "Correct them.",
            )
        if not self.columns:
            raise ConfigError("split.hash.key", "at least one column", "none", "Name one.")
        return self

    @property
    def last_day(self) -> datetime.date | None:
        """The last of `days`, or None without days."""
        return max((day_span(text)[1] for text in self.days), default=None)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns of the key."""
        return (self.key,) if isinstance(self.key, str) else self.key


class SplitConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """One of four ways to split the rows."""

    days: DaysSplit | None = None
    every_nth_day: NthDaySplit | None = None
    column: ColumnSplit | None = None
    hash: HashSplit | None = None
    open_days: bool = False
    """Whether open days are used. Their attribution windows end after the newest outcome of the log, so their labels
    may still change. If false, a split that names an open day is refused, and any other split leaves them out."""

    @model_validator(mode="after")
    def _one(self) -> Self:
        kinds = ("days", "every_nth_day", "column", "hash")
        given = [name for name in kinds if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                "split", "one of days, every_nth_day, column, hash", f"{given or 'none'}", "Give exactly one."
            )
        return self


def day_span(text: str) -> tuple[datetime.date, datetime.date]:
    """Returns the first and last day of a date or a range.

    Raises:
        ConfigError: If the text is neither, or the range is reversed.
    Example:
        >>> day_span("2013-01-01..2013-01-31")
        (datetime.date(2013, 1, 1), datetime.date(2013, 1, 31))
    """
    first, dots, last = text.partition("..")
    try:
        span = datetime.date.fromisoformat(first), datetime.date.fromisoformat(last if dots else first)
    except ValueError:
        raise ConfigError(
            "split.days", "dates like 2013-01-31 or 2013-01-01..2013-01-31", f"'{text}'", "Correct it."
        ) from None
    if span[0] > span[1]:
        raise ConfigError("split.days", "the earlier day first", f"'{text}'", "Swap the days.")
    return span

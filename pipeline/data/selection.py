"""Which rows train, which stop the training, which judge it: a split that no row crosses."""

import datetime
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, Self

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel, BeforeValidator, Field, FiniteFloat, NonNegativeInt, PositiveInt, model_validator
from pyiceberg.expressions import And, BooleanExpression, EqualTo
from pyiceberg.expressions.parser import parse
from pyiceberg.expressions.visitors import bind
from pyiceberg.schema import Schema
from pyiceberg.types import IntegerType, LongType

from pipeline.errors import ConfigError, EmptyDatasetError, closest_names
from pipeline.transforms.column import sparse_from_arrow
from pipeline.transforms.kernels import hashing
from pipeline.transforms.kernels.row_hashes import row_hashes
from pipeline.transforms.ops.sampling import Sampling
from pipeline.transforms.schema import absent
from storage.arrow import is_list, is_text

Part = Literal["train", "valid", "test"]
PARTS: tuple[Part, ...] = ("train", "valid", "test")
HASH_BITS = 20
HASH_STEPS = 1 << HASH_BITS
"""Shares of a hash split are rounded to this many steps."""


DayText = Annotated[str, BeforeValidator(str)]  # YAML reads 2013-01-31 as a date


class DaysSplit(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Days by name: dates, or ranges such as 2013-01-01..2013-01-31, both ends included."""

    train: tuple[DayText, ...] = Field(min_length=1)
    valid: tuple[DayText, ...] = ()
    test: tuple[DayText, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        spans = [(part, text, *_span(text)) for part in PARTS for text in getattr(self, part)]
        for i, (part, text, first, last) in enumerate(spans):
            for other, other_text, other_first, other_last in spans[:i]:
                if part != other and first <= other_last and other_first <= last:
                    raise ConfigError(
                        f"split.days.{part} '{text}'",
                        f"days outside split.days.{other}",
                        f"'{other_text}', which shares days",
                        "Every row may be in one part only; change one of them.",
                    )
        return self


class NthDaySplit(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """Day of the year modulo n; what is neither valid nor test trains."""

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
    """A text column that names the part of each row."""

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
    """Rows of one key stay together; keys are dealt out by a stable hash."""

    key: str | tuple[str, ...]
    """Integer or text column, such as the user; several together name what is dealt out, such as one row."""
    shares: dict[Part, FiniteFloat]
    """Share of the keys of each part; together at most 1."""
    days: tuple[DayText, ...] = ()
    """Dates, or ranges such as 2013-01-01..2013-01-31, that the rows are of; none: all days."""

    @model_validator(mode="after")
    def _disjoint(self) -> Self:
        shares = self.shares.values()
        if not {"train", "test"} <= self.shares.keys() or min(shares) <= 0.0 or sum(shares) > 1.0 + 1e-9:
            raise ConfigError(
                "split.hash.shares",
                "positive shares of train and test, all together at most 1",
                f"{self.shares}",
                "Correct them.",
            )
        if not self.columns:
            raise ConfigError("split.hash.key", "at least one column", "none", "Name one.")
        return self

    @property
    def last_day(self) -> datetime.date | None:
        """The last of `days`; None where none are named."""
        return max((_span(text)[1] for text in self.days), default=None)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that make up the key."""
        return (self.key,) if isinstance(self.key, str) else self.key


class SplitConfig(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """One of four ways to part the rows."""

    days: DaysSplit | None = None
    every_nth_day: NthDaySplit | None = None
    column: ColumnSplit | None = None
    hash: HashSplit | None = None

    @model_validator(mode="after")
    def _one(self) -> Self:
        given = [name for name in type(self).model_fields if getattr(self, name) is not None]
        if len(given) != 1:
            raise ConfigError(
                "split", "one of days, every_nth_day, column, hash", f"{given or 'none'}", "Give exactly one."
            )
        return self


class Selection(BaseModel, frozen=True):
    """Rows of one part: whole days, thinned by a filter and a range of key hashes."""

    days: tuple[datetime.date, ...]
    filter: str | None = None
    """Row filter of the user, an Iceberg expression."""
    equals: tuple[str, str] | None = None
    """A text column and the value it must have."""
    hash_keys: tuple[str, ...] = ()
    hash_range: tuple[int, int] = (0, HASH_STEPS)
    sampling: Sampling | None = None
    """Keeps a share of the rows that all else selects."""

    @property
    def exact(self) -> bool:
        """Whether every row of the days is selected, so that metadata alone counts them."""
        return (self.filter, self.equals, self.hash_keys, self.sampling) == (None, None, (), None)

    def expression(self) -> BooleanExpression | None:
        """What Iceberg can filter."""
        parts = [parse(self.filter)] if self.filter else []
        if self.equals is not None:
            parts.append(EqualTo(*self.equals))  # type: ignore[call-arg, arg-type]  # pydantic hides its signature
        return And(*parts) if len(parts) > 1 else parts[0] if parts else None

    def key_columns(self) -> list[str]:
        """Columns that `keep` reads."""
        sampled = self.sampling.inputs if self.sampling is not None else ()
        return list(dict.fromkeys([*self.hash_keys, *sampled]))

    def keep(self, rows: pa.Table) -> pa.Table:
        """Rows whose key falls into the range and which the sampling keeps."""
        if self.hash_keys:
            low, high = self.hash_range
            steps = hash_steps(*(rows.column(name).combine_chunks() for name in self.hash_keys))
            rows = rows.filter(pa.array((steps >= low) & (steps < high)))
        if self.sampling is not None:
            keys = [sparse_from_arrow(name, rows.column(name).combine_chunks()) for name in self.sampling.inputs]
            rows = rows.filter(pa.array(self.sampling.keep(keys)))
        return rows


def hash_steps(*keys: pa.Array) -> npt.NDArray[np.int64]:
    """Stable hash of each row's key in [0, HASH_STEPS); a null key of one column gives 0.

    Args:
        keys: Columns of as many rows each; several are hashed as one sequence.
    Raises:
        ConfigError: If a row can have more than one key.
    """
    for key in keys:
        if pa.types.is_nested(key.type):
            raise ConfigError("split.hash.key", "an integer or text column", f"{key.type}", "Name another column.")
    columns = [sparse_from_arrow("split.hash.key", key) for key in keys]
    if len(columns) > 1:
        return (row_hashes(columns, 1) >> np.uint64(64 - HASH_BITS)).astype(np.int64)
    (column,) = columns
    assert column.offsets is not None
    steps = np.zeros(len(column), np.int64)
    steps[np.diff(column.offsets) > 0] = hashing.sigrid_hash(column.values, 1, HASH_STEPS)
    return steps


def select(
    split: SplitConfig,
    part: Part,
    days: Sequence[datetime.date],
    row_filter: str | None,
    sampling: Sampling | None = None,
) -> Selection | None:
    """The rows of a part among the days of a snapshot; None where the split has no such part.

    Args:
        sampling: Thins the part that trains; models are judged by all rows.
    Raises:
        EmptyDatasetError: If a day named is not in the snapshot, or no day is left.
    """
    if not days:
        raise EmptyDatasetError("split", "days to part", "a table without rows", "Ingest some days.")
    chosen: list[datetime.date] = list(days)
    equals: tuple[str, str] | None = None
    keys: tuple[str, ...] = ()
    span = (0, HASH_STEPS)
    if split.days is not None:
        chosen = _named_days(getattr(split.days, part), f"split.days.{part}", days)
        if not chosen and part == "valid":
            return None
    elif split.every_nth_day is not None:
        nth = split.every_nth_day
        if part == "valid" and nth.valid is None:
            return None
        part_of = {nth.test: "test", nth.valid: "valid"}
        chosen = [day for day in days if part_of.get(day.timetuple().tm_yday % nth.n, "train") == part]
    elif split.column is not None:
        value = getattr(split.column, part)
        if value is None:
            return None
        equals = (split.column.name, value)
    elif split.hash is not None:
        if part not in split.hash.shares:
            return None
        keys, span = split.hash.columns, _hash_range(split.hash, part)
        if split.hash.days:
            chosen = _named_days(split.hash.days, "split.hash.days", days)
    if not chosen:
        raise EmptyDatasetError(
            f"split, part '{part}'", "at least one day", f"none of {len(days)} days", "Change the split."
        )
    return Selection(
        days=tuple(chosen),
        filter=row_filter,
        equals=equals,
        hash_keys=keys,
        hash_range=span,
        sampling=sampling if part == "train" else None,
    )


def days_between(
    rows: Mapping[datetime.date, int], start: datetime.date | None, end: datetime.date | None, what: str
) -> dict[datetime.date, int]:
    """Days of a table, both ends included, with their rows.

    Args:
        start: None: the first day.
        end: None: the last one.
        what: The days as an error names them.
    Raises:
        EmptyDatasetError: If there is none.
    """
    found = {day: rows[day] for day in rows if (start is None or start <= day) and (end is None or day <= end)}
    if not found:
        span = f"days among {min(rows)} to {max(rows)}" if rows else "a table with days"
        asked = f"{start or 'the first'} to {end or 'the last'}"
        raise EmptyDatasetError(what, span, f"none from {asked}", "Change start and end.")
    return found


def share_rows(one: Selection, other: Selection) -> bool:
    """Whether rows may be in both selections; what filter and sampling leave out is not looked at."""
    if not set(one.days) & set(other.days):
        return False
    if one.equals and other.equals and one.equals[0] == other.equals[0] and one.equals[1] != other.equals[1]:
        return False
    low, high = zip(one.hash_range, other.hash_range, strict=True)
    return one.hash_keys != other.hash_keys or max(low) < min(high)


def check_sampling(sampling: Sampling, table: pa.Schema) -> None:
    """Refuses keys that the table does not have or that cannot be compared.

    Raises:
        ConfigError: If a key is absent, or neither integers nor text.
    """
    for name in sampling.inputs:
        if name not in table.names:
            raise absent("sampling.inputs", name, table.names)
        kind = table.field(name).type
        value = kind.value_type if is_list(kind) else kind
        text = is_text(value)
        if not (text or pa.types.is_integer(value) or pa.types.is_boolean(value)):
            raise ConfigError(f"sampling.inputs '{name}'", "integers or text", f"{kind}", "Name another column.")


def check_filter(row_filter: str, schema: Schema | None) -> None:
    """Refuses what is not a plain comparison of columns with constants.

    Raises:
        ConfigError: If the text does not parse, names a column that the table does not have, or compares it with a
            constant of another type.
    """
    where = f"filter '{row_filter:.200}'"
    try:
        expression = parse(row_filter)
    except Exception as error:  # the parser raises its own and the grammar library's kinds
        at = getattr(error, "loc", None)
        rest = row_filter[at : (at or 0) + 40].strip()
        raise ConfigError(
            where,
            "comparisons of columns with constants, joined by and, or, not",
            f"{error}".rstrip(".") if at is None else f"'{rest}' at character {at + 1}" if rest else "an open end",
            "Write it like \"country = 'DE' and age >= 18\".",
        ) from None
    if schema is not None:
        for comparison in _comparisons(expression):
            _check_comparison(where, comparison, schema)


def _comparisons(expression: Any) -> list[Any]:
    """The comparisons that and, or, not join."""
    joined = [getattr(expression, side) for side in ("left", "right", "child") if hasattr(expression, side)]
    return [leaf for inner in joined for leaf in _comparisons(inner)] if joined else [expression]


def _check_comparison(where: str, comparison: Any, schema: Schema) -> None:
    if not hasattr(comparison, "term"):  # true or false
        return
    name = comparison.term.name
    if name not in schema.column_names:
        close = closest_names(name, schema.column_names)
        raise ConfigError(where, "columns of the table", f"'{name}'", f"Closest: {close}. Correct the name.")
    kind = schema.find_type(name)
    literals = comparison.literals if hasattr(comparison, "literals") else [getattr(comparison, "literal", None)]
    constants = [literal.value for literal in literals if literal is not None]
    shown = sorted(f"'{value}'" if isinstance(value, str) else str(value) for value in constants)
    try:
        bind(schema, comparison, case_sensitive=True)
        # pyiceberg would round 1.5 to 2 beside an integer column: another filter than the one written
        fits = not isinstance(kind, IntegerType | LongType) or all(float(value).is_integer() for value in constants)
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise ConfigError(
            where,
            f"what can be compared with '{name}', which is {kind}",
            ", ".join(shown) or "another test",
            "Write numbers bare, text and dates in single quotes.",
        )


def _hash_range(split: HashSplit, part: Part) -> tuple[int, int]:
    before = sum(split.shares.get(other, 0.0) for other in PARTS[: PARTS.index(part)])
    return round(before * HASH_STEPS), round((before + split.shares[part]) * HASH_STEPS)


def _named_days(texts: Sequence[str], where: str, days: Sequence[datetime.date]) -> list[datetime.date]:
    chosen: set[datetime.date] = set()
    for text in texts:
        first, last = _span(text)
        found = [day for day in days if first <= day <= last]
        if not found:
            raise EmptyDatasetError(
                f"{where} '{text}'",
                f"days of the table, {min(days)} to {max(days)}",
                "no such day",
                "Ingest the day, or name another.",
            )
        chosen.update(found)
    return sorted(chosen)


def _span(text: str) -> tuple[datetime.date, datetime.date]:
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

"""Selects the rows of the train, validation and test parts, which are disjoint."""

import datetime
from collections.abc import Collection, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pydantic import BaseModel
from pyiceberg.expressions import And, BooleanExpression, EqualTo

from pipeline.data.config import PARTS, HashSplit, Part, SplitConfig, day_span
from pipeline.errors import ConfigError, DataError, EmptyDatasetError
from pipeline.transforms.column import Column, from_arrow, sparse_from_arrow
from pipeline.transforms.kernels import hashing
from pipeline.transforms.kernels.row_hashes import missing_keys, row_hashes
from pipeline.transforms.ops.sampling import Sampling
from pipeline.transforms.plan.schedule import single_array
from pipeline.transforms.schema import unknown_column
from storage.arrow import is_list, is_text
from storage.filters import parse_filter
from storage.reader import Fragment
from storage.snapshot.row_filter import RowChoice

HASH_BITS = 20
HASH_STEPS = 1 << HASH_BITS
"""Shares of a hash split are rounded to this many steps."""
PLACE_SEED = 1 << 40
"""Seed of the places of rows without a key. No sampling has it by chance, which would choose rows by the same hash."""


class Selection(BaseModel, frozen=True):
    """Rows of one part: whole days, reduced by a filter, a range of key hashes and sampling."""

    days: tuple[datetime.date, ...]
    filter: str | None = None
    """The user's row filter, an Iceberg expression."""
    equals: tuple[str, str] | None = None
    """A text column and its required value."""
    hash_keys: tuple[str, ...] = ()
    hash_range: tuple[int, int] = (0, HASH_STEPS)
    sampling: Sampling | None = None
    """Keeps a share of the rows that the other criteria select."""

    @property
    def exact(self) -> bool:
        """Whether all rows of the days are selected. Then metadata alone counts them."""
        return (self.filter, self.equals, self.hash_keys, self.sampling) == (None, None, (), None)

    def expression(self) -> BooleanExpression | None:
        """Returns the part of the selection that Iceberg can filter."""
        parts = [parse_filter(self.filter)] if self.filter else []
        if self.equals is not None:
            parts.append(EqualTo(*self.equals))  # type: ignore[call-arg]  # pydantic hides its signature
        return And(*parts) if len(parts) > 1 else parts[0] if parts else None

    def key_columns(self) -> list[str]:
        """Returns the columns that `keep` reads."""
        sampled = self.sampling.inputs if self.sampling is not None else ()
        return list(dict.fromkeys([*self.hash_keys, *sampled]))

    def choice(self, fragment: Fragment) -> RowChoice | None:
        """Returns the choice among the rows of a fragment that pass the filter. None: all of them."""
        keys = self.key_columns()
        return RowChoice(keys, lambda rows, first: self.mask(rows, fragment, first)) if keys else None

    def keep(self, rows: pa.Table, fragment: Fragment | None = None, first: int = 0) -> pa.Table:
        """Filters rows by `mask`, with the same arguments."""
        keys = rows.select(self.key_columns()).combine_chunks()
        mask = self.mask(keys, fragment, first)
        return rows if mask.all() else rows.filter(pa.array(mask))

    def mask(
        self, rows: pa.RecordBatch | pa.Table, fragment: Fragment | None = None, first: int = 0
    ) -> npt.NDArray[np.bool_]:
        """Tells which rows are in the range of key hashes and in the sample, bool [N].

        Rows without any key are no group: each is on its own, by its place in the table.

        Args:
            rows: Columns `key_columns()` of them.
            fragment: Where the rows are from. None: rows without any sampling key count as one key.
            first: How many of its rows passed the filter before.
        """
        mask = np.ones(rows.num_rows, bool)
        place = None
        if fragment is not None:  # not by the file's name: the same in every copy of the table
            place = ((fragment.day.toordinal() << 16) + fragment.row_group << 24) + first
        if self.hash_keys:
            low, high = self.hash_range
            keys = [single_array(rows.column(name)) for name in self.hash_keys]
            steps = hash_steps(*keys, place=first if place is None else place)
            mask &= (steps >= low) & (steps < high)
        if self.sampling is not None:
            drawn = [sparse_from_arrow(name, single_array(rows.column(name))) for name in self.sampling.inputs]
            mask &= self.sampling.keep(drawn, place=place)
        return mask


def hash_steps(*keys: pa.Array, place: int | None = None) -> npt.NDArray[np.int64]:
    """Hashes each row's key to a stable value in [0, HASH_STEPS).

    Args:
        keys: Columns of equal length. Several are hashed as one sequence, in which a fraction or a time is a number.
        place: Of the first row; those of the others follow. A row without any key is hashed by its place. None: all
            of them have one value, which is 0 for a single column.
    Raises:
        ConfigError: If a column is nested.
    """
    for key in keys:
        if pa.types.is_nested(key.type):
            raise ConfigError("split.hash.key", "an integer or text column", f"{key.type}", "Name another column.")
    columns = [from_arrow("split.hash.key", key, "dense" if _is_number(key.type) else "sparse") for key in keys]
    if len(columns) > 1 or columns[0].offsets is None:
        steps = _to_steps(row_hashes(columns, 1))
    else:
        steps = np.zeros(len(columns[0]), np.int64)
        steps[np.diff(columns[0].offsets) > 0] = hashing.sigrid_hash(columns[0].values, 1, HASH_STEPS)
    if place is not None and len(missing := missing_keys(columns)):
        steps[missing] = _to_steps(row_hashes([Column(place + missing)], PLACE_SEED))
    return steps


def _to_steps(hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    return (hashes >> np.uint64(64 - HASH_BITS)).astype(np.int64)


def _is_number(kind: pa.DataType) -> bool:
    return pa.types.is_floating(kind) or pa.types.is_timestamp(kind) or pa.types.is_decimal(kind)


def select(
    split: SplitConfig,
    part: Part,
    days: Sequence[datetime.date],
    row_filter: str | None,
    sampling: Sampling | None = None,
    open_days: Collection[datetime.date] = (),
) -> Selection | None:
    """Selects the rows of a part from the days of a snapshot. Returns None if the split does not have the part.

    Args:
        sampling: Samples the train part. Models are evaluated on all rows.
        open_days: Days with labels that may still change. They are left out unless the split allows them.
    Raises:
        ConfigError: If the split names an open day and does not allow it.
        EmptyDatasetError: If a named day is not in the snapshot, or no day is left.
    """
    if not days:
        raise EmptyDatasetError("split", "days to split", "a table without rows", "Write some to it first.")
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
    if not split.open_days:
        if split.days is not None or (split.hash is not None and split.hash.days):
            _refuse_open(part, [day for day in chosen if day in open_days])
        chosen = [day for day in chosen if day not in open_days]
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


def _refuse_open(part: Part, days: Sequence[datetime.date]) -> None:
    if days:
        more = f" and {len(days) - 1} more" if len(days) > 1 else ""
        raise ConfigError(
            f"split, part '{part}'", "closed days", f"{days[0]}{more}, still open",
            "Ingest again once the outcome log has grown, name earlier days, or set split.open_days=true.",
        )  # fmt: skip


def days_between(
    rows: Mapping[datetime.date, int], start: datetime.date | None, end: datetime.date | None, what: str
) -> dict[datetime.date, int]:
    """Returns the days of a table between two days, both included, with their row counts.

    Args:
        start: None for the first day.
        end: None for the last day.
        what: The days as an error names them.
    Raises:
        EmptyDatasetError: If there are none.
    """
    found = {day: rows[day] for day in rows if (start is None or start <= day) and (end is None or day <= end)}
    if not found:
        span = f"days among {min(rows)} to {max(rows)}" if rows else "a table with days"
        requested = f"{start or 'the first'} to {end or 'the last'}"
        raise EmptyDatasetError(what, span, f"none from {requested}", "Change start and end.")
    return found


def share_rows(one: Selection, other: Selection) -> bool:
    """Tells whether two selections may share rows. Ignores filters and sampling."""
    if not set(one.days) & set(other.days):
        return False
    if one.equals and other.equals and one.equals[0] == other.equals[0] and one.equals[1] != other.equals[1]:
        return False
    low, high = zip(one.hash_range, other.hash_range, strict=True)
    return one.hash_keys != other.hash_keys or max(low) < min(high)


def check_sampling(sampling: Sampling, table: pa.Schema) -> None:
    """Checks that the table has the sampling keys in comparable types.

    Raises:
        ConfigError: If a key is missing, or is neither integers nor text.
    """
    for name in sampling.inputs:
        if name not in table.names:
            raise unknown_column("sampling.inputs", name, table.names)
        kind = table.field(name).type
        value = kind.value_type if is_list(kind) else kind
        text = is_text(value)
        if not (text or pa.types.is_integer(value) or pa.types.is_boolean(value)):
            raise ConfigError(f"sampling.inputs '{name}'", "integers or text", f"{kind}", "Name another column.")


def _hash_range(split: HashSplit, part: Part) -> tuple[int, int]:
    before = sum(split.shares.get(other, 0.0) for other in PARTS[: PARTS.index(part)])
    return round(before * HASH_STEPS), round((before + split.shares[part]) * HASH_STEPS)


def _named_days(texts: Sequence[str], where: str, days: Sequence[datetime.date]) -> list[datetime.date]:
    chosen: set[datetime.date] = set()
    for text in texts:
        first, last = day_span(text)
        found = [day for day in days if first <= day <= last]
        if not found:
            raise EmptyDatasetError(
                f"{where} '{text}'",
                f"days of the table, {min(days)} to {max(days)}",
                "no such day",
                "Write the day to the table, or name another.",
            )
        chosen.update(found)
    return sorted(chosen)


def require_row_count(read: int, pinned: int | None, data: str) -> None:
    """Requires that a whole pass read as many rows as were pinned.

    Args:
        data: Names the rows in the error.
    Raises:
        DataError: If they differ.
    """
    if pinned is not None and read != pinned:
        raise DataError(
            f"rows of {data}", f"the {pinned} rows that were pinned", f"{read} in a pass over all of them",
            "Do not use this result. Write the days to the table again, and report this as a bug.",
        )  # fmt: skip

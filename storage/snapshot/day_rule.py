"""How the rows of a table tell their day: by a partition, by the bounds of a file, or row by row."""

import datetime
import re
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from typing import Any, NoReturn
from zoneinfo import ZoneInfo

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyiceberg.conversions import from_bytes
from pyiceberg.expressions import And, BooleanExpression, GreaterThanOrEqual, In, LessThan
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.manifest import DataFile
from pyiceberg.partitioning import PartitionSpec
from pyiceberg.schema import Schema
from pyiceberg.transforms import DayTransform, HourTransform, IdentityTransform, VoidTransform
from pyiceberg.types import (
    DateType,
    IntegerType,
    LongType,
    NestedField,
    PrimitiveType,
    StringType,
    TimestampType,
    TimestamptzType,
)

from storage.config import DAY, TableConfig
from storage.errors import StorageError

EPOCH = datetime.date(1970, 1, 1)
DAY_ID = 2_147_483_000
"""Field id of the column `day` in tables that know a row's day by another column."""
ISO_DAY = re.compile(r"\d{4}(-?)\d\d\1\d\d(?!\d)")
"""Start of days and times in text, and of days in numbers, unless a format is given."""
KINDS = (DateType, StringType, IntegerType, LongType, TimestampType, TimestamptzType)
DayNumbers = npt.NDArray[np.int32]
"""Days since 1970-01-01."""


class DayRule:
    """How the rows of a table tell their day.

    Args:
        name: What errors call the table.
        schema: Schema of the table.
        config: The column of the day, and how it is read.
    Raises:
        StorageError: If there is no such column, or none of a type that tells a day, or another one is named `day`.
    """

    def __init__(self, name: str, schema: Schema, config: TableConfig | None) -> None:
        self.name = name
        column = DAY if config is None else config.day_column
        field = next((field for field in schema.fields if field.name == column), None)
        kinds = (DateType,) if config is None else KINDS
        if field is None or not isinstance(field.field_type, kinds):
            _refuse_column(name, schema, column, config)
        if config is not None:
            _refuse_other_day(schema, field, config)
        self.column, self.id, self.kind = column, field.field_id, field.field_type
        self._arrow = schema_to_pyarrow(Schema(field)).field(0).type
        self._formats = () if config is None else config.date_format or ()
        self._zone = ZoneInfo("UTC" if config is None else config.day_zone)
        self.signature = f"{self.id} {self._zone.key} {' '.join(self._formats)}"
        """What decides the day of a row, in a text."""
        self._day_of_value = lru_cache(4_096)(self._parse_value)

    @property
    def stored(self) -> bool:
        """Whether the table has the column `day` itself."""
        return self.column == DAY and isinstance(self.kind, DateType)

    def schema(self, schema: Schema) -> Schema:
        """Returns a schema of the table with the column `day`."""
        if self.stored:
            return schema
        day = NestedField(DAY_ID, DAY, DateType(), required=False)
        return Schema(*(field for field in schema.fields if field.name != DAY), day)

    def of_partition(self, spec: PartitionSpec, file: DataFile) -> datetime.date | None:
        """Returns the one day of a partition. None: it does not tell one.

        Raises:
            StorageError: If its rows have no day, or text that is none.
        """
        for place, field in enumerate(spec.fields):
            value: Any = file.partition[place]
            if field.source_id != self.id or isinstance(field.transform, VoidTransform):
                continue
            if value is None:
                self._refuse_null(file.file_path, file.record_count)
            if isinstance(field.transform, IdentityTransform):
                return self._day_of_value(value)
            in_utc = not isinstance(self.kind, TimestamptzType) or self._zone.key == "UTC"
            if isinstance(field.transform, DayTransform) and in_utc:
                return value if isinstance(value, datetime.date) else EPOCH + datetime.timedelta(days=int(value))
            if isinstance(field.transform, HourTransform):
                hour = 3_600_000_000  # microseconds
                first, last = (self._day_of_value(int(value) * hour + within) for within in (0, hour - 1))
                return first if first == last else None
        return None

    def of_bounds(self, file: DataFile) -> datetime.date | None:
        """Returns the one day of a file by the smallest and the largest value in it. None: they do not tell one."""
        bounds = [(found or {}).get(self.id) for found in (file.lower_bounds, file.upper_bounds)]
        nulls = (file.null_value_counts or {}).get(self.id)
        if nulls != 0 or any(bound is None for bound in bounds) or not isinstance(self.kind, PrimitiveType):
            return None
        ordered = isinstance(self.kind, DateType | TimestampType | TimestamptzType)
        if not ordered and bounds[0] != bounds[1]:
            return None
        try:
            first, last = (self._day_of_value(from_bytes(self.kind, bound)) for bound in bounds if bound is not None)
        except (StorageError, ValueError):  # text may be cut short
            return None
        return first if first == last else None

    def of_values(self, values: pa.Array | pa.ChunkedArray, path: str) -> DayNumbers:
        """Returns the day of each value.

        Args:
            path: File of the values.
        Raises:
            StorageError: If a value is null, or tells no day.
        """
        if values.null_count:
            self._refuse_null(path, values.null_count)
        values = values.combine_chunks() if isinstance(values, pa.ChunkedArray) else values
        try:
            days: DayNumbers = self._to_days(values).cast(pa.int32()).to_numpy(zero_copy_only=False)
        except (pa.ArrowException, OverflowError) as error:
            raise self._no_day(str(error).split("\n")[0].rstrip(".")) from error
        for day in (days.min(initial=0), days.max(initial=0)):
            self.date_of(int(day))
        return days

    def date_of(self, number: int) -> datetime.date:
        """Returns a day by its number since 1970-01-01. Raises StorageError if Python's calendar lacks it."""
        try:
            return EPOCH + datetime.timedelta(days=number)
        except OverflowError:
            raise self._no_day(f"day {number} after 1970-01-01") from None

    def _no_day(self, found: str) -> StorageError:
        return StorageError(
            f"column '{self.column}' of table '{self.name}'", "days between the years 1 and 9999", found,
            "Correct the rows with the engine that wrote them.",
        )  # fmt: skip

    def condition(self, days: Collection[datetime.date]) -> BooleanExpression | None:
        """Returns a filter for planning that rows of some days pass, and maybe others. None: all rows pass it."""
        if not days:
            return None
        if isinstance(self.kind, DateType):
            return _is_one_of(self.column, [day.isoformat() for day in sorted(days)])
        if isinstance(self.kind, TimestampType | TimestamptzType):
            zone = self._zone if isinstance(self.kind, TimestamptzType) else None
            ends = (min(days), max(days) + datetime.timedelta(days=1))
            first, end = (datetime.datetime.combine(day, datetime.time(), zone).isoformat() for day in ends)
            return And(GreaterThanOrEqual(self.column, first), LessThan(self.column, end))  # type: ignore[call-arg]
        return None  # text may be written without leading zeros

    def _parse_value(self, value: Any) -> datetime.date:
        """Returns the day of a value of the column, as Iceberg's metadata has it."""
        if isinstance(self.kind, DateType) and isinstance(value, int):
            return self.date_of(value)
        return self.date_of(int(self.of_values(pa.array([value], self._arrow), "")[0]))

    def _to_days(self, values: pa.Array) -> pa.Array:
        if isinstance(self.kind, DateType):
            return values.cast(pa.date32())
        if isinstance(self.kind, TimestamptzType):
            values = pc.local_timestamp(values.cast(pa.timestamp("us", self._zone.key), safe=False))
        if isinstance(self.kind, TimestampType | TimestamptzType):
            return pc.floor_temporal(values.cast(pa.timestamp("us"), safe=False), unit="day").cast(pa.date32())
        distinct = values.cast(pa.large_string()).dictionary_encode()
        days = pa.array([self._parse_text(text) for text in distinct.dictionary.to_pylist()], pa.date32())
        return days.take(distinct.indices)

    def _parse_text(self, text: str) -> datetime.date:
        for form in self._formats:
            with suppress(ValueError):
                return datetime.datetime.strptime(text, form).date()
        if not self._formats and ISO_DAY.match(text):
            with suppress(ValueError):
                found = datetime.datetime.fromisoformat(text)
                return (found if found.tzinfo is None else found.astimezone(self._zone)).date()
        raise StorageError(
            f"column '{self.column}' of table '{self.name}'",
            f"days of the form {' or '.join(self._formats) or '2025-01-31, 2025-01-31 10:00:00 or 20250131'}",
            f"'{text}'", "Set source.date_format.",
        )  # fmt: skip

    def _refuse_null(self, path: str, rows: int) -> NoReturn:
        raise StorageError(
            f"file '{path}' of table '{self.name}'", "a day in each row", f"{rows} rows without one",
            "Delete them with the engine that wrote them.",
        )  # fmt: skip


def _is_one_of(column: str, values: Sequence[str] | Sequence[int]) -> BooleanExpression:
    return In(column, values)  # type: ignore[call-arg]


def days_filter(days: Iterable[datetime.date]) -> BooleanExpression:
    """Builds a filter for rows of some days."""
    return _is_one_of(DAY, [day.isoformat() for day in sorted(days)])


def _refuse_other_day(schema: Schema, field: NestedField, config: TableConfig) -> None:
    """Refuses a column that our column `day` would hide. One of dates is another calendar's day of the row."""
    for other in schema.fields:
        same = other is field or (other.name == DAY and isinstance(other.field_type, DateType))
        if other.name.lower() == DAY and not same:
            raise StorageError(
                f"column '{other.name}' of table '{config.table}'",
                f"another name than {DAY}, the day of a row by '{field.name}'", f"one of type {other.field_type}",
                f"Set source.day_column={other.name} if it tells the day; else rename it in the table.",
            )  # fmt: skip


def _refuse_column(name: str, schema: Schema, column: str, config: TableConfig | None) -> NoReturn:
    alike = [f"'{one.name}' {one.field_type}" for one in schema.fields if one.name.lower() == column.lower()]
    if config is None:
        raise StorageError(
            f"table '{name}'", f"a column `{DAY}` of type date", ", ".join(alike) or "no column of that name",
            "Read it as it is, with source.table and source.day_column.",
        )  # fmt: skip
    raise StorageError(
        f"source.day_column of table '{config.table}'", "a column of dates, timestamps, text or whole numbers",
        ", ".join(alike) or f"no column '{column}', columns: {', '.join(field.name for field in schema.fields[:20])}",
        "Name the column that tells the day of a row.",
    )  # fmt: skip

"""Tells from the statistics of row groups which of them have no row that passes a filter."""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.conversions import to_bytes
from pyiceberg.expressions import BooleanExpression
from pyiceberg.manifest import DataFile
from pyiceberg.schema import Schema
from pyiceberg.types import (
    BooleanType,
    DateType,
    DoubleType,
    FloatType,
    IntegerType,
    LongType,
    NestedField,
    StringType,
    TimestampType,
    TimestamptzType,
)

from storage.snapshot.pyiceberg_private import MetricsEvaluator
from storage.snapshot.row_filter import settle

STORED_AS = {DateType: pa.int32(), TimestampType: pa.int64(), TimestamptzType: pa.int64()}
"""Types that Iceberg stores as numbers."""
ORDERED = (BooleanType, DoubleType, FloatType, IntegerType, LongType, StringType, *STORED_AS)
"""Types of which the smallest and the largest value are used."""


class FileColumn(NamedTuple):
    """A column of a data file."""

    name: str
    kind: pa.DataType


class GroupFilter:
    """Decides from a Parquet footer whether a row group may have rows that pass a filter.

    Iceberg's own evaluator of a file's metrics decides, given the metrics of one row group. What is not known excludes
    nothing: a row group without statistics, of an unknown type, or with bounds that do not fit the table's type may
    match. Parquet's bounds leave out NaN, which passes no comparison but `!=` and `not in`, and the evaluator excludes
    nothing for these two. False statistics give false answers.

    Args:
        schema: Columns of the table.
        row_filter: The filter. Compares some of them.
        columns: Name -> type that the reader gives the column, for those that the filter compares.
    """

    def __init__(self, schema: Schema, row_filter: BooleanExpression, columns: Mapping[str, pa.DataType]) -> None:
        self._evaluator = MetricsEvaluator(schema, settle(row_filter))
        self._fields = {name: (schema.find_field(name), kind) for name, kind in columns.items()}

    def may_match(self, group: pq.RowGroupMetaData, stored: Mapping[str, FileColumn | None]) -> bool:
        """Tells whether a row group may have rows that pass. False: it certainly has none.

        Args:
            stored: Column of the table -> that of the file, or None if all its values are null. Others are unknown.
        """
        rows = group.num_rows
        chunks = {chunk.path_in_schema: chunk for chunk in map(group.column, range(group.num_columns))}
        nulls: dict[int, int] = {}
        bounds: dict[int, tuple[bytes, bytes]] = {}
        for name, (field, kind) in self._fields.items():
            if name not in stored or not field.field_type.is_primitive:
                continue
            column = stored[name]
            if column is None:
                nulls[field.field_id] = rows
                continue
            chunk = chunks.get(column.name)
            statistics = chunk.statistics if chunk is not None and chunk.is_stats_set else None
            if statistics is None or pa.types.is_nested(column.kind):
                continue
            if statistics.has_null_count:
                nulls[field.field_id] = statistics.null_count
            found = _find_bounds(statistics, field, column.kind, kind)
            if found is not None:
                bounds[field.field_id] = found
        return self._evaluator.eval(
            DataFile.from_args(
                record_count=rows,
                value_counts=dict.fromkeys(nulls, rows),
                null_value_counts=nulls,
                nan_value_counts={},
                lower_bounds={number: lower for number, (lower, _) in bounds.items()},
                upper_bounds={number: upper for number, (_, upper) in bounds.items()},
            )
        )


def _find_bounds(
    statistics: pq.Statistics, field: NestedField, stored: pa.DataType, kind: pa.DataType
) -> tuple[bytes, bytes] | None:
    """Returns the smallest and the largest value in the table's type, as Iceberg stores them. None: unknown."""
    if not isinstance(field.field_type, ORDERED) or not statistics.has_min_max:
        return None
    try:
        values = pa.array([statistics.min, statistics.max], stored).cast(kind)
        plain = STORED_AS.get(type(field.field_type))
        lower, upper = (values if plain is None else values.cast(plain)).to_pylist()
        if isinstance(lower, float):
            if math.isnan(lower) or math.isnan(upper):
                return None
            lower, upper = _widen(lower, upper, kind)
        return to_bytes(field.field_type, lower), to_bytes(field.field_type, upper)
    except (pa.ArrowException, ValueError, TypeError, OverflowError):  # text that was cut inside a letter, year 10000
        return None


def _widen(lower: float, upper: float, kind: pa.DataType) -> tuple[float, float]:
    """Moves bounds apart by one step of their type.

    The filter rounds 0.1 to the type of a float column, while the evaluator compares with 0.1 itself.
    """
    number: Any = kind.to_pandas_dtype()
    return float(np.nextafter(number(lower), number(-np.inf))), float(np.nextafter(number(upper), number(np.inf)))

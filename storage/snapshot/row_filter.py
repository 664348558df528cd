"""Applies a row filter, which is an Iceberg expression, to rows in memory."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow.acero import Declaration, ProjectNodeOptions, TableSourceNodeOptions
from pyiceberg.expressions import (
    And,
    BooleanExpression,
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNaN,
    LessThan,
    LessThanOrEqual,
    Not,
    NotEqualTo,
    NotIn,
    NotNull,
    Or,
)
from pyiceberg.expressions.visitors import bind, extract_field_ids
from pyiceberg.io.pyarrow import expression_to_pyarrow
from pyiceberg.schema import Schema


class RowChoice(NamedTuple):
    """A choice among the rows that pass the filter."""

    columns: Sequence[str]
    """What it looks at."""
    choose: Callable[[pa.RecordBatch, int], npt.NDArray[np.bool_]]
    """Given rows, and how many of their fragment passed the filter before: which of them to keep."""


def make_mask(row_filter: BooleanExpression, schema: Schema) -> tuple[pc.Expression, list[str]]:
    """Returns the mask of a filter and the columns that it compares.

    Nulls follow SQL, and numbers IEEE 754, as `settle` says.

    Raises:
        ValueError: If the filter does not match the columns. TypeError: The same.
    """
    bound = bind(schema, _drop_nulls(settle(row_filter)), case_sensitive=True)
    used = [str(schema.find_column_name(number)) for number in sorted(extract_field_ids(bound))]
    return expression_to_pyarrow(bound, schema), used


def settle(expression: BooleanExpression, negated: bool = False) -> BooleanExpression:
    """Returns a filter without `not` that means the same to whoever applies it: to rows or to statistics.

    A comparison with null is not true, and neither is its opposite. 0 equals -0, also in a list. NaN is not equal to,
    below or above any number, so it passes `!=`, `not in` and the opposite of every comparison that it does not pass.

    Args:
        negated: Returns the opposite.
    """
    if isinstance(expression, Not):
        return settle(expression.child, not negated)
    if isinstance(expression, And | Or):
        joined = Or if isinstance(expression, And) == negated else And
        return joined(settle(expression.left, negated), settle(expression.right, negated))
    if negated and isinstance(expression, LessThan | LessThanOrEqual | GreaterThan | GreaterThanOrEqual):
        return Or(~expression, IsNaN(expression.term))  # type: ignore[call-arg]  # pydantic hides its signature
    return _compare_zeros(~expression if negated else expression)


def _compare_zeros(expression: BooleanExpression) -> BooleanExpression:
    """Takes zeros out of lists. Arrow's `is_in` looks at bits, and so tells 0 from -0."""
    if not isinstance(expression, In | NotIn):
        return expression
    zeros = {one for one in expression.literals if one.value == 0}
    if not zeros:
        return expression
    others, zero = expression.literals - zeros, next(iter(zeros))
    if isinstance(expression, In):
        return Or(In(expression.term, others), EqualTo(expression.term, zero))  # type: ignore[call-arg]
    return And(NotIn(expression.term, others), NotEqualTo(expression.term, zero))  # type: ignore[call-arg]


def compared_columns(expression: BooleanExpression | None) -> list[str]:
    """Returns the names of the columns that an unbound expression compares."""
    inner = [getattr(expression, side) for side in ("left", "right", "child") if hasattr(expression, side)]
    if inner:
        return [name for part in inner for name in compared_columns(part)]
    term: Any = getattr(expression, "term", None)
    return [] if term is None else [term.name]


def _drop_nulls(expression: BooleanExpression) -> BooleanExpression:
    """Lets `not in` fail for nulls. Arrow's `is_in` is false for null, so its opposite would be true."""
    if isinstance(expression, And | Or):
        return type(expression)(_drop_nulls(expression.left), _drop_nulls(expression.right))
    if not isinstance(expression, NotIn):
        return expression
    return And(NotNull(expression.term), expression)  # type: ignore[call-arg]  # pydantic hides its signature


def find_rows(rows: pa.RecordBatch, keep: pc.Expression | None) -> pa.BooleanArray | None:
    """Returns which rows a filter keeps. None: all of them.

    Computing the mask alone takes a third of the time of `Table.filter`, which starts threads for 8,192 rows.
    """
    if keep is None:
        return None
    source = Declaration("table_source", TableSourceNodeOptions(pa.Table.from_batches([rows])))
    project = Declaration("project", ProjectNodeOptions([keep], ["kept"]))
    found = Declaration.from_sequence([source, project]).to_table(use_threads=False).column("kept").combine_chunks()
    return None if found.true_count == len(rows) else found


def keep_rows(rows: pa.RecordBatch, keep: pc.Expression | None, columns: list[str]) -> pa.RecordBatch:
    """Selects columns of the rows that a filter keeps. None keeps all rows."""
    mask = find_rows(rows, keep)
    return rows.select(columns) if mask is None else rows.select(columns).filter(mask)


def choose_rows(
    rows: pa.RecordBatch, mask: pa.BooleanArray | None, choice: RowChoice, before: int
) -> tuple[pa.BooleanArray | None, int]:
    """Narrows a mask by a choice.

    Args:
        mask: Rows that pass the filter. None: all.
        before: How many rows of the fragment passed the filter before.
    Returns:
        The rows that also pass the choice, None for all, and `before` for the rows after these.
    """
    passing = rows.select(list(choice.columns))
    passing = passing if mask is None else passing.filter(mask)
    chosen = choice.choose(passing, before)
    before += len(passing)
    if chosen.all():
        return mask, before
    if mask is None:
        return pa.array(chosen), before
    found = mask.fill_null(False).to_numpy(zero_copy_only=False).copy()
    found[found] = chosen
    return pa.array(found), before

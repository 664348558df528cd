"""Parses and checks row filters, which compare columns with constants.

Configs import this module, so it imports pyiceberg only when there is a filter.
"""

import re
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from storage.errors import ConfigError, closest_names

if TYPE_CHECKING:
    from pyiceberg.expressions import BooleanExpression
    from pyiceberg.schema import Schema


POWERS = re.compile(
    r"""'(?:[^']|'')*'|"[^"]*"|(?<![\w.])((?:\d{1,99}\.?\d{0,99}|\.\d{1,99})[eE][+-]?\d{1,3})(?![\w.])"""
)
"""Matches texts and quoted names, and, as its group, numbers with a power of ten."""


def parse_filter(row_filter: str) -> "BooleanExpression":
    """Parses an Iceberg expression. Raises what pyiceberg raises."""
    from pyiceberg.expressions.parser import parse

    return parse(_write_out(row_filter))


def _write_out(row_filter: str) -> str:
    """Returns a filter whose numbers have no exponent, which pyiceberg's parser does not know.

    Example:
        >>> _write_out("x < 1.5e3 and y1e5 > 2E-3 and z = '1e9'")
        "x < 1500 and y1e5 > 0.002 and z = '1e9'"
    """
    return POWERS.sub(lambda found: f"{Decimal(found[1]):f}" if found[1] else found[0], row_filter)


def check_filter(row_filter: str, schema: "Schema | None") -> None:
    """Checks that a filter compares columns with constants.

    Raises:
        ConfigError: If the text does not parse, names a column that the table does not have, or compares it with a
            constant of another type.
    """
    where = f"filter '{row_filter:.200}'"
    try:
        expression = parse_filter(row_filter)
    except Exception as error:  # the parser raises its own and the grammar library's kinds
        at = getattr(error, "loc", None)
        rest = _write_out(row_filter)[at : (at or 0) + 40].strip()
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
    """Returns the comparisons joined by and, or, not."""
    joined = [getattr(expression, side) for side in ("left", "right", "child") if hasattr(expression, side)]
    return [leaf for inner in joined for leaf in _comparisons(inner)] if joined else [expression]


def _check_comparison(where: str, comparison: Any, schema: "Schema") -> None:
    from pyiceberg.expressions.visitors import bind
    from pyiceberg.types import IntegerType, LongType

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
        # bind rounds 1.5 to 2 for an integer column, which is not the filter that was written
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

"""What a column may be called and what a row may weigh: the rules that several stages share."""

import re
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
"""Names of features and embedding tables, matched as a whole: PyTorch refuses a module name with a dot."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-4, 1e4
"""Bounds of a row's weight. GAUC counts weights in steps of 0.0001."""
TRAILING_DAYS = 7
"""How many earlier days a column's statistics are compared with, unless the config says otherwise."""


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]
"""One name or several."""

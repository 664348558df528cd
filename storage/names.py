"""What a column may be called, what a row may weigh, which times belong together: rules that several stages share."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from storage.errors import ConfigError

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
"""Names of features and embedding tables, matched as a whole: PyTorch refuses a module name with a dot."""
LEAST_WEIGHT, MOST_WEIGHT = 1e-4, 1e4
"""Bounds of a row's weight. GAUC counts weights in steps of 0.0001."""
MOST_SECONDS = 100 * 365 * 86_400
"""Longest delay of a feature source, and longest window."""
TRAILING_DAYS = 7
"""How many earlier days a column's statistics are compared with, unless the config says otherwise."""


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Format = Literal["auto", "parquet", "csv", "json", "avro", "criteo"]
"""Format of files. auto: as a file's name says."""
Names = Annotated[tuple[str, ...], BeforeValidator(_listed), Field(min_length=1)]
"""One name or several."""


def without_folders(path: str | Sequence[str] | None) -> list[str]:
    """Returns the last parts of one path or several: what an identity takes of them, wherever the files lie.

    Example:
        >>> without_folders("/data/clicks/*.parquet"), without_folders(["s3://logs/a.csv", "b.csv"])
        (['*.parquet'], ['a.csv', 'b.csv'])
    """
    return [one.rpartition("/")[2] for one in ([path] if isinstance(path, str) else path or ())]


def require_both_times(where: str, valid_from: str | None, as_of: str | None, delay_seconds: int) -> None:
    """Refuses the time of a source without that of the rows, the opposite, and a delay without them."""
    if (as_of is None) != (valid_from is None):
        raise ConfigError(where, "`as_of` together with `valid_from`", "one of them", "Add the other one.")
    if delay_seconds and as_of is None:
        raise ConfigError(where, "`as_of` with `delay_seconds`", "none", "Name the column of the rows' time.")

"""How configs name features in maps: `ids[42..80]` are the columns `ids_42` to `ids_80`. Imports nothing heavy."""

import re
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING

from storage.errors import StorageError

if TYPE_CHECKING:
    import pyarrow as pa

SPELLED = re.compile(r"([A-Za-z_]\w*)\[(\d+(?:\.\.\d+)?(?:,\s*\d+(?:\.\.\d+)?)*)\]")
"""`dense[17]`, `ids[42..80]` or `ids[1, 5..7]`."""
SCORES = "_scores"
"""Suffix of the column with the scores of a scored list, `map<int, map<bigint, float>>`."""
KEY = re.compile(rf"(.+)_(\d+)({SCORES})?")
"""A column that is a key of a map."""
MOST_KEYS = 10_000
"""Keys that one spelling may name."""


def expand_keys(pattern: str, known: Iterable[str], maps: Iterable[str]) -> list[str]:
    """Returns the columns that a spelling such as `ids[42..80]` names, else the pattern as it is.

    Args:
        known: Names of the table's columns. A table whose maps were flattened has the columns themselves.
        maps: Names of its maps.
    Raises:
        StorageError: If the keys are too many or descend.
    Example:
        >>> expand_keys("ids[1, 5..7]", [], ["ids"])
        ['ids_1', 'ids_5', 'ids_6', 'ids_7']
        >>> expand_keys("int_[12]", ["int_1", "int_2"], [])
        ['int_[12]']
    """
    found = SPELLED.fullmatch(pattern)
    if found is None:
        return [pattern]
    keys: list[int] = []
    for part in found[2].split(","):
        first, _, last = part.strip().partition("..")
        span = range(int(first), int(last or first) + 1)
        if not 0 < len(span) <= MOST_KEYS - len(keys):
            raise StorageError(
                f"columns '{pattern}'", f"1 to {MOST_KEYS} ascending keys", part.strip(), "Correct the keys."
            )
        keys += span
    names = [f"{found[1]}_{key}" for key in keys]
    return names if found[1] in maps or not set(names).isdisjoint(known) else [pattern]


def is_key(name: str, maps: Collection[str]) -> bool:
    """Tells whether a name or a spelling means keys of a map.

    Example:
        >>> [is_key(name, ["ids"]) for name in ("ids_7", "ids[1..9]", "ids", "cat_7")]
        [True, True, False, False]
    """
    return map_of(name) in maps


def map_of(name: str) -> str | None:
    """Returns the map of which a name or a spelling may mean keys. None: it can mean none.

    Example:
        >>> [map_of(name) for name in ("ids_7", "ids[1..9]", "ids")]
        ['ids', 'ids', None]
    """
    found = SPELLED.fullmatch(name) or KEY.fullmatch(name)
    return None if found is None else found[1]


def map_names(schema: "pa.Schema") -> list[str]:
    """Returns the names of the maps in a table."""
    import pyarrow as pa

    return [field.name for field in schema if pa.types.is_map(field.type)]

"""Columns of features in maps: the key 17 of the map `dense` is the column `dense_17`."""

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyiceberg.schema import Schema
from pyiceberg.types import (
    DoubleType,
    FloatType,
    IcebergType,
    IntegerType,
    ListType,
    LongType,
    MapType,
    NestedField,
    PrimitiveType,
)

from storage.keys import KEY

FIRST_ID = 2_147_400_000
"""Field ids of columns that a table has as keys of maps."""


class MapKey(NamedTuple):
    """A column that is a key of a map."""

    field: int
    """Field id of the map."""
    key: int
    scores: bool
    """Whether the column has the scores of the list, not its ids."""
    kind: IcebergType


def map_fields(schema: Schema) -> dict[str, NestedField]:
    """Returns the maps of a table by name."""
    return {field.name: field for field in schema.fields if isinstance(field.field_type, MapType)}


def find_keys(schema: Schema, names: Iterable[str]) -> dict[str, MapKey]:
    """Returns those of the names that are keys of a map. A stored column of the name may exist, too."""
    maps = map_fields(schema)
    found = {}
    for name in names if maps else ():
        parts = KEY.fullmatch(name)
        if parts is None or parts[1] not in maps:
            continue
        field = maps[parts[1]]
        kind = _kind_of(field.field_type, parts[3] is not None)
        if kind is not None:
            found[name] = MapKey(field.field_id, int(parts[2]), parts[3] is not None, kind)
    return found


def _kind_of(kind: IcebergType, scores: bool) -> IcebergType | None:
    """Returns the type of a key's column. None: no feature is read from such a map."""
    assert isinstance(kind, MapType)
    value = kind.value_type
    if not isinstance(kind.key_type, IntegerType | LongType):
        return None
    if isinstance(value, MapType):
        ids, numbers = value.key_type, value.value_type
        if isinstance(ids, IntegerType | LongType) and isinstance(numbers, FloatType | DoubleType):
            return ListType(FIRST_ID - 1, numbers if scores else ids, False)
        return None
    if scores:
        return None
    if isinstance(value, ListType) and isinstance(value.element_type, PrimitiveType):
        return ListType(FIRST_ID - 1, value.element_type, False)
    return value if isinstance(value, PrimitiveType) else None


def add_keys(schema: Schema, names: Iterable[str]) -> Schema:
    """Returns a schema with those of the names that are keys of a map and no columns yet."""
    known = set(schema.column_names)
    keys = {name: key for name, key in find_keys(schema, dict.fromkeys(names)).items() if name not in known}
    added = [NestedField(FIRST_ID + i, name, key.kind, required=False) for i, (name, key) in enumerate(keys.items())]
    return Schema(*schema.fields, *added) if added else schema


class MapEntries:
    """The entries of a map in some rows, ordered by key.

    Args:
        values: The map of each row. A key is unique in a row.
    """

    def __init__(self, values: pa.MapArray) -> None:
        values = pa.concat_arrays([values])  # a slice's entries would begin at its offset
        lengths = np.diff(values.offsets.to_numpy())
        keys = values.keys.to_numpy(zero_copy_only=False)
        self.count, self.items = len(values), values.items
        self._rows = np.repeat(np.arange(self.count), lengths)
        order = np.argsort(keys, kind="stable")
        if values.null_count:
            order = order[values.is_valid().to_numpy(zero_copy_only=False)[self._rows[order]]]
        self._order, self._keys = order, keys[order]

    def keys(self) -> npt.NDArray[np.int64]:
        """Returns the keys of all entries, ascending."""
        return self._keys.astype(np.int64)

    def column(self, key: int, scores: bool) -> pa.Array:
        """Returns the value of a key in each row, null where a row lacks it."""
        begin, end = np.searchsorted(self._keys, [key, key + 1])
        entries = self._order[begin:end]
        places = np.full(self.count, -1)
        places[self._rows[entries]] = entries
        found = self.items.take(pa.array(places, mask=places < 0))
        if not pa.types.is_map(found.type):
            return found
        found = pa.concat_arrays([found])
        return pa.ListArray.from_arrays(found.offsets, found.items if scores else found.keys, mask=found.is_null())

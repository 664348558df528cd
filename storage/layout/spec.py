"""How the files of a table are laid out: its settings stand in the table, for every writer to see."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from pydantic import BaseModel, NonNegativeInt, PositiveInt, ValidationError, model_validator

from storage.arrow import is_list
from storage.errors import StorageError

CODECS = ("zstd", "lz4", "snappy", "gzip", "uncompressed")
ROW_GROUP_ROWS = "write.parquet.row-group-limit"
CODEC = "write.parquet.compression-codec"
PAGE_BYTES = "write.parquet.page-size-bytes"
DICTIONARY_BYTES = "write.parquet.dict-size-bytes"
OWN = "dlrm.layout."
"""Begin of the properties that Iceberg has no name for; other engines keep them and look past them."""


class Layout(BaseModel, frozen=True, extra="forbid", use_attribute_docstrings=True):
    """What decides how rows become files, beside the order of the table's columns."""

    codec: str = "zstd"
    """Compression of columns that `codecs` does not name."""
    codecs: Mapping[str, str] = {}
    """Column -> compression."""
    first: tuple[str, ...] = ()
    """Columns that stand first in the files, side by side; the table's schema keeps its order, which models go by."""
    plain: tuple[str, ...] = ()
    """Columns written without a dictionary."""
    row_group_rows: PositiveInt = 65_536
    """Rows of a row group."""
    file_rows: PositiveInt = 262_144
    """Rows held in memory while writing; a day of more rows becomes several files."""
    page_bytes: PositiveInt = 1_048_576
    """Size of a data page before compression."""
    dictionary_bytes: PositiveInt = 2_097_152
    """A column chunk whose dictionary grows beyond this goes on without one."""
    order_by: tuple[str, ...] = ()
    """Columns that the rows of a file are sorted by, such as a session; of a day with several files, each of them."""
    gap_bytes: NonNegativeInt = 65_536
    """On an object store, columns that lie no further apart than this are read together."""

    @model_validator(mode="after")
    def _known_codecs(self) -> "Layout":
        for where, codec in {"codec": self.codec, **self.codecs}.items():
            if codec not in CODECS:
                raise ValueError(f"codec of '{where}': expected one of {', '.join(CODECS)}, got '{codec}'.")
        return self

    def properties(self) -> dict[str, str]:
        """The layout as table properties; `of` reads them back."""
        columns: dict[str, list[str]] = {}
        for name, codec in sorted(self.codecs.items()):
            if codec != self.codec:
                columns.setdefault(codec, []).append(name)
        return {
            CODEC: self.codec,
            ROW_GROUP_ROWS: str(self.row_group_rows),
            PAGE_BYTES: str(self.page_bytes),
            DICTIONARY_BYTES: str(self.dictionary_bytes),
            f"{OWN}codecs": json.dumps(columns),
            f"{OWN}first": json.dumps(self.first),
            f"{OWN}plain": json.dumps(sorted(self.plain)),
            f"{OWN}file-rows": str(self.file_rows),
            f"{OWN}order-by": json.dumps(self.order_by),
            f"{OWN}gap-bytes": str(self.gap_bytes),
        }

    @staticmethod
    def of(properties: Mapping[str, str], defaults: "Layout") -> "Layout":
        """The layout that a table's properties name; what they leave open is as in `defaults`.

        Raises:
            StorageError: If a property holds what it cannot mean.
        """
        keys = {"codec": CODEC, "row_group_rows": ROW_GROUP_ROWS, "page_bytes": PAGE_BYTES}
        keys |= {"dictionary_bytes": DICTIONARY_BYTES, "file_rows": f"{OWN}file-rows", "gap_bytes": f"{OWN}gap-bytes"}
        values: dict[str, Any] = {name: properties[key] for name, key in keys.items() if key in properties}
        values["codec"] = values.get("codec", defaults.codec).lower()
        if values["codec"] not in CODECS:  # that of another engine, which we have no name for
            values["codec"] = defaults.codec
        try:
            for name in ("first", "plain", "order_by"):
                key = OWN + name.replace("_", "-")
                if key in properties:
                    values[name] = tuple(json.loads(properties[key]))
            if f"{OWN}codecs" in properties:
                columns = json.loads(properties[f"{OWN}codecs"])
                values["codecs"] = {name: codec for codec, names in columns.items() for name in names}
            return Layout.model_validate({**defaults.model_dump(), **values})
        except (ValueError, TypeError, AttributeError) as error:
            found = error.errors()[0]["msg"] if isinstance(error, ValidationError) else str(error)
            raise StorageError(
                "layout in the table's properties", "values as `flows.layout` writes them",
                found.removeprefix("Value error, ").rstrip("."), "Correct the property, or apply a layout anew.",
            ) from error  # fmt: skip

    @staticmethod
    def gap_of(properties: Mapping[str, str]) -> int:
        """`gap_bytes` of a table: all that its readers need to know."""
        given = properties.get(f"{OWN}gap-bytes", "")
        return int(given) if given.isdecimal() else Layout().gap_bytes

    def in_order(self, names: Sequence[str]) -> list[str]:
        """Columns of a table as they follow one another in its files."""
        there = set(names)
        return list(dict.fromkeys([*(name for name in self.first if name in there), *names]))

    @property
    def mark(self) -> str:
        """Stands for the layout of files: equal marks, equal layouts. A table may gain columns under the same one."""
        kept = self.properties() | {f"{OWN}gap-bytes": ""}
        return hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()[:16]

    def parquet(self, schema: pa.Schema) -> dict[str, Any]:
        """What `pyarrow.parquet.ParquetWriter` is told about a file of this schema."""
        leaves = {name: leaf_paths(schema.field(name)) for name in schema.names}
        codecs = {path: self.codecs.get(name, self.codec) for name, paths in leaves.items() for path in paths}
        return {
            "compression": {path: "none" if codec == "uncompressed" else codec for path, codec in codecs.items()},
            "use_dictionary": [path for name, paths in leaves.items() if name not in self.plain for path in paths],
            "data_page_size": self.page_bytes,
            "dictionary_pagesize_limit": self.dictionary_bytes,
        }


def leaf_paths(field: pa.Field, above: str = "") -> Sequence[str]:
    """Names of a field's column chunks in a Parquet file.

    Example:
        >>> leaf_paths(pa.field("tags", pa.list_(pa.int64())))
        ['tags.list.element']
    """
    path, kind = above + field.name, field.type
    if is_list(kind):
        return leaf_paths(pa.field("element", kind.value_type), f"{path}.list.")
    if pa.types.is_map(kind):
        parts = (pa.field("key", kind.key_type), pa.field("value", kind.item_type))
        return [leaf for part in parts for leaf in leaf_paths(part, f"{path}.key_value.")]
    if pa.types.is_struct(kind):
        return [leaf for part in kind for leaf in leaf_paths(part, f"{path}.")]
    return [path]

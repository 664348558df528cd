"""The layout of a table's files, stored in the table's properties for every writer."""

import hashlib
import json
from collections.abc import Collection, Mapping, Sequence
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
"""Prefix of properties that Iceberg does not define. Other engines keep and ignore them."""


class Layout(BaseModel, frozen=True, extra="forbid"):
    """How rows become files, apart from the order of the table's columns."""

    codec: str = "zstd"
    """Compression of columns without an entry in `codecs`."""
    codecs: Mapping[str, str] = {}
    """Column -> compression."""
    first: tuple[str, ...] = ()
    """Columns written first in the files, adjacent to each other. The table's schema keeps its own order."""
    plain: tuple[str, ...] = ()
    """Columns written without a dictionary."""
    row_group_rows: PositiveInt = 65_536
    """Rows of a row group."""
    file_rows: PositiveInt = 262_144
    """Rows held in memory while writing; a day with more rows becomes several files."""
    page_bytes: PositiveInt = 1_048_576
    """Size of a data page before compression."""
    dictionary_bytes: PositiveInt = 2_097_152
    """A column chunk stops using a dictionary that grows beyond this."""
    order_by: tuple[str, ...] = ()
    """Columns that each file's rows are sorted by, such as a session."""
    gap_bytes: NonNegativeInt = 1_310_720
    """On an object store, columns with at most this many bytes between them are read together. 1.25 MiB, as in the
    paper: a store that answers in 1.5 ms and sends 700 MB/s sends as much while another read would only begin."""

    @model_validator(mode="after")
    def _known_codecs(self) -> "Layout":
        for where, codec in {"codec": self.codec, **self.codecs}.items():
            if codec not in CODECS:
                raise ValueError(f"codec of '{where}': expected one of {', '.join(CODECS)}, got '{codec}'.")
        return self

    def properties(self) -> dict[str, str]:
        """Encodes the layout as table properties. `of` decodes them."""
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
        """Decodes the layout from a table's properties. Missing settings come from `defaults`.

        Raises:
            StorageError: If a property has an invalid value.
        """
        keys = {"codec": CODEC, "row_group_rows": ROW_GROUP_ROWS, "page_bytes": PAGE_BYTES}
        keys |= {"dictionary_bytes": DICTIONARY_BYTES, "file_rows": f"{OWN}file-rows", "gap_bytes": f"{OWN}gap-bytes"}
        values: dict[str, Any] = {name: properties[key] for name, key in keys.items() if key in properties}
        values["codec"] = values.get("codec", defaults.codec).lower()
        if values["codec"] not in CODECS:  # written by another engine
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
                "layout in the table's properties", "values that `flows.layout` writes",
                found.removeprefix("Value error, ").rstrip("."),
                "Correct the property, or apply a layout with `flows.layout`.",
            ) from error  # fmt: skip

    @staticmethod
    def gap_of(properties: Mapping[str, str]) -> int:
        """Decodes `gap_bytes`, the only setting that readers need."""
        given = properties.get(f"{OWN}gap-bytes", "")
        return int(given) if given.isdecimal() else Layout().gap_bytes

    def in_order(self, names: Sequence[str]) -> list[str]:
        """Puts a table's columns into the order of its files."""
        known = set(names)
        return list(dict.fromkeys([*(name for name in self.first if name in known), *names]))

    @property
    def mark(self) -> str:
        """Hash of the settings that shape files. Added columns do not change it."""
        settings = self.properties() | {f"{OWN}gap-bytes": ""}
        return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]

    def parquet(self, schema: pa.Schema, plain: Collection[str] = ()) -> dict[str, Any]:
        """Returns the arguments of `pyarrow.parquet.ParquetWriter` for a file of this schema.

        Args:
            plain: Further columns to write without a dictionary.
        """
        leaves = {name: leaf_paths(schema.field(name)) for name in schema.names}
        codecs = {path: self.codecs.get(name, self.codec) for name, paths in leaves.items() for path in paths}
        return {
            "compression": {path: "none" if codec == "uncompressed" else codec for path, codec in codecs.items()},
            "use_dictionary": [
                path for name, paths in leaves.items() if name not in {*self.plain, *plain} for path in paths
            ],
            "data_page_size": self.page_bytes,
            "dictionary_pagesize_limit": self.dictionary_bytes,
        }


def leaf_paths(field: pa.Field, above: str = "") -> Sequence[str]:
    """Returns the names of a field's column chunks in a Parquet file.

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

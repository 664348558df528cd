"""Arrays as Arrow record batches and back. A record has one row, and each array is a list in a column of its name."""

from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa

from pipeline.preprocessing.epoch.batches import CHUNK_ARRAYS, iterate_chunks
from pipeline.preprocessing.epoch.memory import Arrays

TYPES = ("float32", "float64", "int32", "int64")
EMPTY = pa.schema([])


def to_record(arrays: Arrays) -> pa.RecordBatch:
    """Returns arrays as a record batch without copying them. A second dimension stands in the column's metadata.

    Example:
        >>> record = to_record({"dense": np.ones((3, 2), np.float32)})
        >>> from_record(record)["dense"].shape
        (3, 2)
    """
    fields, columns = [], []
    for name, array in arrays.items():
        flat = np.ascontiguousarray(array).reshape(-1)
        values = pa.Array.from_buffers(pa.from_numpy_dtype(flat.dtype), len(flat), [None, pa.py_buffer(flat)])
        columns.append(pa.LargeListArray.from_arrays(pa.array([0, len(flat)], pa.int64()), values))
        width = {"width": str(array.shape[1])} if array.ndim == 2 else None
        fields.append(pa.field(name, columns[-1].type, metadata=width))
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def from_record(record: pa.RecordBatch) -> Arrays:
    """Returns the arrays of a record batch, as aligned copies.

    Raises:
        ValueError: If the record is not one that `to_record` makes.
    """
    found = {}
    for field, column in zip(record.schema, record.columns, strict=True):
        if not pa.types.is_large_list(column.type) or str(column.type.value_type) not in _ARROW:
            raise ValueError(f"a column of type {column.type}")
        if len(column) != 1 or column.null_count or column.flatten().null_count:
            raise ValueError(f"{len(column)} rows or nulls in column '{field.name}'")
        array = np.array(column.flatten().to_numpy(zero_copy_only=True))
        width = int((field.metadata or {}).get(b"width", b"0"))
        if b"width" in (field.metadata or {}):
            array = array.reshape(-1, width) if width else array.reshape(_rows(record), 0)
        found[field.name] = array
    return found


_ARROW = {str(pa.from_numpy_dtype(name)) for name in TYPES}


def _rows(record: pa.RecordBatch) -> int:
    """Returns the rows of an array without columns: those of the labels beside it."""
    return len(record.column("labels").flatten())


def chunk_records(split: Arrays) -> Iterator[pa.RecordBatch]:
    """Yields the chunks of a split as records. All have equal columns."""
    for chunk in iterate_chunks(split):
        yield to_record({name: chunk[name] for name in CHUNK_ARRAYS if name in chunk})


def join_chunks(records: Iterable[pa.RecordBatch]) -> Arrays:
    """Returns the split whose chunks the records hold.

    Raises:
        ValueError: If a record is not one that `chunk_records` makes.
    """
    found = {}
    for number, record in enumerate(records):
        for name, array in from_record(record).items():
            if name not in CHUNK_ARRAYS:
                raise ValueError(f"an array '{name}'")
            found[f"{number}.{name}"] = array
    return found

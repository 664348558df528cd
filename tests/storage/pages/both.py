"""Reads a file by our pages and by pyarrow."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from storage.pages.columns import read_columns
from storage.snapshot.parquet import READ_OPTIONS


def read_both(path: Path, batch_rows: int, columns: tuple[str, ...] = ("ids", "number")) -> Iterator[tuple[Any, Any]]:
    """Yields the batches of `read_columns`, and those of pyarrow."""
    with pa.memory_map(str(path)) as data, pq.ParquetFile(str(path), **READ_OPTIONS) as file:
        for group in range(file.num_row_groups):
            batches = read_columns(file, data, group, columns, batch_rows)
            expected = file.iter_batches(batch_rows, [group], list(columns), use_threads=False)
            yield from zip(batches, expected, strict=True)

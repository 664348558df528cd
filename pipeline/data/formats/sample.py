"""Chooses a part of files, spread evenly over them, for a look that takes as long whatever rows there are."""

import math
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from pipeline.data.formats.csv import CODECS
from pipeline.data.formats.files import SourceFile, address_of, stamp
from storage.layout.columns import spread
from storage.names import Format
from storage.objects import open_file

MOST_FILES = 512
"""Files that are opened, evenly spread over all."""
DECODED = 10
"""Rows of chosen row groups for each row that is kept. More row groups cover more days."""
FEWEST_ROWS = 100_000
"""Rows of Parquet that are looked at, however many columns they have."""
VALUE_BYTES = 6
"""Bytes of a value in text, about."""
PACKED = 4
"""Times that text is longer than its compressed file, about."""
FILES_AT_A_TIME = 8
"""Footers read concurrently. On an object store each takes a round trip or two."""


class Part(NamedTuple):
    """What is read of a file."""

    groups: tuple[int, ...] = ()
    """Row groups of a Parquet file."""
    every: int = 1
    """Of their rows, each so-many-th."""
    share: float = 1.0
    """Share of the bytes of a file of text, from its start."""


class Sample(NamedTuple):
    """Parts of some files."""

    parts: Mapping[SourceFile, Part]
    scale: float
    """Rows of all files for each row of the sample, about."""


def choose_sample(
    forms: Mapping[SourceFile, Format], values: int, properties: Mapping[str, str] = MappingProxyType({})
) -> Sample | None:
    """Chooses a part of files with about so many values. None: all files are to be read as a whole.

    That is so if there is not much more, if they are of several formats, or if a footer cannot be read: who reads the
    file says what is wrong with it. Rows of Parquet are spread over all row groups. Of text the start is read: no other
    part can be read alone.

    Args:
        forms: File -> format, not auto. In their order.
        properties: Access to object stores: `warehouse.catalog`.
    """
    files = list(forms)
    if len({*forms.values()}) != 1:
        return None
    if forms[files[0]] == "parquet":
        return _of_groups(files, values, properties)
    sizes = {file: stamp(file)[1] * _length(file) for file in files}
    wanted, whole = values * VALUE_BYTES, sum(sizes.values())
    if whole <= wanted:
        return None
    if forms[files[0]] == "avro":
        chosen, share = spread(files, max(1, len(files) * wanted // whole)), 1.0
    else:
        chosen = spread(files, MOST_FILES)
        share = min(1.0, wanted / sum(sizes[file] for file in chosen))
    read = share * sum(sizes[file] for file in chosen)
    return Sample({file: Part(share=share) for file in chosen}, whole / max(1.0, read))


def _length(file: SourceFile) -> int:
    """How many bytes of text a byte of the file stands for, about."""
    return PACKED if file.name.rpartition(".")[2].lower() in CODECS else 1


def _of_groups(files: Sequence[SourceFile], values: int, properties: Mapping[str, str]) -> Sample | None:
    opened = spread(files, MOST_FILES)
    try:
        with ThreadPoolExecutor(FILES_AT_A_TIME) as pool:
            footers = list(pool.map(lambda file: _read_footer(file, properties), opened))
    except (pa.ArrowException, OSError):
        return None
    every = [
        (file, number, footer.row_group(number).num_rows)
        for file, footer in zip(opened, footers, strict=True)
        for number in range(footer.num_row_groups)
    ]
    known = sum(rows for *_, rows in every)
    wanted = max(FEWEST_ROWS, values // max(1, footers[0].num_columns))
    whole = known * len(files) / len(opened)
    if whole <= 1.5 * wanted:
        return None
    chosen = spread(every, math.ceil(len(every) * min(1.0, DECODED * wanted / known)))
    step = max(1, sum(rows for *_, rows in chosen) // wanted)
    groups: dict[SourceFile, list[int]] = {}
    for file, number, _ in chosen:
        groups.setdefault(file, []).append(number)
    kept = sum(math.ceil(rows / step) for *_, rows in chosen)
    return Sample({file: Part(tuple(of), step) for file, of in groups.items()}, whole / kept)


def _read_footer(file: SourceFile, properties: Mapping[str, str]) -> pq.FileMetaData:
    with open_file(address_of(file), properties) as opened:
        return pq.read_metadata(opened)


def copy_groups(file: SourceFile, part: Part, copy: Path, properties: Mapping[str, str]) -> int:
    """Copies a part of a Parquet file. Returns its rows.

    Raises:
        pa.ArrowException: If the file cannot be read.
    """
    rows = 0
    with (
        open_file(address_of(file), properties) as opened,
        pq.ParquetFile(opened, coerce_int96_timestamp_unit="us") as stored,  # as DuckDB reads them
        pq.ParquetWriter(copy, stored.schema_arrow, compression="lz4") as writer,
    ):
        for number in part.groups:
            group = stored.read_row_group(number)
            kept = group.take(pa.array(range(0, group.num_rows, part.every))) if part.every > 1 else group
            writer.write_table(kept)
            rows += kept.num_rows
    return rows

"""Records which columns each run reads of a table, one small file per run, as input for layout proposals."""

import datetime
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from itertools import accumulate
from pathlib import Path
from uuid import uuid4

from pydantic import BaseModel, ValidationError

from storage.artifacts import write_text

STAMP = "%Y%m%d-%H%M%S"
"""Beginning of a record's file name: when it was made, in UTC."""
PERCENTILES = (5, 50, 95)
TRAFFIC = (0.5, 0.8, 0.95)
"""Shares of the bytes read, for the popularity curve."""


class ReadRecord(BaseModel, frozen=True):
    """The columns that a run read from a table, and what that cost."""

    table: str
    by: str
    """The flow that read."""
    at: datetime.datetime
    columns: tuple[str, ...]
    rows: int
    bytes_read: int
    """Compressed bytes of `columns` in the files."""
    bytes_stored: int
    """Compressed bytes of all columns of the same rows."""
    reads: int
    """Contiguous reads of files. Adjacent columns are one."""
    seconds: float
    """Seconds that the workers spent reading and decoding."""
    read_sizes: Mapping[str, int] = {}
    """Power of two -> reads of fewer bytes than that, and of at least half as many."""
    read_percentiles: Mapping[str, int] = {}
    """`5`, `50`, `95` -> bytes that this percentage of the reads stayed below, a power of two."""
    popularity: Mapping[str, float] = {}
    """Share of the bytes that recent runs read -> share of the stored bytes that it came from, popular columns first.
    The runs are those of a week, this one included. The sizes are those of its last day."""


def read_percentiles(sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes that 5, 50 and 95 % of the reads stayed below.

    Example:
        >>> read_percentiles({"64": 90, "4096": 10})
        {'5': 64, '50': 64, '95': 4096}
    """
    bounds = sorted((int(size), count) for size, count in sizes.items())
    sums, total = list(accumulate(count for _, count in bounds)), sum(sizes.values())
    return {f"{share}": bounds[bisect_left(sums, total * share / 100)][0] for share in PERCENTILES} if total else {}


def traffic_curve(reads: Iterable[tuple[Collection[str], int]], stored: Mapping[str, int]) -> dict[str, float]:
    """Returns share of the traffic -> the least share of the stored bytes that it comes from.

    Args:
        reads: (columns, rows) of each run.
        stored: Column -> its bytes, of all columns.
    Source:
        Zhao et al. 2022, arXiv:2108.09373, section 5: 18 to 39 % of the bytes give 80 % of the traffic.
    Example:
        >>> traffic_curve([(["a"], 9), (["a", "b"], 1)], {"a": 10, "b": 10, "c": 80})
        {'0.5': 0.1, '0.8': 0.1, '0.95': 0.2}
    """
    times = Counter[str]()
    for columns, rows in reads:
        times.update({name: rows for name in columns if name in stored})
    popular = sorted(times, key=lambda name: -times[name])
    bytes_of = list(accumulate(stored[name] for name in popular))
    traffic = list(accumulate(times[name] * stored[name] for name in popular))
    if not traffic or not traffic[-1]:
        return {}
    total = sum(stored.values())
    return {f"{share}": bytes_of[bisect_left(traffic, share * traffic[-1])] / total for share in TRAFFIC}


def record_read(folder: Path, read: ReadRecord) -> None:
    """Adds a run to the records of its table."""
    write_text(
        folder / read.table / f"{read.at.astimezone(datetime.UTC):{STAMP}}-{uuid4().hex[:8]}.json",
        read.model_dump_json() + "\n",
    )


def load_reads(folder: Path, table: str, since: datetime.datetime) -> list[ReadRecord]:
    """Loads the reads of a table since a time, oldest first. Skips files that are not records."""
    found, first = [], f"{since.astimezone(datetime.UTC):{STAMP}}"
    for path in sorted((folder / table).glob("*.json")):
        if path.name[: len(first)] < first:
            continue
        try:
            found.append(ReadRecord.model_validate_json(path.read_bytes()))
        except ValidationError:
            continue
    return [read for read in found if read.at >= since]

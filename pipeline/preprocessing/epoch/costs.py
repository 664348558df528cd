"""Costs: what work took, in worker time and bytes of storage."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import PlainValidator, TypeAdapter

from pipeline.data.joined.reader import Reader

NUMBERS = TypeAdapter(dict[str, int | float])
Numbers = Annotated[Counter[str], PlainValidator(lambda value: Counter(NUMBERS.validate_python(value)))]


@dataclass
class Costs:
    """The cost of some work: worker time in seconds and bytes of storage."""

    read_seconds: float = 0.0
    """Reading, decompressing and decoding columns, and filtering rows."""
    transform_seconds: float = 0.0
    batch_seconds: float = 0.0
    """Collecting rows, shuffling and cutting batches."""
    bytes_read: int = 0
    bytes_stored: int = 0
    """Size of all columns of the row groups, skipped ones too."""
    op_seconds: Numbers = field(default_factory=Counter)
    counts: Numbers = field(default_factory=Counter)
    """Values changed by a declared rule."""
    reads: int = 0
    """Contiguous ranges of files read."""
    read_sizes: Numbers = field(default_factory=Counter)
    """Power of two -> reads of fewer bytes than that."""
    row_groups_skipped: int = 0
    """Row groups without a selected row, of which at most the columns that decide were decoded."""
    cache: Numbers = field(default_factory=Counter)
    """Use of the cache: `hits` and `misses` (columns of row groups), and what `ColumnStore.stats` counts."""

    def add(self, other: "Costs") -> None:
        """Adds the costs of other work."""
        self.read_seconds += other.read_seconds
        self.transform_seconds += other.transform_seconds
        self.batch_seconds += other.batch_seconds
        self.bytes_read += other.bytes_read
        self.bytes_stored += other.bytes_stored
        self.reads += other.reads
        self.read_sizes.update(other.read_sizes)
        self.row_groups_skipped += other.row_groups_skipped
        self.op_seconds.update(other.op_seconds)
        self.counts.update(other.counts)
        self.cache.update(other.cache)

    @contextlib.contextmanager
    def reading(self, reader: Reader) -> Iterator[None]:
        """Adds what a reader reads inside the block."""
        before = reader.bytes_read, reader.bytes_stored, reader.reads, reader.row_groups_skipped
        sizes = Counter(reader.read_sizes)
        yield
        self.bytes_read += reader.bytes_read - before[0]
        self.bytes_stored += reader.bytes_stored - before[1]
        self.reads += reader.reads - before[2]
        self.row_groups_skipped += reader.row_groups_skipped - before[3]
        self.read_sizes.update(reader.read_sizes - sizes)

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> "Costs":
        """Restores costs from `vars(costs)` after a round trip through JSON."""
        return COSTS.validate_python(values)

    @property
    def seconds(self) -> float:
        """Total working time."""
        return self.read_seconds + self.transform_seconds + self.batch_seconds


COSTS = TypeAdapter(Costs)

"""DataSpec: the rows of one dataset and how they are transformed. Counts the rows and fits the plan to them."""

from collections.abc import Callable, Iterator, Sequence

import pyarrow as pa
from pydantic import BaseModel

from pipeline.data.joined.reader import FeatureJoinReader, open_reader
from pipeline.data.joined.source import PinnedSource
from pipeline.data.selection import Selection
from pipeline.transforms.plan.plan import Plan
from storage.config import WarehouseConfig
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse


class DataSpec(BaseModel, frozen=True):
    """Rows and their transforms: everything that a reader in another process needs to know."""

    warehouse: WarehouseConfig
    home: str
    """Folder of the embedded catalog."""
    snapshot: SnapshotRef
    selection: Selection
    plan: Plan
    label: str
    weight: str | None = None
    """Column of row weights."""
    extra: tuple[str, ...] = ()
    """Additional columns, passed through unchanged for evaluation."""
    joined: tuple[PinnedSource, ...] = ()
    """Feature sources of the columns that the table lacks."""
    session: str | None = None
    """Session column: shuffling keeps neighbouring rows with an equal value together."""
    rows: int | None = None
    """Number of selected rows when they were pinned. Each whole pass must read as many. None: unknown."""
    deduplicate: tuple[str, ...] = ()
    """Sparse features that are made and kept once for neighbouring rows of a session while their columns are equal."""
    cache_bytes: int | None = None
    """Bytes of finished columns that are kept below `home` for later reads. None: none are."""

    @property
    def shared(self) -> tuple[int, ...]:
        """Numbers of the deduplicated features among the plan's sparse features."""
        return tuple(i for i, feature in enumerate(self.plan.sparse) if feature.name in self.deduplicate)

    @property
    def columns(self) -> list[str]:
        """Columns to read, without those of the row filter."""
        outcome = [self.label] if self.weight is None else [self.label, self.weight]
        session = [] if self.session is None else [self.session]
        return list(dict.fromkeys([*self.plan.columns, *outcome, *self.extra, *self.selection.key_columns(), *session]))


def count_rows(spec: DataSpec, warehouse: Warehouse) -> int:
    """Counts the rows of a selection.

    Whole days are counted from metadata. Any other selection reads the columns that decide it.
    """
    if spec.selection.exact:
        return warehouse.count_rows(spec.snapshot, spec.selection.days)
    return sum(part.num_rows for part in _read_tables(spec, warehouse, [spec.label]))


def sort_sources(spec: DataSpec, warehouse: Warehouse, say: Callable[[str], object]) -> None:
    """Sorts the feature sources that the rows read as of their time, unless that is done.

    Args:
        say: Gets lines about it.
    """
    reader = open_reader(warehouse, spec.snapshot, spec.columns, spec.selection.expression(), spec.joined)
    if isinstance(reader, FeatureJoinReader):
        reader.sort_sources(say)


def fit_plan(spec: DataSpec, warehouse: Warehouse) -> Plan:
    """Fits the ops of the plan to the selected rows. Reads only the columns that the ops learn from."""
    columns = [name for name in spec.plan.columns if name in spec.plan.fit_columns()]
    return spec.plan.fit(lambda: _read_tables(spec, warehouse, columns or [spec.label]))


def _read_tables(spec: DataSpec, warehouse: Warehouse, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Reads some columns of the selected rows, one row group at a time."""
    wanted = list(dict.fromkeys([*columns, *spec.selection.key_columns()]))
    reader = open_reader(warehouse, spec.snapshot, wanted, spec.selection.expression(), spec.joined)
    for fragment in reader.fragments(spec.selection.days):
        yield reader.read(fragment, spec.selection.choice(fragment))

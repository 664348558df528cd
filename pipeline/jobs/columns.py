"""Warns of columns that a training reads and learns nothing from, and of times that may be of different clocks."""

from collections.abc import Sequence

from pipeline.data.joined.source import FeatureSource, PinnedSource, list_differing_clocks
from pipeline.jobs.console import Logger
from pipeline.preprocessing.dataset import DataSpec
from storage.layout.columns import Footers
from storage.reader import SnapshotRef
from storage.warehouse import Warehouse


def warn_of_columns(spec: DataSpec, warehouse: Warehouse, logger: Logger) -> None:
    """Warns of features that teach a training nothing: missing columns and empty ones."""
    plan, snapshot = spec.plan, spec.snapshot
    if plan.absent:
        names = ", ".join(plan.absent)
        logger.warning("table '%s' lacks %s: read as null (on_missing: default)", snapshot.table, names)
    stored = warehouse.schema(snapshot).names
    columns = [name for name in plan.columns if name in stored]
    search = Footers(warehouse.table(snapshot.table), snapshot).without_values(columns, spec.selection.days)
    if search.columns:
        some = "" if search.files_searched == search.files else f" in {search.files_searched} of {search.files} files"
        logger.warning("coverage 0%s on the training days: %s", some, ", ".join(search.columns))


def warn_of_clocks(joined: Sequence[PinnedSource], snapshot: SnapshotRef, warehouse: Warehouse, logger: Logger) -> None:
    """Warns of feature sources whose times have a zone where those of the rows have none, or the other way round."""
    sources = [FeatureSource(pinned, warehouse) for pinned in joined if pinned.source.time is not None]
    for note in list_differing_clocks(sources, warehouse.schema(snapshot)):
        logger.warning(note)

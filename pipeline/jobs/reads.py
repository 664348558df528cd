"""Records what a run reads of its table. A training needs this much of the layouts, and not the rest."""

import datetime

from pipeline.data.present import newest_day
from pipeline.jobs.workspace import Workspace
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.costs import Costs
from storage.layout.columns import Footers, find_maps
from storage.layout.reads import ReadRecord, load_reads, read_percentiles, record_read, traffic_curve

READS = "reads"
"""Folder below home with records of what runs read."""
POPULARITY_AGE = datetime.timedelta(days=7)
"""Runs that count for the popularity of columns (Zhao et al. 2022, section 7)."""
POPULARITY_FILES = 8
"""Files of a day whose footers tell the sizes of columns."""


def save_read(workspace: Workspace, by: str, spec: DataSpec, rows: int, costs: Costs) -> None:
    """Records what a run read. The layout of its table is proposed from such records."""
    now, table = datetime.datetime.now(datetime.UTC), spec.snapshot.table
    popular: dict[str, float] = {}
    with workspace.best_effort("popularity of the columns"):
        popular = _measure_popularity(workspace, spec, rows, now - POPULARITY_AGE)
    read = ReadRecord(
        table=table, by=by, at=now, columns=tuple(spec.columns), rows=rows, bytes_read=costs.bytes_read,
        bytes_stored=costs.bytes_stored, reads=costs.reads, seconds=costs.read_seconds,
        read_sizes=dict(costs.read_sizes), read_percentiles=read_percentiles(costs.read_sizes),
        popularity=popular,
    )  # fmt: skip
    record_read(workspace.home / READS, read)


def _measure_popularity(workspace: Workspace, spec: DataSpec, rows: int, since: datetime.datetime) -> dict[str, float]:
    """Returns the curve of the runs since a time, and of one that has just read `rows` of `spec`."""
    if not spec.selection.days:
        return {}
    recent = load_reads(workspace.home / READS, spec.snapshot.table, since)
    table = workspace.warehouse.table(spec.snapshot.table)
    day = newest_day(spec.selection.days) or max(spec.selection.days)
    found = Footers(table, spec.snapshot).columns([day], POPULARITY_FILES)
    stored = {name: one.bytes for name, one in found.items()}
    reads = [*((read.columns, read.rows) for read in recent), (spec.columns, rows)]
    maps = find_maps(table, {name for columns, _ in reads for name in columns})
    return traffic_curve([({maps.get(name, name) for name in columns}, count) for columns, count in reads], stored)

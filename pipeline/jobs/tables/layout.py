"""Actions of the layout flow: each a task over one table."""

import datetime
import time
from collections.abc import Sequence
from typing import Any

from prefect import get_run_logger, task
from prefect.cache_policies import NO_CACHE

from pipeline.config import RunConfig, load
from pipeline.jobs.console import Progress
from pipeline.jobs.training.job import alone, own_folder, selected, warehouse_of
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.worker import Costs
from storage.layout.proposal import Proposal, propose
from storage.layout.reads import ReadRecord, load_reads, record_read
from storage.layout.rewrite import (
    RewriteResult,
    days_in_other_layouts,
    days_in_small_files,
    layout_of,
    rewrite_day,
    set_layout,
)
from storage.maintenance import expire, vacuum

READS = "reads"
"""Folder below home: what runs have read."""
Result = dict[str, Any]


def keep_read(config: RunConfig, by: str, spec: DataSpec, rows: int, costs: Costs) -> None:
    """Remembers what a run read, for the layout of its table."""
    now = datetime.datetime.now(datetime.UTC)
    read = ReadRecord(
        table=spec.snapshot.table, by=by, at=now, columns=tuple(spec.columns), rows=rows, bytes_read=costs.bytes_read,
        bytes_stored=costs.bytes_stored, reads=costs.reads, seconds=costs.read_seconds,
    )  # fmt: skip
    record_read(config.home_path / READS, read)


@task(cache_policy=NO_CACHE, task_run_name="propose")
def proposed(
    config: RunConfig, name: str, order_by: Sequence[str], recent_days: float, megabytes_per_second: float
) -> Result:
    """What was read -> a layout. Safe to repeat: it only reads."""
    proposal = _proposal(config, name, order_by, recent_days, megabytes_per_second)
    _tell(proposal)
    return {"status": "ok", "action": "propose", "table": name} | proposal.model_dump(mode="json")


@task(cache_policy=NO_CACHE, task_run_name="apply")
def applied(
    config: RunConfig,
    name: str,
    order_by: Sequence[str],
    recent_days: float,
    megabytes_per_second: float,
    again: bool,
) -> Result:
    """A layout -> days written in it. Safe to repeat: days that are in it are left, each other one is one commit."""
    warehouse, figures = warehouse_of(config), {}
    stands = layout_of(warehouse, name)
    if stands.first and not again and tuple(order_by) in ((), stands.order_by):
        get_run_logger().info("the table has a layout, in which its other days are written; again=true proposes anew")
    else:
        proposal = _proposal(config, name, order_by, recent_days, megabytes_per_second)
        _tell(proposal)
        set_layout(warehouse.table(name), proposal.layout)
        figures = {"before": proposal.before.model_dump(), "after": proposal.after.model_dump()}
    days = days_in_other_layouts(warehouse, warehouse.current(name))
    done = _rewritten(config, name, days)
    chosen = layout_of(warehouse, name).model_dump(mode="json")
    return _account("apply", name, done) | {"layout": chosen} | figures


@task(cache_policy=NO_CACHE, task_run_name="compact")
def compacted(config: RunConfig, name: str) -> Result:
    """Days of many small files -> days of few. Safe to repeat: days that have few are left."""
    warehouse = warehouse_of(config)
    return _account("compact", name, _rewritten(config, name, days_in_small_files(warehouse, warehouse.current(name))))


@task(cache_policy=NO_CACHE, task_run_name="measure")
def measured(config: RunConfig, name: str) -> Result:
    """Reads the config's columns of all days, one thread. Safe to repeat: it only reads."""
    warehouse = warehouse_of(config)
    reference = warehouse.current(name)
    reader = warehouse.reader(reference, _wanted(config, name))
    fragments = reader.fragments()
    total, rows, began = sum(fragment.rows for fragment in fragments), 0, time.perf_counter()
    with Progress(get_run_logger()) as progress:
        for fragment in fragments:
            rows += sum(len(batch) for batch in reader.batches(fragment))
            progress("measure", rows, total)
    seconds = time.perf_counter() - began
    return {
        "status": "ok", "action": "measure", "table": name, "snapshot_id": reference.snapshot_id, "rows": rows,
        "columns": len(reader.columns), "seconds": seconds, "rows_per_second": rows / seconds if seconds else None,
        "bytes_read": reader.bytes_read, "bytes_stored": reader.bytes_stored, "reads": reader.reads,
        "mean_read_bytes": reader.bytes_read / reader.reads if reader.reads else None,
    }  # fmt: skip


@task(cache_policy=NO_CACHE, task_run_name="expire")
def expired(config: RunConfig, name: str, older_than_days: float, dry_run: bool) -> Result:
    """Old snapshots -> none. Safe to repeat: what is gone is gone."""
    done = expire(warehouse_of(config), name, datetime.timedelta(days=older_than_days), dry_run)
    verb = "would expire" if dry_run else "expired"
    get_run_logger().info(
        "%s snapshots %s, %s stay, %s of them for a tag", done.snapshots, verb, done.kept, done.tagged
    )
    return {"status": "ok", "action": "expire", "table": name, "dry_run": dry_run} | done.model_dump()


@task(cache_policy=NO_CACHE, task_run_name="vacuum")
def vacuumed(config: RunConfig, name: str, older_than_hours: float, dry_run: bool) -> Result:
    """Files that no snapshot names -> none. Safe to repeat: what is gone is gone."""
    with alone(config, f"ingest of table '{name}'", get_run_logger()):  # whose files are of no snapshot as yet
        done = vacuum(warehouse_of(config), name, datetime.timedelta(hours=older_than_hours), dry_run)
    verb = "would be deleted; dry_run=false deletes them" if dry_run else "deleted"
    get_run_logger().info("%s files of %s bytes %s", done.files, f"{done.bytes:,}", verb)
    return {"status": "ok", "action": "vacuum", "table": name} | done.model_dump()


def _proposal(
    config: RunConfig, name: str, order_by: Sequence[str], recent_days: float, megabytes_per_second: float
) -> Proposal:
    warehouse = warehouse_of(config)
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=recent_days)
    reads = load_reads(config.home_path / READS, name, since)
    reference, wanted = warehouse.current(name), _wanted(config, name)
    warehouse.reader(reference, list(order_by))  # refuses what is no column of the table
    speed = megabytes_per_second * 1e6
    return propose(warehouse, reference, layout_of(warehouse, name), reads, wanted, order_by, speed)


def _wanted(config: RunConfig, name: str) -> list[str]:
    """Columns of the table that a training of the config reads; all of a table that is not the config's."""
    warehouse = warehouse_of(config)
    there = warehouse.schema(warehouse.current(name)).names
    if name != config.name:
        return there
    read = load(config, {"features.allow_deprecated": True})  # files hold them as long as they are read
    return [column for column in selected(read, None)[1]["train"].columns if column in there]


def _rewritten(config: RunConfig, name: str, days: Sequence[datetime.date]) -> list[RewriteResult]:
    logger, done = get_run_logger(), []
    with (
        alone(config, f"ingest of table '{name}'", logger),
        own_folder(config.home_path / "tmp" / f"layout-{name}") as temporary,
        Progress(logger, "days") as progress,
    ):
        for number, day in enumerate(days):
            progress("rewrite", number, len(days), str(day))
            done.append(rewrite_day(warehouse_of(config), name, day, temporary))
        if days:
            progress("rewrite", len(days), len(days))
    return done


def _account(action: str, name: str, done: Sequence[RewriteResult]) -> Result:
    before, after = ({what: sum(getattr(day, what)[i] for day in done) for what in ("files", "bytes")} for i in (0, 1))
    return {
        "status": "ok" if done else "skipped", "action": action, "table": name, "days": [str(day.day) for day in done],
        "rows": sum(day.rows for day in done), "written_before": before, "written_after": after,
    }  # fmt: skip


def _tell(proposal: Proposal) -> None:
    logger = get_run_logger()
    for what, reason in proposal.reasons.items():
        value = getattr(proposal.layout, what)
        logger.info("%s: %s (%s)", what, value if isinstance(value, int) else f"{len(value)} columns", reason)
    for when, figures in (("before", proposal.before), ("after", proposal.after)):
        logger.info(
            "%s: %s rows/s, %s bytes in %s reads of %s bytes, of %s stored",
            when, f"{figures.rows_per_second:,.0f}", f"{figures.bytes_read:,}", f"{figures.reads:,}",
            f"{figures.mean_read_bytes:,.0f}", f"{figures.bytes_stored:,}",
        )  # fmt: skip

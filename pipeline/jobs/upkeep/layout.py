"""Actions of `flows.layout`, each on one table."""

import datetime
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from pipeline.config import load
from pipeline.jobs.console import step
from pipeline.jobs.reads import READS
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.workspace import Workspace, exclusive_dir
from storage.layout.flatten import add_columns, count_keys, days_with_maps, drop_maps, flattened, refuse_new_keys
from storage.layout.proposal import Proposal, propose
from storage.layout.reads import ReadRecord, load_reads
from storage.layout.rewrite import (
    RewriteResult,
    days_in_other_layouts,
    days_to_compact,
    layout_of,
    rewrite_days,
    set_layout,
)
from storage.reader import SnapshotRef
from storage.snapshot.maintenance import expire, vacuum
from storage.snapshot.writing import write_in_commits

Result = dict[str, Any]


@step("propose")
def propose_layout(
    workspace: Workspace, name: str, order_by: Sequence[str], recent_days: float, megabytes_per_second: float
) -> Result:
    """Recorded reads -> a proposed layout. Safe to repeat: it only reads."""
    proposal = _make_proposal(workspace, name, order_by, recent_days, megabytes_per_second)
    _log_proposal(workspace, proposal)
    return {"status": "ok", "action": "propose", "table": name} | proposal.model_dump(mode="json")


@step("apply")
def apply_layout(
    workspace: Workspace,
    name: str,
    order_by: Sequence[str],
    recent_days: float,
    megabytes_per_second: float,
    force: bool,
) -> Result:
    """A layout -> days rewritten in it. Safe to repeat: days that have it stay."""
    warehouse, figures = workspace.warehouse, {}
    current = layout_of(warehouse, name)
    if current.first and not force and tuple(order_by) in ((), current.order_by):
        workspace.console.log.info(
            "the table has a layout, and its other days are rewritten in it; force=true makes a new proposal"
        )
    else:
        proposal = _make_proposal(workspace, name, order_by, recent_days, megabytes_per_second)
        _log_proposal(workspace, proposal)
        set_layout(warehouse.table(name), proposal.layout)
        figures = {"before": proposal.before.model_dump(), "after": proposal.after.model_dump()}
    days = days_in_other_layouts(warehouse, warehouse.current(name))
    done = _rewrite_days(workspace, name, days)
    chosen = layout_of(warehouse, name).model_dump(mode="json")
    return _summarize("apply", name, done) | {"layout": chosen} | figures


@step("compact")
def compact_table(workspace: Workspace, name: str) -> Result:
    """Days of many small files, or with deleted rows -> days of few. Safe to repeat: other days stay."""
    warehouse = workspace.warehouse
    return _summarize(
        "compact", name, _rewrite_days(workspace, name, days_to_compact(warehouse, warehouse.current(name)))
    )


@step("flatten")
def flatten_table(workspace: Workspace, name: str) -> Result:
    """Maps of features -> a column for each key. Safe to repeat: finished days stay.

    Configs that name keys train the same model before, after and meanwhile. Columns that the config reads come first
    in the files, then those of most rows.
    """
    warehouse = workspace.warehouse
    wanted = workspace.config.features.named_columns()
    read = warehouse.schema(warehouse.current(name), wanted).names
    with workspace.lock(f"ingest of table '{name}'"):  # a later day may have other keys
        with workspace.console.progress() as progress:
            counts = count_keys(warehouse, warehouse.current(name), report=partial(progress, "keys"))
        add_columns(warehouse, name, [*counts, *read])  # a key of the config may have no row
        layout = layout_of(warehouse, name)
        if counts:
            first = dict.fromkeys([*(column for column in read if column in counts), *counts, *layout.first])
            set_layout(warehouse.writable(name), layout.model_copy(update={"first": tuple(first)}))
        days = days_with_maps(warehouse, warehouse.current(name))
        done = _rewrite_locked(workspace, name, days, flattened(warehouse, name), counts)
        dropped = drop_maps(warehouse, name)
    workspace.console.log.info("%s maps are now %s columns", len(dropped), f"{len(counts):,}")
    return _summarize("flatten", name, done) | {"maps": dropped, "columns": len(counts)}


@step("measure")
def measure_reads(workspace: Workspace, name: str) -> Result:
    """Times reading the config's columns of all days in one thread. Safe to repeat: it only reads."""
    warehouse = workspace.warehouse
    reference = warehouse.current(name)
    reader = warehouse.reader(reference, _select_columns(workspace, name))
    fragments = reader.fragments()
    total, rows, began = sum(fragment.rows for fragment in fragments), 0, time.perf_counter()
    with workspace.console.progress() as progress:
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


@step("expire")
def expire_snapshots(workspace: Workspace, name: str, older_than_days: float, dry_run: bool) -> Result:
    """Expires old snapshots. Safe to repeat."""
    done = expire(workspace.warehouse, name, datetime.timedelta(days=older_than_days), dry_run)
    verb = "would expire" if dry_run else "expired"
    workspace.console.log.info(
        "%s snapshots %s, %s stay, %s of them for a tag", done.snapshots, verb, done.kept, done.tagged
    )
    return {"status": "ok", "action": "expire", "table": name, "dry_run": dry_run} | done.model_dump()


@step("vacuum")
def vacuum_table(workspace: Workspace, name: str, older_than_hours: float, dry_run: bool) -> Result:
    """Deletes files that no snapshot names. Safe to repeat."""
    with workspace.lock(f"ingest of table '{name}'"):  # an ingest's files belong to no snapshot yet
        done = vacuum(workspace.warehouse, name, datetime.timedelta(hours=older_than_hours), dry_run)
    verb = "would be deleted; dry_run=false deletes them" if dry_run else "deleted"
    workspace.console.log.info("%s files of %s bytes %s", done.files, f"{done.bytes:,}", verb)
    return {"status": "ok", "action": "vacuum", "table": name} | done.model_dump()


def _make_proposal(
    workspace: Workspace, name: str, order_by: Sequence[str], recent_days: float, megabytes_per_second: float
) -> Proposal:
    warehouse = workspace.warehouse
    reads = recent_reads(workspace, name, recent_days)
    reference, wanted = warehouse.current(name), _select_columns(workspace, name)
    warehouse.reader(reference, list(order_by))  # refuses names that are not columns of the table
    speed = megabytes_per_second * 1e6
    return propose(warehouse, reference, layout_of(warehouse, name), reads, wanted, order_by, speed)


def recent_reads(workspace: Workspace, name: str, days: float) -> list[ReadRecord]:
    """Returns what runs of the last days read of a table."""
    since = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
    return load_reads(workspace.home / READS, name, since)


def _select_columns(workspace: Workspace, name: str) -> list[str]:
    """Returns the columns that a training of the config reads. Another table than the config's: all columns."""
    config = workspace.config
    warehouse = workspace.warehouse
    if name != config.name:
        return warehouse.schema(warehouse.current(name)).names
    read = load(config, {"features.allow_deprecated": True})  # deprecated columns are still read
    columns = resolve_dataset(workspace.with_config(read), None)[1]["train"].columns
    there = warehouse.schema(warehouse.current(name), columns).names
    return [column for column in columns if column in there]


def _rewrite_days(workspace: Workspace, name: str, days: Sequence[datetime.date]) -> list[RewriteResult]:
    with workspace.lock(f"ingest of table '{name}'"):
        return _rewrite_locked(workspace, name, days)


def _rewrite_locked(
    workspace: Workspace,
    name: str,
    days: Sequence[datetime.date],
    columns: Sequence[str] | None = None,
    keys: Mapping[str, int] | None = None,
) -> list[RewriteResult]:
    """Rewrites days.

    Args:
        columns: Columns to write. None: all.
        keys: Columns for all keys of the table's maps, if they are flattened. None: they stay.
    """
    warehouse, done = workspace.warehouse, list[RewriteResult]()
    numbers, rows = {day: number for number, day in enumerate(days)}, warehouse.day_rows(warehouse.current(name))

    with (
        exclusive_dir(workspace.home / "tmp" / f"layout-{name}") as temporary,
        workspace.console.progress("days") as progress,
    ):

        def begin(reference: SnapshotRef, day: datetime.date) -> None:
            progress("rewrite", numbers[day], len(days), str(day))
            if keys is not None:
                refuse_new_keys(warehouse, reference, day, keys)

        def rewrite(group: list[datetime.date]) -> None:
            done.extend(rewrite_days(warehouse, name, group, temporary, columns, begin))

        write_in_commits(days, rows.__getitem__, rewrite)
        if days:
            progress("rewrite", len(days), len(days))
    return done


def _summarize(action: str, name: str, done: Sequence[RewriteResult]) -> Result:
    before, after = ({what: sum(getattr(day, what)[i] for day in done) for what in ("files", "bytes")} for i in (0, 1))
    return {
        "status": "ok" if done else "skipped", "action": action, "table": name, "days": [str(day.day) for day in done],
        "rows": sum(day.rows for day in done), "written_before": before, "written_after": after,
    }  # fmt: skip


def _log_proposal(workspace: Workspace, proposal: Proposal) -> None:
    logger = workspace.console.log
    for what, reason in proposal.reasons.items():
        value = getattr(proposal.layout, what)
        logger.info("%s: %s (%s)", what, value if isinstance(value, int) else f"{len(value)} columns", reason)
    for when, figures in (("before", proposal.before), ("after", proposal.after)):
        logger.info(
            "%s: %s rows/s, %s bytes in %s reads of %s bytes, of %s stored",
            when, f"{figures.rows_per_second:,.0f}", f"{figures.bytes_read:,}", f"{figures.reads:,}",
            f"{figures.mean_read_bytes:,.0f}", f"{figures.bytes_stored:,}",
        )  # fmt: skip


def change_layout(workspace: Workspace, action: str, name: str, options: dict[str, Any]) -> Result:
    """Runs one action of `flows.layout` on a table.

    Args:
        action: propose, apply, measure, compact, flatten, expire or vacuum.
        name: Table of the warehouse.
        options: Parameters of the flow by name.
    """
    proposal = (options["order_by"], options["recent_days"], options["megabytes_per_second"])
    match action:
        case "propose":
            return propose_layout(workspace, name, *proposal)
        case "apply":
            return apply_layout(workspace, name, *proposal, options["force"])
        case "measure":
            return measure_reads(workspace, name)
        case "compact":
            return compact_table(workspace, name)
        case "flatten":
            return flatten_table(workspace, name)
        case "expire":
            return expire_snapshots(workspace, name, options["older_than_days"], options["dry_run"])
        case _:
            return vacuum_table(workspace, name, options["older_than_hours"], options["dry_run"])

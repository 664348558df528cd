"""Measures how a table's features could be stored and read, one change at a time."""

from collections import Counter
from typing import Any
from uuid import uuid4

import pyarrow as pa

from pipeline.config import load
from pipeline.errors import ConfigError
from pipeline.jobs.console import step
from pipeline.jobs.training.job import resolve_dataset
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.study.layout.ladder import StepStats, measure_ladder, take_sample
from pipeline.transforms.column import Column
from pipeline.transforms.plan.plan import Plan
from storage.layout.proposal import popularity
from storage.layout.reads import ReadRecord
from storage.layout.rewrite import layout_of


@step("ladder")
def measure_steps(workspace: Workspace, name: str, reads: list[ReadRecord]) -> dict[str, Any]:
    """A sample of the newest day, stored and read at each step of the ladder. Safe to repeat: its files are removed.

    Raises:
        ConfigError: If the table is not the config's, or the config joins columns that the table does not have.
    """
    config, warehouse = workspace.config, workspace.warehouse
    if name != config.name:
        remedy = "Leave out table=, or give the config of that table."
        raise ConfigError("table", f"the table of the config, '{config.name}'", f"'{name}'", remedy)
    if config.features.sources:
        remedy = "Materialize them with `flows.enrich`, or leave them out of this command's config."
        raise ConfigError(config.features.sources[0].section, "columns of the table", "a source that is joined", remedy)
    whole = workspace.with_config(load(config, {"features.allow_deprecated": True}))  # they are still read
    reference, data = resolve_dataset(whole, None)
    wanted = data["train"].columns
    sample = take_sample(warehouse, reference, wanted)
    plan = data["train"].plan.fit(lambda: [sample.select(data["train"].plan.columns)])
    popular = popularity([*(read.columns for read in reads), wanted], sample.column_names)

    def transform(rows: pa.RecordBatch, fused: bool) -> None:
        if fused:
            plan.apply(rows)
        else:
            _apply_alone(plan, rows)

    with (
        exclusive_dir(workspace.home / "tmp" / f"ladder-{name}") as scratch,
        workspace.console.progress("reads") as progress,
    ):
        table, folder = warehouse.table(name), str(scratch)
        if not warehouse.is_foreign(name):  # measured where the table is
            folder = f"{table.location().rstrip('/')}/data/ladder-{uuid4().hex}"  # a vacuum finds what a kill leaves
        steps = measure_ladder(
            sample, wanted, popular, layout_of(warehouse, name), (table.io, folder), transform,
            lambda done, total: progress("ladder", done, total),
        )  # fmt: skip
    for number, one in enumerate(steps, 1):
        workspace.console.log.info("%s", describe_step(number, one))
    return {
        "status": "ok", "action": "ladder", "table": name, "snapshot_id": reference.snapshot_id,
        "rows": sample.num_rows, "columns": len(sample.column_names), "read": len(wanted), "runs": len(reads),
        "steps": [one.model_dump(mode="json") for one in steps],
    }  # fmt: skip


def describe_step(number: int, one: StepStats) -> str:
    """Formats a step as a line of the log, with the figures of the paper behind ours."""
    worker, storage = one.published
    return (
        f"{number}. {one.adds}: {one.reads:,} reads of about {one.bytes_read / max(one.reads, 1) / 1e3:,.1f} kB, "
        f"worker {one.worker:.2f} x ({worker:.2f} in the paper), storage {one.storage:.2f} x, a disk {one.disk:.2f} x "
        f"({storage:.2f} in the paper)"
    )


def _apply_alone(plan: Plan, rows: pa.RecordBatch) -> None:
    """Runs each op of a plan alone, in passes of its own, and equal ones again."""
    columns: dict[str, Column] = {}
    rows = plan.with_absent_columns(rows)

    def read(name: str) -> Column:
        if name not in columns:
            columns[name] = plan.schedule.read(rows, name, Counter())
        return columns[name]

    for op in plan.ops:
        columns[op.output] = op.apply([read(name) for name in op.inputs], Counter())
    plan.collect({name: read(name) for name in plan.schedule.wanted}, rows.num_rows, Counter())

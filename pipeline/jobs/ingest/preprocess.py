"""Makes one epoch of training batches without a trainer."""

from typing import Any

from pipeline.jobs.columns import warn_of_columns
from pipeline.jobs.console import step
from pipeline.jobs.reads import save_read
from pipeline.jobs.training.job import prepare_rows
from pipeline.jobs.workspace import Workspace, exclusive_dir
from pipeline.preprocessing.drain import drain
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.master import Totals
from pipeline.preprocessing.pool import WORKERS_FILE


@step("preprocess")
def preprocess_epoch(workspace: Workspace, snapshot_id: int | None, epoch: int) -> dict[str, Any]:
    """Makes the batches of one epoch and drops them. Safe to repeat: it only reads."""
    config = workspace.config
    snapshot, data, rows = prepare_rows(workspace, snapshot_id)
    logger = workspace.console.log
    with (
        exclusive_dir(workspace.home / "preprocessing" / config.name) as folder,
        workspace.console.progress() as progress,
    ):
        logger.info("snapshot %s, %s rows", snapshot.snapshot_id, f"{rows:,}")
        warn_of_columns(data, workspace.warehouse, logger)
        if config.preprocessing.executor != "inline":
            logger.info("preprocessing workers: process ids in %s", folder / WORKERS_FILE)

        def show(done: int, totals: Totals) -> None:
            progress("preprocess", done, rows, f"{len(totals.peak_rss_mb)} workers")

        drained = drain(
            data,
            config.preprocessing,
            config.training.batch_rows,
            config.seed,
            folder,
            epoch,
            logger.warning,
            show,
        )
    read = ("read_seconds", "bytes_read", "bytes_stored", "reads", "read_sizes")
    costs = Costs.from_json({name: getattr(drained, name) for name in read})
    save_read(workspace, "preprocess", data, drained.rows, costs)
    return {"status": "ok", "snapshot_id": snapshot.snapshot_id, "plan_hash": data.plan.hash} | drained.model_dump()

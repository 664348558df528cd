"""Runs one epoch of batches without a trainer. Measures the service and hashes the order of its batches."""

import hashlib
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from pipeline.data.batch import Batch
from pipeline.data.position import Position
from pipeline.preprocessing.client import BatchSource, Client, InlineSource, open_remote_source
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.master import Totals
from pipeline.preprocessing.service import Service

ROWS = "rows"
"""Name of the one dataset."""


class DrainResult(BaseModel, frozen=True):
    """The result and the cost of an epoch."""

    rows: int
    batches: int
    order_hash: str
    """SHA-256 over the tensor bytes of all global batches in order. Equal rows in equal order give equal hashes."""
    seconds: float
    """Time since the first worker was ready."""
    rows_per_second: float
    workers: int
    """Largest number of workers at a time."""
    executor: str
    transform_ratio: float | None
    """Worker seconds of (read + decode + transform + batch) / (read + decode)."""
    read_seconds: float
    transform_seconds: float
    batch_seconds: float
    bytes_read: int
    bytes_stored: int
    """Size of all columns of the row groups, skipped ones too."""
    reads: int
    """Contiguous ranges of files read. Adjacent columns are one range."""
    read_sizes: dict[str, int]
    """Power of two -> reads of fewer bytes than that, and of at least half as many."""
    row_groups_skipped: int
    """Row groups without a selected row, of which at most the columns that decide were decoded."""
    op_seconds: dict[str, float]
    """Worker time by op. `arrow` is the conversion from Arrow to plain buffers."""
    counts: dict[str, int]
    """Values changed by a declared rule, by op and feature."""
    cache: dict[str, int]
    """Use of the cache of columns. `hits` and `misses` are columns of row groups, `evicted`, `damaged` and `unwritten`
    entries. Empty: there is none."""
    peak_rss_mb: dict[int, int]
    """By worker."""
    peak_bytes: int
    """Largest number of bytes of rows and batches in memory at a time."""
    restarts: int
    quarantined_rows: int


def drain(
    spec: DataSpec,
    config: PreprocessingConfig,
    batch_rows: int,
    seed: int,
    folder: Path,
    epoch: int = 0,
    warn: Callable[[str], None] = lambda text: None,
    progress: Callable[[int, Totals], None] = lambda rows, totals: None,
) -> DrainResult:
    """Takes all batches of an epoch as a single rank would.

    Args:
        folder: See `Master`.
        warn: See `Master`.
        progress: Called after each batch with the rows so far and the service's totals.
    """
    order, rows, batches = hashlib.sha256(), 0, 0
    begun = time.monotonic()
    with open_source(spec, config, folder, warn) as (source, totals):
        client = Client(source, (ROWS, spec), batch_rows, seed, config.shuffle_window_rows)
        for batch in client.batches(Position(epoch=epoch)):
            hash_batch(batch, order)
            rows += batch.global_rows
            batches += 1
            progress(rows, totals)
        seconds = time.monotonic() - max(begun, totals.ready_at or begun)
    costs = totals.costs
    return DrainResult(
        rows=rows,
        batches=batches,
        order_hash=order.hexdigest(),
        seconds=seconds,
        rows_per_second=rows / seconds,
        workers=totals.most_workers,
        executor=config.executor,
        transform_ratio=costs.seconds / costs.read_seconds if costs.read_seconds else None,
        read_seconds=costs.read_seconds,
        transform_seconds=costs.transform_seconds,
        batch_seconds=costs.batch_seconds,
        bytes_read=costs.bytes_read,
        bytes_stored=costs.bytes_stored,
        reads=costs.reads,
        read_sizes=dict(costs.read_sizes),
        row_groups_skipped=costs.row_groups_skipped,
        op_seconds=dict(costs.op_seconds),
        counts=dict(costs.counts),
        cache=dict(costs.cache),
        peak_rss_mb=totals.peak_rss_mb,
        peak_bytes=totals.peak_bytes,
        restarts=totals.restarts,
        quarantined_rows=totals.quarantined_rows,
    )


@contextmanager
def open_source(
    spec: DataSpec, config: PreprocessingConfig, folder: Path, warn: Callable[[str], None]
) -> Iterator[tuple[BatchSource, Totals]]:
    """Opens the source of batches that a config asks for, and yields it with its totals."""
    if config.executor == "inline":
        inline = InlineSource({ROWS: spec}, config)
        yield inline, inline.master.totals
        return
    with Service({ROWS: spec}, config, folder, warn) as service:
        yield open_remote_source(service.address, config.connections), service.totals


def hash_batch(batch: Batch, order: Any) -> None:
    """Adds the bytes of a global batch to a hash. Shared bags do not change the hash."""
    batch = batch.plain
    sparse = batch.sparse
    of_ids = () if sparse.weights_or_none() is None else (sparse.weights(),)
    for tensor in (batch.dense, batch.labels, batch.weights, sparse.lengths(), sparse.values(), *of_ids):
        order.update(tensor.contiguous().numpy().data)

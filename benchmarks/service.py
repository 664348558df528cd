"""Epochs through the whole preprocessing service. The consumer takes every batch and does nothing with it.

    python -m benchmarks.service --folder /data/wide --workers 2 --epochs 3

Master and consumer share this process, and each worker has its own. The clock runs from the first request, when all
workers are ready, to the last batch.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.wide_table import wide_table
from pipeline.data.position import Position
from pipeline.preprocessing.client import Client, open_remote_source
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.preprocessing.pool import WORKERS_FILE
from pipeline.preprocessing.service import Service

ROWS = "rows"
"""Name of the only selection."""
BATCH_ROWS, WINDOW_ROWS = 4_096, 262_144
START_SECONDS = 120.0
"""Time limit for the start of the workers."""


def main(words: Sequence[str]) -> None:
    """Prints seconds and rows of each epoch as a JSON object on a line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service")
    parser.add_argument("--folder", type=Path, required=True, help="holds the table")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=1, help="the first one gets its memory from the system")
    options = parser.parse_args(words)
    spec = wide_table(options.folder.resolve(), options.rows).spec
    for figures in run_epochs(spec, options.workers, epochs=options.epochs)[0]:
        print(json.dumps(figures))


def run_epochs(
    spec: DataSpec, workers: int, transport: Literal["memory", "network"] = "memory", epochs: int = 1
) -> tuple[list[dict[str, Any]], Costs]:
    """Runs epochs of one service.

    Returns:
        (seconds, rows and bytes of each epoch, and the processor seconds of this process and the workers; what the
        workers counted)
    """
    config = PreprocessingConfig(
        executor="process", workers=workers, shuffle_window_rows=WINDOW_ROWS, transport=transport
    )
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        folder = Path(temporary)
        with Service({ROWS: spec}, config, folder) as service:
            wait_for(workers, folder / WORKERS_FILE)
            source = open_remote_source(service.address, config.connections)
            client = Client(source, (ROWS, spec), BATCH_ROWS, window_rows=WINDOW_ROWS)
            processes = [psutil.Process(), *find_workers(folder / WORKERS_FILE)]
            made = [epoch(client, number, processes) for number in range(epochs)]
            return made, service.totals.costs


def epoch(client: Client, number: int, processes: Sequence[psutil.Process]) -> dict[str, Any]:
    """Takes the batches of an epoch. See `run_epochs`."""
    rows, size, used, start = 0, 0, -count_seconds(processes), time.perf_counter()
    for batch in client.batches(Position(epoch=number)):
        rows += batch.global_rows
        tensors = (batch.dense, batch.labels, batch.weights, batch.sparse.lengths(), batch.sparse.values())
        size += sum(tensor.nbytes for tensor in tensors)
    seconds = time.perf_counter() - start
    return {"seconds": seconds, "rows": rows, "bytes": size, "cpu_seconds": used + count_seconds(processes)}


def find_workers(file: Path) -> list[psutil.Process]:
    """Returns the workers' processes."""
    return [psutil.Process(pid) for pid in json.loads(file.read_text(encoding="utf-8")).values()]


def count_seconds(processes: Sequence[psutil.Process]) -> float:
    """Returns the processor seconds that processes have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def wait_for(workers: int, file: Path) -> None:
    """Waits until this many workers are ready.

    Raises:
        TimeoutError: If they are not ready in time.
    """
    deadline = time.monotonic() + START_SECONDS
    while not file.exists() or len(json.loads(file.read_text(encoding="utf-8"))) < workers:
        if time.monotonic() > deadline:
            raise TimeoutError(f"expected {workers} workers ready within {START_SECONDS:.0f} s, got fewer")
        time.sleep(0.01)


if __name__ == "__main__":
    main(sys.argv[1:])

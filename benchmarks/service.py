"""An epoch through the whole preprocessing service. The consumer takes every batch and does nothing with it.

    python -m benchmarks.service --folder /data/wide --workers 2

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
from typing import Any

from benchmarks.wide_table import WideTable, wide_table
from pipeline.preprocessing.client import Client, ServiceSource
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.master import WORKERS_FILE
from pipeline.preprocessing.service import Service

ROWS = "rows"
"""Name of the only selection."""
BATCH_ROWS, WINDOW_ROWS = 4_096, 262_144
START_SECONDS = 120.0
"""Time limit for the start of the workers."""


def main(words: Sequence[str]) -> None:
    """Prints seconds and rows as one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.service")
    parser.add_argument("--folder", type=Path, required=True, help="holds the table")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args(words)
    print(json.dumps(epoch(wide_table(options.folder.resolve(), options.rows), options.workers)))


def epoch(table: WideTable, workers: int) -> dict[str, Any]:
    """Returns the seconds and the rows of an epoch."""
    config = PreprocessingConfig(executor="process", workers=workers, shuffle_window_rows=WINDOW_ROWS)
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        folder = Path(temporary)
        with Service({ROWS: table.spec}, config, folder) as service:
            wait_for(workers, folder / WORKERS_FILE)
            client = Client(ServiceSource(service.address), (ROWS, table.spec), BATCH_ROWS, window_rows=WINDOW_ROWS)
            start = time.perf_counter()
            rows = sum(batch.global_rows for batch in client.batches())
            seconds = time.perf_counter() - start
    return {"seconds": seconds, "rows": rows}


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

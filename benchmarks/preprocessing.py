"""Speed of a preprocessing worker against plain decoding, NumPy, Polars, DuckDB, and two workers.

    python -m benchmarks.preprocessing --folder /data/wide --json

`decode_ratio` is the time of `ours` over the fastest decode. `ours` reads, decodes, filters, truncates, hashes,
normalises and writes to shared memory. `batched_ratio` is the time of `ours_batched` over the fastest decode.
`ours_batched` also shuffles rows in blocks of 262,144 and cuts batches of 4,096, which is all the work of a worker.
`two_workers_speedup` is the time of an epoch through the whole service with one worker over the time with two.

Every pass runs in its own process on one core, with libraries limited to one thread. Passes of our worker have the
environment of a worker process. A round runs each contestant once, then the service with one worker and with two, on
all cores. Files are in the page cache. The clock starts after a contestant's first unit of work.

The roofline is what this machine's memory and our loops allow: bytes of the decoded columns, a core's read bandwidth,
and nanoseconds of an id that is cut and hashed, copied to a row, and copied to a batch.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq

from benchmarks.contestants import CONTESTANTS
from benchmarks.machine import ROOT, describe_machine, machine, say
from benchmarks.wide_table import READ, WIDE, wide_table
from pipeline.preprocessing.epoch import kernels
from pipeline.preprocessing.epoch.memory import PrivateWriter
from pipeline.preprocessing.epoch.splits import Split
from pipeline.preprocessing.executors import WORKER_ENVIRONMENT
from pipeline.preprocessing.worker import Worker
from pipeline.study.measure.machine import measure_read_speed

DECODERS = tuple(name for name in CONTESTANTS if name.startswith("decode"))
WORKERS = tuple(name for name in CONTESTANTS if name not in DECODERS)
OURS = ("ours", "ours_batched")
ROOFLINE = "roofline"
SERVICES = (1, 2)
"""Workers of the service."""
ROOFLINE_TRIES = 5
PACKAGES = ("numpy", "pyarrow", "polars", "duckdb", "numba")
ONE_THREAD = dict.fromkeys(
    ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS", "POLARS_MAX_THREADS"), "1"
)


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or, on the last line, one JSON object."""
    options = _options(words)
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        if options.contestant:
            one = roofline if options.contestant == ROOFLINE else partial(one_pass, options.contestant)
            print(json.dumps(one(folder, options.rows)))
            return
        say(f"table of {options.rows} rows in {folder}")
        wide_table(folder, options.rows)
        figures = measure(folder, options.rows, options.rounds)
    print(json.dumps(figures) if options.json else as_text(figures))


def _options(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.preprocessing")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--rows", type=int, default=1_000_000, help="rows of the table")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each contestant; the median counts")
    parser.add_argument("--folder", type=Path, help="keeps the table for the next run (2 GB); default: a temporary one")
    parser.add_argument("--contestant", choices=(*DECODERS, *WORKERS, ROOFLINE), help="runs one pass of it only")
    return parser.parse_args(words)


def measure(folder: Path, rows: int, rounds: int) -> dict[str, Any]:
    """Measures all contestants and the service, round by round, and returns the figures.

    Raises:
        RuntimeError: If workers made different numbers of rows or ids.
    """
    facts = machine(PACKAGES)
    passes: dict[str, list[dict[str, Any]]] = {name: [] for name in (*DECODERS, *WORKERS)}
    epochs: dict[int, list[dict[str, Any]]] = {workers: [] for workers in SERVICES}
    for number in range(rounds):
        for name, done in passes.items():
            say(f"round {number + 1} of {rounds}: {name}")
            done.append(run_in_process(name, folder, rows))
        for workers, done in epochs.items():
            say(f"round {number + 1} of {rounds}: service, workers: {workers}")
            done.append(epoch(workers, folder, rows))
    made = {name: (passes[name][0]["rows"], passes[name][0]["ids"]) for name in WORKERS}
    if len(set(made.values())) > 1:
        raise RuntimeError(f"expected the same rows and ids from all workers, got {made}")
    contestants = {name: spread(done) for name, done in passes.items()}
    fastest = min(DECODERS, key=lambda name: contestants[name]["median_seconds"])
    for name, one in contestants.items():
        one["ratio"] = round(one["median_seconds"] / contestants[fastest]["median_seconds"], 3)
        one["peak_mib"] = max(each["peak_mib"] for each in passes[name])
    services = {str(workers): spread(done) for workers, done in epochs.items()}
    say(ROOFLINE)
    limits = run_in_process(ROOFLINE, folder, rows)
    decoded = 1e-9 * limits["decoded_bytes_per_row"] * rows / contestants[fastest]["median_seconds"]
    return {
        "decode_ratio": contestants["ours"]["ratio"],
        "batched_ratio": contestants["ours_batched"]["ratio"],
        "two_workers_speedup": round(services["1"]["median_seconds"] / services["2"]["median_seconds"], 3),
        "fastest_decode": fastest,
        "contestants": contestants,
        "services": services,
        ROOFLINE: limits | {"decoded_gb_per_second": round(decoded, 2)},
        "rows": rows,
        "rounds": rounds,
        "columns": {"lists": WIDE.lists, "numbers": WIDE.numbers, "unread": WIDE.unread},
        "machine": facts,
    }


def spread(passes: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Returns the median, minimum and maximum seconds of some passes."""
    seconds = [one["seconds"] for one in passes]
    return {
        "median_seconds": median(seconds),
        "min_seconds": min(seconds),
        "max_seconds": max(seconds),
        "rows_per_second": round(passes[0]["rows"] / median(seconds)),
    }


def run_in_process(name: str, folder: Path, rows: int) -> dict[str, Any]:
    """Runs one pass of a contestant in its own process."""
    words = ["benchmarks.preprocessing", "--contestant", name]
    return _figures(
        words, folder, rows, ONE_THREAD | (WORKER_ENVIRONMENT if name in (*OURS, ROOFLINE) else {}), _one_core
    )


def epoch(workers: int, folder: Path, rows: int) -> dict[str, Any]:
    """Runs an epoch through the service, in its own processes."""
    return _figures(["benchmarks.service", "--workers", str(workers)], folder, rows)


def _figures(
    words: Sequence[str],
    folder: Path,
    rows: int,
    environment: Mapping[str, str] = MappingProxyType({}),
    first: Callable[[], None] | None = None,
) -> dict[str, Any]:
    command = [sys.executable, "-m", *words, "--folder", str(folder), "--rows", str(rows)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, check=True, preexec_fn=first
    )
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _one_core() -> None:
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def one_pass(name: str, folder: Path, rows: int) -> dict[str, Any]:
    """Times a contestant over the whole table, in this process."""
    units = CONTESTANTS[name](wide_table(folder, rows))
    units[0]()
    count = ids = 0
    start = time.perf_counter()
    for unit in units:
        made = unit()
        count, ids = count + made.rows, ids + made.ids
        del made  # the result is dropped before the next unit starts
    seconds = time.perf_counter() - start
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    return {"seconds": seconds, "rows": count, "ids": ids, "peak_mib": peak}


def roofline(folder: Path, rows: int) -> dict[str, float]:
    """Measures on this process's core what limits a worker; the fastest of some tries counts."""
    table = wide_table(folder, rows)
    decoded = pq.ParquetFile(table.files[0]).read_row_group(0, columns=list(READ), use_threads=False)
    worker = Worker(table.spec, table.warehouse)
    split = Split(fragments=(worker.fragments()[0],))
    batching = CONTESTANTS["ours_batched"](table)[0]
    nanoseconds: dict[str, list[float]] = {name: [] for name in ("hashed", "copied_to_rows", "copied_to_batches")}
    for _ in range(ROOFLINE_TRIES):
        writer = PrivateWriter()
        with timing("append_lists") as copying:
            _, costs = worker.transform_split(split, writer)
        ids = sum(len(array) for name, array in writer.finish().items() if name.endswith(".ids"))
        hashing = sum(seconds for name, seconds in costs.op_seconds.items() if "sigrid_hash" in name)
        nanoseconds["hashed"].append(1e9 * hashing / ids)
        nanoseconds["copied_to_rows"].append(1e9 * sum(copying) / ids)
        with timing("scatter_ids") as copying:
            made = batching()
        nanoseconds["copied_to_batches"].append(1e9 * sum(copying) / made.ids)
    return {
        "decoded_bytes_per_row": round(decoded.nbytes / len(decoded), 1),
        "read_gb_per_second": round(measure_read_speed(), 1),
    } | {f"ns_per_id_{name}": round(min(found), 2) for name, found in nanoseconds.items()}


@contextmanager
def timing(loop: str) -> Iterator[list[float]]:
    """Collects the seconds of each call of a worker's loop inside the block."""
    plain, seconds = getattr(kernels, loop), []

    def call(*arguments: Any) -> Any:
        start = time.perf_counter()
        result = plain(*arguments)
        seconds.append(time.perf_counter() - start)
        return result

    with patch.object(kernels, loop, call):
        yield seconds


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a Markdown table."""
    lines = ["| contestant | median s | min | max | x decode | rows/s | peak MiB |", "|---|---|---|---|---|---|---|"]
    for name, one in figures["contestants"].items():
        lines.append(
            f"| {name} | {one['median_seconds']:.2f} | {one['min_seconds']:.2f} | {one['max_seconds']:.2f} "
            f"| {one['ratio']:.2f} | {one['rows_per_second']:,} | {one['peak_mib']:,} |"
        )
    lines += ["", "| workers of the service | median s | min | max | rows/s |", "|---|---|---|---|---|"]
    for workers, one in figures["services"].items():
        lines.append(
            f"| {workers} | {one['median_seconds']:.2f} | {one['min_seconds']:.2f} | {one['max_seconds']:.2f} "
            f"| {one['rows_per_second']:,} |"
        )
    names = ("decode_ratio", "batched_ratio", "two_workers_speedup")
    lines.append("\n" + ", ".join(f"{name} {figures[name]}" for name in names))
    lines.append(", ".join(f"{name} {value}" for name, value in figures[ROOFLINE].items()))
    lines.append("\n" + describe_machine(figures["machine"]))
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])

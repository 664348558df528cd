"""Speed of our trainer on one CUDA device against plain TorchRec.

    python -m benchmarks.cuda

One process builds all contestants on the same batches, which lie in host memory. A round runs each in turn. Each runs
some steps and then waits for the device, as a training does between two reports. The floor of a step is the largest of
three times: its matrix products at the measured rate of a matrix product, its table rows at the measured memory
bandwidth, and the copy of its batch from page-locked memory.

With `--rows` it also trains from the files of a wide table of so many rows, with `--workers` workers. That table has
the batches of the shape `lists`. `cores_needed` is how many cores would prepare what `ours` trains from memory.
"""

import argparse
import json
import logging
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.machine import machine, say
from benchmarks.trainers import CONTESTANTS, DENSE, SHAPES, StepShape
from benchmarks.training import FILE_WINDOW_ROWS, count_work, run_training
from benchmarks.wide_table import WideTable, wide_table
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.training.config import TrainConfig
from pipeline.training.launch.processes import DETERMINISTIC

BASE = "torchrec_sparse_dist"
DEFAULT = (BASE, "torchrec_sparse_dist_pinned", "ours", "ours_without_graph", "ours_bf16")
PACKAGES = ("torch", "torchrec", "fbgemm-gpu", "numpy")
WARM_UP = 12


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or, on the last line, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cuda")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=DEFAULT)
    parser.add_argument("--shape", choices=SHAPES, default="lists")
    parser.add_argument("--batch-rows", nargs="+", type=int, default=[4_096, 32_768])
    parser.add_argument("--rounds", type=int, default=5, help="passes of each contestant; the median counts")
    parser.add_argument("--steps", type=int, default=50, help="steps of a pass")
    parser.add_argument("--rows", type=int, default=0, help="rows of the table for training from files; 0: none")
    parser.add_argument("--workers", type=int, default=max(1, len(os.sched_getaffinity(0)) - 2))
    options = parser.parse_args(words)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device, and this machine has none")
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    os.environ.setdefault(*DETERMINISTIC)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1, device_id=device)
    rates = measure_rates(device)
    rows = []
    for batch_rows in options.batch_rows:
        shape = replace(SHAPES[options.shape], batch_rows=batch_rows)
        rows += compare(shape, options.contestants, options.rounds, options.steps, device)
        rows[-1]["floors_ms"] = floors(shape, rates)
    figures = {"passes": rows, "rates": rates, "machine": machine(PACKAGES), "device": torch.cuda.get_device_name()}
    dist.destroy_process_group()
    if options.rows:
        with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as folder:
            say(f"table of {options.rows} rows")
            table = wide_table(Path(folder), options.rows)
            figures["files"] = [from_files(table, options.workers, row) for row in rows if row["contestant"] == "ours"]
    print(json.dumps(figures) if options.json else as_text(figures))


def compare(
    shape: StepShape, names: Sequence[str], rounds: int, steps: int, device: torch.device
) -> list[dict[str, Any]]:
    """Times the contestants in turn."""
    running: dict[str, Callable[[], None]] = {}
    for name in names:
        say(f"{shape.batch_rows} rows: building {name}")
        running[name] = CONTESTANTS[name](shape, 0, 1, device)
        for _ in range(WARM_UP):
            running[name]()
        torch.cuda.synchronize()
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(rounds):
        for name, step in running.items():
            torch.use_deterministic_algorithms(name.startswith("ours"), warn_only=True)  # as a training does
            begun = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            seconds[name].append((time.perf_counter() - begun) / steps)
    base = median(seconds[BASE]) if BASE in seconds else None
    return [
        {
            "batch_rows": shape.batch_rows, "contestant": name, "median_ms": 1e3 * median(times),
            "min_ms": 1e3 * min(times), "max_ms": 1e3 * max(times),
            "rows_per_second": round(shape.batch_rows / median(times)),
            "speedup": None if base is None else round(base / median(times), 2),
        }
        for name, times in seconds.items()
    ]  # fmt: skip


def from_files(table: WideTable, workers: int, memory: Mapping[str, Any]) -> dict[str, Any]:
    """Trains an epoch from files.

    Args:
        memory: The same training from batches in memory; see `compare`.
    """
    say(f"{memory['batch_rows']} rows: from files with {workers} workers")
    training = TrainConfig(world_size=1, batch_rows=memory["batch_rows"], device="cuda", checkpoint_every_steps=None)
    preprocessing = PreprocessingConfig(workers=workers, shuffle_window_rows=FILE_WINDOW_ROWS)
    result = run_training(table, training, preprocessing, files=True)
    speed = result["rows_per_second"]
    return {
        "batch_rows": memory["batch_rows"], "workers": workers, "rows_per_second": round(speed),
        "stall_fraction": round(result["stall_fraction"], 3),
        "cores_needed": round(workers * memory["rows_per_second"] / speed),
    }  # fmt: skip


def measure_rates(device: torch.device) -> dict[str, float]:
    """Measures matrix products in GFLOP/s, and reading, and copying to the device, in GB/s."""
    rates = {}
    for name, kind in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        square = torch.randn(4_096, 4_096, device=device).to(kind)
        rates[f"{name}_gflops"] = 2e-9 * 4_096**3 / _seconds(lambda square=square: square @ square)
    there = torch.randn(1 << 28, device=device)
    rates["read_gb_per_second"] = 1e-9 * 4 * (1 << 28) / _seconds(lambda: there.sum())
    here = torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(here, device=device)
    rates["send_gb_per_second"] = 1e-9 * (1 << 26) / _seconds(lambda: target.copy_(here, non_blocking=True))
    return {name: round(rate, 1) for name, rate in rates.items()}


def _seconds(act: Callable[[], Any], times: int = 20) -> float:
    for _ in range(3):
        act()
    torch.cuda.synchronize()
    begun = time.perf_counter()
    for _ in range(times):
        act()
    torch.cuda.synchronize()
    return (time.perf_counter() - begun) / times


def floors(shape: StepShape, rates: dict[str, float]) -> dict[str, float]:
    """Returns the least milliseconds of each part of a step."""
    operations, ids, distinct = count_work(shape)
    # forward: a row for each id, from memory or its cache; update: distinct rows are read and written
    read = (ids + 2 * distinct) * shape.width * 4
    sent = 4 * (ids + shape.batch_rows * (shape.tables + DENSE + 2))
    parts = {f"{name} products": operations / rates[f"{name}_gflops"] for name in ("fp32", "bf16")}
    parts |= {"tables": read / rates["read_gb_per_second"], "copy": sent / rates["send_gb_per_second"]}
    return {name: round(1e-6 * milliseconds, 3) for name, milliseconds in parts.items()}


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as a Markdown table."""
    lines = ["| rows | contestant | median ms | min | max | rows/s | speed-up |", "|---|---|---|---|---|---|---|"]
    for row in figures["passes"]:
        lines.append(
            f"| {row['batch_rows']:,} | `{row['contestant']}` | {row['median_ms']:.2f} | {row['min_ms']:.2f} "
            f"| {row['max_ms']:.2f} | {row['rows_per_second']:,} | {row['speedup']} |"
        )
    lines += [f"{row['batch_rows']:,} rows: {row['floors_ms']}" for row in figures["passes"] if "floors_ms" in row]
    lines += [json.dumps(one) for one in figures.get("files", ())]
    return "\n".join([*lines, figures["device"], json.dumps(figures["rates"]), json.dumps(figures["machine"])])


if __name__ == "__main__":
    main(sys.argv[1:])

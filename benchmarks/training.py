"""Speed of our trainer against plain TorchRec, plain PyTorch, and the limits of the machine.

    python -m benchmarks.training --json

Every pass runs in its own processes, with one rank on all cores or one rank per core, and batches in memory. A round
runs each contestant once. `fp32_speedup` is the time of the better plain TorchRec pipeline over `ours`, and
`bf16_speedup` over `ours_bf16_compiled`, both for the shape `lists`. `slowest_speedup` is the lowest `fp32_speedup` of
all shapes. `files_ratio` is the speed of a rank that trains from files with one worker, over a rank with the same
batches in memory, one thread each. The floor of a step is the time of its matrix products at the measured rate of a
matrix product, plus its table rows at the measured memory bandwidth.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.machine import ROOT, describe_machine, machine, say
from benchmarks.service import wait_for
from benchmarks.trainers import (
    BOTTOM,
    CHOOSING,
    CONTESTANTS,
    DENSE,
    LANES,
    ON_CUDA,
    ON_RANKS,
    SHAPES,
    TOP,
    StepShape,
    batches,
    pairs,
    run_in_processes,
)
from benchmarks.wide_table import WideTable, wide_table
from models.config import DLRMConfig
from pipeline.jobs.training.rank.spec import RankSpec
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.pool import WORKERS_FILE
from pipeline.preprocessing.service import Service
from pipeline.study.measure.machine import measure_machine as ceilings
from pipeline.training.config import TrainConfig
from pipeline.training.launch.processes import Limits, run_ranks

PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "numba", "numpy")
BY_HAND = ("torchrec_base", "torchrec_sparse_dist")
FIRST = "lists"
"""The shape of the targets. All contestants run on it; other shapes run some of them."""
TRIAL = "tiny"
"""A shape that only checks that everything runs."""
SOME = (*BY_HAND, "ours", "ours_bf16_compiled")
RATES = ("fp32_gflops", "bf16_gflops", "read_gb_per_second")
"""Machine ceilings for the floor of a step."""
FILE_STEPS = 140
FILE_WINDOW_ROWS = 65_536
"""Rows read before the first batch. Negligible in a run of hours, and here at most a few percent."""


def main(words: Sequence[str]) -> None:
    """Measures and prints tables or, on the last line, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each contestant; the median counts")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a pass; their median counts")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[name for name in SHAPES if name != TRIAL])
    parser.add_argument("--rows", type=int, default=600_000, help="rows of the table for training from files; 0: none")
    parser.add_argument("--folder", type=Path, help="keeps that table for the next run; default: a temporary one")
    options = parser.parse_args(words)
    figures = measure(options.shapes, options.rounds, options.steps)
    if options.rows:
        with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
            folder = (options.folder or Path(temporary)).resolve()
            say(f"table of {options.rows} rows in {folder}")
            figures |= from_files(wide_table(folder, options.rows), options.rounds)
    print(json.dumps(figures) if options.json else as_text(figures))


def measure(shapes: Sequence[str], rounds: int, steps: int) -> dict[str, Any]:
    """Measures all passes, round by round, and returns the figures."""
    facts, cores = machine(PACKAGES), len(os.sched_getaffinity(0))
    everyone = [name for name in CONTESTANTS if name not in (*LANES, CHOOSING, *ON_CUDA)]  # they have other benchmarks
    runs = [(shape, name, 1) for shape in shapes for name in (everyone if shape == FIRST else SOME)]
    runs += [(FIRST, name, cores) for name in everyone if name in ON_RANKS and FIRST in shapes and cores > 1]
    passes: dict[tuple[str, str, int], list[float]] = {run: [] for run in runs}
    for number in range(rounds):
        for run, done in passes.items():
            shape, name, ranks = run
            say(f"round {number + 1} of {rounds}: {shape}, {name}, ranks: {ranks}")
            done.append(run_in_processes(name, shape, ranks, cores // ranks, steps))
    rows = [
        {
            "shape": shape, "contestant": name, "ranks": ranks, "median_ms": 1e3 * median(done),
            "min_ms": 1e3 * min(done), "max_ms": 1e3 * max(done),
            "rows_per_second": round(SHAPES[shape].batch_rows / median(done)),
        }
        for (shape, name, ranks), done in passes.items()
    ]  # fmt: skip
    speedups = {shape: speedup(rows, shape, "ours") for shape in shapes}
    figures: dict[str, Any] = {"slowest_speedup": min(speedups.values()), "speedups": speedups}
    if FIRST in shapes:
        figures |= {"fp32_speedup": speedups[FIRST], "bf16_speedup": speedup(rows, FIRST, SOME[-1])}
    rates = ceilings(cores).model_dump(include=set(RATES))
    floors = {shape: floor(SHAPES[shape], rates) for shape in shapes}
    return figures | {"passes": rows, "floors_ms": floors, "rates": rates, "rounds": rounds, "machine": facts}


def speedup(rows: Sequence[dict[str, Any]], shape: str, name: str, ranks: int = 1) -> float:
    """Returns the time of the better plain TorchRec pipeline over a contestant's."""
    times = {row["contestant"]: row["median_ms"] for row in rows if (row["shape"], row["ranks"]) == (shape, ranks)}
    return round(min(times[by_hand] for by_hand in BY_HAND) / times[name], 3)


def floor(shape: StepShape, rates: dict[str, float]) -> dict[str, float]:
    """Returns the least milliseconds of a step: matrix products, and table rows read, read again and written.

    The forward pass fetches every distinct row once. The update fetches it once more and writes as much.
    """
    operations, _, distinct = count_work(shape)
    read = distinct * shape.width * 4 * 3
    memory = 1e-6 * read / rates["read_gb_per_second"]
    return {name: round(1e-6 * operations / rates[f"{name}_gflops"] + memory, 2) for name in ("fp32", "bf16")}


def count_work(shape: StepShape) -> tuple[int, int, int]:
    """Returns the floating-point operations of a step's matrix products, its ids, and the distinct rows of them."""
    sizes = [DENSE, *BOTTOM, shape.width], [pairs(shape) + shape.width, *TOP, 1]
    weights = sum(a * b for layers in sizes for a, b in pairwise(layers))
    vectors = shape.tables + 1
    # forward, and backward to inputs and weights; the interaction has one product forward and one backward
    operations = shape.batch_rows * (6 * weights + 4 * vectors * vectors * shape.width)
    [one] = batches(shape, count=1)
    distinct = sum(len(np.unique(one.sparse[name].values().numpy())) for name in one.sparse.keys())  # noqa: SIM118
    return operations, len(one.sparse.values()), distinct


def from_files(table: WideTable, rounds: int) -> dict[str, Any]:
    """Compares one rank and one worker with one rank on batches in memory, and reports the rank's stall."""
    sources: dict[str, list[dict[str, float]]] = {"memory": [], "files": []}
    for number in range(rounds):
        for name, done in sources.items():
            say(f"round {number + 1} of {rounds}: from {name}")
            done.append(_run_training(table, name == "files"))
    speeds = {name: median(one["rows_per_second"] for one in done) for name, done in sources.items()}
    return {
        "files_ratio": round(speeds["files"] / speeds["memory"], 3),
        "files_rows_per_second": {name: round(speed) for name, speed in speeds.items()},
        "files_stall_fraction": round(median(one["stall_fraction"] for one in sources["files"]), 4),
    }


def _run_training(table: WideTable, files: bool) -> dict[str, float]:
    training = TrainConfig(
        world_size=1, batch_rows=4_096, threads_per_rank=1, device="cpu", checkpoint_every_steps=None,
        max_steps=FILE_STEPS,
    )  # fmt: skip
    return run_training(table, training, PreprocessingConfig(workers=1, shuffle_window_rows=FILE_WINDOW_ROWS), files)


def run_training(
    table: WideTable, training: TrainConfig, preprocessing: PreprocessingConfig, files: bool
) -> dict[str, float]:
    """Returns the speed of a training by one rank, from files or on batches that the rank reads before it starts."""
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        folder = Path(temporary)
        spec = RankSpec(
            train=table.spec, valid=None, probe=table.spec, training=training, preprocessing=preprocessing, seed=1,
            model=DLRMConfig(embedding_width=64, bottom_mlp=BOTTOM, top_mlp=TOP), folder=temporary,
        )  # fmt: skip
        if not files:
            return _ranks("benchmarks.memory_rank", spec, folder)
        with Service({"train": table.spec}, preprocessing, folder / "service") as service:
            wait_for(preprocessing.workers, folder / "service" / WORKERS_FILE)
            spec = spec.model_copy(update={"service": service.address})
            return _ranks("pipeline.jobs.training.rank.main", spec, folder)


def _ranks(module: str, spec: RankSpec, folder: Path) -> dict[str, float]:
    return run_ranks(module, spec, folder, 1, 1, Limits(), lambda event: None, ROOT)


def as_text(figures: dict[str, Any]) -> str:
    """Formats the figures as Markdown tables."""
    lines = ["| shape | contestant | ranks | median ms | min | max | rows/s |", "|---|---|---|---|---|---|---|"]
    lines += [
        f"| {row['shape']} | {row['contestant']} | {row['ranks']} | {row['median_ms']:.1f} | {row['min_ms']:.1f} "
        f"| {row['max_ms']:.1f} | {row['rows_per_second']:,} |"
        for row in figures["passes"]
    ]
    lines += ["", "| shape | floor fp32 ms | floor bf16 ms | speedup fp32 |", "|---|---|---|---|"]
    lines += [
        f"| {shape} | {one['fp32']} | {one['bf16']} | {figures['speedups'][shape]} |"
        for shape, one in figures["floors_ms"].items()
    ]
    names = ("fp32_speedup", "bf16_speedup", "slowest_speedup", "files_ratio", "files_stall_fraction")
    lines.append("\n" + ", ".join(f"{name} {figures[name]}" for name in names if name in figures))
    lines.append("\n" + describe_machine(figures["machine"]))
    lines.append(", ".join(f"{name} {value}" for name, value in figures["rates"].items()))
    return "\n".join(lines)


if __name__ == "__main__":
    main(sys.argv[1:])

"""Effect of the cache of columns on the processor time of epochs, of a run of three epochs and of a sweep.

    python -m benchmarks.cache --json

An epoch is all shuffled batches of a wide table, made in one thread and dropped: reading, transforming and batching.
`off` has no cache. `cold` begins with an empty one, `warm` with what `cold` left, and `half` with half of that. `small`
has a cache for half of the bytes, and is its third epoch. `three` is three epochs, `service` is three epochs of one
service with one worker process, as a training has them, and `sweep` is some trials of one epoch, each with another hash
size of one list: with an empty cache, and without any (`three_off`, `service_off`, `sweep_off`).
Every pass runs in its own process, after an epoch that loads compiled loops and files. A round runs each pass once.
"""

import argparse
import hashlib
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.machine import ROOT, as_table, machine, say
from benchmarks.service import run_epochs
from benchmarks.wide_table import SIZE, WideTable, wide_table
from pipeline.data.position import Position
from pipeline.preprocessing.cache.store import COLUMNS, list_files
from pipeline.preprocessing.client import Client, InlineSource
from pipeline.preprocessing.config import PreprocessingConfig
from pipeline.preprocessing.dataset import DataSpec
from pipeline.preprocessing.drain import hash_batch
from pipeline.preprocessing.epoch.costs import Costs
from pipeline.transforms.ops.sparse import SigridHash
from storage.artifacts import remove

PASSES = ("off", "cold", "warm", "half", "small", "three_off", "three", "service_off", "service", "sweep_off", "sweep")
"""In this order: each begins with the cache that the passes before it left."""
RATIOS = {
    "cold": "off", "warm": "off", "half": "off", "small": "off", "three": "three_off", "service": "service_off",
    "sweep": "sweep_off",
}  # fmt: skip
"""Pass -> the pass without a cache that it is compared with."""
BATCH_ROWS, WINDOW_ROWS = 4_096, 262_144
CACHE_BYTES = 1 << 40
PACKAGES = ("pyarrow", "numba", "numpy")


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or, on the last line, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cache")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--rows", type=int, default=262_144, help="rows of the table")
    parser.add_argument("--trials", type=int, default=20, help="trials of the sweep")
    parser.add_argument("--rounds", type=int, default=1, help="passes of each kind; the median counts")
    parser.add_argument("--folder", type=Path, help="keeps the table for the next run; default: a temporary one")
    parser.add_argument("--one", choices=PASSES, help="runs this pass only")
    options = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="dlrm-benchmark-") as temporary:
        folder = (options.folder or Path(temporary)).resolve()
        table = wide_table(folder, options.rows)
        if options.one:
            print(json.dumps(run_pass(table, options.one, options.trials)))
            return
        figures = measure(table, folder, options)
    print(json.dumps(figures) if options.json else as_table("pass", figures["passes"], figures, "_ratio"))


def measure(table: WideTable, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Measures all passes, round by round, and returns the figures."""
    facts = machine(PACKAGES)
    done: dict[str, list[dict[str, Any]]] = {name: [] for name in PASSES}
    for number in range(options.rounds):
        for name, passes in done.items():
            say(f"round {number + 1} of {options.rounds}: {name}")
            passes.append(run_in_process(name, folder, options))
    hashes = {one["order_hash"] for name in ("off", "cold", "warm", "half", "small") for one in done[name]}
    assert len(hashes) == 1, "the cache changed the batches"
    numbers = [key for key in done["off"][0] if key != "order_hash"]
    passes = {name: {key: round(median(one[key] for one in all_), 3) for key in numbers} for name, all_ in done.items()}
    ratios = {
        f"{name}_{key}_ratio": round(passes[name][f"{key}_seconds"] / passes[base][f"{key}_seconds"], 3)
        for name, base in RATIOS.items()
        for key in ("cpu", "wall")
    }
    sizes = {name: getattr(options, name) for name in ("rows", "trials", "rounds")}
    return ratios | {"passes": passes, "machine": facts} | sizes


def run_in_process(name: str, folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Runs one pass in its own process."""
    command = [sys.executable, "-m", "benchmarks.cache", "--one", name, "--folder", str(folder)]
    command += ["--rows", str(options.rows), "--trials", str(options.trials)]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def run_pass(table: WideTable, name: str, trials: int) -> dict[str, Any]:
    """Runs one pass in this process. Returns its processor time, its time, and what its workers counted."""
    folder, plain = table.folder / COLUMNS, table.spec
    files = sorted(list_files(folder)) if folder.exists() else []
    total = sum(file.size for file in files)
    if name in ("cold", "small", "three", "service", "sweep"):
        remove(folder)
    if name == "half":
        for file in files[::2]:
            Path(file.path).unlink()
    limit = total // 2 if name == "small" else CACHE_BYTES
    spec = plain if name.endswith("off") else plain.model_copy(update={"cache_bytes": limit})
    epoch(plain)
    for number in range(2 if name == "small" else 0):
        epoch(spec, number)
    costs, began = Costs(), (time.process_time(), time.perf_counter())
    order = hashlib.sha256()
    made: list[dict[str, Any]] = []
    if name.startswith("service"):
        made, costs = run_epochs(spec, workers=1, epochs=3)
    elif name.startswith("sweep"):
        for trial in range(trials):
            costs.add(epoch(change(spec, trial)))
    else:
        for number in range(3 if name.startswith("three") else 1):
            costs.add(epoch(spec, number))
    cpu, wall = time.process_time() - began[0], time.perf_counter() - began[1]
    if made:  # its workers have processes of their own
        cpu, wall = (sum(one[f"{kind}seconds"] for one in made) for kind in ("cpu_", ""))
    figures: dict[str, Any] = {
        "cpu_seconds": cpu,
        "wall_seconds": wall,
        "read_seconds": costs.read_seconds,
        "transform_seconds": costs.transform_seconds,
        "batch_seconds": costs.batch_seconds,
        "megabytes_read": costs.bytes_read / 1e6,
        "hits": costs.cache["hits"],
        "misses": costs.cache["misses"],
        "evicted": costs.cache["evicted"],
        "cache_megabytes": sum(file.size for file in list_files(folder)) / 1e6 if folder.exists() else 0.0,
    }
    assert figures["cache_megabytes"] * 1e6 <= limit, "the cache is larger than its bound"
    if name in ("off", "cold", "warm", "half", "small"):
        epoch(spec, 0, order)
    return figures | {"order_hash": order.hexdigest()}


def change(spec: DataSpec, trial: int) -> DataSpec:
    """Returns the spec of a trial: another hash size of one list."""
    plan = spec.plan
    hashes = [op for op in plan.ops if isinstance(op, SigridHash)]
    changed = hashes[trial % len(hashes)]
    ops = tuple(op.model_copy(update={"size": SIZE - 1 - trial}) if op is changed else op for op in plan.ops)
    return spec.model_copy(update={"plan": plan.model_copy(update={"ops": ops})})


def epoch(spec: DataSpec, number: int = 0, order: Any = None) -> Costs:
    """Makes the batches of an epoch. Returns what its worker counted.

    Args:
        order: Gets the bytes of the batches.
    """
    source = InlineSource({"rows": spec}, PreprocessingConfig(executor="inline", workers=1))
    client = Client(source, ("rows", spec), BATCH_ROWS, window_rows=WINDOW_ROWS)
    for batch in client.batches(Position(epoch=number)):
        if order is not None:
            hash_batch(batch, order)
    return source.master.totals.costs


if __name__ == "__main__":
    main(sys.argv[1:])

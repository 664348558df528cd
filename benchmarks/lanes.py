"""Time of a step in lanes beside the plain step: the cost of weights that do not depend on the number of ranks.

    python -m benchmarks.lanes --json

Each round runs a pass of every contestant in its own processes, with one rank on all cores and with one rank per core,
on the batches of `benchmarks.training`. A step's time is the median over its steps, then over the rounds.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from benchmarks.machine import machine, say
from benchmarks.trainers import LANES, SHAPES, run_in_processes

PLAIN = "ours"
PACKAGES = ("torch", "torchrec", "numba", "numpy")


def main(words: Sequence[str]) -> None:
    """Measures, and prints a line for each contestant or one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.lanes")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each contestant; the median counts")
    parser.add_argument("--steps", type=int, default=20, help="timed steps of a pass; their median counts")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["lists", "single"])
    options = parser.parse_args(words)
    rows = measure(options.shapes, options.rounds, options.steps)
    if options.json:
        print(json.dumps({"passes": rows, "rounds": options.rounds, "machine": machine(PACKAGES)}))
        return
    for row in rows:
        print("{shape}, {contestant}, ranks: {ranks}: {median_ms:.0f} ms ({min_ms:.0f} - {max_ms:.0f}), "
              "{cost:+.1%}".format(**row))  # fmt: skip


def measure(shapes: Sequence[str], rounds: int, steps: int) -> list[dict[str, Any]]:
    """Returns a row for each shape, contestant and number of ranks, with its time over that of the plain step."""
    cores = len(os.sched_getaffinity(0))
    runs = [(shape, name, ranks) for shape in shapes for ranks in sorted({1, cores}) for name in (PLAIN, *LANES)]
    runs = [run for run in runs if run[1] == PLAIN or int(run[1].rsplit("_", 1)[1]) % run[2] == 0]
    passes: dict[tuple[str, str, int], list[float]] = {run: [] for run in runs}
    for number in range(rounds):
        for run, done in passes.items():
            shape, name, ranks = run
            say(f"round {number + 1} of {rounds}: {shape}, {name}, ranks: {ranks}")
            done.append(run_in_processes(name, shape, ranks, cores // ranks, steps))
    return [
        {
            "shape": shape, "contestant": name, "ranks": ranks, "median_ms": 1e3 * median(done),
            "min_ms": 1e3 * min(done), "max_ms": 1e3 * max(done),
            "cost": median(done) / median(passes[shape, PLAIN, ranks]) - 1.0,
        }
        for (shape, name, ranks), done in passes.items()
    ]  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1:])

"""Time of a step while other processes hold the processors: one thread, all threads, and threads chosen by their time.

    python -m benchmarks.busy

Each round runs a pass of every contestant in a process of its own, on an idle machine and beside processes that only
count, one for each core. A step's time is the median over its steps, then over the rounds.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import Any

from benchmarks.machine import as_table, machine, say
from benchmarks.trainers import CHOOSING, SHAPES, run_in_processes

PACKAGES = ("torch", "torchrec", "numba", "numpy")
COUNT = "while True: pass"


def main(words: Sequence[str]) -> None:
    """Measures and prints a table or, on the last line, one JSON object."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.busy")
    parser.add_argument("--json", action="store_true", help="all figures as one JSON object on the last line")
    parser.add_argument("--rounds", type=int, default=5, help="passes of each contestant; the median counts")
    parser.add_argument("--steps", type=int, default=200, help="timed steps of a pass; their median counts")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["tiny", "small_batch"])
    parser.add_argument("--others", type=int, default=len(os.sched_getaffinity(0)), help="processes that count")
    options = parser.parse_args(words)
    figures = measure(options.shapes, options.rounds, options.steps, options.others)
    print(json.dumps(figures) if options.json else as_table("shape", figures["shapes"], figures, "_cost"))


def measure(shapes: Sequence[str], rounds: int, steps: int, others: int) -> dict[str, Any]:
    """Returns milliseconds of a step, and for each shape the time of chosen threads over that of the better number."""
    facts, cores = machine(PACKAGES), len(os.sched_getaffinity(0))
    contestants = {"one thread": ("ours", 1), f"{cores} threads": ("ours", cores), "chosen": (CHOOSING, cores)}
    passes: dict[str, dict[str, list[float]]] = {shape: {} for shape in shapes}
    for number in range(rounds):
        for shape in shapes:
            for state, count in (("idle", 0), ("busy", others)):
                for name, (contestant, threads) in contestants.items():
                    say(f"round {number + 1} of {rounds}: {shape}, {name}, {state}")
                    with counting(count):
                        seconds = run_in_processes(contestant, shape, 1, threads, steps)
                    passes[shape].setdefault(f"{name}, {state}, ms", []).append(1e3 * seconds)
    rows = {shape: {name: round(median(done), 2) for name, done in one.items()} for shape, one in passes.items()}
    costs = {}
    for shape, row in rows.items():
        for state in ("idle", "busy"):
            *fixed, chosen = (row[f"{name}, {state}, ms"] for name in contestants)
            costs[f"{shape}_{state}_cost"] = round(chosen / min(fixed), 2)
    return {"shapes": rows, **costs, "rounds": rounds, "others": others, "machine": facts}


@contextmanager
def counting(count: int) -> Iterator[None]:
    """Runs processes beside the block that do nothing but use a processor."""
    processes = [subprocess.Popen([sys.executable, "-c", COUNT]) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main(sys.argv[1:])

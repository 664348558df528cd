"""python -m tests.simulation [side=NAME] [first=0] [schedules=1000] [processes=N], or side=NAME seed=N to repeat one.

The sides are preprocessing, checkpoints, tables, registry and days. Without `side`, each has its share of the schedules.
Repeating one prints its trace.
"""

import importlib
import logging
import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tqdm import tqdm

SHARES = {"preprocessing": 0.7848, "checkpoints": 0.1, "registry": 0.095, "tables": 0.02, "days": 0.0002}
"""A schedule of the storage side takes longer, because it writes real files, and one of days half a minute."""
Found = tuple[Counter[str], set[Any], list[tuple[int, str]], Counter[str]]


def play(side: str, seed: int) -> Any:
    """Plays one schedule."""
    logging.disable(logging.WARNING)  # libraries warn of the faults
    return importlib.import_module(f"tests.simulation.{side}").play(seed)


def attempt(side: str, seeds: range) -> Found:
    """Plays some schedules. Returns faults, states, failures and sums."""
    faults, states, failures, sums = Counter[str](), set[Any](), list[tuple[int, str]](), Counter[str]()
    for seed in seeds:
        try:
            found = play(side, seed)
        except Exception as error:
            failures.append((seed, f"{type(error).__name__}: {error}"))
            continue
        faults += found.faults
        states |= found.states
        sums += found.sums
    return faults, states, failures, sums


def explore(side: str, first: int, count: int, pool: ProcessPoolExecutor) -> bool:
    """Plays schedules of one side and reports what they did. Returns whether one failed."""
    faults, states, failures, sums = Counter[str](), set[Any](), list[tuple[int, str]](), Counter[str]()
    begun, size = time.monotonic(), 50 if side == "preprocessing" else 10
    parts = [range(at, min(at + size, first + count)) for at in range(first, first + count, size)]
    played = pool.map(attempt, [side] * len(parts), parts)
    for part in tqdm(played, side, len(parts), unit=f" x {size}", disable=not sys.stderr.isatty()):
        faults += part[0]
        states |= part[1]
        failures += part[2]
        sums += part[3]
    seconds = time.monotonic() - begun
    print(f"{side}: {count} schedules in {seconds:.0f} s, {len(states)} states, {dict(sums)}")
    for kind, times in faults.most_common():
        print(f"  {times:8} {kind}")
    for seed, text in failures:
        print(f"FAILED {text}\n  repeat it: python -m tests.simulation side={side} seed={seed}")
    sys.stdout.flush()
    return bool(failures)


def main(words: list[str]) -> int:
    """Plays schedules, or repeats one."""
    given = dict(word.split("=") for word in words)
    if "seed" in given:
        try:
            print("\n".join(play(given.get("side", "preprocessing"), int(given["seed"])).trace))
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    first, count = int(given.get("first", 0)), int(given.get("schedules", 1000))
    shares = {given["side"]: 1.0} if "side" in given else SHARES
    with ProcessPoolExecutor(int(given.get("processes", len(os.sched_getaffinity(0))))) as pool:
        return max(explore(side, first, max(1, round(share * count)), pool) for side, share in shares.items())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""python -m tests.simulation [first=0] [schedules=1000] [processes=N], or seed=N to repeat one and print its trace."""

import os
import sys
import time
import traceback
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from tests.simulation.preprocessing import play


def attempt(seeds: range) -> tuple[Counter[str], set[Any], list[tuple[int, str]], Counter[str]]:
    """Plays some schedules. Returns faults, states, failures and sums."""
    faults, states, failures, sums = Counter[str](), set[Any](), list[tuple[int, str]](), Counter[str]()
    for seed in seeds:
        try:
            found = play(seed)
        except Exception as error:
            failures.append((seed, f"{type(error).__name__}: {error}"))
            continue
        faults += found.faults
        states |= found.states
        sums += Counter({"schedules": 1, "lost rows": found.lost_rows, "runs again": found.reruns})
    return faults, states, failures, sums


def main(words: list[str]) -> int:
    """Plays schedules and reports what they did."""
    given = {key: int(value) for key, value in (word.split("=") for word in words)}
    if "seed" in given:
        try:
            print("\n".join(play(given["seed"]).trace))
        except Exception:
            traceback.print_exc()
            return 1
        return 0
    first, count = given.get("first", 0), given.get("schedules", 1000)
    faults, states, failures, sums = Counter[str](), set[Any](), list[tuple[int, str]](), Counter[str]()
    begun = time.monotonic()
    with ProcessPoolExecutor(given.get("processes", len(os.sched_getaffinity(0)))) as pool:
        for part in pool.map(
            attempt, [range(at, min(at + 50, first + count)) for at in range(first, first + count, 50)]
        ):
            faults += part[0]
            states |= part[1]
            failures += part[2]
            sums += part[3]
    print(f"{count} schedules in {time.monotonic() - begun:.0f} s, {len(states)} states, {dict(sums)}")
    for kind, times in faults.most_common():
        print(f"  {times:8} {kind}")
    for seed, text in failures:
        print(f"FAILED {text}\n  repeat it: python -m tests.simulation seed={seed}")
    return bool(failures)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
